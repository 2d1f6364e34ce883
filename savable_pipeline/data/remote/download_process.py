"""The process that downloads into the cache, for one process that reads from it.

    reader ── (urgency, (ticket, kind, arguments)) ──▶ this process ── obstore ──▶ server
           ◀── (ticket, result or error) ──                 └── writes the cache's files and flags

Only this process uses obstore, so the reader may be forked at any time. Requests are served by urgency, and in the
order of their arrival where it is equal. One for many rows is served in parts, so that a more urgent one comes between.
They wait for a thread, and begin only while the link has room (`RequestQueue`). Bytes that another version of a dataset
has in the cache are copied in place of downloading them again (`SameContent`).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from savable_pipeline.core.files import replacing
from savable_pipeline.data.remote.cache_files import PIECE, locked, punch_hole
from savable_pipeline.data.remote.cache_space import CacheSpace, write_at
from savable_pipeline.data.remote.listing import Listing, shared_answer
from savable_pipeline.data.remote.object_store import ObjectStore, Pace, Write
from savable_pipeline.data.remote.session import Urgency
from savable_pipeline.data.remote.shard_cache import LEFT_OUT, ShardCache, create_flags, disk_error, runs
from savable_pipeline.data.shards.paths import is_hub
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.errors import RemoteError, SavableError, ShardError

_THREADS = 16
_AHEAD_THREADS = 14  # of them that serve what nobody waits for


class SameContent:
    """What other versions have of the files of one that is being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, dict[str, list[tuple[ShardCache, int]]]] = {}  # of a version: by content

    def copy(self, cached: ShardCache, row: int, stop: int, content: str, write: Write) -> bool:
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


@dataclass(slots=True, order=True)
class QueuedRequest:
    """What to do, by urgency and then by arrival. `size`: the bytes it is for, as far as that is known."""

    urgency: int
    number: int
    ticket: int
    kind: str
    arguments: tuple[Any, ...]
    size: int


