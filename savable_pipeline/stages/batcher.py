"""`Batcher`: the last stage of most pipelines, which makes batches of items or packs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import compress, islice
from typing import Any

import msgspec

from savable_pipeline.core.item_difference import DifferingItemsError
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.dataset.sample import TAG_SHIFT, skip_counters
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.excluded_samples import REASON
from savable_pipeline.stages.item_ref import ItemRef, as_ref, sample_indices
from savable_pipeline.stages.pipeline import leaves_out_excluded, sample_names
from savable_pipeline.stages.stage import BatchStage, Stage, StageInfo, State, parse_state
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings


class _BatcherState(msgspec.Struct):
    held: list[Any]
    count: SavedCount
    source: dict[str, Any]
    first: Any = None


_TRIED = 100  # samples to try for an item that fills up a batch
_NAMED = 2  # items of a batch whose samples an error names


class _Samples(TaskEncoder):
    """Stands for the encoder of a pipeline without one: a batch is the list of its samples."""

    global_rng = False

    def batch(self, items: list[Any], rng: Rng) -> Any:
        return items


class EncoderBatches(BatchStage):
    """Base of stages whose batches are `encoder.batch(items, rng)`; a subclass chooses the items of the next batch.

    `encoder=None` takes the encoder upstream; if there is none, a batch is the list of its samples.
    """

    ref: ItemRef = ()
    """The last batch's number in the lane, then the refs of its items."""

    def __init__(self, source: Stage, *, drop_last: bool | None, encoder: TaskEncoder | None) -> None:
        super().__init__(source)
        chosen = encoder or source.info.encoder or _Samples()
        self._calls = EncoderCalls(type(self).__name__, source.lane, chosen, "batch")
        self.drop_last = bool(drop_last)
        self._count = 0

    def describe(self) -> StageInfo:
        """The source's, one deeper, with the encoder whose `batch` makes the batches."""
        return replace(super().describe(), encoder=self._calls.encoder)

    def fetch(self, ref: ItemRef) -> Any:
        """Make the batch with this ref again, without the items that can no longer be made."""
        items = [item for item in map(self.source.fetch, ref[1:]) if type(item) is not Skip]
        return self._calls.combined(items, ref[0], self.info)

    def _combined(self, items: list[Any], refs: list[ItemRef]) -> Any:
        """The next batch, of the items with these refs. Raises `EncodeError`, which names samples."""
        try:
            return self._calls.combined(items, self._count, self.info)
        except EncodeError as error:
            raise EncodeError(f"{error}{self._samples_of(error.__cause__, refs)}") from error.__cause__

    def _samples_of(self, error: BaseException | None, refs: list[ItemRef]) -> str:
        """The samples of the items that an error is about, or of the first items of the batch, in words."""
        about = error.items if isinstance(error, DifferingItemsError) else range(_NAMED)
        return "".join(f"; item {i} is of {sample_names(self, refs[i])}" for i in about if i < len(refs))

    def _gave(self, refs: list[ItemRef]) -> None:
        """Count a batch of the items with these refs, given or passed over, and set `ref`."""
        self.ref = (self._count, *refs)
        self._count += 1

    def settings(self) -> dict[str, Any]:
        """`drop_last`, and the encoder unless it is the one upstream."""
        return {
            "drop_last": self.drop_last,
            **encoder_settings(self._calls.encoder, upstream=self.source.info.encoder),
        }


