"""LeRobot's folders, version 3: an episode is a sample.

Its videos and frames are in files of many episodes.

    meta/info.json                            the features, and templates of file names
    meta/episodes/chunk-000/file-000.parquet  a row per episode: parts such as `tasks` and `length`, and the location of
    videos/KEY/chunk-000/file-000.mp4         each video: a range of seconds, a part KEY
    data/chunk-000/file-000.parquet           its frames: rows; each column is a part: an array of numbers, a ZIP
                                              archive of images, or JSON

All files are entries of one index.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.shards.index import IndexedFiles, marker_object
from savable_pipeline.data.shards.part_types import as_part
from savable_pipeline.data.stores.grouped_store import ColumnSettings
from savable_pipeline.data.stores.parquet import PARQUET, ParquetStore
from savable_pipeline.data.stores.ranges import MediaRange, RangedRows, checked_range, with_media

INFO = "meta/info.json"
_FIELD = re.compile(r"\{(video_key|chunk_index|file_index)(?::0(\d)d)?\}")  # placeholder in a path template of LeRobot
_NUMBERS = {np.dtype(code).name for code in "?bhiqBHIQefd"}  # dtypes of features that are arrays


class EpisodeRange(MediaRange, frozen=True, kw_only=True):
    """Range of a video that is an episode, at `fps` frames per second.

    Some frames may be missing.
    """

    end_s: float
    fps: float


Number = TypeVar("Number", int, float)


class _Feature(msgspec.Struct):
    dtype: str


class _Info(msgspec.Struct):
    features: dict[str, _Feature]
    data_path: str
    fps: float
    video_path: str | None = None


class LeRobotStore(RangedRows, ParquetStore):
    """Episodes of a LeRobot folder.

    A key is the number of the episode, unless `key` names another column.

    `array` returns the numbers of frames as they are stored, (frames, …), and `read` returns them as `.npy`. Images are
    in a ZIP archive, see `ImageFrames`, and other values are JSON. Raises `ShardError`, and ValueError for `columns`.
    """

    base = ""  # paths are relative to the folder of the dataset
    all_used = True

    def __init__(self, found: IndexedFiles, **settings: Unpack[ColumnSettings]) -> None:
        if settings.pop("columns", None) is not None:
            raise ValueError(f"{found.address}: columns= does not apply to episodes, whose parts are read on demand")
        settings["key"] = settings.get("key") or "episode_index"
        super().__init__(found, **settings)
        first = int(np.flatnonzero(self.entries.samples)[0])
        self.columns = tuple(name for name in self.schema(first).names if not name.startswith("stats/"))
        features = self._info.features
        videos = [name for name, feature in features.items() if feature.dtype == "video"]
        self.frame_parts = [name for name in features if name not in (*self.columns, *videos)]
        self.range_parts = videos
        self.last_parts = self.frame_parts  # listed after all others

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return the columns of an episode's row, its videos, and its frames' columns."""
        return [name for name in super().extensions(shard, row) if "/" not in name or name in self.range_parts]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`. Frames become `.npy`, a ZIP of images, or JSON."""
        if extension not in self.frame_parts:
            return super().read(shard, row, extension)
        frames = self._frames(shard, row, extension)
        if self._dtype(extension) == "image":
            return self._archive(shard, row, extension, frames)
        if not self._has_numbers(extension):
            return as_part(frames.tolist()) or b""
        file = io.BytesIO()
        np.save(file, frames, allow_pickle=False)
        return file.getvalue()

    def _archive(self, shard: int, row: int, extension: str, images: Iterable[Mapping[str, Any] | None]) -> bytes:
        """Return a ZIP archive of the images of frames, in order, with the frame rate as its comment."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.comment = str(self._info.fps).encode()
            for number, image in enumerate(images):
                data, path = (image or {}).get("bytes"), (image or {}).get("path") or ""
                if data is None:
                    fault = f"frame {number} of {extension!r} has only the path {path!r}, no bytes"
                    raise self.damaged(shard, f"row {row}", f"{fault}. Write the images into the table")
                archive.writestr(zipfile.ZipInfo(f"{number:06d}{posixpath.splitext(path)[1]}"), data)
        return file.getvalue()

    def _dtype(self, feature: str) -> str:
        found = self._info.features.get(feature)
        return "" if found is None else found.dtype

    def _has_numbers(self, feature: str) -> bool:
        return feature == "index" or self._dtype(feature) in _NUMBERS

    def array(self, shard: int, row: int, extension: str) -> NDArray[Any]:
        """See `RecordStore.array`. The array of a frames' column is (frames, …)."""
        if extension not in self.frame_parts or not self._has_numbers(extension):
            return super().array(shard, row, extension)
        frames = self._frames(shard, row, extension)
        array = empty_bytes(frames.nbytes).view(frames.dtype).reshape(frames.shape)
        array[:] = frames
        return array

    def row_groups(self, shard: int) -> tuple[list[int], int]:
        """See `RecordStore.row_groups`. Only tables of episodes have them."""
        return super().row_groups(shard) if self.entries.samples[shard] else ([], 0)

    def check_columns(self, shard: int, known: list[str]) -> None:
        """See `ColumnarStore.check_columns`. Only tables of episodes are checked."""
        if self.entries.samples[shard]:
            super().check_columns(shard, known)

    def range_of(self, shard: int, row: int, part: str) -> MediaRange:
        """See `RangedRows.range_of`."""
        prefix = f"videos/{part}/"
        path = self._path(shard, row, self._info.video_path or "", prefix, part)
        begin_s, end_s = (self._number(shard, row, prefix + name, float) for name in ("from_timestamp", "to_timestamp"))
        checked_range(self, shard, row, path, begin_s, end_s)
        return EpisodeRange(path, begin_s=begin_s, end_s=end_s, fps=self._info.fps)

    @cached_property
    def _info(self) -> _Info:
        names = self.entries.names
        number = bisect_left(names, INFO)
        if number == len(names) or names[number] != INFO:
            return _Info({}, "", 1)  # a single file of the folder was opened
        try:
            return msgspec.json.decode(self.files.read(number, 0, int(self.entries.sizes[number])), type=_Info)
        except msgspec.DecodeError as error:
            raise self.damaged(number, "the features", str(error)) from error

    def _number(self, shard: int, row: int, name: str, kind: type[Number]) -> Number:
        """Return the number in a column of a row. Raises `ShardError` if there is none."""
        try:
            return msgspec.json.decode(self.value(shard, row, name) or b"", type=kind)
        except (KeyError, msgspec.DecodeError) as error:
            raise self.damaged(shard, f"row {row}", f"{name!r} is not a number: {error}") from error

    def _path(self, shard: int, row: int, template: str, prefix: str, part: str = "") -> str:
        """Return the path that a template yields for a row. The number for {name} is in the column `prefix` + name.

        The template is not passed to `str.format`, because this can read attributes.
        """

        def fill(field: re.Match[str]) -> str:
            name, width = field.groups()
            value = part if name == "video_key" else str(self._number(shard, row, prefix + name, int))
            return value.rjust(int(width or 0), "0")

        return _FIELD.sub(fill, template)

    def _frames(self, shard: int, row: int, feature: str) -> NDArray[Any]:
        """Return the values of a feature in the frames of an episode: (frames, …). Raises `ShardError`."""
        file = self.file_named(shard, row, self._path(shard, row, self._info.data_path, "data/"))
        first, end = (self._number(shard, row, f"dataset_{name}_index", int) for name in ("from", "to"))
        # the column `index` counts all frames, so subtract the number of the file's first frame
        begin = first - int(self._column(file, 0, "index")[0])
        if not 0 <= begin < begin + end - first <= self.group_ends(file)[-1]:
            raise self.damaged(shard, f"row {row}", f"frames {first} to {end}, which {self.where(file)} does not have")
        stop = begin + end - first
        if not np.array_equal(self._rows(file, "index", begin, stop), np.arange(first, end)):
            raise self.damaged(file, f"row {begin}", f"it and those after it are not the frames {first} to {end}")
        return self._rows(file, feature, begin, stop)

    def _rows(self, file: int, feature: str, begin: int, stop: int) -> NDArray[Any]:
        """Return the values of a feature in rows `begin` to `stop - 1` of a file of frames."""
        ends, pieces = self.group_ends(file), []
        for group in range(bisect_right(ends, begin), bisect_left(ends, stop) + 1):
            start = ends[group - 1] if group else 0  # first row of the group
            pieces.append(self._column(file, group, feature)[max(0, begin - start) : stop - start])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _column(self, file: int, group: int, feature: str) -> NDArray[Any]:
        """Return the values of a feature in a row group, cached with other decoded blocks."""

        def decode() -> tuple[NDArray[Any], int]:
            batches, size = self.batches(file, group, [feature])
            try:
                values_of = _numbers_of if self._has_numbers(feature) else _objects_of
                return np.concatenate([values_of(batch.column(feature)) for batch in batches]), size
            except (KeyError, ValueError) as error:
                raise self.damaged(file, f"row group {group}", f"no array {feature!r}: {error}") from error

        found: NDArray[Any] = self.blocks.get((self._owner, file, group, feature), decode)
        return found


def _objects_of(column: Any) -> NDArray[Any]:
    """Return the values of an Arrow column of any type: object (rows,)."""
    found = np.empty(len(column), object)
    found[:] = column.to_pylist()
    return found


def _numbers_of(column: Any) -> NDArray[Any]:
    """Return the numbers of an Arrow column, or of lists of equal lengths: (rows, …). Raises ValueError."""
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


def _is_lerobot(heads: Mapping[str, bytes]) -> bool:
    """Return whether the metadata say version 3. Raises ValueError for another version.

    Without this error, tables of another version would be read as Parquet, without their videos.
    """
    version = str(marker_object(heads, INFO).get("codebase_version", ""))
    if version and not version.startswith("v3."):
        raise ValueError(
            f"LeRobot {version}, but only v3.0 is supported. Run LeRobot's convert_dataset_v21_to_v30, or read its "
            "folder data as rows"
        )
    return bool(version)


LEROBOT = with_media(
    PARQUET,
    (".mp4", INFO.rpartition("/")[2]),
    samples_below="meta/episodes/",
    name="lerobot",
    store=LeRobotStore,
    settings=("columns", "key", "blocks", "partial", "unpacked_bytes"),
    markers=(INFO,),
    claims=_is_lerobot,
    by_setting={},
    reader="parquet",
)
