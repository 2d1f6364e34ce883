"""`LaneRunner` builds, restores and runs lanes in this process.

The process is a worker, or the trainer itself. A request restores a lane from its state, unless the lane runs here
already. The runner builds the batch and saves the lane. It drops a lane whose stages raise, so the next request with
the lane's last state tries the same batch again.

Earlier batches are rebuilt by their refs. Each is rebuilt on a lane of its own, which is dropped afterwards:

    RebuildRequest   the lane, its epoch and the number of the batch │ the ref ──▶ the same batch, by `fetch`, without
                                                                                   samples excluded or lost since then
                     the next lane                                   │ no ref  ──▶ a batch of padding rows

The lanes that build new batches do not move, because a rebuilt batch takes no slot.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
from msgspec import UNSET

from savable_pipeline.core.lane import LANE_COUNT, Lane, PinnedShards, WorkerContext
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.data.dataset.ref import tag_of
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import SavableError, StateError
from savable_pipeline.run.engine.messages import Delivery, LaneJob, RequestKind, row_count
from savable_pipeline.run.engine.stage_timing import EVERY, PAUSE_S, WatchedSamples, pop_counts, timed
from savable_pipeline.run.state.lane_state import LaneState, pack_state, restoring, unpack_state, with_counts
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.batcher import rebuild
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.stages.item_ref import ItemRef, as_ref
from savable_pipeline.stages.pipeline import datasets_of, upstream, verify_files
from savable_pipeline.stages.stage import BatchStage, Stage


@dataclass(slots=True)
class _Live:
    """A lane that runs in this process."""

    stages: list[Stage]  # in the order of the data path
    lane: Lane
    batches: int
    dropped: dict[str, dict[str, int]]  # in the form of its state
    counts: dict[str, int | float] = field(default_factory=dict)  # counters of its stages since the last delivery
    state: bytes | None = None  # state delivered with the last batch
    early: tuple[Any, bytes] | None = None  # a batch built only to find out that it exists, and the state before it

    @property
    def stage(self) -> Stage:
        """Return the last stage, which yields the batches."""
        return self.stages[-1]

    def collect(self) -> None:
        """Collect the counters of the stages."""
        if fresh := pop_counts(self.stages):
            self.dropped = with_counts(self.dropped, fresh)
            before = self.counts
            self.counts = {name: before.get(name, 0) + fresh.get(name, 0) for name in before | fresh}


class RebuildRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to rebuild a batch of a lane with `batches` before it.

    `ref` is its ref in MessagePack. Without a ref, the batch is padding. `size` is the number of rows with padding, or
    0 without padding.
    """

    lane: LaneState
    ref: bytes = b""
    size: int = 0

    @property
    def packed(self) -> bytes:
        """Return the bytes that replace a lane's state in a request."""
        return msgspec.msgpack.encode(self)


