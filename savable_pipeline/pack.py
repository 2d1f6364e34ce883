"""`OnlinePacker`: lays items end to end in packs of bounded length, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

import msgspec

from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.global_rng import seeder
from savable_pipeline.rng import Rng
from savable_pipeline.stage import ItemRef, Stage, State, dry_limit, parse_state

Policy = Literal["best_fit", "first_fit"]
_MISSING: Any = object()  # stands for an item that is made again from its ref when its pack is given


class _PackerState(msgspec.Struct):
    packs: list[list[tuple[Any, int]]]
    count: int
    taken: Any
    source: dict[str, Any]


@dataclass(slots=True, eq=False)
class _OpenPack:
    room: int
    refs: list[ItemRef] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)

    def add(self, item: Any, ref: ItemRef, length: int) -> None:
        self.items.append(item)
        self.refs.append(ref)
        self.lengths.append(length)
        self.room -= length

    def leave_out_skips(self) -> None:
        """Drop what could not be made again."""
        left = [i for i, item in enumerate(self.items) if type(item) is not Skip]
        self.items = [self.items[i] for i in left]
        self.refs = [self.refs[i] for i in left]
        self.lengths = [self.lengths[i] for i in left]


class OnlinePacker(Stage):
    """Gives packs: what `encoder.pack(items, rng)` makes of items whose lengths sum to at most `max_length`.

    At most `open_packs` packs are open at a time. An item goes into an open pack with room for it: the fullest one
    under "best_fit", the oldest under "first_fit" (Johnson: Near-Optimal Bin Packing Algorithms, 1973). If none has
    room, a new pack is opened; if there are too many, the fullest ("best_fit") or the oldest ("first_fit") is given.
    A pack that is exactly full is given at once; when a finite source ends, the open ones are given, oldest first.
    An item longer than `max_length` is left out and counted. `encoder=None`: the encoder upstream.
    """

    def __init__(
        self,
        source: Stage,
        *,
        max_length: int,
        policy: Policy = "best_fit",
        open_packs: int = 16,
        encoder: TaskEncoder | None = None,
    ) -> None:
        if max_length < 1 or open_packs < 1:
            raise ValueError(f"OnlinePacker: max_length and open_packs must be at least 1: {max_length}, {open_packs}")
        if policy not in ("best_fit", "first_fit"):
            raise ValueError(f"OnlinePacker: policy must be 'best_fit' or 'first_fit', not {policy!r}")
        super().__init__(source)
        chosen = encoder or source.encoder
        if chosen is None:
            raise ValueError("OnlinePacker: no Encode stage upstream; give encoder=")
        self._encoder = chosen
        self.max_length = max_length
        self.policy = policy
        self.open_packs = open_packs
        self._packs: list[_OpenPack] = []
        self._taken: tuple[Any, ItemRef] | None = None  # of the source, not yet placed
        self._count = 0  # packs given
        self._key = self.lane.key("pack", self.depth)
        self._seed_globals = seeder(chosen.global_rng)
        self._row_of_skips = 0
        self._ref: ItemRef = ()

    @property
    def encoder(self) -> TaskEncoder:
        """The encoder whose `length` and `pack` are used."""
        return self._encoder

    @property
    def ref(self) -> ItemRef:
        """The ref of the pack given last: its number in the lane, then the refs of its items."""
        return self._ref

    def __next__(self) -> Any:
        while (due := self._due()) is None:
            if self._taken is None:
                items, refs = self.source.take(1)
                self._taken = (items[0], refs[0]) if items else None
            if self._taken is not None:
                self._place(*self._taken)
                self._taken = None
            elif self._packs:
                due = self._packs[0]
                break
            else:
                raise StopIteration
        return self._give(due)

    def _due(self) -> _OpenPack | None:
        """The pack that must be given before another item is placed, if there is one."""
        for pack in self._packs:
            if not pack.room:
                return pack
        if len(self._packs) <= self.open_packs:
            return None
        return min(self._packs[:-1], key=_room) if self.policy == "best_fit" else self._packs[0]

    def _place(self, item: Any, ref: ItemRef) -> None:
        if item is _MISSING:
            item = self.source.fetch(ref)
        if type(item) is Skip:  # it cannot be made again; counted where that was found
            return
        length = self._length(item)
        if length > self.max_length:
            self._skipped(length)
            return
        self._row_of_skips = 0
        fitting = [pack for pack in self._packs if pack.room >= length]
        if not fitting:
            fitting = [_OpenPack(self.max_length)]
            self._packs += fitting
        pack = min(fitting, key=_room) if self.policy == "best_fit" else fitting[0]
        pack.add(item, ref, length)

    def _length(self, item: Any) -> int:
        try:
            length = index(self._encoder.length(item))  # NumPy's integers too, which a state could not hold
            if length < 1:  # a pack of nothing would never be full
                raise ValueError(f"a length of {length}; every item takes at least 1")
        except Exception as error:
            raise EncodeError(
                f"{type(self._encoder).__name__}.length raised {type(error).__name__}: {error}; stage OnlinePacker of "
                f"{self.lane}"
            ) from error
        return length

    def _give(self, pack: _OpenPack) -> Any:
        for i, item in enumerate(pack.items):
            if item is _MISSING:
                pack.items[i] = self.source.fetch(pack.refs[i])
        pack.leave_out_skips()
        if not pack.items:
            self._packs.remove(pack)
            return next(self)
        ref = (self._count, *pack.refs)
        packed = self._pack(pack.items, self._count)
        self._packs.remove(pack)
        self._count += 1
        self._ref = ref
        return packed

    def _pack(self, items: list[Any], number: int) -> Any:
        note = self.lane.note
        if note is not None:
            note[0] = self.depth
        rng = Rng(self._key, (number, 0, 0))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        try:
            return self._encoder.pack(items, rng)
        except Exception as error:
            raise EncodeError(
                f"{type(self._encoder).__name__}.pack raised {type(error).__name__}: {error}; stage OnlinePacker, "
                f"pack {number} of {self.lane}, {len(items)} items"
            ) from error

    def _skipped(self, length: int) -> None:
        self.counts["skipped/longer than max_length"] += 1
        self._row_of_skips += 1
        if self._row_of_skips >= dry_limit(self.population):
            raise EncodeError(
                f"OnlinePacker(max_length={self.max_length}): {self._row_of_skips} items in a row were longer, the "
                f"last {length}; no pack will ever come of this data"
            )

    def fetch(self, ref: ItemRef) -> Any:
        """Make the pack that a ref names again, of the items that still can be made; a `Skip` if none can."""
        items = [item for item in map(self.source.fetch, ref[1:]) if type(item) is not Skip]
        return self._pack(items, ref[0]) if items else Skip("a pack of nothing")

    def save_state(self) -> State:
        """`packs`: per open pack, oldest first, the ref and length of each item; `count`: packs given so far.

        `taken`: the ref of an item that has no place yet, because an error came between; else None.
        """
        packs = [list(zip(pack.refs, pack.lengths, strict=True)) for pack in self._packs]
        taken = None if self._taken is None else self._taken[1]
        return {"packs": packs, "count": self._count, "taken": taken, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Hold the open packs of `state` again; their items are made when they are needed."""
        saved = parse_state(self, state, _PackerState)
        self.source.restore_state(saved.source)
        self._count = saved.count
        self._taken = None if saved.taken is None else (_MISSING, as_ref(saved.taken))
        self._packs = []
        for placed in saved.packs:
            pack = _OpenPack(self.max_length)
            for ref, length in placed:
                pack.add(_MISSING, as_ref(ref), length)
            if pack.room < 0:
                raise CheckpointMismatchError(
                    f"OnlinePacker(max_length={self.max_length}): an open pack of the state is {-pack.room} longer"
                )
            self._packs.append(pack)

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        own = {} if self._encoder is self.source.encoder else encoder_settings(self._encoder)
        return {"max_length": self.max_length, "policy": self.policy, "open_packs": self.open_packs, **own}


def _room(pack: _OpenPack) -> int:
    return pack.room


def as_ref(ref: Any) -> ItemRef:
    """A ref that was written down as nested lists."""
    return tuple(as_ref(part) if isinstance(part, list | tuple) else part for part in ref)
