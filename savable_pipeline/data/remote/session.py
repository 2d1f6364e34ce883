"""`Session`: requests to servers while a dataset is opened, each sent once.

    listing("s3://b/p")              every object below it: one listing of a bucket, or of the Hub
    stat("s3://b/p", "index.json")   answered from that listing; for a web server, which cannot be listed, by a request
    heads("s3://b/p", {…})           the first bytes of several objects, requested together

    Downloader    starts the downloading process of a cache, and sends it requests with their urgency
    Bucket        the objects below a URL of s3, gs or az: listed, read whole, written and removed

A job on another machine has a cache of its own (`scratch`). Objects that it reads for another machine are downloaded
there and dropped with it. Its results come with the server's version (ETag), so the caller can pin what was read.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.core.files import retry_s
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.shards.paths import NO_SUCH_PATH, head_size
from savable_pipeline.errors import RemoteError, ShardError

log = logging.getLogger(__name__)

T = TypeVar("T")
BUCKET_SCHEMES = ("s3", "gs", "az")
_LEAST_PATIENCE_S = 1.0  # least time to wait for a process that may be suspended
_POLL_S = 0.5  # time between two checks of such a process
_MOST_DEATHS = 3  # deaths of the downloading process during one request, after which the request fails
_running: WeakValueDictionary[tuple[int, Path, int], Downloader] = WeakValueDictionary()  # by process, cache and limit
# Sessions by process ID, because a session that a fork inherited answers only its owner.
_job_sessions: dict[int, Session] = {}
_bucket_sessions: dict[int, Session] = {}


class Urgency(IntEnum):
    """Order in which requests are served, lower numbers first."""

    NOW = 0  # a reader waits for it
    SOON = 1  # the sample was passed to the next stage
    LATER = 2  # the sample was requested in advance


class Downloader:
    """Downloading process of this process. It ends with `close` or with this process.

    Requests name a method of `download_process.Downloads`. Raises `RemoteError` if obstore is not installed.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        if importlib.util.find_spec("obstore") is None:  # finds the package without importing it
            raise RemoteError("remote shards need obstore. Run `pip install obstore`")
        self.ended = self._was_stopped = False
        self._ticket = 0
        self._answers: dict[int, Any] = {}
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._child = ChildProcess("savable_pipeline.data.remote.download_process:serve", str(cache), limit, retry_s())
        self._patience_s = max(retry_s(), _LEAST_PATIENCE_S)
        self._child.bound_waits(self._patience_s)
        self.owner, self.pid = self._child.owner, self._child.process.pid

    def prefetch(self, urgency: Urgency, kind: str, *arguments: Any) -> None:
        """Send a request without waiting.

        If it fails, the call that needs its result raises the error.
        """
        self._send(urgency, (0, kind, arguments))

    def submit(self, kind: str, *arguments: Any) -> int:
        """Send an urgent request, and return its ticket for `result`."""
        with self._sending:
            self._ticket += 1
            ticket = self._ticket
        self._send(Urgency.NOW, (ticket, kind, arguments))
        return ticket

    def result(self, ticket: int) -> Any:
        """Wait for the result of a submitted request.

        Raises `ShardError` or `RemoteError`.
        """
        with self._receiving:
            while ticket not in self._answers:
                answered, answer = self._receive()
                self._answers[answered] = answer
            answer = self._answers.pop(ticket)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> Any:
        try:
            self._wait_for_answer()
            return self._child.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death_error() from error

    def _wait_for_answer(self) -> None:
        """Wait for an answer.

        If the process is suspended for longer than requests are retried, it is killed.
        """
        poll, stopped_s = select.poll(), 0.0
        poll.register(self._child.connection.fileno(), select.POLLIN)
        while not poll.poll(_POLL_S * 1000):
            stopped_s = stopped_s + _POLL_S if self._child.is_stopped() else 0.0
            if stopped_s >= self._patience_s:
                self._was_stopped = True
                self._child.kill()

    def _send(self, urgency: Urgency, request: Any) -> None:
        with self._sending:
            try:
                self._child.connection.send((int(urgency), request))
            except OSError as error:
                raise self._death_error() from error

    def _death_error(self) -> RemoteError:
        self._was_stopped = self._was_stopped or self._child.is_stopped()
        self.ended = True
        self._child.kill()  # a process that was suspended during a message is still running
        stopped = f", since it had been stopped for {self._patience_s:g} s" if self._was_stopped else ""
        return RemoteError(f"the process that downloads shards ended with code {self._child.process.wait()}{stopped}")

    def close(self) -> None:
        """End the process. In a fork of its owner, only close the inherited connection."""
        if os.getpid() != self.owner:
            self._child.close()
            return
        self.ended = True
        # killed first, so that a thread that waits for an answer stops before the descriptor is reused
        self._child.kill()
        with self._receiving, self._sending:
            self._child.close()


