"""Which samples are taken, by parts, keys and splits, and which go into which shard: from names and sizes alone.

So the bytes of a shard depend only on the input and the options, not on the process that writes it. A sample that is
found damaged while its shard is written is left out; no other sample takes its place. The split of a sample depends on
its key and the shares alone: where data are added, a sample stays where it was.

Folders may be classes: the top folder of a sample becomes its part `cls`, the number of that folder's name.

    cat/0.jpg   dog/1.jpg   dog/small/2.jpg      →      cls 0, 1, 1; classes.json: ["cat", "dog"]
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.metadata import CONVERTED, META
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
from savable_pipeline.data.shards.tar_writer import room_in, sample_bytes
from savable_pipeline.data.stores.folder_store import CLASS, SPLITS, class_of
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.tools.convert.model import Files, Input, Options, Part

MANIFEST = CONVERTED
CLASSES = "classes.json"  # names by number
REJECTED = f"{META}/savable.rejected.jsonl"
WORK = f"{META}/savable.convert"  # below it lies what is unfinished
RECORDS = {kind: f"{WORK}/records.{kind}" for kind in ("jsonl", "json", "csv", "tsv")}  # that must be unpacked
VERSION = 2  # of the manifest and the plan: to be raised when either changes; no other is read


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The input and options of the conversion into a folder, and whether it is done."""

    version: int
    samples: int  # of the input, with those that will be rejected while writing
    shards: int
    input: str  # sha256 of all names and sizes; of a JSONL file, of its bytes too
    options: Options
    source_id: str = ""  # where the input lay: see the function; the bytes of the shards do not depend on it
    source: str = ""  # its path or URL, for messages: see `source_name`
    done: bool = False


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """The name of a shard and its samples: from `first` up to, not including, `last`."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An input cut into shards."""

    input: Input
    options: Options
    shards: list[PlannedShard]
    manifest: Manifest


def make_plan(found: Input, options: Options, source: str = "") -> Plan:
    """Cut an input into shards of consecutive samples, each as full as the options allow; `source` is its name.

    With splits the samples are first put in the order of the splits, and no shard is of two.
    """
    groups = split_samples(found.samples, options.split)
    found.samples = [sample for group in groups.values() for sample in group]
    shards: list[PlannedShard] = []
    for split, group in groups.items():
        shards += _shards(group, options, f"{split}-" if split else "", shards[-1].last if shards else 0)
    manifest = Manifest(
        version=VERSION,
        samples=len(found.samples),
        shards=len(shards),
        input=_digest(found),
        options=msgspec.structs.replace(options, key_end=options.key_end or "first"),  # which gives the same bytes
        source_id=found.source_id or source_id(Path(found.root)),
        source=source,
    )
    return Plan(found, options, shards, manifest)


def source_id(source: Path) -> str:
    """A hash of where a source lies and of which folder or file it is: another one put in its place has another."""
    real = source.resolve()
    return hashlib.sha256(f"{real}\0{real.stat().st_ino}".encode("utf-8", "surrogateescape")).hexdigest()[:16]


def source_name(source: Path | str) -> str:
    """The path of a source from / on, or its URL without what belongs to one user: name, password and query."""
    if isinstance(source, Path):
        return str(source.absolute())
    url = urlsplit(source)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def _shards(samples: list[Files], options: Options, prefix: str, first: int) -> list[PlannedShard]:
    """The shards of samples that follow one another from number `first` on."""
    cuts = _cuts(samples, options)
    width = max(6, len(str(len(cuts))))
    edges = itertools.pairwise([*cuts, len(samples)])
    return [
        PlannedShard(f"{prefix}{i:0{width}d}.tar", first + begin, first + end) for i, (begin, end) in enumerate(edges)
    ]


def tar_bytes(sample: Files) -> int:
    """The bytes of a sample in a tar."""
    return sample_bytes(sample.key, {part.extension: part.size for part in sample.parts})


