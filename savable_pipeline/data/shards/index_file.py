"""The index of a folder of shards: offset and size of every member of every sample, in one memory-mapped file.

    "SAVIDX03" │ xxh3_64 of the header and the shards │ header length u64 │ header: MessagePack │ padding
    │ shards: ends │ sizes │ samples │ digests │ checks │ names │ padding
    │ starts │ layouts │ firsts │ sizes

    ends … checks   uint64 (shards,)   see `ShardList`, and a checksum of each shard's rows; the names are in order
    starts   uint64 (samples,)      offset of the sample's first header in its shard
    layouts  uint32 (samples,)      the sample's number in the header's table of layouts: extensions in order, and
                                    512-byte header blocks before each payload. Absent if always 0
    firsts   uint64 (samples,)      where the sample's sizes start. Absent if all samples have equally many members
    sizes    uint32/64 (members,)   size of each member's payload in bytes

A row is a sample. Samples are in the order of the shards; a shard's rows are consecutive. All arrays are little-endian.
A shard's rows are checked when the shard is opened: to open an index takes no time for its samples, and hardly any for
its shards, whose numbers and names are used where they lie.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.open_files import with_handles
from savable_pipeline.data.shards.shard_list import Count, Rows, ShardEntry, ShardList, ShardNames
from savable_pipeline.data.shards.tar import BLOCK, members, of_samples
from savable_pipeline.errors import ShardError

LayoutParts: TypeAlias = tuple[tuple[str, Count], ...]  # (extension, header blocks before its payload), ...

MAGIC = b"SAVIDX03"
_FIRST = 24  # bytes, that tell how long the header is
_ALIGN = 64
NUMBERS_BYTES = 40  # of the five numbers of a shard


class Links(msgspec.Struct, frozen=True, array_like=True):
    """The links of a shard that would be parts of samples if they were files: how many, and the first one's name."""

    count: Count
    first: str = ""


class Header(msgspec.Struct, array_like=True):
    """What an index says of itself; its arrays follow."""

    shards: Count
    names: Count  # bytes
    faults: dict[int, str]  # by number of the shard
    layouts: list[LayoutParts]
    members: Count  # of every sample; 0: see `firsts`
    size_bytes: int  # 4 or 8: of an element of `sizes`
    sizes: Count  # the length of `sizes`
    links: dict[int, Links] = {}  # by number of the shard; of one without any there is none
    links_known: bool = False  # whether they were counted in every shard, which earlier releases did not


class ShardTable(msgspec.Struct):
    """The rows of one shard, from a scan, to be joined with those of others; the arrays are little-endian bytes."""

    entry: ShardEntry
    starts: bytes  # uint64 (samples,)
    end: int  # the offset after the last member
    layouts: list[LayoutParts]
    layout_of: bytes  # uint32 (samples,)
    sizes: bytes  # uint64 (members,)
    links: Links | None = None  # None: not counted


class Layout:
    """The extensions of a sample in order, and the bytes of headers before each payload (`gaps`)."""

    __slots__ = ("gaps", "position")

    def __init__(self, parts: Iterable[tuple[str, int]]) -> None:
        pairs = list(parts)
        self.position = {extension: i for i, (extension, _) in enumerate(pairs)}
        self.gaps = [blocks * BLOCK for _, blocks in pairs]


