"""Sources that are read in place: a `Dataset` counts and finds their samples; nothing here knows their bytes.

Each process that writes shards opens the dataset for itself.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from savable_pipeline.convert.model import Files, Input, Part, Reject
from savable_pipeline.convert.names import name_fault, printable
from savable_pipeline.core.wording import listed

if TYPE_CHECKING:
    from savable_pipeline.dataset.dataset import Dataset


@dataclass(frozen=True, slots=True)
class StoreReader:
    """A `SampleReader` of the files at `path`, of any kind that is read in place."""

    path: str

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `ShardError` if the files changed."""
        dataset = _opened(self.path)
        shards, rows = dataset.locate(np.array([sample.record]))
        shard, row = int(shards[0]), int(rows[0])
        return {part.extension: dataset.read(shard, row, part.extension) for part in sample.parts}


@functools.lru_cache(maxsize=1)
def _opened(path: str) -> Dataset:
    from savable_pipeline.dataset.kinds import open_any  # imported here: other sources do without

    return open_any(path)


def close_stores() -> None:
    """Close what was opened last in this process."""
    _opened.cache_clear()


def read_stored(path: Path) -> Input:
    """The samples of files that are read in place, in their order.

    A key that occurs again gets the name of its shard before it.
    """
    place = str(path.resolve())
    close_stores()  # what was opened before may have changed since
    dataset = _opened(place)
    found = Input(dataset.address, StoreReader(place))
    found.digest = hashlib.sha256(repr([(e.name, e.size, e.digest) for e in dataset.entries]).encode()).hexdigest()
    seen: set[str] = set()
    again: list[str] = []
    for i, (shard, row) in enumerate(zip(*(a.tolist() for a in dataset.locate(np.arange(dataset.count))), strict=True)):
        name = dataset.entries[shard].name
        key = _key(dataset.key(shard, row), name)
        if key in seen:
            again.append(key)
            key = f"{name.rpartition('.')[0].replace('.', '_')}/{key}"
        _add(found, Files(key, _parts(dataset, name, shard, row), i), name, again=key in seen)
        seen.add(key)
    if again:
        found.warnings.append(
            f"{len(again)} keys occur again, and got the name of their shard before them: {listed(again)}"
        )
    return found


def _key(key: str, shard: str) -> str:
    """The key as a tar may have it; a row that has none, "web/0.parquet:17", becomes "web/0/17"."""
    if shard.endswith(".tar"):
        return key.removeprefix("./")
    if key.startswith(f"{shard}:"):
        key = f"{shard.rpartition('.')[0]}/{key[len(shard) + 1 :]}"
    return key.replace(".", "_")


def _parts(dataset: Dataset, name: str, shard: int, row: int) -> tuple[Part, ...]:
    return tuple(Part(extension, name, size) for extension, size in sorted(dataset.store.sizes(shard, row).items()))


def _add(found: Input, sample: Files, shard: str, *, again: bool) -> None:
    fault = "duplicate key: twice in one shard" if again else ""
    if not sample.parts:
        fault = fault or "no part: every field of it is null"
    for part in sample.parts:
        fault = fault or name_fault(sample.key, part.extension)
    if fault:
        reason, _, detail = fault.partition(": ")
        where = f"{shard}, record {sample.record}"
        found.rejected.append(Reject(printable(where), printable(sample.key), reason, printable(detail)))
    else:
        found.samples.append(sample)
