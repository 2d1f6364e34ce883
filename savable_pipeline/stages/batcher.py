"""`Batcher`: stage that builds batches of items or packs.

It is the last stage of most pipelines.

`EncoderBatches` is the base of all stages whose batches an encoder builds. The base also pads batches.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, cast

import msgspec

from savable_pipeline.core.containers import DifferingItemsError
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import TAG_SHIFT
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.stages.advice import check_count
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked, count_of, take_elements
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_buffer import ItemBuffer, known_refs
from savable_pipeline.stages.item_ref import Element, ItemRef, as_ref, batch_rows
from savable_pipeline.stages.packing.pack_stage import PackStage
from savable_pipeline.stages.pipeline import sample_names
from savable_pipeline.stages.readers.reader import set_batch_size
from savable_pipeline.stages.stage import BatchStage, Stage, State, parse_state
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import SettingRule
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

_TRIED = 100  # most samples to try to find an item for padding rows
_ITEMS_NAMED = 2  # an error names the samples of this many items of a batch


class _Samples(TaskEncoder):
    """Encoder of a pipeline that has none: a batch is the list of its samples."""

    global_rng = False

    def batch(self, items: list[Any], rng: Rng) -> Any:
        return items


class EncoderBatches(ChunkedStage, BatchStage):
    """Base of stages whose batches are `encoder.batch(items, rng)`.

    A subclass chooses the items of the next batch.

    `encoder=None` uses the encoder upstream. If there is none, a batch is the list of its samples. If the run pads,
    padding rows repeat an item of the batch, and `filler` builds batches for a lane that has no more items.
    """

    ref: ItemRef = ()
    """The last batch's number in the lane, then the refs of its items."""

    def __init__(self, source: Stage, *, drop_last: bool | None, encoder: TaskEncoder | None) -> None:
        super().__init__(source)
        chosen = source.info.encoder if encoder is None else encoder
        self._calls = EncoderCalls(type(self).__name__, source.info, _Samples() if chosen is None else chosen, "batch")
        self.drop_last, self._count = bool(drop_last), 0
        self._first: ItemRef | None = None  # the ref of the lane's first item, only set if batches are padded

    def describe(self) -> StageInfo:
        """Describe batches of the encoder."""
        return replace(super().describe(), encoder=self._calls.encoder)

    def __next__(self) -> Any:
        for element in self.take(1):
            return element.value
        raise StopIteration

    def take(self, n: int) -> list[Element]:
        """Return a list of the next batch alone, or an empty list at the end.

        The batch is built even if the lane skips, because a user's own stage after this one may read it. `pass_over`
        builds none.
        """
        self.lane.skips = False
        due = self._due()
        if due is None:
            return []
        items, refs, size = due
        batch = self._padded(items, refs, size)
        self._count_yielded(refs)
        return [Element(self.ref, batch)]

    def pass_over(self) -> bool:
        """Skip the next batch without calling `encoder.batch`. Returns False at the end."""
        if (due := self._due()) is not None:
            _, refs, _ = due
            self._count_yielded(refs)
        return due is not None

    def make(self, elements: Sequence[Element]) -> None:
        """Rebuild batches, without their lost items.

        The value of a batch is a `Skip` if all its items are lost.
        """
        for element in elements:
            element.value = self.rebuilt(element.ref)[0]

    def rebuilt(self, ref: ItemRef, size: int = 0) -> tuple[Any, tuple[int, ...]]:
        """Return the rebuilt batch, and the positions of the lost rows.

        The batch is a `Skip` if all rows are lost. If batches are padded, the batch has `size` rows, or as many as a
        full batch if `size` is 0.
        """
        number, *parts = ref
        rows = [Element(part) for part in parts]
        chunked(self.source).make(rows)
        lost = tuple([at for at, row in enumerate(rows) if type(row.value) is Skip])
        remaining = [row.value for row in rows if type(row.value) is not Skip]
        if not (remaining and self.lane.pad):
            return (self._calls.combined(remaining, number, self.info) if remaining else rows[0].value), lost
        size = size or max(len(remaining), self._rows_of(remaining[0]))
        padded = remaining + remaining[:1] * (size - len(remaining))
        return self._with_valid(self._calls.combined(padded, number, self.info), len(remaining), size), lost

    @abstractmethod
    def _due(self) -> tuple[list[Any], list[ItemRef], int] | None:
        """Return the next batch as (items, their refs, rows of a full batch), or None at the end.

        If the lane skips batches, items may be unbuilt.
        """

    def _combined(self, items: list[Any], refs: list[ItemRef]) -> Any:
        """Return the next batch, built of these items. An `EncodeError` names samples of the items."""
        try:
            return self._calls.combined(items, self._count, self.info)
        except EncodeError as error:
            raise EncodeError(f"{error}{self._describe_samples(error.__cause__, refs)}") from error.__cause__

    def _describe_samples(self, error: BaseException | None, refs: list[ItemRef]) -> str:
        """Describe the samples of the items that caused an error, or of the first items of the batch."""
        positions = error.items if isinstance(error, DifferingItemsError) else range(_ITEMS_NAMED)
        return "".join(f"; item {at} is of {sample_names(self, refs[at])}" for at in positions if at < len(refs))

    def _count_yielded(self, refs: list[ItemRef]) -> None:
        """Set `ref` to that of the batch of these items, which is yielded or skipped now, and count the batch."""
        self.ref = (self._count, *refs)
        self._count += 1

    @abstractmethod
    def _rows_of(self, item: Any) -> int:
        """Return the rows of a full batch with this item, or 0 if the item is dropped. Raises `EncodeError`."""

    def _padded(self, items: list[Any], refs: list[ItemRef], size: int) -> Any:
        """Return the next batch of these items. If batches are padded, it has `size` rows and the key "valid"."""
        if not self.lane.pad:
            return self._combined(items, refs)
        return self._with_valid(self._combined(items + items[:1] * (size - len(items)), refs), len(items), size)

    def _note_first(self, ref: ItemRef) -> None:
        """Remember the ref of the lane's first item, which padding rows repeat."""
        if self.lane.pad:
            self._first = self._first or ref

    def _restore_first(self, saved: Any) -> None:
        """Restore the ref of the lane's first item, unless it is now excluded."""
        self._first = None if saved is None else as_ref(saved)
        if self._first is not None and self.info.excluded.remaining(self._first) != self._first:
            self._first = None  # padding rows must not repeat an excluded item

    def filler(self) -> Any:
        """Build a batch of padding rows for a lane that has no more batches.

        Raises `EncodeError` if there is no item to repeat.
        """
        item = Skip("none yet") if self._first is None else self.source.fetch(self._first)
        if type(item) is Skip or not self._rows_of(item):
            item = self._any_item()
        size = self._rows_of(item)
        batch = self._with_valid(self._calls.combined([item] * size, self._count, self.info), 0, size)
        self._count_yielded([])
        return batch

    def _any_item(self) -> Any:
        """Return an item of one of the dataset's first samples, to pad the batches of a lane that had no item."""
        refs = (ref for ref in _refs_of(self.source) if self.info.excluded.remaining(ref) == ref)
        for ref in islice(refs, _TRIED):
            with contextlib.suppress(EncodeError):
                item = self.source.fetch(ref)
                if type(item) is not Skip and self._rows_of(item):
                    return item
        raise EncodeError(
            f"tail='pad': the encoder skipped the first {_TRIED} samples, so no item can pad a batch. Use tail='stop'."
        )

    def _with_valid(self, batch: Any, valid_rows: int, size: int) -> Any:
        """Return a batch of `size` rows with the key "valid", which is True for the first `valid_rows` rows."""
        import torch

        if not isinstance(batch, dict) or "valid" in batch:
            raise EncodeError(
                f"tail='pad': {self._calls.encoder_name}.batch must return a dict without a key 'valid', not "
                f"{type(batch).__name__}."
            )
        return {**batch, "valid": torch.arange(size) < valid_rows}

    def settings(self) -> dict[str, Any]:
        """Return `drop_last`, and the encoder if it is not the one upstream."""
        return {"drop_last": self.drop_last, **self._calls.settings()}


