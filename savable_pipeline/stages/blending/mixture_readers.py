"""The reader of a dataset in a mixture, by the kind of its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.kinds import kind_of
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.stages.readers.columnar_readers import ArrowReader, ParquetReader
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.readers import JsonlReader, TarShardReader, TokenReader
from savable_pipeline.stages.readers.record_folder_readers import LitDataReader, MdsReader

_READERS: dict[str, Any] = {
    "tar": TarShardReader,
    "parquet": ParquetReader,
    "arrow": ArrowReader,
    "jsonl": JsonlReader,
    "tokens": TokenReader,
    "mds": MdsReader,
    "litdata": LitDataReader,
    "lerobot": ParquetReader,
}
_OPTIONS = {
    "tar": (),
    "parquet": ("columns", "key"),
    "arrow": ("columns", "key"),
    "jsonl": ("key",),
    "tokens": ("length", "stride", "dtype"),
    "mds": ("key",),
    "litdata": ("key",),
    "lerobot": ("key",),
}


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """The settings that all readers of a mixture share; `cache` and `cache_bytes` are for shards behind URLs."""

    shuffle: bool
    block_size: int | None
    window: int | None
    cache: str | os.PathLike[str] | None
    cache_bytes: int | None
    exclude: str | os.PathLike[str] | None


def reader_of(
    path: Shards, lane: Lane, shared: SharedSettings, options: dict[str, Any], **settings: Any
) -> RecordReader:
    """The reader of the files at `path`. `options` are those of one kind of files, None where they are not given.

    Raises ValueError for an option that another kind has, and what the reader raises.
    """
    kind = kind_of(path)
    given = {name: value for name, value in options.items() if value is not None}
    wrong = [name for name in given if name not in _OPTIONS[kind]]
    if wrong:
        known = listed(_OPTIONS[kind]) or "none"
        raise ValueError(
            f"{path}: {wrong[0]!r} is no setting of {_READERS[kind].__name__}; beside the usual ones: {known}"
        )
    if kind == "tar":
        given = {"cache": shared.cache, "cache_bytes": shared.cache_bytes}
    reader: RecordReader = _READERS[kind](
        path,
        lane,
        shuffle=shared.shuffle,
        block_size=shared.block_size,
        window=shared.window,
        exclude=shared.exclude,
        **settings,
        **given,
    )
    return reader
