"""Makes earlier batches again, each by its ref, on a lane of its own that is dropped afterwards.

    Remake    the lane, its epoch and the number of the batch │ the ref    ──▶ fetch(ref): the same bytes, less what
                                                                               is excluded or gone since
              the lane that comes next                        │ no ref     ──▶ a batch that only fills up

The lanes that make new batches stay where they are: a batch that is made again takes no slot.
"""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec

from savable_pipeline.errors import SavableError, StateError
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, MadeOf
from savable_pipeline.run.engine.stage_timing import take_counts
from savable_pipeline.run.state.lane_state import LaneState
from savable_pipeline.stages.item_ref import ItemRef, as_ref, batch_rows
from savable_pipeline.stages.stage import BatchStage, Stage
from savable_pipeline.stages.task_encoder import Skip


class Remake(msgspec.Struct, frozen=True, array_like=True):
    """A batch to make again, of a lane with `batches` before it, by its ref in MessagePack; without one, a filler.

    `size`: its rows when it was filled up; 0 if it was not.
    """

    lane: LaneState
    ref: bytes = b""
    size: int = 0

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
    batch, ref, kept = _fetched(last, job) if job.ref else _filler(last)
    for stage in stages:
        stage.verify(job.lane.batches * last.lane.count + last.lane.index)
    counts, seconds = take_counts(stages, {}), time.perf_counter() - start
    made_of = MadeOf.of(ref, type(last).__name__, kept)
    return Delivery(batch, packed, True, seconds=seconds, counts=counts, samples=ref, made_of=made_of)


def _fetched(last: Stage, job: Remake) -> tuple[Any, ItemRef, tuple[int, ...]]:
    """The batch of the rows that are left of it, its ref, and their numbers; a filler if none is."""
    lane = job.lane
    where = f"batch {lane.batches} of lane {lane.lane} in epoch {lane.epoch}, in flight in the state"
    try:
        number, rows = batch_rows(as_ref(msgspec.msgpack.decode(job.ref)))
        left = {row: ref for row, part in enumerate(rows) if (ref := last.info.left_of(part)) is not None}
        batch, lost = last.fetch_rows((*number, *left.values()), job.size) if left else (None, ())
    except (SavableError, OSError, MemoryError):
        raise
    except Exception as error:
        raise StateError(
            f"{where}, cannot be made again ({type(error).__name__}: {error}): it is damaged, or fetch of a stage of "
            "your own does not take its ref; use another copy of the checkpoint"
        ) from error
    left = {row: ref for at, (row, ref) in enumerate(left.items()) if at not in lost}
    if type(batch) is Skip or not left:
        return _filler(last)
    return batch, (*number, *left.values()), tuple(left)


def _filler(last: Stage) -> tuple[Any, ItemRef, tuple[int, ...]]:
    """A batch that counts for nothing: that of a padded lane which has no more, or the lane's first. It has no rows."""
    if last.lane.pad:
        return cast(BatchStage, last).filler(), (), ()
    for batch in last:
        return batch, last.ref, ()
    raise SavableError(
        f"{last.lane} has no batch, to stand for one that can no longer be made, or to fill up a step in which other "
        "ranks are given batches again"
    )
