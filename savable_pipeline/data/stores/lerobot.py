"""LeRobot folders, version 3: an episode is a sample, whose videos and frames lie in files of many episodes.

    meta/info.json                            the features, and how files are called
    meta/episodes/chunk-000/file-000.parquet  a row an episode: parts such as `tasks` and `length`, and where it lies in
    videos/KEY/chunk-000/file-000.mp4         each video: a range of seconds (`Ranges`), a part KEY
    data/chunk-000/file-000.parquet           its frames: rows; each column of numbers is a part, an array

All are entries of one index. (From the format's facts: features, templates of paths, columns.)
"""

from __future__ import annotations

import dataclasses
import io
import re
from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import Any, TypeVar, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import FileFormat, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.stores.columnar_store import ColumnSettings
from savable_pipeline.data.stores.parquet import PARQUET, ParquetStore
from savable_pipeline.data.stores.ranges import MediaRange, Ranges, checked_range, is_media_as_indexed, read_media
from savable_pipeline.data.stores.source import LEROBOT_INFO

_EPISODES = "meta/episodes/"
_FIELD = re.compile(r"\{(video_key|chunk_index|file_index)(?::0(\d)d)?\}")
_NUMBERS = {
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
}

T = TypeVar("T", int, float)


class _Feature(msgspec.Struct):
    dtype: str


class _Info(msgspec.Struct):
    features: dict[str, _Feature]
    data_path: str
    video_path: str | None = None


def read_table(file: ByteSource, name: str) -> ShardTable:
    """Entry and row groups of a table, of which those of episodes have samples; the entry of any other file."""
    if not name.endswith(PARQUET.kind.suffixes):
        return read_media(file, name)
    table = PARQUET.read(file, name)
    if not name.startswith(_EPISODES):
        table.entry = msgspec.structs.replace(table.entry, samples=0)
    return table


