"""Reads a dead worker's last status: its stage and sample in words, and whether that sample may be left out."""

from __future__ import annotations

from savable_pipeline.data.dataset.ref import tag_of
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.messages import WorkerStatus
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage import Stage


def where(last: Stage, status: WorkerStatus) -> str:
    """The stage and sample of a status, as text that begins with a comma; "" if the worker recorded none."""
    stage = _stage_at(last, status)
    if stage is None:
        return ""
    if status.sample is None or stage.info.encoder is None or stage.sources[0].info.encoder is not None:
        return f", in {type(stage).__name__}"
    sample = stage.sources[0].fetch((status.sample, status.epoch, 0))
    return f", in {type(stage).__name__}, shard {sample.shard}, key {sample.key!r}, {sample.place}"


def can_skip(last: Stage, status: WorkerStatus, error: WorkerError) -> bool:
    """Whether the sample of a status, which has killed several workers, may be left out by its stage's `on_error`."""
    stage = _stage_at(last, status)
    return stage is not None and stage.can_skip(error)


def _stage_at(last: Stage, status: WorkerStatus) -> Stage | None:
    tag = tag_of(status.sample or 0)
    stages = (stage for stage in upstream(last) if stage.info.depth == status.depth and tag in stage.info.tags)
    return next(stages, None)
