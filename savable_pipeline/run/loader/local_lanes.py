"""`LocalLanes`: the trainer's own lanes, their default number, and warnings.

Without `lanes=`, the data set the number of lanes:

    batches of the first epoch    960 …   480 …   240 …   80 …   40 …   20 …   fewer
    lanes of a finite run         96      48      24      8      4      2      1
    lanes of an endless run       96      48      24      8      8      8      8

Each lane has at least ten batches of a finite epoch, so `tail="stop"` drops less than a tenth of them. With 8 lanes,
15 batches would be one round of 8, and 7 batches would be dropped. An endless run drops none, and 8 lanes serve 8
workers or ranks. See docs/lanes.md.

The index has the number of samples, not of batches. Each sample counts as one item, even if a filter or an encoder may
drop some. Pipelines that the index cannot count, such as packs and blends, have 96 lanes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.lane import LANE_COUNT, PinnedShards
from savable_pipeline.core.run_facts import NO_FACTS, ChunkSizes, Decisions, RunFacts
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.key_index import ExcludeFile
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.loader.ranks import Ranks, check_lanes
from savable_pipeline.run.loader.settings import MOST_LANES, LoaderSettings
from savable_pipeline.run.state.lane_state import LaneState
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.chunked_stage import chunked
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.mapped_function import LAMBDA
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.join import Join
from savable_pipeline.stages.readers.read_order import BLOCK_SIZE
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.readers import TokenReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import BatchStage, PassThrough, Stage
from savable_pipeline.stages.task_encoder import TaskEncoder


def chunk_sizes(last: Stage, epoch: int) -> ChunkSizes:
    """Return the chunk sizes of an epoch by branch, see `RunFacts`.

    A branch whose readers differ is not included.
    """
    found: ChunkSizes = {}
    differing = set()
    for stage in upstream(last):
        if isinstance(stage, RecordReader):
            branch, sizes = stage.info.branch, stage.shares_of(epoch).cut
            if found.setdefault(branch, sizes) != sizes:
                differing.add(branch)
    return {branch: sizes for branch, sizes in found.items() if branch not in differing}


class LocalLanes:
    """Builds lanes in this process, to run or to inspect them.

    `runner` runs lanes. `example_lane` is the number of the lane that is built to inspect its stages.
    """

    def __init__(self, job: LaneJob, example_lane: int, pinned: PinnedShards | None = None) -> None:
        self._shared: dict[Any, Any] = {}
        self._job_lanes, self._example_lane = job.lanes, example_lane
        self._example: Stage | None = None  # the last stage of `example_lane`; None until it is built
        self._exclude_files: list[ExcludeFile] = []
        self._has_logged_hints = False  # whether hints about the pipeline were logged
        self.facts = NO_FACTS  # what `use_facts` has set: grown datasets and decisions of `reconfigure`
        # the shards and commits to read, and the number of lanes; `close` does not clear it
        self.pinned: PinnedShards = {} if pinned is None else pinned
        self.runner = LaneRunner(job, shared=self._shared, pinned=self.pinned)

    @property
    def last_stage(self) -> Stage:
        """Return the last stage of a lane, to inspect it and the stages upstream.

        The first call opens the shards, and indexes them if they have no index.
        """
        if self._example is None:
            self._example = self._build_example(self.facts)
            readers = [stage for stage in upstream(self._example) if isinstance(stage, RecordReader)]
            files = [each.exclude_file for each in readers if each.exclude_file is not None]
            # If the lane is built again, keep the first files, so that `verify_excluded` compares with their contents.
            self._exclude_files = self._exclude_files or files
            # Hints need the final number of lanes, which `set_lanes` stores in `pinned`.
            if not self._has_logged_hints and LANE_COUNT in self.pinned:
                log_hints(self._example)
                self._has_logged_hints = True
        return self._example

    def verify_excluded(self) -> None:
        """Raise `SavableError` if a file of excluded samples has changed."""
        for file in self._exclude_files:
            file.verify()

    def _build_example(self, facts: RunFacts) -> Stage:
        """Return the last stage of a new lane with these facts."""
        with as_in_a_worker(set(KINDS)):
            last_stage, _ = self.runner.build(self._example_lane % self.lanes, 0, facts)
        return last_stage

    def built_with(self, decisions: Decisions) -> Stage:
        """Return the last stage of a lane with these decisions.

        Raises ValueError if they do not fit the pipeline.
        """
        return self._build_example(replace(self.facts, decisions=decisions))

    def use_facts(self, facts: RunFacts) -> None:
        """Inspect lanes with these facts, without their chunk sizes, from now on.

        Raises `CheckpointMismatchError` if the data lack shards, and ValueError if the facts do not fit. In both cases
        nothing changes.
        """
        facts = facts.of_next_epoch
        if facts != self.facts:
            self._example, self.facts = self._build_example(facts), facts

    def pin(self, pinned: PinnedShards) -> None:
        """Read these shards and commits of the Hub from now on.

        Datasets without an entry are read in their current version.
        """
        self.close()
        lanes = self.lanes
        self.pinned.clear()
        self.pinned.update(pinned)
        self.set_lanes(lanes)

    @property
    def lanes(self) -> int:
        """Return the number of lanes of the run.

        It is that of the job as long as `set_lanes` was not called.
        """
        return int(self.pinned.get(LANE_COUNT, self._job_lanes))

    def set_lanes(self, lanes: int) -> None:
        """Set the number of lanes of the run."""
        self.pinned[LANE_COUNT] = str(lanes).encode()
        self._example = None

    def last_stage_with(self, facts: RunFacts) -> Stage:
        """Return the last stage of a lane that reads these facts' shards, to inspect it."""
        if facts.growth == self.facts.growth:
            return self.last_stage
        return self.lane_at(LaneState(self._example_lane, 0), RunFacts(facts.growth))

    def lane_at(self, saved: LaneState, facts: RunFacts) -> Stage:
        """Return the last stage of a lane at a saved position, to inspect it."""
        with as_in_a_worker(set(KINDS)):
            stage, _ = self.runner.restored(saved, facts, downloads=False)
        return stage

    def close(self) -> None:
        """Drop all lanes and close the shards."""
        self.runner.close()
        self._example = None
        self._shared.clear()


