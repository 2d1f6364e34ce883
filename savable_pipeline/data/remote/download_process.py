"""The process that downloads into the cache, for one process that reads from it.

    reader ── (urgency, (ticket, kind, arguments)) ──▶ this process ── obstore ──▶ server
           ◀── (ticket, result or error) ──                 └── writes the cache's files and flags

Only this process uses obstore, so the reader may be forked at any time. Requests are served by urgency, then in the
order of arrival. A request for many rows is served in parts, so more urgent ones can come between. Requests wait for a
thread, and start only while the link has capacity (`RequestQueue`). Bytes that another version of a dataset has in the
cache are copied instead of downloaded (`SameContent`).
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
from savable_pipeline.data.remote.cache_files import PIECE, punch_hole, range_lock
from savable_pipeline.data.remote.cache_space import CacheSpace, write_at
from savable_pipeline.data.remote.listing import Listing, shared_answer
from savable_pipeline.data.remote.object_store import ObjectStore, Pace, Write
from savable_pipeline.data.remote.session import Urgency
from savable_pipeline.data.remote.shard_cache import NO_SPACE, ShardCache, create_flags, disk_error, runs
from savable_pipeline.data.shards.paths import is_hub
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.errors import RemoteError, SavableError, ShardError

_THREADS = 16
_AHEAD_THREADS = 14  # most threads that serve requests in advance


class SameContent:
    """Copies rows of a file from a cached version with the same content."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, dict[str, list[tuple[ShardCache, int]]]] = {}  # shards of a version, by content

    def copy(self, cached: ShardCache, row: int, stop: int, content: str, write: Write) -> bool:
        """Pass the bytes of rows to `write`, and return whether a version has them.

        The rows belong to one file, and `content` is the hash of the file.
        """
        shard = cached.shard_of(row)
        extent = begin_byte, end_byte = cached.extent(row, stop)
        for other, number in self._others(cached).get(content, ()):
            first = int(other.firsts[number]) + row - int(cached.firsts[shard])
            end = first + stop - row
            if end > other.firsts[number + 1] or other.extent(first, end) != extent:
                continue
            before = other.present[first:end].copy()
            with contextlib.suppress(OSError), other.path(number).open("rb", buffering=0) as file:
                if not other.is_valid(number, file.fileno(), first, end):
                    continue
                for offset in range(begin_byte, end_byte, PIECE):
                    write(memoryview(os.pread(file.fileno(), min(PIECE, end_byte - offset), offset)), offset)
                if (other.present[first:end] == before).all():
                    other.touched[number] = cached.touched[shard]
                    return True
        return False

    def _others(self, cached: ShardCache) -> dict[str, list[tuple[ShardCache, int]]]:
        """Return the shards of other versions of this dataset, by hash of their content."""
        with self._lock:
            if cached.folder not in self._known:
                found: dict[str, list[tuple[ShardCache, int]]] = {}
                self._known[cached.folder] = found
                parts = cached.folder.relative_to(cached.dataset).parts  # VERSION, or VERSION/long
                for flags in cached.dataset.glob("/".join(["*", *parts[1:], "flags"])):
                    with contextlib.suppress(OSError, ValueError, SavableError):
                        if flags.parent != cached.folder:
                            create_flags(flags.parent)
                            other = ShardCache(flags.parent)
                            for number in range(len(other.shards)):
                                found.setdefault(other.pin(number), []).append((other, number))
            return self._known[cached.folder]


@dataclass(slots=True, order=True)
class QueuedRequest:
    """Request, ordered by urgency and arrival.

    `ticket` is 0 if no reader waits for the result. `size` is the number of bytes of its rows, or 0.
    """

    urgency: int
    number: int
    ticket: int
    kind: str
    arguments: tuple[Any, ...]
    size: int


