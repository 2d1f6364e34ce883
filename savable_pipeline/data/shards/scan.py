"""Scans a shard: reads all its headers and makes the shard's rows of the index, up to the first damage."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from savable_pipeline.core.open_files import with_handles
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.index_file import LayoutParts, Links, ShardTable
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.tar import BLOCK, Extent, Member, members, samples
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_USUAL_END = 10_240 + 2 * BLOCK  # bytes of zeros at most, but for GNU tar's larger records
_RECORDS = (1 << 14, 1 << 15, 1 << 16)


def scan(root: Path, name: str) -> ShardTable:
    """The table of one shard. Damage becomes the `fault` of its entry; the samples before it are kept."""
    found = ShardRows(name)
    size, fault = 0, ""
    try:
        fd = with_handles(lambda: os.open(root / name, os.O_RDONLY | os.O_CLOEXEC))
        try:
            size = os.fstat(fd).st_size
            for extent in samples(name, fd, found.links):
                found.add(extent)
            for member in members(name, fd, found.end):
                found.end = member.end
        finally:
            os.close(fd)
    except OSError as error:
        fault = f"{name}: {error.strerror}"
    except ShardError as error:
        fault = str(error)
    if not fault:
        _tell_doubts(root / name, size, found)
    return found.table(size, fault)


def _tell_doubts(path: Path, size: int, found: ShardRows) -> None:
    """Warns if a tar that is read to its end looks as if samples were lost from it."""
    zeros = size - found.end
    if not found.starts or size - found.in_samples > max(size // 2, _USUAL_END):
        log.warning(
            "%s: its %d samples take %d of %d bytes; is the rest meant to be left out? A sample's files are named "
            "KEY.EXTENSION",
            path,
            len(found.starts),
            found.in_samples,
            size,
        )
    elif zeros > _USUAL_END and not any(size % record == 0 and zeros < record + 2 * BLOCK for record in _RECORDS):
        log.warning(
            "%s: %d bytes of zeros at its end, where tars mostly have at most %d; was the end of the shard lost?",
            path,
            zeros,
            _USUAL_END,
        )


class ShardRows:
    """The samples found so far in a shard, as rows of the index."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts: list[int] = []
        self.layouts: dict[LayoutParts, int] = {}
        self.layout_of: list[int] = []
        self.sizes: list[int] = []
        self.digest = xxh3_64()
        self.end = 0  # of the last member
        self.in_samples = 0  # bytes of samples, with their headers
        self.links: list[Member] = []  # that would be parts of samples if they were files

    def add(self, extent: Extent) -> None:
        """Add a sample, which must lie behind those before it. Raises `ShardError` for a name that is no UTF-8."""
        layout = _layout(extent)
        for extension, _ in layout if layout not in self.layouts else ():
            check_utf8(self.name, extension)
        self.starts.append(extent.members[0].header)
        self.layout_of.append(self.layouts.setdefault(layout, len(self.layouts)))
        self.sizes.extend(member.size for member in extent.members)
        self.end = extent.members[-1].end
        self.in_samples += self.end - extent.members[0].header
        for member in extent.members:
            self.digest.update(f"{member.name}\0{member.payload}\0{member.size}\0".encode("utf-8", "surrogateescape"))

    def table(self, size: int, fault: str) -> ShardTable:
        """The rows of a shard of `size` bytes."""
        return ShardTable(
            ShardEntry(self.name, size, len(self.starts), self.digest.intdigest(), encodable(fault)),
            np.array(self.starts, dtype="<u8").tobytes(),
            self.end,
            list(self.layouts),
            np.array(self.layout_of, dtype="<u4").tobytes(),
            np.array(self.sizes, dtype="<u8").tobytes(),
            Links(len(self.links), encodable(self.links[0].name) if self.links else ""),
        )


def _layout(extent: Extent) -> LayoutParts:
    ends = [extent.members[0].header, *(member.end for member in extent.members)]
    gaps = [(member.payload - end) // BLOCK for member, end in zip(extent.members, ends, strict=False)]
    return tuple(zip(extent.extensions, gaps, strict=True))


def check_utf8(shard: str, name: str) -> None:
    """Raises `ShardError` for the name of a shard, or of an extension in it, that an index cannot hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ShardError(f"{shard}: the name {name!r} is no UTF-8; rename it and write the shard again") from None
