"""Opening of datasets, for stages by `open_any` and for users by `open_dataset`.

`open_dataset` is for notebooks and other loaders. It returns a sequence of samples by index or key, which torch's
`DataLoader` accepts as a dataset. Stages read a `Dataset` by refs, the IDs of samples.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.key_index import KeyIndex, key_index
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.shard_digests import pin
from savable_pipeline.data.shards.metadata import META, unfinished, unused_settings
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.opening import Source, find_source, open_store
from savable_pipeline.data.stores.ranges import RangeColumns
from savable_pipeline.data.stores.sample_names import Classes
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)
Transform: TypeAlias = Callable[[Sample], Any]


def open_any(
    files: Shards | Source,
    *,
    source: str = "",
    on_error: OnError = "raise",
    quarantine: str | os.PathLike[str] | None = None,
    unpacked_bytes: int = UNPACKED_BYTES,
    **settings: Any,
) -> Dataset:
    """Open the dataset of files that a user names.

    See `find_source` and `open_store` for `settings`. `unpacked_bytes` is a setting of all readers.

    Raises `ShardError`, `RemoteError`, and ValueError for a setting that files of this format do not have.
    """
    faults: list[tuple[str, str]] = []

    def note_unlistable(error: ShardError) -> None:
        if not skips(on_error, error):
            raise error
        log.warning("%s", error)
        faults.append(("", str(error)))

    if not isinstance(files, Source):
        of_source = {name: settings.pop(name) for name in ("format", "pinned", "cache") if name in settings}
        passed = [name for name, value in settings.items() if value is not None]
        files = find_source(files, settings=passed, **of_source)
    if "unpacked_bytes" in files.format.settings:
        settings["unpacked_bytes"] = unpacked_bytes
    store = open_store(files, tolerant=on_error != "raise", unlistable=note_unlistable, **settings)
    for setting in [] if store.root is None else unused_settings(store.root):
        log.warning("%s: only Energon applies `%s` of %s/dataset.yaml", store.address, setting, META)
    missing = "" if store.root is None else unfinished(store.root).replace(str(store.root), store.address, 1)
    for text in (store.rejects_warning(), missing):
        if text:
            log.warning("%s", text)
    return Dataset(
        store, source=source, on_error=on_error, quarantine=quarantine, faults=faults, unpacked_bytes=unpacked_bytes
    )


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
    format: str | None = None,
) -> Samples:
    """Open all samples of a dataset for access by index, slice or key.

    Use it to inspect data, or with torch's own `DataLoader`.

    A slice is such a sequence too, and reads nothing. The result can be pickled. Another process then opens the shards
    again. The first look-up of a key builds an index of keys, for which the header of every sample or the column of
    keys is read once. If several samples have one key, the first one is returned.

    Args:
        shards: As for the reader of such files: `sp.TarShardReader`, `custom.ParquetReader`, `custom.ArrowReader`,
            `custom.JsonlReader`, `custom.CsvReader`, `custom.JsonReader`, `custom.FolderReader`.
        transform: Called with each requested sample, such as `sp.Sample.decoded`. None: a `Sample`, which reads its
            parts on access.
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
        format: The name of the files' format, such as "folder" or "jsonl". None: it is recognized.

    Returns:
        A sequence of samples. It raises IndexError for a missing index and KeyError for a missing key.

    Raises:
        ValueError: Files of this format do not have a setting.
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
    specs = as_names(shards)
    arguments = {
        "columns": None if columns is None else tuple(columns),
        "key": key,
        "ranges": ranges and dict(ranges),
        "key_end": key_end,
        "classes": classes or None,
        "file_fields": None if file_fields is None else tuple(file_fields),
        "files_from": files_from,
        "format": format,
    }
    settings = {name: value for name, value in arguments.items() if value is not None}
    return Samples(_ReopenableDataset((specs, settings, unpacked_bytes, (cache, cache_bytes))), transform)


