"""`FirstStage`: the samples that the first stage of a lane yields, each by its ref; a subclass puts them in order."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError, check_on_error
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.pinned_shards import pin
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT, TAGS, Ref, RefArray, skip_counters
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.selection import Selection, Subset, check_subset
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.excluded_samples import ExcludedSamples, excluded_numbers, read_exclude_file
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.readers.reader_settings import ReaderData
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.stage_bases import TakesRefs
from savable_pipeline.stages.stage_info import StageInfo

_STEPS = ("shuffle", "filter", "map", "encode", "batch", "take")  # of a pipeline value
_DAMAGED = "rest of a damaged or missing shard"


class FirstStage(TakesRefs):
    """The samples of a split and a subset of `data`, which the first lane of a process opens.

    `split_order`: whether shards come in the order that the split lists them in.
    """

    epochs: int | float | None

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """A reader; raises TypeError where there is no lane, which a call without a loader easily lacks."""
        lane = settings["lane"] if "lane" in settings else arguments[1] if len(arguments) > 1 else None
        if not isinstance(lane, Lane):
            named = repr(arguments[0]) if arguments else "…"
            raise TypeError(
                f"{cls.__name__} takes the lane of a pipeline's function after {named}, not {lane!r}: sp.read({named}) "
                "begins a pipeline without one"
            )
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            cure = "" if name not in _STEPS else f": sp.read(…).{name}(…) makes a chain, a class puts a stage around it"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{cure}")

    def __init__(
        self,
        data: ReaderData,
        lane: Lane,
        *,
        split: str | None,
        subset: Subset | None,
        split_order: bool,
        on_error: OnError,
        quarantine: str | os.PathLike[str] | None,
        exclude: str | os.PathLike[str] | None,
        unpacked_bytes: int,
    ) -> None:
        name = type(self).__name__
        check_subset(name, subset)
        check_on_error(name, on_error)
        named = (data.kind, data.named, on_error, quarantine, unpacked_bytes, *data.options)
        # a function is another object in another process, where a run must find its shards by the same name
        pinned_as = data.pinned_as or repr((data.kind, data.named, on_error == "raise", quarantine, *data.options))

        def open_dataset() -> Dataset:
            opened = data.open(on_error=on_error, quarantine=quarantine, unpacked_bytes=unpacked_bytes)
            return pin(opened, pinned_as, lane.pinned)

        self.dataset = lane.shared(named, open_dataset)
        self.exclude_file = read_exclude_file(exclude, lane, named, self.dataset)
        self.split, self.subset, self.on_error = split, subset, on_error
        self.tag, self.branch = 0, ""
        self._lane = lane
        self.chosen = (named, split, subset)
        """The name of these samples, for what lanes share of them."""
        self.selection: Selection | None = lane.shared(
            ("selection", *self.chosen, split_order), lambda: self.dataset.select(split, subset, in_order=split_order)
        )

    @property
    def population(self) -> int:
        """The number of samples in the shards, or in the split and subset of them."""
        return self.dataset.count if self.selection is None else self.selection.count

    @property
    def origin(self) -> int:
        """The `Ref.source` of these samples."""
        return self.dataset.source ^ self.tag << TAG_SHIFT

    def describe(self) -> StageInfo:
        """The facts that all stages after this one inherit."""
        excluded = excluded_numbers(self.exclude_file, self._lane, self.tag)
        return StageInfo(
            self._lane,
            depth=0,
            population=self.population,
            endless=self.epochs is None,
            tags=frozenset([self.tag]),
            origins=frozenset([self.origin]),
            branch=self.branch,
            excluded=ExcludedSamples.of_reader(self.tag, excluded),
            gives_excluded=bool(excluded),
        )

    def name_branch(self, name: str) -> None:
        """Become the source `name` of a `Blend`: the name is part of the keys of order and of random numbers."""
        vars(self).pop("info", None)
        self.branch = name
        self.tag = 1 + derive_key("branch", name) % (TAGS - 1)
        self.dataset.names[self.tag] = name

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """The samples with these refs; their parts are read when asked for."""
        return self.dataset.open_samples(refs)

    def fetch(self, ref: ItemRef | Ref) -> Sample:
        """The sample with this ref. Raises `CheckpointMismatchError` if there is none."""
        try:
            index, epoch = (ref.index | self.tag << TAG_SHIFT, ref.epoch) if isinstance(ref, Ref) else (ref[0], ref[1])
            refs = np.array([(index, epoch)], REF)
        except (OverflowError, TypeError, IndexError) as error:
            raise CheckpointMismatchError(f"{type(self).__name__}: no sample has the ref {tuple(ref)}") from error
        return self.dataset.open_samples(refs)[0]

    def verify(self, slot: int) -> None:
        """See `ReadsFiles`: the shards are looked at, at most once a second."""
        self.dataset.verify(slot)
        if self.exclude_file is not None:
            self.exclude_file.verify()

    def count_faults(self) -> None:
        """Count the shards that could not be indexed to their end, and add them to the quarantine file."""
        for shard, fault in self.dataset.faults:
            self.counts.update(skip_counters(_DAMAGED, self.tag << TAG_SHIFT))
            if self.dataset.quarantine is not None:
                self.dataset.quarantine.add(shard=shard, reason=_DAMAGED, detail=fault)

    def stores_read(self) -> Iterable[RecordStore]:
        """See `ReadsFiles`."""
        return (self.dataset.store,)

    def addresses(self) -> dict[str, str]:
        """The folder or the URL of the shards."""
        return {"shards": self.dataset.address}

    @property
    def sources(self) -> tuple[Stage, ...]:
        """None: nothing comes before a reader."""
        return ()
