"""Builds the index of a folder's files, scanning those that are new or changed.

The index is written shard by shard, so memory grows with the number of shards, and not with that of samples.

    tables ──▶ rows: files without a name ──▶ the index, its header first

`ScannedTables` are the tables of scanned shards, in a file until they are joined in an index:

    length u64 │ length of the rows u64 │ xxh3_64 u64 │ table without rows: MessagePack │ rows │ length …

Only names and offsets are in memory. An interrupted process leaves the file, and the next call resumes from it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.core.files import replacing, with_handles
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.shards.byte_source import opened
from savable_pipeline.data.shards.index import (
    INDEX_MAGIC,
    PER_SHARD,
    BlobIndex,
    Format,
    Header,
    ShardIndex,
    ShardTable,
    aligned,
)
from savable_pipeline.data.shards.metadata import WRITTEN
from savable_pipeline.data.shards.shard_list import ShardEntry, check_utf8
from savable_pipeline.errors import ShardError

_HEAD = struct.Struct("<QQQ")  # of a scanned table: its bytes without rows, bytes of its rows, and the hash of both
log = logging.getLogger(__name__)

FileProgress: TypeAlias = Callable[[int, int], None]  # gets the number of files done, and of all
_ALONE_S = 5.0  # seconds that one process scans alone before others start
_IN_MEMORY = 1 << 20  # bytes; more rows of a table are mapped instead of read
_LOG_EVERY_S = 10.0


def write_index(path: Path, tables: Iterable[ShardTable], form: Format | str) -> None:
    """Write the index of these shards of a format atomically, see `replace_file`.

    Instead of the format, `form` may be the name of a format whose index is a `BlobIndex`. Raises ValueError unless the
    shards are sorted by name.
    """
    kind, index = (form, BlobIndex) if isinstance(form, str) else (form.index_kind, form.index)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        rows = index.writer(lambda: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)))
        columns = Columns()
        for table in tables:
            columns.add(table.entry, *rows.add(table.rows))
        with replacing(path) as file:
            file.write(encode_index_head(columns, kind, rows.format_data()))
            rows.write(file)


class Columns:
    """Columns of an index: a name, a fault and numbers for each shard."""

    def __init__(self) -> None:
        self.names = bytearray()
        self.last = ""  # name of the last shard
        self.faults: dict[int, str] = {}
        self.numbers = [array("Q") for _ in range(PER_SHARD)]  # ends of names, sizes, samples, digests, checks, counts

    def add(self, entry: ShardEntry, rows: int, check: int) -> None:
        """Add the next shard, with this number of rows.

        Raises ValueError unless its name sorts after the previous one.
        """
        if self.numbers[0] and entry.name <= self.last:
            raise ValueError(f"the shard {entry.name} after {self.last}: an index has its shards in the order of names")
        self.last = entry.name
        self.names += entry.name.encode() + b"\0"
        if entry.fault:
            self.faults[len(self.numbers[0])] = entry.fault
        row = (len(self.names), entry.size, entry.samples, entry.digest, check, rows)
        for column, number in zip(self.numbers, row, strict=True):
            column.append(number)


def encode_index_head(columns: Columns, kind: str, format_data: bytes) -> bytes:
    """Return the bytes of an index before its rows.

    `kind` is the name of the format, and `format_data` is what the format stores about all files. The magic and the
    checksum are the first 16 bytes.
    """
    header = Header(len(columns.numbers[0]), len(columns.names), columns.faults, kind, format_data)
    encoded = msgspec.msgpack.encode(header)
    found = bytearray(len(encoded).to_bytes(8, "little") + encoded)
    found += bytes(aligned(16 + len(found)) - 16 - len(found))
    for column in columns.numbers:
        found += np.frombuffer(column, np.uint64).astype("<u8").tobytes()
    found += columns.names
    found += bytes(aligned(16 + len(found)) - 16 - len(found))
    return INDEX_MAGIC + xxh3_64_intdigest(found).to_bytes(8, "little") + found


class ScannedTables:
    """Tables in the file next to the index at `path`, by name.

    The caller must have locked the index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.scanned")
        self._file = self._path.open("a+b")
        self._offsets: dict[str, int] = {}
        self._end = 0
        self._read_unfinished()

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __contains__(self, name: object) -> bool:
        return name in self._offsets

    def add(self, table: ShardTable) -> None:
        """Write a table. The next process can use it as soon as this returns."""
        encoded, rows = msgspec.msgpack.encode(msgspec.structs.replace(table, rows=b"")), memoryview(table.rows)
        self._file.writelines(
            (_HEAD.pack(len(encoded), len(rows), xxh3_64_intdigest(rows, xxh3_64_intdigest(encoded))), encoded, rows)
        )
        self._file.flush()
        self._offsets[table.entry.name] = self._end
        self._end += _HEAD.size + len(encoded) + len(rows)

    def __getitem__(self, name: str) -> ShardTable:
        found = self._read(self._offsets[name])
        assert found is not None, name
        table, _ = found
        return table

    def __enter__(self) -> ScannedTables:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Delete the file if an index has its tables or the disk is full. Otherwise the next process reads it."""
        if kind is None or issubclass(kind, OSError):
            self._path.unlink(missing_ok=True)
        self._file.close()

    def _read_unfinished(self) -> None:
        """Find the tables of an interrupted process, and truncate an incomplete one."""
        while (found := self._read(self._end)) is not None:
            table, end = found
            self._offsets[table.entry.name] = self._end
            self._end = end
        self._file.truncate(self._end)

    def _read(self, offset: int) -> tuple[ShardTable, int] | None:
        """Return the table at an offset and the offset after it, or None if it is incomplete."""
        head = os.pread(file := self._file.fileno(), _HEAD.size, offset)
        if len(head) < _HEAD.size:
            return None
        encoded_size, rows_size, digest = _HEAD.unpack(head)
        start = offset + _HEAD.size + encoded_size
        if start + rows_size > os.fstat(file).st_size:
            return None
        encoded = os.pread(file, encoded_size, offset + _HEAD.size)
        # Large rows are mapped instead of read. The file cannot change below them, because this process has the lock.
        mapped = partial(np.memmap, self._file, np.uint8, "r", start, (rows_size,))
        rows = os.pread(file, rows_size, start) if rows_size < _IN_MEMORY else mapped().data
        if xxh3_64_intdigest(rows, xxh3_64_intdigest(encoded)) != digest:
            return None
        try:
            table = msgspec.msgpack.decode(encoded, type=ShardTable)
            return msgspec.structs.replace(table, rows=rows), start + rows_size
        except msgspec.DecodeError:  # written by another release
            return None


def file_matches_index(root: Path, index: ShardIndex, number: int, form: Format) -> bool:
    """Return whether a file is as indexed, and its index rows are valid."""
    return index.is_whole(number) and with_handles(partial(_is_unchanged, root, index, number, form))


def _is_unchanged(root: Path, index: ShardIndex, number: int, form: Format) -> bool:
    try:
        with opened(root / index.shards.names[number]) as file:
            return file.size == index.shards.sizes[number] and form.matches_index(file, index, number)
    except OSError:
        return False


def build_index(
    root: Path,
    path: Path,
    names: list[str],
    form: Format,
    *,
    tolerant: bool = False,
    processes: int | None = None,
    each: EachShard | None = None,
    progress: FileProgress = lambda done, total: None,
    for_others: bool = False,
) -> None:
    """Write the index of files at `path`, and reuse its tables that are still valid.

    `names` are the files below `root`. New and changed files are scanned by `each`, or if it is None by `processes`
    processes. With `for_others`, sidecars for other programs are written too.
    """
    for name in names:
        check_utf8(f"{root}/{name}", name)
    for stale in path.parent.glob(f"{path.name}.*.tmp"):  # remains of a killed process; this process has the lock
        stale.unlink(missing_ok=True)
    _join_interrupted(root, path, form)
    reused = _reusable(path, form, partial(_can_reuse, root, form, set(names) if tolerant else set()))
    if for_others and form.offsets_suffix and path == root / form.index_name:  # reading them wrote no offsets
        has_offsets = [name for name in reused if Path(f"{root}/{name}{form.offsets_suffix}").exists()]
        reused = {name: reused[name] for name in has_offsets}
    written = _writer_tables(root, form, [name for name in names if name not in reused])
    missing = [name for name in names if name not in reused and name not in written]
    log.info("indexing %d of %d shards in %s", len(missing), len(names), root)
    started_s = logged_s = time.monotonic()
    progress(0, len(missing))
    with ScannedTables(path) as scanned:
        for done, table in enumerate(_scan_files(root, missing, form, processes, each), 1):
            if for_others and not table.entry.fault:  # before `add`, because a resumed process skips added files
                form.write_offsets(root / table.entry.name, table)
            scanned.add(table)
            progress(done, len(missing))
            if time.monotonic() - logged_s > _LOG_EVERY_S:
                logged_s = time.monotonic()
                log.warning("indexing %s: %d of %d shards after %.0f s", root, done, len(missing), logged_s - started_s)
        _join(root, path, form, scanned, reused, written)
    indexed = {*reused, *names}
    for of_writer in (root / WRITTEN).glob("*.index") if path == root / form.index_name else ():
        if of_writer.name.removesuffix(".index") in indexed:
            of_writer.unlink(missing_ok=True)


def _join_interrupted(root: Path, path: Path, form: Format) -> None:
    with ScannedTables(path) as scanned:
        if len(scanned):
            _join(root, path, form, scanned, _reusable(path, form, form.index.is_whole), ())


def _join(
    root: Path, path: Path, form: Format, scanned: ScannedTables, reused: Mapping[str, int], written: Collection[str]
) -> None:
    """Write the index of the `scanned` files, those `reused` from the old index, and those `written` by a writer."""
    old = form.index_at(path) if reused else None

    def table_of(name: str) -> ShardTable:
        if name in scanned:
            return scanned[name]
        if name in written:
            return _index_of_writer(root, name, form).table(0)
        assert old is not None
        return old.table(reused[name])

    write_index(path, map(table_of, sorted({*scanned, *reused, *written})), form)


def _reusable(path: Path, form: Format, is_reusable: Callable[[ShardIndex, int], bool]) -> dict[str, int]:
    """Return the numbers of the reusable files in the index at `path`, by name."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        old = form.index_at(path)
        return {name: number for number, name in enumerate(old.shards.names) if is_reusable(old, number)}
    return {}


