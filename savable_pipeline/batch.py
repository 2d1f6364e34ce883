"""`Batcher`: the last stage, which makes a batch of several items or packs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.encoder_calls import EncoderCalls
from savable_pipeline.errors import EncodeError
from savable_pipeline.pack import OnlinePacker
from savable_pipeline.rng import Rng
from savable_pipeline.sample import TAG_SHIFT
from savable_pipeline.stage import ItemRef, Stage, State, as_ref, parse_state


class _BatcherState(msgspec.Struct):
    held: list[Any]
    count: int
    source: dict[str, Any]
    first: Any = None


_TRIED = 100


class _Samples(TaskEncoder):
    """Without an encoder, a batch is the list of its samples."""

    global_rng = False

    def batch(self, items: list[Any], rng: Rng) -> Any:
        return items


class BatchStage(Stage):
    """What stages that make batches have in common; a subclass says which items the next batch is made of.

    `encoder=None`: the encoder upstream; without one, a batch is the list of its samples.
    """

    def __init__(self, source: Stage, *, drop_last: bool | None, encoder: TaskEncoder | None) -> None:
        super().__init__(source)
        self._calls = EncoderCalls(self, encoder or source.encoder or _Samples(), "batch")
        self.drop_last = bool(drop_last)
        self._count = 0
        self._given: list[ItemRef] = []

    @property
    def encoder(self) -> TaskEncoder:
        """The encoder whose `batch` is used."""
        return self._calls.encoder

    @property
    def ref(self) -> ItemRef:
        """The ref of the batch given last: its number in the lane, then the refs of its items."""
        return (self._count - 1, *self._given)

    def more(self) -> bool:
        """Whether another batch will come, found by holding what it needs to be certain."""
        raise NotImplementedError

    def fetch(self, ref: ItemRef) -> Any:
        """Make the batch that a ref names again, of what still can be made."""
        items = [item for item in map(self.source.fetch, ref[1:]) if type(item) is not Skip]
        return self._calls.combined(items, ref[0])

    def _encoder_settings(self) -> dict[str, Any]:
        """The encoder's, only if it is not the one upstream."""
        return {} if self.encoder is self.source.encoder else encoder_settings(self.encoder)


class Batcher(BatchStage):
    """Gives what `encoder.batch(items, rng)` makes of `size` items or packs.

    A finite source's last, smaller batch is given too, unless `drop_last`. `encoder=None`: the encoder upstream.

    Under `SavableLoader(tail="pad")` every batch has `size` rows, and a key "valid" beside those of the encoder: bool
    (size,), False for the rows that are there only to fill up, which repeat an item.
    """

    def __init__(
        self, source: Stage, *, size: int, drop_last: bool | None = None, encoder: TaskEncoder | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"Batcher: size must be at least 1, not {size}")
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self.size = size
        self._items: list[Any] = []  # held for the next batch; after a restore made again when it is asked for
        self._refs: list[ItemRef] = []
        self._first: ItemRef | None = None  # of the lane's first item, where batches are filled up

    @property
    def held_items(self) -> int:
        """Items that wait for their batch."""
        return len(self._items)

    def __next__(self) -> Any:
        self._hold_batch()
        items = self._items[: self.size]
        valid = len(items)
        if self.lane.pad:
            self._first = self._first or self._refs[0]
            items = items + items[:1] * (self.size - len(items))
        batch = self._calls.combined(items, self._count)
        if self.lane.pad:
            batch = self._marked(batch, valid)
        self._let_go()
        return batch

    def filler(self) -> Any:
        """A batch of which no row counts, for a lane that has no more. Raises `EncodeError` if nothing can be made."""
        item = self.source.fetch(self._first) if self._first is not None else self._any_item()
        batch = self._marked(self._calls.combined([item] * self.size, self._count), 0)
        self._given = []
        self._count += 1
        return batch

    def _any_item(self) -> Any:
        """An item that some sample of the dataset gives, for a lane that has none of its own."""
        for ref in islice(_refs_given_by(self.source), _TRIED):
            with contextlib.suppress(EncodeError):
                item = self.source.fetch(ref)
                if type(item) is not Skip:
                    return item
        raise EncodeError(f"tail='pad': the first {_TRIED} samples give no item to fill up a batch of {self.lane}")

    def _marked(self, batch: Any, valid: int) -> Any:
        """The batch with which of its rows count."""
        import torch

        if not isinstance(batch, dict) or "valid" in batch:
            raise EncodeError(
                f"tail='pad' adds a key 'valid' to batches: {type(self.encoder).__name__}.batch must give a dict "
                f"without one, not {type(batch).__name__}"
            )
        return {**batch, "valid": torch.arange(self.size) < valid}

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
        """Of one batch; more is held if the state was saved with larger ones."""
        self._given = self._refs[: self.size]
        self._items, self._refs = self._items[self.size :], self._refs[self.size :]
        self._count += 1

    def more(self) -> bool:
        """Whether another batch will come, found by holding the item that begins it."""
        needed = self.size if self.drop_last else 1
        self._hold(needed)
        return len(self._items) >= needed

    def count_of(self, lane: int, epoch: int) -> int | None:
        """Batches of so many items as the source gives, the last one smaller."""
        items = self.source.count_of(lane, epoch)
        return None if items is None else items // self.size if self.drop_last else -(-items // self.size)

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

    def save_state(self) -> State:
        """`held`: the refs of items that are held already; `count`: batches given so far."""
        first = {} if self._first is None else {"first": self._first}
        return {"held": list(self._refs), "count": self._count, "source": self.source.save_state(), **first}

    def restore_state(self, state: State) -> None:
        """Go on from where `state` was taken; nothing is read."""
        saved = parse_state(self, state, _BatcherState)
        self._first = None if saved.first is None else as_ref(saved.first)
        self.source.restore_state(saved.source)
        self._items, self._refs = [], [ref for ref in map(as_ref, saved.held) if self.knows(ref)]
        self._count = saved.count

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        return {"size": self.size, "drop_last": self.drop_last, **self._encoder_settings()}


def _refs_given_by(stage: Stage) -> Iterator[ItemRef]:
    """Refs of what a stage might give: of each sample alone, those of one source after those of another."""
    if not stage.sources:
        (tag,) = stage.tags
        yield from ((number | tag << TAG_SHIFT, 0, 0) for number in range(stage.population))
    for source in stage.sources:
        for ref in _refs_given_by(source):
            yield (0, ref) if isinstance(stage, OnlinePacker) else ref
