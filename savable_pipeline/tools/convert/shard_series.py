"""Consecutive shards of limited bytes and samples.

add ─ ShardFile ─ full ─▶ finished(table)      each shard is closed before the next one starts
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.tar_format import Chunked, ShardFile, room_in, sample_bytes
from savable_pipeline.errors import SavableError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ShardSeries:
    """Series of shards in `folder`. `name` names them, and `finished` receives them."""

    def __init__(
        self,
        folder: Path,
        name: Callable[[int], str],
        max_bytes: int,
        max_samples: int | None,
        finished: Callable[[ShardTable], None],
        first: int = 0,
    ) -> None:
        self._folder, self._name, self._finished = folder, name, finished
        self._room, self._max_samples, self._number = room_in(max_bytes), max_samples, first
        self._shard: ShardFile | None = None

    @property
    def last_key(self) -> str:
        """Return the key of the last sample in the open shard.

        The next sample must have another key."""
        return "" if self._shard is None else self._shard.last_key

    def fits(self, size: int) -> bool:
        """Return whether a sample of `size` bytes fits in the open shard."""
        shard = self._shard
        if shard is None or (self._max_samples is not None and shard.samples >= self._max_samples):
            return False
        return shard.size + size <= self._room

    def add(self, key: str, parts: Mapping[str, bytes | Chunked]) -> None:
        """Append a sample to the open shard, or to the next one if it does not fit."""
        if not self.fits(sample_bytes(key, {extension: len(data) for extension, data in parts.items()})):
            self.finish()
        if self._shard is None:
            name = self._name(self._number)
            self._shard = ShardFile(self._folder / name, name)
            self._number += 1
        self._shard.add(key, parts)

    def finish(self) -> None:
        """End the open shard, if there is one."""
        if self._shard is not None:
            table = self._shard.finish()
            self._finished(table)
            self._shard = None

    def close(self) -> None:
        """Remove the unfinished shard."""
        if self._shard is not None:
            self._shard.close()
            self._shard.path.unlink(missing_ok=True)
            self._shard = None


@contextlib.contextmanager
def room_on(folder: Path) -> Iterator[None]:
    """Raise `SavableError` for an OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise SavableError(
            f"{folder}: {error.strerror}: disk or quota is full. Free space and start again to continue"
        ) from error
