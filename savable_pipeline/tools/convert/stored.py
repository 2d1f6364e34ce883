"""Sources as the stores that read them: `StoreReader` gives the parts of a sample, whatever the kind.

Nothing here knows the bytes of a format. Each process that writes shards opens the store for itself. A machine that has
no index of what lies behind a URL gets a `PartReader`:

    who plans   the index of all files ── of each job, the files that its samples lie in ──▶ job
    a machine   job ──▶ a cache of its own, dropped with the job ──▶ the store that reads these files anywhere

So no machine makes the index again, and none reads another version of a file than the plan was made from.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from savable_pipeline.core.wording import listed
from savable_pipeline.data.remote.lookup import RemoteFolder, check_stamp, held, place_of_object, stamps_of
from savable_pipeline.data.remote.session import Session, job_session, scratch
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.paths import ALL
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.sample_names import Reject, name_fault, printable
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.model import Files, Input, Part, SampleReader
from savable_pipeline.tools.convert.named_files import RowColumns
from savable_pipeline.tools.convert.part_data import LongPart, PartData, changed, is_long
from savable_pipeline.tools.convert.source_file import remote_source_id

if TYPE_CHECKING:
    from savable_pipeline.data.dataset.dataset import Dataset
    from savable_pipeline.data.stores.record_store import RecordStore


INDEX = ".index"  # how the name of a source's ends
Settings: TypeAlias = tuple[tuple[str, Any], ...]  # of a store


@dataclass(frozen=True, slots=True)
class StoreReader:
    """A `SampleReader` of the files at `path`, with this digest of their entries.

    They are raw files of this `kind`, or, for "", what is read in place whose kind their names tell.

    Behind a URL they have `stamps`, one a file; of files on a disk there are none, and `newest_ns` is when any of them
    was changed last when the conversion was planned.
    """

    path: str
    kind: str
    digest: str
    stamps: tuple[str, ...] = ()
    newest_ns: int = 0
    settings: Settings = ()
    index: Path = Path()  # of raw files, made for this conversion

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        self.dataset().store.prefetch(np.array([sample.record for sample in samples], dtype=np.int64))

    def elsewhere(self, samples: list[Files]) -> SampleReader:
        """See `SampleReader.elsewhere`: behind a URL, with what the index says of the files with these samples."""
        if not self.stamps:
            return self
        from savable_pipeline.data.stores.opening import find_source

        dataset = self.dataset()
        shards = np.unique(dataset.locate(np.array([sample.record for sample in samples]))[0]).tolist()
        table: Any = dataset.store.table  # type: ignore[attr-defined]  # as all stores have that are read here
        files = (
            MemberFile(
                dataset.entries[shard].name,
                self.stamps[shard],
                int(dataset.firsts[shard]),
                msgspec.msgpack.encode(table(shard)),
            )
            for shard in shards
        )
        return PartReader(dataset.address, self.kind or find_source(self.path).format.name, tuple(files), self.settings)

    def read(self, sample: Files) -> dict[str, PartData]:
        """The parts of a sample by extension. Raises `SavableError` if the files changed."""
        dataset = self.dataset()
        if self.kind:
            return self._read_raw(dataset, sample)
        shards, rows = dataset.locate(np.array([sample.record]))
        shard, row = int(shards[0]), int(rows[0])
        file, size = Path(dataset.address, dataset.entries[shard].name), dataset.entries[shard].size
        self._check(str(file), size)  # before, since a map of a file that was cut ends the process
        parts: dict[str, PartData] = {part.extension: dataset.read(shard, row, part.extension) for part in sample.parts}
        self._check(str(file), size)
        return parts

    def _read_raw(self, dataset: Dataset, sample: Files) -> dict[str, PartData]:
        """The parts of a sample of raw files: of a row, or files as a whole."""
        if self.newest_ns:  # of a table
            self._check(self.path, dataset.entries.sizes[0])
        return {
            part.extension: dataset.read(0, sample.record, part.extension)
            if part.offset is not None
            else self._file(dataset, sample.record, part)
            for part in sample.parts
        }

    def _file(self, dataset: Dataset, row: int, part: Part) -> PartData:
        data: PartData
        try:
            if is_long(part.extension, part.size):
                size = dataset.head(0, row, part.extension, 0)[1]
                data = LongPart(functools.partial(dataset.open, 0, row, part.extension), 0, part.size, part.path)
            else:
                data = dataset.read(0, row, part.extension)
                size = len(data)
        except ShardError as error:
            if error.reason != "changed shard":
                raise
            raise changed(part.path, str(error).partition(". ")[0]) from error
        if size != part.size:
            raise changed(part.path, f"expected {part.size} bytes, found {size}")
        return data

    def _check(self, path: str, size: int) -> None:
        if self.stamps:  # with which each byte is asked for
            return
        stat = os.stat(path)  # noqa: PTH116  # a Path for each sample is slow
        if stat.st_size != size or stat.st_mtime_ns > self.newest_ns:
            raise changed(path, f"{size} bytes when planned, {stat.st_size} now, written since")

    def dataset(self) -> Dataset:
        """The samples. Raises `SavableError` if they are not those that were planned."""
        if not _last or _last[0] is not self:
            dataset, digest = _opened(self.path, self.kind, self.settings, self.index, self.stamps if self.kind else ())
            if digest != self.digest:
                raise changed(self.path, "it holds other files, or other samples in them, than when planned")
            _last[:] = self, dataset
        return cast("Dataset", _last[1])


_last: list[Any] = []  # the reader that was asked last in this process, and its dataset


@functools.lru_cache(maxsize=1)
def _opened(path: str, kind: str, settings: Settings, index: Path, stamps: tuple[str, ...]) -> tuple[Dataset, str]:
    """The samples there, and a digest of their entries."""
    from savable_pipeline.data.dataset.dataset import Dataset  # imported here: compressed tars do without
    from savable_pipeline.data.dataset.opening import open_any

    raw = open_raw(path, kind, settings, index, *stamps) if kind else None
    dataset = open_any(path, inspect=True, **dict(settings)) if raw is None else Dataset(raw)
    return dataset, _digest(dataset.entries)


def open_raw(path: str, kind: str, settings: Settings, index: Path, stamp: str = "") -> RecordStore:
    """The store of raw files of this kind, by the `index` of them, which is made aside where it is not seen.

    Behind a URL they are one object, with this stamp if one is given. Raises `ShardError` for another, `RemoteError`.
    """
    from savable_pipeline.data.shards.index import IndexedFiles
    from savable_pipeline.data.stores.cached_blocks import CachedBlocks
    from savable_pipeline.data.stores.formats import format_named
    from savable_pipeline.data.stores.opening import store_of
    from savable_pipeline.data.stores.shard_files import StoreFile

    form, remote, chosen = format_named(kind), None, dict(settings)
    form = form.by_settings(form, chosen)
    root, name = (Path(path), ALL) if kind == "folder" else (Path(path).parent, Path(path).name)
    scan = functools.partial(form.scan, root, name)
    if "://" in path:
        remote, _ = place_of_object(path, job_session())
        here, root = _stamp(path), remote.metadata
        check_stamp(path, stamp or here, here)
        scan = functools.partial(form.read, StoreFile(CachedBlocks(remote, all_used=True), 0), name)
    with tempfile.TemporaryDirectory() as aside:
        if not index.exists():  # on a machine that does not see the folder of the conversion, too
            index = index if index.parent.exists() else Path(aside, "index")
            write_index(index, [scan()], form)
        found = IndexedFiles(form, form.index_at(index), index, None, root, remote, tolerant=True)
        return store_of(found, **chosen)


def _stamp(url: str) -> str:
    root, _, name = url.rpartition("/")
    return stamps_of(root, [name], job_session())[name][1]


def _digest(entries: Iterable[ShardEntry]) -> str:
    return hashlib.sha256(repr([(entry.name, entry.size, entry.digest) for entry in entries]).encode()).hexdigest()


def close_stores() -> None:
    """Close what was opened last in this process."""
    _last.clear()
    _opened.cache_clear()


def raw_input(path: Path | str, kind: str, options: dict[str, Any], work: Path) -> tuple[RecordStore, Input]:
    """The store of raw files, indexed anew, and an input without samples that reads from it."""
    close_stores()
    index, settings = work / f"source.{kind}{INDEX}", tuple(options.items())
    index.unlink(missing_ok=True)
    address, newest_ns = str(path), 0
    stamps: tuple[str, ...] = ()
    if isinstance(path, Path):
        address = str(path.resolve())
        newest_ns = path.stat().st_mtime_ns if path.is_file() else 0  # before it is read
    else:
        stamps = (_stamp(path),)
    store = open_raw(address, kind, settings, index)
    reader = StoreReader(address, kind, _digest(store.entries), stamps, newest_ns, settings, index)
    return store, Input(store.address, reader, digest=reader.digest)


def with_settings(reader: SampleReader, **settings: Any) -> StoreReader:
    """The same reader with these settings of its store."""
    assert isinstance(reader, StoreReader), reader
    return replace(reader, settings=tuple({**dict(reader.settings), **settings}.items()))


def records_behind(url: str, reader: SampleReader) -> StoreReader:
    """The reader of records that were copied to a URL, for machines that do not see their file."""
    assert isinstance(reader, StoreReader), reader
    return replace(reader, path=url, stamps=(_stamp(url),))


def stored_input(path: Path | str, unpacked_bytes: int) -> tuple[Dataset, Input]:
    """The dataset of files that are read in place, and an input without samples that reads from it."""
    address, settings = str(path.resolve()) if isinstance(path, Path) else path, (("unpacked_bytes", unpacked_bytes),)
    close_stores()  # what was opened before may have changed since
    dataset, digest = _opened(address, "", settings, Path(), ())
    stamps = () if isinstance(path, Path) else _stamps(dataset.address, dataset.entries)
    reader = StoreReader(address, "", digest, stamps, _newest_ns(dataset, path), settings)
    found = Input(dataset.address, reader, digest=digest)
    found.source_id = remote_source_id(dataset.address, stamps) if stamps else ""
    return dataset, found


def read_stored(
    path: Path | str, only: tuple[str, ...] = (), files: Path | None = None, unpacked_bytes: int = UNPACKED_BYTES
) -> Input:
    """The samples of files that are read in place, in their order; files that rows name are those below `files`.

    A key that occurs again gets the name of its shard before it. Raises ValueError for links in tars, and for rows that
    name files without their bytes, where no folder is given, unless their parts are not among those taken, `only`.
    """
    dataset, found = stored_input(path, unpacked_bytes)
    if text := dataset.store.rejects_warning():
        raise ValueError(text)
    columns = RowColumns(dataset.store, only, files)

    def rows() -> Iterator[Row]:
        for shard, row in zip(*(a.tolist() for a in dataset.locate(np.arange(dataset.count))), strict=True):
            name = dataset.entries[shard].name
            parts, fault = columns.parts_of(shard, row)
            yield Row(name, _key(dataset.key(shard, row), name), [*_parts(dataset, name, shard, row), *parts], fault)

    add_rows(found, rows())
    columns.tell(found, dataset)
    return found


class Row(NamedTuple):
    """A sample as a shard has it, and why it cannot be taken; its number is its place among all."""

    shard: str
    key: str
    parts: list[Part]
    fault: str = ""


def add_rows(found: Input, rows: Iterable[Row]) -> None:
    """Add these samples, all of a source. A key that occurs again gets the name of its shard before it."""
    seen: set[str] = set()
    again: list[str] = []
    for number, (shard, key, parts, fault) in enumerate(rows):
        if key in seen:
            again.append(key)
            key = f"{shard.rpartition('.')[0].replace('.', '_')}/{key}"
        fault = fault or ("duplicate key: twice in one shard" if key in seen else "")
        parts.sort(key=lambda part: part.extension)
        _add(found, Files(key, tuple(parts), number), shard, fault)
        seen.add(key)
    if again:
        found.warnings.append(
            f"{len(again)} keys occur again, and got the name of their shard before them: {listed(again)}"
        )


def _newest_ns(dataset: Dataset, path: Path | str) -> int:
    """When a file on a disk was changed last."""
    if isinstance(path, str):
        return 0
    return max((Path(dataset.address, entry.name).stat().st_mtime_ns for entry in dataset.entries), default=0)


def _stamps(url: str, entries: Iterable[ShardEntry]) -> tuple[str, ...]:
    names = [entry.name for entry in entries]
    found = stamps_of(url, names, job_session())
    return tuple(found[name][1] for name in names)


def _key(key: str, shard: str) -> str:
    """The key as a tar may have it; a row that has none, "web/0.parquet:17", becomes "web/0/17"."""
    if shard.endswith(".tar"):
        return key.removeprefix("./")
    if key.startswith(f"{shard}:"):
        key = f"{shard.rpartition('.')[0]}/{key[len(shard) + 1 :]}"
    return key.replace(".", "_")


def _parts(dataset: Dataset, name: str, shard: int, row: int) -> list[Part]:
    return [Part(extension, name, size) for extension, size in dataset.store.sizes(shard, row).items()]


def _add(found: Input, sample: Files, shard: str, fault: str) -> None:
    if not sample.parts:
        fault = fault or "no part: every field of it is null"
    for part in sample.parts:
        fault = fault or name_fault(sample.key, part.extension)
    if fault:
        found.rejected.append(Reject.of(printable(f"{shard}, record {sample.record}"), sample.key, fault))
    else:
        found.samples.append(sample)


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A file: its name, its stamp on the server, the number of its first sample in the whole, and its index."""

    name: str
    stamp: str
    first: int
    table: bytes  # a `ShardTable`, as MessagePack


