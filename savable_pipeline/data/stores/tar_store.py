"""`TarStore`: the record store of tar shards, local or remote.

    TarRows    where the parts of a sample are, by the index
    TarParts   reads them from open tars, each with one positioned read
    TarStore   both, with downloads or reads ahead: a `RecordStore`

As refs enter the buffer, the kernel is asked to read their samples ahead from a disk (`posix_fadvise`). This doubles
the rate for parts of 25 kB that are not in memory (tools/bench/reading.py cold). A call costs 1 to 10 µs per sample.
Therefore no call is made if some probed blocks are in memory, for small samples, which the kernel reads ahead by
itself, and for samples of more than 8 MiB. Often only two seconds of a long video are needed, and the kernel soon
reads ahead in one that is read whole.

Links to other files of their tar are not parts, as in webdataset. A warning counts them and names the fix:

    a.jpg │ a.txt │ b.jpg │ b.txt → a.txt │ c.jpg → a.jpg      a: jpg, txt; b: jpg
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards import tar_format
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import TAR, Format, IndexedFiles, ShardTable
from savable_pipeline.data.shards.part_types import find_part, is_part
from savable_pipeline.data.shards.paths import PACKED_TARS, TARS_END
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.shards.tar import members, split_name
from savable_pipeline.data.stores.record_store import StoreFacts
from savable_pipeline.data.stores.shard_files import LocalFiles, ShardFiles
from savable_pipeline.errors import SavableError, ShardError

_BLOCKS_TRIED = 16  # number of runs to test to estimate whether all are in memory
_LONG = 8 << 20  # bytes of a long sample such as a video, of which often only a part is read
SMALL = 16_384  # samples with fewer bytes on average are not announced


def readahead(rows: TarRows, files: ShardFiles, indices: Rows) -> None:
    """Ask the kernel to read these samples ahead, one call per contiguous run.

    Shards that cannot be opened are skipped.
    """
    found = rows.found
    if found.mean_bytes < SMALL or not hasattr(os, "posix_fadvise"):
        return
    numbers = found.shards_of(indices)
    begins, ends = rows.extents(indices, indices, numbers)
    indices, numbers = indices[ends - begins <= _LONG], numbers[ends - begins <= _LONG]
    if not len(indices):
        return
    first = np.flatnonzero((np.diff(indices, prepend=-2) != 1) | (np.diff(numbers, prepend=-1) != 0))  # of each run
    last = np.append(first[1:], len(indices)) - 1
    begins, ends = rows.extents(indices[first], indices[last], numbers[first])
    runs = list(zip(numbers[first].tolist(), begins.tolist(), ends.tolist(), strict=True))
    if are_in_memory(files, runs[:: -(-len(runs) // _BLOCKS_TRIED)]):
        return
    for shard, begin, end in runs:
        with contextlib.suppress(SavableError, OSError):
            os.posix_fadvise(files[shard], begin, end - begin, os.POSIX_FADV_WILLNEED)


def are_in_memory(files: ShardFiles, runs: list[tuple[int, int, int]]) -> bool:
    """Return whether the last byte of each run can be read without waiting for a disk.

    A run is (shard, first byte, end).
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(os.preadv(files[shard], [byte], end - 1, os.RWF_NOWAIT) == 1 for shard, _, end in runs)
    except (SavableError, OSError):  # the read would wait, or the file system cannot tell
        return False


