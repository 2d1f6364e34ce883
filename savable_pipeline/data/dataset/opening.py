"""Opens datasets: files of any kind, their store and their index; and `open_dataset`, for people.

`open_dataset` gives the samples of a dataset by number and by key, as in a list, and as torch's datasets have them, for
notebooks and other loaders. Stages read a `Dataset`, by refs.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.key_index import KeyIndex, key_index
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.shard_digests import pin
from savable_pipeline.data.shards.index import FileFormat, IndexedFiles
from savable_pipeline.data.shards.index_making import Progress
from savable_pipeline.data.shards.indexing import check_faults, index_files, open_files
from savable_pipeline.data.shards.metadata import META, unfinished, unused_settings
from savable_pipeline.data.shards.paths import Shards, Unlistable, raise_it
from savable_pipeline.data.shards.processes import each_shard_by
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import Classes
from savable_pipeline.data.stores.source import STORES, Cache, Kind, RangeColumns, Source, recognize
from savable_pipeline.errors import ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.remote.session import Session


OpenStore: TypeAlias = Callable[[bool, Unlistable], RecordStore]  # tolerant of damage?; told of unlistable folders
log = logging.getLogger(__name__)
Transform: TypeAlias = Callable[[Sample], Any]


def open_any(
    files: Shards,
    *,
    on_error: OnError = "raise",
    cache: Cache = (None, None),
    pinned: dict[str, bytes] | None = None,
    partial: bool = False,
    unpacked_bytes: int = UNPACKED_BYTES,
    **settings: Any,
) -> Dataset:
    """The dataset of the files that a user names, of whichever kind; `settings` are those of its store, or None.

    `partial` is that of `ColumnarStore`, `unpacked_bytes` that of all readers; see `recognize` for the rest. Raises
    `ShardError`, `RemoteError`, and ValueError for a setting that files of this kind do not have.
    """
    source = recognize(files, pinned=pinned, cache=cache)
    kind, given = with_settings(source, settings)
    if "unpacked_bytes" in kind.settings:
        given["unpacked_bytes"] = unpacked_bytes

    def open_it(tolerant: bool, unlistable: Unlistable) -> RecordStore:
        return seen(_indexed(source, kind, tolerant, unlistable), kind, partial=partial, **given)

    return dataset_of(open_it, on_error=on_error, unpacked_bytes=unpacked_bytes)


def with_settings(source: Source, settings: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """The kind of files with these settings of their store, and those of them that are not None.

    Raises ValueError for a setting that files of this kind do not have.
    """
    kind, given = source.kind, {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in kind.settings:
            others = listed([n for n, each in STORES.items() if name in each.settings and "-" not in n])
            raise ValueError(f"{source.files}: {name}= does not apply to {kind.name} files, only to {others}")
    return _variant(kind, given), given


def dataset_of(
    open_store: OpenStore,
    *,
    source: str = "",
    on_error: OnError = "raise",
    quarantine: str | os.PathLike[str] | None = None,
    unpacked_bytes: int = UNPACKED_BYTES,
) -> Dataset:
    """The dataset of the store that `open_store` opens. Raises what that raises."""
    faults: list[tuple[str, str]] = []

    def unlistable(error: ShardError) -> None:
        if not skips(on_error, error):
            raise error
        log.warning("%s", error)
        faults.append(("", str(error)))

    store = open_store(on_error != "raise", unlistable)
    for setting in [] if store.root is None else unused_settings(store.root):
        log.warning("%s: only Energon applies `%s` of %s/dataset.yaml", store.address, setting, META)
    missing = "" if store.root is None else unfinished(store.root).replace(str(store.root), store.address, 1)
    for text in (store.left_out(), missing):
        if text:
            log.warning("%s", text)
    return Dataset(
        store, source=source, on_error=on_error, quarantine=quarantine, faults=faults, unpacked_bytes=unpacked_bytes
    )


def open_source(
    source: Source, tolerant: bool = False, unlistable: Unlistable = raise_it, **settings: Any
) -> RecordStore:
    """The store of a source, with the settings of that store.

    Files without an index are indexed first. If it is `tolerant`, the samples of a damaged file before the damage are
    taken. Raises `ShardError`, `RemoteError`.
    """
    if settings.get("ranges") is None:
        settings.pop("ranges", None)
    kind = _variant(source.kind, settings)
    return kind.store(_indexed(source, kind, tolerant, unlistable), **settings)


def open_store(
    name: str,
    files: Shards,
    tolerant: bool = False,
    unlistable: Unlistable = raise_it,
    *,
    pinned: dict[str, bytes] | None = None,
    **settings: Any,
) -> RecordStore:
    """The store of files of the kind `name`: see `recognize` and `open_source`."""
    return open_source(recognize(files, kind=name, pinned=pinned), tolerant, unlistable, **settings)


def _variant(kind: Kind, settings: dict[str, Any]) -> Kind:
    """The kind of the same files with these settings: rows that name ranges of others, folders by where keys end."""
    name = kind.name
    if "ranges" in settings:
        name = f"{name}-ranges"
    elif name == "jsonl" and not settings.keys().isdisjoint(("file_fields", "files_from")):
        name = "jsonl-files"
    elif name == "folder":
        name += "-outside" if settings.pop("allow_outside", False) else ""
        name += "-last" if settings.get("key_end") == "last" else ""
    return STORES[name]


def _indexed(source: Source, kind: Kind, tolerant: bool, unlistable: Unlistable) -> IndexedFiles:
    if kind.open_at:
        return kind.indexed(source.read, tolerant=tolerant)
    return open_indexed(source.read, kind.form, source.session, tolerant=tolerant, unlistable=unlistable)


def open_indexed(
    files: Shards,
    form: FileFormat,
    session: Session | None,
    *,
    tolerant: bool = False,
    unlistable: Unlistable = raise_it,
) -> IndexedFiles:
    """The files that a user names, indexed; those behind a URL, which have a `session`, are read through its cache.

    Raises `ShardError`, also for damage unless `tolerant`, `RemoteError`.
    """
    if session is None:
        found = open_files(files, form, tolerant=tolerant, unlistable=unlistable)
        return IndexedFiles(form, found.index, found.path, found.names, found.root, tolerant=tolerant)
    from savable_pipeline.data.stores.remote_indexing import open_remote  # here: most files lie on a disk

    place, names = open_remote(files, form, session, tolerant=tolerant)
    check_faults(place.url, place.index, names, tolerant)
    return IndexedFiles(form, place.index, place.index_path, names, place.metadata, place, tolerant=tolerant)


def seen(found: IndexedFiles, kind: Kind | None = None, *, partial: bool = False, **settings: Any) -> RecordStore:
    """The store of indexed files, for whoever looks at them: with settings where they cannot be read without any."""
    kind = kind or STORES[found.form.name]
    if partial:
        settings |= kind.in_order()
    try:
        return kind.store(found, **settings)
    except ValueError:
        if not kind.seen_with:
            raise
        return kind.store(found, **kind.seen_with)


def index_any(
    files: Shards,
    *,
    processes: int | None = None,
    engine: Engine | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Path, list[ShardEntry]]:
    """Indexes files of whichever kind, here or behind a URL, in processes or by the machines of an `engine`.

    Returns the path of the index, and the files that could not be read to their end. Raises `ShardError`.
    """
    source = recognize(files)
    if source.session is not None:
        from savable_pipeline.data.stores.remote_indexing import index_remote

        return index_remote(source.files, source.kind.form, source.session, progress, engine)
    if source.kind.open_at:
        return source.kind.indexed(source.read, looked_at=True).index_path, []
    each = None if engine is None else each_shard_by(engine)
    return index_files(source.read, source.kind.form, processes=processes, each=each, progress=progress)


def open_dataset(
    shards: Shards,
    *,
    transform: Transform | None = None,
    columns: Sequence[str] | None = None,
    key: str | None = None,
    ranges: RangeColumns | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    unpacked_bytes: int = UNPACKED_BYTES,
    key_end: Literal["first", "last"] | None = None,
    classes: Classes = False,
    file_fields: Sequence[str] | None = None,
    files_from: str | os.PathLike[str] | None = None,
) -> Samples:
    """Open all samples of a dataset, by number, slice or key: to look at them, or for torch's own `DataLoader`.

    A slice is again such a sequence, and reads nothing. It may be pickled: another process opens the shards again. Keys
    are found by an index, made when the first is asked for: that reads the header of every sample once, or the column
    of the keys. Of several samples with one key, the first is returned.

    Args:
        shards: As for the reader of such files: `sp.TarShardReader`, `custom.ParquetReader`, `custom.ArrowReader`,
            `custom.JsonlReader`, `custom.CsvReader`, `custom.JsonReader`, `custom.FolderReader`.
        transform: Called with each sample that is asked for, such as `sp.Sample.decoded`. None: a `Sample`, which reads
            its parts when they are asked for.
        columns: As for `custom.ParquetReader`.
        key: As for `custom.ParquetReader`.
        ranges: As for `custom.ParquetReader`.
        cache: As for `sp.TarShardReader`.
        cache_bytes: As for `sp.TarShardReader`.
        unpacked_bytes: As for `sp.TarShardReader`.
        key_end: As for `custom.FolderReader`.
        classes: As for `custom.FolderReader`.
        file_fields: As for `custom.CsvReader`.
        files_from: As for `custom.CsvReader`.

    Returns:
        A sequence of samples, with IndexError for a missing number and KeyError for a missing key.

    Raises:
        ValueError: Files of this kind do not have a setting.
        ShardError: Shards cannot be read.
        RemoteError: A server cannot be reached.

    Example:
        >>> data = sp.open_dataset("shards/")
        >>> len(data), data[3].key, data[-1].key, data["s000042"].json()
        (400, 's000003', 's000399', {'id': 42})
        >>> [sample.key for sample in data[10:16:2]]
        ['s000010', 's000012', 's000014']
        >>> decoded = sp.open_dataset("shards/", transform=sp.Sample.decoded)
        >>> from torch.utils.data import DataLoader
        >>> next(iter(DataLoader(decoded, batch_size=2)))["png"].shape  # uint8 (batch, height, width, 3)
        torch.Size([2, 8, 8, 3])
    """
    specs = shards if isinstance(shards, str | os.PathLike) else [os.fspath(spec) for spec in shards]
    given = {
        "columns": None if columns is None else tuple(columns),
        "key": key,
        "ranges": ranges and dict(ranges),
        "key_end": key_end,
        "classes": classes or None,
        "file_fields": None if file_fields is None else tuple(file_fields),
        "files_from": files_from,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    return Samples(_Opened((specs, settings, unpacked_bytes, (cache, cache_bytes))), transform)


class _Opened:
    """The dataset, as this process has opened it: a forked or unpickled copy opens it anew.

    It has the shards that the first process found, also where others were added after them.
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        manifest: bytes | None = None,
        known: int | None = None,
        commits: PinnedShards | None = None,
    ) -> None:
        self._arguments, self._commits = arguments, {} if commits is None else commits  # of datasets of the Hub
        self._manifest, self._known = manifest, known  # what the first process found; `known` shards
        self._dataset = self._open()
        self._manifest, self._known = self._dataset.digest(), len(self._dataset.entries)
        self._keys: KeyIndex | None = None
        self._process = os.getpid()
        self._inherited: Dataset | None = None  # kept as it is: the process that opened it will close it

    def pinned(self, pinned: PinnedShards) -> _Opened:
        """The same with the shards that are pinned."""
        commits = {name: pinned.setdefault(name, commit) for name, commit in self._commits.items()}
        if commits != self._commits:  # a run that is resumed began with others
            return _Opened(self._arguments, commits=commits).pinned(pinned)
        dataset = pin(self.dataset, f"opened {self._arguments[:2]!r}", pinned)  # through whichever cache
        if dataset is self._dataset:
            return self
        return _Opened(self._arguments, dataset.digest(), len(dataset.entries), commits)

    def _open(self) -> Dataset:
        shards, given, most, cache = self._arguments
        dataset = open_any(shards, cache=cache, pinned=self._commits, unpacked_bytes=most, **given)
        if self._known is not None and len(dataset.entries) > self._known:
            dataset = dataset.first_shards(self._known)  # shards were added since
        if self._manifest is not None and dataset.digest() != self._manifest:
            raise ShardError(
                f"{dataset.address}: the shards changed since another process opened them. Start again",
                reason="changed shard",
            )
        return dataset

    @property
    def dataset(self) -> Dataset:
        if self._process != os.getpid():
            self._inherited, self._dataset, self._keys = self._dataset, self._open(), None
            self._process = os.getpid()
        return self._dataset

    @property
    def keys(self) -> KeyIndex:
        dataset = self.dataset
        if self._keys is None:
            self._keys = key_index(dataset)
        return self._keys

    def __reduce__(self) -> Any:
        return _Opened, (self._arguments, self._manifest, self._known, self._commits)


