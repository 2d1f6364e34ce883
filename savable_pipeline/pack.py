"""`OnlinePacker`: lays items end to end in packs of bounded length, as they come."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec

from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.encoder_calls import EncoderCalls
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.held_items import ByteBudget, HeldItems, size_of
from savable_pipeline.pack_policies import MISSING, OpenPack, Packing, Piece, Policy, make_packing
from savable_pipeline.stage import ItemRef, Stage, State, as_ref, dry_limit, parse_state

log = logging.getLogger(__name__)

TooLong = Literal["skip", "truncate", "split"]
_LEAST = 1  # token an item takes: a pack of nothing would never be full


class _Placed(msgspec.Struct, array_like=True):
    """A piece in a state; what has its default may be left out at the end."""

    ref: Any
    length: int
    images: int = 0
    start: int = 0
    total: int = 0  # 0: the item is whole


class _PackerState(msgspec.Struct):
    packs: list[list[_Placed]]
    count: int
    taken: Any
    source: dict[str, Any]
    taken_part: tuple[int, int] = (0, 0)
    held: list[_Placed] = []
    rounds: int = 0


class OnlinePacker(Stage):
    """Gives packs: what `encoder.pack(items, rng)` makes of items whose lengths sum to at most `max_length`.

    `policy` says which item goes where, with at most `open_packs` packs open: "best_fit" (the fullest with room),
    "first_fit" (the oldest), "first_fit_decreasing" (items for so many packs are held and laid out longest first:
    the fullest packs, and the most held), or "sequential" (end to end, cut at the border of a pack). With `max_images`
    the sum of `encoder.images(item)` is bounded too. What has no place waits for the next pack; when a finite source
    ends, the open packs are given.

    An item longer than `max_length` is by `too_long` left out ("skip"), cut off ("truncate") or cut into several
    ("split"); None: split where the policy cuts anyway, else skipped. `encoder.cut` does the cutting. What is left
    out is counted, in items and tokens. `encoder=None`: the encoder upstream.

    All open packs of a process together hold at most `max_held_bytes` of items; what is beyond is made again by the
    encoder when its pack is given.
    """

    def __init__(
        self,
        source: Stage,
        *,
        max_length: int,
        policy: Policy = "best_fit",
        open_packs: int = 16,
        max_images: int | None = None,
        too_long: TooLong | None = None,
        max_held_bytes: int = 1 << 30,
        encoder: TaskEncoder | None = None,
    ) -> None:
        if max_length < 1 or open_packs < 1:
            raise ValueError(f"OnlinePacker: max_length and open_packs must be at least 1: {max_length}, {open_packs}")
        if max_images is not None and max_images < 1:
            raise ValueError(f"OnlinePacker: max_images must be at least 1, not {max_images}; None sets no bound")
        for name, value, choices in [("policy", policy, get_args(Policy)), ("too_long", too_long, get_args(TooLong))]:
            if value is not None and value not in choices:
                raise ValueError(f"OnlinePacker: {name} must be one of {', '.join(choices)}, not {value!r}")
        super().__init__(source)
        chosen = encoder or source.encoder
        if chosen is None:
            raise ValueError("OnlinePacker: no Encode stage upstream; give encoder=")
        self._calls = EncoderCalls(self, chosen, "pack")
        self.max_length = max_length
        self.policy: Policy = policy
        self.open_packs = open_packs
        self.max_images = max_images
        self.too_long = too_long or ("split" if policy == "sequential" else "skip")
        self._held = HeldItems(self.lane.shared("held items", ByteBudget), max_bytes=max_held_bytes)
        self._taken: Piece | None = None  # of the source, not yet placed, or not all of it
        self._count = 0  # packs given
        self._row_of_skips = 0
        self._ref: ItemRef = ()

    @cached_property
    def _packing(self) -> Packing:
        return make_packing(
            self.policy,
            max_length=self.max_length,
            max_images=self.max_images or 0,
            open_packs=self.open_packs,
            key=self._calls.key,
        )

    @property
    def encoder(self) -> TaskEncoder:
        """The encoder whose `length`, `images`, `cut` and `pack` are used."""
        return self._calls.encoder

    @property
    def ref(self) -> ItemRef:
        """The ref of the pack given last: its number in the lane, then the refs of its items.

        That of an item which was cut is (ref, start, stop).
        """
        return self._ref

    @property
    def held_items(self) -> int:
        """Items in open packs."""
        return self._held.count + (self._taken is not None and self._taken.item is not MISSING)

    def __next__(self) -> Any:
        while (pack := self._packing.due()) is None:
            if self._taken is None and not self._take():
                pack = self._packing.last()
                if pack is None:
                    raise StopIteration
                break
            self._place()
        return self._give(pack)

    def _take(self) -> bool:
        items, refs = self.source.take(1)
        if items:
            self._taken = Piece(refs[0], 0, item=items[0])
        return bool(items)

    def _place(self) -> None:
        """Place as much of the item that was taken as fits; the rest waits."""
        taken = self._taken
        assert taken is not None
        if taken.item is MISSING:
            taken.item = self._fetch_whole(taken)
            if type(taken.item) is Skip:  # it cannot be made again; counted where that was found
                self._taken = None
                return
        stop = total = taken.total = self._calls.length(taken.item, least=_LEAST)
        if total > self.max_length:
            if self.too_long == "skip":
                self._skipped("longer than max_length", total, total)
                self._taken = None
                return
            stop = self.max_length if self.too_long == "truncate" else total
        start = taken.start
        piece = Piece(taken.ref, min(stop - start, self._packing.reach), 0, start, total)
        item = self._part_of(taken.item, piece)
        if self.max_images is not None:
            piece.images = self._calls.images(item)
        if not start and stop < total:
            self.counts["truncated"] += 1
            self.counts["truncated_tokens"] += total - stop
        if self.max_images is not None and piece.images > self.max_images:
            self._skipped("of more than max_images", piece.length, piece.images)
        else:
            self._row_of_skips = 0
            self._hold(piece, item)
            self._packing.add(piece)
        taken.start += piece.length
        if taken.start == stop:
            self._taken = None

    def _hold(self, piece: Piece, item: Any) -> None:
        """Keep a made item with its piece, as far as the budget goes."""
        piece.item_bytes = size_of(item)
        if self._held.hold(piece.item_bytes):
            piece.item = item

    def _give(self, pack: OpenPack) -> Any:
        made = [(piece, self._make(piece) if piece.item is MISSING else piece.item) for piece in pack.pieces]
        left = [(piece, item) for piece, item in made if type(item) is not Skip]
        items = [item for _, item in left]
        ref = (self._count, *(_piece_ref(piece) for piece, _ in left))
        packed = self._calls.combined(items, self._count) if items else None
        self._packing.packs.remove(pack)
        for piece in pack.pieces:
            if piece.item is not MISSING:
                self._held.release(piece.item_bytes)
        if not items:
            return next(self)
        self._count += 1
        self._ref = ref
        self.counts["packs"] += 1
        self.counts["items"] += len(items)
        self.counts["tokens"] += self.max_length - pack.room
        self.counts["room"] += pack.room
        return packed

    def _make(self, piece: Piece) -> Any:
        """The item of a piece, made again; a `Skip` if it cannot be."""
        whole = self._fetch_whole(piece)
        return whole if type(whole) is Skip else self._part_of(whole, piece)

    def _fetch_whole(self, piece: Piece) -> Any:
        """The item that a piece is of, made again; with it whatever else is held of the same item."""
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
            f"takes {length}: {type(self.encoder).__name__} or what it reads changed since the state was saved (go on "
            "with the old one), or its result depends on more than the sample and `rng`"
        )

    def _part_of(self, whole: Any, piece: Piece) -> Any:
        """The part of an item that a piece is."""
        return self._calls.cut(whole, piece.start, piece.start + piece.length) if piece.is_cut else whole

    def _skipped(self, why: str, tokens: int, measure: int) -> None:
        self.counts[f"skipped/{why}"] += 1
        self.counts["skipped_tokens"] += tokens
        self._row_of_skips += 1
        if self._row_of_skips >= dry_limit(self.population):
            raise EncodeError(
                f"OnlinePacker(max_length={self.max_length}, max_images={self.max_images}): {self._row_of_skips} items "
                f"in a row were {why}, the last {measure}; no pack will ever come of this data"
            )

    def fetch(self, ref: ItemRef) -> Any:
        """Make the pack that a ref names again, of the items that still can be made; a `Skip` if none can."""
        items = [item for item in map(self._fetch_piece, ref[1:]) if type(item) is not Skip]
        return self._calls.combined(items, ref[0]) if items else Skip("a pack of nothing")

    def _fetch_piece(self, ref: ItemRef) -> Any:
        if not isinstance(ref[0], tuple):
            return self.source.fetch(ref)
        whole_ref, start, stop = ref
        whole = self.source.fetch(whole_ref)
        return whole if type(whole) is Skip else self._calls.cut(whole, start, stop)

    def save_state(self) -> State:
        """`packs`: per open pack, oldest first, the ref and length of each item; `count`: packs given so far.

        Of an item with images or that was cut also images, start and whole length. `taken`: the ref of an item that has
        no place yet, or None. Where there are any: `taken_part`, where the rest of that item starts and its whole
        length; `held`, items in no pack yet; `rounds`, how often they have been laid out.
        """
        packing, taken = self._packing, self._taken
        state = {
            "packs": [[_plain(piece) for piece in pack.pieces] for pack in packing.packs],
            "count": self._count,
            "taken": None if taken is None else taken.ref,
            "source": self.source.save_state(),
        }
        if taken is not None and taken.start:
            state["taken_part"] = (taken.start, taken.total)
        if self.policy == "first_fit_decreasing":
            state["held"] = [_plain(piece) for piece in packing.held]
            state["rounds"] = packing.rounds
        return state

    def restore_state(self, state: State) -> None:
        """Hold the open packs of `state` again; their items are made when they are needed."""
        saved = parse_state(self, state, _PackerState)
        self.source.restore_state(saved.source)
        self._count = saved.count
        self._taken = None
        if saved.taken is not None:
            start, total = saved.taken_part
            taken = Piece(as_ref(saved.taken), 0, start=start, total=total)
            self._taken = taken if self.knows(taken.ref) else None
        packing = self._packing
        packing.rounds = saved.rounds
        for placed in saved.packs:
            pieces = self._known(placed)
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

    def _known(self, placed: list[_Placed]) -> list[Piece]:
        """The pieces of a state whose source is still there."""
        pieces = [Piece(as_ref(p.ref), p.length, p.images, p.start, p.total or p.length) for p in placed]
        return [piece for piece in pieces if self.knows(piece.ref)]

    def settings(self) -> dict[str, Any]:
        """Every argument that has a part in the result; the encoder only if it is not the one upstream."""
        own = {} if self.encoder is self.source.encoder else encoder_settings(self.encoder)
        if self.max_images is not None:
            own["max_images"] = self.max_images
        if self.too_long != "skip":
            own["too_long"] = self.too_long
        return {"max_length": self.max_length, "policy": self.policy, "open_packs": self.open_packs, **own}


def _piece_ref(piece: Piece) -> ItemRef:
    return (piece.ref, piece.start, piece.start + piece.length) if piece.is_cut else piece.ref


def _plain(piece: Piece) -> tuple[Any, ...]:
    if piece.is_cut:
        return (piece.ref, piece.length, piece.images, piece.start, piece.total)
    return (piece.ref, piece.length, piece.images) if piece.images else (piece.ref, piece.length)
