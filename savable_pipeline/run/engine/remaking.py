"""Makes earlier batches again, each by its ref, on a lane of its own that is dropped afterwards.

    Remake    the lane, its epoch and the number of the batch │ the ref    ──▶ fetch(ref): the same bytes
              the lane that comes next                        │ no ref     ──▶ a batch that only fills up

The lanes that make new batches stay where they are: a batch that is made again takes no slot.
"""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec

from savable_pipeline.errors import EncodeError, SavableError, StateError
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, MadeOf
from savable_pipeline.run.engine.stage_timing import take_counts
from savable_pipeline.run.state.lane_state import LaneState
from savable_pipeline.stages.capabilities import FillsUp, fetch_rows
from savable_pipeline.stages.item_ref import ItemRef, as_ref
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.task_encoder import Skip


class Remake(msgspec.Struct, frozen=True, array_like=True):
    """A batch to make again, of a lane with `batches` before it, by its ref in MessagePack; without one, a filler."""

    lane: LaneState
    ref: bytes = b""

    @property
    def packed(self) -> bytes:
        """What takes the place of a lane's state in a request."""
        return msgspec.msgpack.encode(self)


def remade(runner: LaneRunner, packed: bytes, avoid: tuple[tuple[int, int], ...] = ()) -> Delivery:
    """The batch of a `Remake`. Raises `StateError` for a ref of no batch, and what the lane's stages raise."""
    start = time.perf_counter()
    job = msgspec.msgpack.decode(packed, type=Remake)
    stages = runner.fresh(job.lane, avoid)
    last = stages[-1]
    batch, ref, lost = _fetched(last, job) if job.ref else _filler(last)
    for stage in stages:
        if hasattr(stage, "verify"):
            stage.verify(job.lane.batches * last.lane.count + last.lane.index)
    counts, seconds = take_counts(stages, {}), time.perf_counter() - start
    made_of = MadeOf.of(ref, type(last).__name__, lost)
    return Delivery(batch, packed, True, seconds=seconds, counts=counts, samples=ref, made_of=made_of)


def _fetched(last: Stage, job: Remake) -> tuple[Any, ItemRef, tuple[int, ...]]:
    lane = job.lane
    where = f"batch {lane.batches} of lane {lane.lane} in epoch {lane.epoch}, in flight in the state"
    try:
        ref = as_ref(msgspec.msgpack.decode(job.ref))
        batch, lost = fetch_rows(last, ref)
    except (SavableError, OSError, MemoryError):
        raise
    except Exception as error:
        raise StateError(
            f"{where}, cannot be made again ({type(error).__name__}: {error}): it is damaged, or fetch of a stage of "
            "your own does not take its ref; use another copy of the checkpoint"
        ) from error
    if type(batch) is Skip:
        raise EncodeError(f"{where}, can no longer be made: {batch.reason}")
    return batch, ref, lost


def _filler(last: Stage) -> tuple[Any, ItemRef, tuple[int, ...]]:
    """A batch that counts for nothing: that of a padded lane which has no more, or the lane's first."""
    if last.lane.pad:
        return cast(FillsUp, last).filler(), (), ()
    for batch in last:
        return batch, last.ref, ()
    raise SavableError(f"{last.lane} has no batch, to fill up a step in which other ranks are given batches again")
