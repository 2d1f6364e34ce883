"""Files of a conversion's source, opened once in each process.

    files ─ find_source ─▶ format, files, settings ─ open_store ─▶ rows of a store
    compressed files ─ each is decompressed by the job that writes its samples ─▶ rows of a store

If a source changes during the conversion, this is an error: each process compares its index of the files with that of
the start, and each job checks the files that it read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from savable_pipeline.core.file_heads import HEAD, compression_of
from savable_pipeline.core.files import regular_file
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.remote.lookup import RemoteFolder, cache_entry_for, check_stamp, open_protected, stamps_of
from savable_pipeline.data.remote.session import close_scratch, job_session, scratch
from savable_pipeline.data.remote.urls import list_remote
from savable_pipeline.data.shards.byte_source import FileVersion, SourceFile
from savable_pipeline.data.shards.index import Format, IndexedFiles, ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.paths import ALL, missing_error
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.data.shards.tar import tar_compression
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.csv_table import CSV
from savable_pipeline.data.stores.decompressed import DamagedError, Unpacked
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.data.stores.formats import recognize, wanted
from savable_pipeline.data.stores.jsonl import JSONL
from savable_pipeline.data.stores.kaldi import KALDI, SEGMENTS
from savable_pipeline.data.stores.opening import Source, find_source, open_store, store_of
from savable_pipeline.data.stores.record_kinds import LITDATA, MDS
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import FileNames
from savable_pipeline.data.stores.shard_files import StoreFile
from savable_pipeline.data.stores.table_store import JSON
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError, ShardError

TABLES, RECORDS = (JSONL, JSON, CSV), (MDS, LITDATA)
_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
_MAX_HEADS = 4096  # files whose first bytes are read, because compressed files may be named like plain ones
_PEEK, _CHUNK, _AHEAD = 1 << 16, 1 << 20, 64 << 20  # bytes to recognize a format, to copy at a time, and to prefetch


class RowSpan(NamedTuple):
    """Rows `start` to `end - 1` of a file.

    The rows of a source of compressed files are the files.
    """

    file: int
    start: int
    end: int
    number: int  # number of row `start` in the whole source


class PackedFile(NamedTuple):
    """A compressed file: path or URL, name in the source, size in bytes, and version."""

    path: str
    name: str
    size: int
    version: str

    @classmethod
    def of(cls, root: str, name: str) -> PackedFile:
        """Return the file with its current version."""
        if "://" not in root:
            stat = os.stat(Path(root, name))  # noqa: PTH116  # there may be many
            return cls(str(Path(root, name)), name, stat.st_size, repr(FileVersion.of(stat)))
        size, version = stamps_of(root, [name], job_session())[name]
        return cls(f"{root}/{name}", name, size, version)


def find_files(files: str | os.PathLike[str], format: str | None = None) -> SourceFiles:
    """Recognize the format of a source, and return its files.

    Raises ValueError if they cannot be read or could be of several formats, and `RemoteError`.
    """
    address = os.fspath(files)
    if isinstance(files, Path) and ":/" in address and "://" not in address and not files.exists():
        raise ValueError(f"{files}: a Path cannot hold a URL. Pass it as a str")
    try:
        absolute = os.path.abspath(address) if os.path.exists(address) else address  # noqa: PTH100, PTH110  # for others
        found = find_source(absolute, format=format or "")
        form, listed = found.format, found.listed if found.session is None else list_remote(found.files, found.session)
        root, names = ("", []) if listed is None else (str(listed.root), [*listed.names])
        if found.listed is not None and not names:
            raise ValueError(f"{files} has no samples. Check the folder")
        exact = () if found.listed is None else found.listed.exact
        if missing := next((path for name in exact if not (path := Path(root, name)).exists()), None):
            raise missing_error(missing)
        if form == FOLDER and not Path(absolute).is_dir():
            raise ValueError(f"{files}: raw files are read as one folder. Name it, or pass the format")
        if form == KALDI and any(posixpath.basename(name) == SEGMENTS for name in names):
            raise ValueError(f"{files}: conversions cut no recordings, as segments asks. Read it in place by sp.read")
        if form == TARS or form in TABLES:
            plain, packed = [*filter(form.has, names)], [*filter((JSONL if form == JSON else form).packs, names)]
            if plain and listed is not None and listed.whole:
                packed = []  # reading skips compressed files beside others, with a warning
            inspected = plain[:_MAX_HEADS] if found.session is None or len(plain) == 1 else []
            if packed or any(_compression(name, _head(found, root, name)) for name in inspected):
                return _packed_source(address, found, root, sorted([*plain, *packed]))
            if not plain:  # no plain file is known: there is only an index, or nothing
                open_store(found, inspect=True)
        return SourceFiles(address, found, found.format)
    except DamagedError as error:
        raise ValueError(f"{files}: damaged: {error}") from error
    except ShardError as error:
        raise ValueError(str(error)) from error


def _compression(path: str, head: bytes) -> str:
    """Return the suffix of a file's compression, such as ".gz", or "" if it is not compressed.

    For a tar, the first bytes decide. For other files, the name does, and then the first bytes.
    """
    path = path.lower()
    by_name = next((ending for ending in _ENDINGS if path.endswith(ending)), ".gz" if path.endswith(".tgz") else "")
    if path.endswith((*TARS.suffixes, *TARS.packed)):
        by_head = tar_compression(head)
        return by_name if by_head is None else by_head
    return by_name or compression_of(head)


def _head(found: Source, root: str, name: str) -> bytes:
    """Return the first bytes of a file, or b"" if it cannot be read."""
    if found.session is not None:
        return found.session.heads(root, {name: HEAD}).get(name, b"")
    with contextlib.suppress(OSError), open_file(f"{root}/{name}") as file:
        return file.read(HEAD)
    return b""


def _packed_source(address: str, found: Source, root: str, files: list[str]) -> SourceFiles:
    """Return the source of `files`, which are compressed, or partly plain."""
    form = found.format
    if form != TARS:  # only the first bytes tell a list of JSON from lines
        packed_names = {_plain_name(name): name for name in files}
        plain_names, heads = FileNames(packed_names), {}
        for name in wanted(plain_names):
            with open_content(f"{root}/{packed_names[name]}") as file:
                heads[name] = file.read(_PEEK)
        form = recognize(plain_names, heads).format
    return SourceFiles(address, found, form, tuple(PackedFile.of(root, name) for name in files))


def _plain_name(name: str) -> str:
    """Return a name without the suffix of its compression."""
    return next((name[: -len(ending)] for ending in _ENDINGS if name.lower().endswith(ending)), name)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file or a URL at its start.

    Raises OSError for a file, and `ShardError` or `RemoteError` for a URL.
    """
    if "://" not in path:
        with open(path, "rb", opener=regular_file) as file:
            yield file
        return
    content = StoreFile(CachedBlocks(cache_entry_for(path, job_session())[0], all_used=True), 0)
    with io.BufferedReader(SourceFile(content, _AHEAD), _CHUNK) as remote:
        yield remote


