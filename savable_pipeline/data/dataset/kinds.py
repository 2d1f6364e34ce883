"""The dataset of files of any kind, its store, and its index."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.source import Cache, Source, recognize
from savable_pipeline.data.dataset.store_kinds import STORES, Kind
from savable_pipeline.data.shards.energon_metadata import META, unused_settings
from savable_pipeline.data.shards.index_making import Progress
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.paths import Shards, Unlistable, raise_it
from savable_pipeline.data.shards.processes import each_shard_by
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.unfinished import unfinished
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.indexed_files import IndexedFiles, open_indexed
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import ShardError

OpenStore: TypeAlias = Callable[[bool, Unlistable], RecordStore]  # tolerant of damage?; told of unlistable folders
log = logging.getLogger(__name__)


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
    kind = source.kind
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in kind.settings:
            others = listed([n for n, each in STORES.items() if name in each.settings and "-" not in n])
            raise ValueError(f"{files}: {name}= is for files of the kinds {others}, not for {kind.name} files")

    kind = _variant(kind, given)
    if "unpacked_bytes" in kind.settings:
        given["unpacked_bytes"] = unpacked_bytes

    def open_it(tolerant: bool, unlistable: Unlistable) -> RecordStore:
        return seen(_indexed(source, kind, tolerant, unlistable), kind, partial=partial, **given)

    return dataset_of(open_it, on_error=on_error, unpacked_bytes=unpacked_bytes)


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
        log.warning("%s: `%s` in %s/dataset.yaml is applied by Energon only", store.address, setting, META)
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
