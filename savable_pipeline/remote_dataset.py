"""`RemoteDataset`: a dataset behind a URL, read from the cache, which is told ahead what will be read."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.batch_memory import empty_bytes
from savable_pipeline.cache_room import AHEAD_SHARE, cache_bytes, cache_folder
from savable_pipeline.dataset import OPEN_SHARDS, Dataset, key_at
from savable_pipeline.errors import RemoteError, ShardError
from savable_pipeline.fetcher import ANNOUNCED, PIECE, SOON, Fetcher
from savable_pipeline.on_error import OnError
from savable_pipeline.remote import is_remote
from savable_pipeline.remote_index import open_remote
from savable_pipeline.remote_lookup import METADATA
from savable_pipeline.sample import RefArray, Sample, matching
from savable_pipeline.shard_cache import LEFT_OUT, USED, WANTED
from savable_pipeline.shard_index import ShardIndex
from savable_pipeline.shard_paths import Shards

_TRIES = 100  # how often a sample may be evicted before it could be read
_AHEAD = 16, 2048  # refs announced before they are given, at least and at most
_AHEAD_BYTES = 64 << 20  # and about so many bytes a lane
_BLOCKS_KEPT = 1 << 18
_TOUCH_S = 10.0
_LOOK_S, _LOOK_SHARE = 1.0, 50  # whether all is here is seen to so often, and takes at most one part in so many

_read_file = Dataset.read


def open_dataset(
    shards: Shards,
    *,
    source: str = "",
    on_error: OnError = "raise",
    quarantine: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int | None = None,
) -> Dataset:
    """The dataset of some shards, on a disk or behind a URL; the last two are of the cache for the latter."""
    if not is_remote(shards):
        return Dataset(shards, source=source, on_error=on_error, quarantine=quarantine)
    return RemoteDataset(
        shards, source=source, on_error=on_error, quarantine=quarantine, cache=cache, cache_size=cache_size
    )


class RemoteDataset(Dataset):
    """An indexed set of shards behind a URL.

    A dataset that fits into the cache is fetched in pieces of 8 MiB, one that does not in the very blocks that the
    plan names, so that each byte is fetched once an epoch whatever else the cache must hold.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        source: str,
        on_error: OnError,
        quarantine: str | os.PathLike[str] | None,
        cache: str | os.PathLike[str] | None,
        cache_size: int | None,
    ) -> None:
        self._cache = cache_folder(cache)
        self._limit = cache_bytes(cache_size, self._cache)
        self._fetcher: Fetcher | None = None
        super().__init__(shards, source=source, on_error=on_error, quarantine=quarantine)
        self._present, self._used = self._cached.present.data, self._cached.used.data
        self._starts_of = np.frombuffer(self._cached.index.starts, np.uint64)  # (rows,)
        size = sum(entry.size for entry in self.entries)
        self._in_pieces = size <= self._limit * AHEAD_SHARE
        self._ahead = max(_AHEAD[0], min(_AHEAD[1], min(_AHEAD_BYTES, self._limit // 256) * self.count // size))
        self.ahead = self._ahead
        self._evictions = self._cached.evictions
        self._all_here_since = -1  # what `evictions` counted when the whole dataset was here; -1: it is not
        self._look_at = self._touch_at = 0.0
        rows = self._rows[np.diff(self.firsts) > 0]
        self._numbers = self._cached.shards_of(rows)  # in the index, of shards with rows
        self._blocks: dict[int, tuple[int, int]] = {}  # by row: first row and stop of the block it was announced in
        self._asked: set[tuple[int, int]] = set()  # pieces that were announced, where the whole dataset is to be kept

    def _find(self, shards: Shards) -> tuple[Path, list[str], ShardIndex]:
        tolerant = self.on_error != "raise"
        found, self._cached = open_remote(shards, self._cache, self._limit, tolerant=tolerant)
        self._cached.hold()
        self._url = found.root
        return self._cached.folder.parent / METADATA, found.names, self._cached.index

    @property
    def address(self) -> str:
        """The URL."""
        return self._url

    @property
    def index_path(self) -> Path:
        """Where the index lies in the cache."""
        return self._cached.folder / "index"

    def __del__(self) -> None:
        super().__del__()
        if getattr(self, "_fetcher", None) is not None:
            self._drop_fetcher()

    def announce(self, refs: RefArray) -> None:
        """Let what these refs name be fetched, and kept until it has been read: a plan needs it."""
        now = time.monotonic()
        if self._is_all_here() and now < self._touch_at:
            return
        self._touch_at = now + _TOUCH_S
        rows = self._locate(refs)[1]
        here = self._cached.present[rows] & 1 == 1
        self._cached.used[rows] = WANTED
        self._cached.touch(rows[here])
        if here.all():
            self._see_whether_all_is_here(now)
            return
        blocks = self._requests(np.unique(rows[~here]))
        if self._in_pieces:
            blocks = [block for block in blocks if block not in self._asked]
            self._asked.update(blocks)
        else:
            self._remember(blocks)
        for block in blocks:
            self._own_fetcher().tell(ANNOUNCED, "rows", *self._place_of(block), [], False)

    def samples(self, refs: RefArray) -> list[Sample]:
        """The samples that these refs name, unread; those that are not in the cache are asked for."""
        if not self._is_all_here():
            rows = self._locate(refs)[1]
            absent = np.unique(rows[self._cached.present[rows] & 1 == 0]).tolist()
            blocks: dict[tuple[int, int], list[int]] = {}
            for row in absent:
                blocks.setdefault(self._block(row), []).append(row)
            for block, needed in blocks.items():
                self._own_fetcher().tell(SOON, "rows", *self._place_of(block), needed, False)
        return super().samples(refs)

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The bytes of one part of a sample. Raises KeyError, `ShardError`, or `RemoteError`."""
        if self._all_here_since >= 0:
            data = _read_file(self, shard, row, extension)
            if self._evictions[0] == self._all_here_since:  # else this may be a hole
                return data
        for _ in range(_TRIES):
            seen = self._present[row]
            if seen & 1:
                data = _read_file(self, shard, row, extension)
                if self._present[row] == seen:  # else it was evicted meanwhile, and this may be a hole
                    self._used[row] = USED
                    return data
            self._wait_for(row)
        raise self._evicted(shard)

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        """The bytes of one part, uint8 (bytes,), where batches are made. Raises what `read` raises."""
        if self._all_here_since >= 0:
            array = super().array(shard, row, extension)
            if self._evictions[0] == self._all_here_since:
                return array
        data = self.read(shard, row, extension)
        array = empty_bytes(len(data))
        array[:] = np.frombuffer(data, np.uint8)
        return array

    def _is_all_here(self) -> bool:
        """Whether the whole dataset was found in the cache, and nothing was evicted since."""
        if self._evictions[0] == self._all_here_since:
            return True
        self._all_here_since, self.ahead = -1, self._ahead
        return False

    def _see_whether_all_is_here(self, now: float) -> None:
        """Look, now and then, since it takes time; then nothing has to be announced, or looked at row by row."""
        if not self._in_pieces or now < self._look_at:
            return
        evictions = self._evictions[0]
        if self._cached.all_present(self._numbers):
            self._all_here_since, self.ahead = evictions, 0
        self._look_at = time.monotonic() + max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - now))

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        """The first bytes of a part, and how many it has; of a sample longer than a piece no more is fetched."""
        size = self.sizes(row)[matching(extension, self._layout(row).position)]
        if not self._is_long(row):
            return self.read(shard, row, extension)[:limit], size
        layout = self._layout(row)
        offset, _ = self._place(row, layout.position[matching(extension, layout.position)], layout)
        return self._peek(shard, offset, min(size, limit)), size

    def _is_long(self, row: int) -> bool:
        start, stop = self._cached.extent(row, row + 1)
        return stop - start > PIECE

    def _peek(self, shard: int, offset: int, size: int) -> bytes:
        """Bytes of a shard past the cache."""
        entry = self.entries[shard]
        where = self._url, entry.name, entry.size, offset, offset + size
        return self._own_fetcher().ask("part", *where) if size else b""

    def _peeked_key(self, shard: int, row: int) -> str:
        start, stop = self._cached.extent(row, row + 1)
        with tempfile.TemporaryFile() as file:
            file.write(self._peek(shard, start, self._layout(row).gaps[0]))
            file.truncate(stop - start)  # the headers, and a hole where the rest would be
            return key_at(f"{self._url}/{self.shard_name(shard)}", file.fileno(), 0)

    def key(self, shard: int, row: int) -> str:
        """The key of a sample, read from the header of its first member."""
        if self._is_long(row):
            return self._peeked_key(shard, row)
        for _ in range(_TRIES):
            seen = self._present[row]
            if seen & 1:
                with contextlib.suppress(ShardError):
                    key = super().key(shard, row)
                    if self._present[row] == seen:
                        return key
                if self._present[row] == seen:
                    return super().key(shard, row)
            self._wait_for(row)
        raise self._evicted(shard)

    def _open(self, shard: int) -> int:
        """A handle of a shard's file in the cache. What is damaged there is fetched again. Raises `ShardError`."""
        name, number = self.shard_name(shard), self._cached.shard_of(int(self._rows[shard]))
        if shard not in self._whole and not self._index.is_whole(name):
            raise self._damaged_index(name)
        try:
            fd = self._cached.open(number)
        except OSError as error:
            raise RemoteError(f"{self._cached.path(number)}: {error.strerror}; see that the cache is there") from error
        if shard not in self._whole:
            self._whole.add(shard)
            self._cached.forget_holes(number, fd)
        self._handles[shard] = fd
        while len(self._handles) > OPEN_SHARDS:
            os.close(self._handles.popitem(last=False)[1])
        return fd

    def _requests(self, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        """What to ask for to get these ascending rows: runs of rows of one shard, of about a piece at most."""
        shards = np.searchsorted(self._cached.firsts, rows, side="right") - 1
        pieces = self._starts_of[rows] // np.uint64(PIECE)
        if self._in_pieces:
            return [self._piece(*piece) for piece in dict.fromkeys(zip(shards.tolist(), pieces.tolist(), strict=True))]
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(shards) != 0) | (np.diff(pieces) != 0)) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts)]

    def _piece(self, shard: int, piece: int) -> tuple[int, int]:
        """The rows of a shard that start in its piece number `piece`."""
        first, end = self._cached.firsts[shard : shard + 2]
        borders = np.array([piece * PIECE, (piece + 1) * PIECE], dtype=np.uint64)
        row, stop = first + np.searchsorted(self._starts_of[first:end], borders)
        return int(row), int(stop)

    def _block(self, row: int) -> tuple[int, int]:
        """What to fetch together with a row: what it was announced with, unless there was no room for that."""
        if self._used[row] == LEFT_OUT:
            return row, row + 1
        if self._in_pieces:
            return self._piece(self._cached.shard_of(row), self._cached.index.starts[row] // PIECE)
        return self._blocks.get(row, (row, row + 1))

    def _remember(self, blocks: list[tuple[int, int]]) -> None:
        if len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.clear()
        self._blocks.update((row, block) for block in blocks for row in range(*block))

    def _wait_for(self, row: int) -> None:
        """Fetch a row, and with it what it was announced with if there is room."""
        self._own_fetcher().ask("rows", *self._place_of(self._block(row)), [row], True)

    def _place_of(self, block: tuple[int, int]) -> tuple[str, str, int, int]:
        return self._url, str(self._cached.folder), *block

    def _own_fetcher(self) -> Fetcher:
        """This process's own: one inherited by a fork is the parent's; one that ended is replaced."""
        if self._fetcher is None or self._fetcher.owner != os.getpid() or self._fetcher.ended:
            self._drop_fetcher()
            self._fetcher = Fetcher(self._cache, self._limit)
            self._asked.clear()
        return self._fetcher

    def _drop_fetcher(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _evicted(self, shard: int) -> RemoteError:
        return RemoteError(
            f"{self._url}/{self.shard_name(shard)}: a sample was evicted {_TRIES} times before it could be read; the "
            f"cache of {self._limit} bytes is too small for what its processes read at once: give a larger cache_bytes"
        )
