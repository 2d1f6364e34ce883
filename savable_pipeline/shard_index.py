"""The index of a folder of shards: where every member of every sample lies, in one memory-mapped file.

    "SAVIDX01" │ xxh3_64 of the rest │ header length u64 │ header: MessagePack │ padding │ starts │ layouts │ firsts
    │ sizes

    starts   uint64 (samples,)      offset of the sample's first header in its shard
    layouts  uint32 (samples,)      which extensions it has, in order, and how many 512-byte blocks of headers stand
                                    before each payload: a number in the header's table. Left out if it is always 0
    firsts   uint64 (samples,)      where its sizes start. Left out if all samples have as many members
    sizes    uint32/64 (members,)   size of each member's payload in bytes

Samples are in shard order; a shard's rows are consecutive. All arrays are little-endian.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.errors import ShardError
from savable_pipeline.tar import BLOCK, members, padded, split_name

_MAGIC = b"SAVIDX01"
_ALIGN = 64


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """A shard as the index knows it: name relative to the root, bytes, samples, and a hash of names and places."""

    name: str
    size: int
    samples: int
    digest: int


class _Header(msgspec.Struct, array_like=True):
    shards: list[ShardEntry]
    layouts: list[list[tuple[str, int]]]  # per layout: (extension, header blocks before its payload), ...
    members: int  # of every sample; 0: see `firsts`
    size_bytes: int  # 4 or 8: what one of `sizes` takes


@dataclass(frozen=True, slots=True)
class ShardTable:
    """What a scan of one shard found, still to be joined with the others."""

    entry: ShardEntry
    starts: list[int]
    end: int
    layouts: list[tuple[tuple[str, int], ...]]
    sizes: list[int]


class Layout:
    """The extensions of a sample in order, and how to find the payload of each."""

    __slots__ = ("gaps", "position")

    def __init__(self, parts: Iterable[tuple[str, int]]) -> None:
        pairs = list(parts)
        self.position = {extension: i for i, (extension, _) in enumerate(pairs)}
        self.gaps = [blocks * BLOCK for _, blocks in pairs]


class ShardIndex:
    """An open index: `shards`, and per sample its start, layout and member sizes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)
        header, offset = _read_header(path, view)
        self.shards = header.shards
        self._tables: dict[str, tuple[ShardEntry, int]] = {}
        self.layouts = [Layout(parts) for parts in header.layouts]
        self.members = header.members
        count = sum(entry.samples for entry in header.shards)
        self.starts, offset = _array(path, view, offset, "Q", count)
        self.layout_of, offset = _array(path, view, offset, "I", count if len(header.layouts) > 1 else 0)
        self.firsts, offset = _array(path, view, offset, "Q", 0 if header.members else count)
        rest = (len(view) - offset) // header.size_bytes
        self.sizes, _ = _array(path, view, offset, "I" if header.size_bytes == 4 else "Q", rest)

    def tables(self) -> dict[str, tuple[ShardEntry, int]]:
        """By name: the shard's entry and the row of its first sample."""
        if not self._tables:
            row = 0
            for entry in self.shards:
                self._tables[entry.name] = (entry, row)
                row += entry.samples
        return self._tables

    def layout(self, row: int) -> Layout:
        """The layout of the sample in `row`."""
        return self.layouts[self.layout_of[row]] if self.layout_of else self.layouts[0]

    def place(self, row: int, member: int, layout: Layout) -> tuple[int, int]:
        """Offset and size in bytes of member number `member` of the sample in `row`."""
        first = row * self.members if self.members else self.firsts[row]
        offset = self.starts[row] + layout.gaps[0]
        if not member:
            return offset, self.sizes[first]
        for i in range(member):
            offset += padded(self.sizes[first + i]) + layout.gaps[i + 1]
        return offset, self.sizes[first + member]

    def ends_as_written(self, name: str, fd: int) -> bool:
        """Whether a shard's last sample begins with the part that the index says, where it says; True without one."""
        entry, row = self.tables()[name]
        if not entry.samples:
            return True
        row += entry.samples - 1
        layout = self.layout(row)
        try:
            found = next(members(name, fd, self.starts[row]), None)
        except ShardError:
            return False
        if found is None or (found.payload, found.size) != self.place(row, 0, layout):
            return False
        parts = split_name(found.name)
        return parts is not None and parts[1] == next(iter(layout.position))

    def table(self, name: str) -> ShardTable:
        """The rows of one shard, to be written into another index."""
        entry, row = self.tables()[name]
        rows = range(row, row + entry.samples)
        layouts = [self.layout(r) for r in rows]
        parts = [tuple((e, gap // BLOCK) for e, gap in zip(o.position, o.gaps, strict=True)) for o in layouts]
        sizes = [self.place(r, i, o)[1] for r, o in zip(rows, layouts, strict=True) for i in range(len(o.gaps))]
        return ShardTable(entry, [self.starts[r] for r in rows], 0, parts, sizes)


def write_index(path: Path, tables: list[ShardTable]) -> None:
    """Write the index of these shards, aside first and then renamed."""
    numbers: dict[tuple[tuple[str, int], ...], int] = {}
    layout_of = [numbers.setdefault(layout, len(numbers)) for table in tables for layout in table.layouts]
    counts = {len(layout) for layout in numbers}
    sizes = np.array([size for table in tables for size in table.sizes], dtype=np.uint64)
    wide = bool(len(sizes)) and int(sizes.max()) >= 1 << 32
    members = counts.pop() if len(counts) == 1 else 0
    lengths = [len(layout) for table in tables for layout in table.layouts]
    header = _Header([table.entry for table in tables], [list(layout) for layout in numbers], members, 8 if wide else 4)
    encoded = msgspec.msgpack.encode(header)
    arrays = [
        np.array([start for table in tables for start in table.starts], dtype="<u8"),
        np.array(layout_of if len(numbers) > 1 else [], dtype="<u4"),
        np.array([] if members else np.cumsum([0, *lengths])[:-1], dtype="<u8"),
        sizes.astype("<u8" if wide else "<u4"),
    ]
    begin = len(encoded).to_bytes(8, "little") + encoded
    rest = [begin, bytes(-(16 + len(begin)) % _ALIGN), *(_aligned(array.tobytes()) for array in arrays)]
    digest = xxh3_64()
    for part in rest:
        digest.update(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [_MAGIC, digest.intdigest().to_bytes(8, "little"), *rest])


def _aligned(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)


def replace_file(path: Path, parts: list[bytes]) -> None:
    """Write a file aside first and then rename it."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("wb") as file:
        file.writelines(parts)
    aside.replace(path)


def _read_header(path: Path, view: memoryview) -> tuple[_Header, int]:
    if bytes(view[:8]) != _MAGIC or xxh3_64_intdigest(view[16:]) != int.from_bytes(view[8:16], "little"):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    length = int.from_bytes(view[16:24], "little")
    return msgspec.msgpack.decode(view[24 : 24 + length], type=_Header), 24 + length + -(24 + length) % _ALIGN


def _array(path: Path, view: memoryview, offset: int, kind: str, count: int) -> tuple[memoryview[int], int]:
    end = offset + count * (8 if kind == "Q" else 4)
    if end > len(view):
        raise ShardError(f"{path}: the index is cut short: {len(view)} bytes where {end} are needed")
    return view[offset:end].cast(kind), end + -end % 8  # type: ignore[call-overload]
