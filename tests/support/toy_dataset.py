"""Readers of datasets that consist of numbers only: no tar is written, and no byte is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.data.dataset.ref import RefArray
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.selection import Selection, Subset


class NoGroups:
    """A store without row groups."""

    @staticmethod
    def row_groups(shard: int) -> None:
        return None


class NumberDataset:
    """A dataset with shards of `sizes[i]` samples that have only a number."""

    source = 1
    store = NoGroups
    address = "numbers"
    prefetch_refs = 0
    mean_bytes = 0.0
    faults: tuple[tuple[str, str], ...] = ()

    def __init__(self, sizes: list[int]) -> None:
        self.firsts = np.cumsum([0, *sizes])
        self.count = int(self.firsts[-1])
        self.source_names: dict[int, str] = {}

    def select(self, split: None, subset: Subset | None, *, in_order: bool = False) -> Selection | None:
        names = [f"{shard:04d}.tar" for shard in range(len(self.firsts) - 1)]
        return None if subset is None else Selection(names, self.firsts, subset=subset)

    def verify(self, slot: int) -> None:
        pass

    def prefetch(self, refs: RefArray) -> None:
        pass

    def open_samples(self, refs: RefArray, *, request: bool = True) -> list[Sample]:
        return [Sample(self, 0, 0, index, epoch) for index, epoch in refs.tolist()]  # type: ignore[arg-type]


def dataset_key(name: str) -> tuple[Any, ...]:
    """Return the identity by which the lanes of a process share the dataset of these tars."""
    return ("tar", name, "raise", None, 1 << 30, ("cache", "None"), ("cache_bytes", "None"))


def readers(sizes: list[int], *, lanes: int = 1, seed: int = 0, **settings: Any) -> Callable[[int], sp.TarShardReader]:
    """Return a function that makes the reader of a lane, over shards of these sizes."""
    shared: dict[Any, Any] = {dataset_key("numbers"): NumberDataset(sizes)}
    return lambda lane: sp.TarShardReader(
        "numbers", sp.Lane(lane, lanes, seed, worker=WorkerContext(shared=shared)), **settings
    )


def index_epoch_pairs(refs: RefArray) -> list[tuple[int, int]]:
    """Return refs as (index, epoch)."""
    return [(int(index), int(epoch)) for index, epoch in refs.tolist()]


def drain(stage: custom.Stage, chunk: int = 1000) -> list[tuple[int, int]]:
    """Return everything that `take(chunk)` yields until the end."""
    given = []
    while len(refs := stage.take(chunk)):
        given += index_epoch_pairs(refs)
    return given


def take_refs(stage: custom.Stage, n: int, chunk: int = 1000) -> list[tuple[int, int]]:
    """Return the first `n` refs of a stage, taken `chunk` at a time."""
    given: list[tuple[int, int]] = []
    while len(given) < n:
        given += index_epoch_pairs(stage.take(min(chunk, n - len(given))))
    return given
