"""The content of compressed files and records in memory, bounded: what unpacks to more than it may is refused."""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable
from typing import Any

_BY_ARROW = {"br": "brotli", "snappy": "snappy"}  # by pyarrow's names; they need the size of the content
_STEP = 1 << 12  # bytes that are unpacked at a time: of no kind do they become more than some 100 MB


def check_packages(kinds: set[str]) -> None:
    """Raises ValueError if a package is missing that these kinds of compression need, or "rows" of Arrow."""
    for kind in sorted(kinds & {*_BY_ARROW, "rows", "zst"}):
        package, extra = ("zstandard", "zstandard") if kind == "zst" else ("pyarrow", '"savable_pipeline[parquet]"')
        try:
            __import__(package)
        except ImportError:
            what = "rows in Arrow need" if kind == "rows" else f"reading {_BY_ARROW.get(kind, 'zstd')} needs"
            raise ValueError(f"{what} the package {package}: pip install {extra}") from None


def decompressed(data: bytes, kind: str, most: int, size: int | None = None) -> bytes:
    """The content of what is compressed by gz, bz2, zst, br or snappy: at most `most` bytes, `size` if that is known.

    Raises ValueError for damage, and for more than that.

    >>> import gzip
    >>> from savable_pipeline.data.stores.decompressed import decompressed
    >>> decompressed(gzip.compress(b"text"), "gz", 100)
    b'text'
    """
    if size is not None and size > most:
        raise ValueError(f"{size} bytes when decompressed; at most {most} are read")
    content = _by_arrow(data, _BY_ARROW[kind], size or 0) if kind in _BY_ARROW else _in_steps(data, kind, size or most)
    if size is not None and len(content) != size:
        raise ValueError(f"{len(content)} bytes when decompressed, expected {size}")
    return content


def _in_steps(data: bytes, kind: str, most: int) -> bytes:
    new, damage = _streams(kind)
    parts, unpacked, at = [], 0, 0
    while at < len(data):
        stream = new()
        while not stream.eof:
            if at >= len(data):
                raise ValueError("it ends within its compressed data: it was cut")
            try:
                parts.append(stream.decompress(data[at : at + _STEP]))
            except damage as error:
                raise ValueError(str(error)) from error
            at, unpacked = at + _STEP, unpacked + len(parts[-1])
            if unpacked > most:
                raise ValueError(f"more than {most} bytes when decompressed")
        at = min(at, len(data)) - len(stream.unused_data)
    return b"".join(parts)


def _streams(kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes the decompressor of one stream, and the errors that it raises for damage."""
    if kind == "gz":
        return lambda: zlib.decompressobj(wbits=31), (zlib.error,)
    if kind == "bz2":
        return bz2.BZ2Decompressor, (OSError,)
    import zstandard  # imported here: it is needed for zstd alone

    return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)


def _by_arrow(data: bytes, codec: str, size: int) -> bytes:
    import pyarrow as pa

    try:
        content: bytes = pa.decompress(data, size, codec, asbytes=True)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"no {codec} of {size} bytes: {error}") from error
    return content