def _can_reuse(root: Path, form: Format, tolerated: set[str], old: ShardIndex, number: int) -> bool:
    """Return whether an indexed file is unchanged, or in `tolerated` with valid index rows."""
    if tolerated and old.shards.names[number] in tolerated:
        return old.is_whole(number)
    return number not in old.shards.faults and file_matches_index(root, old, number, form)


def _writer_tables(root: Path, form: Format, names: list[str]) -> set[str]:
    """Return the files that `sp.ShardWriter` finished and that are unchanged. They need no scan."""
    found = set()
    for name in names if (root / WRITTEN).is_dir() else ():
        with contextlib.suppress(OSError, ValueError, ShardError, IndexError):
            index = _index_of_writer(root, name, form)
            if index.shards.names[0] == name and file_matches_index(root, index, 0, form):
                found.add(name)
    return found


def _index_of_writer(root: Path, name: str, form: Format) -> ShardIndex:
    return form.index_at(root / WRITTEN / f"{name}.index")


def _scan_files(
    root: Path, names: list[str], form: Format, processes: int | None, each: EachShard | None
) -> Iterator[ShardTable]:
    """Yield a table for each file, from `each`, or from this process and after some seconds from several."""
    count = processes or os.cpu_count() or 1
    if each is not None:
        return _tables_of_answers(root, each(form.scan, root, names))
    if count == 1:
        return (form.scan(root, name) for name in names)

    def in_processes(remaining: list[str]) -> Iterator[ShardTable]:
        return _tables_of_answers(root, each_shard(form.scan, root, remaining, count))

    return serial_then_parallel(names, partial(form.scan, root), in_processes, _ALONE_S)


