"""`EnergonMedia`: what `energon prepare-media` has written of a dataset's media, read as data.

    .nv-meta/index.sqlite    media_metadata (entry_key, metadata_type, metadata_json)    "KEY.PART", av or image, values
                             samples (sample_key, tar_file_id, sample_index, …)        ┐ where a part lay in its tar
                             sample_parts (tar_file_id, sample_index, part_name, …)    ┘

Its values are not always those of `media_info`: it decodes, counts frames, and turns no rotated picture. So they have a
field of their own in a state, and the table of `savable index --media` is read in their place where there is one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

import msgspec
from xxhash import xxh3_128

from savable_pipeline.data.media.media_info import MediaInfo
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import ShardError

_LARGEST = 1 << 20  # bytes of a text or a row
_TABLES = {"media_metadata", "samples", "sample_parts"}
_FIND = """
SELECT metadata_type, metadata_json, content_byte_offset, content_byte_size FROM media_metadata
LEFT JOIN samples ON sample_key = ?1
LEFT JOIN sample_parts ON sample_parts.tar_file_id = samples.tar_file_id
    AND sample_parts.sample_index = samples.sample_index AND part_name = ?2
WHERE entry_key = ?1 || '.' || ?2
"""


_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Values(msgspec.Struct):
    """What it writes of audio and video, and of images."""

    video_duration: _Number | None = None
    video_num_frames: _Count | None = None
    video_fps: _Number | None = None
    video_width: _Count | None = None
    video_height: _Count | None = None
    audio_duration: _Number | None = None
    audio_channels: _Count | None = None
    audio_sample_rate: _Count | None = None
    width: _Count | None = None
    height: _Count | None = None

    def info(self) -> MediaInfo:
        duration = self.audio_duration if self.video_duration is None else self.video_duration
        width, height = self.video_width or self.width, self.video_height or self.height
        sound = self.audio_sample_rate, self.audio_channels
        return MediaInfo(duration, self.video_fps, self.video_num_frames, width, height, *sound)


class EnergonMedia:
    """Energon's metadata of media, in its database at `path`. Raises `ShardError` if they cannot be read."""

    field = "energon_media"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[tuple[int, sqlite3.Connection]] = []  # by process: those of a parent must not be closed

    @cached_property
    def digest(self) -> str:
        """A hash of all values."""
        found = xxh3_128()
        with self._reading() as database:
            for row in database.execute(
                "SELECT entry_key, metadata_type, metadata_json FROM media_metadata ORDER BY 1"
            ):
                found.update(msgspec.msgpack.encode(row))
        return found.hexdigest()

    def find(self, store: RecordStore, shard: int, row: int, part: str) -> MediaInfo | None:
        """What they say of a part; None if nothing. Raises `ShardError` where it lies elsewhere than it did."""
        key = store.key(shard, row)
        with self._reading() as database:
            found: Any = database.execute(_FIND, (key, part)).fetchone()
        if found is None:
            return None
        place = store.part_offset(shard, row, part), store.sizes(shard, row)[part]
        if found[2:] != place:
            raise self._unfit(f"{key}.{part} is not where it was when they were made")
        try:
            return msgspec.json.decode(found[1], type=_Values).info()
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise self._unfit(f"{key}.{part}: {error}") from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            if not self._opened or self._opened[-1][0] != os.getpid():
                self._opened.append((os.getpid(), connected(self._path)))
            yield self._opened[-1][1]
        except sqlite3.Error as error:
            raise self._unfit(str(error)) from error

    def _unfit(self, why: str) -> ShardError:
        return ShardError(
            f"{self._path}: Energon's metadata of media do not fit the shards: {why}; make them again by `energon "
            "prepare` and `energon prepare-media`, or run `savable index --media`, whose table is read in their place",
            reason="other media table",
        )


def connected(path: Path) -> sqlite3.Connection:
    """The database at `path`, which is only read. Raises `sqlite3.Error`."""
    address = f"file:{quote(os.fspath(path.absolute()))}?mode=ro"
    database = sqlite3.connect(address, uri=True, check_same_thread=False)
    database.execute("PRAGMA trusted_schema = OFF")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
    return database


def open_energon_media(path: Path) -> EnergonMedia | None:
    """Energon's metadata of media in its database at `path`; None where it has no tables for them."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connected(path)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return EnergonMedia(path) if tables >= _TABLES else None
    return None
