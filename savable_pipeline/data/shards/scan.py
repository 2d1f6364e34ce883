"""The format of tars: scans one, reading all its headers, and makes its rows of the index, up to the first damage."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.wording import counted, encodable
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import TAR, LayoutParts, Links, ShardIndex, ShardTable
from savable_pipeline.data.shards.paths import TAR_FILES
from savable_pipeline.data.shards.shard_list import ShardEntry, check_utf8
from savable_pipeline.data.shards.tar import BLOCK, Extent, Member, members, samples
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_USUAL_END = 10_240 + 2 * BLOCK  # bytes of zeros at most, but for GNU tar's larger records
_OFFSET = 8  # bytes of an offset in X.tar.idx
_RECORDS = (1 << 14, 1 << 15, 1 << 16)


def read_table(file: ByteSource, name: str) -> ShardTable:
    """The table of a tar on a disk. Damage becomes the `fault` of its entry; the samples before it are kept."""
    found, torn, fault, fd = ShardRows(name), _Torn(), "", file.fileno()
    try:
        for extent in samples(name, fd, found.links):
            found.add(extent)
            torn.add(extent)
        for member in members(name, fd, found.end):
            found.end = member.end
    except OSError as error:
        fault = f"{name}: {error.strerror}"
    except ShardError as error:
        fault = str(error)
    if not fault:
        _tell_doubts(name, file.size, found)
    table = found.table(file.size, fault)
    table.torn = torn.told()
    if table.torn:
        log.warning("%s: %s", name, table.torn)
    return table


def is_as_indexed(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Whether some samples of a tar lie where the index says: the first, one in the middle, the last.

    Its rows must be whole. True without a sample.
    """
    assert isinstance(index, TarIndex), index
    rows, name = index.rows_of(number), index.shards.names[number]
    some = {rows[0], rows[len(rows) // 2], rows[-1]} if rows else set()
    return all(index.lies_there(name, file.fileno(), row) for row in some)


def _tell_doubts(path: str, size: int, found: ShardRows) -> None:
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


class _Torn:
    """Finds samples whose files lie in two places, as of `tar cf x.tar *.jpg *.txt`: each place is taken for a sample.

    Where both have a file of the same extension, they are samples that happen to have one key.
    """

    def __init__(self) -> None:
        self._extensions: dict[int, tuple[str, ...]] = {}  # by the hash of a key
        self._alike: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for all samples that have these
        self._count, self._first = 0, ""

    def add(self, extent: Extent) -> None:
        extensions = tuple(extent.extensions)
        extensions = self._alike.setdefault(extensions, extensions)
        before = self._extensions.setdefault(hash(extent.key), extensions)
        if before is not extensions and not set(before).intersection(extensions):
            self._first = self._first or extent.key
            self._count += 1

    def told(self) -> str:
        if not self._count:
            return ""
        return encodable(
            f"the files of {counted(self._count, 'sample')} do not lie side by side, such as those of {self._first!r}, "
            "so each is read as several samples, each with some of the parts; write the tar again in the order of "
            "names, as `tar --sort=name` does of a folder"
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


def write_tar_idx(shard: Path, table: ShardTable) -> None:
    """Writes `X.tar.idx`, unless the place is read-only: little-endian uint64 offsets of the samples, then of the end.

    A file with other offsets is replaced only if it is older than its shard.
    """
    offsets = tar_idx(table)
    path = shard.with_suffix(".tar.idx")
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_mtime_ns >= shard.stat().st_mtime_ns:
            if path.read_bytes() != offsets:
                log.warning("%s: other offsets than the shard's samples have; left as it is", path)
            return
        replace_file(path, [offsets])


def tar_idx(table: ShardTable) -> bytes:
    """The right content of `X.tar.idx`."""
    return table.starts + np.array([table.end], dtype="<u8").tobytes()


def tar_idx_fault(shard: Path, table: ShardTable) -> str:
    """Why the offsets beside a shard are not those of its samples; empty if they are, or there are none."""
    path = shard.with_suffix(".tar.idx")
    expected = tar_idx(table)
    try:
        if path.stat().st_size != len(expected):
            found = path.stat().st_size / _OFFSET - 1
            return f"{path.name} has offsets of {found:g} samples, the shard has {len(expected) // _OFFSET - 1}"
        found_offsets = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if found_offsets == expected:
        return ""
    first = int((np.frombuffer(found_offsets, "<u8") != np.frombuffer(expected, "<u8")).argmax())
    return f"{path.name} has another offset for sample {first} than the shard"


TARS = FileFormat(
    TAR,
    TAR_FILES,
    "savable_pipeline.data.shards.scan:TARS",
    read_table,
    is_as_indexed,
    TarIndex,
    whole=True,
    no_digest=xxh3_64().intdigest(),
    for_others=".idx",
    leave_beside=write_tar_idx,
    fault_beside=tar_idx_fault,
)
