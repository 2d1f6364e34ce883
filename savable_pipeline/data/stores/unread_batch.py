"""`UnreadBatch`: a record batch of a file on a disk, of which values are read when they are asked for.

    in the file     head │ validity │ offsets │ values …      values: of strings and bytes, and of numbers in lists
    in memory       head │ validity │ offsets │ zeros …       zeros take no memory until something is written there

Arrays view the memory, so that their place there tells where a value lies in the file. To read each value costs a call
of the system; in return, a file that was cut short is an error. Of a file that is mapped, it ends the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from savable_pipeline.data.stores.arrow_columns import NUMBERS, OFFSETS
from savable_pipeline.data.stores.shard_files import ShardFiles

_WHOLE = 1 << 19  # bytes of values that are read at once: about as long as it takes to find the batch's columns
_BINARY = ("binary", "large_binary")


class UnreadBatch:
    """The bytes from `begin` up to `end` of a shard; `raw` is their memory, uint8 (end - begin,)."""

    def __init__(self, files: ShardFiles, shard: int, begin: int, end: int) -> None:
        self._files, self._shard, self._begin = files, shard, begin
        zeros = mmap.mmap(-1, end - begin, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.raw = np.frombuffer(zeros, np.uint8)
        self._address = self.raw.ctypes.data
        self._unread: set[int] = set()  # places of the buffers that are read by value

    def fill(self, begin: int, size: int) -> None:
        """Reads bytes of the batch into the memory. Raises `ShardError`."""
        self._files.read_into(self.raw[begin : begin + size], self._shard, self._begin + begin)

    def holds(self, columns: list[Any]) -> bool:
        """Whether these arrays view the memory, and nothing else."""
        places = [(self._place(buffer), buffer.size) for column in columns for buffer in column.buffers() if buffer]
        return all(0 <= place <= place + size <= len(self.raw) for place, size in places)

    def buffers(self, columns: list[Any]) -> list[tuple[int, int]]:
        """Place and bytes of the buffers of these arrays that are read at once; what is not here is read by value.

        Of buffers of values, the smallest are read at once.
        """
        pairs = [pair for column in columns for pair in _buffers(column, nested=False)]
        found = [(self._place(buffer), buffer.size) for buffer, by_value in pairs if buffer and not by_value]
        values = 0
        for buffer in sorted((buffer for buffer, by_value in pairs if buffer and by_value), key=lambda each: each.size):
            values += buffer.size
            if values <= _WHOLE:
                found.append((self._place(buffer), buffer.size))
            else:
                self._unread.add(self._place(buffer))
        return found

    def reader(self, buffer: Any) -> Callable[[int, int], bytes] | None:
        """What reads the bytes of a buffer from the first up to the second number; None if they are in memory."""
        if buffer is None or self._place(buffer) not in self._unread:
            return None
        read, shard, place = self._files.read, self._shard, self._begin + self._place(buffer)
        return lambda begin, end: read(shard, place + begin, end - begin)

    def rows(self, array: Any, first: int, count: int) -> Any:
        """Rows of an array that is valid but for what is not read, with all that they hold. Raises `ShardError`."""
        kind, buffers = array.type, array.buffers()
        if not any(buffer and self._place(buffer) in self._unread for buffer in buffers):
            return array.slice(first, count)
        own, children = [_bits(buffers[0], first, count)], []
        if pa.types.is_fixed_size_list(kind):
            children = [self.rows(array.values, first * kind.list_size, count * kind.list_size)]
        elif pa.types.is_struct(kind):
            children = [self.rows(array.field(i), first, count) for i in range(kind.num_fields)]
        elif str(kind) in NUMBERS:
            size = kind.bit_width // 8
            own.append(self._bytes(buffers[1], first * size, (first + count) * size))
        elif (width := _offset_type(kind)) is not None:
            offsets = np.frombuffer(buffers[1], width)[first : first + count + 1]
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

    def _place(self, buffer: Any) -> int:
        """Where a buffer begins in the memory."""
        place: int = buffer.address - self._address
        return place


def _buffers(array: Any, *, nested: bool) -> Iterator[tuple[Any, bool]]:
    """The buffers of an array; with each, whether values can be read from it one by one.

    Strings in lists and structs cannot: Arrow checks that all are UTF-8.
    """
    kind, own = str(array.type), array.buffers()
    if kind in OFFSETS:
        yield from ((own[0], False), (own[1], False), (own[2], not nested or kind in _BINARY))
    elif kind in NUMBERS:
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
    """The type of the offsets of lists and bytes; None of other arrays."""
    if pa.types.is_large_list(kind) or str(kind) == "large_binary":
        return "<i8"
    return "<i4" if pa.types.is_list(kind) or str(kind) == "binary" else None


def _bits(bits: Any, first: int, count: int) -> Any:
    """The validity of some rows, from bit 0 on; None where all are valid."""
    if bits is None:
        return None
    used = np.frombuffer(bits, np.uint8)[first // 8 : (first + count + 7) // 8]
    here = np.unpackbits(used, bitorder="little")[first % 8 : first % 8 + count]
    return pa.py_buffer(np.packbits(here, bitorder="little"))