def rebuild(last: Stage, ref: ItemRef, size: int) -> tuple[Any, ItemRef, tuple[int, ...]]:
    """Rebuild a batch without its lost rows.

    Returns (batch, ref, positions), where `positions` are those of the remaining rows in the earlier batch.

    If no row remains, or `ref` is empty, the batch is a replacement, and `positions` is empty. The replacement is a
    batch of padding rows if batches are padded, and otherwise the lane's next batch. Raises `SavableError` if there is
    no next batch.

    Args:
        last: The last stage of the lane.
        ref: The ref of the earlier batch.
        size: The number of rows of the earlier batch with padding, or 0 if batches are not padded.
    """
    number, rows = batch_rows(ref)
    # the refs of the remaining rows, by their positions in the earlier batch
    remaining = {row: part for row, whole in enumerate(rows) if (part := last.info.remaining(whole)) is not None}
    if remaining:
        maker, wanted = chunked(last).maker, (*number, *remaining.values())
        batch, lost = maker.rebuilt(wanted, size) if isinstance(maker, EncoderBatches) else (maker.fetch(wanted), ())
        remaining = {row: part for at, (row, part) in enumerate(remaining.items()) if at not in lost}
        if remaining and type(batch) is not Skip:
            return batch, (*number, *remaining.values()), tuple(remaining)
    if last.lane.pad:
        return cast(BatchStage, last).filler(), (), ()
    for batch in last:
        return batch, last.ref, ()
    raise SavableError(
        f"{last.lane} has no batch to replace one that cannot be rebuilt, or to fill a step. Use fewer lanes or "
        "more data."
    )


