"""`OnlinePacker`: the stage that joins items, in the order of their arrival, into packs of bounded length."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from savable_pipeline.data.dataset.sample import skip_counters
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.cost import Cost, Costing, Size
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_ref import MISSING, ItemRef, as_ref, sample_indices
from savable_pipeline.stages.memory_budget import BudgetShare, MemoryBudget, size_of
from savable_pipeline.stages.packing.packer_state import PackerState, Placed, piece_ref, placed
from savable_pipeline.stages.packing.packing_function import ByFunction, PackingFunction
from savable_pipeline.stages.packing.packing_policies import ORDERS, OpenPack, Packing, Piece, Policy, make_packing
from savable_pipeline.stages.setting_rules import OTHER_ORDER, SettingRule
from savable_pipeline.stages.stage import ItemStage, Measured, StageInfo, State, max_empty_samples, parse_state
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.stages.user_function import check_function, function_settings

log = logging.getLogger(__name__)

TooLong = Literal["skip", "truncate", "split"]
_NOTHING = Skip("a pack of nothing")
_LEAST = 1  # token that an item must have: a pack of empty items would never be full


class OnlinePacker(ItemStage):
    """Yields packs: `encoder.pack(items, rng)` of items whose lengths, in tokens, sum to at most `max_length`.

    Args:
        source: A stage of items.
        max_length: Most tokens of a pack.
        policy: "best_fit": an item goes into the fullest open pack with room; "first_fit": the oldest;
            "first_fit_decreasing": items for `open_packs` packs are held, none for over 5 times that, and the largest
            placed first: least waste; "sequential": one pack, items cut at its end (Johnson: Near-Optimal Bin Packing
            Algorithms, 1973). Or a function from a list of lengths, enough for `open_packs` packs, to packs as lists of
            indices, each once, by the lengths alone; not with `max_images`, `max_cost`. A state keeps its name, and
            `settings()` of an object.
        open_packs: Most packs open; at a finite source's end they follow.
        max_images: Most of `encoder.images(item)` in a pack.
        max_cost: Most `cost` in a pack, so that packs train equally long; costlier items are alone, or cut by
            "sequential".
        cost: `cost(length, images)`, such as `sp.attention_cost(hidden=2048)`.
        too_long: Items beyond `max_length`: "skip", counted, "truncate" or "split" by `encoder.cut`. None: "split" with
            "sequential", else "skip".
        max_held_bytes: Most bytes of items in all open packs of a process; others are made again.
        encoder: Measures, cuts and packs. None: the one upstream.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: The encoder raised, very many items in a row were skipped, or a function's packs are not valid.
        CheckpointMismatchError: An item made again after a resume has another length.

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

    source: ItemStage
    ref: ItemRef = ()
    """The last pack's number in the lane, then the refs of its items; (ref, start, stop) for a cut item."""
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {"order": SettingRule(fixed=OTHER_ORDER, follows=("policy",))}

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
        max_held_bytes: int = 1 << 30,
        encoder: TaskEncoder | None = None,
    ) -> None:
        if max_length < 1 or open_packs < 1:
            raise ValueError(f"OnlinePacker: max_length and open_packs must be at least 1: {max_length}, {open_packs}")
        if max_images is not None and max_images < 1:
            raise ValueError(f"OnlinePacker: max_images must be at least 1, not {max_images}; None sets no bound")
        named = None if callable(policy) else policy
        if callable(policy):
            check_function("OnlinePacker", "policy", policy)
            if max_images is not None or max_cost is not None:
                raise ValueError(
                    "OnlinePacker: a function as policy knows lengths alone: leave max_images and max_cost out"
                )
        for name, value, choices in [("policy", named, get_args(Policy)), ("too_long", too_long, get_args(TooLong))]:
            if value is not None and value not in choices:
                raise ValueError(f"OnlinePacker: {name} must be one of {', '.join(choices)}, not {value!r}")
        if (max_cost is None) != (cost is None):
            raise ValueError("OnlinePacker: max_cost and cost, such as sp.attention_cost(hidden=2048), go together")
        self._costing = None if cost is None else Costing("OnlinePacker", cost)
        if self._costing is not None and (max_cost or 0) < (least := max(1, self._costing.of(1, 0))):
            raise ValueError(f"OnlinePacker: max_cost must be at least the cost of one token, {least}, not {max_cost}")
        self._check_source(source, ItemStage)
        super().__init__(source)
        chosen = encoder or source.info.encoder
        if chosen is None:
            raise ValueError("OnlinePacker: no Encode stage upstream; give encoder=")
        self._calls = EncoderCalls("OnlinePacker", source.lane, chosen, "pack")
        self.max_length = max_length
        self.policy: Policy | PackingFunction = policy
        self.open_packs = open_packs
        self.max_images = max_images
        self.max_cost = max_cost
        self.cost = cost
        self.max_held_bytes = max_held_bytes
        self.too_long = too_long or ("split" if policy == "sequential" else "skip")
        self._held = BudgetShare(source.lane.shared("held items", MemoryBudget), max_bytes=max_held_bytes)
        self._taken: Piece | None = None  # an item of the source that is not placed yet, or not to its end
        self._taken_size: Size | None = None  # what the encoder told of it without encoding
        self._count = 0  # packs given
        self._counts_when_made = False  # packs that `take_measured` gave
        self._row_of_skips = 0  # items
        self._row_of_skipped_packs = 0

    @cached_property
    def _packing(self) -> Packing:
        if callable(self.policy):
            return ByFunction(self.policy, max_length=self.max_length, open_packs=self.open_packs)
        return make_packing(
            self.policy,
            max_length=self.max_length,
            max_images=self.max_images or 0,
            max_cost=self.max_cost or 0,
            costing=self._costing,
            open_packs=self.open_packs,
            key=self._calls.key(self.info),
        )

    def describe(self) -> StageInfo:
        """The source's, one deeper, with the encoder whose `length`, `images`, `cut` and `pack` are used."""
        return replace(super().describe(), encoder=self._calls.encoder)

    def ref_alone(self, ref: ItemRef) -> ItemRef:
        """The ref of a first pack that holds this item alone."""
        return (0, ref)

    @property
    def held_items(self) -> int:
        """Made items in open packs, and the made item that is not placed yet."""
        return self._held.count + (self._taken is not None and self._taken.item is not MISSING)

    @property
    def unmade(self) -> bool:
        """Whether items are placed before they are made: the encoder upstream tells their lengths, and is ours."""
        return self.source.unmade and self.source.info.encoder is self._calls.encoder

    def __next__(self) -> Any:
        while (pack := self._fill()) is not None:
            packed = self._give(pack)
            if type(packed) is not Skip:
                return packed
        raise StopIteration

    def take_measured(self) -> Measured | None:
        """The next pack with the sizes of its items, not made where `unmade`; None only at the end."""
        if not self.unmade:
            return super().take_measured()
        self._counts_when_made = True
        pack = self._fill()
        if pack is None:
            return None
        self._close(pack, pack.pieces)
        return Measured(self.ref, self.sizes, MISSING)

    def _fill(self) -> OpenPack | None:
        """The next pack to give, once enough items are placed; None at the end."""
        while (pack := self._packing.due()) is None:
            if self._taken is None and not self._take():
                return self._packing.last()
            self._place()
        return pack

    def _take(self) -> bool:
        measured = self.source.take_measured() if self.unmade else self._made()
        if measured is not None:
            self._taken = Piece(measured.ref, 0, item=measured.item)
            self._taken_size = measured.sizes[0] if measured.item is MISSING and measured.sizes else None
        return measured is not None

    def _made(self) -> Measured | None:
        items, refs = self.source.take(1)
        return Measured(refs[0], None, items[0]) if items else None

    def _place(self) -> None:
        """Place as much of the taken item as fits; keep the rest for the next call."""
        taken = self._taken
        assert taken is not None
        total = self._total_of(taken)
        if total is None:
            self._taken = None
            return
        stop = taken.total = total
        if total > self.max_length:
            if self.too_long == "skip":
                self._skipped("longer than max_length", total, total)
                self._taken = None
                return
            stop = self.max_length if self.too_long == "truncate" else total
        piece = Piece(taken.ref, min(stop - taken.start, self._packing.reach), 0, taken.start, total)
        item = self._measure(piece)
        if type(item) is Skip:
            self._taken = None
            return
        if not taken.start and stop < total:
            self.counts["truncated"] += 1
            self.counts["truncated_tokens"] += total - stop
        if self.max_images is not None and piece.images > self.max_images:
            self._skipped("of more than max_images", piece.length, piece.images)
        else:
            self._row_of_skips = 0
            if item is not MISSING:
                self._hold(piece, item)
            self._packing.add(piece)
        taken.start += piece.length
        if taken.start == stop:
            self._taken = None

    def _total_of(self, taken: Piece) -> int | None:
        """The length of the taken item, from `length_of` or from the item; None if it can no longer be made."""
        if self._taken_size is not None:
            return self._calls.least_told(self._taken_size[0], least=_LEAST)
        item = self._item_of(taken)
        return None if type(item) is Skip else self._calls.length(item, least=_LEAST)

    def _item_of(self, taken: Piece) -> Any:
        """The taken item; a `Skip` if it can no longer be made, which the stage upstream has counted."""
        if taken.item is MISSING:
            taken.item = self._fetch_whole(taken)
        return taken.item

    def _measure(self, piece: Piece) -> Any:
        """Set images and cost of a piece of the taken item, and return its part of the item; MISSING if not made yet.

        The number of images in a part is only known with the item.
        """
        assert self._taken is not None
        if self._taken_size is not None and not (piece.is_cut and self._taken_size[1]):
            item, piece.images = MISSING, self._taken_size[1]
        else:
            whole = self._item_of(self._taken)
            item = whole if type(whole) is Skip else self._part_of(whole, piece)
            piece.images = 0 if type(whole) is Skip else self._calls.images(item)
        self._set_cost(piece)
        return item

    def _set_cost(self, piece: Piece) -> None:
        if self._costing is not None:
            piece.cost = self._costing.of(piece.length, piece.images)

    def _hold(self, piece: Piece, item: Any) -> None:
        """Keep a made item with its piece, if the memory budget allows it."""
        piece.item_bytes = size_of(item)
        if self._held.hold(piece.item_bytes):
            piece.item = item

    def _give(self, pack: OpenPack) -> Any:
        """The pack, made; a `Skip` if nothing is left of it or the encoder skips it."""
        made = [(piece, self._make(piece) if piece.item is MISSING else piece.item) for piece in pack.pieces]
        left = [(piece, item) for piece, item in made if type(item) is not Skip]
        packed = self._calls.combined([item for _, item in left], self._count, self.info) if left else _NOTHING
        pieces = [piece for piece, _ in left]
        if type(packed) is Skip:
            self._let_go(pack)
            self._left_out(packed, pieces)
        else:
            self._count_pack(self._close(pack, pieces))
        return packed

    def _close(self, pack: OpenPack, pieces: list[Piece]) -> tuple[Size, ...]:
        """Close a pack with these of its pieces, and return their sizes."""
        self._let_go(pack)
        self.ref = (self._count, *map(piece_ref, pieces))
        self.sizes = sizes = tuple([(piece.length, piece.images) for piece in pieces])
        self._count += 1
        self._row_of_skipped_packs = 0
        return sizes

    def _count_pack(self, sizes: Sequence[Size]) -> None:
        """Count a pack, made of items of these sizes."""
        tokens = sum([length for length, _ in sizes])
        self.counts["packs"] += 1
        self.counts["items"] += len(sizes)
        self.counts["tokens"] += tokens
        self.counts["room"] += self.max_length - tokens
        if self._costing is not None:
            self.counts["cost"] += self._costing.of_pack(sizes)

    def _let_go(self, pack: OpenPack) -> None:
        self._packing.packs.remove(pack)
        for piece in pack.pieces:
            if piece.item is not MISSING:
                self._held.release(piece.item_bytes)

    def _left_out(self, skip: Skip, pieces: list[Piece]) -> None:
        """Count a pack of these pieces that the encoder skipped: the next one has another number, and random numbers.

        An empty pack is not counted: its items were.
        """
        if pieces:
            self._count += 1
            self._count_skip(skip.reason, pieces[0].ref)
            self._row_of_skipped_packs += 1
        if self._row_of_skipped_packs >= max_empty_samples(self.info.population):
            raise EncodeError(
                f"{self._calls.encoder_name}.pack skipped {self._row_of_skipped_packs} packs in a row, the last as "
                f"{skip.reason!r}: this data will never give one"
            )

    def _make(self, piece: Piece) -> Any:
        """Make the item of a piece again; a `Skip` if that is no longer possible."""
        whole = self._fetch_whole(piece)
        return whole if type(whole) is Skip else self._part_of(whole, piece)

    def _fetch_whole(self, piece: Piece) -> Any:
        """Make the whole item of a piece again, and fill in all other missing pieces of that item."""
        whole = self.source.fetch(piece.ref)
        if type(whole) is Skip:
            return whole
        length = self._calls.length(whole, least=_LEAST)
        if piece.total and length != piece.total:
            raise self._changed(piece, length)
        if self._taken is not None and self._taken.ref == piece.ref:
            self._taken.item = whole
        for other in self._packing.pieces():
            if other is not piece and other.item is MISSING and other.ref == piece.ref:
                self._hold(other, self._part_of(whole, other))
        return whole

    def _changed(self, piece: Piece, length: int) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"OnlinePacker of {self.lane}: the item {piece.ref} took {piece.total} when it was placed; made again it "
            f"takes {length}: {self._calls.encoder_name} or the data changed since the state was saved (go on with "
            "the old one), or its result depends on more than the sample and `rng`"
        )

    def _part_of(self, whole: Any, piece: Piece) -> Any:
        """The tokens of an item that a piece covers."""
        return self._calls.cut(whole, piece.start, piece.start + piece.length) if piece.is_cut else whole

    def _skipped(self, why: str, tokens: int, measure: int) -> None:
        assert self._taken is not None
        self._count_skip(why, self._taken.ref)
        self.counts["skipped_tokens"] += tokens
        self._row_of_skips += 1
        if self._row_of_skips >= max_empty_samples(self.info.population):
            raise EncodeError(
                f"OnlinePacker(max_length={self.max_length}, max_images={self.max_images}): {self._row_of_skips} items "
                f"in a row were {why}, the last {measure}; no pack will ever come of this data"
            )

    def _count_skip(self, reason: str, ref: ItemRef) -> None:
        """Count an item, or a pack by its first item, as left out."""
        self.counts.update(skip_counters(reason, next(sample_indices(as_ref(ref)))))

    def fetch(self, ref: ItemRef) -> Any:
        """Make the pack with this ref again, without the items that can no longer be made; a `Skip` if none can."""
        return self.make_again(ref)[0]

    def make_again(self, ref: ItemRef) -> tuple[Any, ItemRef]:
        """What `fetch(ref)` makes, and the ref without those items; () if none is left."""
        made = [(part, self._fetch_piece(part)) for part in ref[1:]]
        left = [(part, item) for part, item in made if type(item) is not Skip]
        if not left:
            return _NOTHING, ()
        pack = self._calls.combined([item for _, item in left], ref[0], self.info)
        if type(pack) is Skip:
            self._count_skip(pack.reason, left[0][0])
        elif self._counts_when_made:
            self._count_pack([self._size(item) for _, item in left])
        return pack, (ref[0], *[part for part, _ in left])

    def _size(self, item: Any) -> Size:
        return self._calls.length(item, least=_LEAST), self._calls.images(item)

    def _fetch_piece(self, ref: ItemRef) -> Any:
        if not isinstance(ref, list | tuple) or (isinstance(ref[0], list | tuple) and len(ref) != 3):
            raise CheckpointMismatchError(f"OnlinePacker: {ref} is not the ref of an item, or of a part of one")
        if not isinstance(ref[0], list | tuple):
            return self.source.fetch(ref)
        whole_ref, start, stop = ref
        whole = self.source.fetch(whole_ref)
        return whole if type(whole) is Skip else self._calls.cut(whole, start, stop)

    def save_state(self) -> State:
        """`packs`: for each open pack, oldest first, the ref and length of each item; `count`: packs given so far.

        An item with images or that was cut has its images, start and whole length, too; one that "first_fit_decreasing"
        holds back, the number of rounds. `taken`: the ref of the item
        that is not placed yet, or None. Only where needed: `taken_part`, the start of that item's rest and its whole
        length; `taken_size`, the length and images that the encoder told of it; `held`, the items in no pack yet;
        `rounds`, how often held items have been placed.
        """
        packing, taken = self._packing, self._taken
        state = {
            "packs": [[placed(piece) for piece in pack.pieces] for pack in packing.packs],
            "count": self._count,
            "taken": None if taken is None else taken.ref,
            "source": self.source.save_state(),
        }
        if taken is not None and taken.start:
            state["taken_part"] = (taken.start, taken.total)
        if taken is not None and self._taken_size is not None:
            state["taken_size"] = self._taken_size
        if packing.holds:
            state["held"] = [placed(piece) for piece in packing.held]
            state["rounds"] = packing.rounds
        return state

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; items of open packs are made again when they are needed."""
        saved = parse_state(self, state, PackerState)
        self.source.restore_state(saved.source)
        self._count = saved.count
        self._taken = None
        if saved.taken is not None:
            start, total = saved.taken_part
            taken = Piece(as_ref(saved.taken), 0, start=start, total=total)
            self._taken = taken if self.keep_whole([taken.ref]) else None
            self._taken_size = saved.taken_size
        packing = self._packing
        packing.rounds = saved.rounds
        for pack_of in saved.packs:
            pieces = self._known(pack_of)
            if pieces:
                pack = packing.open()
                for piece in pieces:
                    pack.add(piece)
                if pack.room < 0 or pack.images < 0:
                    over = f"{-pack.room} longer" if pack.room < 0 else f"of {-pack.images} images more"
                    raise CheckpointMismatchError(
                        f"OnlinePacker(max_length={self.max_length}, max_images={self.max_images}): an open pack of "
                        f"the state is {over}"
                    )
        for piece in self._known(saved.held):
            packing.add(piece)

    def _known(self, saved: list[Placed]) -> list[Piece]:
        """The pieces of a state whose source still exists."""
        pieces = [each.piece() for each in saved]
        for piece in pieces:
            self._set_cost(piece)
        return [piece for piece in pieces if self.keep_whole([piece.ref])]

    def settings(self) -> dict[str, Any]:
        """Every argument that changes the packs; the encoder only if it is not the one upstream."""
        own = encoder_settings(self._calls.encoder, upstream=self.source.info.encoder)
        if self.max_images is not None:
            own["max_images"] = self.max_images
        if self._costing is not None:
            own |= {"max_cost": self.max_cost, "cost": self._costing.name}
        if self.too_long != "skip":
            own["too_long"] = self.too_long
        if self.policy in ORDERS:
            own["order"] = ORDERS[self.policy]
        policy = function_settings("policy", self.policy) if callable(self.policy) else {"policy": self.policy}
        return {"max_length": self.max_length, **policy, "open_packs": self.open_packs, **own}
