"""Work on many shards in other processes: scanning holds the interpreter's lock, so that threads do not help.

    this process ── a shard's name, a line of JSON ──▶ child, one a core, on its standard input
                 ◀── length u64 │ MessagePack ─────── its answer

The children are plain subprocesses: they need no guarded main module, and begin from a trainer with threads or CUDA
as well. One that dies costs the shard that it was at; those of a process that was killed see their input end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec

from savable_pipeline.scan import scan

Task: TypeAlias = Literal["scan", "check"]
Answer: TypeAlias = tuple[str, bytes | None]  # name of a shard, and MessagePack of what the task gives of it
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from savable_pipeline import shard_jobs as jobs; "
_STOP: Any = object()


def do(task: Task, root: Path, name: str, url: str = "") -> msgspec.Struct:
    """What `task` gives of a shard: a `ShardTable` or a `ShardReport`; see `each_shard`."""
    if task == "scan":
        return scan(root, name)
    from savable_pipeline.check_shard import check_remote_shard, check_shard

    return check_remote_shard(url, root, name) if url else check_shard(root, name)


def each_shard(
    task: Task, root: Path, names: list[str], processes: int, *, url: str = ""
) -> Generator[Answer, None, None]:
    """The answers for all shards, in the order in which they come; None where the process died over the shard.

    With a `url` the shards lie there, and `root` is an empty folder to bring them to, one at a time.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    children = [_Child(task, root, url) for _ in range(min(processes, len(names)))]
    for child in children:
        threading.Thread(target=child.drive, args=(waiting, answers), daemon=True).start()
    try:
        for _ in names:
            yield answers.get()
    finally:
        for child in children:
            child.close()


class _Child:
    """A process that does one shard at a time, and the thread here that feeds it."""

    def __init__(self, task: Task, root: Path, url: str) -> None:
        self._command = [sys.executable, "-c", f"{_CHILD}jobs.serve(*sys.argv[2:])"]
        self._command += [json.dumps(sys.path), task, os.fspath(root), url]
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def drive(self, waiting: queue.SimpleQueue[str], answers: queue.SimpleQueue[Answer]) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._closed:
                name = waiting.get_nowait()
                answers.put((name, self._ask(name)))

    def _ask(self, name: str) -> bytes | None:
        process = self._running()
        if process is None or process.stdin is None or process.stdout is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps(name).encode() + b"\n")
            process.stdin.flush()
            length = int.from_bytes(process.stdout.read(8), "little")
            answer = process.stdout.read(length)
            if length and len(answer) == length:
                return answer
        self._end()  # it died; the next shard is for another
        return None

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._process is None and not self._closed:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True)
            return self._process

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the process, and begin no other."""
        self._closed = True
        self._end()


def serve(task: Task, root: str, url: str) -> None:
    """What a child runs: do one shard after the other, until the input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed goes with the errors
    for line in sys.stdin.buffer:
        body = msgspec.msgpack.encode(do(task, Path(root), json.loads(line), url))
        answers.write(len(body).to_bytes(8, "little") + body)
        answers.flush()
