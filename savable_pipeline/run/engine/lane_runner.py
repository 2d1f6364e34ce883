"""`LaneRunner` builds, restores and runs lanes in this process.

The process is a worker, or the trainer itself. A lane is a logical worker: one copy of the pipeline's stages, with a
saved position. A request restores a lane from its state, unless the lane runs in this process already. The runner
builds the batch and saves the lane. It drops a lane whose stages raise, so the next request with the lane's last state
tries the same batch again.

Earlier batches are rebuilt by their refs. Each is rebuilt on a temporary lane:

    RebuildRequest   the lane, its epoch and the number of the batch │ the ref ──▶ the same batch, by `fetch`, without
                                                                                   samples excluded or lost since then
                     the next lane                                   │ no ref  ──▶ a batch of padding rows

The lanes that build new batches stay where they are, because a rebuilt batch takes no slot of the global sequence.
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
from savable_pipeline.run.engine.stage_timing import MIN_PAUSE_S, TIMED_EVERY, WatchedSamples, pop_counts, time_stages
from savable_pipeline.run.state.lane_state import LaneState, pack_state, restoring, unpack_state, with_counts
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.batcher import rebuild
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.stages.item_ref import ItemRef, as_ref
from savable_pipeline.stages.pipeline import datasets_of, upstream, verify_files
from savable_pipeline.stages.stage import BatchStage, Stage


@dataclass(slots=True)
class _RunningLane:
    """A lane that runs in this process, with its stages."""

    stages: list[Stage]  # in the order of the data path
    lane: Lane
    batches: int  # number of batches that it has built in the epoch
    dropped: dict[str, dict[str, int]]  # skipped samples, as in `LaneState.dropped`
    counts: dict[str, int | float] = field(default_factory=dict)  # counters of its stages since the last delivery
    state: bytes | None = None  # state delivered with the last batch
    peeked: tuple[Any, bytes] | None = None  # a batch built only to find out that it exists, and the state before it

    @property
    def stage(self) -> Stage:
        """Return the last stage, which yields the batches."""
        return self.stages[-1]

    def collect_counts(self) -> None:
        """Move the counters of the stages to `counts` and `dropped`."""
        if popped := pop_counts(self.stages):
            self.dropped = with_counts(self.dropped, popped)
            for name, number in popped.items():
                self.counts[name] = self.counts.get(name, 0) + number


class RebuildRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to rebuild the batch of a lane whose number is `lane.batches`.

    A `Request` has it in MessagePack, in place of a lane's state.
    `ref` is the batch's ref in MessagePack, or b"" for a batch of padding. If `size` is not 0, the batch is padded to
    that many rows.
    """

    lane: LaneState
    ref: bytes = b""
    size: int = 0


