"""Ranges of long files that the rows of tables name: file, from, to; the files lie beside the tables.

    corpus/train.parquet    path "wav/a.wav", start 12.5, end 14.0
    corpus/wav/a.wav        an entry of the same index, without samples: pinned and verified like a shard

A row chooses among the files of the dataset, by a path from its table's folder on; nothing that it says opens others.
`Ranges` is what a store of tables has whose rows name ranges: of Parquet, Arrow and JSONL by columns, and of LeRobot's
folders, version 3. There an episode is a sample, whose videos and frames lie in files of many episodes:

    meta/info.json                            the features, and how files are called
    meta/episodes/chunk-000/file-000.parquet  a row an episode: parts such as `tasks` and `length`, and where it lies in
    videos/KEY/chunk-000/file-000.mp4         each video: a range of seconds, a part KEY
    data/chunk-000/file-000.parquet           its frames: rows; each column is a part: an array of numbers, a ZIP
                                              archive of images, or JSON

All are entries of one index. (From the format's facts: features, templates of paths, columns.)
"""

from __future__ import annotations

import dataclasses
import io
import posixpath
import re
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeAlias, TypeVar, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.shards.byte_source import ByteSource, RangeFile
from savable_pipeline.data.shards.index import FileFormat, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, VIDEO_PARTS, as_part
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.arrow_file import ARROW
from savable_pipeline.data.stores.arrow_store import ArrowStore
from savable_pipeline.data.stores.columnar_store import ColumnarStore, ColumnSettings
from savable_pipeline.data.stores.jsonl import JSONL, JsonlStore
from savable_pipeline.data.stores.parquet import PARQUET, ParquetStore
from savable_pipeline.data.stores.record_store import FileStore, some_bytes
from savable_pipeline.data.stores.source import LEROBOT_INFO, RangeColumns
from savable_pipeline.errors import ShardError

_SEEN = 1 << 16  # bytes that are compared of the begin, the middle and the end of a file
_FIELD = re.compile(r"\{(video_key|chunk_index|file_index)(?::0(\d)d)?\}")  # of a template of LeRobot
_NUMBERS = {np.dtype(code).name for code in "?bhiqBHIQefd"}  # features that are arrays
_ENDINGS = tuple(f".{each}" for name in (*AUDIO_PARTS, *VIDEO_PARTS) for each in (name, name.upper()))


class MediaRange(msgspec.Struct, frozen=True):
    """A range of a file: its path as the row says it, and seconds; `end_s` None is the file's end."""

    path: str
    begin_s: float = 0.0
    end_s: float | None = None


class EpisodeRange(MediaRange, frozen=True, kw_only=True):
    """The range of an episode, each of whose `fps` frames in a second is there, or missing."""

    end_s: float
    fps: float


def _digest(file: ByteSource) -> int:
    """A hash of the begin, the middle and the end of a file that rows name ranges of."""
    return xxh3_64_intdigest(b"".join(some_bytes(file, _SEEN, 2)))


RangeOf: TypeAlias = Callable[[int, int, str], MediaRange | None]  # of shard, row and part


