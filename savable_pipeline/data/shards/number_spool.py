"""`NumberSpool`: numbers of a scan, in a temporary file if there are many.

The memory of a scan therefore does not grow with the number of samples in a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

_IN_MEMORY = 1 << 20  # bytes; more numbers are in a file
_BUFFERED = 4096  # numbers to write together
_BLOCK = 1 << 15  # numbers that are compared together


class NumberSpool:
    """Numbers of one type, appended in order, in `file` or a temporary file.

    >>> from savable_pipeline.data.shards.number_spool import NumberSpool
    >>> numbers = NumberSpool("<u4")
    >>> for number in (7, 5, 7):
    ...     numbers.append(number)
    >>> numbers.numbers()
    array([7, 5, 7], dtype=uint32)
    >>> list(numbers.repeated())
    [(0, 7), (2, 7)]
    """

    def __init__(self, kind: str = "<u8", file: IO[bytes] | None = None) -> None:
        self._kind, self.buffer = kind, list[int]()  # numbers to append at the next `write`
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY) if file is None else file  # noqa: SIM115

    def __del__(self) -> None:
        self._file.close()  # arrays of `numbers` stay mapped

    def append(self, number: int) -> None:
        """Append a number."""
        self.buffer.append(number)
        if len(self.buffer) == _BUFFERED:
            self.write()

    def write(self, numbers: NDArray[Any] | None = None) -> None:
        """Append the numbers in `buffer` and clear it, then append `numbers`."""
        for each in (self.buffer, () if numbers is None else numbers):
            _write(self._file, np.asarray(each, self._kind).data)
        self.buffer.clear()

    def numbers(self) -> NDArray[Any]:
        """Return all numbers so far. Those in a file are mapped."""
        self.write()
        return _contents(self._file, "r").view(self._kind)

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Yield (position, number) for each number that occurs more than once."""
        copy, numbers = NumberSpool(self._kind), self.numbers()
        copy.write(numbers)
        ordered = _contents(copy._file, "r+").view(self._kind)
        ordered.sort()
        blocks = (ordered[first : first + _BLOCK + 1] for first in range(0, len(ordered), _BLOCK))
        pairs = (block[1:][block[1:] == block[:-1]] for block in blocks)
        repeated = np.unique(np.concatenate([ordered[:0], *pairs]))
        for first in range(0, len(numbers) if len(repeated) else 0, _BLOCK):
            for position in np.flatnonzero(np.isin(numbers[first : first + _BLOCK], repeated)).tolist():
                yield first + position, int(numbers[first + position])


def spooled(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the concatenation of pieces, as a view of a mapped file if it is long."""
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        for piece in pieces:
            _write(file, memoryview(piece))
        return cast("bytes", _contents(file, "r").data)


def _write(file: Any, data: memoryview) -> None:
    if isinstance(file, tempfile.SpooledTemporaryFile) and file.tell() + data.nbytes > _IN_MEMORY:
        file.rollover()  # before the write, which would otherwise go to memory first
    file.write(data)


def _contents(file: Any, mode: Literal["r", "r+"]) -> NDArray[np.uint8]:
    if file.tell() > _IN_MEMORY:
        return np.memmap(file, np.uint8, mode)
    file.seek(0)
    return np.frombuffer(bytearray(file.read()), np.uint8)
