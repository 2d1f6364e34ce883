"""Files that are read through a decompressor, by the end of their name, .gz, .bz2, .xz, .zst, or by their content."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from savable_pipeline.core.file_heads import HEAD, compression_of
from savable_pipeline.data.shards.tar import tar_compression
from savable_pipeline.tools.convert.names import is_tar
from savable_pipeline.tools.convert.source_file import name_of, open_source

_CHUNK = 1 << 17
ENDINGS = (".gz", ".bz2", ".xz", ".zst")


class DamagedError(Exception):
    """Compressed data that cannot be read to their end; an OSError is of the disk."""


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[IO[bytes]]:
    """A file to read the content of `path` from, or of a URL.

    Raises `DamagedError` in the block, ValueError without zstandard; of a URL `ShardError`, `RemoteError`.
    """
    with open_source(path) as packed, _opener(_compression(path, packed), packed) as file, _damage_told():
        yield file


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


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    """Raises `DamagedError` in place of what decompressors raise."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        if error.errno is not None:  # of a disk; gzip and bz2 have none for data
            raise
        raise DamagedError(str(error)) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise DamagedError(str(error)) from error


def _opener(compression: str, packed: BinaryIO) -> Any:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=packed)
    if compression == ".bz2":
        return bz2.BZ2File(packed)
    if compression == ".xz":
        return lzma.LZMAFile(packed)
    if compression == ".zst":
        return _zstd_file(packed)
    return packed


def _zstd_file(packed: BinaryIO) -> BinaryIO:
    """The content of a file of zstd frames."""
    try:
        import zstandard  # imported here: it is needed for .zst alone
    except ImportError:
        packed.close()
        raise ValueError("reading zstd needs the package zstandard: pip install zstandard") from None
    return io.BufferedReader(_Frames(packed, zstandard.ZstdDecompressor().decompressobj), _CHUNK)


class _Frames(io.RawIOBase):
    """zstd frames, one after the other. A file that ends within one is damaged; zstandard itself says nothing then."""

    def __init__(self, packed: BinaryIO, new: Callable[[], Any]) -> None:
        self._packed, self._new = packed, new
        self._frame: Any = None
        self._in = b""  # read from the file, and not given to a frame
        self._out = b""  # decompressed, and not given away

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out and self._fill():
            pass
        size = min(len(buffer), len(self._out))
        buffer[:size], self._out = self._out[:size], self._out[size:]
        return size

    def _fill(self) -> bool:
        """Decompress some more; tells whether there is any."""
        self._in = self._in or self._packed.read(_CHUNK)
        if not self._in:
            if self._frame is not None:
                raise DamagedError("the file ends within a frame of zstd")
            return False
        if self._frame is None:
            self._frame = self._new()
        self._out = self._frame.decompress(self._in)
        self._in = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True

    def close(self) -> None:
        self._packed.close()
        super().close()
