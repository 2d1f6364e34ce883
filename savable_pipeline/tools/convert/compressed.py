"""Files that are read through a decompressor, by the end of their name, .gz, .bz2, .xz, .zst, or by their content."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from savable_pipeline.core.file_heads import HEAD, compression_of
from savable_pipeline.data.shards.tar import tar_compression
from savable_pipeline.data.stores.decompressed import Unpacked
from savable_pipeline.data.stores.sample_names import is_tar
from savable_pipeline.tools.convert.source_file import name_of, open_source

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
