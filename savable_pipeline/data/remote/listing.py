"""`Listing`: the objects below a URL, as three byte strings.

A million of them take about 100 MB. Looking up a name takes as much again, for an index.

If several processes of a node send the same request to a server at the same time, such as a listing, it is sent once:

    CACHE/listings/HASH   the last answer; locked while one process sends the request

A process that had to wait for the lock uses the answer of the process before it. A later process sends the request
again, because objects may have been added. A permanent answer, such as one about a commit, is never requested again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_digest

from savable_pipeline.data.remote.cache_files import flock, private_file, private_folder
from savable_pipeline.data.shards.shard_list import Rows, ShardNames
from savable_pipeline.errors import ShardError

T = TypeVar("T")
TIME_PREFIX = "at "  # of a stamp that is a time; an object replaced within the same second has the same stamp


class Listing(msgspec.Struct, frozen=True, dict=True):
    """Objects sorted by name.

    `names` and `stamps` are UTF-8, with a zero byte after each. `sizes` is int64 (objects,), in bytes. A stamp changes
    when the object is replaced.
    """

    names: bytes
    sizes: bytes
    stamps: bytes

    @classmethod
    def of(cls, objects: Iterable[tuple[str, int, str]]) -> Listing:
        """Build a listing of names, sizes and stamps in any order.

        Raises `ShardError` for a zero byte.
        """
        names, sizes, stamps = bytearray(), array("q"), bytearray()
        previous, in_order = "", True
        for name, size, stamp in objects:
            names += _zero_terminated(name)
            sizes.append(size)
            stamps += _zero_terminated(stamp)
            in_order &= previous <= name
            previous = name
        listing = cls(bytes(names), sizes.tobytes(), bytes(stamps))
        return listing if in_order else cls.of(sorted(listing))

    def __len__(self) -> int:
        return len(self.sizes) // 8

    def __iter__(self) -> Iterator[tuple[str, int, str]]:
        return zip(self.all_names, self.sizes_in_bytes().tolist(), self.all_stamps, strict=True)

    def sizes_in_bytes(self) -> Rows:
        """Return the size of each object: int64 (objects,)."""
        return np.frombuffer(self.sizes, np.int64)

    @cached_property
    def all_names(self) -> ShardNames:
        """The names as strings."""
        return _texts(self.names)

    @cached_property
    def all_stamps(self) -> ShardNames:
        """The stamps as strings."""
        return _texts(self.stamps)

    def find(self, name: str) -> tuple[int, str] | None:
        """Return size and stamp of the object with this name, or None."""
        number = self._numbers_by_name.get(name)
        return None if number is None else (int(self.sizes_in_bytes()[number]), self.all_stamps[number])

    @cached_property
    def _numbers_by_name(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.all_names)}

    def only(self, matches: Callable[[str], bool]) -> Listing:
        """Return the objects whose name `matches`."""
        chosen = np.fromiter(map(matches, self.all_names), bool, len(self))
        if chosen.all():
            return self
        return Listing.of(each for each, is_chosen in zip(self, chosen, strict=True) if is_chosen)


def _zero_terminated(text: str) -> bytes:
    if "\0" in text:
        raise ShardError(f"the object name {text!r} has a zero byte. Rename it")
    return text.encode() + b"\0"


def _texts(raw: bytes) -> ShardNames:
    return ShardNames(raw, np.flatnonzero(np.frombuffer(raw, np.uint8) == 0) + 1)


class _StoredAnswer(msgspec.Struct, Generic[T]):
    received_s: float  # time of arrival, on the monotonic clock of this boot
    answer: T


def shared_answer(cache: Path, question: str, ask: Callable[[], T], kind: type[T], *, permanent: bool = False) -> T:
    """Return `ask()`, or the answer that another process got while this one waited.

    The answer is of type `kind`. If it is `permanent`, the answer of an earlier call is returned too.
    Raises what `ask` raises.
    """
    called_s = time.monotonic()
    path = private_folder(cache / "listings") / hashlib.sha256(question.encode()).hexdigest()[:32]
    with os.fdopen(private_file(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        has_waited = False
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            flock(file, fcntl.LOCK_EX)
            has_waited = True
        if permanent or has_waited:
            with contextlib.suppress(msgspec.DecodeError):
                digest, raw = file.read(8), file.read()
                raw = raw if xxh3_64_digest(raw) == digest else b""  # a power failure may damage the file
                stored = msgspec.msgpack.decode(raw, type=_StoredAnswer[kind])  # type: ignore[valid-type]
                if permanent or called_s <= stored.received_s <= time.monotonic():
                    return stored.answer
        found = ask()
        file.seek(0)
        file.truncate()
        raw = msgspec.msgpack.encode(_StoredAnswer(time.monotonic(), found))
        file.write(xxh3_64_digest(raw) + raw)
        return found
