"""`OnlinePacker`: the stage that joins items into packs of limited length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

import msgspec

from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.advice import check_choice, check_count
from savable_pipeline.stages.cost import Cost, Costing, Size, check_cost
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_buffer import restored_elements, saved_elements
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.packing.pack_stage import EMPTY_PACK, PackStage
from savable_pipeline.stages.packing.packing_policies import (
    OpenPack,
    Packing,
    PackingFunction,
    Piece,
    Policy,
    build_packing,
    saved_piece,
)
from savable_pipeline.stages.packing.piece_maker import PackerState, PieceMaker, SavedPiece, TooLong, piece_ref
from savable_pipeline.stages.stage import ItemStage, State, parse_state
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import check_function, function_settings
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

_decode_pieces = msgspec.msgpack.Decoder(list[SavedPiece]).decode


def check_packing(options: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for a wrong setting of an `OnlinePacker`."""
    names = "policy", "max_images", "max_cost", "cost", "too_long"
    policy, max_images, max_cost, cost, too_long = (options[name] for name in names)
    for name in ("max_length", "open_packs", *(["max_images"] if max_images is not None else [])):
        check_count("OnlinePacker", name, options[name])
    if callable(policy):
        check_function("OnlinePacker", "policy", policy)
        if max_images is not None or max_cost is not None:
            raise ValueError("OnlinePacker: a policy function gets only lengths. Remove max_images and max_cost.")
    else:
        check_choice("OnlinePacker", "policy", policy, get_args(Policy))
    if too_long is not None:
        check_choice("OnlinePacker", "too_long", too_long, get_args(TooLong))
    if (max_cost is None) != (cost is None):
        raise ValueError("OnlinePacker: set max_cost and cost together, such as cost=sp.attention_cost(hidden=2048)")
    if cost is not None:
        check_cost("OnlinePacker", cost)


