"""`ArrowStore`: the record store of Arrow IPC files and streams.

Of an uncompressed file, only the bytes of requested parts are read:

    in a worker             views of the memory-mapped file; if it is truncated in the meantime, the worker crashes
    in any other process    each value is read on request (`UnreadBatch`); a truncated file is an error

The arrays of an unread batch view memory in which each address corresponds to an offset in the file:

    in the file     head │ validity │ offsets │ values …      values: of strings and bytes, and of numbers in lists
    in memory       head │ validity │ offsets │ zeros …       zeros take no memory until something is written there

Reading each value costs a system call.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
import pyarrow as pa

from savable_pipeline.core.child_process import is_replaced
from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.arrow_columns import NUMBER_FORMATS, OFFSETS
from savable_pipeline.data.stores.arrow_file import (
    ArrowMessage,
    Batches,
    MessageError,
    batches_of,
    decoded_bytes,
    file_of_footer,
    read_message,
)
from savable_pipeline.data.stores.grouped_store import ColumnarStore, ColumnSettings, DecodedGroup
from savable_pipeline.data.stores.ranges import RangedTable
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.errors import SavableError

_WHOLE_BYTES = 1 << 19  # bytes of values to read at once, which takes about as long as locating the batch's columns
_BINARY = ("binary", "large_binary")
_OPEN_FILES = 256  # number of files with parsed schemas in memory
_VIEW_BYTES = 1 << 14  # bytes that the cache counts for a batch that is only a view
# batches up to this size are read whole, and each batch counts as at least this size in the cache
_SMALL_BYTES = 1 << 16


class UnreadBatch:
    """Record batch whose values are read on access: bytes `begin` to `end` of a shard.

    `raw` is the memory that its arrays view, uint8 (end - begin,).
    """

    def __init__(self, files: ShardFiles, shard: int, begin: int, end: int) -> None:
        self._files, self._shard, self._begin = files, shard, begin
        zeros = mmap.mmap(-1, end - begin, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.raw = np.frombuffer(zeros, np.uint8)
        self._address = self.raw.ctypes.data
        self._unread: set[int] = set()  # addresses of the buffers that are read by value

    def fill(self, begin: int, size: int) -> None:
        """Read bytes of the batch into the memory. Raises `ShardError`."""
        self._files.read_into(self.raw[begin : begin + size], self._shard, self._begin + begin)

    def contains(self, columns: list[Any]) -> bool:
        """Return whether all buffers of these arrays are in the batch's memory."""
        extents = [(self._offset_of(each), each.size) for column in columns for each in column.buffers() if each]
        return all(0 <= offset <= offset + size <= len(self.raw) for offset, size in extents)

    def buffers(self, columns: list[Any], *, whole: bool = False) -> list[tuple[int, int]]:
        """Return (offset, size) of each buffer of these arrays that is to be read at once.

        These include the smallest buffers of values, or with `whole` all of them. Other values are read one by one.
        """
        pairs = [pair for column in columns for pair in _buffers(column, nested=False)]
        found = [(self._offset_of(buffer), buffer.size) for buffer, by_value in pairs if buffer and not by_value]
        value_bytes = 0
        for buffer in sorted((buffer for buffer, by_value in pairs if buffer and by_value), key=lambda each: each.size):
            value_bytes += buffer.size
            if whole or value_bytes <= _WHOLE_BYTES:
                found.append((self._offset_of(buffer), buffer.size))
            else:
                self._unread.add(self._offset_of(buffer))
        return found

    def reader(self, buffer: Any) -> Callable[[int, int], bytes] | None:
        """See `Unread.reader`.

        The result is None for a buffer that was read at once.
        """
        if buffer is None or self._offset_of(buffer) not in self._unread:
            return None
        read, shard, start = self._files.read, self._shard, self._begin + self._offset_of(buffer)
        return lambda begin, end: read(shard, start + begin, end - begin)

    def rows(self, array: Any, first: int, count: int) -> Any:
        """See `Unread.rows`."""
        kind, buffers = array.type, array.buffers()
        if not any(buffer and self._offset_of(buffer) in self._unread for buffer in buffers):
            return array.slice(first, count)
        own, children = [_validity_bits(buffers[0], first, count)], []  # buffers and children of the returned array
        if pa.types.is_fixed_size_list(kind):
            children = [self.rows(array.values, first * kind.list_size, count * kind.list_size)]
        elif pa.types.is_struct(kind):
            children = [self.rows(array.field(i), first, count) for i in range(kind.num_fields)]
        elif str(kind) in NUMBER_FORMATS:
            size = kind.bit_width // 8
            own.append(self._bytes(buffers[1], first * size, (first + count) * size))
        elif (offset_type := _offset_type(kind)) is not None:
            offsets = np.frombuffer(buffers[1], offset_type)[first : first + count + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            own.append(pa.py_buffer(offsets - offsets[0]))
            if str(kind) in _BINARY:
                own.append(self._bytes(buffers[2], begin, end))
            else:
                children = [self.rows(array.values, begin, end - begin)]
        else:
            return array.slice(first, count)
        return pa.Array.from_buffers(kind, count, own, children=children)

    def _bytes(self, buffer: Any, begin: int, end: int) -> Any:
        read = self.reader(buffer)
        return buffer.slice(begin, end - begin) if read is None else pa.py_buffer(read(begin, end))

    def _offset_of(self, buffer: Any) -> int:
        """Return the offset of a buffer in the batch's memory."""
        offset: int = buffer.address - self._address
        return offset


def _buffers(array: Any, *, nested: bool) -> Iterator[tuple[Any, bool]]:
    """Yield (buffer, whether its values can be read one by one) for each buffer of an array.

    Strings in lists and structs cannot, because Arrow checks that all of them are UTF-8.
    """
    kind, own = str(array.type), array.buffers()  # validity bits, then offsets or numbers, then the values' bytes
    if kind in OFFSETS:
        yield from ((own[0], False), (own[1], False), (own[2], not nested or kind in _BINARY))
    elif kind in NUMBER_FORMATS:
        yield from ((own[0], False), (own[1], nested))
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        yield from ((own[0], False), (own[1], False), *_buffers(array.values, nested=True))
    elif pa.types.is_fixed_size_list(array.type):
        yield from ((own[0], False), *_buffers(array.values, nested=True))
    elif pa.types.is_struct(array.type):
        yield own[0], False
        for i in range(array.type.num_fields):
            yield from _buffers(array.field(i), nested=True)
    else:
        yield from ((buffer, False) for buffer in own)


def _offset_type(kind: Any) -> str | None:
    """Return the type of the offsets of lists and bytes, or None for other arrays."""
    if pa.types.is_large_list(kind) or str(kind) == "large_binary":
        return "<i8"
    return "<i4" if pa.types.is_list(kind) or str(kind) == "binary" else None


def _validity_bits(bits: Any, first: int, count: int) -> Any:
    """Return the validity bits of some rows, shifted to start at bit 0, or None if all are valid."""
    if bits is None:
        return None
    used = np.frombuffer(bits, np.uint8)[first // 8 : (first + count + 7) // 8]
    bits = np.unpackbits(used, bitorder="little")[first % 8 : first % 8 + count]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


class _File:
    """Open file: its schema, its batches, the end row of each, and its memory map if any."""

    def __init__(self, schema: Any, batches: Batches) -> None:
        self.schema, self.batches = schema, batches
        self.view: memoryview | None = None
        self.ends: list[int] = np.cumsum(batches.rows.astype(np.int64)).tolist()


class ArrowStore(ColumnarStore):
    """Rows of Arrow files, such as those of `Dataset.save_to_disk` and of HF's cache.

    The files are named by a folder with its subfolders, a glob, a brace pattern, one file, or a list of these. The
    other settings are those of `ColumnarStore`. Raises `ShardError`, and ValueError for a missing column.
    """

    def __init__(self, found: IndexedFiles, **settings: Unpack[ColumnSettings]) -> None:
        self._open: OrderedDict[int, _File] = OrderedDict()
        super().__init__(found, **settings)

    def group_ends(self, shard: int) -> list[int]:
        """See `ColumnarStore.group_ends`."""
        return self._file(shard).ends

    def schema(self, shard: int) -> Any:
        """See `ColumnarStore.schema`."""
        return self._file(shard).schema

    def decode(self, shard: int, group: int) -> DecodedGroup:
        """See `ColumnarStore.decode`."""
        file = self._file(shard)
        begin, end = int(file.batches.begins[group]), int(file.batches.ends[group])
        try:
            self.check_columns(shard, file.schema.names)
            if not self.files.is_remote:
                self.files.read(shard, end - 1, 1)  # raises the right error for a truncated file
            message = read_message(self.file(shard), begin)
            if message.digest != file.batches.digests[group]:
                raise ValueError("another record batch than was indexed")
            return self._read_batch(shard, begin, end, message, file)
        except SavableError:
            raise
        except (pa.ArrowException, MessageError, OSError, ValueError, KeyError, MemoryError) as error:
            text = " ".join(str(error).split()) or "no memory"
            raise self.damaged(shard, f"record batch {group} at byte {begin}", text) from error

    def _read_batch(self, shard: int, begin: int, end: int, message: ArrowMessage, file: _File) -> DecodedGroup:
        """Return a record batch: as a view, read whole, or read by value."""
        remote = self.files.is_remote
        if not remote and is_replaced():
            return self._parse(self._view(shard, file)[begin:end], message, file, _VIEW_BYTES)
        if message.is_compressed or (self.wanted is None if remote else end - begin <= _SMALL_BYTES):
            raw = memoryview(self.files.read(shard, begin, end - begin))
            return self._parse(raw, message, file, max(end - begin, 0 if remote else _VIEW_BYTES))
        unread = UnreadBatch(self.files, shard, begin, end)
        unread.fill(0, message.head)
        batch = self._selected(_parse_batch(unread.raw.data, file.schema))
        if not unread.contains(batch.columns):  # pyarrow copied a buffer to align it
            return self._parse(memoryview(self.files.read(shard, begin, end - begin)), message, file, end - begin)
        extents = unread.buffers(batch.columns, whole=remote)
        size = end - begin if remote else max(_SMALL_BYTES, sum(size for _, size in extents))
        self._check_size(size)
        for offset, length in extents:
            unread.fill(offset, length)
        return DecodedGroup([batch], size, None if remote else unread)

    def _parse(self, raw: memoryview, message: ArrowMessage, file: _File, size: int) -> DecodedGroup:
        """Return a record batch whose bytes are in memory.

        `size` is their size unless they are compressed.
        """
        size = decoded_bytes(raw, message) if message.is_compressed else size
        self._check_size(size)
        return DecodedGroup([self._selected(_parse_batch(raw, file.schema))], size)

    def _selected(self, batch: Any) -> Any:
        return batch if self.wanted is None else batch.select(self.wanted)

    def _check_size(self, size: int) -> None:
        """Raise ValueError if a record batch takes more bytes in memory than a group may."""
        if size > self.most_decoded:
            raise ValueError(f"it decodes to {human_bytes(size)}. Write smaller batches, or raise cache_bytes=")

    def _file(self, shard: int) -> _File:
        if (found := self._open.get(shard)) is None:
            found = self._open[shard] = self._open_file(shard)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return found

    def _open_file(self, shard: int) -> _File:
        batches = batches_of(self.blob(shard))
        try:
            schema = self._schema(shard, batches)
        except (pa.ArrowException, MessageError, OSError) as error:
            raise self.damaged(shard, f"schema at byte {batches.schema}", " ".join(str(error).split())) from error
        return _File(schema, batches)

    def _schema(self, shard: int, batches: Batches) -> Any:
        if batches.is_in_footer:
            tail = self.files.read(shard, batches.schema, int(self.entries.sizes[shard]) - batches.schema)
            return pa.ipc.open_file(pa.BufferReader(file_of_footer(tail))).schema
        message = read_message(self.file(shard), batches.schema)
        raw = self.files.read(shard, message.offset, message.end - message.offset)
        return pa.ipc.read_schema(pa.ipc.read_message(pa.BufferReader(raw)))

    def _view(self, shard: int, file: _File) -> memoryview:
        """Return the memory map of a local file."""
        if file.view is not None:
            return file.view
        descriptor, path = self.files[shard], self.files.path(shard)
        self.files.watch_view(shard, path)
        try:
            file.view = memoryview(mmap.mmap(descriptor, int(self.entries.sizes[shard]), access=mmap.ACCESS_READ))
        except OSError as error:
            raise self.damaged(shard, "the file", error.strerror or str(error)) from error
        return file.view

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """Return the byte ranges of the batches with these rows.

        The result is empty if only some columns are read.
        """
        if self.wanted is not None:
            return super().byte_ranges(shard, rows)
        file = self._file(shard)
        groups = np.unique(np.searchsorted(file.ends, rows, side="right"))
        return file.batches.begins[groups].astype(np.int64), file.batches.ends[groups].astype(np.int64)


def _parse_batch(raw: memoryview, schema: Any) -> Any:
    return pa.ipc.read_record_batch(pa.ipc.read_message(pa.BufferReader(pa.py_buffer(raw))), schema)


class RangedArrowStore(RangedTable, ArrowStore):
    """Rows of Arrow files with columns that name ranges of other files."""
