"""What a batch was made of, where a worker was, and what the data path looks like: for people who look at a loader."""

from __future__ import annotations

from typing import Any, NamedTuple

from savable_pipeline.encode import Encode
from savable_pipeline.errors import WorkerError
from savable_pipeline.host import LaneHost
from savable_pipeline.note import Work
from savable_pipeline.on_error import skips
from savable_pipeline.sample import Ref, tag_of
from savable_pipeline.stage import ItemRef, Stage, upstream
from savable_pipeline.state import LaneState, unpack_state

_SHOWN = 60  # characters of a setting


class TracedSample(NamedTuple):
    """A sample that went into a batch, or a part of it, and where it lies."""

    shard: str
    key: str
    ref: Ref


class Trace(NamedTuple):
    """A batch: its slot and lane, and the samples that it was made of, in order.

    `rows` has those of each row: one where a batch is made of items, several where it is made of packs.
    """

    slot: int
    lane: int
    rows: list[list[TracedSample]]

    @property
    def samples(self) -> list[TracedSample]:
        """The samples of all rows."""
        return [sample for row in self.rows for sample in row]


def trace(host: LaneHost, state: bytes, slot: int) -> Trace:
    """Make the batch again that a lane at `state` gives, here, and tell what went into it."""
    saved = unpack_state(state, LaneState, "the state before the batch")
    stage, _ = host.build(saved.lane, saved.epoch)
    if saved.stages is not None:
        stage.restore_state(saved.stages)
    next(stage)
    return Trace(slot, saved.lane, _rows(stage))


def traced_samples(last: Stage) -> list[TracedSample]:
    """The samples that a pipeline's last stage made what it gave last of, in order."""
    return [sample for row in _rows(last) for sample in row]


def _rows(last: Stage) -> list[list[TracedSample]]:
    parts = [part for part in last.ref if isinstance(part, tuple)] or [last.ref]
    return [[_sample(last, ref) for ref in _items(part)] for part in parts]


def _items(ref: ItemRef) -> list[ItemRef]:
    """The refs of single items in the ref of a batch or pack."""
    nested = [part for part in ref if isinstance(part, tuple)]
    return [item for part in nested for item in _items(part)] if nested else [ref]


def _sample(stage: Stage, ref: ItemRef) -> TracedSample:
    while stage.encoder is not None:
        stage = next(source for source in stage.sources if tag_of(ref[0]) in source.tags)
    sample = stage.fetch(ref)
    return TracedSample(sample.shard, sample.key, Ref(sample.ref.source, ref[1], sample.ref.index, ref[2]))


def where(last: Stage, work: Work) -> str:
    """In words, what a worker was at, after a comma; nothing if it did not say."""
    stage = _stage_at(last, work)
    if stage is None:
        return ""
    if work.sample is None or stage.encoder is None or stage.sources[0].encoder is not None:
        return f", in {type(stage).__name__}"
    sample = stage.sources[0].fetch((work.sample, work.epoch, 0))
    return f", in {type(stage).__name__}, shard {sample.shard}, key {sample.key!r}, byte offset {sample.offset}"


def may_avoid(last: Stage, work: Work, error: WorkerError) -> bool:
    """Whether the sample that a worker was at, which ends workers again and again, may be left out."""
    stage = _stage_at(last, work)
    return isinstance(stage, Encode) and skips(stage.on_error, error)


def _stage_at(last: Stage, work: Work) -> Stage | None:
    tag = tag_of(work.sample or 0)
    return next((stage for stage in upstream(last) if stage.depth == work.depth and tag in stage.tags), None)


def data_path(last: Stage) -> str:
    """The stages of a lane as a tree, the last one first."""
    return "\n".join(_lines(last))


def _lines(stage: Stage) -> list[str]:
    settings = ", ".join(f"{name}={_short(value)}" for name, value in stage.settings().items() if value is not None)
    lines = [f"└─ {type(stage).__name__}({settings})"]
    for source in stage.sources:
        lines += [f"   {line}" for line in _lines(source)]
    return lines


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and (len(value) > 4 or any(isinstance(part, list | tuple) for part in value)):
        return f"{len(value)} of them"
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
