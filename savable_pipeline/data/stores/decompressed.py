"""Content of compressed files, records and parts, of bounded size.

It is unpacked by pieces, so that a few bytes which become gigabytes are refused before they have taken them.
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

NEEDED = {"zst", "rows"}  # kinds that need a package
MORE = "Pass a larger unpacked_bytes= if that is right"
UNPACKED_BYTES = 1 << 30  # that compressed bytes in memory may become, unless the option of this name says more
_PIECE = 1 << 20  # bytes that are unpacked at a time
_ZST_STEP = 1 << 10  # bytes of a file that are read for it: zstd makes at most 32 MiB of its own


class DamagedError(ValueError):
    """Compressed data that cannot be read to their end; an OSError is of the disk."""


def needed_package(kind: str) -> Any:
    """The package that a kind of compression, or "rows" of Arrow, needs.

    Raises ValueError if it is not here.
    """
    package = "zstandard" if kind == "zst" else "pyarrow"
    try:
        return importlib.import_module(package)
    except ImportError:
        need = "rows in Arrow need" if kind == "rows" else "reading zstd needs"
        raise ValueError(f"{need} {package}. Run `pip install {package}`") from None


class Unpacked(io.RawIOBase):
    """The content of a file of streams of gz, bz2, xz or zst, one after the other.

    Raises `DamagedError`.

    A line of more than `line_bytes` is no line.
    """

    def __init__(self, packed: IO[bytes], kind: str, line_bytes: int | None = None) -> None:
        files: dict[str, Callable[[Any], Any]] = {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile, "zst": _ZstFile}
        self._packed = packed
        self._file = gzip.GzipFile(fileobj=packed, mode="rb") if kind == "gz" else files[kind](packed)
        self._line, self._line_bytes = 0, line_bytes

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what comes next; gives how many bytes came."""
        try:
            found = self._file.read(min(len(buffer), _PIECE))
        except EOFError:
            raise DamagedError("its compressed data are cut short") from None
        except (zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            raise DamagedError(str(error)) from error
        if self._line_bytes is not None:
            last = found.rfind(b"\n")
            self._line = self._line + len(found) if last < 0 else len(found) - last - 1
            if self._line > self._line_bytes:
                raise DamagedError(f"a line of more than {self._line_bytes} bytes when decompressed. {MORE}")
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Close the file too."""
        self._packed.close()
        super().close()


class _ZstFile:
    """Frames of zstd: zstandard's own file does not say that one is cut."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed, self._new = packed, needed_package("zst").ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._in = self._out = b""

    def read(self, size: int) -> bytes:
        """At most so many bytes. Raises EOFError where a frame is cut, OSError for damage."""
        zstandard = needed_package("zst")
        while not self._out and (data := self._in or self._packed.read(_ZST_STEP)):
            self._frame = self._frame or self._new()
            try:
                self._out = self._frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._in, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
        if not self._out and self._frame is not None:
            raise EOFError
        found, self._out = self._out[:size], self._out[size:]
        return found


def decompressed(data: bytes, kind: str, most: int = UNPACKED_BYTES, size: int | None = None) -> bytes:
    """Return the content of bytes compressed by gz, bz2 or zst.

    It has at most `most` bytes, and `size` if that is known.

    Raises `DamagedError`, also for more than that, of which no more than a piece is unpacked.

    >>> import gzip
    >>> from savable_pipeline.data.stores.decompressed import decompressed
    >>> decompressed(gzip.compress(b"text"), "gz")
    b'text'
    """
    if size is not None and size > most:
        raise DamagedError(f"{size} bytes when decompressed, more than {most}. {MORE}")
    file, content = Unpacked(io.BytesIO(data), kind), io.BytesIO()  # whose content is copied nowhere, unlike a list's
    while piece := file.read(_PIECE):
        content.write(piece)
        if size is not None and content.tell() > size:
            raise DamagedError(f"more than {size} bytes when decompressed, expected {size}")
        if content.tell() > most:
            raise DamagedError(f"more than {most} bytes when decompressed. {MORE}")
    if size is not None and content.tell() != size:
        raise DamagedError(f"{content.tell()} bytes when decompressed, expected {size}")
    return content.getvalue()