class Batcher(EncoderBatches):
    """Gives batches: `encoder.batch(items, rng)` of `size` items or packs each.

    The last batch of a finite source may be smaller; `drop_last=True` drops it. `encoder=None` takes the encoder
    upstream; without one, a batch is the list of its samples.

    With `SavableLoader(tail="pad")` every batch has `size` rows and, beside the encoder's keys, a key "valid": bool
    (size,), False for rows that only fill up the batch; these repeat an item.

    Raises ValueError if `size` is below 1, `EncodeError` if `encoder.batch` raises or, to pad, returns no dict.

    >>> class Ids(sp.TaskEncoder):
    ...     def encode(self, sample, rng):
    ...         return {"id": sample.json()["id"]}
    >>> batches = sp.Batcher(sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Ids()), size=3)
    >>> next(batches)  # int64 (3,), by torch's default_collate
    {'id': tensor([0, 1, 2])}
    >>> batches.ref  # (number of the batch, ref of each item)
    (0, (0, 0, 0), (1, 0, 0), (2, 0, 0))
    """

    leaves_out_excluded = True

    def __init__(
        self, source: Stage, *, size: int, drop_last: bool | None = None, encoder: TaskEncoder | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"Batcher: size must be at least 1, not {size}")
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self.size = size
        self._items: list[Any] = []  # of the next batch; after a restore shorter than `_refs` until they are needed
        self._refs: list[ItemRef] = []
        self._first: ItemRef | None = None  # the ref of the lane's first item, set if batches are padded
        source.hint_rows(size, aligned=True)

    @property
    def held_items(self) -> int:
        """Items that wait for their batch."""
        return len(self._items)

    def __next__(self) -> Any:
        self._hold_batch()
        items = self._items[: self.size]
        valid = len(items)
        if self.lane.pad:
            items = items + items[:1] * (self.size - len(items))
        batch = self._combined(items, self._refs)
        if self.lane.pad:
            batch = self._marked(batch, valid)
        self._let_go()
        return batch

    def filler(self) -> Any:
        """A batch of rows that do not count, for a lane that has no more. Raises `EncodeError` without any item."""
        item = Skip("none yet") if self._first is None else self.source.fetch(self._first)
        if type(item) is Skip:
            item = self._any_item()
        batch = self._marked(self._calls.combined([item] * self.size, self._count, self.info), 0)
        self._gave([])
        return batch

    def _any_item(self) -> Any:
        """An item of any sample of the dataset, for a lane that has no sample of its own."""
        given = (ref for ref in _refs_given_by(self.source) if self.info.excluded.left_of(ref) == ref)
        for ref in islice(given, _TRIED):
            with contextlib.suppress(EncodeError):
                item = self.source.fetch(ref)
                if type(item) is not Skip:
                    return item
        raise EncodeError(f"tail='pad': none of the first {_TRIED} samples gives an item to pad a batch of {self.lane}")

    def _marked(self, batch: Any, valid: int) -> Any:
        """The batch with the key "valid": the first `valid` rows count."""
        import torch

        if not isinstance(batch, dict) or "valid" in batch:
            raise EncodeError(
                f"tail='pad' adds a key 'valid' to batches: {self._calls.encoder_name}.batch must give a dict "
                f"without one, not {type(batch).__name__}"
            )
        return {**batch, "valid": torch.arange(self.size) < valid}

    def pass_over(self) -> None:
        """Skip the next batch without calling `encoder.batch`. Raises StopIteration at the end."""
        self._hold_batch()
        self._let_go()

    def _hold_batch(self) -> None:
        """Take the items of the next batch. Raises StopIteration at the end."""
        self._hold(self.size)
        if len(self._items) < (self.size if self.drop_last else 1):
            raise StopIteration
        if self.lane.pad:
            self._first = self._first or self._refs[0]

    def _let_go(self) -> None:
        """Drop the items of one batch; more may be held if the state was saved with a larger `size`."""
        self._gave(self._refs[: self.size])
        self._items, self._refs = self._items[self.size :], self._refs[self.size :]

    def more(self) -> bool:
        """Whether another batch will come; takes its first item, or all of them with `drop_last`, to find out."""
        needed = self.size if self.drop_last else 1
        self._hold(needed)
        return len(self._items) >= needed

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The source's count divided by `size`, rounded up, or down with `drop_last`."""
        items = None if self._is_first_to_leave_out else self.source.count_of(lane, epoch)
        return None if items is None else items // self.size if self.drop_last else -(-items // self.size)

    def _hold(self, n: int) -> None:
        missing = [self.source.make_again(ref) for ref in self._refs[len(self._items) :]]
        if missing:  # after a restore; an item that can no longer be made is a `Skip`, counted by the stage upstream
            made = [(item, ref) for item, ref in missing if type(item) is not Skip]
            self._refs = self._refs[: len(self._items)] + [ref for _, ref in made]
            self._items += [item for item, _ in made]
        while len(self._items) < n:
            items, refs = self.source.take(n - len(self._items))
            if not items:
                return
            if self._is_first_to_leave_out:
                items, refs = self._without_these(items, refs)
            self._items += items
            self._refs += refs

    @cached_property
    def _is_first_to_leave_out(self) -> bool:
        """Whether the source gives excluded samples too: there is no `Encode` after a reader that excludes some."""
        return not leaves_out_excluded(self.source)

    def _without_these(self, items: list[Any], refs: list[ItemRef]) -> tuple[list[Any], list[ItemRef]]:
        """The things that are not made of an excluded sample; the others are counted."""
        excluded = self.info.excluded
        found = [next((index for index in sample_indices(ref) if index in excluded), None) for ref in refs]
        for index in found:
            if index is not None:
                self.counts.update(skip_counters(REASON, index))
        kept = [index is None for index in found]
        return list(compress(items, kept)), list(compress(refs, kept))

    def save_state(self) -> State:
        """`held`: refs of the items taken for the next batch; `count`: batches given so far."""
        first = {} if self._first is None else {"first": self._first}
        return {"held": list(self._refs), "count": self._count, "source": self.source.save_state(), **first}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is read."""
        saved = parse_state(self, state, _BatcherState)
        self._first = None if saved.first is None else as_ref(saved.first)
        if self._first is not None and self.info.excluded.left_of(self._first) != self._first:
            self._first = None  # it must not fill up batches either: another one will
        self.source.restore_state(saved.source)
        self._items, self._refs = [], self.keep_known(list(map(as_ref, saved.held)))
        self._count = saved.count

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        return {"size": self.size, **super().settings()}


def _refs_given_by(stage: Stage) -> Iterator[ItemRef]:
    """Refs of elements that a stage might give, one for each single sample, source after source."""
    if not stage.sources:
        (tag,) = stage.info.tags
        yield from ((number | tag << TAG_SHIFT, 0, 0) for number in range(stage.info.population))
    for source in stage.sources:
        yield from map(stage.ref_alone, _refs_given_by(source))