class Session:
    """Sends requests by the downloading process of a cache folder.

    `limit` is the cache's, in bytes. All sessions of the cache in this process share the downloading process. It is
    replaced if it dies, and ends with the last session that used it. In a fork, a session starts one of its own.
    """

    def __init__(self, cache: Path, limit: int) -> None:
        self.cache, self.limit = cache, limit
        self._downloader: Downloader | None = None
        self.forget()

    def __reduce__(self) -> tuple[type[Session], tuple[Path, int]]:
        return Session, (self.cache, self.limit)

    @classmethod
    def of(cls, cache: str | os.PathLike[str] | None = None, cache_size: int | None = None) -> Session:
        """Return the session of a cache that a user names, or of the default one.

        Raises `RemoteError`, ValueError.
        """
        folder = cache_folder(cache)
        return cls(folder, cache_bytes(cache_size, folder))

    def forget(self) -> None:
        """Forget the answers of servers. The next opening asks again."""
        self._listings: dict[str, Listing] = {}
        self._stats: dict[tuple[str, str], tuple[int, str] | None] = {}
        self._contents: dict[tuple[str, str, int], bytes] = {}
        self._once_results: dict[Hashable, Any] = {}  # results of `once`, by question

    def once(self, question: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of `compute` for this question, computed once until `forget`.

        A question is any value that identifies the result, such as the paths and the format of a dataset.
        """
        if question not in self._once_results:
            self._once_results[question] = compute()
        found: T = self._once_results[question]
        return found

    def connected(self) -> Downloader:
        """Return a living downloading process.

        Raises `RemoteError` without obstore.
        """
        found = self._downloader
        if found is None or found.ended or found.owner != os.getpid():
            key = os.getpid(), self.cache, self.limit
            found = _running.get(key)
            if found is None or found.ended:
                found = _running[key] = Downloader(self.cache, self.limit)
            self._downloader = found
        return found

    def call(self, kind: str, *arguments: Any) -> Any:
        """Return the answer to a request. `kind` is the name of a method of `Downloads`.

        Raises `ShardError`, `RemoteError`.
        """
        return self.each(kind, [arguments])[0]

    def each(self, kind: str, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the answers to several requests of a kind, sent at the same time.

        A downloading process that dies is replaced, at most `_MOST_DEATHS` times.
        """
        for deaths in range(1, _MOST_DEATHS + 2):
            downloader = self.connected()
            try:
                tickets = [downloader.submit(kind, *arguments) for arguments in requests]
                return [downloader.result(ticket) for ticket in tickets]
            except RemoteError as error:
                if not downloader.ended or deaths > _MOST_DEATHS:
                    raise
                log.warning("%s: replaced, %d of %d", error, deaths, _MOST_DEATHS)
        raise AssertionError

    def prefetch(self, urgency: Urgency, kind: str, *arguments: Any) -> None:
        """Send a request without waiting for its answer.

        If the process has died, the next caller that waits starts another.
        """
        downloader = self.connected()
        try:
            downloader.prefetch(urgency, kind, *arguments)
        except RemoteError:
            if not downloader.ended:
                raise

    def listing(self, root: str) -> Listing:
        """Return every object below `root`, which must not be on a web server."""
        if root not in self._listings:
            self._listings[root] = self.call("listing", root)
        return self._listings[root]

    def stat(self, root: str, name: str) -> tuple[int, str] | None:
        """Return size and stamp of an object, or None if there is none."""
        return self.stats(root, [name]).get(name)

    def stats(self, root: str, names: Iterable[str], *, needed: bool = False) -> dict[str, tuple[int, str]]:
        """Return size and stamp of the existing objects among `names`, by name.

        They come from a listing, or from requests. Raises `ShardError` for a missing object if the objects are
        `needed`.
        """
        names = [*names]
        listed = next((each for each in self._listings if f"{root}/".startswith(f"{each}/")), None)
        if listed is not None:
            prefix = f"{root}/"[len(listed) + 1 :]
            found = {name: self._listings[listed].find(prefix + name) for name in names}
        else:
            requested = [name for name in names if self._stats.get((root, name)) is None]
            if not needed:
                requested = [name for name in requested if (root, name) not in self._stats]
            answers = self.each("stat", [(root, name, needed) for name in requested])
            self._stats |= {(root, name): answer for name, answer in zip(requested, answers, strict=True)}
            found = {name: self._stats[root, name] for name in names}
        missing = next((name for name in names if found[name] is None), None)
        if needed and missing is not None:
            raise ShardError(f"{root}/{missing}: no such object on the server", reason=NO_SUCH_PATH)
        return {name: stat for name, stat in found.items() if stat is not None}

    def heads(self, root: str, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the first bytes of objects by name, at most `max_bytes[name]` of each.

        Objects that do not exist are skipped.
        """
        stats = self.stats(root, max_bytes)
        sizes = {name: head_size(f"{root}/{name}", stat[0], max_bytes[name]) for name, stat in stats.items()}
        requested = [name for name, size in sizes.items() if size and (root, name, size) not in self._contents]
        parts = self.each("part", [(root, name, stats[name][0], 0, sizes[name]) for name in requested])
        self._contents |= {(root, name, sizes[name]): bytes(part) for name, part in zip(requested, parts, strict=True)}
        return {name: self._contents[root, name, size] if size else b"" for name, size in sizes.items()}


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Path, Session]]:
    """Yield a temporary folder, and a session that downloads into it.

    All these folders of a process share one downloading process.
    """
    session = job_session()
    with tempfile.TemporaryDirectory(dir=session.cache, ignore_cleanup_errors=True) as name:
        try:
            yield Path(name), session
        finally:
            with contextlib.suppress(RemoteError):  # the process may have died
                session.call("forget", name)


def job_session() -> Session:
    """Return a session for the jobs of this process."""
    found = _open_job_session()
    return Session(found.cache, found.limit)


def close_scratch() -> None:
    """End the downloading process of this process's jobs, and remove its folder."""
    if (session := _job_sessions.pop(os.getpid(), None)) is not None:
        session.connected().close()
        shutil.rmtree(session.cache, ignore_errors=True)


def _open_job_session() -> Session:
    found = _job_sessions.get(os.getpid())
    if found is None or not found.cache.is_dir():
        close_scratch()  # ends the process of a session whose folder was deleted, if any
        root = Path(tempfile.mkdtemp(prefix="savable-"))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        found = _job_sessions[os.getpid()] = Session(root, cache_bytes(None, root))
        found.connected()  # starts the downloading process, which all sessions of this folder share
    return found


class BucketObject(NamedTuple):
    """Object below the bucket's URL.

    `size` is in bytes, and `written_ns` in nanoseconds since 1970.
    """

    name: str
    size: int
    written_ns: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Objects below a URL, such as `s3://bucket/some/folder`.

    Methods raise `RemoteError`. An object is written as a whole. Until its last byte has arrived, readers get the
    previous object, or none. If a process is killed while it writes a large one, invisible parts remain, which the
    bucket's own rules remove.
    """

    url: str

    def listing(self) -> list[BucketObject]:
        """Return all objects."""
        return [BucketObject(*found) for found in _session().call("dated", self.url)]

    def fetch(self, objects: list[BucketObject], folder: Path) -> None:
        """Copy objects into a folder, under their names."""
        for each in objects:
            (folder / each.name).parent.mkdir(parents=True, exist_ok=True)
        _session().each("fetch", [(self.url, each.name, each.size, str(folder / each.name)) for each in objects])

    def upload(self, name: str, path: Path) -> None:
        """Upload a file as the object `name`."""
        _session().call("upload", self.url, name, str(path))

    def rename(self, name: str, new: str) -> None:
        """Rename an object. It replaces an object that has the new name."""
        _session().call("rename", self.url, name, new)

    def erase(self, names: list[str]) -> None:
        """Remove objects."""
        _session().call("erase", self.url, names)


def close_buckets() -> None:
    """End the downloading process of this process's buckets."""
    if (session := _bucket_sessions.pop(os.getpid(), None)) is not None:
        session.connected().close()


def _session() -> Session:
    return _bucket_sessions.setdefault(os.getpid(), Session(cache_folder(None), 0))
