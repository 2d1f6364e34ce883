"""How a frame of MP4 or QuickTime is turned when it is shown: PyAV gives it with decoded frames, not of the headers.

    moov ─ trak ─ tkhd   track number u32 │ … │ matrix i32 (3, 3): a, b, u, c, d, v, x, y, w

Source: ISO/IEC 14496-12, 8.3.2. A camera that was held upright writes a matrix that turns by a quarter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_MOST_BOXES = 10_000  # looked at; a damaged file may have endless ones


def is_turned(file: BinaryIO, track: int) -> bool:
    """Whether width and height of a track are exchanged when it is shown. Raises the errors of reading the file."""
    end = file.seek(0, 2)
    for moov in _boxes(file, b"moov", 0, end):
        for trak in _boxes(file, b"trak", *moov):
            for begin, stop in _boxes(file, b"tkhd", *trak):
                file.seek(begin)
                found = _matrix(file.read(min(stop - begin, 92)))
                if found is not None and found[0] == track:
                    return abs(found[2]) > abs(found[1])
    return False


def _matrix(tkhd: bytes) -> tuple[int, int, int] | None:
    """Track number, and the matrix's a and b."""
    wide = tkhd[:1] == b"\1"
    if len(tkhd) < (88 if wide else 76):
        return None
    (track,) = struct.unpack_from(">I", tkhd, 20 if wide else 12)
    a, b = struct.unpack_from(">ii", tkhd, 52 if wide else 40)
    return track, a, b


def _boxes(file: BinaryIO, kind: bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """First byte and end of what each box of a kind holds, among those between two bytes."""
    for _ in range(_MOST_BOXES):
        if begin + 8 > end:
            return
        file.seek(begin)
        header = file.read(16)
        if len(header) < 8:
            return
        size, head = int.from_bytes(header[:4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(header[8:16], "big"), 16
        stop = end if size == 0 else begin + size
        if stop < begin + head or stop > end:
            return
        if header[4:8] == kind:
            yield begin + head, stop
        begin = stop