def is_as_indexed(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Whether a file is the one that was indexed, as far as its footer tells, or its begin, middle and end."""
    is_table = index.shards.names[number].endswith(PARQUET.kind.suffixes)
    return (PARQUET.is_as_indexed if is_table else is_media_as_indexed)(file, index, number)


LEROBOT = FileFormat(
    "lerobot",
    dataclasses.replace(PARQUET.kind, suffixes=(".parquet", ".mp4", LEROBOT_INFO.rpartition("/")[2])),
    f"{__name__}:LEROBOT",
    read_table,
    is_as_indexed,
)


class LeRobotStore(ParquetStore):
    """The episodes of a LeRobot folder; a key is the number of the episode, unless `key` names another column.

    `array` gives the frames' values as they are stored, (frames, …); their bytes are a `.npy`. Raises `ShardError`,
    and ValueError for `columns`.
    """

    def __init__(self, found: IndexedFiles, **settings: Unpack[ColumnSettings]) -> None:
        if settings.pop("columns", None) is not None:
            raise ValueError(
                f"{found.address}: leave out columns=: parts of an episode are read when they are asked for"
            )
        settings["key"] = settings.get("key") or "episode_index"
        super().__init__(found, **settings)
        first = int(np.flatnonzero(self.entries.samples)[0])
        self.columns = tuple(name for name in self.schema(first).names if not name.startswith("stats/"))
        features = self._info.features
        videos = [name for name, feature in features.items() if feature.dtype == "video"]
        numbers = [name for name, feature in features.items() if feature.dtype in _NUMBERS]
        self.frame_parts = [name for name in numbers if name not in self.columns]
        self._ranges = Ranges(self, videos, self._media_range, base="", behind=self.frame_parts)

    def extensions(self, shard: int, row: int) -> list[str]:
        """What a row says of its episode, but where it lies; the videos; and the columns of its frames."""
        return [*(name for name in super().extensions(shard, row) if "/" not in name), *self.frame_parts]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`; of frames, a `.npy`."""
        if extension not in self.frame_parts:
            return super().read(shard, row, extension)
        file = io.BytesIO()
        np.save(file, self._frames(shard, row, extension), allow_pickle=False)
        return file.getvalue()

    def array(self, shard: int, row: int, extension: str) -> NDArray[Any]:
        """See `RecordStore.array`; of frames, their values."""
        if extension not in self.frame_parts:
            return super().array(shard, row, extension)
        frames = self._frames(shard, row, extension)
        array = empty_bytes(frames.nbytes).view(frames.dtype).reshape(frames.shape)
        array[:] = frames
        return array

    def row_groups(self, shard: int) -> tuple[list[int], int]:
        """See `RecordStore.row_groups`: of tables of episodes alone."""
        return super().row_groups(shard) if self.entries.samples[shard] else ([], 0)

    def check_columns(self, shard: int, known: list[str]) -> None:
        """See `ColumnarStore.check_columns`: of tables of episodes alone."""
        if self.entries.samples[shard]:
            super().check_columns(shard, known)

    def _media_range(self, shard: int, row: int, part: str) -> MediaRange:
        where = f"videos/{part}/"
        path = self._path(shard, row, self._info.video_path or "", where, part)
        begin_s, end_s = (self._told(shard, row, where + name, float) for name in ("from_timestamp", "to_timestamp"))
        return checked_range(self, shard, row, path, begin_s, end_s)

    @cached_property
    def _info(self) -> _Info:
        names = self.entries.names
        number = bisect_left(names, LEROBOT_INFO)
        if number == len(names) or names[number] != LEROBOT_INFO:
            return _Info({}, "")  # one file of the folder is looked at alone
        try:
            return msgspec.json.decode(self.files.read(number, 0, int(self.entries.sizes[number])), type=_Info)
        except msgspec.DecodeError as error:
            raise self.damaged(number, "the features", str(error)) from error

    def _told(self, shard: int, row: int, name: str, kind: type[T]) -> T:
        """A number that a row says. Raises `ShardError` if there is none."""
        try:
            return msgspec.json.decode(self.value(shard, row, name) or b"", type=kind)
        except (KeyError, msgspec.DecodeError) as error:
            raise self.damaged(shard, f"row {row}", f"{name!r} is no number: {error}") from error

    def _path(self, shard: int, row: int, template: str, where: str, part: str = "") -> str:
        """The path that a template gives for a row; which never is a template of Python, that could do more."""

        def filled(field: re.Match[str]) -> str:
            found = part if field[1] == "video_key" else str(self._told(shard, row, where + field[1], int))
            return found.rjust(int(field[2] or 0), "0")

        return _FIELD.sub(filled, template)

    def _frames(self, shard: int, row: int, feature: str) -> NDArray[Any]:
        """The values of a feature in the frames of an episode: (frames, …). Raises `ShardError`."""
        data = self._ranges.file_named(shard, row, self._path(shard, row, self._info.data_path, "data/"))
        first, end = (self._told(shard, row, f"dataset_{name}_index", int) for name in ("from", "to"))
        begin = first - int(self._column(data, 0, "index")[0])  # rows count from the first frame of the file on
        if not 0 <= begin < begin + end - first <= self.group_ends(data)[-1]:
            raise self.damaged(shard, f"row {row}", f"frames {first} to {end}, which {self.where(data)} does not have")
        stop = begin + end - first
        if not np.array_equal(self._rows(data, "index", begin, stop), np.arange(first, end)):
            raise self.damaged(data, f"row {begin}", f"it and those after it are not the frames {first} to {end}")
        return self._rows(data, feature, begin, stop)

    def _rows(self, data: int, feature: str, begin: int, stop: int) -> NDArray[Any]:
        """The values of a feature in rows of a file of frames."""
        ends, parts = self.group_ends(data), []
        for group in range(bisect_right(ends, begin), bisect_left(ends, stop) + 1):
            start = ends[group - 1] if group else 0
            parts.append(self._column(data, group, feature)[max(0, begin - start) : stop - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _column(self, data: int, group: int, feature: str) -> NDArray[Any]:
        """The values of a feature in a row group, kept decoded with other blocks."""

        def decoded() -> tuple[NDArray[Any], int]:
            batches, size = self.batches(data, group, [feature])
            try:
                return np.concatenate([_values(batch.column(feature)) for batch in batches]), size
            except (KeyError, ValueError) as error:
                raise self.damaged(data, f"row group {group}", f"no array {feature!r}: {error}") from error

        found: NDArray[Any] = self.blocks.get((self._me, data, group, feature), decoded)
        return found


def _values(column: Any) -> NDArray[Any]:
    """The numbers of an Arrow column, and of lists in it that are all as long: (rows, …). Raises ValueError."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column, shape = getattr(column, "storage", column), [len(column)]
    while pa.types.is_nested(column.type):
        sizes = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(sizes) != 1 or sizes[0] is None:
            raise ValueError(f"lists of the lengths {sizes[:3]}")
        shape.append(sizes[0])
        column = column.flatten()
    if column.null_count:
        raise ValueError("nulls")
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values.reshape(shape)
