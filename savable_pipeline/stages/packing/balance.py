"""`Balance`: packs in an order that balances the costs of all lanes.

`StepRule` chooses which waiting pack is yielded next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked, value_of
from savable_pipeline.stages.cost import Cost, Costing, Size
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_buffer import ItemBuffer, known_refs
from savable_pipeline.stages.item_ref import Element, ItemRef, as_ref, remaining_sizes
from savable_pipeline.stages.stage import ItemStage, State, parse_state
from savable_pipeline.stages.step_rule import StepRule
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder


class _WaitingPack(NamedTuple):
    cost: int
    arrival: int  # number of packs that the lane had yielded when this one was taken
    saved: bytes  # a `_PackState` in MessagePack, encoded once instead of in the state of each batch


class _PackState(msgspec.Struct, array_like=True):
    ref: Any
    arrival: SavedCount
    sizes: list[SavedCount]  # length and images of each item in turn


class _BalanceState(msgspec.Struct):
    packs: list[bytes] = msgspec.field(name="held")
    count: SavedCount
    past: bytes
    source: dict[str, Any]


class Balance(ChunkedStage, ItemStage):
    """Packs in an order in which the ranks of a step get about equal costs.

    Ranks then wait less for each other.

    For each slot all lanes draw the same random quantile from the run's seed, 0.0 to 1.0. Each lane yields the held
    pack whose cost is nearest to this quantile of the costs of its held packs and of its last 16 · `candidates` yielded
    ones. A cheaper pack is preferred to a costlier one, and a pack that waited long is yielded a little sooner. This
    balances any number of ranks without communication. No pack is held for more than 6 · `candidates` slots. At the
    start 4 packs are held, then one more each slot, up to `candidates`.

    Use it as the last stage before the `Batcher`, after any `Blend`. A later stage must not drop a pack, because its
    lane would then be ahead of the others for the rest of the run. A lost pack is replaced by another one in its slot.

    Args:
        source: A stage of packs, or of items.
        candidates: The number of packs that each lane holds.
        cost: `cost(length, images)` of a document, an int, such as `sp.attention_cost(hidden=2048)`; a pack costs the
            sum over its items. Only the order of costs matters. A state is only loaded with a function of the same
            name, so rename the function if you change it.
        max_buffer_bytes: The most bytes of items in the buffers of a process. Packs beyond that are rebuilt when they
            are yielded. If the encoder has `length_of`, no pack is built before it is yielded.
        encoder: Measures items. None: the encoder upstream.

    Raises:
        ValueError: A setting is wrong, or the stage is in a branch of a `Blend`.
        EncodeError: `cost` raised, or is no int.

    Example:
        >>> class Texts(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return "a" * (1 + sample.json()["id"] % 7)
        ...     def pack(self, items, rng):
        ...         return " ".join(items)
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(seed=7), epochs=1), Texts())
        >>> packs = sp.OnlinePacker(items, max_length=9, max_cost=40, cost=lambda length, images: length**2)
        >>> balanced = sp.Balance(packs, candidates=8, cost=sp.attention_cost(hidden=4))
        >>> len(next(balanced).replace(" ", "")) <= 9
        True
    """

    source: ItemStage
    one_to_one = True
    in_step = "Balance"
    ref: ItemRef = ()
    """The ref of the last yielded pack."""

    def __init__(
        self,
        source: ItemStage,
        *,
        candidates: int,
        cost: Cost,
        max_buffer_bytes: int = 1 << 30,
        encoder: TaskEncoder | None = None,
    ) -> None:
        self._check_source(source, ItemStage)
        super().__init__(source)
        self._costing = Costing("Balance", source.lane.own(cost))
        self._calls = EncoderCalls("Balance", source.info, encoder, "batch")
        self.candidates, self.cost, self.max_buffer_bytes = candidates, cost, max_buffer_bytes
        self._rule = StepRule("Balance", self.lane, candidates=candidates, weight=8, costlier=4)
        self._buffer = ItemBuffer(self, max_bytes=max_buffer_bytes)  # oldest first
        self._packs: list[_WaitingPack] = []  # costs and arrivals of the packs in `_buffer`
        self._consecutive_skips = 0

    def take(self, n: int) -> list[Element]:
        """Return the next pack in a list, which is empty at the end.

        After an error, the next call retries.
        """
        while True:
            self._fill()
            if not self._buffer:
                return []
            self._buffer.rebuild_parts()
            position = self._rule.choose([pack.cost for pack in self._packs], [pack.arrival for pack in self._packs])
            element = self._buffer[position]
            stays_unbuilt = self.lane.skips and not self._makes and chunked(self.source).is_certain(element.ref)
            if not stays_unbuilt:
                value_of(self.source, element)  # sets `element.value`
            self._buffer.remove(position)
            waiting = self._packs.pop(position)
            if type(element.value) is not Skip:
                self._count_yielded(waiting)
                return [element]
            self._count_lost(element.value)

    def _count_yielded(self, waiting: _WaitingPack) -> None:
        """Count a pack as yielded."""
        waited_slots = self._rule.count - waiting.arrival
        self._consecutive_skips = 0
        self._rule.count_yielded(waiting.cost)
        self.counts["packs"] += 1
        self.counts["held_slots"] += waited_slots
        self.counts["cost"] += waiting.cost

    def _count_lost(self, skip: Skip) -> None:
        """Count a lost pack, whose slot goes to another pack.

        Raises `EncodeError` for very many in a row. The stage upstream counts lost packs by reason.
        """
        self._consecutive_skips += 1
        if self._consecutive_skips >= self.info.max_empty:
            raise EncodeError(
                f"Balance: {self._consecutive_skips:,} packs in a row were skipped, the last one with {skip.reason!r}. "
                "Change `pack`."
            )

    def _fill(self) -> None:
        """Take packs until the buffer is full or the source ends."""
        while len(self._buffer) < self._rule.room:
            elements = chunked(self.source).take(1)
            if not elements:
                return
            (element,) = elements
            sizes = element.sizes
            if sizes is None:
                if type(value_of(self.source, element)) is Skip:
                    continue
                sizes = (self._calls.size(element),)
            self._packs.append(self._waiting_pack(element.ref, self._rule.count, sizes))
            # stages upstream check sizes when they rebuild a pack, but only know those of their own encoder
            element.sizes = sizes if self._calls.is_upstream else None
            self._buffer.add([element])

    def _waiting_pack(self, ref: ItemRef, arrival: int, sizes: tuple[Size, ...]) -> _WaitingPack:
        """Return the entry of `_packs` for a pack that arrived in slot `arrival`."""
        saved = _PackState(ref, arrival, [number for size in sizes for number in size])
        return _WaitingPack(self._costing.of_pack(sizes), arrival, msgspec.msgpack.encode(saved))

    def save_state(self) -> State:
        """Return the held packs, and the costs of recent packs.

        `held` has each held pack, oldest first, as a list in MessagePack: ref, slot of arrival, and length and images
        of each item in turn. `count` is the number of yielded packs, and `past` has the costs of the last ones, 8 bytes
        each.
        """
        return {
            "held": [pack.saved for pack in self._packs],
            "count": self._rule.count,
            "past": self._rule.past.tobytes(),
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`. Packs are rebuilt when they are yielded."""
        saved = parse_state(self, state, _BalanceState)
        if len(saved.packs) > self.candidates:
            raise CheckpointMismatchError(
                f"Balance: the state has {len(saved.packs)} packs, not {self.candidates}. Use its candidates= or "
                "another copy."
            )
        self.source.restore_state(saved.source)
        self._rule.restore(saved.count, saved.past)
        self._buffer.restore([])
        self._packs = []
        for raw in saved.packs:
            self._restore_pack(raw)

    def _restore_pack(self, raw: bytes) -> None:
        """Restore a waiting pack of a state without excluded items, or drop it if no item remains."""
        try:
            saved = msgspec.msgpack.decode(raw, type=_PackState)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointMismatchError(
                f"Balance: a pack of the state is damaged ({error}). Use another copy of the checkpoint."
            ) from error
        if len(saved.sizes) % 2 or not saved.sizes:
            raise CheckpointMismatchError(
                "Balance: the sizes of a pack in the state are damaged. Use another copy of the checkpoint."
            )
        sizes = tuple(zip(saved.sizes[::2], saved.sizes[1::2], strict=True))
        ref = as_ref(saved.ref)
        for remaining_ref in known_refs(self, [ref]):
            remaining = remaining_sizes(sizes, ref, remaining_ref) or sizes
            self._buffer.add([Element(remaining_ref, sizes=remaining if self._calls.is_upstream else None)])
            self._packs.append(self._waiting_pack(remaining_ref, saved.arrival, remaining))

    def settings(self) -> dict[str, Any]:
        """Return `candidates` and the name of the cost.

        The encoder's settings are included if this stage has an encoder of its own.
        """
        return {"candidates": self.candidates, "cost": self._costing.name, **self._calls.settings()}