@contextlib.contextmanager
def open_content(path: str, line_bytes: int | None = None) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is compressed.

    Raises `DamagedError` while it is read, also for a line of more than `line_bytes`, and the errors of `open_file`.
    """
    with open_file(path) as file:
        kind = _compression(path, file.peek(HEAD)[:HEAD])
        yield io.BufferedReader(Unpacked(file, kind[1:], line_bytes), _CHUNK) if kind else file


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of a source and the settings of their store.

    It is picklable, and each process opens the files once.
    """

    path: str  # as a user named it
    found: Source
    form: Format
    packed: tuple[PackedFile, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    files_from: str = ""  # real path of the folder of files that rows of columns name
    newest_ns: int = 0  # time of the start; a file in `files_from` that was written later is an error
    digest: str = ""  # digest of the index at the start; "" before it
    written_ns: int = 0  # time of the last write to a local file before the start
    files: tuple[RemoteFile, ...] = ()  # remote files of one range, for another machine
    index: str = ""  # path of the index of raw files
    name: str = ""  # name of the only file, if it differs from that in the index
    prefix: str = ""  # prefix of keys that are row numbers

    @property
    def words(self) -> str:
        """Return the format in words, for a message."""
        return f"format {self.form.name}{', compressed' if self.packed else ''}"

    def dataset(self) -> Dataset:
        """Return the samples.

        Raises `SavableError` if the source differs from that of the start.
        """
        identity = self.digest, self.files
        if not self.digest or _open[:1] != [identity]:
            close_open_source()
            with contextlib.ExitStack() as stack:
                try:
                    dataset = _dataset_of_files(self, stack) if self.files else Dataset(self._store())
                except ShardError as error:
                    if not self.digest:
                        raise
                    raise changed(str(self.found.files), str(error)) from error
                if self.digest and not self.files and self.digest != index_digest(self, dataset):
                    raise changed(
                        str(self.found.files), "its files, or the samples in them, differ from those at the start"
                    )
                _open[:] = identity, dataset, stack.pop_all()
        return cast("Dataset", _open[1])

    def _store(self) -> RecordStore:
        settings = dict(self.settings)
        if self.form == FOLDER:
            store = self._store_of_folder(settings)
        else:
            store = open_store(self.found, inspect=True, tolerant=self.form in TABLES, **settings)
        if not sum(ShardList.of(store.entries).samples):
            raise EmptySourceError(store)
        return store

    def _store_of_folder(self, settings: dict[str, Any]) -> RecordStore:
        """Open the store of raw files, with an index in the work folder. Nothing is written next to the files."""
        form, root, index = self.form.for_settings(settings), Path(str(self.found.files)), Path(self.index)
        with contextlib.ExitStack() as stack:
            if not index.exists():
                if not index.parent.exists():  # on a machine that does not see the work folder
                    index = Path(stack.enter_context(tempfile.TemporaryDirectory()), "index")
                write_index(index, [form.scan(root, ALL)], form)
            return store_of(IndexedFiles(form, form.index_at(index), index, None, root, tolerant=True), **settings)

    def at_start(self) -> SourceFiles:
        """Index the files at the start, and return the source with the index's digest."""
        if self.packed:
            return replace(self, digest=hashlib.sha256(repr(self.packed).encode()).hexdigest())
        close_open_source()
        if self.index:  # the index of an earlier run
            Path(self.index).unlink(missing_ok=True)
        elif self.form in TABLES and not self.is_remote:  # otherwise the old index of a changed file is used
            index_files(self.found.listed or self.found.files, self.form, near=False)
        dataset = self.dataset()
        names = () if self.is_remote or self.form == FOLDER else dataset.entries.names
        times = (os.stat(Path(dataset.address, name)).st_mtime_ns for name in names)  # noqa: PTH116  # there may be many
        indexed = replace(self, digest=index_digest(self, dataset), written_ns=max(times, default=0))
        _open[0] = indexed.digest, indexed.files
        return indexed

    @property
    def is_remote(self) -> bool:
        """Return whether the files are remote."""
        return self.found.session is not None

    def check(self, file: int) -> None:
        """Raise `SavableError` if local file number `file` was written after the start.

        Remote and raw files are checked when they are read.
        """
        if self.written_ns:
            dataset = self.dataset()
            path, size = Path(dataset.address, dataset.entries.names[file]), int(dataset.entries.sizes[file])
            stat = path.stat()
            if stat.st_size != size or stat.st_mtime_ns > self.written_ns:
                raise changed(path, f"{size} bytes at the start, {stat.st_size} now, written since")

    def for_machine(self, spans: tuple[RowSpan, ...]) -> tuple[SourceFiles, tuple[RowSpan, ...]]:
        """Return the source and the spans of these rows as another machine needs them.

        For remote files, the source has their rows of the index, so that the machine does not index them again.
        """
        if not self.is_remote or self.packed:
            return self, spans
        dataset = self.dataset()
        numbers = sorted({span.file for span in spans})
        names = [dataset.entries.names[number] for number in numbers]
        stamps = stamps_of(dataset.store.address, names, job_session())
        table: Any = dataset.store.table  # type: ignore[attr-defined]  # all stores of files have it
        files = tuple(
            RemoteFile(dataset.store.address, name, stamps[name][1], msgspec.msgpack.encode(table(number)))
            for name, number in zip(names, numbers, strict=True)
        )
        return replace(self, files=files), tuple(span._replace(file=numbers.index(span.file)) for span in spans)

    @contextlib.contextmanager
    def unpacked(self, number: int, folder: Path) -> Iterator[tuple[SourceFiles, str]]:
        """Decompress file `number` into a folder. Yield its source and an error message.

        The message is "" if the file could be read to its end. The folder is removed at the end.

        Raises `SavableError` if the file changed.
        """
        packed = self.packed[number]
        base, fault = posixpath.basename(_plain_name(packed.name)), ""
        plain = folder / (base if base.endswith(self.form.suffixes) else base + self.form.suffixes[0])
        line_bytes = self.settings.get("unpacked_bytes") if self.form in TABLES else None
        try:
            with open_content(packed.path, line_bytes) as content, plain.open("wb") as file:
                shutil.copyfileobj(content, file, _CHUNK)
        except ValueError as error:
            fault = str(error)
        if PackedFile.of(packed.path.removesuffix(f"/{packed.name}"), packed.name) != packed:
            raise changed(packed.path, "another file than at the start")
        settings = {name: value for name, value in self.settings.items() if name in self.form.settings}
        if self.form in TABLES and "files_from" not in settings:
            settings["files_from"] = "" if "://" in packed.path else os.path.dirname(packed.path)  # noqa: PTH120
        found = find_source(str(plain), format=self.form.name)
        prefix = f"{_plain_name(packed.name).partition('.')[0]}/" if len(self.packed) > 1 else ""
        try:
            yield SourceFiles(str(plain), found, self.form, settings=settings, name=packed.name, prefix=prefix), fault
        finally:
            close_open_source()
            shutil.rmtree(folder)


class RemoteFile(NamedTuple):
    """Folder, name, version and index rows of a remote file, for another machine."""

    url: str
    name: str
    stamp: str
    table: bytes  # a `ShardTable`, as MessagePack


_open: list[Any] = []  # empty, or (digest, files) of the source open in this process, its dataset and its `ExitStack`


def close_open_source() -> None:
    """Close the source that this process has open."""
    if _open:
        _, _, stack = _open
        _open.clear()
        stack.close()


def close_all() -> None:
    """Close all that this process opened or downloaded for conversions."""
    close_open_source()
    close_scratch()


class EmptySourceError(Exception):
    """Error: a source has no sample. The argument is its store."""


def _dataset_of_files(source: SourceFiles, stack: contextlib.ExitStack) -> Dataset:
    """Return the dataset of the `files` of a source, by their index rows. Raises `ShardError` for a replaced file."""
    folder, session = stack.enter_context(scratch())
    url, form = source.files[0].url, source.form.for_settings(dict(source.settings))
    stamps = stamps_of(url, [file.name for file in source.files], session)
    for file in source.files:
        check_stamp(f"{url}/{file.name}", file.stamp, stamps[file.name][1])
    write_index(
        folder / "version/index", [msgspec.msgpack.decode(f.table, type=ShardTable) for f in source.files], form
    )
    remote = RemoteFolder(url, open_protected(folder / "version"), session)
    indexed = IndexedFiles(form, remote.index, remote.index_path, None, folder, remote, tolerant=True)
    return Dataset(store_of(indexed, inspect=True, **source.settings))


def index_digest(source: SourceFiles, dataset: Dataset) -> str:
    """Return a hash of the index rows of the files.

    For raw files, it also covers the times of their last writes.
    """
    store: Any = dataset.store
    return hashlib.sha256(dataset.digest() + (bytes(store.table.times) if source.form == FOLDER else b"")).hexdigest()


def sizes_digest(source: SourceFiles) -> str:
    """Return a hash of the names and the sizes of all files."""
    if source.packed:
        return _digest([(file.name, file.size) for file in source.packed])
    store: Any = source.dataset().store
    if source.form == FOLDER:
        return _digest([bytes(store.table.names), bytes(store.table.sizes)])
    return _digest([list(store.entries.names), store.entries.sizes.tolist()])


def _digest(rows: Any) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(rows)).hexdigest()


