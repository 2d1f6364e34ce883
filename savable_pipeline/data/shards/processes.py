"""Has jobs done in child processes, such as shards scanned: that holds the interpreter's lock, so threads do not help.

    this process ── a job: a shard's name ─────▶ child, one per core
                 ◀── notes, then its answer ───

A child that dies costs the job that it worked on; another is started for the next.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.core.job_engine import Engine

Task: TypeAlias = Callable[[Path, str], msgspec.Struct]  # gets the folder and the name of a shard; can be pickled
J = TypeVar("J")
T = TypeVar("T")
NOTE = b"+"  # begins no MessagePack of a struct
Answer: TypeAlias = tuple[str, bytes | None]  # name of a shard, and the task's result for it as MessagePack
EachShard: TypeAlias = Callable[[Task, Path, list[str]], Generator[Answer, None, None]]
"""What gives the answers for all shards: `each_shard`, or the machines of a cluster."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """What to do for one shard, whose `size` tells a machine that has another one."""

    task: Task
    root: Path
    name: str
    size: int | None = None

    def do(self) -> bytes:
        """Return the result as MessagePack. Raises OSError."""
        if self.size is not None and (size := (self.root / self.name).stat().st_size) != self.size:
            raise OSError(f"{self.root / self.name} has {size} bytes here, and {self.size} where the command runs")
        return msgspec.msgpack.encode(self.task(self.root, self.name))


def each_shard(task: Task, root: Path, names: list[str], processes: int) -> Generator[Answer, None, None]:
    """Yield the answers for all shards as they come.

    An answer is None if the process died over the shard.
    """
    jobs = [FileJob(task, root, name) for name in names]
    with contextlib.closing(each_job(f"{__name__}:serve", (), jobs, processes)) as answers:
        yield from ((job.name, answer) for job, answer in answers)


def here_or_in_several(
    names: list[str], here: Callable[[str], T], several: Callable[[list[str]], Iterable[T]], alone_s: float
) -> Iterator[T]:
    """What `here` makes of each name; of those that are left after some seconds, what `several` processes do."""
    end = time.monotonic() + alone_s
    for done, name in enumerate(names):
        if len(names) - done > 1 and time.monotonic() > end:
            yield from several(names[done:])
            return
        yield here(name)


def each_job(
    serve: str, arguments: tuple[str, ...], jobs: Sequence[J], processes: int
) -> Generator[tuple[J, bytes | None], None, None]:
    """Each job with what `serve`, a function as of `ChildProcess`, sends about it; None where the process died over it.

    These are notes, which begin with `NOTE`, and then one answer, which does not.
    """
    waiting: queue.SimpleQueue[J] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    answers: queue.SimpleQueue[tuple[J, bytes | None]] = queue.SimpleQueue()
    children, lock, is_closed = list[ChildProcess](), threading.Lock(), False

    def start() -> ChildProcess:
        with lock:
            if not is_closed:
                children.append(ChildProcess(serve, *arguments))
                return children[-1]
        raise EOFError

    def drive() -> None:
        child = None
        with contextlib.suppress(queue.Empty):
            while not is_closed:
                job, answer = waiting.get_nowait(), None
                try:
                    child = child or start()
                    child.connection.send(job)
                    while (found := child.connection.recv_bytes()).startswith(NOTE):
                        answers.put((job, found))
                    answer = found
                except (EOFError, OSError):  # it died, or was ended below
                    child = None
                answers.put((job, answer))

    try:
        for _ in range(min(processes, len(jobs))):
            threading.Thread(target=drive, daemon=True).start()
        left = len(jobs)
        while left:
            yield (found := answers.get())
            left -= found[1] is None or not found[1].startswith(NOTE)
    finally:
        with lock:
            is_closed = True
        for child in children:
            child.kill()


def serve(connection: Connection, jobs: Iterator[FileJob]) -> None:
    """The child: does one job after the other."""
    for job in jobs:
        connection.send_bytes(job.do())


def each_shard_by(engine: Engine) -> EachShard:
    """`each_shard`, by the machines of an engine: the tasks read shards on storage that all of them share."""

    def each(task: Task, root: Path, names: list[str]) -> Generator[Answer, None, None]:
        root = root.absolute()
        jobs = (FileJob(task, root, name, (root / name).stat().st_size) for name in names)
        with contextlib.closing(engine.each(FileJob.do, jobs)) as finished:
            yield from ((job.name, answer) for job, answer in finished)

    return each