class RequestQueue:
    """Assigns requests to threads.

    Requests with a waiting reader start at once. The others follow the pace, and leave some threads free.
    """

    def __init__(self, pace: Pace, threads: int) -> None:
        self._pace = pace
        self._most_threads = threads
        self._waiting: list[QueuedRequest] = []
        self._started: dict[int, int] = {}  # bytes of each request that a thread serves, by number of the request
        self._changed = threading.Condition()

    def put(self, request: QueuedRequest) -> None:
        """Add a request."""
        with self._changed:
            heapq.heappush(self._waiting, request)
            self._changed.notify()

    def get(self) -> QueuedRequest:
        """Wait for the next request that may start. The caller must call `done`."""
        with self._changed:
            while not self._may_start():
                self._changed.wait()
            request = heapq.heappop(self._waiting)
            self._started[request.number] = self._part_bytes(request)
            self._changed.notify()  # another request may start too
            return request

    def done(self, request: QueuedRequest) -> None:
        """Record that a request, or a part of it, has ended."""
        with self._changed:
            del self._started[request.number]
            self._changed.notify()

    def _may_start(self) -> bool:
        """Return whether the first waiting request may start now."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        if first.urgency == Urgency.NOW or not self._started:
            return True
        requested = sum(self._started.values()) + self._part_bytes(first)
        return len(self._started) < self._most_threads and requested <= self._pace.bytes_at_once

    def _part_bytes(self, request: QueuedRequest) -> int:
        """Return the number of bytes of the next part of a request."""
        return min(request.size, self._pace.request_bytes)


@dataclass(frozen=True, slots=True)
class RemainingRows:
    """Remaining work of a request for rows.

    `arguments` are those of a request for the remaining rows. `needs_none` says whether no reader waits for them.
    """

    arguments: tuple[Any, ...]
    needs_none: bool


class Downloads:
    """Serves requests in any thread. Each public method is a kind of request."""

    def __init__(self, cache: str, limit: int, retry_s: float) -> None:
        self._store = ObjectStore(retry_s, Path(cache))
        self.pace, self.commit = self._store.pace, self._store.commit
        self.dated, self.rename, self.erase = self._store.dated, self._store.rename, self._store.erase
        self._cache = Path(cache)
        self._space = CacheSpace(self._cache, limit)
        self._cached: dict[str, ShardCache] = {}
        self._same = SameContent()
        self._lock = threading.Lock()

    def listing(self, root: str) -> Listing:
        """Return every object below a URL.

        Processes that ask at the same time share one listing.
        """
        if is_hub(root):
            return self._store.listing(root)
        return shared_answer(self._cache, root, lambda: self._store.listing(root), Listing)

    def card(self, root: str) -> bytes:
        """Return the README.md of a dataset of the Hub, or b"". It is read once per node."""

        def read_card() -> bytes:
            size, _ = self._store.stat(root, "README.md") or (0, "")
            return self.part(root, "README.md", size, 0, size) if 0 < size <= PIECE else b""

        return shared_answer(self._cache, f"{root} card", read_card, bytes, permanent=True)

    def stat(self, root: str, name: str, needed: bool = False) -> tuple[int, str] | None:
        """Return size and stamp of an object, or None if there is none.

        A `needed` object that is forbidden raises an error.
        """
        return self._store.stat(root, name, needed=needed)

    def part(self, root: str, name: str, size: int, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop - 1` of an object, without the cache.

        The object has `size` bytes.
        """
        return self.part_of(root, name, size, "", start, stop)[0]

    def part_of(self, root: str, name: str, size: int, pin: str, start: int, stop: int) -> tuple[bytes, str]:
        """Return the bytes `start` to `stop - 1` of an object, and its version.

        Unless `pin` is "", any other version is an error.
        """
        raw = bytearray(stop - start)

        def store(chunk: memoryview, offset: int) -> None:
            raw[offset - start : offset - start + len(chunk)] = chunk

        version = self._store.copy(root, name, start, stop, size, store, pin)
        return bytes(raw), version

    def whole(self, root: str, name: str, size: int, path: str) -> str:
        """Download an object of `size` bytes into a file, and return its version."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._space.reserve(size)
        try:
            with replacing(Path(path)) as file:
                write = partial(self._write, file.fileno())
                return self._copy(root, ShardEntry(name, size, 0, 0), write, 0, size, "")
        finally:
            self._space.end_reservation(size)

    def index_rows(self, root: str, folder: str, shards: list[int]) -> None:
        """Fetch the rows of these shards of a partly cached index."""
        if (parts := self._version(folder).layout.parts) is not None:
            get = partial(self.part_of, root, parts.name, parts.bytes, parts.pin)
            parts.fetch(root, shards, lambda start, stop: get(start, stop)[0], self._write)

    def fetch(self, root: str, name: str, size: int, path: str) -> None:
        """Copy an object of `size` bytes into a file outside the cache."""
        with replacing(Path(path)) as file:
            write = partial(write_at, file.fileno(), release=lambda size: False)
            self._copy(root, ShardEntry(name, size, 0, 0), write, 0, size, "")

    def upload(self, root: str, name: str, path: str) -> None:
        """Upload a file as an object."""
        self._store.upload(root, name, Path(path))

    def rows(self, root: str, folder: str, row: int, stop: int, needed: list[int], wait: bool) -> RemainingRows | None:
        """Download some of the rows `row` to `stop - 1` of a shard that are not cached.

        The download starts at the first `needed` row. If there is no space for all rows, only the needed ones are
        downloaded. Rows that another process is downloading are skipped, or if they are needed, awaited with `wait`.
        Returns the remaining work, or None.
        """
        cached = self._version(folder)
        absent = cached.missing(row, stop)
        if not absent:
            return None
        needed = [one for one in needed if not cached.present[one] & 1]
        first, end = self._next_rows(cached, absent, needed)
        fd = cached.open(cached.shard_of(row))
        try:
            waits = wait and bool(needed)
            with contextlib.suppress(BlockingIOError), range_lock(fd, *cached.extent(first, end), wait=waits):
                self._download_absent(root, cached, fd, first, end, [one for one in needed if one < end])
        finally:
            os.close(fd)
        if not needed and end == stop:
            return None
        rest = [one for one in needed if not first <= one < end]
        return RemainingRows((root, folder, row if needed else end, stop, rest, wait), needs_none=not rest)

    def _next_rows(self, cached: ShardCache, absent: list[tuple[int, int]], needed: list[int]) -> tuple[int, int]:
        """Return the first row to request next, and the end, from the `absent` runs of rows.

        The first row is the first `needed` one, or else the first absent one.
        """
        first = needed[0] if needed else absent[0][0]
        end = next(end for _, end in absent if first < end)
        begin_byte, end_byte = cached.extent(first, end)
        if end_byte - begin_byte <= self.pace.request_bytes:
            return first, end
        after = cached.layout.row_from(cached.shard_of(first), begin_byte + self.pace.request_bytes + 1)
        return first, max(first + 1, min(after, end) - 1)

    def forget(self, folder: str) -> None:
        """Close the versions in a folder that is about to be removed or rewritten."""
        with self._lock:
            for version in [version for version in self._cached if Path(version).is_relative_to(folder)]:
                del self._cached[version]

    def size_of(self, root: str, folder: str, row: int, stop: int, *_: Any) -> int:
        """Return the number of bytes of a request for rows."""
        begin_byte, end_byte = self._version(folder).extent(row, stop)
        return end_byte - begin_byte

    def _download_absent(self, root: str, cached: ShardCache, fd: int, row: int, stop: int, needed: list[int]) -> None:
        """Download rows under the caller's lock.

        Rows that another process downloaded in the meantime are skipped.
        """
        only_needed = list[tuple[int, int]]()  # runs of needed rows, where there is no space for all
        for first, end in cached.missing(row, stop):
            begin_byte, end_byte = cached.extent(first, end)
            if self._space.try_reserve(end_byte - begin_byte):
                try:
                    self._download_reserved(root, cached, fd, first, end)
                    continue
                except RemoteError as error:
                    if not isinstance(error.__cause__, OSError):  # the error is not of the disk
                        raise
            cached.used[first:end] = NO_SPACE
            only_needed += runs(np.array([row for row in needed if first <= row < end], dtype=np.int64))
        for first, end in only_needed:
            begin_byte, end_byte = cached.extent(first, end)
            self._space.reserve(end_byte - begin_byte)
            self._download_reserved(root, cached, fd, first, end)

    def _download_reserved(self, root: str, cached: ShardCache, fd: int, row: int, stop: int) -> None:
        """Download rows whose bytes are reserved."""
        begin_byte, end_byte = cached.extent(row, stop)
        try:
            self._download(root, cached, fd, row, stop)
        except BaseException:
            punch_hole(fd, begin_byte, end_byte)  # the bytes that arrived must not occupy space
            raise
        finally:
            self._space.end_reservation(end_byte - begin_byte)

    def _download(self, root: str, cached: ShardCache, fd: int, row: int, stop: int) -> None:
        """Download rows of one shard into its file `fd`."""
        begin_byte, end_byte = cached.extent(row, stop)
        shard = cached.shard_of(row)
        entry, pin = cached.shards[shard], cached.pin(shard)
        try:
            write = partial(self._write, fd)
            version = self._copy_cached(root, cached, write, row, stop)
            version = version or self._copy(root, entry, write, begin_byte, end_byte, pin)
            matches = all(cached.layout.headers_match(shard, fd, each) for each in {row, stop - 1})
            if not matches or (version and cached.pin(shard, version) != version):
                raise ShardError(
                    f"{root}/{entry.name}: the shard was rewritten after indexing. Start again, or restore the old one",
                    reason="changed shard",
                )
        except ShardError as error:
            if error.reason == "changed shard":
                cached.note_changed(shard)
            raise
        cached.mark_present(shard, fd, row, stop)

    def _copy_cached(self, root: str, cached: ShardCache, write: Write, row: int, stop: int) -> str:
        """Copy rows of a file from another commit of the Hub.

        Returns the hash of its content, or "" if no commit has them.
        """
        if not is_hub(root):
            return ""
        entry = cached.shards[cached.shard_of(row)]
        size, content = self._store.stat(root, entry.name) or (-1, "")
        if size != entry.size:
            return ""
        return content if self._same.copy(cached, row, stop, content, write) else ""

    def _copy(self, root: str, entry: ShardEntry, write: Write, start: int, stop: int, version: str) -> str:
        """Pass bytes of a shard to `write`, and return the shard's version on the server."""
        while start < stop:
            end = min(start + self.pace.request_bytes, stop)
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
    """Serves requests in threads, and sends the results of requests with a ticket."""

    def __init__(self, downloads: Downloads, connection: Connection) -> None:
        self._downloads = downloads
        self._connection = connection
        self._queue = RequestQueue(downloads.pace, _AHEAD_THREADS)
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def put(self, urgency: int, ticket: int, kind: str, arguments: tuple[Any, ...]) -> None:
        """Add a request. Equally urgent ones are served in the order of arrival."""
        size = _result_or_error(self._downloads.size_of, arguments) if kind == "rows" else 0
        known = size if isinstance(size, int) else 0  # an error is raised again when the request is served
        self._queue.put(QueuedRequest(urgency, next(self._numbers), ticket, kind, arguments, known))

    def _serve(self) -> None:
        while True:
            request = self._queue.get()
            result = _result_or_error(getattr(self._downloads, request.kind), request.arguments)
            self._queue.done(request)
            if isinstance(result, RemainingRows):
                self._requeue(request, result)
            elif request.ticket:
                self._send(request.ticket, result)

    def _requeue(self, request: QueuedRequest, remaining: RemainingRows) -> None:
        """Requeue the remaining part of a request.

        Once the needed rows are cached, the reader gets its answer, and the remaining rows are less urgent.
        """
        if request.ticket and remaining.needs_none:
            self._send(request.ticket, None)
            self.put(Urgency.SOON, 0, request.kind, remaining.arguments)
        else:
            self._queue.put(replace(request, arguments=remaining.arguments))

    def _send(self, ticket: int, result: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._connection.send((ticket, result))


def _result_or_error(act: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return what `act` returns, or the error to send if it raises one."""
    try:
        return act(*arguments)
    except SavableError as error:
        return error
    except OSError as error:
        return RemoteError(
            f"{error.filename or 'the cache'}: {error.strerror or error}. Check the disk or SAVABLE_CACHE"
        )
    except Exception as error:
        return RemoteError(f"the download failed: {type(error).__name__}: {error}")


def serve(connection: Connection, requests: Iterator[Any], cache: str, limit: int, retry_s: float) -> None:
    """Run the process until the reader closes the connection or ends.

    If the cache cannot be used, the answer to the first request is that error.
    """
    downloads = _result_or_error(Downloads, (cache, limit, retry_s))
    served = Requests(downloads, connection) if isinstance(downloads, Downloads) else None
    for urgency, request in requests:
        if served is not None:
            served.put(urgency, *request)
        elif request[0]:
            connection.send((request[0], downloads))
            break
    os._exit(0)  # ends the threads
