"""Folders that are classes: the deepest folder of a sample becomes its part `cls`, the number of that folder's name.

    train/cat/0.jpg   train/dog/1.jpg   val/cat/2.jpg      →      cls 0, 1, 0; classes.json: ["cat", "dog"]

The store numbers them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
from savable_pipeline.data.stores.folder_store import CLASS, class_of
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.tools.convert.model import Files, Input, Part

_MEDIA = frozenset((*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_PARTS))
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "eval"))
_COUNTED = re.compile(r"[0-9._-]{3,}")  # parts of a large dataset, and dates


def add_classes(found: Input) -> None:
    """Give each sample the part `cls`; those in no folder, and with such a part already, are rejected."""
    samples: list[Files] = []
    for sample in found.samples:
        path, name = sample.parts[0].path, class_of(sample.key)
        if not name:
            found.rejected.append(Reject(path, sample.key, "no class", "it lies in no folder"))
        elif any(part.extension.lower() == CLASS for part in sample.parts):
            detail = f"{CLASS}, of a file and of the folder"
            found.rejected.append(Reject(path, sample.key, "two parts with one extension", detail))
        else:
            # (An offset, since no file is to be compared when the conversion goes on: the name is that of the sample.)
            own = Part(CLASS, path, len(str(found.classes.index(name))), offset=0)
            samples.append(replace(sample, parts=tuple(sorted((*sample.parts, own), key=lambda part: part.extension))))
    found.samples = samples


def classes_hint(samples: list[Files]) -> list[str]:
    """What to do where folders look like classes: each sample is one image, sound or film, and no folder is a split."""
    if not all(len(sample.parts) == 1 and sample.parts[0].extension.lower() in _MEDIA for sample in samples):
        return []
    names = {class_of(sample.key) for sample in samples}
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