class Samples(Sequence[Any]):
    """What `open_dataset` gives: a sequence of samples, which `numbers` names."""

    def __init__(self, opened: _Opened, transform: Transform | None, numbers: range | None = None) -> None:
        self._opened = opened
        self._transform = transform
        self._numbers = range(opened.dataset.count) if numbers is None else numbers

    @property
    def dataset(self) -> Dataset:
        """The dataset as the stages read it."""
        return self._opened.dataset

    @property
    def is_whole(self) -> bool:
        """Whether these are all samples, as they are."""
        return self._transform is None and self._numbers == range(self._opened.dataset.count)

    def pinned(self, pinned: PinnedShards) -> Samples:
        """All samples of the shards that a run has pinned: see shard_digests.py. Raises `ShardError` for others."""
        return Samples(self._opened.pinned(pinned), None)

    @property
    def keys(self) -> KeyIndex:
        """The index of the keys of the whole dataset, made if there is none."""
        return self._opened.keys

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return Samples(self._opened, self._transform, self._numbers[which])
        return self.__getitems__([which])[0]

    def __getitems__(self, which: Sequence[Any]) -> list[Any]:
        """Several samples at once, as torch's `DataLoader` asks for them."""
        found = [self._number(each) for each in which]
        refs = np.array([(number, 0) for number in found], REF)
        samples = self.dataset.open_samples(refs)
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _number(self, which: Any) -> int:
        """The number of a sample in the dataset. Raises IndexError, KeyError, or TypeError for neither."""
        if isinstance(which, str):
            number = int(self.keys.find([which])[0])
            if number not in self._numbers:
                raise KeyError(f"{self.dataset.address}: no sample has the key {which!r}")
            return number
        try:
            return self._numbers[operator.index(which)]
        except IndexError:
            raise IndexError(f"{self.dataset.address}: no sample {which}; there are {len(self)}") from None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and int(self.keys.find([key])[0]) in self._numbers

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Samples({self.dataset.address!r}, {len(self)} of {self.dataset.count})"
