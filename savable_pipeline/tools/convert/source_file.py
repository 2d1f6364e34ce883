"""A file that a source names, on a disk or behind a URL: its bytes in their order, through a decompressor if need be.

It is compressed by the end of its name, .gz, .bz2, .xz, .zst, or by its content.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from savable_pipeline.core.file_heads import HEAD, compression_of
from savable_pipeline.core.files import regular_file
from savable_pipeline.data.remote.lookup import check_stamp, place_of_object
from savable_pipeline.data.remote.session import job_session
from savable_pipeline.data.shards.byte_source import SourceFile
from savable_pipeline.data.shards.tar import tar_compression
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.decompressed import Unpacked
from savable_pipeline.data.stores.sample_names import is_tar
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


def remote_source_id(url: str, stamps: Iterable[str]) -> str:
    """A hash of where a source lies, and of which objects these are: see `source_id`."""
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
    found, stamp = place_of_object(url, job_session())
    return StoreFile(CachedBlocks(found, all_used=True), 0), stamp


def close_objects() -> None:
    """Close what this process has open behind a URL, and look again at what is asked for next."""
    _opened.cache_clear()


_CHUNK = 1 << 17
ENDINGS = (".gz", ".bz2", ".xz", ".zst")


@contextlib.contextmanager
def opened(path: Path | str, line_bytes: int | None = None) -> Iterator[IO[bytes]]:
    """A file to read the content of `path` from, or of a URL; `line_bytes` is the most of a line that was compressed.

    Raises `DamagedError` in the block, ValueError without zstandard; of a URL `ShardError`, `RemoteError`.
    """
    with open_source(path) as packed:
        kind = _compression(path, packed).removeprefix(".")
        yield io.BufferedReader(Unpacked(packed, kind, line_bytes), _CHUNK) if kind else packed


def is_compressed(path: Path | str) -> bool:
    """Whether a file is compressed, by its name or by its content: programs leave out the ending. Raises OSError.

    Of a URL it raises `ShardError`, `RemoteError`.
    """
    if name_of(path).lower().endswith((*ENDINGS, ".tgz")):
        return True
    with open_source(path) as file:
        return bool(_compression(path, file))


def _compression(path: Path | str, file: io.BufferedReader[Any]) -> str:
    """How an open file is compressed: of a tar by what it holds, of any other by its name, or else by what it holds."""
    name, head = name_of(path).lower(), file.peek(HEAD)
    named = ".gz" if name.endswith(".tgz") else next((ending for ending in ENDINGS if name.endswith(ending)), "")
    if is_tar(name):
        found = tar_compression(head[:HEAD])
        return named if found is None else found
    return named or compression_of(head)
