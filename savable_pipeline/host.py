"""`LaneHost`: runs lanes in this process, for the trainer itself or in a worker."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from savable_pipeline.batch import Batcher, BatchStage
from savable_pipeline.encode import Encode
from savable_pipeline.global_rng import kinds
from savable_pipeline.lane import Lane
from savable_pipeline.sample import tag_of
from savable_pipeline.stage import Stage, upstream
from savable_pipeline.stage_clock import EVERY, take_counts, timed
from savable_pipeline.state import LaneState, pack_state, unpack_state

Pipeline: TypeAlias = Callable[[Lane], Stage]


Want: TypeAlias = Literal["batch", "probe", "pass"]
"""The next batch of a lane; only whether there is one; or to pass over one."""


class Delivery(msgspec.Struct, frozen=True):
    """A batch and the state of its lane after it; `dry`: there was none. `more`: whether another will come.

    `seconds` is what it took to make, `remake_s` what it would take to make again all that the lane holds ready, if it
    moved. `counts` is what happened in its stages, by stage and name.
    """

    batch: Any
    state: bytes
    more: bool
    dry: bool = False
    seconds: float = 0.0
    remake_s: float = 0.0
    counts: dict[str, int | float] = {}


@dataclass(slots=True)
class _Live:
    """A lane that runs here, and for a finite one whose last stage has no `more`, the batch made early."""

    stages: list[Stage]  # the first ones first
    lane: Lane
    batches: int
    state: bytes | None = None  # that was given with its last batch
    early: tuple[Any, bytes] | None = None  # with the lane's state before it

    @property
    def stage(self) -> Stage:
        """The last one, which gives the batches."""
        return self.stages[-1]


class LaneHost:
    """Builds lanes when they are first needed, restores them, and makes their batches.

    A lane whose stages raised is forgotten: asked again with its last state, it tries the same again. Lanes say what
    they work on in `note`, if there is one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        lanes: int,
        shared: dict[Any, Any],
        note: memoryview | None = None,
        pad: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._seed = seed
        self._lanes = lanes
        self._shared = shared
        self._note = note
        self._pad = pad
        self._live: dict[int, _Live] = {}
        self._made = 0  # batches, of which some are timed

    def build(self, lane: int, epoch: int) -> tuple[Stage, Lane]:
        """A fresh pipeline of a lane. Raises ValueError if the pipeline function gives no stage."""
        built = Lane(lane, self._lanes, self._seed, epoch=epoch, shared=self._shared, note=self._note, pad=self._pad)
        stage = self._pipeline(built)
        if not isinstance(stage, Stage):
            raise ValueError(f"a pipeline returns its last stage (such as a Batcher), not {type(stage).__name__}")
        if self._pad and not isinstance(stage, Batcher):
            raise ValueError(f"tail='pad' needs a Batcher at the end, to fill up batches, not {type(stage).__name__}")
        return stage, built

    def deliver(
        self, lane: int, state: bytes | None, want: Want = "batch", avoid: Iterable[tuple[int, int]] = ()
    ) -> Delivery:
        """The next batch of a lane, put to `state` before if that is not where it stands; None: it does stand there.

        `avoid`: samples that it is to leave out from now on, by index and epoch.
        """
        start = time.perf_counter()
        live = self._live.pop(lane, None)  # back when all has gone well
        if state is not None and (live is None or live.state is not state):
            live = self._restore(unpack_state(state, LaneState, f"lane {lane}"))
        assert live is not None
        for index, epoch in avoid:
            for stage in live.stages:
                if isinstance(stage, Encode) and tag_of(index) in stage.tags:
                    stage.avoid((index, epoch), "its worker died")
        if self._made % EVERY:
            batch, more, spent = *self._make(live, want), {}
        else:
            with timed(live.stages) as spent:
                batch, more = self._make(live, want)
        self._made += 1
        counts = take_counts(live.stages, spent)
        self._live[lane] = live
        seconds = time.perf_counter() - start
        held = sum(stage.held_items for stage in live.stages)
        remake_s = seconds * held / max(1, counts.get("Encode/items", 1))
        assert live.state is not None
        dry = batch is _DRY
        return Delivery(None if dry or want == "pass" else batch, live.state, more, dry, seconds, remake_s, counts)

    def _make(self, live: _Live, want: Want) -> tuple[Any, bool]:
        """What is wanted of a lane, and whether there is more; takes its state."""
        batch = None if want == "probe" else self._next(live, want)
        more = batch is not _DRY and self._more(live)
        if batch is _DRY and isinstance(live.stage, Batcher) and self._pad:
            batch = live.stage.filler()
            live.batches += 1
        live.state = self._save(live, more)
        return batch, more

    def holds(self, lane: int, state: bytes) -> Stage | None:
        """The stages of a lane, if they run here and stand at `state`."""
        live = self._live.get(lane)
        return live.stage if live is not None and live.state is state else None

    def _restore(self, saved: LaneState) -> _Live:
        stage, lane = self.build(saved.lane, saved.epoch)
        if saved.stages is not None:
            stage.restore_state(saved.stages)
        return _Live(list(upstream(stage)), lane, saved.batches)

    def _next(self, live: _Live, want: Want) -> Any:
        if live.early is not None:
            batch, live.early = live.early[0], None
        elif want == "pass":
            batch = _pass_over(live.stage)
        else:
            batch = next(live.stage, _DRY)
        live.batches += batch is not _DRY
        return batch

    def _more(self, live: _Live) -> bool:
        if live.stage.endless:
            return True
        if isinstance(live.stage, BatchStage):
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

    def forget(self, lane: int | None = None) -> None:
        """Drop a lane, or all of them."""
        if lane is None:
            self._live.clear()
        else:
            self._live.pop(lane, None)


_DRY = object()


def _pass_over(stage: Stage) -> Any:
    try:
        return stage.pass_over()
    except StopIteration:
        return _DRY


def seeded_kinds(last: Stage) -> set[str]:
    """The global generators that the encoders of a pipeline have seeded."""
    encoders = [stage.encoder for stage in upstream(last)]
    return {kind for encoder in encoders if encoder is not None for kind in kinds(encoder.global_rng)}


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise ValueError unless this can be called with a lane."""
    try:
        inspect.signature(pipeline).bind(None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a pipeline is a function of one lane that returns its last stage, not {pipeline!r}: {error}"
        ) from None
