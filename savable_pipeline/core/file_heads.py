"""Compression, media type and text encoding of a file, by its first bytes."""

from __future__ import annotations

import json
import re

_MAGICS = {b"\x1f\x8b\x08": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_MEDIA = {
    b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tiff", b"MM\0*": "tiff",
    b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3", b"%PDF-": "pdf", b"\x93NUMPY": "npy", b"\x1aE\xdf\xa3": "mkv",
}  # fmt: skip
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
# includes the magic number of a block, because text may start with BZh
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")
_PROGRAMS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_ENCODING_BYTES = 64  # the text encoding is detected by this many bytes
HEAD = 512  # bytes of a file that are enough for all functions of this module


def compression_of(head: bytes) -> str:
    """Return the compression by the first bytes: ".gz", ".bz2", ".xz", ".zst" or "".

    >>> from savable_pipeline.core.file_heads import compression_of
    >>> (compression_of(b"\\x1f\\x8b\\x08\\x00"), compression_of(b'{"id": 1}'))
    ('.gz', '')
    """
    if _BZIP2.match(head):
        return ".bz2"
    return next((ending for magic, ending in _MAGICS.items() if head.startswith(magic)), "")


def media_of(head: bytes, known: frozenset[str]) -> str:
    """Return a media file's extension by its first bytes; "bin" if not in `known`.

    >>> from savable_pipeline.core.file_heads import media_of
    >>> (media_of(b"GIF89a", frozenset({"gif"})), media_of(b"BM", frozenset({"gif"})))
    ('gif', 'bin')
    """
    found = _RIFF.get(head[8:12], "") if head[:4] == b"RIFF" else "mp4" if head[4:8] == b"ftyp" else ""
    found = found or next((extension for magic, extension in _MEDIA.items() if head.startswith(magic)), "")
    return found if found in known else "bin"


def text_error(head: bytes, name: str) -> str:
    """Return why a file's first bytes are not UTF-8, and a fix; "" if they may be.

    >>> from savable_pipeline.core.file_heads import text_error
    >>> text_error("a".encode("utf-16"), "a.jsonl")
    'text in UTF-16, where UTF-8 is read; `iconv -f UTF-16 -t UTF-8 a.jsonl > NEW` converts it'
    """
    compression = compression_of(head)
    if compression:
        program = _PROGRAMS[compression]
        return (
            f"compressed by {program}, whatever its name says, so that it cannot be read at an offset; "
            f"`{program} -dc < {name} > NEW` unpacks it, and `savable convert {name} DST` reads it as it is"
        )
    encoding = _encoding_of(head[:_ENCODING_BYTES])
    if encoding:
        return f"text in {encoding}, where UTF-8 is read; `iconv -f {encoding} -t UTF-8 {name} > NEW` converts it"
    return ""


def _encoding_of(head: bytes) -> str:
    """Return the name of a file's encoding if it is UTF-16 or UTF-32, else "".

    They are detected by a byte order mark, or by zeros between ASCII bytes.
    """
    encoding = json.detect_encoding(head)
    if encoding.startswith("utf-8") or "\0" in head[: len(head) // 4 * 4].decode(encoding, "replace"):
        return ""
    _, units, *order = encoding.upper().split("-")
    return f"UTF-{units}{''.join(order)}"  # in the spelling of iconv
