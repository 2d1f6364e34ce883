"""A listing that several processes of a node ask for at the same time is made once.

    CACHE/listings/HASH   the objects below a URL, as the last process listed them; locked while one lists

A process that had to wait takes what the one before it found. One that asks later lists again: nothing is known of what
was added since.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.remote.own_files import own_file, own_folder


class _Made(msgspec.Struct):
    at_s: float  # when it was there, of the clock of this boot
    objects: Listing


def shared_listing(cache: Path, root: str, listing: Callable[[str], Listing]) -> Listing:
    """`listing(root)`, or what another process has found of it while this one waited. Raises what `listing` does."""
    asked = time.monotonic()
    path = own_folder(cache / "listings") / hashlib.sha256(root.encode()).hexdigest()[:32]
    with os.fdopen(own_file(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(msgspec.DecodeError):
                made = msgspec.msgpack.decode(file.read(), type=_Made)
                if asked <= made.at_s <= time.monotonic():
                    return made.objects
        found = listing(root)
        file.seek(0)
        file.truncate()
        file.write(msgspec.msgpack.encode(_Made(time.monotonic(), found)))
        return found
