"""`LaneHost`: runs lanes in this process, for the trainer itself or in a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from savable_pipeline.batch import Batcher
from savable_pipeline.global_rng import kinds
from savable_pipeline.lane import Lane
from savable_pipeline.stage import Stage
from savable_pipeline.state import LaneState, pack_state, unpack_state

Pipeline: TypeAlias = Callable[[Lane], Stage]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch and the state of its lane after it; `dry`: there was none. `more`: whether another will come."""

    batch: Any
    state: bytes
    more: bool
    dry: bool = False


@dataclass(slots=True)
class _Live:
    """A lane that runs here, and for a finite one whose last stage has no `more`, the batch made early."""

    stage: Stage
    lane: Lane
    batches: int
    early: tuple[Any, bytes] | None = None  # with the lane's state before it


class LaneHost:
    """Builds lanes when they are first needed, restores them, and makes their batches.

    A lane whose stages raised is forgotten: asked again with its last state, it tries the same again.
    """

    def __init__(self, pipeline: Pipeline, *, seed: int, lanes: int, shared: dict[Any, Any]) -> None:
        self._pipeline = pipeline
        self._seed = seed
        self._lanes = lanes
        self._shared = shared
        self._live: dict[int, _Live] = {}

    def build(self, lane: int, epoch: int) -> tuple[Stage, Lane]:
        """A fresh pipeline of a lane. Raises ValueError if the pipeline function gives no stage."""
        built = Lane(lane, self._lanes, self._seed, epoch=epoch, shared=self._shared)
        stage = self._pipeline(built)
        if not isinstance(stage, Stage):
            raise ValueError(f"a pipeline returns its last stage (such as a Batcher), not {type(stage).__name__}")
        return stage, built

    def deliver(self, lane: int, state: bytes | None, *, probe: bool = False) -> Delivery:
        """The next batch of a lane, put to `state` before if that is given.

        A probe gives no batch and only says whether there is one.
        """
        if state is not None:
            self._restore(unpack_state(state, LaneState, f"lane {lane}"))
        live = self._live[lane]
        try:
            batch = None if probe else self._next(live)
            dry = batch is _DRY
            more = not dry and self._more(live)
            return Delivery(None if dry else batch, self._save(live, more), more, dry)
        except BaseException:
            del self._live[lane]
            raise

    def _restore(self, saved: LaneState) -> None:
        stage, lane = self.build(saved.lane, saved.epoch)
        if saved.stages is not None:
            stage.restore_state(saved.stages)
        self._live[saved.lane] = _Live(stage, lane, saved.batches)

    def _next(self, live: _Live) -> Any:
        if live.early is not None:
            batch, live.early = live.early[0], None
        else:
            batch = next(live.stage, _DRY)
        live.batches += batch is not _DRY
        return batch

    def _more(self, live: _Live) -> bool:
        if live.stage.endless:
            return True
        if isinstance(live.stage, Batcher):
            return live.stage.more()
        if live.early is None:
            before = self._pack(live, True)  # as bytes at once: a stage may return what it will change
            batch = next(live.stage, _DRY)
            if batch is _DRY:
                return False
            live.early = (batch, before)
        return True

    def _save(self, live: _Live, more: bool) -> bytes:
        return live.early[1] if live.early is not None else self._pack(live, more)

    def _pack(self, live: _Live, more: bool) -> bytes:
        return pack_state(LaneState(live.lane.index, live.lane.epoch, live.batches, more, live.stage.save_state()))

    def forget(self) -> None:
        """Drop all lanes."""
        self._live = {}


_DRY = object()


def seeded_kinds(stage: Stage | None) -> set[str]:
    """The global generators that the encoders of a pipeline have seeded."""
    found: set[str] = set()
    while stage is not None:
        if stage.encoder is not None:
            found.update(kinds(stage.encoder.global_rng))
        stage = getattr(stage, "source", None)
    return found


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise ValueError unless this can be called with a lane."""
    try:
        inspect.signature(pipeline).bind(None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a pipeline is a function of one lane that returns its last stage, not {pipeline!r}: {error}"
        ) from None
