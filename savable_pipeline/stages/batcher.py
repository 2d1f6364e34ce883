"""`Batcher`: the last stage of most pipelines, which makes batches of items or packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.data.dataset.ref import skip_counters
from savable_pipeline.stages.encoder_batches import EncoderBatches
from savable_pipeline.stages.excluded_samples import REASON
from savable_pipeline.stages.held_items import HeldItems
from savable_pipeline.stages.item_ref import ItemRef, sample_indices
from savable_pipeline.stages.setting_rules import SettingRule
from savable_pipeline.stages.stage import Stage, State, parse_state
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import TaskEncoder


class _BatcherState(msgspec.Struct):
    held: list[Any]
    count: SavedCount
    source: dict[str, Any]
    first: Any = None


class Batcher(EncoderBatches):
    """Yields batches: `encoder.batch(items, rng)` of `size` items or packs each.

    With `SavableLoader(tail="pad")` every batch has `size` rows and, beside the encoder's keys, "valid": bool (size,),
    False for filler rows, which repeat an item.

    Args:
        source: A stage of items, packs or samples.
        size: Items or packs of a batch.
        drop_last: Drop a finite source's last batch if it is smaller. None: False.
        encoder: Makes the batches. None: the encoder upstream; without one, a batch is the list of its samples.

    Raises:
        ValueError: `size` is below 1.
        EncodeError: `encoder.batch` raised or, to pad, returned no dict.

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
        if size < 1:
            raise ValueError(f"Batcher: size must be at least 1, not {size}")
        super().__init__(source, drop_last=drop_last, encoder=encoder)
        self.size = size
        self._held = HeldItems(self)  # of the next batch
        self._leaves_out = source.info.gives_excluded  # no `Encode` has, after a reader that excludes some
        source.set_batch_size(size, aligned=True)

    def describe(self) -> StageInfo:
        """The source's, one deeper; excluded samples are left out here at the latest."""
        return replace(super().describe(), gives_excluded=False)

    @property
    def held_items(self) -> int:
        """Items that wait for their batch."""
        return self._held.made

    def __next__(self) -> Any:
        items, refs = self._take_batch()
        batch = self._filled_up(items, refs, self.size)
        self._drop(refs)
        return batch

    def pass_over(self) -> None:
        """Skip the next batch without calling `encoder.batch`. Raises StopIteration at the end."""
        _, refs = self._take_batch()
        self._drop(refs)

    def _take_batch(self) -> tuple[list[Any], list[ItemRef]]:
        """Take the items of the next batch, and return them and their refs. Raises StopIteration at the end."""
        items = self._fill(self.size)
        if len(items) < (self.size if self.drop_last else 1):
            raise StopIteration
        refs = self._held.refs(self.size)
        self._note_first(refs[0])
        return items, refs

    def _rows_of(self, item: Any) -> int:
        return self.size

    def _drop(self, refs: list[ItemRef]) -> None:
        """Drop the items of one batch; more may be held if the state was saved with a larger `size`."""
        self._gave(refs)
        self._held.drop(len(refs))

    def more(self) -> bool:
        """Whether another batch will come; takes its first item, or all of them with `drop_last`, to find out."""
        needed = self.size if self.drop_last else 1
        return len(self._fill(needed)) >= needed

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The source's count divided by `size`, rounded up, or down with `drop_last`."""
        items = None if self._leaves_out else self.source.count_of(lane, epoch)
        return None if items is None else items // self.size if self.drop_last else -(-items // self.size)

    def _fill(self, n: int) -> list[Any]:
        """The next `n` items, or as many as there are."""
        while len(items := self._held.ready(n)) < n and self._take(n):
            pass
        return items

    def _take(self, n: int) -> bool:
        """Take items until `n` are held; False at the end."""
        if not self._leaves_out:
            return self._held.fill(n) > 0
        elements = self.source.take(n - len(self._held))
        self._held.add([element for element in elements if not self._is_excluded(element.ref)])
        return bool(elements)

    def _is_excluded(self, ref: ItemRef) -> bool:
        """Whether an item is made from an excluded sample, which is counted."""
        index = next((index for index in sample_indices(ref) if index in self.info.excluded), None)
        if index is not None:
            self.counts.update(skip_counters(REASON, index))
        return index is not None

    def save_state(self) -> State:
        """`held`: refs of the items taken for the next batch; `count`: batches given so far."""
        first = {} if self._first is None else {"first": self._first}
        return {"held": self._held.refs(), "count": self._count, "source": self.source.save_state(), **first}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is read."""
        saved = parse_state(self, state, _BatcherState)
        self._restore_first(saved.first)
        self.source.restore_state(saved.source)
        self._held.restore(saved.held)
        self._count = saved.count

    def settings(self) -> dict[str, Any]:
        """Every argument; the encoder only if it is not the one upstream."""
        return {"size": self.size, **super().settings()}
