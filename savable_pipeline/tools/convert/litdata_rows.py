"""Items of LitData that are rows in Arrow: dicts of texts, numbers, bytes and lists. pyarrow reads them.

{"image": JPEG, "caption": "a cat", "size": [8, 8]}      →      jpg, json: {"caption": "a cat", "size": [8, 8]}
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from savable_pipeline.tools.convert.fields import Blob, Value, raw
from savable_pipeline.tools.convert.records import check_count, number_at
from savable_pipeline.tools.convert.stretches import RecordError, RecordFile, stretch_of

ROWS = b"LDARW01\0"  # the end of a chunk with rows
_FILE = b"ARROW1"  # how a file of Arrow begins; a stream does not
_NOTHING = object()  # in the place of bytes, which are parts of their own


@dataclass(frozen=True, slots=True)
class ArrowItems:
    """`Records` in a file or stream of Arrow at the end of a chunk."""

    file: RecordFile
    first: int
    count: int

    def check(self) -> None:
        """See `Records.check`."""
        check_count(self.file, _table(self.file).num_rows, self.count)

    def fields(self, number: int) -> list[Value | Blob]:
        """See `Records.fields`."""
        (row,) = _table(self.file).slice(number - self.first, 1).to_pylist()
        blobs: list[Value | Blob] = []
        values = {name: _without_bytes(value, name, self.file.path, blobs) for name, value in row.items()}
        return [*blobs, *(Value(name, value) for name, value in values.items() if value is not _NOTHING)]


def _without_bytes(value: Any, name: str, path: str, blobs: list[Value | Blob]) -> Any:
    """A value without the bytes in it, which are added to `blobs`, by the names on the way to them."""
    if isinstance(value, bytes):
        blobs.append(raw(name, "", stretch_of(value, path)))
        return _NOTHING
    if not isinstance(value, dict | list):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {str(key): _without_bytes(item, f"{name}_{key}", path, blobs) for key, item in items}
    kept = {key: item for key, item in found.items() if item is not _NOTHING}
    if len(kept) == len(found):
        return kept if isinstance(value, dict) else list(kept.values())
    return kept or _NOTHING


@functools.lru_cache(maxsize=1)
def _table(file: RecordFile) -> Any:
    """All rows of a chunk. Raises ValueError for damage, and without pyarrow."""
    try:
        import pyarrow as pa  # imported here: it is needed for these chunks alone
    except ImportError:
        raise ValueError(
            f'{file.path}: rows in Arrow need the package pyarrow: pip install "savable_pipeline[parquet]"'
        ) from None
    content = file.content()
    end = content.size - len(ROWS) - 4
    try:
        size = number_at(file, end)
        data = content.part(end - size, size).read()
        source = pa.py_buffer(data)
        reader = pa.ipc.open_file(source) if data.startswith(_FILE) else pa.ipc.open_stream(source)
        table = reader.read_all()
        table.validate(full=True)  # before anything follows its offsets
    except (RecordError, pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ValueError(f"{file.path}: damaged rows in Arrow: {error}; copy it again") from error
    return table


def close_rows() -> None:
    """Free the rows that this process read last."""
    _table.cache_clear()