log = logging.getLogger(__name__)

_LANE_COUNTS = (MOST_LANES, 48, 24, 8, 4, 2)
_LEAST_ENDLESS_LANES = 8  # least number of lanes of an endless run
_BATCHES_PER_LANE = 10  # least number of batches of each lane in an epoch
_IDLE_WARNING = "%d workers for the %d lanes of this rank: some stay idle. For a new run, use lanes=%d or more."


def with_lanes(settings: LoaderSettings, ranks: Ranks, local: LocalLanes, lanes: int | None) -> LoaderSettings:
    """Set the number of lanes of a run, and return the settings with this number.

    Args:
        settings: The settings of the loader.
        ranks: The rank of this process.
        local: Builds the lanes of the run. Its number of lanes is set.
        lanes: The number of lanes. None: the data determine it.

    Raises:
        ValueError: The number does not fit the ranks or `epoch_slots`.
    """
    source = ""
    if lanes is None:
        batches, source = first_epoch_batches(local.last_stage), ", the default for this data"
        lanes = lanes_for(batches, endless=local.last_stage.info.endless)
        if batches is not None:
            log.info("lanes=%d, because an epoch has %d batches. Pass another number to a new run.", lanes, batches)
    check_lanes(ranks, lanes, source)
    settings = dataclasses.replace(settings, lanes=lanes)
    local.set_lanes(lanes)
    own_lanes = lanes // ranks.world_size
    if ranks.builds and settings.num_workers > own_lanes:
        log.warning(_IDLE_WARNING, settings.num_workers, own_lanes, settings.num_workers * ranks.world_size)
    return settings


def lanes_for(batches: int | None, *, endless: bool) -> int:
    """Return the default number of lanes for `batches` batches per epoch.

    None means that the number of batches is unknown.
    """
    if batches is None:
        return MOST_LANES
    lanes = next((lanes for lanes in _LANE_COUNTS if batches >= _BATCHES_PER_LANE * lanes), 1)
    return max(lanes, _LEAST_ENDLESS_LANES) if endless else lanes


def first_epoch_batches(last: Stage) -> int | None:
    """Return the number of full batches of the first epoch, or None if unknown.

    The number is a lower bound if there are more than enough batches for 96 lanes.

    Args:
        last: The last stage of a lane.
    """
    reader, *steps = upstream(last)
    if not (isinstance(reader, RecordReader) and isinstance(last, Batcher)):
        return None
    if not all(chunked(step).one_to_one is not None or isinstance(step, Filter) for step in steps[:-1]):
        return None
    excluded, selection = list(reader.info.excluded.numbers.get(reader.tag, ())), reader.selection
    count = reader.shares_of(0).count(0)
    if selection is not None and count - len(excluded) < _BATCHES_PER_LANE * MOST_LANES * last.size:
        excluded = [*np.intersect1d(selection.locate(np.arange(reader.population)), excluded)]
    return max(0, count - len(excluded)) // last.size


