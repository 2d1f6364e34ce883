"""Packs and `Balance` of every lane, by the stages themselves, on documents of known sizes: nothing is encoded.

A step takes W consecutive slots, and lasts as long as its dearest batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.cost import Cost, Size, waiting_share
from savable_pipeline.stages.item_ref import MISSING, ItemRef
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.stage import ItemStage, State
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import TaskEncoder

Documents: TypeAlias = Callable[[int], Iterator[tuple[Size, ...]]]
"""The endless sizes of the documents of a lane, by its number."""


class Null(TaskEncoder):
    """Makes nothing."""

    global_rng = False

    def pack(self, items: list[Any], rng: Rng) -> Any:
        """Nothing."""

    def length(self, item: Any) -> int:
        """Never asked."""
        raise NotImplementedError


class Told(ItemStage):
    """Yields elements with known sizes only; `given` counts them, `fetch` makes nothing."""

    ref: ItemRef = ()
    sizes: tuple[Size, ...] | None = None

    def __init__(self, sizes: Iterator[tuple[Size, ...]], lane: Lane, encoder: TaskEncoder) -> None:
        self._sizes = sizes
        self._lane = lane
        self._encoder = encoder
        self.given = 0

    def take(self, n: int, *, deferred: bool = False) -> tuple[list[Any], list[ItemRef]]:
        """The next one."""
        self.sizes = next(self._sizes, None)
        if self.sizes is None:
            return [], []
        self.given += 1
        return [MISSING], [(self.given - 1, 0, 0)]

    def fetch(self, ref: Any) -> Any:
        """The number of the element."""
        return ref[0]

    def save_state(self) -> State:
        """Nothing: no state is restored."""
        return {}

    def describe(self) -> StageInfo:
        """A source of nothing else."""
        none = frozenset([0])
        alone = StageInfo(self._lane, 0, population=1, endless=False, tags=none, origins=none, encoder=self._encoder)
        return replace(alone, deferred=True)


@dataclass
class Packs:
    """The packs of all lanes, in the order in which the packer gives them."""

    costs: NDArray[np.int64]  # (lanes, packs)
    fill: float  # mean share of max_length


def pack(documents: Documents, cost: Cost, /, *, lanes: int, packs: int, seed: int, **settings: Any) -> Packs:
    """Pack the documents of every lane by `OnlinePacker(**settings)`."""
    encoder = Null()
    costs = np.empty((lanes, packs), np.int64)
    tokens = 0
    for index in range(lanes):
        told = Told(documents(index), Lane(index, lanes, seed), encoder)
        packer = OnlinePacker(told, **settings)
        for n in range(packs):
            packer.take(1, deferred=True)
            sizes = packer.sizes or ()
            costs[index, n] = sum(cost(length, images) for length, images in sizes)
            tokens += sum(length for length, _ in sizes)
    return Packs(costs, tokens / costs.size / settings["max_length"])


@dataclass
class Balanced:
    """The costs as `Balance` gives them, and how long it held each pack."""

    costs: NDArray[np.int64]  # (lanes, slots)
    held: NDArray[np.int64] = field(repr=False)  # slots, of every pack that was given
    us: float  # a pack


def balance(costs: NDArray[np.int64], *, hold: int, slots: int, seed: int) -> Balanced:
    """Let `Balance` of every lane give `slots` packs of these costs: (lanes, packs)."""
    given = np.empty((len(costs), slots), np.int64)
    held, encoder = np.empty_like(given), Null()
    start = time.process_time()
    for index, own in enumerate(costs.tolist()):
        told = Told((((cost, 0),) for cost in own), Lane(index, len(costs), seed), encoder)
        stage = Balance(told, hold=hold, cost=_itself)
        arrived: list[int] = []
        for slot in range(slots):
            (number,), _ = stage.take(1)
            arrived += [slot] * (told.given - len(arrived))
            given[index, slot], held[index, slot] = own[number], slot - arrived[number]
    return Balanced(given, held, 1e6 * (time.process_time() - start) / given.size)


def _itself(length: int, images: int) -> int:
    return length


def waiting(costs: NDArray[np.int64], ranks: int) -> float:
    """The share of the ranks' time spent waiting, when a step is `ranks` consecutive slots of (lanes, slots)."""
    return waiting_share(costs.T.reshape(-1, ranks).tolist())