def _tables_of_answers(root: Path, answers: Generator[Answer, None, None]) -> Iterator[ShardTable]:
    with contextlib.closing(answers):
        for name, answer in answers:
            if answer is None:
                raise ShardError(f"{root / name}: the process that indexed it died, perhaps out of memory")
            yield msgspec.msgpack.decode(answer, type=ShardTable)


Task: TypeAlias = Callable[[Path, str], msgspec.Struct]  # gets the folder and the name of a shard; must be picklable
J = TypeVar("J")
T = TypeVar("T")
NOTE = b"+"  # the first byte of a note; no MessagePack of a struct starts with it
Answer: TypeAlias = tuple[str, bytes | None]  # name of a shard, and the task's result as MessagePack
EachShard: TypeAlias = Callable[[Task, Path, list[str]], Generator[Answer, None, None]]
"""Function that yields the answers for all shards: `each_shard`, or one that uses the machines of a cluster."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """Task for one shard. Its `size` detects a machine that has another file."""

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
    """Yield the answers for all shards as they arrive.

    An answer is None if the process crashed on the shard.
    """
    jobs = [FileJob(task, root, name) for name in names]
    with contextlib.closing(each_job(f"{__name__}:serve_files", (), jobs, processes)) as answers:
        yield from ((job.name, answer) for job, answer in answers)


def serial_then_parallel(
    names: list[str], serial: Callable[[str], T], parallel: Callable[[list[str]], Iterable[T]], alone_s: float
) -> Iterator[T]:
    """Yield the results of `serial`, and after `alone_s` seconds those of `parallel`.

    `serial` takes one name, and `parallel` takes all remaining names.
    """
    end = time.monotonic() + alone_s
    for done, name in enumerate(names):
        if len(names) - done > 1 and time.monotonic() > end:
            yield from parallel(names[done:])
            return
        yield serial(name)


def each_job(
    serve: str, arguments: tuple[str, ...], jobs: Sequence[J], processes: int
) -> Generator[tuple[J, bytes | None], None, None]:
    """Yield (job, answer) for each answer to a job, from several child processes.

    `serve` names a function as for `ChildProcess`.

    The answers are notes, which start with `NOTE`, and then one result, which does not. The result is None if the
    process crashed on the job.
    """
    waiting: queue.SimpleQueue[J] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    answers: queue.SimpleQueue[tuple[J, bytes | None]] = queue.SimpleQueue()
    children, lock, is_closed = list[ChildProcess](), threading.Lock(), False

    def start_child() -> ChildProcess:
        with lock:
            if not is_closed:
                children.append(ChildProcess(serve, *arguments))
                return children[-1]
        raise EOFError

    def run_jobs() -> None:
        """Run waiting jobs in one child, and start another child if it ends."""
        child = None
        with contextlib.suppress(queue.Empty):
            while not is_closed:
                job, answer = waiting.get_nowait(), None
                try:
                    child = child or start_child()
                    child.connection.send(job)
                    while (received := child.connection.recv_bytes()).startswith(NOTE):
                        answers.put((job, received))
                    answer = received
                except (EOFError, OSError):  # the child crashed, or was ended below
                    child = None
                answers.put((job, answer))

    try:
        for _ in range(min(processes, len(jobs))):
            threading.Thread(target=run_jobs, daemon=True).start()
        remaining = len(jobs)
        while remaining:
            yield (job_and_answer := answers.get())
            remaining -= job_and_answer[1] is None or not job_and_answer[1].startswith(NOTE)
    finally:
        with lock:
            is_closed = True
        for child in children:
            child.kill()


def serve_files(connection: Connection, jobs: Iterator[FileJob]) -> None:
    """Run jobs one by one, in the child process."""
    for job in jobs:
        connection.send_bytes(job.do())


def each_shard_by(engine: Engine) -> EachShard:
    """Return `each_shard` for an engine whose machines share the storage."""

    def each(task: Task, root: Path, names: list[str]) -> Generator[Answer, None, None]:
        root = root.absolute()
        jobs = (FileJob(task, root, name, (root / name).stat().st_size) for name in names)
        with contextlib.closing(engine.each(FileJob.do, jobs)) as finished:
            yield from ((job.name, answer) for job, answer in finished)

    return each
