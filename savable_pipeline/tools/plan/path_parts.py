"""What a plan asks of a pipeline: its stages, and from a sample of documents their lengths and how large an item is.

`PathParts` are the stages of one lane, which gives nothing; `Lengths` come from lanes that do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.item_ref import MISSING, ItemRef
from savable_pipeline.stages.memory_budget import size_of
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage
from savable_pipeline.stages.task_encoder import TaskEncoder


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


_LANES = 8  # from which documents are taken, spread over all
_MADE = 8  # items made for their size where the encoder has `length_of`


class _Document(NamedTuple):
    item: Any  # or MISSING
    ref: ItemRef
    sizes: tuple[Size, ...] | None  # None: ask the encoder


@dataclass(frozen=True)
class Lengths:
    """A sample of documents: what is packed or, without a packer, batched."""

    sizes: list[tuple[Size, ...]] = field(repr=False)
    """(length, images) of each; several in a pack that a branch of a `Blend` made. Empty if no length is known."""
    items: int
    samples: int
    """Of which the items were made."""
    skipped: dict[str, int]
    """Samples that were left out, by reason."""
    item_bytes: float
    told: bool
    """Whether the lengths are from `length_of`, and nothing was encoded for them."""

    @property
    def items_a_sample(self) -> float:
        """The mean number of items that a sample becomes."""
        return self.items / max(1, self.samples)

    @property
    def totals(self) -> list[int]:
        """The length of each document."""
        return [sum(length for length, _ in size) for size in self.sizes]

    @property
    def spread(self) -> float:
        """The standard deviation of lengths in units of their mean."""
        totals = np.array(self.totals, np.float64)
        return float(totals.std() / totals.mean()) if len(totals) and totals.mean() else 0.0

    def drawn(self, seed: int) -> Iterator[tuple[Size, ...]]:
        """Endless sizes, drawn from the sample with replacement."""
        rng = np.random.default_rng(seed)
        while True:
            for i in rng.integers(0, len(self.sizes), 1024).tolist():
                yield self.sizes[i]


def sample_lengths(lanes: LaneBuilder, count: int, *, of: int) -> Lengths | None:
    """Take about `count` documents from lanes spread over all `of` lanes; None if the pipeline encodes nothing.

    Raises what the encoder raises.
    """
    numbers = [turn * of // min(_LANES, of) for turn in range(min(_LANES, of))]
    each = -(-count // len(numbers))
    built = [lanes.build(number, of) for number in numbers]
    if built[0].documents is None:
        return None
    with as_in_a_worker(set(KINDS)):
        taken = [measured for parts in built for measured in _take(parts, each)]
        return _summed(built, taken)


def _take(parts: PathParts, n: int) -> Iterator[_Document]:
    stage = parts.documents
    assert stage is not None
    for _ in range(n):
        items, refs = stage.take(1, deferred=True)
        if not items:
            return
        yield _Document(items[0], refs[0], stage.sizes)


def _summed(built: list[PathParts], taken: list[_Document]) -> Lengths:
    stage = built[0].documents
    assert stage is not None
    encoder = stage.info.encoder
    known = encoder is not None and (built[0].packer is not None or type(encoder).length is not TaskEncoder.length)
    sizes = [_sizes(measured, encoder) for measured in taken] if known and encoder is not None else []
    items = [measured.item for measured in taken if measured.item is not MISSING]
    items = items or [stage.fetch(measured.ref) for measured in taken[:_MADE]]
    skipped: Counter[str] = Counter()
    for parts in built:
        for each in parts.stages:
            for name, number in each.counts.items():
                if name.startswith("skipped/"):
                    skipped[name.removeprefix("skipped/")] += number
    return Lengths(
        sizes=sizes,
        items=len(taken),
        samples=sum(parts.samples_done for parts in built),
        skipped=dict(skipped),
        item_bytes=sum(map(size_of, items)) / max(1, len(items)),
        told=any(measured.item is MISSING for measured in taken),
    )


def _sizes(measured: _Document, encoder: TaskEncoder) -> tuple[Size, ...]:
    return measured.sizes or ((encoder.length(measured.item), encoder.images(measured.item)),)
