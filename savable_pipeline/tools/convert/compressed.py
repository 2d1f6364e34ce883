"""Bytes of a compressed file in order, on a disk or remote: .gz, .bz2, .xz and .zst, by name or content."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from savable_pipeline.core.file_heads import HEAD, compression_of
from savable_pipeline.core.files import regular_file
from savable_pipeline.data.remote.lookup import place_of_object
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
    """Whether a source is remote: a URL is a str, a file a `Path`."""
    return isinstance(path, str)


def name_of(path: Path | str) -> str:
    """The last part of a name."""
    return path.name if isinstance(path, Path) else path.rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def open_source(path: Path | str) -> Iterator[io.BufferedReader[Any]]:
    """A file to read from its start. Raises OSError; of a URL `ShardError`, `RemoteError`."""
    if isinstance(path, Path):
        with open(path, "rb", opener=regular_file) as file:
            yield file
    else:
        with io.BufferedReader(SourceFile(_opened(path), _AHEAD), _BUFFER) as remote:
            yield remote


@functools.lru_cache(maxsize=1)
def _opened(url: str) -> StoreFile:
    found, _ = place_of_object(url, job_session())
    return StoreFile(CachedBlocks(found, all_used=True), 0)


def close_objects() -> None:
    """Close the remote files of this process."""
    _opened.cache_clear()


_CHUNK = 1 << 17
ENDINGS = (".gz", ".bz2", ".xz", ".zst")


@contextlib.contextmanager
def opened(path: Path | str, line_bytes: int | None = None) -> Iterator[IO[bytes]]:
    """The decompressed content of a file; `line_bytes` is the most of a line.

    Raises `DamagedError` in the block, ValueError without zstandard; of a URL `ShardError`, `RemoteError`.
    """
    with open_source(path) as packed:
        kind = _compression(path, packed).removeprefix(".")
        yield io.BufferedReader(Unpacked(packed, kind, line_bytes), _CHUNK) if kind else packed


def is_compressed(path: Path | str) -> bool:
    """Whether a file is compressed, by its name or its content. Raises OSError, `RemoteError`."""
    if name_of(path).lower().endswith((*ENDINGS, ".tgz")):
        return True
    with open_source(path) as file:
        return bool(_compression(path, file))


def _compression(path: Path | str, file: io.BufferedReader[Any]) -> str:
    """How an open file is compressed: a tar by its content, others by their name, else by their content."""
    name, head = name_of(path).lower(), file.peek(HEAD)
    by_name = ".gz" if name.endswith(".tgz") else next((ending for ending in ENDINGS if name.endswith(ending)), "")
    if is_tar(name):
        found = tar_compression(head[:HEAD])
        return by_name if found is None else found
    return by_name or compression_of(head)