class LaneRunner:
    """Builds and restores lanes when they are needed, and builds their batches.

    Stages record their current work in `status`, the words of a `StatusPage`, if it is passed. `pinned` has the shards
    of the run by dataset, and gets those of a dataset that a lane opens for the first time. Lanes are restored with
    `facts`, which the caller may set. A state comes from a lane with the same facts, so running lanes have them.
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
        self._running: dict[int, _RunningLane] = {}
        self._stores: dict[int, RecordStore] = {}  # stores that the lanes read from, including dropped lanes
        self._delivered = 0  # number of new batches that were delivered, see `TIMED_EVERY`
        self._timing_due = 0.0  # time from which a batch may be timed again

    def build(self, lane: int, epoch: int, facts: RunFacts = NO_FACTS, *, downloads: bool = True) -> tuple[Stage, Lane]:
        """Build a new lane, and return its last stage and its `Lane`.

        `lane` is the index of the lane. Raises ValueError if the pipeline returns no stage that can be run.
        """
        job = self._job
        worker = self._worker if downloads else replace(self._worker, downloads=False)
        lane_count = int(worker.pinned.get(LANE_COUNT, job.lanes))  # pinned if it was derived from the data
        new_lane = Lane(lane, lane_count, job.seed, epoch=epoch, pad=job.pad, facts=facts, worker=worker)
        last_stage = job.pipeline(new_lane)
        _check_last(last_stage, new_lane)
        return last_stage, new_lane

    def restored(self, saved: LaneState, facts: RunFacts, *, downloads: bool = True) -> tuple[Stage, Lane]:
        """Build a lane at a saved position, and return its last stage and its `Lane`."""
        stage, lane = self.build(saved.lane, saved.epoch, facts, downloads=downloads)
        if saved.stages is not None:
            with restoring(f"the state of lane {saved.lane}"):
                stage.restore_state(saved.stages)
        return stage, lane

    def deliver(
        self, lane: int, state: bytes | None, kind: RequestKind = "batch", avoid: Iterable[tuple[int, int]] = ()
    ) -> Delivery:
        """Return the next batch of a lane at the position `state`.

        A `state` of None means that the lane runs in this process, at the right position. `avoid` has index and epoch
        of samples that the lane must skip from now on. For "again", `state` is a packed `RebuildRequest`, and the
        result is its batch. An invalid ref in it raises `StateError`.
        """
        if kind == "again" and state is not None:
            return self._deliver_rebuilt(state, avoid)
        start = time.perf_counter()
        running = self._running.pop(lane, None)  # put back only if nothing raises
        if state is not None and (running is None or running.state is not state):
            running = self._restore(unpack_state(state, LaneState, f"lane {lane}"))
        assert running is not None
        _avoid(running.stages, avoid)
        spent, watched = dict[str, int](), None
        if self._delivered % TIMED_EVERY or start < self._timing_due:
            batch, ref, more = self._serve(running, kind)
        else:
            watched, self._timing_due = WatchedSamples([]), start + MIN_PAUSE_S
            with time_stages(running.stages, watched) as spent:
                batch, ref, more = self._serve(running, kind)
        self._delivered += 1
        counts = running.counts
        counts.update((f"{name}/ns", spent_ns) for name, spent_ns in spent.items())
        running.counts, self._running[lane] = {}, running
        seconds = time.perf_counter() - start
        stages = () if self._worker.status is None else running.stages  # in the trainer, no lane moves
        rebuild_s = seconds * sum(map(built_items, stages)) / max(1, counts.get("Encode/items", 1))
        assert running.state is not None
        sends_ref = self._job.refs and kind == "batch"
        if sends_ref and self._delivered == 1:
            msgspec.msgpack.encode(ref)  # raises for an invalid ref now, and not when a state is saved
        rows = row_count(ref, type(running.stage).__name__) if sends_ref else 0
        sent, after, samples, timed = ref if sends_ref else (), running.state, BatchSamples(ref), bool(spent)
        exhausted = batch is _EXHAUSTED
        batch = None if exhausted or kind == "skip" else batch
        return Delivery(batch, after, more, exhausted, seconds, rebuild_s, counts, samples, timed, watched, sent, rows)

    def _deliver_rebuilt(self, packed: bytes, avoid: Iterable[tuple[int, int]]) -> Delivery:
        """Return the batch of a packed `RebuildRequest`."""
        start = time.perf_counter()
        request = msgspec.msgpack.decode(packed, type=RebuildRequest)
        stages = self._restore(request.lane).stages
        _avoid(stages, avoid)
        last = stages[-1]
        batch, ref, remaining = _rebuild(last, request)
        verify_files(stages, request.lane.batches * last.lane.count + last.lane.index)
        counts, seconds = pop_counts(stages), time.perf_counter() - start
        samples, rows = BatchSamples(ref), row_count(ref, type(last).__name__)
        return Delivery(batch, packed, True, False, seconds, 0.0, counts, samples, rows=rows, remaining=remaining)

    def _serve(self, running: _RunningLane, kind: RequestKind) -> tuple[Any, ItemRef, bool]:
        """Return the batch (or `_EXHAUSTED`), its ref, and whether another follows.

        Afterwards `running.state` is the lane's state after the batch.
        """
        running.lane.skips = kind != "batch"
        batch = None if kind == "peek" else self._next(running, kind)
        ref = () if kind == "peek" or batch is _EXHAUSTED else running.stage.ref
        more = batch is not _EXHAUSTED and self._has_more(running)
        running.lane.skips = False
        if batch is _EXHAUSTED and self._job.pad:
            batch = cast(BatchStage, running.stage).filler()  # `build` has checked it
            running.batches += 1
        slot = max(0, running.batches - 1) * running.lane.count + running.lane.index
        verify_files(running.stages, slot)
        if not more:
            self.verify_delivered()
        running.lane.unused = 0
        running.state = running.peeked[1] if running.peeked is not None else self._pack(running, more)
        return batch, ref, more

    def verify_delivered(self) -> None:
        """Raise `ShardError` if a shard changed after a batch was read from it.

        Only batches since the last check are checked. Another thread may run lanes at the same time.
        """
        for store in list(self._stores.values()):
            store.verify_yielded()

    def stage_at(self, lane: int, state: bytes) -> Stage | None:
        """Return the last stage of a lane, or None.

        The result is None unless the lane runs here and `state` is from its last delivery.
        """
        running = self._running.get(lane)
        # If it is the same object as in the last delivery, the lane has not moved since.
        return running.stage if running is not None and running.state is state else None

    def _restore(self, saved: LaneState) -> _RunningLane:
        if saved.facts != self.facts.digest:
            raise StateError(
                f"lane {saved.lane}: its state does not fit the state of the run. Load both from one checkpoint."
            )
        stage, lane = self.restored(saved, self.facts)
        lane.unused = 0
        stages = list(upstream(stage))
        running = _RunningLane(stages, lane, saved.batches, saved.dropped or {})
        self._stores.update((id(each.store), each.store) for each in datasets_of(stages))
        return running

    def _next(self, running: _RunningLane, kind: RequestKind) -> Any:
        """Return the lane's next batch, None for a skipped one, or `_EXHAUSTED`."""
        if running.peeked is not None:
            batch, running.peeked = running.peeked[0], None
        elif kind == "skip" and isinstance(running.stage, BatchStage):
            batch = None if running.stage.pass_over() else _EXHAUSTED
        else:
            batch = next(running.stage, _EXHAUSTED)
        running.batches += batch is not _EXHAUSTED
        return batch

    def _has_more(self, running: _RunningLane) -> bool:
        """Return whether the lane has a further batch. This builds the batch if the stages cannot know."""
        if running.stage.info.endless:
            return True
        more = running.stage.more() if isinstance(running.stage, BatchStage) else None
        if more is not None:
            return more
        if running.peeked is None:
            before = self._pack(running, True)  # packed before `next`, which may change the result of `save_state`
            batch = next(running.stage, _EXHAUSTED)
            if batch is _EXHAUSTED:
                return False
            running.peeked = (batch, before)
            running.collect_counts()
        return True

    def _pack(self, running: _RunningLane, more: bool) -> bytes:
        """Return the state of a lane as bytes."""
        running.collect_counts()
        lane = running.lane
        saved = LaneState(lane.index, lane.epoch, running.batches, more, running.stage.save_state(), lane.facts.digest)
        has_sources = len(running.stage.info.tags) > 1  # with one source, any batch shows that it has yielded a sample
        saved.dropped = running.dropped if has_sources or any(running.dropped.values()) else UNSET
        return pack_state(saved)

    def forget(self, lane: int | None = None) -> None:
        """Drop a lane, or all of them."""
        if lane is None:
            self._running.clear()
        else:
            self._running.pop(lane, None)

    def close(self) -> None:
        """Drop all lanes, and the stores that they read from."""
        self.forget()
        self._stores.clear()


