"""`PackStage`: what stages that join items into packs have in common."""

from __future__ import annotations

from dataclasses import replace

from savable_pipeline.stages.chunked_stage import ChunkedStage, is_certain
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.stage import ItemStage
from savable_pipeline.stages.stage_info import StageInfo


class PackStage(ChunkedStage, ItemStage):
    """Base of stages of packs, `encoder.pack(items, rng)`.

    A ref is a pack's number, then the refs of its items.
    """

    ref: ItemRef = ()
    """The last pack's number in the lane, then the refs of its items; (ref, start, stop) for a cut item."""
    _calls: EncoderCalls

    def describe(self) -> StageInfo:
        """The source's, one deeper, with the encoder whose `pack` is used."""
        return replace(super().describe(), encoder=self._calls.encoder)

    def is_certain(self, ref: ItemRef) -> bool:
        """Return whether a pack cannot be skipped, nor lose an item."""
        return self.are_certain([part if type(part[0]) is int else part[0] for part in ref[1:]])

    def are_certain(self, items: list[ItemRef]) -> bool:
        """Return whether a pack of whole items cannot be skipped, nor lose one."""
        return self._calls.packs_all and all(is_certain(self.source, item) for item in items)
