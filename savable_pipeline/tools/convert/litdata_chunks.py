"""How items lie in a chunk of LitData. Numbers are little-endian.

    count u32 │ offsets u32 (count + 1,) │ item │ item │ …                 each item may be compressed: `Numbered`
    "LDFZ01" 0 0 │ version u16 │ 0 u16 │ count u32 │ items a frame u32 │ frames u32 │ offsets u32 (count + 1,)
        │ places (frames,): first item u32, items u32, begin u64, size u32, size of its content u32 │ frame │ …
    … │ Arrow IPC, a row an item │ its size u32 │ "LDARW01" 0

Offsets of items in frames count from the first item on, as if no frame was compressed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from savable_pipeline.tools.convert.fields import Blob, Value
from savable_pipeline.tools.convert.litdata_rows import ROWS, ArrowItems
from savable_pipeline.tools.convert.records import Numbered, Records, Schema, check_count, number_at
from savable_pipeline.tools.convert.stretches import RecordError, RecordFile, Stretch

_FRAMED = b"LDFZ01\0\0"
_PREFIX = struct.Struct("<8sHHIII")
_PLACE = struct.Struct("<IIQII")


def items_of(files: Iterable[RecordFile], counts: Sequence[int], schema: Schema, level: str) -> Iterator[Records]:
    """The items of each chunk, numbered through; `level` is what was compressed by itself: chunk, batch or sample.

    Raises ValueError for a chunk that is compressed in another way than that.
    """
    first = 0
    for file, count in zip(files, counts, strict=True):
        yield _items(file, schema, first, count, level)
        first += count


def _items(file: RecordFile, schema: Schema, first: int, count: int, level: str) -> Records:
    content = file.content()
    if content.tail(len(ROWS)) == ROWS:
        return ArrowItems(file, first, count)
    if content.head(len(_FRAMED)) == _FRAMED:
        return FramedItems(file, schema, first, count)
    if level == "batch":
        raise ValueError(f"{file.path}: no frames, but compressed by batch by the index; copy it again")
    return Numbered(file, schema, first, count, "zst" if level == "sample" else "")


@dataclass(frozen=True, slots=True)
class FramedItems:
    """`Records` in frames of zstd, some items each."""

    file: RecordFile
    schema: Schema
    first: int
    count: int

    def check(self) -> None:
        """See `Records.check`."""
        check_count(self.file, number_at(self.file, 12), self.count)
        _, version, _, _, a_frame, frames = self._prefix()
        if version != 1:
            raise ValueError(f"{self.file.path}: version {version} of frames, where 1 is read")
        if a_frame < 1 or frames != -(-self.count // a_frame):
            raise ValueError(f"{self.file.path}: {frames} frames of {a_frame} items for {self.count}; copy it again")

    def fields(self, number: int) -> list[Value | Blob]:
        """See `Records.fields`."""
        i = number - self.first
        content = self.file.content()
        place = _PREFIX.size + 4 * (self.count + 1) + _PLACE.size * (i // self._prefix()[4])
        first, items, begin, size, content_size = _PLACE.unpack(content.part(place, _PLACE.size).read())
        if not first <= i < first + items:
            raise RecordError(f"damaged record: its frame holds the items from {first} on, {items} of them")
        (start,) = content.uint32s(_PREFIX.size + 4 * first, 1)
        item, end = content.uint32s(_PREFIX.size + 4 * i, 2)
        frame = _frame(self.file, begin, size, content_size)
        if isinstance(frame, RecordError):
            raise frame
        return self.schema.fields(frame.part(item - start, end - item))

    def _prefix(self) -> tuple[int, ...]:
        return _PREFIX.unpack(self.file.content().part(0, _PREFIX.size).read())


@functools.lru_cache(maxsize=1)
def _frame(file: RecordFile, begin: int, size: int, content_size: int) -> Stretch | RecordError:
    """The items of a frame, decompressed; or why they cannot be read, once for all of them."""
    try:
        return file.content().part(begin, size).inflated("zst", content_size)
    except RecordError as error:
        return error


def close_frames() -> None:
    """Free what this process decompressed last."""
    _frame.cache_clear()