_EXHAUSTED = object()  # in place of a batch, if a lane has none left


def _check_last(stage: Any, lane: Lane) -> None:
    """Raise ValueError unless `stage`, which a pipeline returned for a lane, can be run as its last stage."""
    if not isinstance(stage, Stage):
        raise ValueError(f"a pipeline must return its last stage (such as a Batcher), not {type(stage).__name__}")
    for each in upstream(stage):
        if each.info.lane is not lane:  # its samples would be those of another lane
            source = f" of the source {each.info.branch!r}" if each.info.branch else ""
            raise ValueError(
                f"{type(each).__name__}{source} was made for {each.info.lane}, not for {lane}. Create each reader "
                "in the pipeline function, with its lane, as in sp.TarShardReader(path, lane)."
            )
    if stage.info.yields_excluded:
        raise ValueError(
            f"exclude= needs an Encode, or a Batcher of samples, between the reader and {type(stage).__name__}. Add "
            "one."
        )
    if lane.pad and getattr(type(stage), "filler", BatchStage.filler) is BatchStage.filler:
        raise ValueError(
            f"tail='pad' needs a last stage with filler(), not {type(stage).__name__}. End the pipeline with a Batcher."
        )


def _avoid(stages: Iterable[Stage], samples: Iterable[tuple[int, int]]) -> None:
    """Let the stages of a lane skip these samples, given by index and epoch, from now on."""
    for index, epoch in samples:
        for stage in stages:
            if hasattr(stage, "avoid") and tag_of(index) in stage.info.tags:
                stage.avoid(index, epoch, "its worker died")


def _rebuild(last: Stage, request: RebuildRequest) -> tuple[Any, ItemRef, tuple[int, ...]]:
    """Return the batch of a request, its ref, and the row numbers that it still has.

    Raises `StateError` for an invalid ref.
    """
    lane = request.lane
    try:
        return rebuild(last, as_ref(msgspec.msgpack.decode(request.ref)) if request.ref else (), request.size)
    except (SavableError, OSError, MemoryError):
        raise
    except Exception as error:
        raise StateError(
            f"batch {lane.batches} of lane {lane.lane} in epoch {lane.epoch}, in flight in the state, cannot be rebuilt"
            f": {type(error).__name__}: {error}. Use another copy of the checkpoint, or fix `fetch` of your stage."
        ) from error
