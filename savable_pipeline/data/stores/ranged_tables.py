"""Parquet, Arrow and JSONL files whose rows name ranges of the audio and video files beside them: see ranges.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, VIDEO_PARTS
from savable_pipeline.data.stores.arrow_file import ARROW
from savable_pipeline.data.stores.arrow_store import ArrowStore
from savable_pipeline.data.stores.columnar_store import ColumnarStore
from savable_pipeline.data.stores.file_kinds import RangeColumns
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.jsonl import JSONL, JsonlStore
from savable_pipeline.data.stores.parquet import PARQUET, ParquetStore
from savable_pipeline.data.stores.ranges import MediaRange, RangedRows, is_media_as_indexed, read_media

_ENDINGS = tuple(f".{each}" for name in (*AUDIO_PARTS, *VIDEO_PARTS) for each in (name, name.upper()))


def with_media(form: FileFormat, constant: str) -> FileFormat:
    """The format of folders of such tables with the files that their rows name; `constant` is its name here."""

    def read(file: FileBytes, name: str) -> ShardTable:
        return (form.read if name.endswith(form.kind.suffixes) else read_media)(file, name)

    def is_as_indexed(file: FileBytes, index: ShardIndex, number: int) -> bool:
        is_table = index.shards.names[number].endswith(form.kind.suffixes)
        return (form.is_as_indexed if is_table else is_media_as_indexed)(file, index, number)

    kind = dataclasses.replace(form.kind, suffixes=(*form.kind.suffixes, *_ENDINGS))
    name = f"{form.name}-ranges"
    return dataclasses.replace(
        form, name=name, kind=kind, place=f"{__name__}:{constant}", read=read, is_as_indexed=is_as_indexed
    )


class ColumnRanges(RangedRows):
    """`ranges`: for each part the columns, or fields, of path, from and to; None where a file begins, or ends."""

    def __init__(self, found: IndexedFiles, *, ranges: RangeColumns, **settings: Any) -> None:
        self.ranges, self.range_parts = ranges, tuple(ranges)
        self.used = tuple(name for columns in ranges.values() for name in columns if name is not None)
        if settings.get("columns") is not None:
            settings["columns"] = tuple(dict.fromkeys([*settings["columns"], *self.used]))
        super().__init__(found, **settings)

    def media_range(self, shard: int, row: int, part: str) -> MediaRange | None:
        """See `RangedRows.media_range`: there is none where the path is null."""
        path, begin, end = (None if name is None else self._told(shard, row, name) for name in self.ranges[part])
        if path is None:
            return None
        try:
            seconds = [None if each is None else msgspec.json.decode(each, type=float) for each in (begin, end)]
            return self.checked_range(shard, row, path.decode(), *seconds)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.no_range(shard, row, f"{part!r}: {error}") from error

    def _told(self, shard: int, row: int, name: str) -> bytes | None:
        try:
            return self.value(shard, row, name)
        except KeyError:
            raise self.no_range(shard, row, f"{name!r}, which ranges= names, is not there") from None


class _RangedColumns(ColumnRanges, ColumnarStore):
    """Raises ValueError for a column of `ranges` that the first file does not have."""

    def __init__(self, found: IndexedFiles, **settings: Any) -> None:
        super().__init__(found, **settings)
        self._check_columns_of_first()

    def check_columns(self, shard: int, known: list[str]) -> None:
        """See `ColumnarStore.check_columns`."""
        from savable_pipeline.data.stores.arrow_columns import check_columns

        super().check_columns(shard, known)
        check_columns(self.place(shard), self.used, known)


class RangedParquet(_RangedColumns, ParquetStore):
    """The rows of Parquet files."""


class RangedArrow(_RangedColumns, ArrowStore):
    """The rows of Arrow files."""


class RangedJsonl(ColumnRanges, JsonlStore):
    """The lines of JSONL files."""


PARQUET_RANGES = with_media(PARQUET, "PARQUET_RANGES")
ARROW_RANGES = with_media(ARROW, "ARROW_RANGES")
JSONL_RANGES = with_media(JSONL, "JSONL_RANGES")
