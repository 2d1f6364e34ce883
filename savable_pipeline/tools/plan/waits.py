"""`Waits`: how long the ranks of a step wait for the slowest, with and without `Balance` and `max_cost`.

Simulated with the stages themselves, `OnlinePacker` and `Balance` of every lane, on documents drawn from the sample:
(length, images) without contents; nothing is encoded. A step takes W consecutive slots, and lasts as long as its
dearest batch.
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
from savable_pipeline.stages.bucket_batcher import BucketBatcher
from savable_pipeline.stages.cost import Cost, Size, attention_cost, waiting_share
from savable_pipeline.stages.item_ref import MISSING, ItemRef
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.stage import ItemStage, State
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.plan.path_parts import Lengths, PathParts

HOLD = 32  # of the `Balance` that is tried
_LANES = 256  # simulated at most, unless there are more ranks
_DRAWN = 32  # times a document of the sample is drawn in one packing, about
_SLOTS = (24, 200)  # at least and at most that count
_PROBE = 8  # packs of each of a few lanes, to learn how many documents a pack has


@dataclass(frozen=True)
class Wait:
    """One way to pack and balance, and the share of all ranks' time that is spent waiting."""

    name: str
    yours: bool
    share: float
    fill: float | None
    """The mean share of `max_length` that a pack holds."""


@dataclass(frozen=True)
class Waits:
    """The ways that were simulated; the pipeline's own first."""

    ways: list[Wait]
    cost: str
    """What a document costs, in words."""
    steps: int
    """That count, after the first ones."""
    items_a_pack: float
    open_items: float
    """In the open packs of a lane."""


@dataclass(frozen=True)
class _Way:
    name: str
    packing: dict[str, Any] | None
    hold: int


def simulate_waiting(parts: PathParts, lengths: Lengths, *, ranks: int, hidden: int, seed: int) -> Waits | None:
    """The waiting of the pipeline and of its variants; None where no lengths are known or batches are of buckets."""
    rows = parts.rows
    if not lengths.sizes or rows is None or isinstance(parts.last, BucketBatcher):
        return None
    cost, name = _cost(parts, hidden)
    lanes = parts.last.lane.count if parts.last.lane.count <= _LANES else ranks
    ways = _ways(parts, cost)
    packed = _items_a_pack(lengths, ways[0].packing, cost, seed)
    slots = int(min(_SLOTS[1], max(_SLOTS[0], _DRAWN * len(lengths.sizes) / (lanes * packed.items * rows)))) * rows
    trial = _Trial(lengths, cost, lanes, ranks, slots, rows, seed, {})
    # those that hold need most packs: they go first
    ways = ways if ranks > 1 else []
    found = {way: trial.of(ways[way], yours=not way) for way in sorted(range(len(ways)), key=lambda n: -ways[n].hold)}
    return Waits(
        [found[way] for way in range(len(ways))],
        name,
        slots // rows * lanes // ranks,
        packed.items,
        packed.open_items,
    )


def _cost(parts: PathParts, hidden: int) -> tuple[Cost, str]:
    for stage in (parts.balance, parts.packer):
        if stage is not None and stage.cost is not None:
            return stage.cost, f"the pipeline's own, {getattr(stage.cost, '__qualname__', str(stage.cost))}"
    return attention_cost(hidden=hidden), f"attention_cost(hidden={hidden})"


def _ways(parts: PathParts, cost: Cost) -> list[_Way]:
    """The pipeline as it is, then with one or both of the settings the other way round."""
    packing, hold = _packing(parts), 0 if parts.balance is None else parts.balance.hold
    other, change = (0, "without Balance") if hold else (HOLD, f"with Balance(hold={HOLD})")
    ways = [_Way("as it is", packing, hold), _Way(change, packing, other)]
    if packing is None or callable(packing["policy"]) or parts.packer is None:
        return ways
    longest = parts.packer.max_length
    if parts.packer.max_cost is None:
        capped = {**packing, "max_length": 2 * longest, "max_cost": cost(longest, 0), "cost": cost}
        named = f"max_length={2 * longest}, max_cost of {longest}"
        both = [_Way(f"{named}, Balance(hold={hold or HOLD})", capped, hold or HOLD)]
        return [*ways, _Way(named, capped, 0), *both]
    free = {**packing, "max_cost": None, "cost": None}
    return [*ways, _Way("without max_cost", free, hold), _Way("without either", free, 0)][: 4 if hold else 3]


