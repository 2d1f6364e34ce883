"""`ShardList`: the shards of a dataset in columns instead of objects.

    names    "a.tar\0b.tar\0"      ends 6, 12, …      the bytes of shard i's name: from ends[i - 1] to ends[i] - 1
    sizes, samples, digests        a number of each shard
    faults                         number of a damaged shard: how it was damaged

The columns of an index view its mapped bytes, so only the requested ones are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.errors import ShardError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Rows: TypeAlias = NDArray[np.int64]  # rows of an index, or numbers of samples or shards
_WORD = 1 << 64  # digests are reduced modulo this
_AT_ONCE = 4096  # names to decode at once


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """A shard in the index.

    Attributes:
        name: Its name relative to the root.
        size: Its bytes.
        samples: The number of its samples; of a damaged shard, those before the damage.
        digest: A hash of its members' names, offsets and sizes.
        fault: The damage found when it was indexed; "" for none.

    Example:
        >>> custom.ShardEntry("a.db", size=4096, samples=100, digest=1).samples
        100
    """

    name: str
    size: Count
    samples: Count
    digest: int
    fault: str = ""


class ShardNames(Sequence[str]):
    """Names as one UTF-8 text, each with a zero byte after it.

    `ends`, int64 (names,), is the end of each, after its zero.
    """

    __slots__ = ("ends", "text")

    def __init__(self, text: memoryview | bytes, ends: Rows) -> None:
        self.text = memoryview(text)
        self.ends = ends

    @classmethod
    def of(cls, names: Iterable[str]) -> ShardNames:
        """Build from strings. Raises `ShardError` for a zero byte, or invalid UTF-8."""
        if isinstance(names, ShardNames):
            return names
        encoded = []
        for name in names:
            try:
                encoded.append(name.encode() + b"\0")
            except UnicodeEncodeError:
                raise ShardError(f"the shard name {name!r} is not UTF-8. Rename it") from None
        text = b"".join(encoded)
        if text.count(0) > len(encoded):
            invalid = next(name for name in encoded if name.count(0) > 1)
            raise ShardError(f"the shard name {invalid[:-1]!r} has a zero byte. Rename it")
        return cls(text, np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded))))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return str(self.text[self._start(number) : int(self.ends[number]) - 1], "utf-8")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _AT_ONCE):  # decode groups of names, because decoding all takes much memory
            last = min(first + _AT_ONCE, len(self)) - 1
            yield from str(self.text[self._start(first) : int(self.ends[last])], "utf-8").split("\0")[:-1]

    def is_whole(self) -> bool:
        """Return whether `ends` match `text`, and each name is UTF-8 and not empty."""
        text, ends = np.frombuffer(self.text, np.uint8), self.ends
        if not len(ends) or int(ends[-1]) != len(text):
            return not len(ends) and not len(text)
        if int(ends[0]) < 2 or (np.diff(ends) < 2).any() or text[ends - 1].any():
            return False
        try:
            return np.count_nonzero(text) == len(text) - len(ends) and bool(str(self.text, "utf-8"))
        except UnicodeDecodeError:
            return False

    def first_outside(self) -> str | None:
        """Return the first name of a file outside the dataset's folder, or None."""
        text = np.frombuffer(self.text, np.uint8)
        suspect = np.zeros(len(self), dtype=bool)
        if len(self):
            suspect[0] = text[0] == ord("/")
            suspect[1:] = text[self.ends[:-1]] == ord("/")
        dots = np.flatnonzero((text[:-1] == ord(".")) & (text[1:] == ord("."))) if len(text) else text
        suspect[np.searchsorted(self.ends, dots, side="right")] = True
        return next((self[i] for i in np.flatnonzero(suspect).tolist() if not is_inside(self[i])), None)

    def between(self, first: int, end: int) -> memoryview:
        """Return the text of the names with numbers `first` to `end - 1`."""
        return self.text[self._start(first) : self._start(end)]

    def _start(self, number: int) -> int:
        return int(self.ends[number - 1]) if number else 0


class ShardList(Sequence[ShardEntry]):
    """Shards of a dataset, each built on access.

    `sizes` and `samples` are int64, `digests` uint64.
    """

    __slots__ = ("digests", "faults", "names", "samples", "sizes")

    def __init__(
        self, names: ShardNames, sizes: Rows, samples: Rows, digests: NDArray[np.uint64], faults: Mapping[int, str]
    ) -> None:
        self.names, self.sizes, self.samples, self.digests, self.faults = names, sizes, samples, digests, faults

    @classmethod
    def of(cls, entries: Sequence[ShardEntry]) -> ShardList:
        """Build the columns for these shards. A digest is reduced to its lowest 64 bits."""
        if isinstance(entries, ShardList):
            return entries
        return cls(
            ShardNames.of(entry.name for entry in entries),
            np.array([entry.size for entry in entries], dtype=np.int64),
            np.array([entry.samples for entry in entries], dtype=np.int64),
            np.array([entry.digest % _WORD for entry in entries], dtype=np.uint64),
            {number: entry.fault for number, entry in enumerate(entries) if entry.fault},
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> ShardList: ...
    def __getitem__(self, number: int | slice) -> ShardEntry | ShardList:
        if isinstance(number, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[number])
        number = range(len(self))[number]
        return ShardEntry(
            self.names[number],
            int(self.sizes[number]),
            int(self.samples[number]),
            int(self.digests[number]),
            self.faults.get(number, ""),
        )

    def __iter__(self) -> Iterator[ShardEntry]:
        columns = zip(self.names, self.sizes.tolist(), self.samples.tolist(), self.digests.tolist(), strict=True)
        return (ShardEntry(*row, self.faults.get(number, "")) for number, row in enumerate(columns))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(ShardEntry.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a list of the same entries

    def select(self, numbers: Rows) -> ShardList:
        """Return the shards with these numbers, in this order."""
        names = ShardNames.of(map(self.names.__getitem__, numbers.tolist()))
        faults = {i: self.faults[number] for i, number in enumerate(numbers.tolist()) if number in self.faults}
        return ShardList(names, self.sizes[numbers], self.samples[numbers], self.digests[numbers], faults)

    def first(self, count: int) -> ShardList:
        """Return the first `count` shards."""
        end = int(self.names.ends[count - 1]) if count else 0
        names = ShardNames(self.names.text[:end], self.names.ends[:count])
        faults = {number: fault for number, fault in self.faults.items() if number < count}
        return ShardList(names, self.sizes[:count], self.samples[:count], self.digests[:count], faults)

    def rows(self) -> list[list[Any]]:
        """Return name, samples and digest of each shard."""
        columns = zip(self.names, self.samples.tolist(), self.digests.tolist(), strict=True)
        return [list(row) for row in columns]


def check_utf8(shard: str, name: str) -> None:
    """Raise `ShardError` for a name or extension that an index cannot store."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ShardError(f"{shard}: the name {name!r} is not UTF-8. Rename it and write the shard again") from None
