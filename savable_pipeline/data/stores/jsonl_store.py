"""`JsonlStore`: the record store of JSONL files; a line is a sample, read at its offset in the index."""

from __future__ import annotations

from typing import Any

import numpy as np

from savable_pipeline.core.json_values import decoded_json
from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.file_store import FileStore
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.jsonl_file import LONGEST_LINE, without_mark
from savable_pipeline.data.stores.plain_values import as_part

LINE = "json"  # the part that is the whole line


class JsonlStore(FileStore):
    """The lines of JSONL files: a folder with its subfolders, a glob, a brace pattern, one file, or a list of these.

    `key` names the field that holds the key of a line, which each line must have; else it is `FILE:ROW`. Raises
    `ShardError`.
    """

    unit = "byte offset"

    def __init__(self, found: IndexedFiles, *, key: str | None = None) -> None:
        super().__init__(found)
        self.key_column = key
        self._starts: dict[int, memoryview] = {}  # by shard

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The line, as `json`; or a field of its object: a text as it is, anything else as JSON."""
        line = self._line(shard, row)
        if extension == LINE:
            return line
        fields = self._fields(shard, row, line)
        known = [LINE, *(name for name in fields if name != LINE)]
        name = extension if extension in fields else find_part(extension, known)
        if name == LINE:
            return line
        found = as_part(fields[name])
        return b"null" if found is None else found

    def extensions(self, shard: int, row: int) -> list[str]:
        """`json`, then the fields of the line that are texts."""
        fields = self._fields(shard, row, self._line(shard, row))
        return [LINE, *(name for name, value in fields.items() if isinstance(value, str) and name != LINE)]

    def key(self, shard: int, row: int) -> str:
        """The value of the key's field, or `FILE:ROW`."""
        if self.key_column is None:
            return super().key(shard, row)
        value = self._fields(shard, row, self._line(shard, row)).get(self.key_column)
        return self.as_key(shard, row, self.key_column, as_part(value))

    def offset(self, shard: int, row: int) -> int:
        """The offset of the line in its file, in bytes."""
        return int(self.places(shard)[row])

    def part_sizes(self) -> dict[str, Rows] | None:
        """The sizes of the lines, with their ends; None where the index is here in part."""
        if not self.files.has_all_rows():
            return None
        sizes = [np.diff(self.places(shard).astype(np.int64)) for shard in range(len(self.entries))]
        return {LINE: np.concatenate(sizes)}

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """The lines."""
        places = self.places(shard).astype(np.int64, copy=False)
        return places[rows], places[rows + 1]

    def _line(self, shard: int, row: int) -> bytes:
        starts = self._starts.get(shard)
        if starts is None:
            self.files[shard]  # checks the file, and what the index says of it
            starts = self._starts[shard] = self.places(shard).data
        begin, end = starts[row], starts[row + 1]
        if end - begin > LONGEST_LINE:
            raise self.damaged(shard, f"byte {begin}", f"a line of {human_bytes(end - begin)}")
        line = self.files.read(shard, begin, end - begin).rstrip(b"\r\n")
        if b"\n" in line:  # lines of spaces follow
            line = line.partition(b"\n")[0].rstrip(b"\r")
        return line if begin else without_mark(line, begin)

    def _fields(self, shard: int, row: int, line: bytes) -> dict[str, Any]:
        """The fields of the object in a line; none if it is no object. Raises `ShardError` if it is no JSON."""
        try:
            value = decoded_json(line)
        except (ValueError, RecursionError) as error:
            place = f"row {row}, at byte {self.offset(shard, row)}"
            raise self.damaged(shard, place, f"no JSON: {error}", reason="malformed JSON") from error
        return value if isinstance(value, dict) else {}