class RequestQueue:
    """Gives requests to threads. What somebody waits for begins at once; the rest keeps to the pace, and leaves some
    threads free for that.
    """

    def __init__(self, pace: Pace, threads: int) -> None:
        self._pace = pace
        self._most = threads
        self._waiting: list[QueuedRequest] = []
        self._begun: dict[int, int] = {}  # the bytes of each request that a thread has, by its number
        self._changed = threading.Condition()

    def put(self, request: QueuedRequest) -> None:
        """Adds a request."""
        with self._changed:
            heapq.heappush(self._waiting, request)
            self._changed.notify()

    def get(self) -> QueuedRequest:
        """The next request, once it may begin; `done` must follow."""
        with self._changed:
            while not self._may_begin():
                self._changed.wait()
            request = heapq.heappop(self._waiting)
            self._begun[request.number] = self._share(request)
            self._changed.notify()  # another may begin too
            return request

    def done(self, request: QueuedRequest) -> None:
        """A request, or a part of it that was begun, has ended."""
        with self._changed:
            del self._begun[request.number]
            self._changed.notify()

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        first = self._waiting[0]
        if first.urgency == Urgency.NOW or not self._begun:
            return True
        under_way = sum(self._begun.values()) + self._share(first)
        return len(self._begun) < self._most and under_way <= self._pace.at_once

    def _share(self, request: QueuedRequest) -> int:
        """The bytes of one part of a request."""
        return min(request.size, self._pace.request)


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left to do of a request that was served in part: its `arguments`, and whether what is needed is here."""

    arguments: tuple[Any, ...]
    served: bool


class Downloads:
    """Serves requests, in any thread: each public method is a kind of request."""

    def __init__(self, cache: str, limit: int, retry_s: float) -> None:
        self._store = ObjectStore(retry_s, Path(cache))
        self.pace = self._store.pace
        self._cache = Path(cache)
        self._space = CacheSpace(self._cache, limit)
        self._cached: dict[str, ShardCache] = {}
        self._same = SameContent()
        self._lock = threading.Lock()

    def listing(self, root: str) -> Listing:
        """Every object below a URL; one listing for processes that ask at the same time."""
        if is_hub(root):
            return self._store.listing(root)
        return shared_answer(self._cache, root, lambda: self._store.listing(root), Listing)

    def commit(self, dataset: str) -> str:
        """The commit of a dataset of the Hub at a branch or a tag."""
        return self._store.commit(dataset)

    def card(self, root: str) -> bytes:
        """The README.md of a dataset of the Hub, read once a node; empty without one."""

        def read() -> bytes:
            size, _ = self._store.stat(root, "README.md") or (0, "")
            return self.part(root, "README.md", size, 0, size) if 0 < size <= PIECE else b""

        return shared_answer(self._cache, f"{root} card", read, bytes, lasts=True)

    def stat(self, root: str, name: str, needed: bool = False) -> tuple[int, str] | None:
        """Size and stamp of an object; None if there is none. One that is `needed` is not taken for missing."""
        return self._store.stat(root, name, needed=needed)

    def part(self, root: str, name: str, size: int, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop - 1` of an object of `size` bytes, past the cache."""
        return self.part_of(root, name, size, "", start, stop)[0]

    def part_of(self, root: str, name: str, size: int, pin: str, start: int, stop: int) -> tuple[bytes, str]:
        """The same of the server's version `pin` of an object, of any if that is empty; and the version."""
        raw = bytearray(stop - start)

        def keep(chunk: memoryview, offset: int) -> None:
            raw[offset - start : offset - start + len(chunk)] = chunk

        version = self._store.copy(root, name, start, stop, size, keep, pin)
        return bytes(raw), version

    def whole(self, root: str, name: str, size: int, path: str) -> str:
        """Downloads an object of `size` bytes into a file; returns the server's version of it."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._space.reserve(size)
        try:
            with replacing(Path(path)) as file:
                write = partial(self._write, file.fileno())
                return self._copy(root, ShardEntry(name, size, 0, 0), write, 0, size, "")
        finally:
            self._space.written(size)

    def index_rows(self, root: str, folder: str, shards: list[int]) -> None:
        """Fetches the rows of these shards of an index that is here in part."""
        parts = self._version(folder).layout.parts
        if parts is not None:
            get = partial(self.part_of, root, parts.name, parts.bytes, parts.pin)
            parts.fetch(root, shards, lambda start, stop: get(start, stop)[0], self._write)

    def dated(self, root: str) -> list[tuple[str, int, int]]:
        """Name, size and time of the last change of every object below a URL."""
        return self._store.dated(root)

    def fetch(self, root: str, name: str, size: int, path: str) -> None:
        """Copies an object of `size` bytes into a file outside the cache."""
        with replacing(Path(path)) as file:
            write = partial(write_at, file.fileno(), release=lambda size: False)
            self._copy(root, ShardEntry(name, size, 0, 0), write, 0, size, "")

    def upload(self, root: str, name: str, path: str) -> None:
        """Writes a file as an object."""
        self._store.upload(root, name, Path(path))

    def erase(self, root: str, names: list[str]) -> None:
        """Removes objects."""
        self._store.erase(root, names)

    def rows(self, root: str, folder: str, row: int, stop: int, needed: list[int], wait: bool) -> Rest | None:
        """Downloads a part of those rows of one shard that are not in the cache: from the first that is `needed` on.

        Returns what is left; None if that is nothing. Where there is no space for all, only the rows that are needed
        now. If another process downloads some of them at this moment: with `wait` waits for those that are needed,
        else leaves them to it.
        """
        cached = self._version(folder)
        absent = cached.missing(row, stop)
        if not absent:
            return None
        needed = [one for one in needed if not cached.present[one] & 1]
        first, end = self._part(cached, absent, needed)
        fd = cached.open(cached.shard_of(row))
        try:
            wait_here = wait and bool(needed)
            with contextlib.suppress(BlockingIOError), locked(fd, *cached.extent(first, end), wait=wait_here):
                self._rows(root, cached, fd, first, end, [one for one in needed if one < end])
        finally:
            os.close(fd)
        if not needed and end == stop:
            return None
        left = [one for one in needed if not first <= one < end]
        return Rest((root, folder, row if needed else end, stop, left, wait), served=not left)

    def _part(self, cached: ShardCache, absent: list[tuple[int, int]], needed: list[int]) -> tuple[int, int]:
        """The rows of the next request, of the runs that are `absent`: from the first `needed` row, or the first."""
        first = needed[0] if needed else absent[0][0]
        end = next(end for _, end in absent if first < end)
        start, past = cached.extent(first, end)
        if past - start <= self.pace.request:
            return first, end
        behind = cached.layout.row_from(cached.shard_of(first), start + self.pace.request + 1)
        return first, max(first + 1, min(behind, end) - 1)

    def forget(self, folder: str) -> None:
        """Closes the versions in a folder that is about to be removed, or was written anew."""
        with self._lock:
            for version in [version for version in self._cached if Path(version).is_relative_to(folder)]:
                del self._cached[version]

    def size_of(self, root: str, folder: str, row: int, stop: int, *_: Any) -> int:
        """The bytes that a request for rows is for."""
        start, past = self._version(folder).extent(row, stop)
        return past - start

    def _rows(self, root: str, cached: ShardCache, fd: int, row: int, stop: int, needed: list[int]) -> None:
        """Downloads rows; the caller holds the lock. Those that another process downloaded meanwhile are skipped."""
        alone = list[tuple[int, int]]()
        for first, end in cached.missing(row, stop):
            start, past = cached.extent(first, end)
            if self._space.try_reserve(past - start):
                try:
                    self._reserved(root, cached, fd, first, end)
                    continue
                except RemoteError as error:
                    if not isinstance(error.__cause__, OSError):  # of the disk
                        raise
            cached.used[first:end] = LEFT_OUT
            alone += runs(np.array([row for row in needed if first <= row < end], dtype=np.int64))
        for first, end in alone:
            start, past = cached.extent(first, end)
            self._space.reserve(past - start)
            self._reserved(root, cached, fd, first, end)

    def _reserved(self, root: str, cached: ShardCache, fd: int, row: int, stop: int) -> None:
        """Downloads rows for whose bytes there is space."""
        start, past = cached.extent(row, stop)
        try:
            self._download(root, cached, fd, row, stop)
        except BaseException:
            punch_hole(fd, start, past)  # what came takes no space
            raise
        finally:
            self._space.written(past - start)

    def _download(self, root: str, cached: ShardCache, fd: int, row: int, stop: int) -> None:
        """Downloads rows of one shard into its file `fd`."""
        start, past = cached.extent(row, stop)
        shard = cached.shard_of(row)
        entry, pin = cached.shards[shard], cached.pin(shard)
        try:
            write = partial(self._write, fd)
            version = self._copied(root, cached, write, row, stop)
            version = version or self._copy(root, entry, write, start, past, pin)
            right = all(cached.layout.lies_there(shard, fd, each) for each in {row, stop - 1})
            if not right or (version and cached.pin(shard, version) != version):
                raise ShardError(
                    f"{root}/{entry.name}: its samples lie elsewhere than when it was indexed, or it has another "
                    "version; the shard was rewritten since: start again to index it, or put the old shard back",
                    reason="changed shard",
                )
        except ShardError as error:
            if error.reason == "changed shard":
                cached.note_changed(shard)
            raise
        cached.mark_present(shard, fd, row, stop)

    def _copied(self, root: str, cached: ShardCache, write: Write, row: int, stop: int) -> str:
        """The hash of a file's content, if its rows could be copied from another commit of the Hub; else ""."""
        if not is_hub(root):
            return ""
        entry = cached.shards[cached.shard_of(row)]
        found = self._store.stat(root, entry.name)
        if found is None or found[0] != entry.size:
            return ""
        return found[1] if self._same.copy(cached, row, stop, found[1], write) else ""

    def _copy(self, root: str, entry: ShardEntry, write: Write, start: int, stop: int, version: str) -> str:
        """Passes bytes of a shard to `write` with their offsets; returns the server's version, all of one."""
        while start < stop:
            end = min(start + self.pace.request, stop)
            version = self._store.copy(root, entry.name, start, end, entry.size, write, version)
            start = end
        return version

    def _write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        try:
            write_at(fd, memoryview(data), offset, self._space.release)
        except OSError as error:
            raise disk_error(error) from error

    def _version(self, folder: str) -> ShardCache:
        with self._lock:
            if folder not in self._cached:
                self._cached[folder] = ShardCache(Path(folder))
            return self._cached[folder]


