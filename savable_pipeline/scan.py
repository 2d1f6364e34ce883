"""Reading every header of a shard: what the index will know of it, up to where it is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from savable_pipeline.errors import ShardError
from savable_pipeline.shard_index import LayoutParts, ShardEntry, ShardTable
from savable_pipeline.tar import BLOCK, Extent, members, samples


def scan(root: Path, name: str) -> ShardTable:
    """The table of one shard. What is wrong with it is the `fault` of its entry; samples before that are kept."""
    found = _Found(name)
    size, fault = 0, ""
    try:
        fd = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            for extent in samples(name, fd):
                found.add(extent)
            for member in members(name, fd, found.end):
                found.end = member.end
        finally:
            os.close(fd)
    except OSError as error:
        fault = f"{name}: {error.strerror}"
    except ShardError as error:
        fault = str(error)
    return found.table(size, fault)


class _Found:
    """What has been found so far in a shard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts: list[int] = []
        self.layouts: dict[LayoutParts, int] = {}
        self.layout_of: list[int] = []
        self.sizes: list[int] = []
        self.digest = xxh3_64()
        self.end = 0

    def add(self, extent: Extent) -> None:
        layout = _layout(extent)
        for extension, _ in layout if layout not in self.layouts else ():
            check_utf8(self.name, extension)
        self.starts.append(extent.members[0].header)
        self.layout_of.append(self.layouts.setdefault(layout, len(self.layouts)))
        self.sizes.extend(member.size for member in extent.members)
        self.end = extent.members[-1].end
        for member in extent.members:
            self.digest.update(f"{member.name}\0{member.payload}\0{member.size}\0".encode("utf-8", "surrogateescape"))

    def table(self, size: int, fault: str) -> ShardTable:
        return ShardTable(
            ShardEntry(self.name, size, len(self.starts), self.digest.intdigest(), printable(fault)),
            np.array(self.starts, dtype="<u8").tobytes(),
            self.end,
            list(self.layouts),
            np.array(self.layout_of, dtype="<u4").tobytes(),
            np.array(self.sizes, dtype="<u8").tobytes(),
        )


def _layout(extent: Extent) -> LayoutParts:
    ends = [extent.members[0].header, *(member.end for member in extent.members)]
    gaps = [(member.payload - end) // BLOCK for member, end in zip(extent.members, ends, strict=False)]
    return tuple(zip(extent.extensions, gaps, strict=True))


def check_utf8(shard: str, name: str) -> None:
    """Raise `ShardError` for the name of a shard, or of something in it, that no index could hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ShardError(f"{shard}: the name {name!r} is no UTF-8; rename it and write the shard again") from None


def printable(text: str) -> str:
    """Text that may have come of a damaged tar, as UTF-8 can hold it."""
    return text.encode("utf-8", "backslashreplace").decode()
