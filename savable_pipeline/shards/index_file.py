"""The index of a folder of shards: offset and size of every member of every sample, in one memory-mapped file.

    "SAVIDX02" │ xxh3_64 of the header │ header length u64 │ header: MessagePack │ padding │ starts │ layouts │ firsts
    │ sizes

    starts   uint64 (samples,)      offset of the sample's first header in its shard
    layouts  uint32 (samples,)      the sample's number in the header's table of layouts: extensions in order, and
                                    512-byte header blocks before each payload. Absent if always 0
    firsts   uint64 (samples,)      where the sample's sizes start. Absent if all samples have equally many members
    sizes    uint32/64 (members,)   size of each member's payload in bytes

A row is a sample. Samples are in the order of the shards; a shard's rows are consecutive. All arrays are little-endian.
The header has a checksum of each shard's rows, which is checked when the shard is opened: the time to open an index
grows with its shards, not with its samples.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.open_files import with_handles
from savable_pipeline.errors import ShardError
from savable_pipeline.shards.paths import is_inside
from savable_pipeline.shards.shard_list import Count, ShardEntry
from savable_pipeline.shards.tar import BLOCK, members, of_samples

Buffer: TypeAlias = "memoryview[Any]"
LayoutParts: TypeAlias = tuple[tuple[str, Count], ...]  # (extension, header blocks before its payload), ...

_MAGIC = b"SAVIDX02"
_ALIGN = 64


class _Header(msgspec.Struct, array_like=True):
    shards: list[ShardEntry]
    checks: list[int]  # per shard: a hash of its rows
    layouts: list[LayoutParts]
    members: Count  # of every sample; 0: see `firsts`
    size_bytes: int  # 4 or 8: of an element of `sizes`
    sizes: Count  # the length of `sizes`


class ShardTable(msgspec.Struct):
    """The rows of one shard, from a scan, to be joined with those of others; the arrays are little-endian bytes."""

    entry: ShardEntry
    starts: bytes  # uint64 (samples,)
    end: int  # the offset after the last member
    layouts: list[LayoutParts]
    layout_of: bytes  # uint32 (samples,)
    sizes: bytes  # uint64 (members,)


class Layout:
    """The extensions of a sample in order, and the bytes of headers before each payload (`gaps`)."""

    __slots__ = ("gaps", "position")

    def __init__(self, parts: Iterable[tuple[str, int]]) -> None:
        pairs = list(parts)
        self.position = {extension: i for i, (extension, _) in enumerate(pairs)}
        self.gaps = [blocks * BLOCK for _, blocks in pairs]


class ShardIndex:
    """An open index: `shards`, and the start, layout and member sizes of each sample. Raises OSError, `ShardError`."""

    def __init__(self, path: Path) -> None:
        self._map = with_handles(lambda: _mapped(path))
        view = memoryview(self._map)
        self._header, offset = _read_header(path, view)
        self.shards = self._header.shards
        self._tables: dict[str, tuple[ShardEntry, int]] = {}
        self._number: dict[str, int] = {}
        self.layouts = [Layout(parts) for parts in self._header.layouts]
        self.members = self._header.members
        count = sum(entry.samples for entry in self.shards)
        wide = self._header.size_bytes == 8
        self.starts, offset = _array(path, view, offset, "Q", count)
        self.layout_of, offset = _array(path, view, offset, "I", count if len(self.layouts) > 1 else 0)
        self.firsts, offset = _array(path, view, offset, "Q", 0 if self.members else count)
        self.sizes, offset = _array(path, view, offset, "Q" if wide else "I", self._header.sizes)
        if offset != len(view):
            raise ShardError(f"{path}: {len(view)} bytes, but the header says {offset}")

    def tables(self) -> dict[str, tuple[ShardEntry, int]]:
        """The entry of each shard and the row of its first sample, by name."""
        if not self._tables:
            row = 0
            for number, entry in enumerate(self.shards):
                self._tables[entry.name] = (entry, row)
                self._number[entry.name] = number
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
            offset += (self.sizes[first + i] + BLOCK - 1) // BLOCK * BLOCK + layout.gaps[i + 1]
        return offset, self.sizes[first + member]

    def part_sizes(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """The sizes in bytes of the parts of these samples, by extension."""
        layouts = np.asarray(self.layout_of)[rows] if self.layout_of else np.zeros(len(rows), dtype=np.uint32)
        firsts = rows * self.members if self.members else np.asarray(self.firsts)[rows].astype(np.int64)
        sizes = np.asarray(self.sizes)
        found: dict[str, list[NDArray[np.int64]]] = {}
        for number, layout in enumerate(self.layouts):
            mine = firsts[layouts == number]
            for extension, member in layout.position.items() if len(mine) else ():
                found.setdefault(extension, []).append(sizes[mine + member].astype(np.int64))
        return {extension: np.concatenate(parts) for extension, parts in found.items()}

    def is_whole(self, name: str) -> bool:
        """Whether the rows of a shard match their checksum, and no part is larger than the shard."""
        entry, row = self.tables()[name]
        rows = slice(row, row + entry.samples)
        sizes = self._sizes_of(rows)
        if sizes is None:
            return False
        starts = self.starts[rows]
        if _check_of(starts, self.layout_of[rows], sizes) != self._header.checks[self._number[name]]:
            return False
        return not len(starts) or max(int(np.asarray(starts).max()), int(np.asarray(sizes).max())) <= entry.size

    def _sizes_of(self, rows: slice) -> memoryview[int] | None:
        """The sizes of the members of these samples, in order; None if `firsts` or `layouts` are damaged."""
        if self.members:
            used = np.unique(np.asarray(self.layout_of)[rows]).tolist() if self.layout_of else [0]
            fits = all(n < len(self.layouts) and len(self.layouts[n].gaps) == self.members for n in used)
            fits = fits and rows.stop * self.members <= len(self.sizes)
            return self.sizes[rows.start * self.members : rows.stop * self.members] if fits else None
        layout_of, firsts = np.asarray(self.layout_of)[rows], np.asarray(self.firsts)[rows].astype(np.int64)
        if not len(firsts):
            return self.sizes[:0]
        if int(layout_of.max()) >= len(self.layouts):
            return None
        lengths = np.array([len(layout.gaps) for layout in self.layouts])[layout_of]
        ends = firsts[0] + np.cumsum(lengths)
        fits = bool((firsts[1:] == ends[:-1]).all()) and ends[-1] <= len(self.sizes)
        return self.sizes[int(firsts[0]) : int(ends[-1])] if fits else None

    def is_as_written(self, name: str, fd: int) -> bool:
        """Whether some samples of a shard lie where the index says: the first, one in the middle, the last.

        Its rows must be whole. True without a sample.
        """
        entry, row = self.tables()[name]
        some = {0, entry.samples // 2, entry.samples - 1} if entry.samples else set()
        return all(self.lies_there(name, fd, row + i) for i in some)

    def lies_there(self, name: str, fd: int, row: int) -> bool:
        """Whether the headers of a sample, all of one key, say what the index does."""
        keys = set()
        try:
            layout = self.layout(row)
            found = of_samples(members(name, fd, self.starts[row]))
            for number, extension in enumerate(layout.position):
                member, key, found_extension = next(found)
                if found_extension != extension or (member.payload, member.size) != self.place(row, number, layout):
                    return False
                keys.add(key)
        except (ShardError, IndexError, OverflowError, StopIteration):
            return False
        return len(keys) == 1

    def table(self, name: str) -> ShardTable:
        """The rows of one shard, which must be whole, to be written into another index."""
        entry, row = self.tables()[name]
        rows = slice(row, row + entry.samples)
        starts, sizes = np.asarray(self.starts)[rows], self._sizes_of(rows)
        assert sizes is not None, name
        numbers = np.asarray(self.layout_of)[rows] if self.layout_of else np.zeros(entry.samples, dtype=np.uint32)
        used, layout_of = np.unique(numbers, return_inverse=True)
        return ShardTable(
            entry,
            starts.tobytes(),
            0,
            [self._header.layouts[number] for number in used],
            layout_of.astype("<u4").tobytes(),
            np.asarray(sizes).astype("<u8").tobytes(),
        )


def write_index(path: Path, tables: list[ShardTable]) -> None:
    """Writes the index of these shards, in this order, in one step (see `replace_file`)."""
    numbers: dict[LayoutParts, int] = {}
    layout_of: list[NDArray[np.uint32]] = []
    for table in tables:
        ours = np.array([numbers.setdefault(layout, len(numbers)) for layout in table.layouts], dtype="<u4")
        layout_of.append(ours[np.frombuffer(table.layout_of, "<u4")])
    starts = _joined([np.frombuffer(table.starts, "<u8") for table in tables], "<u8")
    sizes = _joined([np.frombuffer(table.sizes, "<u8") for table in tables], "<u8")
    numbered = _joined(layout_of, "<u4")
    wide = bool(len(sizes)) and int(sizes.max()) >= 1 << 32
    lengths = np.array([len(layout) for layout in numbers], dtype="<u8")
    alike = len(set(lengths.tolist())) == 1
    firsts = np.array([], dtype="<u8") if alike else _begins(lengths[numbered])
    arrays = [
        starts,
        numbered if len(numbers) > 1 else np.array([], dtype="<u4"),
        firsts,
        sizes.astype("<u8" if wide else "<u4"),
    ]
    header = _Header(
        [table.entry for table in tables],
        _checks(tables, arrays, lengths[numbered]),
        list(numbers),
        int(lengths[0]) if alike else 0,
        8 if wide else 4,
        len(sizes),
    )
    encoded = msgspec.msgpack.encode(header)
    begin = len(encoded).to_bytes(8, "little") + encoded
    begin += bytes(-(16 + len(begin)) % _ALIGN)
    digest = xxh3_64_intdigest(begin).to_bytes(8, "little")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [_MAGIC, digest, begin, *(_aligned(array.tobytes()) for array in arrays)])


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _checks(tables: list[ShardTable], arrays: list[NDArray[Any]], lengths: NDArray[Any]) -> list[int]:
    """A checksum of the rows of each shard, as they are written."""
    starts, layout_of, _, sizes = arrays
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    row, checks = 0, []
    for table in tables:
        end = row + table.entry.samples
        checks.append(_check_of(starts[row:end].data, layout_of[row:end].data, sizes[ends[row] : ends[end]].data))
        row = end
    return checks


def _check_of(starts: Buffer, layout_of: Buffer, sizes: Buffer) -> int:
    digest = xxh3_64()
    for array in (starts, layout_of, sizes):
        digest.update(array)
    return digest.intdigest()


def _joined(arrays: list[NDArray[Any]], kind: str) -> NDArray[Any]:
    return np.concatenate([np.array([], dtype=kind), *arrays])


def _begins(lengths: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<u8") if len(lengths) else lengths


def _aligned(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)


def _read_header(path: Path, view: memoryview) -> tuple[_Header, int]:
    length = int.from_bytes(view[16:24], "little")
    end = 24 + length + -(24 + length) % _ALIGN
    if bytes(view[:8]) != _MAGIC or end > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    if xxh3_64_intdigest(view[16:end]) != int.from_bytes(view[8:16], "little"):
        raise ShardError(f"{path}: the index is damaged: its checksum does not match")
    try:
        header = msgspec.msgpack.decode(view[24 : 24 + length], type=_Header)
    except msgspec.DecodeError as error:
        raise ShardError(f"{path}: the index is damaged: {error}") from error
    if len(header.checks) != len(header.shards) or header.size_bytes not in (4, 8) or not all(header.layouts):
        raise ShardError(f"{path}: the index is damaged: its header does not fit itself")
    outside = next((entry.name for entry in header.shards if not is_inside(entry.name)), None)
    if outside is not None:
        raise ShardError(f"{path}: the index is damaged: it names {outside!r}, which lies outside of the dataset")
    return header, end


def _array(path: Path, view: memoryview, offset: int, kind: str, count: int) -> tuple[memoryview[int], int]:
    end = offset + count * (8 if kind == "Q" else 4)
    if end > len(view):
        raise ShardError(f"{path}: the index is cut short: {len(view)} bytes where {end} are needed")
    return view[offset:end].cast(kind), end + -end % 8  # type: ignore[call-overload]
