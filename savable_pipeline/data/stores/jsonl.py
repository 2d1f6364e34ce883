"""The format of JSONL files, and its stores: a line is a sample.

Blob of a file in the index: the offset of each non-blank line, then the end of the file. Blank lines count to the
line before them.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.json_values import decoded_json
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import FileBlob, IndexedFiles
from savable_pipeline.data.shards.number_spool import NumberSpool
from savable_pipeline.data.shards.part_types import as_part, find_part
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.ranges import RangedTable, with_media
from savable_pipeline.data.stores.table_store import (
    LINE,
    NAMING_SETTINGS,
    TableStore,
    TextStore,
    json_fault,
    text_format,
    without_byte_order_mark,
)

_CHUNK = 1 << 20  # bytes to read at a time
LONGEST_LINE = 1 << 30  # in bytes
_FIRST_BYTES = 64  # bytes of a line to read first, which mostly show whether it is blank


def line_offsets(file: ByteSource) -> FileBlob:
    """Return the offsets of non-blank lines, then the end: uint64 (lines + 1,)."""
    offset, is_start, offsets = 0, True, NumberSpool()
    while chunk := file.read_at(offset, _CHUNK):
        raw = np.frombuffer(chunk, np.uint8)
        starts = np.concatenate([np.arange(int(is_start)), np.flatnonzero(raw[:-1] == ord("\n")) + 1])
        maybe_blank = np.flatnonzero(raw[starts] <= ord(" ")).tolist()
        blank = [i for i in maybe_blank if _is_blank(file, offset + int(starts[i]))]
        offsets.write(np.delete(starts, blank) + offset)
        offset, is_start = offset + len(chunk), chunk.endswith(b"\n")
    offsets.append(offset)
    return offsets.numbers()


def _is_blank(file: ByteSource, start: int) -> bool:
    """Return whether a line has only characters that JSON skips between values."""
    size = _FIRST_BYTES
    while piece := file.read_at(start, size):
        line, end, _ = piece.partition(b"\n")
        if end or line.strip(b" \t\r"):
            return not line.strip(b" \t\r")
        start, size = start + size, _CHUNK
    return True


def _checked_lines(file: ByteSource) -> tuple[str, FileBlob]:
    """Return the fault of a truncated last line, or "", and the offsets of the lines before it.

    The last line counts as truncated if it has no newline and is not JSON, and other lines are JSON.
    """
    offsets = line_offsets(file)
    begin, end = (int(offsets[-2]), int(offsets[-1])) if len(offsets) > 1 else (0, 0)
    last = file.read_at(begin, end - begin) if end - begin <= LONGEST_LINE else b"\n"
    if not end or b"\n" in last:  # errors in a complete line are raised when the line is read
        return "", offsets
    try:
        decoded_json(without_byte_order_mark(last, begin))
    except (ValueError, RecursionError) as error:
        if not _may_be_jsonl(file, offsets):
            return f"a first line that is no JSON: {error}; JSONL is one JSON value a line", offsets[:-1]
        if (why := json_fault(error)) == str(error):  # otherwise it has more than one value
            fault = f"the last line, at byte {begin}, was cut: {why}; copy the file again, or end it before that line"
            return fault, offsets[:-1]
    return "", offsets


def _may_be_jsonl(file: ByteSource, offsets: FileBlob) -> bool:
    """Return whether the first line is JSON, or the only line starts like an object or a list."""
    begin, end = int(offsets[0]), int(offsets[1])
    first = without_byte_order_mark(file.read_at(begin, min(end - begin, LONGEST_LINE)), begin)
    if len(offsets) == 2:
        return first.lstrip()[:1] in (b"{", b"[")
    with contextlib.suppress(ValueError, RecursionError):
        decoded_json(first)
        return True
    return False


def _parts_of(fields: dict[str, Any]) -> list[str]:
    """Return the names of the parts of a line with these fields."""
    return [LINE, *(name for name, value in fields.items() if value is not None and name != LINE)]


class JsonlStore(TextStore):
    """Lines of JSONL files as samples.

    `key` names the field that is the key of a line, which each line must have. By default the key is `FILE:ROW`. Fields
    that are `needed` are checked when a line is read. Raises `ShardError`.
    """

    def __init__(self, found: IndexedFiles, *, key: str | None = None, needed: tuple[str, ...] = ()) -> None:
        super().__init__(found, key=key)
        self._last_line, self._last_fields = b"", dict[str, Any]()  # the last parsed line and its fields

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """Return the line for the part `json`, or else a field of its object.

        A string is returned without quotes, and any other value as JSON.
        """
        line = self._line(shard, row)
        if extension == LINE:
            return line
        fields = self._fields(shard, row, line)
        found = as_part(fields.get(extension))
        if found is None and (name := find_part(extension, _parts_of(fields))) != LINE:
            found = as_part(fields[name])
        return line if found is None else found

    def array(self, shard: int, row: int, extension: str) -> NDArray[Any]:
        """See `RecordStore.array`.

        Raises TypeError for a field that is not a string, because its bytes would be JSON.
        """
        if extension != LINE:
            found = self._fields(shard, row, self._line(shard, row)).get(extension)
            if not isinstance(found, str | None):
                kind = type(found).__name__
                raise TypeError(f"the field {extension!r} is a {kind}, not text. Read sample.json()[{extension!r}]")
        return super().array(shard, row, extension)

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return `json` and the non-null fields of the line."""
        return _parts_of(self._fields(shard, row, self._line(shard, row)))

    def value(self, shard: int, row: int, name: str) -> bytes | None:
        """See `FileStore.value`."""
        return as_part(self._fields(shard, row, self._line(shard, row))[name])

    def part_offset(self, shard: int, row: int, extension: str) -> int:
        """Return the offset of the line, which contains its fields."""
        return self.offset(shard, row)

    parts_in_rows = True

    def part_sizes(self) -> dict[str, Rows] | None:
        """Return the line sizes with line ends, or None if index rows are missing."""
        if not self.files.has_all_rows():
            return None
        sizes = [np.diff(self.blob(shard).astype(np.int64)) for shard in range(len(self.entries))]
        return {LINE: np.concatenate(sizes)}

    def _line(self, shard: int, row: int) -> bytes:
        raw, begin = self.raw(shard, row, LONGEST_LINE)
        line = raw.partition(b"\n")[0].rstrip(b"\r")  # blank lines may follow
        return line if begin else without_byte_order_mark(line, begin)

    def _fields(self, shard: int, row: int, line: bytes) -> dict[str, Any]:
        """Return the fields of the object in a line, or {} for another value. Raises `ShardError` for invalid JSON."""
        if self._last_line == line:
            return self._last_fields
        try:
            value = decoded_json(line)
        except (ValueError, RecursionError) as error:
            where = f"row {row}, at byte {self.offset(shard, row)}"
            raise self.damaged(shard, where, f"invalid JSON: {json_fault(error)}", reason="malformed JSON") from error
        self._last_line, self._last_fields = line, value if isinstance(value, dict) else {}
        return self._last_fields


class LinesStore(TableStore):
    """Lines of JSONL files, with the files that they name as parts."""

    def body(self, shard: int, raw: bytes, begin: int) -> bytes:
        """See `TableStore.body`."""
        line, end, rest = raw.partition(b"\n")
        if rest.strip():  # only blank lines may come before the next row
            raise self.damaged(shard, f"byte {begin}", "several lines, where one was indexed", reason="changed shard")
        return without_byte_order_mark(line + end, begin)


class RangedJsonlStore(RangedTable, JsonlStore):
    """Lines of JSONL files with fields that name ranges of other files."""


def open_lines(found: IndexedFiles, **settings: Any) -> JsonlStore | LinesStore:
    """Open the store of JSONL files.

    The parts are the fields, or with settings for named files these files.
    """
    if settings.keys().isdisjoint(NAMING_SETTINGS):
        return JsonlStore(found, **settings)
    return LinesStore(found, **settings)


JSONL = text_format(
    "jsonl",
    (".jsonl", ".ndjson"),
    _checked_lines,
    open_lines,
    (".jsonl", ".ndjson", ".json"),
    settings=("key", "ranges", *NAMING_SETTINGS),
    by_setting={"ranges": partial(with_media, variant="ranges", store=RangedJsonlStore)},
)
