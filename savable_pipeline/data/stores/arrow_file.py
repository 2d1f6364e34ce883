"""Arrow IPC files and streams: find their record batches without pyarrow.

    [ "ARROW1" 0 0 ]  schema  batch 0  batch 1  …  end  [ footer "ARROW1" ]        in brackets: files only

The footer of a file lists its batches, which may be anywhere. In a stream, they follow each other.

    message   0xffffffff │ length i32 │ metadata: flatbuffer │ body
                                        ├ kind, length of the body
                                        └ of a batch: rows, compression
    footer    flatbuffer: version, schema, dictionaries, record batches │ its length i32 │ "ARROW1"
              └ record batch   offset i64 │ bytes of metadata i32 │ 0 (4 bytes) │ bytes of its body i64

Blob of a file in the index: the offset of the schema; of each batch, and the end of the last; the rows of each; a
hash of the metadata of each, which say where every column starts. If batches do not directly follow the schema's
message (Polars writes no such message): 2⁶³ plus the offset of the footer, which also has the schema; the offset of
each batch; the end of each; the rows; the hashes.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import BlobIndex, FileBlob, ShardIndex, ShardTable
from savable_pipeline.data.shards.shard_list import ShardEntry

ARROW_MAGIC = b"ARROW1"
_HEAD = len(ARROW_MAGIC) + 2  # bytes before the first message
_END = struct.Struct("<i6s")
_LARGEST_FOOTER = 1 << 28
_SCHEMA_FIELD, _DICTIONARIES, _BATCHES = 1, 2, 3  # numbers of the footer's fields
_BLOCK = "<qi4xq"  # record batch in a footer: offset, bytes of metadata, bytes of body
_FEATHER_1 = b"FEA1"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages: the first field after the version
_LARGEST_METADATA = 1 << 28
_MOST_ROWS = 1 << 40
_IN_FOOTER = 1 << 63  # added to the first word of a blob whose schema is in the footer
_NO_DICTIONARIES = "dictionary-encoded columns are not read; write them as plain ones (`column.dictionary_decode()`)"
_BIG_ENDIAN = (
    "its numbers are big-endian, which are not read; write what pyarrow's `ipc.open_file(FILE).read_all()` reads anew"
)
_FIX = "the file was cut short or is damaged; copy it again"
T = TypeVar("T")


class Flatbuffer:
    """Table of a flatbuffer. Reads outside of its bytes raise struct.error."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._start = data, offset
        self._fields = offset - self._number_at("<i", offset)  # where the offsets of the fields are listed
        if not 0 <= self._fields < len(data):
            raise struct.error("a table outside of the buffer")
        self._length = self._number_at("<H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> Flatbuffer:
        """Return the root table of a buffer."""
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def has(self, field: int) -> bool:
        """Return whether a field is present."""
        return bool(self._offset(field))

    def number(self, field: int, kind: str) -> int:
        """Return an integer field, 0 if absent."""
        offset = self._offset(field)
        return self._number_at(kind, self._start + offset) if offset else 0

    def table(self, field: int) -> Flatbuffer:
        """Return a field that is a table."""
        offset = self._start + self._offset(field)
        return Flatbuffer(self._data, offset + self._number_at("<I", offset))

    def structs(self, field: int, layout: str) -> list[tuple[Any, ...]]:
        """Return a field that is a vector of structs of this layout, empty if absent."""
        if not self.has(field):
            return []
        offset = self._start + self._offset(field)
        offset += self._number_at("<I", offset)
        end = offset + 4 + struct.calcsize(layout) * self._number_at("<I", offset)
        if end > len(self._data):
            raise struct.error("a vector outside of the buffer")
        return list(struct.iter_unpack(layout, self._data[offset + 4 : end]))

    def _offset(self, field: int) -> int:
        entry = 4 + 2 * field  # of the field, in the table of offsets
        return self._number_at("<H", self._fields + entry) if entry + 2 <= self._length else 0

    def _number_at(self, kind: str, offset: int) -> int:
        if offset < 0:
            raise struct.error("before the buffer")
        found: int = struct.unpack_from(kind, self._data, offset)[0]
        return found


class MessageError(ValueError):
    """Error for a message or a footer that is missing or invalid."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Footer of a file: offset, metadata bytes and body bytes of each record batch."""

    offset: int
    batches: list[tuple[int, int, int]]
    has_dictionaries: bool
    is_big_endian: bool
    digest: int


def read_arrow_footer(file: ByteSource) -> Footer:
    """Return the footer of a file that starts with `ARROW_MAGIC`.

    Raises `MessageError`, OSError.
    """
    size = file.size
    end = file.read_at(max(0, size - _END.size), _END.size)
    if not end.endswith(ARROW_MAGIC) or size < _HEAD + _END.size:
        raise MessageError("no footer at its end")
    length = _END.unpack(end)[0]
    if not 0 < length <= min(_LARGEST_FOOTER, size - _HEAD - _END.size):
        raise MessageError(f"a footer of {length} bytes in a file of {size}")
    offset = size - _END.size - length
    data = file.read_at(offset, length)
    try:
        table = Flatbuffer.root(data)
        blocks, dictionaries = table.structs(_BATCHES, _BLOCK), table.structs(_DICTIONARIES, _BLOCK)
        has_schema = table.has(_SCHEMA_FIELD)
        is_big_endian = has_schema and _is_big_endian(table.table(_SCHEMA_FIELD))
    except struct.error as error:
        raise MessageError(f"a damaged footer at byte {offset}") from error
    if not has_schema:
        raise MessageError(f"a footer without a schema at byte {offset}")
    batches = [(begin, head, body) for begin, head, body in blocks]
    outside = next((begin for begin, _, _ in batches if not _HEAD <= begin < offset), None)
    if outside is not None:
        raise MessageError(f"a footer that names a record batch at byte {outside} of {offset}")
    return Footer(offset, batches, bool(dictionaries), is_big_endian, xxh3_64_intdigest(data))


def _is_big_endian(schema: Flatbuffer) -> bool:
    return schema.number(0, "<h") == 1


def file_of_footer(tail: bytes) -> bytes:
    """Return the bytes of a file that has only a footer, to read the schema in it.

    `tail` is the original file from the offset of its footer.
    """
    return ARROW_MAGIC + b"\0\0" + tail


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """Message of a file."""

    offset: int
    kind: int
    head: int  # bytes of the message before its body
    body: int  # bytes of the body
    rows: int  # of a batch
    is_compressed: bool
    digest: int  # hash of the metadata
    is_big_endian: bool = False  # only known for a schema

    @property
    def end(self) -> int:
        """Return the offset after the message."""
        return self.offset + self.head + self.body


@dataclass(frozen=True, slots=True)
class Batches:
    """Index blob of a file by field, as uint64 words."""

    schema: int  # offset of the schema's message, or of the footer
    is_in_footer: bool  # whether the schema is in the footer, as in a file; a stream has it in a message
    begins: FileBlob  # (batches,)
    ends: FileBlob  # (batches,)
    rows: FileBlob  # (batches,)
    digests: FileBlob  # (batches,)


def batches_of(blob: FileBlob) -> Batches:
    """Split the index blob of a file into its fields."""
    schema = int(blob[0])
    if schema >= _IN_FOOTER:
        begins, ends, rows, digests = blob[1:].reshape(4, -1)
        return Batches(schema - _IN_FOOTER, True, begins, ends, rows, digests)
    count = (len(blob) - 2) // 3
    offsets = blob[1 : count + 2]
    rows, digests = blob[count + 2 : 2 * count + 2], blob[2 * count + 2 :]
    return Batches(schema, False, offsets[:-1], offsets[1:], rows, digests)


def read_arrow_table(file: ByteSource, name: str) -> ShardTable:
    """Return entry and batches of a file.

    Damage is noted in the entry, and the batches before it are used.
    """
    scan = _Scan()
    try:
        fault = _read_file(file, scan) if file.head(len(ARROW_MAGIC)) == ARROW_MAGIC else _read_stream(file, scan)
    except MessageError as error:
        fault = f"{error}: {_FIX}"
    blob = _blob(scan)
    rows = sum(message.rows for message in scan.batches)
    digest = _digest(blob, scan.schema_digest)
    return ShardTable(
        ShardEntry(name, file.size, rows, digest, encodable(f"{name}: {fault}") if fault else ""), blob.tobytes()
    )


def arrow_matches_index(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether the schema and three batches are unchanged. Raises OSError.

    The batches are the first, a middle and the last one.
    """
    assert isinstance(index, BlobIndex), index
    batches = batches_of(index.blob(number))
    count = len(batches.rows)
    try:
        # the hash of the metadata with the schema: of the footer, or of the message at the offset `batches.schema`
        digest = read_arrow_footer(file).digest if batches.is_in_footer else read_message(file, batches.schema).digest
        if _digest(index.blob(number), digest) != int(index.shards.digests[number]):
            return False
        for i in sorted({0, count // 2, count - 1}) if count else []:
            if read_message(file, int(batches.begins[i])).digest != batches.digests[i]:
                return False
    except MessageError:
        return False
    return True


def _digest(blob: FileBlob, schema_digest: int | None) -> int:
    return xxh3_64_intdigest(blob.tobytes() + str([] if schema_digest is None else [schema_digest]).encode())


def read_message(file: ByteSource, offset: int) -> ArrowMessage:
    """Return the message at `offset` of a file, without its body.

    Raises `MessageError`, OSError.
    """
    start, size = file.read_at(offset, 8), file.size
    if len(start) < 8 or start[:4] != b"\xff\xff\xff\xff":
        raise MessageError(f"no Arrow message at byte {offset}")
    length = struct.unpack_from("<i", start, 4)[0]
    if not 0 < length <= min(_LARGEST_METADATA, size - offset - 8):
        raise MessageError(f"a message of {length} bytes at byte {offset} of {size}")
    metadata = file.read_at(offset + 8, length)
    try:
        table = Flatbuffer.root(metadata)
        # fields of Arrow's Message.fbs: 1 kind of the header, 2 header, 3 bytes of the body; of a batch's header:
        # 0 rows, 2 buffers, 3 compression
        kind, body, header = table.number(1, "<B"), table.number(3, "<q"), table.table(2)
        rows = header.number(0, "<q") if kind == _BATCH else 0
        is_compressed = kind == _BATCH and header.has(3)
        is_big_endian = kind == _SCHEMA and _is_big_endian(header)
    except struct.error as error:
        raise MessageError(f"damaged metadata at byte {offset}") from error
    if body < 0 or offset + 8 + length + body > size:
        raise MessageError(f"the message at byte {offset} should end at byte {offset + 8 + length + body} of {size}")
    if not 0 <= rows <= _MOST_ROWS:
        raise MessageError(f"a batch of {rows} rows at byte {offset}")
    digest = xxh3_64_intdigest(metadata)
    return ArrowMessage(offset, kind, 8 + length, body, rows, is_compressed, digest, is_big_endian)


def decoded_bytes(raw: memoryview, message: ArrowMessage) -> int:
    """Return the decompressed size in bytes of a batch's buffers.

    `raw` are the bytes of its `message`. Raises `MessageError`.
    """
    total = 0
    try:
        header = Flatbuffer.root(bytes(raw[8 : message.head])).table(2)
        for offset, length in header.structs(2, "<qq"):  # of each buffer in the body, as stored
            if length:
                # a length of -1 means that the buffer is not compressed
                total += max(length, struct.unpack_from("<q", raw, message.head + offset)[0])
    except struct.error as error:
        raise MessageError(f"damaged metadata at byte {message.offset}") from error
    return total


class _Scan:
    """What was read of a file so far: its schema's message or its footer, and its batches."""

    def __init__(self) -> None:
        self.schema: ArrowMessage | None = None
        self.batches: list[ArrowMessage] = []
        self.footer: Footer | None = None  # only if no other part of the file has the complete schema

    @property
    def schema_digest(self) -> int | None:
        """Return a hash of the schema's message or footer, or None without either."""
        if self.footer is not None:
            return self.footer.digest
        return None if self.schema is None else self.schema.digest

    def follow_each_other(self) -> bool:
        """Return whether the batches directly follow the schema's message."""
        previous = [self.schema, *self.batches]
        return all(before and before.end == batch.offset for before, batch in zip(previous, self.batches, strict=False))


def _read_stream(file: ByteSource, scan: _Scan) -> str:
    """Add the messages of a stream to `scan` and return its fault, or "". Raises `MessageError`."""
    if file.read_at(0, len(_FEATHER_1)) == _FEATHER_1:
        return (
            "Feather version 1, which only old libraries read; write it as version 2 with one of them: "
            "`feather.write_feather(feather.read_table(FILE), FILE)` of pyarrow.feather"
        )
    offset = 0
    while offset < file.size and file.read_at(offset, 8) not in (b"\xff\xff\xff\xff\0\0\0\0", b""):
        message = read_message(file, offset)
        offset = message.end
        if message.kind == _DICTIONARY:
            return _NO_DICTIONARIES
        if message.is_big_endian:
            return _BIG_ENDIAN
        if message.kind != (_SCHEMA if scan.schema is None else _BATCH):
            return f"a message of kind {message.kind} at byte {message.offset}; is it an Arrow file?"
        if scan.schema is None:
            scan.schema = message
        else:
            scan.batches.append(message)
    return "no Arrow schema; is it an Arrow file?" if scan.schema is None else ""


def _read_file(file: ByteSource, scan: _Scan) -> str:
    """Add the batches in the footer to `scan` and return the fault, or "". Raises `MessageError`."""
    footer = read_arrow_footer(file)
    scan.schema = _leading_schema(file)
    if scan.schema is None:
        scan.footer = footer
    if footer.has_dictionaries:
        return _NO_DICTIONARIES
    if footer.is_big_endian:
        return _BIG_ENDIAN
    try:
        for offset, head, body in footer.batches:
            message = read_message(file, offset)
            if message.kind != _BATCH or (message.head, message.body) != (head, body) or message.end > footer.offset:
                raise MessageError(f"no record batch of {head} and {body} bytes at byte {offset}, as the footer says")
            scan.batches.append(message)
    finally:
        if not scan.follow_each_other():
            scan.footer = footer
    return _overlap_fault(scan) or _unlisted_fault(file, scan)


def _leading_schema(file: ByteSource) -> ArrowMessage | None:
    """Return the message with the schema at the start of a file, or None without one."""
    with contextlib.suppress(MessageError):
        message = read_message(file, 8)
        return message if message.kind == _SCHEMA else None
    return None


def _overlap_fault(scan: _Scan) -> str:
    """Return the fault of a footer whose batches overlap, or "". No batch of such a file is used."""
    batches = sorted(scan.batches, key=lambda message: message.offset)
    for one, other in pairwise(batches):
        if other.offset < one.end:
            scan.batches.clear()
            return f"the footer names record batches at bytes {one.offset} and {other.offset} that overlap: {_FIX}"
    return ""


def _unlisted_fault(file: ByteSource, scan: _Scan) -> str:
    """Return the fault of a file with a batch that its footer does not list, or ""."""
    listed = {message.offset for message in scan.batches}
    ends = [message.end for message in (scan.schema, *scan.batches) if message is not None]
    for end in ends:
        with contextlib.suppress(MessageError):
            if end not in listed and read_message(file, end).kind == _BATCH:
                return f"the footer does not name the record batch at byte {end}: {_FIX}"
    return ""


def _blob(scan: _Scan) -> FileBlob:
    begins, ends = [message.offset for message in scan.batches], [message.end for message in scan.batches]
    rows, digests = [message.rows for message in scan.batches], [message.digest for message in scan.batches]
    if scan.footer is not None:
        return np.array([_IN_FOOTER + scan.footer.offset, *begins, *ends, *rows, *digests], dtype="<u8")
    if scan.schema is None:
        return np.zeros(2, "<u8")
    return np.array([scan.schema.offset, *begins, [scan.schema.end, *ends][-1], *rows, *digests], dtype="<u8")
