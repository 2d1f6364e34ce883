"""`PackStage`: base of stages that join items into packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from savable_pipeline.data.dataset.ref import skip_counters
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked, without_lost
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_ref import Element, ItemRef, remaining_sizes, sample_indices
from savable_pipeline.stages.stage import ItemStage
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import Skip

EMPTY_PACK = Skip("a pack of nothing")  # value of a pack of which all items are lost


class PackStage(ChunkedStage, ItemStage):
    """Base of stages that yield packs, `encoder.pack(items, rng)`.

    A ref is a pack's number, then the refs of its items.
    """

    ref: ItemRef = ()
    """The last pack's number in the lane, then the refs of its items; (ref, start, stop) for a cut item."""
    _calls: EncoderCalls

    def describe(self) -> StageInfo:
        """Describe packs of the encoder."""
        return replace(super().describe(), encoder=self._calls.encoder)

    def is_certain(self, ref: ItemRef) -> bool:
        """Return whether a pack can neither be skipped nor lose an item."""
        # a cut item is (ref of the item, start, stop)
        items = [part if type(part[0]) is int else part[0] for part in ref[1:]]
        return self._calls.packs_all and all(chunked(self.source).is_certain(item) for item in items)

    def make(self, elements: Sequence[Element]) -> None:
        """Build packs of the items that are not lost: set their values, refs and sizes.

        If the encoder skips a pack, only the value is set, and the pack is counted as skipped for its first item. If
        all items of a pack are lost, it is not counted, because its items are.
        """
        for element in elements:
            number, *parts = element.ref
            if isinstance(number, tuple) or not all(isinstance(part, tuple) for part in parts):
                raise CheckpointMismatchError(
                    f"{type(self).__name__}: {element.ref} is no pack. Use another copy of the checkpoint."
                )
            rebuilt = self._rebuild(parts)
            # A single size may be that of the whole pack, measured by a later stage, so it is not compared.
            sizes = element.sizes if element.sizes and len(element.sizes) == len(parts) > 1 else ()
            for part, ref, size in zip(rebuilt, parts, sizes, strict=False):
                # the ref of an inner pack or a cut item has tuples here
                if type(ref[0]) is type(ref[1]) is int and type(part.value) is not Skip:
                    self._calls.check_size(part, *size)
            remaining = without_lost(rebuilt)
            refs, items = [part.ref for part in remaining], [part.value for part in remaining]
            element.value = self._calls.combined(items, number, self.info) if items else EMPTY_PACK
            if type(element.value) is not Skip:
                remaining_ref = (number, *refs)
                element.sizes, element.ref = remaining_sizes(element.sizes, element.ref, remaining_ref), remaining_ref
                self._count_rebuilt(element, remaining)
            elif items:
                self._count_skip(element.value.reason, refs[0])

    def _rebuild(self, refs: list[ItemRef]) -> list[Element]:
        """Rebuild the items of a pack. The value of a lost one is a `Skip`.

        An item that is a pack itself gets the ref of its remaining items.
        """
        items = [Element(ref) for ref in refs]
        chunked(self.source).make(items)
        return items

    def _count_rebuilt(self, pack: Element, items: list[Element]) -> None:
        """Count a pack of these items, if it was not counted before."""

    def _count_skip(self, reason: str, ref: ItemRef) -> None:
        """Count an item or a pack as dropped, for the source of its first sample."""
        self.counts.update(skip_counters(reason, next(sample_indices(ref))))
