"""`LocalLanes`: the lanes that the trainer's own process builds, to run or to inspect them."""

from __future__ import annotations

from typing import Any

from savable_pipeline.core.decisions import NOTHING_DECIDED, Decisions
from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.lane import Growth, PinnedShards
from savable_pipeline.data.dataset.exclude_file import ExcludeFile
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.loader.pipeline_hints import log_hints
from savable_pipeline.run.state.lane_state import LaneState
from savable_pipeline.run.state.restoring import restoring
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage


class LocalLanes:
    """`runner` runs lanes in this process; `example_lane` is the one built for inspection."""

    def __init__(self, job: LaneJob, example_lane: int, pinned: PinnedShards | None = None) -> None:
        self._shared: dict[Any, Any] = {}
        self._example_lane = example_lane
        self._example: Stage | None = None
        self._exclude_files: list[ExcludeFile] = []
        self._hinted = False
        self.growth: Growth = {}
        self.decisions: Decisions = NOTHING_DECIDED
        self.pinned: PinnedShards = {} if pinned is None else pinned  # kept when the shards are closed
        self.runner = LaneRunner(job, shared=self._shared, pinned=self.pinned)

    @property
    def last_stage(self) -> Stage:
        """The last stage of a lane that makes no batches: only its settings and its data path are inspected.

        Building it opens the shards, and indexes them on first use.
        """
        if self._example is None:
            self._example = self._built(self.growth, self.decisions)
            readers = [stage for stage in upstream(self._example) if isinstance(stage, RecordReader)]
            files = [each.exclude_file for each in readers if each.exclude_file is not None]
            self._exclude_files = self._exclude_files or files  # as they were first read, also after `close`
            if not self._hinted:
                log_hints(self._example)
                self._hinted = True
        return self._example

    def verify_excluded(self) -> None:
        """Raise `SavableError` if a file of excluded samples is not as it was when the run read it."""
        for file in self._exclude_files:
            file.verify()

    def _built(self, growth: Growth, decisions: Decisions) -> Stage:
        with as_in_a_worker(set(KINDS)):
            return self.runner.build(self._example_lane, 0, growth, decisions=decisions)[0]

    @property
    def kept(self) -> dict[str, Any]:
        """What lanes keep in each epoch that follows: arguments of `Position.start`."""
        return {"growth": self.growth, "decisions": self.decisions}

    def built_with(self, decisions: Decisions) -> Stage:
        """The last stage of a lane after these decisions. Raises ValueError if there can be none."""
        return self._built(self.growth, decisions)

    def grow(self, growth: Growth, decisions: Decisions = NOTHING_DECIDED) -> None:
        """From now on inspect lanes whose data has grown in this way, after these decisions.

        Raises `CheckpointMismatchError`, and changes nothing, if the data has no such shards, and ValueError if there
        can be no such lanes.
        """
        if (growth, decisions) != (self.growth, self.decisions):
            self._example, self.growth, self.decisions = self._built(growth, decisions), growth, decisions

    def pin(self, pinned: PinnedShards) -> None:
        """From now on read these shards, and of datasets of the Hub these commits; others as they are found."""
        self.close()
        self.pinned.clear()
        self.pinned.update(pinned)

    def looked_at(self, saved: LaneState, growth: Growth) -> Stage:
        """The last stage of a lane at a saved position, in data that has grown in this way: only for inspection."""
        with as_in_a_worker(set(KINDS)):
            stage, _ = self.runner.build(saved.lane, saved.epoch, growth, downloads=False)
            if saved.stages is not None:
                with restoring(f"the state of lane {saved.lane}"):
                    stage.restore_state(saved.stages)
        return stage

    def close(self) -> None:
        """Forget all lanes and close the shards."""
        self.runner.close()
        self._example = None
        self._shared.clear()