class LaneRunner:
    """Builds and restores lanes when they are needed, and builds their batches.

    Stages record their current work in `status`, the words of a `StatusPage`, if it is passed. `pinned` has the shards
    of the run. Those of a dataset that is opened for the first time are added. Lanes are restored with `facts`, which
    may be set. A state comes from a lane with the same facts, so running lanes have them.
    """

    def __init__(
        self,
        job: LaneJob,
        *,
        shared: dict[Any, Any],
        status: memoryview | None = None,
        pinned: PinnedShards | None = None,
    ) -> None:
        self._job = job
        self._worker = WorkerContext(shared, status, {} if pinned is None else pinned)
        self.facts = NO_FACTS
        self._live: dict[int, _Live] = {}
        self._stores: dict[int, RecordStore] = {}  # stores that the lanes read from, including dropped lanes
        self._built_count = 0  # see `EVERY`
        self._timing_due = 0.0  # time from which a batch may be timed again

    def build(self, lane: int, epoch: int, facts: RunFacts = NO_FACTS, *, downloads: bool = True) -> tuple[Stage, Lane]:
        """Return the last stage of a fresh pipeline, and its lane.

        Raises ValueError if the pipeline returns no stage.
        """
        job, worker = self._job, self._worker if downloads else replace(self._worker, downloads=False)
        lanes = int(worker.pinned.get(LANE_COUNT, job.lanes))
        built = Lane(lane, lanes, job.seed, epoch=epoch, pad=job.pad, facts=facts, worker=worker)
        stage = job.pipeline(built)
        _check_last(stage, built)
        return stage, built

    def deliver(
        self, lane: int, state: bytes | None, want: RequestKind = "batch", avoid: Iterable[tuple[int, int]] = ()
    ) -> Delivery:
        """Return the next batch of a lane at the position `state`.

        A `state` of None means that the lane runs here and is at its position. `avoid` has index and epoch of samples
        that the lane must drop from now on. For "again", the result is the batch of the `RebuildRequest` packed in
        `state`, and an invalid ref raises `StateError`.
        """
        if want == "again" and state is not None:
            return self._rebuilt_delivery(state, avoid)
        start = time.perf_counter()
        live = self._live.pop(lane, None)  # put back only if nothing raises
        if state is not None and (live is None or live.state is not state):
            live = self._restore(unpack_state(state, LaneState, f"lane {lane}"))
        assert live is not None
        _avoid(live.stages, avoid)
        if self._built_count % EVERY or start < self._timing_due:
            batch, ref, more, spent, record = *self._serve(live, want), {}, None
        else:
            record, self._timing_due = WatchedSamples([]), start + PAUSE_S
            with timed(live.stages, record) as spent:
                batch, ref, more = self._serve(live, want)
        self._built_count += 1
        live.collect()
        counts = {**live.counts, **{f"{name}/ns": spent_ns for name, spent_ns in spent.items()}}
        live.counts, self._live[lane] = {}, live
        seconds = time.perf_counter() - start
        stages = () if self._worker.status is None else live.stages  # in the trainer, no lane moves
        rebuild_s = seconds * sum(map(built_items, stages)) / max(1, counts.get("Encode/items", 1))
        assert live.state is not None
        dry = batch is _DRY
        batch = None if dry or want == "skip" else batch
        asks_ref = self._job.refs and want == "batch"
        rows = row_count(ref, type(live.stage).__name__) if asks_ref else 0
        if asks_ref and self._built_count == 1:
            msgspec.msgpack.encode(ref)  # raises for an invalid ref now, and not when a state is saved
        sent = ref if asks_ref else ()
        samples, is_timed = BatchSamples(ref), bool(spent)
        return Delivery(batch, live.state, more, dry, seconds, rebuild_s, counts, samples, is_timed, record, sent, rows)

    def _rebuilt_delivery(self, packed: bytes, avoid: Iterable[tuple[int, int]]) -> Delivery:
        start = time.perf_counter()
        job = msgspec.msgpack.decode(packed, type=RebuildRequest)
        stages = self._restore(job.lane).stages
        _avoid(stages, avoid)
        last = stages[-1]
        batch, ref, remaining = _rebuilt(last, job)
        verify_files(stages, job.lane.batches * last.lane.count + last.lane.index)
        counts, seconds = pop_counts(stages), time.perf_counter() - start
        samples, rows = BatchSamples(ref), row_count(ref, type(last).__name__)
        return Delivery(batch, packed, True, False, seconds, 0.0, counts, samples, rows=rows, remaining=remaining)

    def _serve(self, live: _Live, want: RequestKind) -> tuple[Any, ItemRef, bool]:
        """Serve a request of this kind.

        Returns the batch, its ref, and whether another follows. Saves the lane's state.
        """
        live.lane.skips = want != "batch"
        batch = None if want == "peek" else self._next(live, want)
        ref = () if want == "peek" or batch is _DRY else live.stage.ref
        more = batch is not _DRY and self._more(live)
        live.lane.skips = False
        if batch is _DRY and self._job.pad:
            batch = cast(BatchStage, live.stage).filler()  # `build` has checked it
            live.batches += 1
        verify_files(live.stages, max(0, live.batches - 1) * live.lane.count + live.lane.index)
        if not more:
            self.verify_delivered()
        live.lane.unused = 0
        live.state = live.early[1] if live.early is not None else self._pack(live, more)
        return batch, ref, more

    def verify_delivered(self) -> None:
        """Raise `ShardError` if the data of delivered batches have changed.

        These are the batches since the last check. Another thread may run lanes at the same time.
        """
        for store in list(self._stores.values()):
            store.verify_yielded()

    def at_position(self, lane: int, state: bytes) -> Stage | None:
        """Return the last stage of a lane that runs here at the position `state`, or None."""
        live = self._live.get(lane)
        return live.stage if live is not None and live.state is state else None

    def _restore(self, saved: LaneState) -> _Live:
        if saved.facts != self.facts.digest:
            raise StateError(
                f"lane {saved.lane}: its state does not fit the state of the run. Load both from one checkpoint."
            )
        stage, lane = self.build(saved.lane, saved.epoch, self.facts)
        if saved.stages is not None:
            with restoring(f"the state of lane {saved.lane}"):
                stage.restore_state(saved.stages)
        lane.unused = 0
        stages = list(upstream(stage))
        live = _Live(stages, lane, saved.batches, saved.dropped or {})
        self._stores.update((id(each.store), each.store) for each in datasets_of(stages))
        return live

    def _next(self, live: _Live, want: RequestKind) -> Any:
        if live.early is not None:
            batch, live.early = live.early[0], None
        elif want == "skip" and isinstance(live.stage, BatchStage):
            batch = None if live.stage.pass_over() else _DRY
        else:
            batch = next(live.stage, _DRY)
        live.batches += batch is not _DRY
        return batch

    def _more(self, live: _Live) -> bool:
        if live.stage.info.endless:
            return True
        more = live.stage.more() if isinstance(live.stage, BatchStage) else None
        if more is not None:
            return more
        if live.early is None:
            before = self._pack(live, True)  # packed before `next`, which may change the result of `save_state`
            batch = next(live.stage, _DRY)
            if batch is _DRY:
                return False
            live.early = (batch, before)
        return True

    def _pack(self, live: _Live, more: bool) -> bytes:
        live.collect()
        lane = live.lane
        saved = LaneState(lane.index, lane.epoch, live.batches, more, live.stage.save_state(), lane.facts.digest)
        several = len(live.stage.info.tags) > 1  # with one source, any batch shows that it has yielded a sample
        saved.dropped = live.dropped if several or any(live.dropped.values()) else UNSET
        return pack_state(saved)

    def forget(self, lane: int | None = None) -> None:
        """Drop a lane, or all of them."""
        if lane is None:
            self._live.clear()
        else:
            self._live.pop(lane, None)

    def close(self) -> None:
        """Drop all lanes, and the stores that they read from."""
        self.forget()
        self._stores.clear()