@dataclass(frozen=True, slots=True)
class PartReader:
    """A `SampleReader` of these files below `url`: of the kind `form`."""

    url: str
    form: str
    files: tuple[MemberFile, ...]  # in the order of their samples
    settings: tuple[tuple[str, Any], ...] = ()  # of the store

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        dataset = _part_of(self)
        dataset.store.prefetch(np.array([self._number(dataset, sample) for sample in samples], dtype=np.int64))

    def elsewhere(self, samples: list[Files]) -> PartReader:
        """See `SampleReader.elsewhere`."""
        return self

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `ShardError` for a file that was replaced, `RemoteError`."""
        dataset = _part_of(self)
        shards, rows = dataset.locate(np.array([self._number(dataset, sample)]))
        shard, row = int(shards[0]), int(rows[0])
        return {part.extension: dataset.read(shard, row, part.extension) for part in sample.parts}

    def _number(self, dataset: Dataset, sample: Files) -> int:
        """The number of a sample among those of these files."""
        number = bisect.bisect(self.files, sample.record, key=lambda file: file.first) - 1
        return int(dataset.firsts[number]) + sample.record - self.files[number].first


_open: list[Any] = []  # the part that this process has open, in a folder of its own: reader, dataset, what closes it


def _part_of(reader: PartReader) -> Dataset:
    if not _open or _open[0] is not reader:
        close_part()
        with contextlib.ExitStack() as stack:
            dataset = _dataset(reader, *stack.enter_context(scratch()))
            _open[:] = reader, dataset, stack.pop_all()
    return cast("Dataset", _open[1])


def close_part() -> None:
    """Close what this process has open, and remove what was downloaded for it."""
    if _open:
        stack = _open[2]
        _open.clear()
        stack.close()


def _dataset(reader: PartReader, folder: Path, session: Session) -> Dataset:
    from savable_pipeline.data.dataset.dataset import Dataset  # imported here: other sources do without
    from savable_pipeline.data.shards.index import IndexedFiles
    from savable_pipeline.data.stores.formats import format_named
    from savable_pipeline.data.stores.opening import store_of

    found = stamps_of(reader.url, [file.name for file in reader.files], session)
    for file in reader.files:
        check_stamp(f"{reader.url}/{file.name}", file.stamp, found[file.name][1])
    form, version = format_named(reader.form), folder / "version"
    tables = [msgspec.msgpack.decode(file.table, type=ShardTable) for file in reader.files]
    write_index(version / "index", tables, form)
    remote = RemoteFolder(reader.url, held(version), session)
    files = IndexedFiles(form, remote.index, remote.index_path, None, folder, remote)
    given = dict(reader.settings)
    unpacked_bytes = given.get("unpacked_bytes", UNPACKED_BYTES)
    known = {name: value for name, value in given.items() if name in form.settings}
    return Dataset(store_of(files, inspect=True, **known), unpacked_bytes=unpacked_bytes)
