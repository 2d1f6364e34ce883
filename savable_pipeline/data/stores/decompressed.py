"""Decompression of files, records and parts, up to a limit of bytes.

Data are decompressed in pieces, so a few bytes that would become gigabytes are rejected before they fill the memory.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

NEEDED = {"zst", "rows"}  # kinds that need an optional package
MORE = "Pass a larger unpacked_bytes= if that is right"
UNPACKED_BYTES = 1 << 30  # default limit of decompressed bytes, which the option unpacked_bytes= replaces
_PIECE = 1 << 20  # bytes to decompress at a time
_ZST_STEP = 1 << 10  # compressed bytes to read at a time, which zstd decompresses to at most 32 MiB


class DamagedError(ValueError):
    """Error for damaged compressed data. Errors of the disk are OSErrors instead."""


def needed_package(kind: str) -> Any:
    """Import and return the package for a kind of compression, or for "rows" in Arrow.

    Raises ValueError if it is not installed.
    """
    package = "zstandard" if kind == "zst" else "pyarrow"
    try:
        return importlib.import_module(package)
    except ImportError:
        need = "rows in Arrow need" if kind == "rows" else "reading zstd needs"
        raise ValueError(f"{need} {package}. Run `pip install {package}`") from None


class Unpacked(io.RawIOBase):
    """Decompressed content of concatenated gz, bz2, xz or zst streams.

    Reading raises `DamagedError`, also for a line of more than `line_bytes` bytes.
    """

    def __init__(self, packed: IO[bytes], kind: str, line_bytes: int | None = None) -> None:
        files: dict[str, Callable[[Any], Any]] = {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile, "zst": _ZstFile}
        self._packed = packed
        self._file = gzip.GzipFile(fileobj=packed, mode="rb") if kind == "gz" else files[kind](packed)
        self._line_bytes, self._most_line_bytes = 0, line_bytes  # bytes of the current line so far, and their limit

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return their number."""
        try:
            found = self._file.read(min(len(buffer), _PIECE))
        except EOFError:
            raise DamagedError("its compressed data are cut short") from None
        except (zlib.error, lzma.LZMAError, OSError) as error:
            # an error of the disk has a number, an error of the data has none
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DamagedError(str(error)) from error
        if self._most_line_bytes is not None:
            last = found.rfind(b"\n")
            self._line_bytes = self._line_bytes + len(found) if last < 0 else len(found) - last - 1
            if self._line_bytes > self._most_line_bytes:
                raise DamagedError(f"a line of more than {self._most_line_bytes} bytes when decompressed. {MORE}")
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Close this file and the compressed one."""
        self._packed.close()
        super().close()


class _ZstFile:
    """Frames of zstd. Unlike zstandard's own file, this one detects a truncated frame."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed, self._new_frame = packed, needed_package("zst").ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._input = self._output = b""  # read and not decompressed yet, decompressed and not returned yet

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes.

        Raises EOFError for a truncated frame, OSError for damage.
        """
        zstandard = needed_package("zst")
        while not self._output and (data := self._input or self._packed.read(_ZST_STEP)):
            self._frame = self._frame or self._new_frame()
            try:
                self._output = self._frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._input, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
        if not self._output and self._frame is not None:
            raise EOFError
        found, self._output = self._output[:size], self._output[size:]
        return found


def decompressed(data: bytes, kind: str, max_bytes: int = UNPACKED_BYTES, size: int | None = None) -> bytes:
    """Return the decompressed content of bytes in gz, bz2 or zst.

    The content has at most `max_bytes` bytes, and exactly `size` if that is known.

    Raises `DamagedError`, also for more than `max_bytes` bytes, without decompressing them all.

    >>> import gzip
    >>> from savable_pipeline.data.stores.decompressed import decompressed
    >>> decompressed(gzip.compress(b"text"), "gz")
    b'text'
    """
    if size is not None and size > max_bytes:
        raise DamagedError(f"{size} bytes when decompressed, more than {max_bytes}. {MORE}")
    # `BytesIO.getvalue` does not copy, unlike joining a list
    file, content = Unpacked(io.BytesIO(data), kind), io.BytesIO()
    while piece := file.read(_PIECE):
        content.write(piece)
        if size is not None and content.tell() > size:
            raise DamagedError(f"more than {size} bytes when decompressed, expected {size}")
        if content.tell() > max_bytes:
            raise DamagedError(f"more than {max_bytes} bytes when decompressed. {MORE}")
    if size is not None and content.tell() != size:
        raise DamagedError(f"{content.tell()} bytes when decompressed, expected {size}")
    return content.getvalue()