_DRY = object()


def _check_last(stage: Any, lane: Lane) -> None:
    """Raise ValueError unless a pipeline that returned this for a lane can be run."""
    if not isinstance(stage, Stage):
        raise ValueError(f"a pipeline must return its last stage (such as a Batcher), not {type(stage).__name__}")
    _check_lane(stage, lane)
    if stage.info.yields_excluded:
        raise ValueError(
            f"exclude= needs an Encode, or a Batcher of samples, between the reader and {type(stage).__name__}. Add "
            "one."
        )
    if lane.pad and getattr(type(stage), "filler", BatchStage.filler) is BatchStage.filler:
        raise ValueError(
            f"tail='pad' needs a last stage with filler(), not {type(stage).__name__}. End the pipeline with a Batcher."
        )


def _check_lane(last: Stage, lane: Lane) -> None:
    """Raise ValueError unless all stages were built for this lane.

    Other stages would yield samples of another lane.
    """
    for stage in upstream(last):
        if stage.info.lane is not lane:
            source = f" of the source {stage.info.branch!r}" if stage.info.branch else ""
            raise ValueError(
                f"{type(stage).__name__}{source} was made for {stage.info.lane}, not for {lane}. Create each reader "
                "in the pipeline function, with its lane, as in sp.TarShardReader(path, lane)."
            )


def _avoid(stages: Iterable[Stage], samples: Iterable[tuple[int, int]]) -> None:
    """Drop these samples, by index and epoch, from a lane from now on."""
    for index, epoch in samples:
        for stage in stages:
            if hasattr(stage, "avoid") and tag_of(index) in stage.info.tags:
                stage.avoid(index, epoch, "its worker died")


def _rebuilt(last: Stage, job: RebuildRequest) -> tuple[Any, ItemRef, tuple[int, ...]]:
    """Return the result of `rebuild`. Raises `StateError` for an invalid ref."""
    lane = job.lane
    try:
        return rebuild(last, as_ref(msgspec.msgpack.decode(job.ref)) if job.ref else (), job.size)
    except (SavableError, OSError, MemoryError):
        raise
    except Exception as error:
        raise StateError(
            f"batch {lane.batches} of lane {lane.lane} in epoch {lane.epoch}, in flight in the state, cannot be rebuilt"
            f": {type(error).__name__}: {error}. Use another copy of the checkpoint, or fix `fetch` of your stage."
        ) from error