class ShardIndex:
    """An open index: `shards`, and the start, layout and member sizes of each sample. Raises OSError, `ShardError`.

    `shard_rows`, int64 (shards + 1,), is the row of each shard's first sample, then the number of samples; `identity`
    tells this index from one of other shards.
    """

    def __init__(self, path: Path) -> None:
        self._map = with_handles(lambda: _mapped(path))
        view = memoryview(self._map)
        self._header, self.identity, self.shards, self._checks, offset = _read_header(path, view)
        self.shard_rows = np.concatenate([[0], np.cumsum(self.shards.samples)])
        self.layouts = [Layout(parts) for parts in self._header.layouts]
        self.members = self._header.members
        count = int(self.shard_rows[-1])
        wide = self._header.size_bytes == 8
        self.starts, at_layouts = _array(path, view, offset, "Q", count)
        self.layout_of, at_firsts = _array(path, view, at_layouts, "I", count if len(self.layouts) > 1 else 0)
        self.firsts, at_sizes = _array(path, view, at_firsts, "Q", 0 if self.members else count)
        self.sizes, end = _array(path, view, at_sizes, "Q" if wide else "I", self._header.sizes)
        if end != len(view):
            raise ShardError(f"{path}: {len(view)} bytes, but the header says {end}")
        self._places = offset, at_layouts, at_firsts, at_sizes

    @property
    def links(self) -> dict[int, Links]:
        """The links of the shards that have any, by number, as far as they were counted."""
        return self._header.links

    @property
    def links_known(self) -> bool:
        """Whether they were counted in every shard."""
        return self._header.links_known

    def number(self, name: str) -> int:
        """The number of a shard. Raises KeyError without it."""
        found = bisect.bisect_left(self.shards.names, name)
        if found == len(self.shards) or self.shards.names[found] != name:
            raise KeyError(name)
        return found

    def numbers(self, names: Sequence[str]) -> Rows:
        """The numbers of these shards, int64 (names,). Raises KeyError without one of them."""
        if len(names) == len(self.shards) and ShardNames.of(names).text == self.shards.names.text:
            return np.arange(len(names))
        if len(names) < len(self.shards) // 16:  # bisecting them costs less than a table of all
            return np.fromiter(map(self.number, names), np.int64, len(names))
        known = {name: number for number, name in enumerate(self.shards.names)}
        return np.fromiter(map(known.__getitem__, names), np.int64, len(names))

    def rows_of(self, number: int) -> range:
        """The rows of the samples of a shard, by its number, as all below."""
        return range(int(self.shard_rows[number]), int(self.shard_rows[number + 1]))

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

    def is_whole(self, number: int) -> bool:
        """Whether the rows of a shard match their checksum, and no part is larger than the shard."""
        rows = self.rows_of(number)
        sizes = self._sizes_of(slice(rows.start, rows.stop))
        if sizes is None:
            return False
        starts = np.asarray(self.starts)[rows.start : rows.stop]
        if check_of(starts, self._layouts_of(rows), np.asarray(sizes)) != self._checks[number]:
            return False
        return not len(starts) or max(int(starts.max()), int(np.asarray(sizes).max())) <= self.shards.sizes[number]

    def _layouts_of(self, rows: range) -> NDArray[np.uint32]:
        if not self.layout_of:
            return np.zeros(len(rows), dtype="<u4")
        return np.asarray(self.layout_of)[rows.start : rows.stop]

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

    def rows_from(self, get: Callable[[int, int], bytes], shards: range) -> list[tuple[int, bytes]]:
        """The rows of some shards from a whole copy of this file: the offset of each array's part, and its bytes.

        `get` gives the copy's bytes from one offset to before another. Raises `ShardError` unless the rows match their
        checksums here.
        """
        found: list[tuple[int, bytes]] = []

        def part(number: int, kind: str, first: int, count: int) -> NDArray[Any]:
            width = np.dtype(kind).itemsize
            start = self._places[number] + first * width
            raw = get(start, start + count * width) if count else b""
            found.append((start, raw))
            return np.frombuffer(raw, kind)

        bounds = self.shard_rows[shards.start : shards.stop + 1]
        row, count = int(bounds[0]), int(bounds[-1] - bounds[0])
        starts = part(0, "<u8", row, count)
        layout_of = part(1, "<u4", row, count) if self.layout_of else np.zeros(count, "<u4")
        if count and int(layout_of.max()) >= len(self.layouts):
            raise ShardError("its rows have no layout")
        ends = np.cumsum([0, *np.array([len(layout.gaps) for layout in self.layouts])[layout_of]])
        first = row * self.members
        if not self.members and count:
            firsts = part(2, "<u8", row, count).astype(np.int64)
            first = int(firsts[0])
            if (firsts - first != ends[:-1]).any():
                raise ShardError("its rows do not follow each other")
        if not 0 <= first <= len(self.sizes) - int(ends[-1]):
            raise ShardError("its sizes lie behind its end")
        sizes = part(3, "<u8" if self.sizes.itemsize == 8 else "<u4", first, int(ends[-1]))
        for shard, (begin, end) in zip(shards, itertools.pairwise((bounds - row).tolist()), strict=True):
            check = check_of(starts[begin:end], layout_of[begin:end], sizes[ends[begin] : ends[end]])
            if check != self._checks[shard]:
                raise ShardError(f"the rows of {self.shards.names[shard]} do not match their checksum")
        return found

    def is_as_written(self, number: int, fd: int) -> bool:
        """Whether some samples of a shard lie where the index says: the first, one in the middle, the last.

        Its rows must be whole. True without a sample.
        """
        rows, name = self.rows_of(number), self.shards.names[number]
        some = {rows[0], rows[len(rows) // 2], rows[-1]} if rows else set()
        return all(self.lies_there(name, fd, row) for row in some)

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

    def table(self, number: int) -> ShardTable:
        """The rows of one shard, which must be whole, to be written into another index."""
        rows = self.rows_of(number)
        starts, sizes = np.asarray(self.starts)[rows.start : rows.stop], self._sizes_of(slice(rows.start, rows.stop))
        assert sizes is not None, number
        used, layout_of = np.unique(self._layouts_of(rows), return_inverse=True)
        return ShardTable(
            self.shards[number],
            starts.tobytes(),
            0,
            [self._header.layouts[number] for number in used],
            layout_of.astype("<u4").tobytes(),
            np.asarray(sizes).astype("<u8").tobytes(),
            self.links.get(number, Links(0) if self.links_known else None),
        )


def head_bytes(path: str, begin: bytes) -> int:
    """The bytes of an index before its rows; where its first ones, `begin`, do not tell: how many of them would.

    Raises `ShardError`.
    """
    length = int.from_bytes(begin[16:_FIRST], "little")
    if begin[:8] != MAGIC:
        raise ShardError(f"{path}: not an index of this version, or damaged")
    if len(begin) < _FIRST + length:
        return _FIRST + length
    return _head(path, memoryview(begin), length)[2]


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def check_of(starts: NDArray[Any], layout_of: NDArray[Any], sizes: NDArray[Any]) -> int:
    """A checksum of the rows of a shard, however wide their sizes are written."""
    digest = xxh3_64()
    for array, kind in ((starts, "<u8"), (layout_of, "<u4"), (sizes, "<u8")):
        digest.update(np.ascontiguousarray(array, dtype=kind).data)
    return digest.intdigest()


def _read_header(path: Path, view: memoryview) -> tuple[Header, bytes, ShardList, NDArray[np.uint64], int]:
    """The header, its checksum, the shards, the checksums of their rows, and where the rows begin."""
    length = int.from_bytes(view[16:_FIRST], "little")
    if bytes(view[:8]) != MAGIC or _FIRST + length > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    header, columns, end = _head(path, view, length)
    names = columns + header.shards * NUMBERS_BYTES
    if end > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    identity = bytes(view[8:16])
    if xxh3_64_intdigest(view[16:end]) != int.from_bytes(identity, "little"):
        raise ShardError(f"{path}: the index is damaged: its checksum does not match")
    numbers = np.frombuffer(view, "<u8", header.shards * 5, offset=columns).reshape(5, header.shards)
    ends, sizes, samples = numbers[:3].view("<i8")
    shards = ShardList(ShardNames(view[names : names + header.names], ends), sizes, samples, numbers[3], header.faults)
    fits = (
        header.size_bytes in (4, 8)
        and all(header.layouts)
        and all(n < header.shards for n in [*header.faults, *header.links])
    )
    if not fits or not shards.names.is_whole() or (header.shards and min(sizes.min(), samples.min()) < 0):
        raise ShardError(f"{path}: the index is damaged: its header does not fit itself")
    outside = shards.names.first_outside()
    if outside is not None:
        raise ShardError(f"{path}: the index is damaged: it names {outside!r}, which lies outside of the dataset")
    return header, identity, shards, numbers[4], end


def _head(path: Path | str, view: memoryview, length: int) -> tuple[Header, int, int]:
    """The header, of `length` bytes; where the numbers of the shards begin, and the rows."""
    try:
        header = msgspec.msgpack.decode(view[_FIRST : _FIRST + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardError(f"{path}: the index is damaged: {error}") from error
    columns = aligned(_FIRST + length)
    return header, columns, aligned(columns + header.shards * NUMBERS_BYTES + header.names)


def aligned(offset: int) -> int:
    """Where what follows this offset begins."""
    return offset + -offset % _ALIGN


def _array(path: Path, view: memoryview, offset: int, kind: str, count: int) -> tuple[memoryview[int], int]:
    end = offset + count * (8 if kind == "Q" else 4)
    if end > len(view):
        raise ShardError(f"{path}: the index is cut short: {len(view)} bytes where {end} are needed")
    return view[offset:end].cast(kind), end + -end % 8  # type: ignore[call-overload]
