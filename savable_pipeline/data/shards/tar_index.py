"""The rows of tars in an index: offset and size of every member of every sample.

    starts   uint64 (samples,)      offset of the sample's first header in its shard
    layouts  uint32 (samples,)      the sample's number in the header's table of layouts: extensions in order, and
                                    512-byte header blocks before each payload. Absent if always 0
    firsts   uint64 (samples,)      where the sample's sizes start. Absent if all samples have equally many members
    sizes    uint32/64 (members,)   size of each member's payload in bytes

A row is a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.shards.index_file import (
    TAR,
    Links,
    PlaceIndex,
    Read,
    ShardIndex,
    ShardTable,
    array_at,
    check_of,
    kind_of,
)
from savable_pipeline.data.shards.tar import BLOCK, members, of_samples
from savable_pipeline.errors import ShardError


class Layout:
    """The extensions of a sample in order, and the bytes of headers before each payload (`gaps`)."""

    __slots__ = ("gaps", "position")

    def __init__(self, parts: Iterable[tuple[str, int]]) -> None:
        pairs = list(parts)
        self.position = {extension: i for i, (extension, _) in enumerate(pairs)}
        self.gaps = [blocks * BLOCK for _, blocks in pairs]


def open_index(path: Path) -> ShardIndex:
    """The index at `path`, of files of whichever format. Raises OSError, `ShardError`."""
    kind = kind_of(path)
    return TarIndex(path) if kind == TAR else PlaceIndex(path, kind)


class TarIndex(ShardIndex):
    """An open index of tars: the start, layout and member sizes of each sample. Raises OSError, `ShardError`."""

    def __init__(self, path: Path, kind: str = TAR) -> None:
        super().__init__(path, kind)
        view, header = self.view, self.header
        self.layouts = [Layout(parts) for parts in header.layouts]
        self.members = header.members
        count = int(self.shard_rows[-1])
        self.starts, at_layouts = array_at(path, view, self.begin, "Q", count)
        self.layout_of, at_firsts = array_at(path, view, at_layouts, "I", count if len(self.layouts) > 1 else 0)
        self.firsts, at_sizes = array_at(path, view, at_firsts, "Q", 0 if self.members else count)
        self.sizes, end = array_at(path, view, at_sizes, "Q" if header.size_bytes == 8 else "I", header.sizes)
        self.check_end(path, end)
        self._places = self.begin, at_layouts, at_firsts, at_sizes

    @property
    def links(self) -> dict[int, Links]:  # type: ignore[override]
        """The links of the shards that have any, by number."""
        return self.header.links

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
        """See `ShardIndex.is_whole`; no part is larger than the shard."""
        rows = self.rows_of(number)
        sizes = self._sizes_of(slice(rows.start, rows.stop))
        if sizes is None:
            return False
        starts = np.asarray(self.starts)[rows.start : rows.stop]
        if check_of(starts, self._layouts_of(rows), np.asarray(sizes)) != self.checks[number]:
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

    def rows_from(self, get: Read, shards: range) -> list[tuple[int, bytes]]:
        """See `ShardIndex.rows_from`."""
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
            if check != self.checks[shard]:
                raise ShardError(f"the rows of {self.shards.names[shard]} do not match their checksum")
        return found

    def lies_there(self, name: str, fd: int, row: int, most: int | None = None) -> bool:
        """Whether the headers of a sample, the first `most` of them, all of one key, say what the index does."""
        keys = set()
        try:
            layout = self.layout(row)
            found = of_samples(members(name, fd, self.starts[row]))
            for number, extension in enumerate(itertools.islice(layout.position, most)):
                member, key, found_extension = next(found)
                if found_extension != extension or (member.payload, member.size) != self.place(row, number, layout):
                    return False
                keys.add(key)
        except (ShardError, IndexError, OverflowError, StopIteration):
            return False
        return len(keys) == 1

    def table(self, number: int) -> ShardTable:
        """See `ShardIndex.table`."""
        rows = self.rows_of(number)
        starts, sizes = np.asarray(self.starts)[rows.start : rows.stop], self._sizes_of(slice(rows.start, rows.stop))
        assert sizes is not None, number
        used, layout_of = np.unique(self._layouts_of(rows), return_inverse=True)
        return ShardTable(
            self.shards[number],
            starts.tobytes(),
            0,
            [self.header.layouts[number] for number in used],
            layout_of.astype("<u4").tobytes(),
            np.asarray(sizes).astype("<u8").tobytes(),
            self.links.get(number, Links(0)),
        )
