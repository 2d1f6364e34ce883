"""The process that brings remote bytes into the cache, for one process that reads them.

    reader ── (ticket, kind, arguments) ──▶ this process ── obstore ──▶ server
           ◀── (ticket, answer or error) ──       └── writes the cache's files and flags

It is started by exec, not forked, and is alone in using obstore: the reader may be forked whenever it likes. What the
reader waits for comes first, then what it needs soon, then what it has announced; each in the order of asking.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from savable_pipeline.cache_room import Room, write_at
from savable_pipeline.errors import RemoteError, SavableError, ShardError
from savable_pipeline.fetcher import PIECE
from savable_pipeline.shard_cache import LEFT_OUT, CachedShards
from savable_pipeline.shard_index import ShardEntry
from savable_pipeline.sparse_file import locked
from savable_pipeline.stores import Stores

_THREADS = 16
_ORPHAN_CHECK_S = 2.0


class _Work:
    """What the threads do; each method answers one kind of request."""

    def __init__(self, cache: str, limit: int, retry_s: float) -> None:
        self._stores = Stores(retry_s)
        self._room = Room(Path(cache), limit)
        self._cached: dict[str, CachedShards] = {}
        self._lock = threading.Lock()

    def listing(self, root: str) -> list[tuple[str, int]]:
        return self._stores.listing(root)

    def stat(self, root: str, name: str) -> tuple[int, str] | None:
        return self._stores.stat(root, name)

    def read(self, root: str, name: str) -> bytes | None:
        """A small object; None if there is none."""
        stat = self._stores.stat(root, name)
        if stat is None or not stat[0]:
            return None
        if stat[0] > PIECE:
            raise ShardError(f"{root}/{name}: {stat[0]} bytes, where {PIECE} are the most it may have")
        return self.part(root, name, stat[0], 0, stat[0])

    def part(self, root: str, name: str, size: int, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop - 1` of an object of `size` bytes, past the cache."""
        raw = bytearray(stop - start)

        def keep(chunk: memoryview, offset: int) -> None:
            raw[offset - start : offset - start + len(chunk)] = chunk

        self._stores.copy(root, name, start, stop, size, keep)
        return bytes(raw)

    def whole(self, root: str, name: str, size: int, path: str) -> int:
        """Fetch an object into a new file, aside first; `size` in bytes."""
        aside = Path(f"{path}.tmp")
        aside.parent.mkdir(parents=True, exist_ok=True)
        self._room.take(size)
        with aside.open("wb") as file:
            self._copy(root, ShardEntry(name, size, 0, 0), file.fileno(), 0, size)
        aside.replace(path)
        return size

    def rows(self, root: str, folder: str, row: int, stop: int, needed: list[int], wait: bool) -> int:
        """Fetch those rows of one shard that are not in the cache; gives the bytes fetched.

        Where there is no room for all, only those that are `needed` now. If others fetch some of them at this moment,
        whoever waits waits for them too; the rest leave it to them.
        """
        cached = self._version(folder)
        if not cached.missing(row, stop):
            return 0
        shard = cached.shard_of(row)
        fd = cached.open(shard)
        try:
            with contextlib.suppress(BlockingIOError), locked(fd, *cached.extent(row, stop), wait=wait):
                return self._rows(root, cached, fd, row, stop, needed)
        finally:
            os.close(fd)
        return 0

    def _rows(self, root: str, cached: CachedShards, fd: int, row: int, stop: int, needed: list[int]) -> int:
        """The same with the lock held: who came second finds here what the first has fetched."""
        fetched, alone = 0, list[int]()
        for first, end in cached.missing(row, stop):
            start, past = cached.extent(first, end)
            if self._room.take_ahead(past - start):
                fetched += self._fetch(root, cached, fd, first, end)
            else:
                cached.used[first:end] = LEFT_OUT
                alone += [row for row in needed if first <= row < end]
        for row in alone:
            start, past = cached.extent(row, row + 1)
            self._room.take(past - start)
            fetched += self._fetch(root, cached, fd, row, row + 1)
        cached.sync_if_complete(cached.shard_of(row), fd)
        return fetched

    def _fetch(self, root: str, cached: CachedShards, fd: int, row: int, stop: int) -> int:
        start, past = cached.extent(row, stop)
        self._copy(root, cached.index.shards[cached.shard_of(row)], fd, start, past)
        cached.arrived(row, stop)
        return past - start

    def _copy(self, root: str, entry: ShardEntry, fd: int, start: int, stop: int) -> None:
        """Bytes of a shard into the same place of a file."""

        def write(chunk: memoryview, offset: int) -> None:
            try:
                write_at(fd, chunk, offset, self._room.free)
            except OSError as error:
                raise _of_the_cache(error) from error

        for begin in range(start, stop, PIECE):
            self._stores.copy(root, entry.name, begin, min(begin + PIECE, stop), entry.size, write)

    def _version(self, folder: str) -> CachedShards:
        with self._lock:
            if folder not in self._cached:
                self._cached[folder] = CachedShards(Path(folder))
            return self._cached[folder]


class _Queue:
    """Requests by urgency, then in order; answers those that have a ticket."""

    def __init__(self, work: _Work, connection: Connection) -> None:
        self._work = work
        self._connection = connection
        self._waiting: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._number = 0
        self._sending = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def put(self, urgency: int, request: Any) -> None:
        self._number += 1
        self._waiting.put((urgency, self._number, request))

    def _serve(self) -> None:
        while True:
            ticket, kind, arguments = self._waiting.get()[2]
            answer = _answer(getattr(self._work, kind), arguments)
            if ticket:
                with self._sending, contextlib.suppress(OSError):
                    self._connection.send((ticket, answer))


def _answer(act: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return act(*arguments)
    except SavableError as error:
        return error
    except OSError as error:
        return RemoteError(
            f"{error.filename or 'the cache'}: {error.strerror or error}; see SAVABLE_CACHE in the README"
        )
    except Exception as error:
        return RemoteError(f"the fetcher failed: {type(error).__name__}: {error}")


def _of_the_cache(error: OSError) -> RemoteError:
    return RemoteError(
        f"the cache of remote shards: {error}; see that its disk has room and can be written, or give another folder "
        "as cache= or SAVABLE_CACHE"
    )


def serve(connection_fd: int, cache: str, limit: int, retry_s: float) -> None:
    """Serve until the reader closes the connection or is gone."""
    parent = os.getppid()
    connection = Connection(connection_fd)
    waiting = _Queue(_Work(cache, limit, retry_s), connection)
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_ORPHAN_CHECK_S):
                urgency, request = connection.recv()
                waiting.put(urgency, request)
    os._exit(0)
