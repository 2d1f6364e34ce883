"""Opens the dataset of some tar shards, on a disk or behind a URL, and those of other stores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.lookup import METADATA_FOLDER
from savable_pipeline.data.remote.remote_index import open_remote
from savable_pipeline.data.remote.urls import is_remote
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME, META, unused_settings
from savable_pipeline.data.shards.indexing import open_folder, open_index
from savable_pipeline.data.shards.paths import Shards, Unlistable, find_shards
from savable_pipeline.data.stores.cached_files import CachedFiles
from savable_pipeline.data.stores.indexed_shards import IndexedShards
from savable_pipeline.data.stores.local_tars import LocalTars
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.tar_store import TarStore
from savable_pipeline.errors import ShardError

OpenStore: TypeAlias = Callable[[bool, Unlistable], RecordStore]  # tolerant of damage?; told of unlistable folders
log = logging.getLogger(__name__)


def open_dataset(
    shards: Shards,
    *,
    source: str = "",
    on_error: OnError = "raise",
    quarantine: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int | None = None,
) -> Dataset:
    """The dataset of some shards; those behind a URL are read through the folder `cache`, of `cache_size` bytes.

    Shards without an index are indexed first. Unless `on_error` is "raise", the samples of a damaged shard before the
    damage are taken. Raises `ShardError`, `RemoteError`.
    """

    def open_tars(tolerant: bool, unlistable: Unlistable) -> RecordStore:
        if is_remote(shards):
            return _remote_store(shards, tolerant, cache, cache_size)
        return _local_store(shards, tolerant, unlistable)

    return dataset_of(open_tars, source=source, on_error=on_error, quarantine=quarantine)


def dataset_of(
    open_store: OpenStore,
    *,
    source: str = "",
    on_error: OnError = "raise",
    quarantine: str | os.PathLike[str] | None = None,
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
        log.warning("%s: `%s` in %s/dataset.yaml is applied by Energon only", store.address, setting, META)
    return Dataset(store, source=source, on_error=on_error, quarantine=quarantine, faults=faults)


def _local_store(shards: Shards, tolerant: bool, unlistable: Unlistable) -> TarStore:
    if isinstance(shards, str | os.PathLike) and Path(shards).is_dir():
        root = Path(shards).absolute()  # a relative one would change its meaning with the working folder
        index, names = open_folder(root, tolerant=tolerant, unlistable=unlistable)
    else:
        root, names = find_shards(shards, missing_too=tolerant, unlistable=unlistable)
        index = open_index(root, names, tolerant=tolerant)
    table = IndexedShards(index, root / INDEX_NAME, names, str(root))
    return _told(TarStore(root, table, LocalTars(root, table)))


def _remote_store(
    shards: Shards, tolerant: bool, cache: str | os.PathLike[str] | None, cache_size: int | None
) -> TarStore:
    folder = cache_folder(cache)
    limit = cache_bytes(cache_size, folder)
    found, cached = open_remote(shards, folder, limit, tolerant=tolerant)
    cached.hold()
    table = IndexedShards(cached.index, cached.folder / "index", found.names, found.root)
    files = CachedFiles(found.root, table, cached, folder, limit)
    return _told(TarStore(cached.folder.parent / METADATA_FOLDER, table, files))


def _told(store: TarStore) -> TarStore:
    """A store, once its links are told: nobody sees that a sample lacks what a link names."""
    if text := store.links_told():
        log.warning("%s", text)
    return store
