"""The checksums of Ogg's pages: FFmpeg leaves a damaged page out, and what was in it is a silence then.

"OggS" │ version u8 │ flags u8 │ granule u64 │ serial u32 │ number u32 │ CRC u32 │ segments u8 │ their sizes │ content
"""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO

from savable_pipeline.data.media.container import kept_place

_HEAD = struct.Struct("<4sBBQIIIB")
_MAGIC, _LAST = b"OggS", 0x04  # how a page begins; the flag of a stream's last one
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_CRC_AT = 22


def ogg_fault(file: BinaryIO) -> str:
    """Why the pages of a file cannot be right, "" if they can; all of it is read."""
    with kept_place(file):
        file.seek(0)
        offset, flags = 0, 0
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size or not head.startswith(_MAGIC):
                is_end = flags & _LAST and _MAGIC not in head + file.read()  # tags, behind all pages
                return "" if is_end else f"no page of Ogg at byte {offset}"
            _, _, flags, _, _, _, crc, count = _HEAD.unpack(head)
            sizes = file.read(count)
            content = file.read(sum(sizes))
            page = head[:_CRC_AT] + bytes(4) + head[_CRC_AT + 4 :] + sizes + content
            if len(content) < sum(sizes) or _crc(page) != crc:
                return f"the page of Ogg at byte {offset} has another checksum than its own"
            offset += len(page)
    return ""


def _crc(page: bytes) -> int:
    """CRC-32 with the bits of each byte from the highest on; zlib's takes them from the lowest."""
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{found:032b}"[::-1], 2)