def _cuts(samples: list[Files], options: Options) -> list[int]:
    """Where each shard begins."""
    cuts: list[int] = []
    room = 0
    for i, sample in enumerate(samples):
        size = tar_bytes(sample)
        full = bool(cuts) and options.shard_samples is not None and i - cuts[-1] >= options.shard_samples
        if not cuts or full or size > room:
            cuts.append(i)
            room = room_in(options.shard_bytes)
        room -= size
    return cuts


def _digest(found: Input) -> str:
    digest = hashlib.sha256(found.digest.encode())
    for sample in found.samples:
        parts = "\0".join(f"{part.extension}\0{part.size}" for part in sample.parts)
        digest.update(f"{sample.key}\0{parts}\n".encode())
    for reject in found.rejected:
        digest.update(f"{reject.file}\0{reject.key}\0{reject.reason}\0{reject.detail}\n".encode())
    return digest.hexdigest()


_NUMBERED = re.compile(r"[0-9]+[.]")  # of several files of one field: 0.jpg, 1.jpg
_ALL = 1 << 64


def keep_parts(found: Input, only: tuple[str, ...]) -> None:
    """Leave the parts named in `only`; `jpg` is 0.jpg, 1.jpg, … too. Samples without any are rejected.

    Raises ValueError for a part that no sample has.
    """
    wanted = {name.lower() for name in only}
    there = {part.extension.lower() for sample in found.samples for part in sample.parts}
    unknown = wanted - there - {_plain(name) for name in there}
    if unknown:
        raise ValueError(f"no sample has a part {listed(unknown)}. Use some of {listed(there)}")
    kept = []
    for sample in found.samples:
        parts = tuple(part for part in sample.parts if is_kept(part.extension, wanted))
        if parts:
            kept.append(replace(sample, parts=parts))
        else:
            found.rejected.append(Reject(sample.parts[0].path, sample.key, "no part that is kept"))
    found.samples = kept
    found.texts = found.texts if "json" in wanted else frozenset()


def is_kept(extension: str, only: Collection[str]) -> bool:
    """Whether a part of this name is one of `only`, in small letters; any is where it names none."""
    extension = extension.lower()
    return not only or extension in only or _plain(extension) in only


def _plain(extension: str) -> str:
    return _NUMBERED.sub("", extension, count=1)


def keep_keys(found: Input, keys: Iterable[str]) -> None:
    """Leave the samples with these keys. Raises ValueError for keys that no sample has, and for none."""
    wanted = set(keys)
    if not wanted:
        raise ValueError("keys= is empty. Name the samples to take, or pass None for all")
    found.samples = [sample for sample in found.samples if sample.key in wanted]
    found.rejected = [reject for reject in found.rejected if not reject.key or reject.key in wanted]
    missing = wanted - {sample.key for sample in found.samples} - {reject.key for reject in found.rejected}
    if missing:
        raise ValueError(f"no sample has {len(missing)} of the keys, such as {listed(missing)}")


def split_samples(samples: list[Files], split: tuple[tuple[str, str], ...]) -> dict[str, list[Files]]:
    """The samples of each split, in their order; under "" all of them without a split."""
    if not split:
        return {"": samples}
    ends = [int(end * _ALL) for end in accumulate(Fraction(share) for _, share in split)]
    groups: dict[str, list[Files]] = {name: [] for name, _ in split}
    names = list(groups)
    for sample in samples:
        point = xxh3_64_intdigest(sample.key.encode("utf-8", "surrogateescape"))
        groups[names[next(i for i, end in enumerate(ends) if point < end)]].append(sample)
    return groups


_MEDIA = frozenset((*IMAGE_PARTS, *AUDIO_PARTS, *VIDEO_PARTS))
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
    if "" in names or not 1 < len(names) <= len(samples) // 2 or names <= SPLITS or all(map(_COUNTED.fullmatch, names)):
        return []
    return [
        f"the folders {listed(sorted(names))} look like classes: --classes gives each sample its folder's number "
        "as the part cls, and writes the names to classes.json"
    ]
