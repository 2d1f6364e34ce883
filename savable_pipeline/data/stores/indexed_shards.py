"""`IndexedShards`: some shards of an index, with their samples counted through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from savable_pipeline.data.shards.index_file import Layout, ShardIndex, ShardTable
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar_links import links_told
from savable_pipeline.errors import ShardError


class IndexedShards:
    """The shards `names` of an index, None: all. Sample `i` is the `i`-th when they are read one after the other.

    Raises `ShardError` if they hold no sample.
    """

    def __init__(self, index: ShardIndex, index_path: Path, names: Sequence[str] | None, address: str) -> None:
        self.index = index
        self.index_path = index_path
        self.address = address
        numbers = None if names is None else index.numbers(names)
        if numbers is None or np.array_equal(numbers, np.arange(len(index.shards))):
            self.entries = index.shards
            self.numbers = np.arange(len(index.shards))  # in the index, int64 (shards,)
            self.first_rows = index.shard_rows[:-1]  # int64 (shards,)
        else:
            self.entries = index.shards.take(numbers)
            self.numbers = numbers
            self.first_rows = index.shard_rows[numbers]
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])  # int64 (shards + 1,)
        self.count = int(self.firsts[-1])
        if not self.count:
            fault = next((entry.fault for entry in self.entries if entry.fault), "")
            why = fault or "a sample's files are named KEY.EXTENSION in the tar"
            raise ShardError(f"{address}: no sample in {len(self.entries)} shards; {why}")
        self.sizes_in_bytes = self.entries.sizes
        self.mean_bytes = int(self.sizes_in_bytes.sum()) / self.count  # of a sample, with its headers

    def links_told(self) -> str:
        """What to say of links, as far as the index counts them; empty without any."""
        return links_told(self.address, self.index, self.numbers.tolist() if self.index.links else ())

    def shards_of(self, indices: Rows) -> Rows:
        """The shard of each of these samples."""
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def rows(self, shards: Rows, places: Rows) -> Rows:
        """The rows in the index of the samples at these places of these shards."""
        rows: Rows = self.first_rows[shards] + places
        return rows

    def extents(self, first: Rows, last: Rows, shards: Rows) -> tuple[Rows, Rows]:
        """The first byte, and the byte after the last, of runs of samples `first` to `last`, each run in one shard."""
        starts = np.asarray(self.index.starts)
        rows = self.first_rows[shards] - self.firsts[shards]
        ends_shard = last + 1 == self.firsts[shards + 1]
        ends = np.where(ends_shard, self.sizes_in_bytes[shards], starts[np.minimum(rows + last + 1, len(starts) - 1)])
        return starts[rows + first].astype(np.int64), ends.astype(np.int64)

    def layout(self, row: int) -> Layout:
        """The layout of a sample. Raises `ShardError` if the index is damaged."""
        try:
            return self.index.layout(row)
        except IndexError:
            raise self.damaged("a shard") from None

    def place(self, row: int, extension: str) -> tuple[int, int]:
        """Offset and size in bytes of one part of a sample. Raises KeyError without the part."""
        layout = self.layout(row)
        member = layout.position.get(extension)
        if member is None:
            member = layout.position[find_part(extension, layout.position)]
        return self.index.place(row, member, layout)

    def offset(self, shard: int, row: int) -> int:
        """The offset in bytes of a sample's first header in its shard."""
        return self.index.starts[row]

    def extensions(self, shard: int, row: int) -> list[str]:
        """The extensions of a sample, in their order in the tar."""
        return list(self.layout(row).position)

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """The size in bytes of each part of a sample, by extension."""
        layout = self.layout(row)
        return {extension: self.index.place(row, member, layout)[1] for extension, member in layout.position.items()}

    def part_sizes(self) -> dict[str, Rows]:
        """The sizes in bytes of all parts, by extension; shards whose rows in the index are damaged are left out."""
        full = np.flatnonzero(self.entries.samples).tolist()
        whole = [shard for shard in full if self.index.is_whole(int(self.numbers[shard]))]
        rows = [np.arange(self.firsts[i], self.firsts[i + 1]) - self.firsts[i] + self.first_rows[i] for i in whole]
        return self.index.part_sizes(np.concatenate(rows)) if rows else {}

    def table(self, shard: int) -> ShardTable:
        """The rows of a shard, to be written into another index. Raises `ShardError` if they are damaged."""
        self.check_rows(shard)
        return self.index.table(int(self.numbers[shard]))

    def check_rows(self, shard: int) -> None:
        """Raises `ShardError` unless the shard's rows in the index are as they were written."""
        if not self.index.is_whole(int(self.numbers[shard])):
            raise self.damaged(self.entries.names[shard])

    def is_as_written(self, shard: int, descriptor: int) -> bool:
        """Whether some samples of an open shard lie where the index says."""
        return self.index.is_as_written(int(self.numbers[shard]), descriptor)

    def damaged(self, shard: str) -> ShardError:
        """The error for a damaged index; `shard` names the shard that it was needed for."""
        return ShardError(
            f"{self.address}: the index of {shard} is damaged; remove {self.index_path} and start again",
            reason="damaged index",
        )
