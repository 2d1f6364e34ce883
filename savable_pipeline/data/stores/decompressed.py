"""The content of compressed files, and of compressed records and parts in memory: of no more bytes than may be.

It is unpacked by pieces, so that a few bytes which become gigabytes are refused before they have taken them.
"""

from __future__ import annotations

import bz2
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
_STEP, _ZST_STEP = 1 << 17, 1 << 10  # bytes of a file that are read for it; zstd makes at most 32 MiB of its own


class DamagedError(ValueError):
    """Compressed data that cannot be read to their end; an OSError is of the disk."""


def needed_package(kind: str) -> Any:
    """The package that a kind of compression, or "rows" of Arrow, needs. Raises ValueError if it is not here."""
    package = "zstandard" if kind == "zst" else "pyarrow"
    try:
        return importlib.import_module(package)
    except ImportError:
        what = "rows in Arrow need" if kind == "rows" else "reading zstd needs"
        raise ValueError(f"{what} {package}. Run `pip install {package}`") from None


class Unpacked(io.RawIOBase):
    """The content of a file of streams of gz, bz2, xz or zst, one after the other. Raises `DamagedError`.

    A file that ends within a stream is damaged; zstandard itself says nothing then. A line of more than `line_bytes`
    is no line.
    """

    def __init__(self, packed: IO[bytes], kind: str, line_bytes: int | None = None) -> None:
        self._packed, self._kind = packed, kind
        self._step = _ZST_STEP if kind == "zst" else _STEP
        self._most: tuple[int, ...] = () if kind == "zst" else (_PIECE,)
        self._new, self._damage = _streams(kind)
        self._stream: Any = None
        self._more = False  # of what the stream was given is still to be unpacked
        self._line, self._line_bytes = 0, line_bytes
        self._ended = False  # a stream, before
        self._in = b""  # read from the file, and not given to a stream
        self._out = b""  # unpacked, and not given away

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what comes next; gives how many bytes came."""
        self._out = self._out or self.chunk()
        size = min(len(buffer), len(self._out))
        buffer[:size], self._out = self._out[:size], self._out[size:]
        return size

    def chunk(self) -> bytes:
        """Some of what comes next; nothing at the end."""
        found = b""
        while not found:
            if not self._more:
                self._in = self._in or self._packed.read(self._step)
            if self._kind == "gz" and self._stream is None and self._ended:
                self._in = self._in.lstrip(b"\0") or self._packed.read(self._step).lstrip(b"\0")  # padding
            if not self._in and not self._more:
                if self._stream is not None:
                    raise DamagedError("its compressed data are cut short")
                break
            found = self._unpack()
        if self._line_bytes is not None:
            self._check_line(found, self._line_bytes)
        return found

    def _check_line(self, found: bytes, most: int) -> None:
        last = found.rfind(b"\n")
        self._line = self._line + len(found) if last < 0 else len(found) - last - 1
        if self._line > most:
            raise DamagedError(f"a line of more than {most} bytes when decompressed. {MORE}")

    def _unpack(self) -> bytes:
        begins = self._stream is None
        stream = self._stream = self._new() if begins else self._stream
        try:
            found: bytes = stream.decompress(self._in, *self._most)
        except self._damage as error:
            if begins and self._ended and self._kind in ("bz2", "xz"):  # padding, or something else behind it
                self._in, self._stream, self._packed = b"", None, io.BytesIO()
                return b""
            raise DamagedError(str(error)) from error
        self._in = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")  # which zlib has
        self._more = not stream.eof and len(found) == _PIECE
        if stream.eof:
            self._stream, self._ended = None, True
        return found

    def close(self) -> None:
        """Close the file too."""
        self._packed.close()
        super().close()


def decompressed(data: bytes, kind: str, most: int = UNPACKED_BYTES, size: int | None = None) -> bytes:
    """The content of what is compressed by gz, bz2 or zst: at most `most` bytes, `size` if that is known.

    Raises `DamagedError`, also for more than that, of which no more than a piece is unpacked.

    >>> import gzip
    >>> from savable_pipeline.data.stores.decompressed import decompressed
    >>> decompressed(gzip.compress(b"text"), "gz")
    b'text'
    """
    if size is not None and size > most:
        raise DamagedError(f"{size} bytes when decompressed, more than {most}. {MORE}")
    file, content = Unpacked(io.BytesIO(data), kind), io.BytesIO()  # whose content is copied nowhere, unlike a list's
    while piece := file.chunk():
        content.write(piece)
        if size is not None and content.tell() > size:
            raise DamagedError(f"more than {size} bytes when decompressed, expected {size}")
        if content.tell() > most:
            raise DamagedError(f"more than {most} bytes when decompressed. {MORE}")
    if size is not None and content.tell() != size:
        raise DamagedError(f"{content.tell()} bytes when decompressed, expected {size}")
    return content.getvalue()


def _streams(kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes the decompressor of one stream, and the errors that it raises for damage."""
    if kind == "zst":
        zstandard = needed_package(kind)
        return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)
    known: dict[str, tuple[Callable[[], Any], tuple[type[Exception], ...]]] = {
        "gz": (lambda: zlib.decompressobj(wbits=31), (zlib.error,)),
        "bz2": (bz2.BZ2Decompressor, (OSError, EOFError)),
        "xz": (lzma.LZMADecompressor, (lzma.LZMAError, EOFError)),
    }
    return known[kind]
