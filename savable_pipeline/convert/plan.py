"""Which samples go into which shard: decided from names and sizes alone, before anything is written.

So the bytes of a shard depend on the input and the options only, not on who writes it, when, or how often. A
sample that turns out bad while its shard is written is left out of that shard; nothing moves up.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from savable_pipeline.convert.source import Files, Input, Options
from savable_pipeline.errors import SavableError
from savable_pipeline.tar import BLOCK, padded

MANIFEST = ".nv-meta/savable.convert.json"
_RECORD = 20 * BLOCK  # a tar ends with two empty blocks, and is padded to whole records
_VERSION = 1  # of the plan: to be raised when the same input would give other bytes
_LONGEST_PLAIN_NAME = 100  # a longer name takes two more blocks, as does one that is not ASCII


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder is being converted from, and whether that is done."""

    version: int
    samples: int  # that the input holds, those to be rejected while writing included
    shards: int
    input: str  # sha256 of all names and sizes; of a JSONL file, of its bytes too
    options: Options
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


def make_plan(found: Input, options: Options) -> Plan:
    """Cut an input into shards of consecutive samples, each as full as the options allow."""
    cuts = _cuts(found.samples, options)
    width = max(6, len(str(len(cuts))))
    edges = itertools.pairwise([*cuts, len(found.samples)])
    shards = [PlannedShard(f"{i:0{width}d}.tar", first, last) for i, (first, last) in enumerate(edges)]
    manifest = Manifest(
        version=_VERSION,
        samples=len(found.samples),
        shards=len(shards),
        input=_digest(found),
        options=options,
    )
    return Plan(found, options, shards, manifest)


def tar_bytes(sample: Files) -> int:
    """What a sample takes in a tar, in bytes."""
    return sum(_header_bytes(f"{sample.key}.{part.extension}") + padded(part.size) for part in sample.parts)


def _header_bytes(name: str) -> int:
    plain = len(name) <= _LONGEST_PLAIN_NAME and name.isascii()
    return BLOCK if plain else 3 * BLOCK


def _cuts(samples: list[Files], options: Options) -> list[int]:
    """Where each shard begins."""
    cuts: list[int] = []
    room = 0
    for i, sample in enumerate(samples):
        size = tar_bytes(sample)
        full = bool(cuts) and options.shard_samples is not None and i - cuts[-1] >= options.shard_samples
        if not cuts or full or size > room:
            cuts.append(i)
            room = options.shard_bytes // _RECORD * _RECORD - 2 * BLOCK
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
        raise SavableError(
            f"{target} holds another conversion: {'; '.join(differences)}. Give the same input and options "
            "to go on with it, or another folder, or remove this one"
        )


def _flat(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    del fields["done"]
    return {**fields.pop("options"), **fields, "input": manifest.input[:12]}