def _packing(parts: PathParts) -> dict[str, Any] | None:
    names = ("max_length", "policy", "open_packs", "max_images", "max_cost", "cost", "too_long")
    return None if parts.packer is None else {name: getattr(parts.packer, name) for name in names}


def _items_a_pack(lengths: Lengths, packing: dict[str, Any] | None, cost: Cost, seed: int) -> Packs:
    if packing is None:
        return Packs(np.zeros((1, 1), np.int64), 1.0, 1.0, 0.0)
    drawn = _documents(lengths, packing, seed)
    return pack(drawn, cost, lanes=4, packs=_PROBE * 4, seed=seed, **packing)


def _documents(lengths: Lengths, packing: dict[str, Any] | None, seed: int) -> Any:
    """Documents of each lane. Where a packer cuts, images would be cut with the item, which does not exist here."""
    cuts = packing is not None and packing["too_long"] != "skip"
    sizes: list[tuple[Size, ...]] = [((sum(n for n, _ in size), 0),) for size in lengths.sizes]
    sizes = sizes if cuts else lengths.sizes
    return lambda lane: replace(lengths, sizes=sizes).drawn(seed * 1009 + lane)


@dataclass(frozen=True)
class _Trial:
    lengths: Lengths
    cost: Cost
    lanes: int
    ranks: int
    slots: int  # packs of a lane that count
    rows: int
    seed: int
    packed: dict[str, tuple[NDArray[np.int64], float | None]]  # by the settings of the packer

    def of(self, way: _Way, *, yours: bool) -> Wait:
        """Simulate one way."""
        first = way.hold + -way.hold % self.rows  # packs before those that count, until `Balance` is full
        costs, fill = self._costs(way.packing, first + self.slots + way.hold)
        if way.hold:
            costs = balance(costs, hold=way.hold, slots=first + self.slots, seed=self.seed).costs
        counted = costs[:, first : first + self.slots]
        batches = counted.reshape(self.lanes, -1, self.rows).sum(axis=2)
        return Wait(way.name, yours, waiting(batches, self.ranks), fill)

    def _costs(self, packing: dict[str, Any] | None, packs: int) -> tuple[NDArray[np.int64], float | None]:
        """The costs of at least this many packs, packed once for all ways that pack alike."""
        known = self.packed.get(str(packing))
        if known is None or known[0].shape[1] < packs:
            known = self.packed[str(packing)] = self._packed(packing, packs)
        return known

    def _packed(self, packing: dict[str, Any] | None, packs: int) -> tuple[NDArray[np.int64], float | None]:
        drawn = _documents(self.lengths, packing, self.seed)
        if packing is None:
            return unpacked(drawn, self.cost, lanes=self.lanes, items=packs), None
        found = pack(drawn, self.cost, lanes=self.lanes, packs=packs, seed=self.seed, **packing)
        return found.costs, found.fill


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
    items: float  # a pack
    open_items: float  # in the open packs of a lane, at the end


def pack(documents: Documents, cost: Cost, /, *, lanes: int, packs: int, seed: int, **settings: Any) -> Packs:
    """Pack the documents of every lane by `OnlinePacker(**settings)`."""
    encoder = Null()
    costs = np.empty((lanes, packs), np.int64)
    items, tokens, left = 0, 0, 0
    for index in range(lanes):
        told = Told(documents(index), Lane(index, lanes, seed), encoder)
        packer = OnlinePacker(told, **settings)
        for n in range(packs):
            packer.take(1, deferred=True)
            sizes = packer.sizes or ()
            costs[index, n] = sum(cost(length, images) for length, images in sizes)
            items, tokens = items + len(sizes), tokens + sum(length for length, _ in sizes)
        state = packer.save_state()
        left += sum(map(len, state["packs"])) + len(state.get("held", ()))
    fill = tokens / costs.size / settings["max_length"]
    return Packs(costs, fill, items / costs.size, left / lanes)


def unpacked(documents: Documents, cost: Cost, *, lanes: int, items: int) -> NDArray[np.int64]:
    """The cost of each document of each lane where none are packed: int64 (lanes, items)."""
    found = np.empty((lanes, items), np.int64)
    for index in range(lanes):
        given = documents(index)
        found[index] = [sum(cost(*size) for size in next(given)) for _ in range(items)]
    return found


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
