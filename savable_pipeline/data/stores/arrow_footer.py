"""The footer of an Arrow IPC file: where its record batches lie, and its schema.

… │ flatbuffer: version, schema, dictionaries, record batches │ its length i32 │ "ARROW1"

record batch   offset i64 │ bytes of metadata i32 │ 0 (4 bytes) │ bytes of its body i64
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.stores.flatbuffer import Flatbuffer

MAGIC = b"ARROW1"
_HEAD = len(MAGIC) + 2  # bytes before the first message
_END = struct.Struct("<i6s")
_LARGEST = 1 << 28
_SCHEMA, _DICTIONARIES, _BATCHES = 1, 2, 3  # fields
_BLOCK = "<qi4xq"


class FooterError(ValueError):
    """The footer is not there, or cannot be right."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What a footer says: of each record batch its offset, before the footer, and the bytes of metadata and body."""

    offset: int
    batches: list[tuple[int, int, int]]
    has_dictionaries: bool
    digest: int


def read_footer(file: ByteSource) -> Footer:
    """The footer of a file that begins with `MAGIC`. Raises `FooterError`, OSError."""
    size = file.size
    end = file.read_at(max(0, size - _END.size), _END.size)
    if not end.endswith(MAGIC) or size < _HEAD + _END.size:
        raise FooterError("no footer at its end")
    length = _END.unpack(end)[0]
    if not 0 < length <= min(_LARGEST, size - _HEAD - _END.size):
        raise FooterError(f"a footer of {length} bytes in a file of {size}")
    offset = size - _END.size - length
    data = file.read_at(offset, length)
    try:
        table = Flatbuffer.root(data)
        blocks, dictionaries = table.structs(_BATCHES, _BLOCK), table.structs(_DICTIONARIES, _BLOCK)
        has_schema = table.has(_SCHEMA)
    except struct.error as error:
        raise FooterError(f"a damaged footer at byte {offset}") from error
    if not has_schema:
        raise FooterError(f"a footer without a schema at byte {offset}")
    batches = [(begin, head, body) for begin, head, body in blocks]
    outside = next((begin for begin, _, _ in batches if not _HEAD <= begin < offset), None)
    if outside is not None:
        raise FooterError(f"a footer that names a record batch at byte {outside} of {offset}")
    return Footer(offset, batches, bool(dictionaries), xxh3_64_intdigest(data))


def file_of_footer(tail: bytes) -> bytes:
    """A file of nothing but a footer, to read its schema from; `tail` is a file's end from the footer's offset on."""
    return MAGIC + b"\0\0" + tail
