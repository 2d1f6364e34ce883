"""Opens the dataset of some tar shards, on a disk or behind a URL, and those of other stores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeAlias

from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.energon_metadata import META, unused_settings
from savable_pipeline.data.shards.paths import Shards, Unlistable
from savable_pipeline.data.shards.scan import TARS
from savable_pipeline.data.stores.indexed_files import open_indexed
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
        found = open_indexed(shards, TARS, tolerant=tolerant, unlistable=unlistable, cache=cache, cache_size=cache_size)
        return TarStore(found)

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
    if text := store.left_out():
        log.warning("%s", text)
    return Dataset(store, source=source, on_error=on_error, quarantine=quarantine, faults=faults)
