"""Folders that are classes: the deepest folder of a sample becomes its part `cls`, the number of that folder's name.

    train/cat/0.jpg   train/dog/1.jpg   val/cat/2.jpg      →      cls 0, 1, 0; classes.json: ["cat", "dog"]

Names are numbered in their order, as torchvision's ImageFolder does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
from savable_pipeline.tools.convert.model import Files, Input, Part, Reject, SampleReader
from savable_pipeline.tools.convert.part_data import Parts

CLASS = "cls"
_MEDIA = frozenset((*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_PARTS))
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "eval"))
_COUNTED = re.compile(r"[0-9._-]{3,}")  # parts of a large dataset, and dates


@dataclass(frozen=True, slots=True)
class WithClasses:
    """A `SampleReader` of samples by `samples`, and of the number of their class."""

    samples: SampleReader
    numbers: Mapping[str, int]

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        self.samples.expect([_without_class(sample) for sample in samples])

    def elsewhere(self, samples: list[Files]) -> WithClasses:
        """See `SampleReader.elsewhere`."""
        return replace(self, samples=self.samples.elsewhere(samples))

    def read(self, sample: Files) -> Parts:
        """The parts of a sample by extension. Raises `SavableError` for files that are not as planned."""
        found = {CLASS: b"%d" % self.numbers[_class_of(sample)], **self.samples.read(_without_class(sample))}
        return {part.extension: found[part.extension] for part in sample.parts}


def add_classes(found: Input) -> None:
    """Give each sample the part `cls`; those in no folder, and with such a part already, are rejected."""
    names = sorted({_class_of(sample) for sample in found.samples} - {""})
    numbers = {name: number for number, name in enumerate(names)}
    samples: list[Files] = []
    for sample in found.samples:
        path, name = sample.parts[0].path, _class_of(sample)
        if not name:
            found.rejected.append(Reject(path, sample.key, "no class", "it lies in no folder"))
        elif any(part.extension.lower() == CLASS for part in sample.parts):
            detail = f"{CLASS}, of a file and of the folder"
            found.rejected.append(Reject(path, sample.key, "two parts with one extension", detail))
        else:
            # (An offset, since no file is to be compared when the conversion goes on: the name is that of the sample.)
            own = Part(CLASS, path, len(str(numbers[name])), offset=0)
            samples.append(replace(sample, parts=tuple(sorted((*sample.parts, own), key=lambda part: part.extension))))
    found.samples, found.classes = samples, names
    found.reader = WithClasses(found.reader, numbers)


def classes_hint(samples: list[Files]) -> list[str]:
    """What to do where folders look like classes: each sample is one image, sound or film, and no folder is a split."""
    if not all(len(sample.parts) == 1 and sample.parts[0].extension.lower() in _MEDIA for sample in samples):
        return []
    names = {_class_of(sample) for sample in samples}
    if (
        "" in names
        or not 1 < len(names) <= len(samples) // 2
        or names <= _SPLITS
        or all(map(_COUNTED.fullmatch, names))
    ):
        return []
    return [
        f"the folders {listed(sorted(names))} look like classes: --classes gives each sample its folder's number "
        "as the part cls, and writes the names to classes.json"
    ]


def _class_of(sample: Files) -> str:
    """The name of the deepest folder of a sample; "" without one."""
    return sample.key.rpartition("/")[0].rpartition("/")[2]


def _without_class(sample: Files) -> Files:
    return replace(sample, parts=tuple(part for part in sample.parts if part.extension != CLASS))
