"""`Bucket`: the objects below a URL of s3, gs or az, listed, read whole, written and removed.

Each process that uses one has one downloading process for all of them, which alone touches obstore.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from savable_pipeline.data.remote.cache_space import cache_folder
from savable_pipeline.data.remote.session import Session

SCHEMES = ("s3", "gs", "az")


class Found(NamedTuple):
    """An object: its name below the bucket's URL, its bytes, and when it was written, in nanoseconds since 1970."""

    name: str
    size: int
    written_ns: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What lies below a URL, such as `s3://bucket/some/where`. Each method raises `RemoteError`.

    An object is written as a whole: before its last byte has arrived, the one before it is there, or none. A process
    that is killed while it writes a large one leaves parts that nobody sees, which the bucket's own rules remove.
    """

    url: str

    def listing(self) -> list[Found]:
        """All objects."""
        return [Found(*found) for found in _session().call("dated", self.url)]

    def fetch(self, found: list[Found], folder: Path) -> None:
        """Copy objects into a folder, under their names."""
        for each in found:
            (folder / each.name).parent.mkdir(parents=True, exist_ok=True)
        _session().each("fetch", [(self.url, each.name, each.size, str(folder / each.name)) for each in found])

    def upload(self, name: str, path: Path) -> None:
        """Write a file as the object `name`."""
        _session().call("upload", self.url, name, str(path))

    def erase(self, names: list[str]) -> None:
        """Remove objects."""
        _session().call("erase", self.url, names)


def close_buckets() -> None:
    """End the downloading process that this process began for its buckets."""
    if _opened.cache_info().currsize:
        _session().connected().close()
    _opened.cache_clear()


def _session() -> Session:
    return _opened(os.getpid())


@functools.lru_cache(maxsize=1)
def _opened(pid: int) -> Session:
    return Session(cache_folder(None), 0)
