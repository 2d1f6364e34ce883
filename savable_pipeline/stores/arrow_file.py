"""Arrow IPC files and streams: where their record batches lie, read from the messages themselves, without pyarrow.

    [ "ARROW1" 0 0 ]  schema  batch 0  batch 1  …  end  [ footer "ARROW1" ]        in brackets: files only

    message   0xffffffff │ length i32 │ metadata: flatbuffer │ body
                                        ├ kind, length of the body
                                        └ of a batch: rows, compression

Places of a file in the index: the offset of the schema; of each batch, and the end of the last; the rows of each; a
hash of the metadata of each, which says where every column begins.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.wording import encodable
from savable_pipeline.shards.paths import ShardKind
from savable_pipeline.shards.shard_list import ShardEntry
from savable_pipeline.stores.file_bytes import FileBytes
from savable_pipeline.stores.file_format import FileFormat, scan_file
from savable_pipeline.stores.place_index import FileTable, Places

_MAGIC = b"ARROW1"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_LARGEST_METADATA = 1 << 28
_MOST_ROWS = 1 << 40


class MessageError(ValueError):
    """A message is not there, or cannot be right."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message at `offset`: its kind, the bytes up to its body and of its body, and for a batch its rows."""

    offset: int
    kind: int
    head: int
    body: int
    rows: int
    compressed: bool
    digest: int  # of the metadata

    @property
    def end(self) -> int:
        """The offset after the message."""
        return self.offset + self.head + self.body


@dataclass(frozen=True, slots=True)
class Batches:
    """The places of a file, in words: uint64 each."""

    schema: int
    offsets: Places  # (batches + 1,)
    rows: Places  # (batches,)
    digests: Places  # (batches,)


def batches_of(places: Places) -> Batches:
    """The places of a file by their meaning."""
    count = (len(places) - 2) // 3
    return Batches(int(places[0]), places[1 : count + 2], places[count + 2 : 2 * count + 2], places[2 * count + 2 :])


def scan(root: Path, name: str) -> FileTable:
    """See `scan_file`."""
    return scan_file(root, name, ARROW)


def read_table(file: FileBytes, name: str) -> FileTable:
    """Entry and batches of a file; damage is the entry's fault, and the batches before it are taken."""
    found: list[Message] = []
    fault = _read_messages(file, found)
    places = _places(found)
    rows = sum(message.rows for message in found[1:])
    digest = _digest(places, found[:1])
    return FileTable(
        ShardEntry(name, file.size, rows, digest, encodable(f"{name}: {fault}") if fault else ""), places.tobytes()
    )


def _digest(places: Places, schema: list[Message]) -> int:
    return xxh3_64_intdigest(places.tobytes() + str([message.digest for message in schema]).encode())