class Requests:
    """Serves requests in threads; sends the results of those that have a ticket."""

    def __init__(self, downloads: Downloads, connection: Connection) -> None:
        self._downloads = downloads
        self._connection = connection
        self._queue = RequestQueue(downloads.pace, _AHEAD_THREADS)
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def put(self, urgency: int, ticket: int, kind: str, arguments: tuple[Any, ...]) -> None:
        """Adds a request; those of equal urgency are served in the order of their arrival."""
        size = _result(self._downloads.size_of, arguments) if kind == "rows" else 0
        known = size if isinstance(size, int) else 0  # else it fails, which is told when it is served
        self._queue.put(QueuedRequest(urgency, next(self._numbers), ticket, kind, arguments, known))

    def _serve(self) -> None:
        while True:
            request = self._queue.get()
            result = _result(getattr(self._downloads, request.kind), request.arguments)
            self._queue.done(request)
            if isinstance(result, Rest):
                self._go_on(request, result)
            elif request.ticket:
                self._send(request.ticket, result)

    def _go_on(self, request: QueuedRequest, rest: Rest) -> None:
        """Lets the rest of a request wait in its place; or behind what is needed now, once that part of it is here."""
        if request.ticket and rest.served:
            self._send(request.ticket, None)
            self.put(Urgency.SOON, 0, request.kind, rest.arguments)
        else:
            self._queue.put(replace(request, arguments=rest.arguments))

    def _send(self, ticket: int, result: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.send((ticket, result))


def _result(act: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return act(*arguments)
    except SavableError as error:
        return error
    except OSError as error:
        return RemoteError(
            f"{error.filename or 'the cache'}: {error.strerror or error}. Set SAVABLE_CACHE to a "
            "local folder: https://github.com/savable-pipeline/savable_pipeline/blob/main/docs/environment.md"
        )
    except Exception as error:
        return RemoteError(f"the download failed: {type(error).__name__}: {error}")


def serve(connection: Connection, requests: Iterator[Any], cache: str, limit: int, retry_s: float) -> None:
    """The process: serves until the reader closes the connection or is gone; of a cache that cannot be it says so."""
    downloads = _result(Downloads, (cache, limit, retry_s))
    served = Requests(downloads, connection) if isinstance(downloads, Downloads) else None
    for urgency, request in requests:
        if served is not None:
            served.put(urgency, *request)
        elif request[0]:
            connection.send((request[0], downloads))
            break
    os._exit(0)  # ends the threads
