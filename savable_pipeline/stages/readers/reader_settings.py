"""What the readers of all stores share: their settings, and the data that lanes open together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypedDict

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import dataset_of, open_source
from savable_pipeline.data.dataset.shard_digests import pin
from savable_pipeline.data.shards.paths import Unlistable
from savable_pipeline.data.shards.selection import Subset
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.source import Cache, Source, at_commit, recognize

Names: TypeAlias = str | tuple[str, ...]


class ReaderSettings(TypedDict, total=False):
    """The settings that all readers have in common; `TarShardReader` explains them, `RecordReader` has the defaults."""

    split: str | None
    """A split in the dataset's `.nv-meta/split.yaml`. Default: None, all samples."""
    subset: Subset | None
    """A share of the samples (0.1), a range of shares (0.1, 0.3), or a count. Default: None, all samples."""
    epochs: int | float | None
    """How many epochs a pass has; the last may be a part, as in 2.5. Default: None, a run without end."""
    shuffle: bool
    """Whether shards and blocks are permuted, differently in each epoch. Default: True."""
    block_size: int | None
    """Samples that stay together. Default: None, 8; in file order a batch, where each sample makes one row."""
    window: int | None
    """Shards whose blocks are mixed; None: all. Default: 128."""
    on_error: OnError
    """What happens to unreadable shards: "raise", "skip", or what a function of the error says. Default: "raise"."""
    quarantine: str | os.PathLike[str] | None
    """A file that gets a line of JSON for each skipped sample. Default: None."""
    exclude: str | os.PathLike[str] | None
    """A file that names samples which must not be given. Default: None."""
    unpacked_bytes: int
    """The most bytes that a compressed part, shard, chunk or record may become. Default: 1 GiB."""


@dataclass(frozen=True, slots=True)
class ReaderData:
    """The data of a reader: `open` opens what is `named`, with its `on_error`, `quarantine` and
    `unpacked_bytes`.

    Only the first lane of a process opens them, for all readers with the same `kind`, names and `options` of the
    format. A run pins the shards that it found under `pinned_as` (default: all these names).
    """

    kind: str
    named: Any
    open: Callable[..., Dataset]
    options: tuple[Any, ...] = ()
    pinned_as: str = ""

    def opened(self, lane: Lane, **how: Any) -> tuple[Dataset, tuple[Any, ...]]:
        """The dataset, which all readers of a process with these names and this `how` share, and its name there."""
        named = (self.kind, self.named, *how.values(), *self.options)
        # a function is another object in another process, where a run must find its shards by the same name
        same = how["on_error"] == "raise", how["quarantine"]
        pinned_as = self.pinned_as or repr((self.kind, self.named, *same, *self.options))
        return lane.shared(named, lambda: pin(self.open(**how), pinned_as, lane.worker.pinned)), named

    @classmethod
    def of_files(
        cls, kind: str, files: Names, lane: Lane, options: Any = (), cache: Cache = (None, None), **settings: Any
    ) -> ReaderData:
        """The data of files of a kind, whose store has these settings; of the Hub at the commit that the run pins."""

        def opened(tolerant: bool, unlistable: Unlistable) -> RecordStore:
            source = source_at(files, kind, lane, cache)
            if source.session is not None:  # the run may have another commit of the Hub pinned since
                source = replace(source, files=at_commit(files, lane.worker.pinned, source.session))
            return open_source(source, tolerant, unlistable, **settings)

        return cls(kind, files, partial(dataset_of, opened), options)

    @classmethod
    def of_store(cls, store: RecordStore, lane: Lane) -> ReaderData:
        """The data of a store that is open."""
        pinned_as = f"store {store.address} {_number_of(store, lane)}"
        return cls("dataset", id(store), partial(Dataset, store), pinned_as=pinned_as)


def source_at(files: Names, kind: str, lane: Lane, cache: Cache = (None, None)) -> Source:
    """The source of these files of a kind, or of any if that is "", which are recognized once a process."""
    known = "source", files, kind, cache
    return lane.shared(known, lambda: recognize(files, kind=kind, pinned=lane.worker.pinned, cache=cache))


def _number_of(store: RecordStore, lane: Lane) -> int:
    """The number of a store among those with its address, in the order in which readers were made: the same in each
    process.
    """
    known: list[RecordStore] = lane.shared(("stores", store.address), list)
    if not any(each is store for each in known):
        known.append(store)
    return next(number for number, each in enumerate(known) if each is store)
