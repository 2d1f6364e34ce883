"""Runs a function over many shards in child processes: scanning holds the interpreter's lock, so threads do not help.

    this process ── a shard's name ──────▶ child, one per core
                 ◀── answer: MessagePack ──

A child that dies costs the shard that it worked on; another is started for the next.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.file_format import found_at

Task: TypeAlias = str  # "package.module:function", which is called with (root, name), or (url, root, name)
Answer: TypeAlias = tuple[str, bytes | None]  # name of a shard, and the task's result for it as MessagePack


class EachShard(Protocol):
    """What gives the answers for all shards: `each_shard`, or the machines of a cluster."""

    def __call__(self, task: Task, root: Path, names: list[str], /) -> Generator[Answer, None, None]: ...


def each_shard(
    task: Task, root: Path, names: list[str], processes: int, *, url: str = ""
) -> Generator[Answer, None, None]:
    """The answers for all shards, in the order in which they come; None where the process died over the shard.

    With a `url` the shards lie there, and `root` is an empty folder to download them to, one at a time.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    workers = [_Worker(task, root, url) for _ in range(min(processes, len(names)))]
    for worker in workers:
        threading.Thread(target=worker.drive, args=(waiting, answers), daemon=True).start()
    try:
        for _ in names:
            yield answers.get()
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """A child process that does one shard at a time, and the thread here that feeds it."""

    def __init__(self, task: Task, root: Path, url: str) -> None:
        self._arguments = task, os.fspath(root), url
        self._child: ChildProcess | None = None
        self._closed = False
        self._lock = threading.Lock()

    def drive(self, waiting: queue.SimpleQueue[str], answers: queue.SimpleQueue[Answer]) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._closed:
                name = waiting.get_nowait()
                answers.put((name, self._ask(name)))

    def _ask(self, name: str) -> bytes | None:
        child = self._running()
        if child is None:
            return None
        try:
            child.connection.send(name)
            return child.connection.recv_bytes()
        except (EOFError, OSError):  # it died, or was ended by `close`
            with self._lock:
                self._child = None
            child.close()
            return None

    def _running(self) -> ChildProcess | None:
        with self._lock:
            if self._child is None and not self._closed:
                self._child = ChildProcess("savable_pipeline.data.shards.processes:serve", *self._arguments)
            return self._child

    def close(self) -> None:
        """Ends the child process, and starts no other."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()


def serve(connection: Connection, names: Iterator[str], task: Task, root: str, url: str) -> None:
    """The child: does one shard after the other."""
    for name in names:
        connection.send_bytes(msgspec.msgpack.encode(do(task, Path(root), name, url)))


def do(task: Task, root: Path, name: str, url: str = "") -> msgspec.Struct:
    """The task's result for a shard; see `each_shard`."""
    work = found_at(task)
    found: msgspec.Struct = work(url, root, name) if url else work(root, name)
    return found


@dataclass(frozen=True, slots=True)
class _Scan:
    """One shard to scan: its size is told, so that a machine which has another folder there is noticed."""

    task: Task
    root: Path
    name: str
    size: int


def each_shard_by(engine: Engine) -> EachShard:
    """`each_shard`, by the machines of an engine: the tasks read shards on storage that all of them share."""

    def each(task: Task, root: Path, names: list[str]) -> Generator[Answer, None, None]:
        root = root.absolute()
        scans = (_Scan(task, root, name, (root / name).stat().st_size) for name in names)
        with contextlib.closing(engine.each(_scanned, scans)) as finished:
            yield from ((scan.name, answer) for scan, answer in finished)

    return each


def _scanned(scan: _Scan) -> bytes:
    size = (scan.root / scan.name).stat().st_size
    if size != scan.size:
        raise OSError(f"{scan.root / scan.name} has {size} bytes, and {scan.size} where the command runs")
    return msgspec.msgpack.encode(do(scan.task, scan.root, scan.name))
