"""`Listing`: the objects below a URL as three runs of bytes; a million of them take some 100 MB, and as much again
once a name is looked up.

What several processes of a node ask a server at the same time, above all for a listing, is asked once:

    CACHE/listings/HASH   what the last process was answered; locked while one asks

A process that had to wait takes what the one before it found. One that asks later asks again, since nothing is known of
what was added since; but where an answer `lasts`, such as that about a commit, it is never asked for again.
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

from savable_pipeline.data.remote.cache_files import flock, own_file, own_folder
from savable_pipeline.data.shards.shard_list import Rows, ShardNames
from savable_pipeline.errors import ShardError

T = TypeVar("T")
SECOND_OF = "at "  # begins a stamp that is a time: what replaced the object within this second has the same


class Listing(msgspec.Struct, frozen=True, dict=True):
    """Objects in the order of their names.

    `names` and `stamps` are UTF-8, with a zero byte after each; `sizes` is int64 (objects,), in bytes. A stamp changes
    when the object is replaced.
    """

    names: bytes
    sizes: bytes
    stamps: bytes

    @classmethod
    def of(cls, objects: Iterable[tuple[str, int, str]]) -> Listing:
        """The listing of names, sizes and stamps, in any order. Raises `ShardError` for a zero byte."""
        names, sizes, stamps = bytearray(), array("q"), bytearray()
        last, in_order = "", True
        for name, size, stamp in objects:
            names += _ended(name)
            sizes.append(size)
            stamps += _ended(stamp)
            in_order &= last <= name
            last = name
        made = cls(bytes(names), sizes.tobytes(), bytes(stamps))
        return made if in_order else cls.of(sorted(made))

    def __len__(self) -> int:
        return len(self.sizes) // 8

    def __iter__(self) -> Iterator[tuple[str, int, str]]:
        return zip(_texts(self.names), self.sizes_in_bytes().tolist(), _texts(self.stamps), strict=True)

    def sizes_in_bytes(self) -> Rows:
        """The size of each object, int64 (objects,)."""
        return np.frombuffer(self.sizes, np.int64)

    def texts(self) -> ShardNames:
        """The names."""
        return _texts(self.names)

    def stamp_texts(self) -> ShardNames:
        """The stamps."""
        return _texts(self.stamps)

    def find(self, name: str) -> tuple[int, str] | None:
        """Size and stamp of the object with this name; None if there is none."""
        number = self._numbers.get(name)
        return None if number is None else (int(self.sizes_in_bytes()[number]), self._stamps[number])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.texts())}

    @cached_property
    def _stamps(self) -> ShardNames:
        return self.stamp_texts()

    def only(self, keep: Callable[[str], bool]) -> Listing:
        """Those of the objects whose names are to `keep`."""
        kept = np.fromiter(map(keep, self.texts()), bool, len(self))
        if kept.all():
            return self
        return Listing.of(each for each, keep_it in zip(self, kept, strict=True) if keep_it)


def _ended(text: str) -> bytes:
    if "\0" in text:
        raise ShardError(f"the object name {text!r} has a zero byte. Rename it")
    return text.encode() + b"\0"


def _texts(raw: bytes) -> ShardNames:
    return ShardNames(raw, np.flatnonzero(np.frombuffer(raw, np.uint8) == 0) + 1)


class _Made(msgspec.Struct, Generic[T]):
    at_s: float  # when it was there, of the clock of this boot
    answer: T


def shared_answer(cache: Path, question: str, ask: Callable[[], T], kind: type[T], *, lasts: bool = False) -> T:
    """`ask()`, which gives a `kind`, or what another process has found while this one waited. Raises what that does."""
    asked = time.monotonic()
    path = own_folder(cache / "listings") / hashlib.sha256(question.encode()).hexdigest()[:32]
    with os.fdopen(own_file(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        alone = True
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            flock(file, fcntl.LOCK_EX)
            alone = False
        if lasts or not alone:
            with contextlib.suppress(msgspec.DecodeError):
                digest, raw = file.read(8), file.read()
                raw = raw if xxh3_64_digest(raw) == digest else b""  # the machine lost its power, above all
                made = msgspec.msgpack.decode(raw, type=_Made[kind])  # type: ignore[valid-type]
                if lasts or asked <= made.at_s <= time.monotonic():
                    return made.answer
        found = ask()
        file.seek(0)
        file.truncate()
        raw = msgspec.msgpack.encode(_Made(time.monotonic(), found))
        file.write(xxh3_64_digest(raw) + raw)
        return found
