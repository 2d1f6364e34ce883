"""`EncoderBatches`: what stages that make batches by an encoder have in common, among it rows that only fill up."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from savable_pipeline.core.item_difference import DifferingItemsError
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.ref import TAG_SHIFT
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_ref import ItemRef, as_ref
from savable_pipeline.stages.pipeline import sample_names
from savable_pipeline.stages.stage import BatchStage, Stage
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings

_TRIED = 100  # samples to try for an item that fills up a batch
_NAMED = 2  # items of a batch whose samples an error names


class _Samples(TaskEncoder):
    """Stands for the encoder of a pipeline without one: a batch is the list of its samples."""

    global_rng = False

    def batch(self, items: list[Any], rng: Rng) -> Any:
        return items


class EncoderBatches(BatchStage):
    """Base of stages whose batches are `encoder.batch(items, rng)`; a subclass chooses the items of the next batch.

    `encoder=None` takes the encoder upstream; if there is none, a batch is the list of its samples. Where the run pads,
    batches are filled up with an item of their own, and `filler` makes those of a lane that has no more.
    """

    ref: ItemRef = ()
    """The last batch's number in the lane, then the refs of its items."""

    def __init__(self, source: Stage, *, drop_last: bool | None, encoder: TaskEncoder | None) -> None:
        super().__init__(source)
        chosen = encoder or source.info.encoder or _Samples()
        self._calls = EncoderCalls(type(self).__name__, source.info, chosen, "batch")
        self.drop_last = bool(drop_last)
        self._count = 0
        self._first: ItemRef | None = None  # the ref of the lane's first item, set if batches are padded

    def describe(self) -> StageInfo:
        """The source's, one deeper, with the encoder whose `batch` makes the batches."""
        return replace(super().describe(), encoder=self._calls.encoder)

    def fetch(self, ref: ItemRef) -> Any:
        """Make the batch with this ref again, without the items that can no longer be made; a `Skip` if none can."""
        return self.fetch_rows(ref)[0]

    def fetch_rows(self, ref: ItemRef, size: int = 0) -> tuple[Any, tuple[int, ...]]:
        """The same, and the rows that are left out; filled up to `size` rows, if batches are padded."""
        number, *parts = ref
        items = [self.source.fetch(part) for part in parts]
        lost = tuple([row for row, item in enumerate(items) if type(item) is Skip])
        left = [item for item in items if type(item) is not Skip]
        if not (left and self.lane.pad):
            return self._calls.combined(left, number, self.info) if left else items[0], lost
        size = size or max(len(left), self._rows_of(left[0]))
        filled = left + left[:1] * (size - len(left))
        return self._marked(self._calls.combined(filled, number, self.info), len(left), size), lost

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

    @abstractmethod
    def _rows_of(self, item: Any) -> int:
        """The rows of a full batch of items such as this one; 0 if it is left out of batches. Raises `EncodeError`."""

    def _filled_up(self, items: list[Any], refs: list[ItemRef], size: int) -> Any:
        """The next batch, of the items with these refs; where batches are padded, of `size` rows, with "valid"."""
        if not self.lane.pad:
            return self._combined(items, refs)
        return self._marked(self._combined(items + items[:1] * (size - len(items)), refs), len(items), size)

    def _note_first(self, ref: ItemRef) -> None:
        """Keep the first item of the lane, to fill up batches of."""
        if self.lane.pad:
            self._first = self._first or ref

    def _restore_first(self, saved: Any) -> None:
        self._first = None if saved is None else as_ref(saved)
        if self._first is not None and self.info.excluded.left_of(self._first) != self._first:
            self._first = None  # it must not fill up batches either: another one will

    def filler(self) -> Any:
        """A batch of rows that do not count, for a lane that has no more. Raises `EncodeError` without any item."""
        item = Skip("none yet") if self._first is None else self.source.fetch(self._first)
        if type(item) is Skip or not self._rows_of(item):
            item = self._any_item()
        size = self._rows_of(item)
        batch = self._marked(self._calls.combined([item] * size, self._count, self.info), 0, size)
        self._gave([])
        return batch

    def _any_item(self) -> Any:
        """An item of any sample of the dataset, for a lane that has no sample of its own."""
        refs = (ref for ref in _refs_of(self.source) if self.info.excluded.left_of(ref) == ref)
        for ref in islice(refs, _TRIED):
            with contextlib.suppress(EncodeError):
                item = self.source.fetch(ref)
                if type(item) is not Skip and self._rows_of(item):
                    return item
        raise EncodeError(f"tail='pad': none of the first {_TRIED} samples makes an item to pad a batch of {self.lane}")

    def _marked(self, batch: Any, valid: int, size: int) -> Any:
        """The batch with the key "valid": the first `valid` rows count."""
        import torch

        if not isinstance(batch, dict) or "valid" in batch:
            raise EncodeError(
                f"tail='pad' adds a key 'valid' to batches: {self._calls.encoder_name}.batch must give a dict "
                f"without one, not {type(batch).__name__}"
            )
        return {**batch, "valid": torch.arange(size) < valid}

    def settings(self) -> dict[str, Any]:
        """`drop_last`, and the encoder unless it is the one upstream."""
        return {
            "drop_last": self.drop_last,
            **encoder_settings(self._calls.encoder, upstream=self.source.info.encoder),
        }


def _refs_of(stage: Stage) -> Iterator[ItemRef]:
    """Refs of elements that a stage might give, one for each single sample, source after source."""
    if not stage.sources:
        (tag,) = stage.info.tags
        yield from ((number | tag << TAG_SHIFT, 0, 0) for number in range(stage.info.population))
    for source in stage.sources:
        yield from map(stage.ref_alone, _refs_of(source))
