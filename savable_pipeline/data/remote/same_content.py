"""`SameContent`: bytes that another version of a dataset has in the cache, copied in place of downloading them again.

CACHE/DATASET/VERSION A/3.pin   the hash of a file's content, as the Hub tells it
CACHE/DATASET/VERSION B/7.pin   the same hash: the file is in another commit too
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from savable_pipeline.data.remote.pace import PIECE
from savable_pipeline.data.remote.shard_cache import ShardCache, create_flags
from savable_pipeline.errors import SavableError


class SameContent:
    """What other versions have of the files of one that is being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, dict[str, list[tuple[ShardCache, int]]]] = {}  # of a version: by content

    def copy(
        self, cached: ShardCache, row: int, stop: int, content: str, write: Callable[[memoryview, int], None]
    ) -> bool:
        """Passes the bytes of rows of one file to `write` with their offset, if another version has them all."""
        shard, extent = cached.shard_of(row), cached.extent(row, stop)
        for other, number in self._others(cached).get(content, ()):
            first = int(other.firsts[number]) + row - int(cached.firsts[shard])
            end = first + stop - row
            if end > other.firsts[number + 1] or other.extent(first, end) != extent:
                continue
            before = other.present[first:end].copy()
            with contextlib.suppress(OSError), other.path(number).open("rb", buffering=0) as file:
                if not other.is_right(number, file.fileno(), first, end):
                    continue
                for start in range(*extent, PIECE):
                    write(memoryview(os.pread(file.fileno(), min(PIECE, extent[1] - start), start)), start)
                if (other.present[first:end] == before).all():
                    other.touched[number] = cached.touched[shard]
                    return True
        return False

    def _others(self, cached: ShardCache) -> dict[str, list[tuple[ShardCache, int]]]:
        with self._lock:
            if cached.folder not in self._known:
                found: dict[str, list[tuple[ShardCache, int]]] = {}
                self._known[cached.folder] = found
                own = cached.folder.relative_to(cached.dataset).parts  # VERSION, or VERSION/long
                for flags in cached.dataset.glob("/".join(["*", *own[1:], "flags"])):
                    with contextlib.suppress(OSError, ValueError, SavableError):
                        if flags.parent != cached.folder:
                            create_flags(flags.parent)
                            other = ShardCache(flags.parent)
                            for number in range(len(other.shards)):
                                found.setdefault(other.pin(number), []).append((other, number))
            return self._known[cached.folder]
