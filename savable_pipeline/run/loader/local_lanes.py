"""`LocalLanes`: the lanes that the trainer's own process builds, to run or to inspect them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.lane import LANE_COUNT, PinnedShards
from savable_pipeline.core.run_facts import NO_FACTS, ChunkSizes, Decisions, RunFacts
from savable_pipeline.data.dataset.exclude_file import ExcludeFile
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.loader.pipeline_hints import log_hints
from savable_pipeline.run.state.lane_state import LaneState, restoring
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage


def chunk_sizes(last: Stage, epoch: int) -> ChunkSizes:
    """Those of an epoch by the readers' branches.

    Without those of a branch whose readers cut in several ways.
    """
    found: ChunkSizes = {}
    differing = set()
    for stage in upstream(last):
        if isinstance(stage, RecordReader):
            branch, cut = stage.info.branch, stage.shares_of(epoch).cut
            if found.setdefault(branch, cut) != cut:
                differing.add(branch)
    return {branch: cut for branch, cut in found.items() if branch not in differing}


class LocalLanes:
    """`runner` runs lanes in this process.

    `example_lane` is the one built for inspection.
    """

    def __init__(self, job: LaneJob, example_lane: int, pinned: PinnedShards | None = None) -> None:
        self._shared: dict[Any, Any] = {}
        self._job_lanes, self._example_lane = job.lanes, example_lane
        self._example: Stage | None = None
        self._exclude_files: list[ExcludeFile] = []
        self._hinted = False
        self.facts = NO_FACTS  # with which they are built
        self.pinned: PinnedShards = {} if pinned is None else pinned  # kept when the shards are closed
        self.runner = LaneRunner(job, shared=self._shared, pinned=self.pinned)

    @property
    def last_stage(self) -> Stage:
        """The last stage of a lane that makes no batches.

        Only its settings and its data path are inspected.

        Building it opens the shards, and indexes them on first use.
        """
        if self._example is None:
            self._example = self._built(self.facts)
            readers = [stage for stage in upstream(self._example) if isinstance(stage, RecordReader)]
            files = [each.exclude_file for each in readers if each.exclude_file is not None]
            self._exclude_files = self._exclude_files or files  # as they were first read, also after `close`
            if not self._hinted and LANE_COUNT in self.pinned:
                log_hints(self._example)
                self._hinted = True
        return self._example

    def verify_excluded(self) -> None:
        """Raise `SavableError` if a file of excluded samples is not as it was when the run read it."""
        for file in self._exclude_files:
            file.verify()

    def _built(self, facts: RunFacts) -> Stage:
        with as_in_a_worker(set(KINDS)):
            return self.runner.build(self._example_lane % self.lanes, 0, facts)[0]

    def built_with(self, decisions: Decisions) -> Stage:
        """The last stage of a lane after these decisions.

        Raises ValueError if there can be none.
        """
        return self._built(replace(self.facts, decisions=decisions))

    def learn(self, facts: RunFacts) -> None:
        """From now on inspect lanes with these facts, but for chunk sizes.

        Raises `CheckpointMismatchError`, and changes nothing, if the data has no such shards, and ValueError if there
        can be no such lanes.
        """
        facts = facts.of_next_epoch
        if facts != self.facts:
            self._example, self.facts = self._built(facts), facts

    def pin(self, pinned: PinnedShards) -> None:
        """From now on read these shards, and of datasets of the Hub these commits.

        Others as they are found.
        """
        self.close()
        lanes = self.lanes
        self.pinned.clear()
        self.pinned.update(pinned)
        self.set_lanes(lanes)

    @property
    def lanes(self) -> int:
        """The number of lanes of the run, or of the job until it is set."""
        return int(self.pinned.get(LANE_COUNT, self._job_lanes))

    def set_lanes(self, lanes: int) -> None:
        """From now on build lanes of a run with this many."""
        self.pinned[LANE_COUNT] = str(lanes).encode()
        self._example = None

    def grown(self, facts: RunFacts) -> Stage:
        """The last stage of a lane whose data has grown as these facts say.

        Only for inspection.
        """
        if facts.growth == self.facts.growth:
            return self.last_stage
        return self.looked_at(LaneState(self._example_lane, 0), RunFacts(facts.growth))

    def looked_at(self, saved: LaneState, facts: RunFacts) -> Stage:
        """The last stage of a lane at a saved position, with these facts.

        Only for inspection.
        """
        with as_in_a_worker(set(KINDS)):
            stage, _ = self.runner.build(saved.lane, saved.epoch, facts, downloads=False)
            if saved.stages is not None:
                with restoring(f"the state of lane {saved.lane}"):
                    stage.restore_state(saved.stages)
        return stage

    def close(self) -> None:
        """Forget all lanes and close the shards."""
        self.runner.close()
        self._example = None
        self._shared.clear()