class Ranges:
    """The `parts` of the rows of a `store` that are ranges of other files: their bytes are what the row says, as JSON.

    `open` gives the whole file, with the seconds. `range_of` finds the range of a part of a row, None where it has
    none; paths are relative to the folder of the table, or to `base`. Raises `ShardError` for a file that is not one of
    the dataset's.
    """

    def __init__(
        self,
        store: FileStore,
        parts: Collection[str],
        range_of: RangeOf,
        *,
        base: str | None = None,
        behind: Collection[str] = (),
    ) -> None:
        self._store, self._parts, self._range_of, self._base, self._behind = store, parts, range_of, base, behind
        self._inside: set[int] = set()  # files that are no links out of the dataset
        self._extensions, self._read, self._open = store.extensions, store.read, store.open
        store.range_parts = parts
        store.extensions, store.read, store.open = self.extensions, self.read, self.open  # type: ignore[method-assign]

    def extensions(self, shard: int, row: int) -> list[str]:
        """The parts of the table, then the ranges, and what is `behind` them."""
        named = [part for part in self._parts if self._range_of(shard, row, part) is not None]
        plain = [part for part in self._extensions(shard, row) if part not in self._parts]
        return [*(part for part in plain if part not in self._behind), *named, *self._behind]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`; of a range, path and seconds."""
        part = self._part(extension)
        return self._read(shard, row, extension) if part is None else msgspec.json.encode(self._range(shard, row, part))

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`; of a range, the whole file."""
        part = self._part(extension)
        if part is None:
            return self._open(shard, row, extension)
        found = self._range(shard, row, part)
        number = self.file_named(shard, row, found.path)
        size, read_on = int(self._store.entries.sizes[number]), self._store.files.read_on
        source = ByteSource(lambda offset, wanted: read_on(number, offset, wanted, size), size)
        return RangeFile(source, found.begin_s, found.end_s, getattr(found, "fps", None))

    def file_named(self, shard: int, row: int, path: str) -> int:
        """The number of the file that a row names. Raises `ShardError` for all that is not of the dataset."""
        names = self._store.entries.names
        base = posixpath.dirname(names[shard]) if self._base is None else self._base
        name = posixpath.normpath(posixpath.join(base, path))
        number = bisect_left(names, name)
        fault = ""
        if "://" in path:
            fault = "a URL. Put the file beside the table"
        elif not is_inside(path):
            fault = "a path that leads out of the table's folder. Put the file below it"
        elif number == len(names) or names[number] != name:
            fault = "not a file of the dataset. Put it there, or read the folder of both"
        elif self._is_outside(number):
            fault = "a link that leads out of the dataset's folder. Put the file itself there, by `cp -L`"
        if fault:
            raise ShardError(
                f"{self._store.where(shard)}: row {row}: names {path!r}: {fault}", reason="no file of the dataset"
            )
        return number

    def _is_outside(self, number: int) -> bool:
        files, root = self._store.files, self._store.found.root
        if files.behind_url or number in self._inside:
            return False
        if not files.path(number).resolve().is_relative_to(root.resolve()):
            return True
        self._inside.add(number)
        return False

    def _part(self, extension: str) -> str | None:
        if extension in self._parts:
            return extension
        return next((part for part in self._parts if part.lower() == extension.lower()), None)

    def _range(self, shard: int, row: int, part: str) -> MediaRange:
        found = self._range_of(shard, row, part)
        if found is None:
            raise KeyError(f"no part {part!r}: the row names no file")
        return found


def checked_range(
    store: FileStore, shard: int, row: int, path: str, begin_s: float | None, end_s: float | None
) -> MediaRange:
    """The range that a row of a table says, if it can be one. Raises `ShardError`."""
    begin_s = begin_s or 0.0
    if not 0 <= begin_s < (float("inf") if end_s is None else end_s):
        raise _no_range(store, shard, row, f"{path!r} from {begin_s} s to {end_s} s")
    return MediaRange(path, begin_s, end_s)


def _no_range(store: FileStore, shard: int, row: int, what: str) -> ShardError:
    """The error for a row whose range cannot be one."""
    return store.damaged(shard, f"row {row}", f"no range of a file: {what}", reason="malformed range")


def ranged(kind: type[FileStore], found: IndexedFiles, *, ranges: RangeColumns, **settings: Any) -> FileStore:
    """The store of tables of whose rows columns, or fields, say the ranges: for each part those of path, from and to;
    None where a file begins, or ends. There is no range where the path is null.

    Raises ValueError for a column of `ranges` that the first file does not have.
    """
    if issubclass(kind, ColumnarStore):
        used = tuple(name for columns in ranges.values() for name in columns if name is not None)
        settings["needed"] = used
        if settings.get("columns") is not None:
            settings["columns"] = tuple(dict.fromkeys([*settings["columns"], *used]))
    store = kind(found, **settings)

    def told(shard: int, row: int, name: str) -> bytes | None:
        try:
            return store.value(shard, row, name)
        except KeyError:
            raise _no_range(store, shard, row, f"{name!r}, which ranges= names, is not there") from None

    def range_of(shard: int, row: int, part: str) -> MediaRange | None:
        path, begin, end = (None if name is None else told(shard, row, name) for name in ranges[part])
        if path is None:
            return None
        try:
            seconds = [None if each is None else msgspec.json.decode(each, type=float) for each in (begin, end)]
            return checked_range(store, shard, row, path.decode(), *seconds)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _no_range(store, shard, row, f"{part!r}: {error}") from error

    Ranges(store, tuple(ranges), range_of)
    return store


def _with_media(
    form: FileFormat, constant: str, name: str, media: tuple[str, ...] = _ENDINGS, samples_below: str = ""
) -> FileFormat:
    """The format of folders of such tables with the files that their rows name; `constant` is its name here.

    Of a set whose tables have samples below one folder, those elsewhere have rows alone, and an epoch reads all files.
    """

    def read(file: ByteSource, name: str) -> ShardTable:
        if not name.endswith(form.kind.suffixes):
            return ShardTable(ShardEntry(name, file.size, 0, _digest(file)), b"")
        table = form.read(file, name)
        if not name.startswith(samples_below):
            table.entry = msgspec.structs.replace(table.entry, samples=0)
        return table

    def is_as_indexed(file: ByteSource, index: ShardIndex, number: int) -> bool:
        if index.shards.names[number].endswith(form.kind.suffixes):
            return form.is_as_indexed(file, index, number)
        return _digest(file) == int(index.shards.digests[number])

    return dataclasses.replace(
        form,
        name=name,
        kind=dataclasses.replace(form.kind, suffixes=(*form.kind.suffixes, *media)),
        import_path=f"{__name__}:{constant}",
        read=read,
        is_as_indexed=is_as_indexed,
        all_used=bool(samples_below),  # of long files, rows name some ranges
    )


PARQUET_RANGES = _with_media(PARQUET, "PARQUET_RANGES", "parquet-ranges")
ARROW_RANGES = _with_media(ARROW, "ARROW_RANGES", "arrow-ranges")
JSONL_RANGES = _with_media(JSONL, "JSONL_RANGES", "jsonl-ranges")
LEROBOT = _with_media(PARQUET, "LEROBOT", "lerobot", (".mp4", LEROBOT_INFO.rpartition("/")[2]), "meta/episodes/")
ranged_parquet, ranged_arrow, ranged_jsonl = (partial(ranged, kind) for kind in (ParquetStore, ArrowStore, JsonlStore))

Number = TypeVar("Number", int, float)


class _Feature(msgspec.Struct):
    dtype: str


class _Info(msgspec.Struct):
    features: dict[str, _Feature]
    data_path: str
    fps: float
    video_path: str | None = None


class LeRobotStore(ParquetStore):
    """The episodes of a LeRobot folder; a key is the number of the episode, unless `key` names another column.

    `array` gives the frames' numbers as they are stored, (frames, …); their bytes are a `.npy`. The bytes of images are
    a ZIP archive of them, see `ImageFrames`, those of anything else JSON. Raises `ShardError`, and ValueError for
    `columns`.
    """

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
        self._ranges = Ranges(self, videos, self._media_range, base="", behind=self.frame_parts)

    def extensions(self, shard: int, row: int) -> list[str]:
        """What a row says of its episode, but where it lies; the videos; and the columns of its frames."""
        return [*(name for name in super().extensions(shard, row) if "/" not in name), *self.frame_parts]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`; of frames, a `.npy`, an archive of images or JSON."""
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
        """A ZIP archive of the images of frames, in order, whose comment says how many are in a second."""
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
        """See `RecordStore.array`; of frames, their values."""
        if extension not in self.frame_parts or not self._has_numbers(extension):
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
        checked_range(self, shard, row, path, begin_s, end_s)
        return EpisodeRange(path, begin_s=begin_s, end_s=end_s, fps=self._info.fps)

    @cached_property
    def _info(self) -> _Info:
        names = self.entries.names
        number = bisect_left(names, LEROBOT_INFO)
        if number == len(names) or names[number] != LEROBOT_INFO:
            return _Info({}, "", 1)  # one file of the folder is looked at alone
        try:
            return msgspec.json.decode(self.files.read(number, 0, int(self.entries.sizes[number])), type=_Info)
        except msgspec.DecodeError as error:
            raise self.damaged(number, "the features", str(error)) from error

    def _told(self, shard: int, row: int, name: str, kind: type[Number]) -> Number:
        """A number that a row says. Raises `ShardError` if there is none."""
        try:
            return msgspec.json.decode(self.value(shard, row, name) or b"", type=kind)
        except (KeyError, msgspec.DecodeError) as error:
            raise self.damaged(shard, f"row {row}", f"{name!r} is not a number: {error}") from error

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
                values = _values if self._has_numbers(feature) else _objects
                return np.concatenate([values(batch.column(feature)) for batch in batches]), size
            except (KeyError, ValueError) as error:
                raise self.damaged(data, f"row group {group}", f"no array {feature!r}: {error}") from error

        found: NDArray[Any] = self.blocks.get((self._me, data, group, feature), decoded)
        return found


def _objects(column: Any) -> NDArray[Any]:
    """The values of an Arrow column, whatever they are: object (rows,)."""
    found = np.empty(len(column), object)
    found[:] = column.to_pylist()
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
