"""Writes an index, shard by shard: what is kept in memory grows with the shards, not with their samples.

tables ──▶ starts, layouts, sizes: a file without a name each ──▶ the index, its header first
"""

from __future__ import annotations

import contextlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import replacing
from savable_pipeline.data.shards.index_file import MAGIC, Header, LayoutParts, Links, ShardTable, aligned, check_of
from savable_pipeline.data.shards.shard_list import ShardEntry

_BLOCK = 1 << 22  # bytes copied at a time


def write_index(path: Path, tables: Iterable[ShardTable]) -> None:
    """Writes the index of these shards in one step (see `replace_file`). Raises ValueError unless they are in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        rows = _Rows(*(stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for _ in range(3)))
        columns = Columns()
        for table in tables:
            columns.add(table.entry, rows.add(table), table.links)
        with replacing(path) as file:
            file.write(index_begin(columns, list(rows.layouts), rows.members, 8 if rows.wide else 4, rows.parts))
            rows.write(file)


class Columns:
    """What an index says of each shard."""

    def __init__(self) -> None:
        self.names = bytearray()
        self.last = ""
        self.faults: dict[int, str] = {}
        self.links: dict[int, Links] = {}
        self.links_known = True
        self.numbers = [array("Q") for _ in range(5)]  # ends, sizes, samples, digests, checks

    def add(self, entry: ShardEntry, check: int, links: Links | None = None) -> None:
        """Adds the next shard. Raises ValueError unless its name comes after the last one's."""
        if self.numbers[0] and entry.name <= self.last:
            raise ValueError(f"the shard {entry.name} after {self.last}: an index has its shards in the order of names")
        self.last = entry.name
        self.names += entry.name.encode() + b"\0"
        if entry.fault:
            self.faults[len(self.numbers[0])] = entry.fault
        if links is None:
            self.links_known = False
        elif links.count:
            self.links[len(self.numbers[0])] = links
        row = (len(self.names), entry.size, entry.samples, entry.digest, check)
        for column, number in zip(self.numbers, row, strict=True):
            column.append(number)


def index_begin(columns: Columns, layouts: list[LayoutParts], members: int, size_bytes: int, sizes: int) -> bytes:
    """The bytes of an index before its rows, of which `sizes` are sizes of parts."""
    shards, names = len(columns.numbers[0]), len(columns.names)
    told = columns.faults, layouts, members, size_bytes, sizes, columns.links, columns.links_known
    header = Header(shards, names, *told)
    encoded = msgspec.msgpack.encode(header)
    found = bytearray(len(encoded).to_bytes(8, "little") + encoded)
    found += bytes(aligned(16 + len(found)) - 16 - len(found))
    for column in columns.numbers:
        found += np.frombuffer(column, np.uint64).astype("<u8").tobytes()
    found += columns.names
    found += bytes(aligned(16 + len(found)) - 16 - len(found))
    return MAGIC + xxh3_64_intdigest(found).to_bytes(8, "little") + found


class _Rows:
    """The rows of shards, on their way into an index: uint64, uint32 and uint64 in a file each."""

    def __init__(self, starts: IO[bytes], layout_of: IO[bytes], sizes: IO[bytes]) -> None:
        self._starts, self._layout_of, self._sizes = starts, layout_of, sizes
        self.layouts: dict[LayoutParts, int] = {}
        self.parts = 0
        self.wide = False

    def add(self, table: ShardTable) -> int:
        """Adds those of a shard; returns their checksum."""
        ours = np.array([self.layouts.setdefault(layout, len(self.layouts)) for layout in table.layouts], dtype="<u4")
        layout_of = ours[np.frombuffer(table.layout_of, "<u4")]
        sizes = np.frombuffer(table.sizes, "<u8")
        self.parts += len(sizes)
        self.wide = self.wide or (bool(len(sizes)) and int(sizes.max()) >= 1 << 32)
        self._starts.write(table.starts)
        self._layout_of.write(layout_of.data)
        self._sizes.write(table.sizes)
        return check_of(np.frombuffer(table.starts, "<u8"), layout_of, sizes)

    @property
    def members(self) -> int:
        """The number of members of every sample; 0 if they differ."""
        lengths = {len(layout) for layout in self.layouts}
        return lengths.pop() if len(lengths) == 1 else 0

    def write(self, file: BinaryIO) -> None:
        """Writes the arrays of the index, each at a multiple of 8 bytes."""
        _write_aligned(file, _blocks(self._starts, "<u8"))
        if len(self.layouts) > 1:
            _write_aligned(file, _blocks(self._layout_of, "<u4"))
        if not self.members:
            _write_aligned(file, self._firsts())
        _write_aligned(file, (sizes.astype("<u8" if self.wide else "<u4") for sizes in _blocks(self._sizes, "<u8")))

    def _firsts(self) -> Iterator[NDArray[Any]]:
        lengths = np.array([len(layout) for layout in self.layouts], dtype="<u8")
        first = 0
        for layout_of in _blocks(self._layout_of, "<u4"):
            ends = first + np.cumsum(lengths[layout_of])
            yield np.concatenate([[first], ends[:-1]]).astype("<u8")
            first = int(ends[-1])


def _blocks(file: IO[bytes], kind: str) -> Iterator[NDArray[Any]]:
    file.seek(0)
    while block := file.read(_BLOCK):
        yield np.frombuffer(block, kind)


def _write_aligned(file: BinaryIO, arrays: Iterable[NDArray[Any]]) -> None:
    written = 0
    for each in arrays:
        file.write(each.data)
        written += each.nbytes
    file.write(bytes(-written % 8))