class OnlinePacker(PackStage):
    """Yields packs of items whose lengths sum to at most `max_length` tokens.

    A pack is `encoder.pack(items, rng)`.

    Args:
        source: A stage of items.
        max_length: The most tokens of a pack.
        policy: "best_fit" puts an item into the fullest open pack with room, "first_fit" into the oldest.
            "first_fit_decreasing" holds items until they fill `open_packs` packs, none for more than 5 times that, and
            packs the largest first, which wastes the fewest tokens. "sequential" has one open pack, and cuts items at
            its end (Johnson: Near-Optimal Bin Packing Algorithms, 1973). Or a function: it gets the lengths of held
            items that fill `open_packs` packs, and returns packs as lists of indices, each index once. It cannot be
            combined with `max_images` or `max_cost`. A state has the function's name and `settings()`.
        open_packs: The most open packs.
        max_images: The most images in a pack, by `encoder.images(item)`.
        max_cost: The most `cost` in a pack, so that packs take about the same time in training. Items that cost more
            are alone in a pack, or cut by "sequential".
        cost: `cost(length, images)`, such as `sp.attention_cost(hidden=2048)`.
        too_long: For items longer than `max_length`: "skip" and count them, "truncate" or "split" them by
            `encoder.cut`. None: "split" with "sequential", else "skip", with a warning above 10 %.
        max_buffer_bytes: The most bytes of items in all open packs of a process; up to 64 items that were just taken do
            not count. Other items are rebuilt when they are needed.
        encoder: Measures, cuts and packs items. None: the encoder upstream.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: The encoder raised, very many items in a row were skipped, or a function's packs are invalid.
        CheckpointMismatchError: An item that is rebuilt after a resume has another length.

    Example:
        >>> class Captions(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return "abc"[: 1 + sample.json()["id"] % 3]  # 1, 2, 3, 1, 2, 3, … tokens
        ...     def pack(self, items, rng):
        ...         return "|".join(items)
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Captions())
        >>> packs = sp.OnlinePacker(items, max_length=4, policy="first_fit")
        >>> next(packs), next(packs)
        ('a|ab|a', 'abc|a')
        >>> def in_pairs(lengths):
        ...     return [range(start, min(start + 2, len(lengths))) for start in range(0, len(lengths), 2)]
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Captions())
        >>> packs = sp.OnlinePacker(items, max_length=5, policy=in_pairs)
        >>> next(packs), next(packs)
        ('a|ab', 'abc|a')
    """

    def __init__(
        self,
        source: ItemStage,
        *,
        max_length: int,
        policy: Policy | PackingFunction = "best_fit",
        open_packs: int = 16,
        max_images: int | None = None,
        max_cost: int | None = None,
        cost: Cost | None = None,
        too_long: TooLong | None = None,
        max_buffer_bytes: int = 1 << 30,
        encoder: TaskEncoder | None = None,
    ) -> None:
        check_packing(locals())
        self._check_source(source, ItemStage)
        super().__init__(source)
        self._costing = None if cost is None else Costing("OnlinePacker", source.lane.own(cost))
        if self._costing is not None and (max_cost or 0) < (least := max(1, self._costing.of(1, 0))):
            raise ValueError(f"OnlinePacker: max_cost must be at least {least}, the cost of one token, not {max_cost}")
        self._calls = EncoderCalls("OnlinePacker", source.info, encoder, "pack")
        self.policy: Policy | PackingFunction = source.lane.own(policy)
        self.max_length, self.open_packs, self.max_images = max_length, open_packs, max_images
        self.max_cost, self.cost, self.max_buffer_bytes = max_cost, cost, max_buffer_bytes
        self._chose_too_long = too_long is not None
        self.too_long = too_long or ("split" if policy == "sequential" else "skip")
        self._count = self._skipped_packs_in_row = 0  # `_count` is the number of yielded and skipped packs
        self._counts_late = False  # whether packs were yielded unbuilt, and are counted when they are built

    @cached_property
    def _packing(self) -> Packing:
        """Return the policy with its open packs."""
        return build_packing(
            self.policy,
            max_length=self.lane.facts.decisions.max_length or self.max_length,
            max_images=self.max_images or 0,
            max_cost=self.max_cost or 0,
            costing=self._costing,
            open_packs=self.open_packs,
            key=self._calls.key(self.info),
        )

    @cached_property
    def _pieces(self) -> PieceMaker:
        """Return the object that cuts items into pieces for the policy."""
        chosen, limit = self._chose_too_long, self.max_buffer_bytes
        return PieceMaker(self, self._calls, self._packing, self.too_long, asked=chosen, max_bytes=limit)

    def describe(self) -> StageInfo:
        """Describe packs of the encoder.

        If the encoder upstream declares sizes and also packs, this stage chooses and yields packs unbuilt.
        """
        source = self.source.info
        return replace(super().describe(), declared=source.declared and source.encoder is self._calls.encoder)

    def take(self, n: int) -> list[Element]:
        """Return the next pack in a list, which is empty only at the end.

        The pack is unbuilt if the encoder declares sizes.
        """
        while (pack := self._next_pack()) is not None:
            skips = self.lane.skips and self.is_certain((0, *map(piece_ref, pack.pieces)))  # for any number of a pack
            if skips or self.info.declared:
                self._counts_late |= not skips
                element = self._element(pack.pieces)
                if self._makes:
                    self.make([element])
                self._close(pack)
                if skips:
                    self._count_pack(element.sizes or ())
                return [element]
            if (combined := self._combine(pack)) is not None:
                return [combined]
        return []

    def _next_pack(self) -> OpenPack | None:
        """Add items until the policy has a pack to yield. Returns the pack, or None at the end."""
        while (pack := self._packing.due()) is None:
            if not self._pieces.add_next():
                return self._packing.last()
        return pack

    def _combine(self, pack: OpenPack) -> Element | None:
        """Build and close a pack. Returns None if all of its items are lost or the encoder skips it."""
        items = self._pieces.values(pack.pieces)
        pieces = [piece for piece, item in zip(pack.pieces, items, strict=True) if type(item) is not Skip]
        items = [item for item in items if type(item) is not Skip]
        packed = self._calls.combined(items, self._count, self.info) if items else EMPTY_PACK
        if type(packed) is Skip:
            self._release(pack)
            self._drop(packed, pieces)
            return None
        element = self._element(pieces)
        element.value = packed
        self._close(pack)
        self._count_pack(element.sizes or ())
        return element

    def _element(self, pieces: list[Piece]) -> Element:
        """Return an unbuilt element for the next pack number and these pieces."""
        sizes = tuple([(piece.length, piece.images) for piece in pieces])
        return Element((self._count, *map(piece_ref, pieces)), sizes=sizes)

    def _close(self, pack: OpenPack) -> None:
        """Remove a pack that is yielded from the open ones, and raise the pack number."""
        self._release(pack)
        self._count += 1
        self._skipped_packs_in_row = 0

    def _count_pack(self, sizes: Sequence[Size]) -> None:
        """Count a pack of items with these sizes."""
        tokens = sum([length for length, _ in sizes])
        self.counts["packs"] += 1
        self.counts["items"] += len(sizes)
        self.counts["tokens"] += tokens
        self.counts["room"] += max(0, self._packing.max_length - tokens)
        if self._costing is not None:
            self.counts["cost"] += self._costing.of_pack(sizes)

    def _release(self, pack: OpenPack) -> None:
        """Remove a pack from the open ones, and subtract the bytes of its items."""
        self._packing.remove(pack)
        self._pieces.release_bytes(pack.pieces)

    def _drop(self, skip: Skip, pieces: list[Piece]) -> None:
        """Count a skipped pack of these pieces, so that the next pack has another number and random numbers.

        A pack without pieces is not counted, because all of its items were lost and are counted already.
        """
        if pieces:
            self._count += 1
            self._count_skip(skip.reason, pieces[0].ref)
            self._skipped_packs_in_row += 1
        if self._skipped_packs_in_row >= self.info.max_empty:
            raise EncodeError(
                f"{self._calls.encoder_name}.pack skipped {self._skipped_packs_in_row:,} packs in a row, the last "
                f"one with {skip.reason!r}. Change `pack`."
            )

    def _rebuild(self, refs: list[ItemRef]) -> list[Element]:
        for ref in refs:
            if isinstance(ref[0], tuple) and len(ref) != 3:  # the ref of a cut is (ref of its item, start, end)
                raise CheckpointMismatchError(f"OnlinePacker: {ref} is no item. Use another copy of the checkpoint.")
        items = super()._rebuild([ref[0] if isinstance(ref[0], tuple) else ref for ref in refs])
        return [self._cut(item, ref) for item, ref in zip(items, refs, strict=True)]

    def _cut(self, item: Element, ref: ItemRef) -> Element:
        """Return the item, or only a part of it if `ref` is (ref of the item, start, stop)."""
        if not isinstance(ref[0], tuple):
            return Element(ref, item.value, measured=item.measured)
        return Element(ref, item.value if type(item.value) is Skip else self._calls.cut(item.value, *ref[1:]))

    def _count_rebuilt(self, pack: Element, items: list[Element]) -> None:
        if self._counts_late:
            # another number of sizes means that they are not those of these items
            known = pack.sizes if len(pack.sizes or ()) == len(items) else None
            self._count_pack(known or [self._calls.size(item) for item in items])

    def save_state(self) -> State:
        """Return the open packs, and the items that are in no pack yet.

        `packs` has each open pack, oldest first, as a list in MessagePack: ref and length of each item. Items that have
        images or are cut also have the number of images, the start and the whole length. Items that
        "first_fit_decreasing" holds also have the number of rounds. `count` is the number of yielded packs, and `taken`
        the ref of the item that is not completely in packs yet, or None.

        The following are only saved if they are needed. `lengths` has the limits of open packs if the run decided
        another `max_length`; `taken_part` the start of the rest of `taken`, and the whole length of `taken`;
        `taken_size` its declared length and images; `ahead` the items after it, with their sizes; `held` the held
        items; `rounds` how often held items have been put into packs.
        """
        packing, taken = self._packing, self._pieces.taken
        state = {
            "packs": [pack.save() for pack in packing.packs],
            "count": self._count,
            "taken": None if taken is None else taken.ref,
            "source": self.source.save_state(),
        }
        lengths = [pack.length for pack in packing.packs]
        needed = {
            "taken_part": (taken.start, taken.total) if taken is not None and taken.start else None,
            "taken_size": taken.sizes[0] if taken is not None and taken.sizes else None,
            "ahead": saved_elements(self._pieces.ahead) or None,
            "lengths": lengths if any(length != self.max_length for length in lengths) else None,
            "held": [saved_piece(piece) for piece in packing.waiting] if packing.holds else None,
            "rounds": packing.rounds if packing.holds else None,
        }
        return {**state, **{name: value for name, value in needed.items() if value is not None}}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`.

        Items of open packs are rebuilt when they are needed.
        """
        saved = parse_state(self, state, PackerState)
        self.source.restore_state(saved.source)
        self._count = saved.count
        self._pieces.restore_taken(saved.taken, saved.taken_part, saved.taken_size)
        self._pieces.ahead = restored_elements(self, saved.ahead)
        packing = self._packing
        packing.rounds = saved.rounds
        lengths = saved.lengths or [self.max_length] * len(saved.packs)
        for packed, length in zip(saved.packs, lengths, strict=True):
            if pieces := self._pieces.known(_decode_pieces(packed)):
                pack = packing.open(length)
                for piece in pieces:
                    packing.put(piece, pack)
                if pack.room < 0 or pack.images < 0:
                    over = f"{-pack.room} longer" if pack.room < 0 else f"of {-pack.images} images more"
                    raise CheckpointMismatchError(
                        f"OnlinePacker(max_length={length}, max_images={self.max_images}): an open pack of the "
                        f"state is {over}. Use the saved limits."
                    )
        for piece in self._pieces.known(saved.waiting):
            packing.add(piece)

    def settings(self) -> dict[str, Any]:
        """Return every argument that changes packs.

        The settings of the encoder are included if it is not the one upstream.
        """
        own = self._calls.settings()
        if self.max_images is not None:
            own["max_images"] = self.max_images
        if self._costing is not None:
            own |= {"max_cost": self.max_cost, "cost": self._costing.name}
        if self.too_long != "skip":
            own["too_long"] = self.too_long
        policy = function_settings("policy", self.policy) if callable(self.policy) else {"policy": self.policy}
        return {"max_length": self.max_length, **policy, "open_packs": self.open_packs, **own}
