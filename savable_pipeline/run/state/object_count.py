"""Counts the objects in MessagePack before they are made: a byte can be an empty list, which takes 72 bytes.

A compressed state of 131 kB could so become gigabytes. Each object begins with a byte that gives its size, or the
number of bytes of its length; the objects inside of a list or a map follow its header, and count themselves:

    93 a1 61 05 90    a list of three: "a", 5, []    four objects
"""

from __future__ import annotations

_FREE = 1 << 20  # objects, whatever the size of a state; 75 MB of empty lists


def _widths() -> list[int]:
    """The bytes of each object, or of a list's or map's header, by its first byte; 0 where a length follows."""
    widths = [1] * 256
    for first in range(0xA0, 0xC0):  # short texts
        widths[first] = 1 + first - 0xA0
    for first, width in {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.items():  # floats, unsigned
        widths[first] = width
    for first, width in {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.items():  # signed
        widths[first] = width
    for power in range(5):
        widths[0xD4 + power] = 2 + (1 << power)  # extensions
    for first, width in {0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}.items():  # lists and maps
        widths[first] = width
    return [0 if first in _LENGTHS else width for first, width in enumerate(widths)]


_LENGTHS = {  # bytes of the length that follows, and bytes between it and the content
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),  # bytes
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),  # extensions
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),  # texts
}
_WIDTHS = _widths()


def has_too_many(packed: bytes, stored: int) -> bool:
    """Whether there are more objects in `packed` than a million and one for each of the `stored` bytes of a file.

    So a state that is large in memory is large on the disk. Nothing is decoded, and counting stops at the limit.
    """
    most = _FREE + stored
    if len(packed) <= most:  # an object takes a byte
        return False
    at, count, end, widths = 0, 0, len(packed), _WIDTHS
    while at < end and count <= most:
        first = packed[at]
        width = widths[first]
        if not width:
            digits, more = _LENGTHS[first]
            width = 1 + digits + more + int.from_bytes(packed[at + 1 : at + 1 + digits], "big")
        at += width
        count += 1
    return count > most
