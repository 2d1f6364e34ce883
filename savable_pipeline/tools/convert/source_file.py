"""A file that a source names, on a disk or behind a URL: its bytes in their order, or a stretch of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from savable_pipeline.core.files import regular_file
from savable_pipeline.data.remote.lookup import check_stamp, place_of_object
from savable_pipeline.data.remote.session import job_session
from savable_pipeline.data.shards.byte_source import SourceFile
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.shard_files import StoreFile

_BUFFER = 1 << 20
_AHEAD = 64 << 20  # bytes of an object that are announced ahead


def is_url(path: Path | str) -> bool:
    """Whether a source lies behind a URL, which is a str; a file is a `Path`."""
    return isinstance(path, str)


def name_of(path: Path | str) -> str:
    """The last part of a name."""
    return path.name if isinstance(path, Path) else path.rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def open_source(path: Path | str) -> Iterator[io.BufferedReader[Any]]:
    """A file to read from its begin. Raises OSError; of a URL `ShardError`, `RemoteError`."""
    if isinstance(path, Path):
        with open(path, "rb", opener=regular_file) as file:
            yield file
    else:
        with io.BufferedReader(SourceFile(object_at(path), _AHEAD), _BUFFER) as remote:
            yield remote


def place_behind(url: str, stamps: Iterable[str]) -> str:
    """A hash of where a source lies, and of which objects these are: see `place_of`."""
    return hashlib.sha256("\0".join([url, *stamps]).encode()).hexdigest()[:16]


def stamp_of(url: str) -> str:
    """What tells the object that this process reads at a URL from one that replaces it."""
    return _opened(url)[1]


def object_at(url: str, stamp: str = "") -> StoreFile:
    """The object at a URL. Raises `ShardError` with a `stamp` if it is another one, `RemoteError`."""
    file, found = _opened(url)
    check_stamp(url, stamp or found, found)
    return file


@functools.lru_cache(maxsize=1)
def _opened(url: str) -> tuple[StoreFile, str]:
    place, stamp = place_of_object(url, job_session())
    return StoreFile(CachedBlocks(place, all_used=True), 0), stamp


def close_objects() -> None:
    """Close what this process has open behind a URL, and look again at what is asked for next."""
    _opened.cache_clear()
