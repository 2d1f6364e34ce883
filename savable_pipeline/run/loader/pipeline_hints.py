"""Hints about a pipeline that works but looks odd, logged when it is first looked at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache

from savable_pipeline.core.wording import listed
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.mapped_function import LAMBDA
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.join import Join
from savable_pipeline.stages.readers.read_order import BLOCK
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.readers import TokenReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import BatchStage, PassThrough, Stage
from savable_pipeline.stages.task_encoder import TaskEncoder

log = logging.getLogger(__name__)

# Neighbours of a block remain so: 87 % of them in batches of samples, about a third in packs.
_IN_ORDER = (Blend, Join, PassThrough, Encode, OnlinePacker, Batcher)


def log_hints(last: Stage) -> None:
    """Warn of settings that are hardly intended."""
    for message in _warnings(last):
        log.warning(message)
    if _leaves_blocks(last):
        _warn_of_blocks()


@cache
def _warn_of_blocks() -> None:
    """Warn, once a process: a loader for evaluation, say, is built as the one before."""
    log.warning(
        "only blocks of %d consecutive samples are shuffled. Add .shuffle(size), or set block_size=%d to silence this.",
        BLOCK,
        BLOCK,
    )


def _leaves_blocks(stage: Stage) -> bool:
    """Whether blocks of neighbours come out of a stage as a reader has them, though nobody asked for blocks.

    A finite pass is mostly an evaluation, whose order is no matter; windows of tokens are no samples that one sorts.
    """
    if not isinstance(stage, RecordReader):
        return isinstance(stage, _IN_ORDER) and any(map(_leaves_blocks, stage.sources))
    is_of_neighbours = stage.population >= 2 * len(stage.dataset.entries)  # else a block is of many shards
    is_sorted = is_of_neighbours and not isinstance(stage, TokenReader)
    return stage.has_default_blocks and stage.epochs is None and is_sorted


def _warnings(last: Stage) -> Iterator[str]:
    if not isinstance(last, BatchStage):
        yield (
            f"the pipeline ends with {type(last).__name__}, so each step gets a single element. End it with "
            ".batch(size)."
        )
    found = [stage.info.encoder for stage in upstream(last)]
    for encoder in {type(each): each for each in found if each is not None}.values():
        yield from _untold_settings(encoder)
    if any(LAMBDA in stage.settings().values() for stage in upstream(last)):
        yield ("Lambdas are not compared on resume. Use a named function.")
    yield from _early_points(last)
    for stage in upstream(last):
        population = stage.info.population
        if isinstance(stage, Batcher) and stage.size > population > 0:
            then = "a batch repeats samples" if stage.info.endless else "no batch is full"
            yield (
                f"Batcher(size={stage.size}): the data has only {population:,} samples, so {then}. Reduce the batch "
                "size."
            )
        row = getattr(stage.info.encoder, "max_length", None)
        if isinstance(stage, OnlinePacker) and isinstance(row, int) and row > stage.max_length:
            yield (
                f"packs of {stage.max_length:,} tokens may be padded to the {row:,} tokens of "
                f"{type(stage.info.encoder).__name__}(max_length={row}). Pass the same length to both."
            )


def _untold_settings(encoder: TaskEncoder) -> Iterator[str]:
    """A hint about attributes of an encoder that look like settings, which no saved state knows."""
    if type(encoder).settings is not TaskEncoder.settings:
        return
    own = {name: value for name, value in getattr(encoder, "__dict__", {}).items() if not hasattr(TaskEncoder, name)}
    names = [name for name, value in own.items() if name[0] != "_" and type(value) in (bool, int, float, str)]
    if names:
        yield (
            f"{type(encoder).__name__}: a state does not compare {listed(names)}. Return them from settings(), as "
            f'in {{"{names[0]}": self.{names[0]}}}.'
        )


def _early_points(stage: Stage, ahead: int = 0) -> Iterator[str]:
    """Hints about points of schedules that buffers of `ahead` elements in each lane reach before the first batch."""
    if isinstance(stage, Blend):
        drawn = ahead * stage.lane.count
        early = [point for point in stage.schedule.starts[1:] if point <= drawn] if stage.schedule is not None else []
        if early:
            yield (
                f"the schedule changes at {early[0]:,}, but later buffers draw {drawn:,} samples before the first "
                "batch. Move the buffers into the sources of the Blend, or change the point."
            )
        ahead = 0  # of each source it is a part
    if isinstance(stage, ShuffleBuffer):
        ahead += stage.capacity
    for source in stage.sources:
        yield from _early_points(source, ahead)
