"""Files of a conversion's source, of one kind, opened once in each process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.remote.lookup import RemoteFolder, check_stamp, held, place_of_object, stamps_of
from savable_pipeline.data.remote.session import close_scratch, job_session, scratch
from savable_pipeline.data.shards.index import IndexedFiles, ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.paths import ALL
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.opening import open_store, store_of
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.shard_files import StoreFile
from savable_pipeline.errors import SavableError

TABLE_KINDS = ("jsonl", "json", "csv")  # whose rows may name files
COLUMN_KINDS = ("parquet", "arrow", "hf", "hub")  # whose rows may name files without their bytes
RECORD_KINDS = ("mds", "litdata")
_FORMATS = {"hf": "arrow", "hub": "parquet", "tars": "tar"}
Settings: TypeAlias = tuple[tuple[str, Any], ...]


class RowSpan(NamedTuple):
    """Rows `start` to `end - 1` of a file, of which the first has this number in the source."""

    file: int
    start: int
    end: int
    number: int


class RemoteFile(NamedTuple):
    """Name, version and index of a remote file, for a machine without the index of all files."""

    name: str
    stamp: str
    table: bytes  # a `ShardTable`, as MessagePack


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of one kind and the settings of their store; picklable, opened once in each process."""

    path: str  # of a file or a folder, or a URL
    kind: str
    settings: Settings = ()
    name: str = ""  # of a table, in rejects
    files_from: str = ""  # the folder of the files that rows of columns name, a real path
    newest_ns: int = 0  # no file that rows name was written after this
    index: str = ""  # the path of the index of raw files, so that nothing is written into their folder
    digest: str = ""  # of the files by their index, with their versions
    written_ns: int = 0  # when a file on a disk was written last
    packed: tuple[tuple[str, int, int], ...] = ()  # compressed tars: name, bytes, time
    files: tuple[RemoteFile, ...] = ()  # those of one range

    def dataset(self) -> Dataset:
        """Samples of the source. Raises `SavableError` if it differs from the planned one."""
        if _open[:1] != [self]:
            close_source()
            with contextlib.ExitStack() as stack:
                dataset = _dataset_of_files(self, stack) if self.files else self._open(stack)
                _open[:] = self, dataset, stack.pop_all()
        return cast("Dataset", _open[1])

    def _open(self, stack: contextlib.ExitStack) -> Dataset:
        dataset = _opened(self, stack)
        if self.digest and self.digest != source_digest(dataset, self.path):
            raise changed(self.path, "its files, or the samples in them, differ from those at the start")
        return dataset

    def planned(self) -> SourceFiles:
        """The source with the digest of its files now."""
        if self.packed:
            return replace(self, digest=hashlib.sha256(repr(self.packed).encode()).hexdigest())
        close_source()
        dataset = self.dataset()
        written_ns = 0 if "://" in self.path else max(times_of(dataset), default=0)
        return replace(self, digest=source_digest(dataset, self.path), written_ns=written_ns)

    def check(self, file: int) -> None:
        """Raise `SavableError` if a file on a disk was written since. (Others are checked when they are read.)"""
        dataset = self.dataset() if self.written_ns and self.kind != "folder" else None
        if dataset is not None:
            path, size = Path(dataset.address, dataset.entries.names[file]), int(dataset.entries.sizes[file])
            stat = path.stat()
            if stat.st_size != size or stat.st_mtime_ns > self.written_ns:
                raise changed(path, f"{size} bytes at the start, {stat.st_size} now, written since")

    def for_machine(self, spans: tuple[RowSpan, ...]) -> tuple[SourceFiles, tuple[RowSpan, ...]]:
        """The source of these rows for another machine: of remote files with their rows of the index."""
        if "://" not in self.path or self.index:
            return self, spans
        dataset = self.dataset()
        numbers = sorted({span.file for span in spans})
        names = [dataset.entries.names[number] for number in numbers]
        stamps = stamps_of(dataset.address, names, job_session())
        table: Any = dataset.store.table  # type: ignore[attr-defined]  # all stores of files have it
        files = tuple(
            RemoteFile(name, stamps[name][1], msgspec.msgpack.encode(table(number)))
            for name, number in zip(names, numbers, strict=True)
        )
        return replace(self, path=dataset.address, files=files), tuple(
            span._replace(file=numbers.index(span.file)) for span in spans
        )


