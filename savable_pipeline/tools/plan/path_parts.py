"""What a plan asks of a pipeline: the stages of a lane, which gives nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage


class PathParts:
    """The stages of one lane."""

    def __init__(self, last: Stage) -> None:
        self.last = last
        self.stages = list(upstream(last))
        self.readers = [stage for stage in self.stages if isinstance(stage, RecordReader)]

    @property
    def rows(self) -> int | None:
        """The items or packs of a batch; None if the last stage is no `Batcher`."""
        return self.last.size if isinstance(self.last, Batcher) else None

    @property
    def by_length(self) -> bool:
        """Whether the number of batches depends on the lengths of items, which the index does not hold."""
        return self.rows is None or any(isinstance(stage, OnlinePacker) for stage in self.stages)

    @property
    def population(self) -> int:
        """The number of samples of all sources."""
        return sum(reader.population for reader in self.readers)

    def reader_samples(self, lane: int) -> float:
        """The number of samples of a lane in the first pass, of all readers; an even share of one that cannot count."""
        counts = [(reader, reader.count_of(lane, 0)) for reader in self.readers]
        lanes = self.last.lane.count
        return sum(reader.population / lanes if count is None else count for reader, count in counts)


class LaneBuilder:
    """Builds lanes of a run with any number of lanes, which share the open shards."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._shared: dict[Any, Any] = {}

    def build(self, lane: int, lanes: int) -> PathParts:
        """The stages of a fresh lane. Raises what the pipeline raises."""
        settings = self._settings
        runner = LaneRunner(replace(settings.job, lanes=lanes), shared=self._shared)
        with as_in_a_worker(set(KINDS)):
            return PathParts(runner.build(lane, 0, downloads=False)[0])
