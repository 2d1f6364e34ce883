"""Records in memory: of a file that was decompressed, or rows of Arrow; see `record_files`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index_file import Places
from savable_pipeline.data.stores.arrow_file import batches_of, decoded_bytes, read_message
from savable_pipeline.data.stores.arrow_file import read_table as arrow_table
from savable_pipeline.data.stores.decompressed import MORE
from savable_pipeline.data.stores.record_fields import Blob, Value, raw
from savable_pipeline.data.stores.record_files import Schema

_FILE = b"ARROW1"  # how a file of Arrow begins; a stream does not
_NOTHING = object()  # in the place of bytes, which are parts of their own


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """The records of `data`: `offsets` are uint64 (records + 1,)."""

    data: bytes
    offsets: Places
    schema: Schema

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def fields(self, place: int) -> list[Value | Blob]:
        """The fields of a record. Raises `RecordError`."""
        return self.schema.fields(record_in(ByteSource.of(self.data), self.offsets, place))

    def kept(self, place: int) -> RecordBlock:
        """A record by itself, at place 0, to be kept when those around it are given up. Raises `RecordError`."""
        data = record_in(ByteSource.of(self.data), self.offsets, place).read()
        return RecordBlock(data, np.array([0, len(data)], np.uint64), self.schema)

    @property
    def size(self) -> int:
        """Its bytes in memory."""
        return len(self.data) + self.offsets.nbytes


def record_in(content: ByteSource, offsets: Places, place: int) -> ByteSource:
    """The record at a place. Raises `RecordError` if it is not in the content."""
    first, end = int(offsets[place]), int(offsets[place + 1])
    return content.part(first, end - first)


@dataclass(frozen=True, slots=True)
class RecordTable:
    """Rows of Arrow: dicts of texts, numbers, bytes and lists. What is bytes is a part, the rest is values.

    {"image": JPEG, "caption": "a cat", "size": [8, 8]}      →      jpg, json: {"caption": "a cat", "size": [8, 8]}
    """

    table: Any

    def __len__(self) -> int:
        rows: int = self.table.num_rows
        return rows

    def fields(self, place: int) -> list[Value | Blob]:
        """See `RecordBlock.fields`."""
        (row,) = self.table.slice(place, 1).to_pylist()
        blobs: list[Value | Blob] = []
        values = {name: _without_bytes(value, name, blobs) for name, value in row.items()}
        return [*blobs, *(Value(name, value) for name, value in values.items() if value is not _NOTHING)]

    def kept(self, place: int) -> RecordTable:
        """See `RecordBlock.kept`."""
        return RecordTable(self.table.take([place]))

    @property
    def size(self) -> int:
        """See `RecordBlock.size`."""
        size: int = self.table.nbytes
        return size


def table_of(data: bytes, expected: int, most: int) -> RecordTable:
    """The rows of a file or a stream of Arrow. Raises ValueError for damage, and for more than `most` bytes of them."""
    import pyarrow as pa  # imported here: it is needed for such chunks alone

    if (size := _decoded_bytes(data)) > most:
        raise ValueError(f"rows in Arrow of {size} bytes; at most {most} are read: {MORE}")
    try:
        source = pa.py_buffer(data)
        reader = pa.ipc.open_file(source) if data.startswith(_FILE) else pa.ipc.open_stream(source)
        table = reader.read_all()
        table.validate(full=True)  # before anything follows its offsets
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ValueError(f"damaged rows in Arrow: {error}") from error
    if table.num_rows != expected:
        raise ValueError(f"holds {table.num_rows} records, but {expected} by the index")
    return RecordTable(table)


def _decoded_bytes(data: bytes) -> int:
    """The bytes that compressed batches say that they decode to."""
    file = ByteSource.of(data)
    found = arrow_table(file, "damaged rows in Arrow")
    if found.entry.fault:
        raise ValueError(found.entry.fault)
    batches, total = batches_of(np.frombuffer(found.starts, "<u8")), 0
    for begin, end in zip(batches.begins.tolist(), batches.ends.tolist(), strict=True):
        message = read_message(file, begin)
        total += decoded_bytes(memoryview(data)[begin:end], message) if message.compressed else 0
    return total


def _without_bytes(value: Any, name: str, blobs: list[Value | Blob]) -> Any:
    """A value without the bytes in it, which are added to `blobs`, by the names on the way to them."""
    if isinstance(value, bytes):
        blobs.append(raw(name, "", ByteSource.of(value)))
        return _NOTHING
    if not isinstance(value, dict | list):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {str(key): _without_bytes(item, f"{name}_{key}", blobs) for key, item in items}
    kept = {key: item for key, item in found.items() if item is not _NOTHING}
    if len(kept) == len(found):
        return kept if isinstance(value, dict) else list(kept.values())
    return kept or _NOTHING
