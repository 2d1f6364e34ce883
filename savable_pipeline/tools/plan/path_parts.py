"""`PathParts`: the stages of a pipeline that a plan asks about, found in one lane that gives nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage


class PathParts:
    """The stages of one lane. The trunk is what all samples pass: from the reader, or the `Blend`, to the last."""

    def __init__(self, last: Stage) -> None:
        self.last = last
        self.stages = list(upstream(last))
        self.readers = [stage for stage in self.stages if isinstance(stage, RecordReader)]
        self.trunk = list(_trunk(last))  # the last stage first

    @cached_property
    def packer(self) -> OnlinePacker | None:
        """The packer of the trunk."""
        return next((stage for stage in self.trunk if isinstance(stage, OnlinePacker)), None)

    @cached_property
    def balance(self) -> Balance | None:
        """The `Balance` of the trunk."""
        return next((stage for stage in self.trunk if isinstance(stage, Balance)), None)

    @property
    def rows(self) -> int | None:
        """The items or packs of a batch; None if the last stage is no `Batcher`."""
        return self.last.size if isinstance(self.last, Batcher) else None

    @cached_property
    def documents(self) -> ItemStage | None:
        """The stage that gives what is packed, or else batched; None if these are samples.

        A buffer of items is left out: it would make many before it gives the first.
        """
        stage: Stage = self.packer.source if self.packer is not None else self.last
        while stage is self.last or isinstance(stage, ShuffleBuffer | Balance):
            if len(stage.sources) != 1:
                return None
            stage = stage.sources[0]
        return stage if isinstance(stage, ItemStage) else None

    @cached_property
    def samples(self) -> SampleStage | None:
        """The last stage of the trunk that gives samples, not read yet; None if sources are encoded each by itself."""
        return next((stage for stage in self.trunk if isinstance(stage, SampleStage)), None)

    @property
    def population(self) -> int:
        """The number of samples of all sources."""
        return sum(reader.population for reader in self.readers)

    @property
    def samples_done(self) -> int:
        """The number of samples that the encoders of this lane are done with."""
        encoders = [stage for stage in self.stages if isinstance(stage, Encode)]
        return sum(int(stage.save_state()["samples"]) for stage in encoders)

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
        runner = LaneRunner(settings.pipeline, seed=settings.seed, lanes=lanes, pad=settings.pad, shared=self._shared)
        with as_in_a_worker(set(KINDS)):
            return PathParts(runner.build(lane, 0, downloads=False)[0])


def _trunk(last: Stage) -> Iterator[Stage]:
    stage = last
    yield stage
    while len(stage.sources) == 1:
        stage = stage.sources[0]
        yield stage