def versions_of(source: SourceFiles) -> tuple[str, str, int]:
    """Return hashes of the source's path and of its files' versions, and a time.

    The time is that of the last change to a file, in ns. For remote files, the path's hash is "" and the time is 0,
    because their versions cover every change.
    """
    store: Any = None if source.packed else source.dataset().store
    if source.is_remote:
        stamps = {} if store is None else stamps_of(store.address, [*store.entries.names], job_session())
        versions = [file.version for file in source.packed]
        return "", _digest(versions or [stamps[name][1] for name in store.entries.names]), 0
    paths: Iterable[str] = (file.path for file in source.packed)
    if store is not None:
        names = (
            itertools.chain(store.table.files, store.table.folders) if source.form == FOLDER else store.entries.names
        )
        paths = (f"{store.root}/{name}" for name in names)
    digest, newest_ns = hashlib.sha256(), 0
    for path in paths:
        version = FileVersion.of(os.stat(path))  # noqa: PTH116  # there may be many
        digest.update(version.written_ns.to_bytes(8, "little", signed=True))
        newest_ns = max(newest_ns, version.newest_ns)
    real = Path(source.path).resolve()
    root = f"{real}\0{real.stat().st_ino}" if real.exists() else ""
    return hashlib.sha256(root.encode("utf-8", "surrogateescape")).hexdigest()[:16], digest.hexdigest(), newest_ns


def changed(path: Path | str, fault: str) -> SavableError:
    """Return the error for a source that changed since the conversion started."""
    return SavableError(
        f"{path}: {fault}: it changed during the conversion. Do not change the input, and convert into another folder"
    )
