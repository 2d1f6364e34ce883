"""`Batcher`: the last stage, which makes a batch of several items or packs."""

from __future__ import annotations

from typing import Any

import msgspec

from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.errors import EncodeError
from savable_pipeline.global_rng import seeder
from savable_pipeline.pack import as_ref
from savable_pipeline.rng import Rng
from savable_pipeline.stage import ItemRef, Stage, State, parse_state


class _BatcherState(msgspec.Struct):
    held: list[Any]
    count: int
    source: dict[str, Any]


class _Samples(TaskEncoder):
    """Without an encoder, a batch is the list of its samples."""

    global_rng = False

    def batch(self, items: list[Any], rng: Rng) -> Any:
        return items


class Batcher(Stage):
    """Gives what `encoder.batch(items, rng)` makes of `size` items or packs.

    A finite source's last, smaller batch is given too, unless `drop_last`. `encoder=None`: the encoder upstream.
    """

    def __init__(
        self, source: Stage, *, size: int, drop_last: bool | None = None, encoder: TaskEncoder | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"Batcher: size must be at least 1, not {size}")
        super().__init__(source)
        self._encoder = encoder or source.encoder or _Samples()
        self.size = size
        self.drop_last = bool(drop_last)
        self._key = self.lane.key("batch", self.depth)
        self._seed_globals = seeder(self._encoder.global_rng)
        self._items: list[Any] = []  # held for the next batch; after a restore made again when it is asked for
        self._refs: list[ItemRef] = []
        self._count = 0
        self._given: list[ItemRef] = []

    @property
    def encoder(self) -> TaskEncoder:
        """The encoder whose `batch` is used."""
        return self._encoder

    @property
    def ref(self) -> ItemRef:
        """The ref of the batch given last: its number in the lane, then the refs of its items."""
        return (self._count - 1, *self._given)

    def __next__(self) -> Any:
        self._hold_batch()
        batch = self._batch(self._items, self._count)
        self._let_go()
        return batch

    def pass_over(self) -> None:
        """Drop what the next batch would be made of. Raises StopIteration at the end."""
        self._hold_batch()
        self._let_go()

    def _hold_batch(self) -> None:
        """Hold the items of the next batch. Raises StopIteration if there is none."""
        self._hold(self.size)
        if len(self._items) < (self.size if self.drop_last else 1):
            raise StopIteration

    def _let_go(self) -> None:
        self._given = self._refs
        self._items, self._refs = [], []
        self._count += 1

    def more(self) -> bool:
        """Whether another batch will come, found by holding the item that begins it."""
        needed = self.size if self.drop_last else 1
        self._hold(needed)
        return len(self._items) >= needed

    def _hold(self, n: int) -> None:
        missing = [(ref, self.source.fetch(ref)) for ref in self._refs[len(self._items) :]]
        if missing:  # after a restore; a `Skip` is of what cannot be made again, counted where that was found
            made = [(ref, item) for ref, item in missing if type(item) is not Skip]
            self._refs = self._refs[: len(self._items)] + [ref for ref, _ in made]
            self._items += [item for _, item in made]
        while len(self._items) < n:
            items, refs = self.source.take(n - len(self._items))
            if not items:
                return
            self._items += items
            self._refs += refs

    def _batch(self, items: list[Any], number: int) -> Any:
        note = self.lane.note
        if note is not None:
            note[0] = self.depth
        rng = Rng(self._key, (number, 0, 0))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        try:
            return self._encoder.batch(items, rng)
        except Exception as error:
            raise EncodeError(
                f"{type(self._encoder).__name__}.batch raised {type(error).__name__}: {error}; stage Batcher, batch "
                f"{number} of {self.lane}, {len(items)} items"
            ) from error

    def fetch(self, ref: ItemRef) -> Any:
        """Make the batch that a ref names again, of what still can be made."""
        items = [item for item in map(self.source.fetch, ref[1:]) if type(item) is not Skip]
        return self._batch(items, ref[0])

    def save_state(self) -> State:
        """`held`: the refs of items that are held already; `count`: batches given so far."""
        return {"held": list(self._refs), "count": self._count, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Go on from where `state` was taken; nothing is read."""
        saved = parse_state(self, state, _BatcherState)
        self.source.restore_state(saved.source)
        self._items, self._refs = [], [as_ref(ref) for ref in saved.held]
        self._count = saved.count

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        own = {} if self._encoder is self.source.encoder else encoder_settings(self._encoder)
        return {"size": self.size, "drop_last": self.drop_last, **own}