_open: list[Any] = []  # the source that is open in this process, its dataset, and what closes it


def close_source() -> None:
    """Close the source that this process has open."""
    if _open:
        stack = _open[2]
        _open.clear()
        stack.close()


def close_sources() -> None:
    """Close all that this process opened or downloaded for conversions."""
    close_source()
    close_scratch()


def _opened(source: SourceFiles, stack: contextlib.ExitStack) -> Dataset:
    """The thin place between conversions and the opening of data."""
    values = dict(source.settings)
    if source.index:
        store = _store_of_raw_files(source, values, stack)
    else:
        form = _FORMATS.get(source.kind, source.kind)
        store = open_store(source.path, format=form, inspect=True, tolerant=source.kind in TABLE_KINDS, **values)
    if not sum(ShardList.of(store.entries).samples):
        raise EmptySourceError(store)
    return Dataset(store)


def _store_of_raw_files(source: SourceFiles, values: dict[str, Any], stack: contextlib.ExitStack) -> RecordStore:
    path, index, form = Path(source.path), Path(source.index), format_named(source.kind)
    form = form.by_settings(form, values)
    root, file, remote = (path, ALL, None) if source.kind == "folder" else (path.parent, path.name, None)
    scan = functools.partial(form.scan, root, file)
    if "://" in source.path:
        remote, _ = place_of_object(source.path, job_session())
        root, content = remote.metadata, StoreFile(CachedBlocks(remote, all_used=True), 0)
        scan = functools.partial(form.read, content, file)
    if not index.exists():
        if not index.parent.exists():  # on a machine that does not see the folder of the conversion
            index = Path(stack.enter_context(tempfile.TemporaryDirectory()), "index")
        write_index(index, [scan()], form)
    found = IndexedFiles(form, form.index_at(index), index, None, root, remote, tolerant=True)
    return store_of(found, **values)


class EmptySourceError(Exception):
    """A source has no sample."""

    def __init__(self, store: RecordStore) -> None:
        super().__init__(store)
        self.store = store


def _dataset_of_files(source: SourceFiles, stack: contextlib.ExitStack) -> Dataset:
    """The dataset of remote files by their rows of the index. Raises `ShardError` for a file that was replaced."""
    folder, session = stack.enter_context(scratch())
    found = stamps_of(source.path, [file.name for file in source.files], session)
    for file in source.files:
        check_stamp(f"{source.path}/{file.name}", file.stamp, found[file.name][1])
    form, version = format_named(_FORMATS.get(source.kind, source.kind)), folder / "version"
    write_index(version / "index", [msgspec.msgpack.decode(f.table, type=ShardTable) for f in source.files], form)
    remote = RemoteFolder(source.path, held(version), session)
    indexed = IndexedFiles(form, remote.index, remote.index_path, None, folder, remote)
    return Dataset(store_of(indexed, inspect=True, **dict(source.settings)))


def source_digest(dataset: Dataset, path: str) -> str:
    """A hash of the files of a dataset and of their versions: times on a disk, ETags of objects."""
    names, table = list(dataset.entries.names), getattr(dataset.store, "table", None)
    versions: Any
    if "://" in path:
        stamps = stamps_of(dataset.address, names, job_session())
        versions = [stamps[name][1] for name in names]
    elif hasattr(table, "times"):  # of a folder
        versions = bytes(cast("Any", table).times)
    else:
        versions = times_of(dataset)
    return hashlib.sha256(dataset.digest() + msgspec.msgpack.encode(versions)).hexdigest()


def times_of(dataset: Dataset) -> list[int]:
    """When each of the files on a disk was written last."""
    return [os.stat(Path(dataset.address, name)).st_mtime_ns for name in dataset.entries.names]  # noqa: PTH116  # many


def changed(path: Path | str, found: str) -> SavableError:
    """The error for a source that changed since the conversion started."""
    return SavableError(
        f"{path}: {found}: it changed during the conversion. Do not change the input, and convert into another folder"
    )
