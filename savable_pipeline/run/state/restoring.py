"""`restoring`: the one place where the errors of a damaged or forged state become a `StateError`.

A checksum detects damage, but not a state written wrongly, by intent or by a fault: then any line that reads it may
fail, in the library or in `restore_state` of a user's stage. Errors that already say what is wrong pass through
unchanged, and so do faults of the environment: a disk, a server, memory.

`has_too_many` counts the objects in MessagePack before they are made: a byte can be an empty list of 72 bytes, so that
131 kB of a compressed state could become gigabytes. Each object begins with a byte that gives its size, or how
many bytes its length takes; the objects inside of a list or a map follow its header, and count themselves:

    93 a1 61 05 90    a list of three: "a", 5, []    four objects
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from savable_pipeline.errors import EncodeError, SavableError, StateError


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raise `StateError`, with the original error as its cause, where reading or restoring `what` fails in here.

    `SavableError`, OSError and MemoryError pass, except an `EncodeError`: nothing is encoded when a state is restored,
    so its cause is a number in the state.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SavableError | OSError | MemoryError) and not isinstance(error, EncodeError):
            raise
        raise StateError(
            f"{what} cannot be restored ({type(error).__name__}: {error}): it is damaged, or restore_state of a stage "
            "of your own does not take what its save_state gave; use another copy of the checkpoint"
        ) from error


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