class TarRows:
    """Locations of the samples of tars. Each sample is a row of the index.

    Raises `ShardError` if there is none.
    """

    def __init__(self, found: IndexedFiles) -> None:
        index = found.index
        assert isinstance(index, tar_format.TarIndex), index
        self.found, self.index = found, index
        self.first_rows = index.shard_rows[found.numbers]  # int64 (shards,)
        if not found.firsts[-1]:
            fault = next(iter(found.entries.faults.values()), "")
            why = fault or "Name a sample's files KEY.EXTENSION in the tar"
            raise ShardError(f"{found.address}: no sample in {counted(len(found.entries), 'shard')}. {why}")

    def rows(self, shards: Rows, positions: Rows) -> Rows:
        """Return the index rows of the samples at these positions of these shards."""
        rows: Rows = self.first_rows[shards] + positions
        return rows

    def extents(self, first: Rows, last: Rows, shards: Rows) -> tuple[Rows, Rows]:
        """Return the byte ranges (begins, ends) of runs of samples `first` to `last`.

        Each run is in one shard.
        """
        starts = np.asarray(self.index.starts)
        rows = self.first_rows[shards] - self.found.firsts[shards]
        is_last = last + 1 == self.found.firsts[shards + 1]  # whether a run ends with its shard
        next_starts = starts[np.minimum(rows + last + 1, len(starts) - 1)]
        ends = np.where(is_last, self.found.entries.sizes[shards], next_starts)
        return starts[rows + first].astype(np.int64), ends.astype(np.int64)

    def layout(self, row: int) -> tar_format.Layout:
        """Return the layout of a sample. Raises `ShardError` if the index is damaged."""
        try:
            return self.index.layout(row)
        except IndexError:
            raise self.found.damaged("a shard") from None

    def extent(self, row: int, extension: str) -> tuple[int, int]:
        """Return offset and size in bytes of one part of a sample.

        Raises KeyError if the part is missing.
        """
        layout = self.layout(row)
        if (member := layout.member_of.get(extension)) is None:
            member = layout.member_of[find_part(extension, layout.member_of)]
        return self.index.extent(row, member, layout)

    def offset(self, shard: int, row: int) -> int:
        """Return the offset in bytes of a sample's first header in its shard."""
        return self.index.starts[row]

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return the extensions of a sample, in the order of the tar."""
        return list(self.layout(row).member_of)

    def has_part(self, shard: int, row: int, extension: str) -> bool:
        """See `RecordStore.has_part`."""
        return is_part(extension, self.layout(row).member_of)

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """Return the size in bytes of each part of a sample, by extension."""
        layout = self.layout(row)
        return {extension: self.index.extent(row, member, layout)[1] for extension, member in layout.member_of.items()}

    def part_sizes(self) -> dict[str, Rows]:
        """Return the sizes in bytes of all parts, by extension.

        Shards with damaged index rows are skipped.
        """
        found = self.found
        nonempty = np.flatnonzero(found.entries.samples).tolist()
        whole = [shard for shard in nonempty if self.index.is_whole(int(found.numbers[shard]))]
        rows = [np.arange(int(found.entries.samples[shard])) + self.first_rows[shard] for shard in whole]
        return self.index.part_sizes(np.concatenate(rows)) if rows else {}


class TarParts:
    """Reader of parts from `files`, located by the index.

    It does not check whether bytes are cached, see `ShardFiles.download_first`.
    """

    def __init__(self, rows: TarRows, files: ShardFiles) -> None:
        index = rows.index
        self._files = files
        self._extent, self._starts, self._sizes = rows.extent, index.starts, index.sizes
        self._first: str | None = None  # the first extension of every sample, if all samples have the same parts
        if len(index.layouts) == 1:
            layout = index.layouts[0]
            self._first, self._gap, self._members = next(iter(layout.member_of)), layout.gaps[0], len(layout.gaps)

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """Return the bytes of one part of a sample.

        Raises KeyError, or `ShardError` if the shard has changed.
        """
        descriptor = self._files[shard]
        if extension == self._first:  # inlined, because a call would cost half as much as the read
            offset, size = self._starts[row] + self._gap, self._sizes[row * self._members]
        else:
            offset, size = self._extent(row, extension)
        try:
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            data = self._files.read_again(shard, offset, size, error)
        return data if len(data) == size else data + self._files.read_rest(shard, offset + len(data), size - len(data))

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        """Return the bytes of one part as a writable array: uint8 (bytes,).

        Its memory is that of the next batch if there is room, see `empty_bytes`. Raises the errors of `read`.
        """
        offset, size = self._extent(row, extension)
        array = empty_bytes(size)
        self._files.read_into(array, shard, offset)
        return array

    def span(self, shard: int, row: int, extent: tuple[int, int]) -> bytes:
        """Return the bytes at `extent`, (offset, size), of a shard. Raises `ShardError`."""
        return self._files.read(shard, *extent)

    def key(self, shard: int, row: int, path: str) -> str:
        """Return the key of a sample, from its first header. Messages name `path`.

        Raises `ShardError`.
        """
        try:
            return key_at(path, self._files[shard], self._starts[row])
        except OSError as error:
            self._files.read_again(shard, self._starts[row], 1, error)
            return key_at(path, self._files[shard], self._starts[row])


def _files_of(found: IndexedFiles) -> ShardFiles:
    if found.remote is None:
        return LocalFiles(found)
    from savable_pipeline.data.stores.cached_samples import CachedFiles  # imported only for remote shards

    return CachedFiles(found)


class TarStore(StoreFacts):
    """`RecordStore` of tars: an index locates samples, and `TarParts` reads them.

    `root` has the metadata. Rows are those of the index.

    Methods of `TarRows`, `ShardFiles` and `TarParts` are bound as attributes, because a wrapper around `read` would
    cost up to a tenth of a read.
    """

    found: IndexedFiles
    unit, keys_in_shards = "byte offset", True

    def __init__(self, found: IndexedFiles) -> None:
        self.found, self.address = found, found.address
        self.root: Path | None = found.root
        self.entries: Sequence[ShardEntry] = found.entries
        self.endings: Sequence[str] = found.form.suffixes  # of the names of shards
        self._tar_rows = tar_rows = TarRows(found)
        self.files = files = _files_of(found)
        self.rows = files.fetch_rows_first(tar_rows.rows)
        self.offset, self.extensions, self.sizes = tar_rows.offset, tar_rows.extensions, tar_rows.sizes
        self.has_part = tar_rows.has_part
        self.request, self.verify, self.verify_yielded = files.request, files.verify, files.verify_yielded
        reader = TarParts(tar_rows, files)
        long_reader = files.long_sample_reader(reader, tar_rows.extent)  # for samples that are not downloaded whole
        self.read = files.download_first(reader.read, long_reader.read)
        self.array = files.download_first(reader.array, long_reader.array)
        self._span = files.download_first(reader.span, long_reader.span)
        self._key = files.download_first(reader.key, reader.key)  # `key` peeks at long samples instead

    def table(self, shard: int) -> ShardTable:
        """See `IndexedFiles.table`."""
        self.files.fetch_rows(self.found.numbers[[shard]])
        return self.found.table(shard)

    def part_sets(self) -> list[list[str]]:
        """See `StoreFacts.part_sets`."""
        return [[*layout.member_of] for layout in self._tar_rows.index.layouts]

    def rejects_warning(self) -> str:
        """See `RecordStore.rejects_warning`. It counts links."""
        index = self._tar_rows.index
        return _indexed_links_warning(self.address, index, self.found.numbers.tolist()) if index.links else ""

    def prefetch(self, indices: Rows) -> None:
        """Request the download of these samples, or read them ahead from the disk."""
        if self.files.is_remote:
            self.files.prefetch(indices)
        else:
            readahead(self._tar_rows, self.files, indices)

    def part_offset(self, shard: int, row: int, extension: str) -> int:
        """See `RecordStore.part_offset`."""
        return self._tar_rows.extent(row, extension)[0]

    def part_sizes(self) -> dict[str, Rows] | None:
        """See `RecordStore.part_sizes`. The result is None if index rows are missing."""
        return self._tar_rows.part_sizes() if self.files.has_all_rows() else None

    @property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`: a number of refs."""
        return self.files.prefetch_refs

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`. Only requested bytes are read.

        Raises KeyError, or `ShardError`.
        """
        span = self._span
        begin, size = self._tar_rows.extent(row, extension)
        return ByteSource(lambda *extent: span(shard, row, extent), size, begin=begin).open()

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        """Return at most `limit` first bytes of a part, and its size.

        Raises KeyError, or `ShardError`.
        """
        offset, size = self._tar_rows.extent(row, extension)
        extent = offset, min(size, limit)
        head = self.files.peek(shard, row, extent)
        return (self._span(shard, row, extent) if head is None else head), size

    def key(self, shard: int, row: int) -> str:
        """Return the key of a sample, read from its first header.

        Raises `ShardError`.
        """
        path = f"{self.address}/{self.found.entries.names[shard]}"
        headers = self.files.peek(shard, row, (self.offset(shard, row), self._tar_rows.layout(row).gaps[0]))
        if headers is None:
            return self._key(shard, row, path)
        with tempfile.TemporaryFile() as file:
            file.write(headers)
            file.truncate(int(self.found.entries.sizes[shard]))  # a hole replaces the payload
            return key_at(path, file.fileno(), 0)


def key_at(path: str, descriptor: int, offset: int) -> str:
    """Return the key of the sample whose first header is at `offset` of an open shard.

    Raises `ShardError` if there is no such header.
    """
    first = next(members(path, descriptor, offset), None)
    key_and_extension = split_name(first.name) if first else None
    if key_and_extension is None:
        raise ShardError(f"{path}: no sample at byte {offset}, unlike when it was indexed")
    return key_and_extension[0]


def links_warning(address: str, count: int, first: str) -> str:
    """Return a warning about `count` links in a dataset. `first` names one of them."""
    return (
        f"{address}: {counted(count, 'member is a link', 'members are links')} to other files of their tar, such as "
        f"{first}: these are no parts of samples, here as in webdataset and Energon; pack the files again with "
        "`tar --hard-dereference`, and `--dereference` for symbolic links, which writes the bytes that they lead to"
    )


def _indexed_links_warning(address: str, index: tar_format.TarIndex, numbers: Iterable[int]) -> str:
    """Return a warning of the links in the shards with these numbers, or ""."""
    found = [(number, index.links[number]) for number in numbers if number in index.links] if index.links else []
    if not found:
        return ""
    number, link = found[0]
    return links_warning(address, sum(each.count for _, each in found), f"{link.first} in {index.shards.names[number]}")


class _TarFormat(Format):
    """Format of tars, with an index of its own, and with sidecars of offsets that Energon reads."""

    index, offsets_suffix = tar_format.TarIndex, ".idx"

    def unreadable(self, name: str, size: int, fault: str) -> ShardTable:
        """See `Format.unreadable`."""
        table = super().unreadable(name, size, fault)
        table.entry = msgspec.structs.replace(table.entry, digest=xxh3_64().intdigest())
        return table

    def write_offsets(self, path: Path, table: ShardTable) -> None:
        """See `Format.write_offsets`."""
        tar_format.write_tar_idx(path, table)

    def offsets_error(self, path: Path, table: ShardTable) -> str:
        """See `Format.offsets_error`."""
        return tar_format.tar_idx_fault(path, table)


TARS = _TarFormat(
    TAR,
    (TARS_END,),
    tar_format.read_tar_table,
    TarStore,
    is_same=tar_format.tar_matches_index,
    packed=PACKED_TARS,
    whole=True,
    no_rows=msgspec.msgpack.encode(tar_format.TarColumns(memoryview(b""))),
)
