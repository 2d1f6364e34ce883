"""Which samples go into which shard: decided from names and sizes alone, before anything is written.

So the bytes of a shard depend only on the input and the options, not on the process that writes it. A sample that is
found damaged while its shard is written is left out; no other sample takes its place.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from savable_pipeline.data.shards.energon_metadata import META
from savable_pipeline.data.shards.tar_writer import room_in, sample_bytes
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.choose import split_samples
from savable_pipeline.tools.convert.model import Files, Input, Options

MANIFEST = f"{META}/savable.convert.json"
WORK = f"{META}/savable.convert"  # below it lies what is unfinished
RECORDS = f"{WORK}/records.jsonl"  # of a source whose records must be unpacked
_VERSION = 1  # of the plan: to be raised when the same input would give other bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The input and options of the conversion into a folder, and whether it is done."""

    version: int
    samples: int  # of the input, with those that will be rejected while writing
    shards: int
    input: str  # sha256 of all names and sizes; of a JSONL file, of its bytes too
    options: Options
    place: str = ""  # where the input lay: see `place_of`; the bytes of the shards do not depend on it
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
        version=_VERSION,
        samples=len(found.samples),
        shards=len(shards),
        input=_digest(found),
        options=options,
        place=found.place or place_of(Path(found.root)),
        source=source,
    )
    return Plan(found, options, shards, manifest)


def place_of(source: Path) -> str:
    """A hash of where a source lies and of which folder or file it is: another one put in its place has another."""
    real = source.resolve()
    return hashlib.sha256(f"{real}\0{real.stat().st_ino}".encode("utf-8", "surrogateescape")).hexdigest()[:16]


def source_name(source: Path | str) -> str:
    """The path of a source from / on, or its URL without what belongs to one user: name, password and query."""
    if isinstance(source, Path):
        return str(source.absolute())
    url = urlsplit(source)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def two_sources(here: Manifest, there: Manifest) -> str:
    """Which source was converted, and which is to be, where they lie at two places; else ""."""
    if not there.place or there.place == here.place:
        return ""
    return f"source {there.source or 'not noted'!r} there, {here.source!r} here"


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


def read_manifest(target: Path) -> Manifest | None:
    """The manifest of a folder, None if it has none. Raises `SavableError` for one that cannot be read."""
    path = target / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise SavableError(f"{path}: not a manifest of this version: {error}; convert into another folder") from error


def check_manifest(target: Path, here: Manifest, there: Manifest) -> None:
    """Raise `SavableError` that lists what differs, unless both are the same conversion."""
    old, new = _flat(there), _flat(here)
    differences = [f"{name} {old[name]!r} there, {new[name]!r} here" for name in new if old[name] != new[name]]
    if differences:
        differences = [text for text in (two_sources(here, there), *differences) if text]
        raise SavableError(
            f"{target} holds another conversion: {'; '.join(differences)}. Give the same input and options "
            "to go on with it, or another folder, or remove this one"
        )


def _flat(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    del fields["done"], fields["place"], fields["source"]
    return {**fields.pop("options"), **fields, "input": manifest.input[:12]}