class _ReopenableDataset:
    """Dataset that a forked or unpickled copy opens again.

    It has the shards that the first process found, even if others were added after them.
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        manifest: bytes | None = None,
        known_shards: int | None = None,
        commits: PinnedShards | None = None,
    ) -> None:
        self._arguments = arguments
        self._commits = {} if commits is None else commits  # commits of datasets of the Hub
        # digest of the manifest in the first process, and the number of shards that it found
        self._manifest, self._known_shards = manifest, known_shards
        self._dataset = self._open()
        self._manifest, self._known_shards = self._dataset.digest(), len(self._dataset.entries)
        self._keys: KeyIndex | None = None
        self._process = os.getpid()
        self._inherited: Dataset | None = None  # referenced, because the process that opened it closes it

    def pinned(self, pinned: PinnedShards) -> _ReopenableDataset:
        """Return the dataset of the pinned shards. If none are, pin the current ones."""
        commits = {name: pinned.setdefault(name, commit) for name, commit in self._commits.items()}
        if commits != self._commits:  # a resumed run started with other commits
            return _ReopenableDataset(self._arguments, commits=commits).pinned(pinned)
        dataset = pin(self.dataset, f"opened {self._arguments[:2]!r}", pinned)  # the name does not depend on the cache
        if dataset is self._dataset:
            return self
        return _ReopenableDataset(self._arguments, dataset.digest(), len(dataset.entries), commits)

    def _open(self) -> Dataset:
        shards, settings, unpacked_bytes, cache = self._arguments
        dataset = open_any(shards, cache=cache, pinned=self._commits, unpacked_bytes=unpacked_bytes, **settings)
        if self._known_shards is not None and len(dataset.entries) > self._known_shards:
            dataset = dataset.first_shards(self._known_shards)  # shards were added since
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
        return _ReopenableDataset, (self._arguments, self._manifest, self._known_shards, self._commits)


class Samples(Sequence[Any]):
    """Result of `open_dataset`: a sequence of samples.

    It has the samples with these `indices`, or all.
    """

    def __init__(self, opened: _ReopenableDataset, transform: Transform | None, indices: range | None = None) -> None:
        self._opened = opened
        self._transform = transform
        self._indices = range(opened.dataset.count) if indices is None else indices

    @property
    def dataset(self) -> Dataset:
        """Return the dataset as the stages read it."""
        return self._opened.dataset

    @property
    def is_whole(self) -> bool:
        """Return whether these are all samples of the dataset, without a transform."""
        return self._transform is None and self._indices == range(self._opened.dataset.count)

    def pinned(self, pinned: PinnedShards) -> Samples:
        """Return all samples of the shards that a run has pinned, see shard_digests.py.

        Raises `ShardError` for other shards.
        """
        return Samples(self._opened.pinned(pinned), None)

    @property
    def keys(self) -> KeyIndex:
        """Return the index of the dataset's keys, and build it if it is missing."""
        return self._opened.keys

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, selector: Any) -> Any:
        if isinstance(selector, slice):
            return Samples(self._opened, self._transform, self._indices[selector])
        return self.__getitems__([selector])[0]

    def __getitems__(self, selectors: Sequence[Any]) -> list[Any]:
        """Return several samples at once, as torch's `DataLoader` requests them."""
        epoch = 0
        refs = np.array([(self._index_in_dataset(selector), epoch) for selector in selectors], REF)
        samples = self.dataset.open_samples(refs)
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _index_in_dataset(self, selector: Any) -> int:
        """Return the index in the dataset of a sample that is selected by key, or by index in this sequence.

        Raises IndexError, KeyError, or TypeError for another type.
        """
        if isinstance(selector, str):
            index = int(self.keys.find([selector])[0])
            if index not in self._indices:
                raise KeyError(f"{self.dataset.address}: no sample has the key {selector!r}")
            return index
        try:
            return self._indices[operator.index(selector)]
        except IndexError:
            raise IndexError(f"{self.dataset.address}: no sample {selector}; there are {len(self)}") from None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and int(self.keys.find([key])[0]) in self._indices

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Samples({self.dataset.address!r}, {len(self)} of {self.dataset.count})"