def _refs_of(stage: Stage) -> Iterator[ItemRef]:
    """Yield, for each sample upstream in epoch 0, the ref of an element that `stage` may yield for it."""
    if not stage.sources:
        (tag,) = stage.info.tags
        yield from ((number | tag << TAG_SHIFT, 0, 0) for number in range(stage.info.population))
    for source in stage.sources:
        for ref in _refs_of(source):
            yield (0, ref) if isinstance(stage, PackStage) else ref  # pack 0, of this item alone


class _BatcherState(msgspec.Struct):
    elements: list[Any] = msgspec.field(name="held")
    count: SavedCount
    source: dict[str, Any]
    first: Any = None


class Batcher(EncoderBatches):
    """Yields batches: `encoder.batch(items, rng)` of `size` items or packs each.

    With `SavableLoader(tail="pad")` every batch has `size` rows and, beside the encoder's keys, "valid": bool (size,),
    False for padding rows, which repeat an item.

    Args:
        source: A stage of items, packs or samples.
        size: The number of items or packs of a batch.
        drop_last: Drop a finite source's last batch if it is smaller. None: False.
        encoder: Combines items. None: the encoder upstream; without an encoder, a batch is the list of its samples.

    Raises:
        ValueError: `size` is below 1.
        EncodeError: `encoder.batch` raised, or did not return a dict although batches are padded.

    Example:
        >>> class Ids(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return {"id": sample.json()["id"]}
        >>> batches = sp.Batcher(sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Ids()), size=3)
        >>> next(batches)  # int64 (3,), by torch's default_collate
        {'id': tensor([0, 1, 2])}
        >>> batches.ref  # (number of the batch, ref of each item)
        (0, (0, 0, 0), (1, 0, 0), (2, 0, 0))
    """

    setting_rules: ClassVar[Mapping[str, SettingRule]] = {"size": SettingRule(field="batch_size")}

    def __init__(
        self, source: Stage, *, size: int, drop_last: bool | None = None, encoder: TaskEncoder | None = None
    ) -> None:
        check_count("Batcher", "size", size)
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self.size = size
        self._buffer = ItemBuffer(self)  # items of the next batch
        self._drops_excluded = source.info.yields_excluded  # whether no `Encode` has dropped excluded samples
        set_batch_size(source, size)

    def describe(self) -> StageInfo:
        """Describe batches without excluded samples.

        This stage drops these samples if no `Encode` has done so.
        """
        return replace(super().describe(), yields_excluded=False)

    def _due(self) -> tuple[list[Any], list[ItemRef], int] | None:
        items = self._fill(self.size)
        if len(items) < (self.size if self.drop_last else 1):
            return None
        refs = self._buffer.refs(self.size)
        self._note_first(refs[0])
        return items, refs, self.size

    def _rows_of(self, item: Any) -> int:
        return self.size

    def _count_yielded(self, refs: list[ItemRef]) -> None:
        """Also drop the items of the batch from the buffer.

        The buffer may have more items than a batch if the state was saved with a larger `size`.
        """
        super()._count_yielded(refs)
        self._buffer.drop(len(refs))

    def more(self) -> bool:
        """Return whether another batch follows.

        To find out, it takes the first item of that batch, or all of them with `drop_last`.
        """
        needed = self.size if self.drop_last else 1
        return len(self._fill(needed)) >= needed

    def count_of(self, lane: int, epoch: int) -> int | None:
        """Return the number of batches of a lane in a pass.

        It is the source's count divided by `size`, rounded up, or down with `drop_last`.

        Args:
            lane: The number of the lane.
            epoch: The number of the pass.
        """
        items = None if self._drops_excluded else count_of(self.source, lane, epoch)
        return None if items is None else (items if self.drop_last else items + self.size - 1) // self.size

    def _fill(self, n: int) -> list[Any]:
        """Return the next `n` items, or fewer at the end. If the lane skips batches, they may be unbuilt."""
        while len(items := self._buffer.values(n, skips=self.lane.skips)) < n and self._fill_buffer(n):
            pass
        return items

    def _fill_buffer(self, n: int) -> bool:
        """Take items, so that `n` are buffered if none is dropped. Returns False at the end."""
        if not self._drops_excluded:
            return self._buffer.fill(n) > 0
        elements = take_elements(self.source, n - len(self._buffer))
        remaining = set(known_refs(self, [element.ref for element in elements]))
        self._buffer.add([element for element in elements if element.ref in remaining])
        return bool(elements)

    def save_state(self) -> State:
        """Return refs and sizes of the buffered items, and the number of yielded batches."""
        first = {} if self._first is None else {"first": self._first}
        return {"held": self._buffer.save(), "count": self._count, "source": self.source.save_state(), **first}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`, without reading a sample."""
        saved = parse_state(self, state, _BatcherState)
        self._restore_first(saved.first)
        self.source.restore_state(saved.source)
        self._buffer.restore(saved.elements)
        self._count = saved.count

    def settings(self) -> dict[str, Any]:
        """Return every argument, and the encoder if it is not the one upstream."""
        return {"size": self.size, **super().settings()}