# Through these stages, samples of a block stay together: 87 % of them in batches of samples, about a third in packs.
_ORDER_PRESERVING = (Blend, Filter, Join, PassThrough, Encode, OnlinePacker, Batcher)


def log_hints(last: Stage) -> None:
    """Warn about settings that work but were probably not intended."""
    for message in _hints(last):
        log.warning(message)
    if _preserves_blocks(last):
        _warn_of_blocks()


@cache
def _warn_of_blocks() -> None:
    """Warn about an unshuffled order, once per process and not for each of its loaders."""
    log.warning(
        "only blocks of %d consecutive samples are shuffled. Add .shuffle(size), or set block_size=%d to silence this.",
        *(BLOCK_SIZE, BLOCK_SIZE),
    )


def _preserves_blocks(stage: Stage) -> bool:
    """Return whether consecutive samples stay together, and the user has not chosen that by a block size.

    The result is False for a finite run, which is usually an evaluation, whose order does not matter. It is also False
    for windows of tokens, because consecutive windows are not similar.
    """
    if not isinstance(stage, RecordReader):
        return isinstance(stage, _ORDER_PRESERVING) and any(map(_preserves_blocks, stage.sources))
    has_long_shards = stage.population >= 2 * len(stage.dataset.entries)  # otherwise a block spans many shards
    has_similar_neighbors = has_long_shards and not isinstance(stage, TokenReader)
    return stage.has_default_blocks and stage.epochs is None and has_similar_neighbors


def _hints(last: Stage) -> Iterator[str]:
    """Yield messages about settings that were probably not intended."""
    if not isinstance(last, BatchStage):
        yield (f"the pipeline ends with {type(last).__name__}, so each step yields a single element. Add .batch(size).")
    encoders = [stage.info.encoder for stage in upstream(last)]
    for encoder in {type(each): each for each in encoders if each is not None}.values():
        yield from _unsaved_settings(encoder)
    if any(LAMBDA in stage.settings().values() for stage in upstream(last)):
        yield ("Lambdas are not compared on resume. Use a named function.")
    yield from _early_schedule_hints(last)
    for stage in upstream(last):
        population = stage.info.population
        if isinstance(stage, Batcher) and stage.size > population > 0:
            consequence = "a batch repeats samples" if stage.info.endless else "no batch is full"
            yield (
                f"Batcher(size={stage.size}): the data has only {population:,} samples, so {consequence}. Reduce the "
                "batch size."
            )
        encoder_length = getattr(stage.info.encoder, "max_length", None)
        if isinstance(stage, OnlinePacker) and isinstance(encoder_length, int) and encoder_length > stage.max_length:
            yield (
                f"packs of {stage.max_length:,} tokens may be padded to the {encoder_length:,} tokens of "
                f"{type(stage.info.encoder).__name__}(max_length={encoder_length}). Pass the same length to both."
            )


def _unsaved_settings(encoder: TaskEncoder) -> Iterator[str]:
    """Yield hints about attributes of an encoder that look like settings but are not saved."""
    if type(encoder).settings is not TaskEncoder.settings:
        return
    own = {name: value for name, value in getattr(encoder, "__dict__", {}).items() if not hasattr(TaskEncoder, name)}
    names = [name for name, value in own.items() if name[0] != "_" and type(value) in (bool, int, float, str)]
    if names:
        yield (
            f"{type(encoder).__name__}: a resumed run does not compare {listed(names)}. Return them from settings(), "
            f'as in {{"{names[0]}": self.{names[0]}}}.'
        )


def _early_schedule_hints(stage: Stage, ahead: int = 0) -> Iterator[str]:
    """Yield hints about schedules that change before the first batch, because buffers draw so many samples ahead.

    `ahead` is the number of items in the buffers between this stage and the batches.
    """
    if isinstance(stage, Blend):
        drawn = ahead * stage.lane.count
        changes = stage.schedule.starts[1:] if stage.schedule is not None else []
        if early := [change for change in changes if change <= drawn]:
            yield (
                f"the schedule changes at {early[0]:,}, but later buffers draw {drawn:,} samples before the first "
                "batch. Move the buffers into the sources of the Blend, or change the point."
            )
        ahead = 0  # the sources share the buffers after the Blend
    if isinstance(stage, ShuffleBuffer):
        ahead += stage.capacity
    for source in stage.sources:
        yield from _early_schedule_hints(source, ahead)
