"""What several processes of a node ask a server at the same time is asked once: the objects below a URL, above all.

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
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from xxhash import xxh3_64_digest

from savable_pipeline.data.remote.cache_files import own_file, own_folder

T = TypeVar("T")


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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
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