def is_as_indexed(file: FileBytes, table: FileTable) -> bool:
    """Whether schema, first batch, one in the middle and the last are where they were, laid out as they were."""
    batches = batches_of(table.array())
    count = len(batches.rows)
    try:
        if _digest(table.array(), [read_message(file, batches.schema)]) != table.entry.digest:
            return False
        for i in sorted({0, count // 2, count - 1}) if count else []:
            if read_message(file, int(batches.offsets[i])).digest != batches.digests[i]:
                return False
    except (MessageError, OSError):
        return False
    return True


def read_message(file: FileBytes, offset: int) -> Message:
    """The message at `offset` of a file, its body not read. Raises `MessageError`, OSError."""
    start, size = file.read(offset, 8), file.size
    if len(start) < 8 or start[:4] != b"\xff\xff\xff\xff":
        raise MessageError(f"no Arrow message at byte {offset}")
    length = struct.unpack_from("<i", start, 4)[0]
    if not 0 < length <= min(_LARGEST_METADATA, size - offset - 8):
        raise MessageError(f"a message of {length} bytes at byte {offset} of {size}")
    metadata = file.read(offset + 8, length)
    try:
        table = _Table.root(metadata)
        kind, body, header = table.number(1, "<B"), table.number(3, "<q"), table.table(2)
        rows = header.number(0, "<q") if kind == _BATCH else 0
        compressed = kind == _BATCH and header.has(3)
    except struct.error as error:
        raise MessageError(f"damaged metadata at byte {offset}") from error
    if body < 0 or offset + 8 + length + body > size:
        raise MessageError(f"the message at byte {offset} should end at byte {offset + 8 + length + body} of {size}")
    if not 0 <= rows <= _MOST_ROWS:
        raise MessageError(f"a batch of {rows} rows at byte {offset}")
    return Message(offset, kind, 8 + length, body, rows, compressed, xxh3_64_intdigest(metadata))


def decoded_bytes(raw: memoryview, message: Message) -> int:
    """The bytes that the compressed buffers of a batch, whose message is `raw`, say that they decode to.

    Raises `MessageError`.
    """
    total = 0
    try:
        header = _Table.root(bytes(raw[8 : message.head])).table(2)
        for offset, length in header.pairs(2):
            if length:
                total += max(length, struct.unpack_from("<q", raw, message.head + offset)[0])  # -1: not compressed
    except struct.error as error:
        raise MessageError(f"damaged metadata at byte {message.offset}") from error
    return total


def _read_messages(file: FileBytes, found: list[Message]) -> str:
    """Adds the schema and the batches of a file to `found`. Returns its fault, if it has one."""
    size = file.size
    is_file = file.read(0, 6) == _MAGIC
    if is_file and file.read(max(0, size - 6), 6) != _MAGIC:
        return "no footer at its end: the file was cut short; copy it again"
    offset = 8 if is_file else 0
    try:
        while offset < size and file.read(offset, 8) not in (b"\xff\xff\xff\xff\0\0\0\0", b""):
            message = read_message(file, offset)
            offset = message.end
            if message.kind == _DICTIONARY:
                return (
                    "dictionary-encoded columns are not read; write them as plain ones (`column.dictionary_decode()`)"
                )
            if message.kind != (_BATCH if found else _SCHEMA):
                return f"a message of kind {message.kind} at byte {message.offset}; is it an Arrow file?"
            found.append(message)
    except MessageError as error:
        return f"{error}: the file was cut short or is damaged; copy it again"
    return "" if found else "no Arrow schema; is it an Arrow file?"


def _places(found: list[Message]) -> Places:
    if not found:
        return np.zeros(2, "<u8")
    batches = found[1:]
    offsets = [message.offset for message in batches]
    rows, digests = [message.rows for message in batches], [message.digest for message in batches]
    return np.array([found[0].offset, *offsets, found[-1].end, *rows, *digests], dtype="<u8")


class _Table:
    """A table in a flatbuffer. Reading outside of the bytes raises struct.error."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place
        self._fields = place - self._at("<i", place)
        if not 0 <= self._fields < len(data):
            raise struct.error("a table outside of the buffer")
        self._length = self._at("<H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """The table that the buffer begins with."""
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def has(self, field: int) -> bool:
        """Whether a field is there."""
        return bool(self._offset(field))

    def number(self, field: int, kind: str) -> int:
        """A field that is an integer; 0 where it is left out."""
        offset = self._offset(field)
        return self._at(kind, self._place + offset) if offset else 0

    def table(self, field: int) -> _Table:
        """A field that is a table."""
        place = self._place + self._offset(field)
        return _Table(self._data, place + self._at("<I", place))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A field that is a vector of structs of two int64."""
        place = self._place + self._offset(field)
        place += self._at("<I", place)
        count = self._at("<I", place)
        if place + 4 + 16 * count > len(self._data):
            raise struct.error("a vector outside of the buffer")
        return list(struct.iter_unpack("<qq", self._data[place + 4 : place + 4 + 16 * count]))

    def _offset(self, field: int) -> int:
        at = 4 + 2 * field
        return self._at("<H", self._fields + at) if at + 2 <= self._length else 0

    def _at(self, kind: str, place: int) -> int:
        if place < 0:
            raise struct.error("before the buffer")
        found: int = struct.unpack_from(kind, self._data, place)[0]
        return found


ARROW = FileFormat(
    "arrow",
    ShardKind((".arrow", ".feather", ".ipc"), left_out=lambda name: name.startswith(("cache-", "tmp"))),
    "savable_pipeline.stores.arrow_file:scan",
    read_table,
    is_as_indexed,
    no_places=2,
    splits="dataset_dict.json",
)
