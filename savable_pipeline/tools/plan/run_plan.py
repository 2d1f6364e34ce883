"""Plan of a run from the index: steps, lanes, memory and traffic.

LaneBuilder ─ stages of a lane, which yields no batch ─┬─ count_steps, lanes_choices ─┐
                                                       └─ plan_memory, plan_bytes ────┴─ plan_run ─ RunPlan
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT
from savable_pipeline.data.remote.cache_files import PIECE
from savable_pipeline.data.remote.cache_space import PREFETCH_FRACTION
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.loader.epoch_end import counted_end
from savable_pipeline.run.loader.ranks import next_lanes
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.chunked_stage import count_of
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import Stage


class LaneStages:
    """Stages of one lane."""

    def __init__(self, last: Stage) -> None:
        self.last = last
        self.all = list(upstream(last))
        self.readers = [stage for stage in self.all if isinstance(stage, RecordReader)]

    @property
    def batch_rows(self) -> int | None:
        """The number of items or packs of a batch.

        It is None if the last stage is not a `Batcher`.
        """
        return self.last.size if isinstance(self.last, Batcher) else None

    @property
    def is_by_length(self) -> bool:
        """Return whether the number of batches depends on lengths of items.

        The index does not have these lengths.
        """
        return self.batch_rows is None or any(isinstance(stage, OnlinePacker) for stage in self.all)

    @property
    def population(self) -> int:
        """The number of samples of all sources."""
        return sum(reader.population for reader in self.readers)

    def reader_samples(self, lane: int) -> float:
        """Return the number of samples of a lane in the first epoch, of all readers.

        For a reader that cannot count the samples of a lane, it is an equal part of all its samples.
        """
        counts = [(reader, reader.count_of(lane, epoch=0)) for reader in self.readers]
        lanes = self.last.lane.count
        return sum(reader.population / lanes if count is None else count for reader, count in counts)


class LaneBuilder:
    """Builds lanes of a run with any number of lanes. All share the open shards."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._shared: dict[Any, Any] = {}

    def build(self, lane: int, lanes: int) -> LaneStages:
        """Return the stages of a new lane. Errors of the pipeline are raised."""
        settings = self._settings
        runner = LaneRunner(replace(settings.job, lanes=lanes), shared=self._shared)
        with as_in_a_worker(set(KINDS)):
            return LaneStages(runner.build(lane, epoch=0, downloads=False)[0])


Basis = Literal["counted", "one item a sample", "unknown"]
_MULTIPLES = (1, 2, 3, 4, 6)  # these multiples of the number of ranks are suggested as numbers of lanes
_NEAR = 2  # other numbers of ranks are shown if they differ at most by this factor


@dataclass(frozen=True)
class Steps:
    """Steps of an epoch for some ranks, or steps to read endless data once.

    `steps` is their number, and `how` says how it is known.
    """

    how: Basis
    endless: bool
    steps: float
    unused_batches: float = 0
    """Batches that no rank gets, because some lanes have more than others (`tail="stop"`)."""
    unused_samples: float = 0
    filler_rows: float = 0
    """Rows that pad the last steps (`tail="pad"`)."""
    epoch_slots: int | None = None


@dataclass(frozen=True)
class LanesChoice:
    """Effects of a number of lanes.

    `steps` is None if the ranks do not divide it.
    """

    lanes: int
    fits: bool
    worlds: list[int] = field(repr=False)
    """Numbers of ranks near the planned one with which the run could be resumed."""
    workers: int
    """The most workers that a rank can have."""
    steps: float | None
    unused_share: float | None


def count_steps(settings: LoaderSettings, stages: LaneStages, *, ranks: int) -> Steps:
    """Count the steps of an epoch, as if each sample became one item.

    The true number differs if the encoder skips samples or builds several items of one.
    """
    endless = stages.last.info.endless
    if endless and settings.epoch_slots is not None:
        return Steps("counted", endless, settings.epoch_slots / ranks, epoch_slots=settings.epoch_slots)
    known = [count for lane in range(stages.last.lane.count) if (count := count_of(stages.last, lane, 0)) is not None]
    if len(known) == stages.last.lane.count:
        return _finite_steps("counted", settings, stages, known, ranks)
    if stages.batch_rows is None or stages.is_by_length:
        return Steps("unknown", endless, steps=0)
    if endless:
        return Steps("one item a sample", endless, stages.population / stages.batch_rows / ranks)
    counts = [-(-round(stages.reader_samples(lane)) // stages.batch_rows) for lane in range(stages.last.lane.count)]
    return _finite_steps("one item a sample", settings, stages, counts, ranks)


def _finite_steps(how: Basis, settings: LoaderSettings, stages: LaneStages, counts: list[int], ranks: int) -> Steps:
    """Return the steps of a finite epoch whose lanes have `counts` batches."""
    end = counted_end(counts, pad=settings.pad)  # in slots
    lanes, rows = len(counts), stages.batch_rows or 1
    lane_samples = [round(stages.reader_samples(lane)) for lane in range(lanes)]
    if settings.pad:
        steps = -(-end // ranks)
        return Steps(how, False, steps, filler_rows=steps * ranks * rows - sum(lane_samples))
    used = sum(min(samples, end // lanes * rows) for samples in lane_samples)
    return Steps(how, False, end / ranks, unused_batches=sum(counts) - end, unused_samples=sum(lane_samples) - used)


def lanes_choices(settings: LoaderSettings, builder: LaneBuilder, *, ranks: int) -> list[LanesChoice]:
    """Return the effects of several numbers of lanes, in ascending order.

    These are `settings.lanes`, the least multiple of `ranks` that is at least as large, and small multiples of `ranks`.
    """
    planned = next_lanes(settings.lanes, ranks)
    population = builder.build(lane=0, lanes=planned).population
    choices = []
    for lanes in sorted({settings.lanes, planned, *(ranks * multiple for multiple in _MULTIPLES)}):
        divisors = [number for number in range(1, lanes + 1) if lanes % number == 0]
        worlds = [number for number in divisors if ranks / _NEAR <= number <= ranks * _NEAR]
        if lanes % ranks:
            choices.append(LanesChoice(lanes, fits=False, worlds=worlds, workers=0, steps=None, unused_share=None))
            continue
        stages = builder.build(lane=0, lanes=lanes)
        steps = count_steps(settings, stages, ranks=ranks)
        unused_share = None if steps.how == "unknown" else steps.unused_samples / population
        # each worker needs a lane, so a rank has at most `lanes // ranks` workers
        choices.append(LanesChoice(lanes, True, worlds, lanes // ranks, steps.steps, unused_share))
    return choices


def better_lanes(settings: LoaderSettings, choices: list[LanesChoice], *, planned: int) -> int:
    """Return a number of lanes that suits more numbers of ranks.

    It is the least one with which the run could be resumed on the most numbers of ranks.

    If the `planned` number is as good, return it. Each worker of a rank needs a lane.
    """
    fitting = [choice for choice in choices if choice.fits and choice.workers >= settings.num_workers]
    fitting = fitting or [choice for choice in choices if choice.fits]
    # up to one percentage point more unused samples is as good
    most_unused = min(choice.unused_share or 0.0 for choice in fitting) + 0.01
    good = [choice for choice in fitting if (choice.unused_share or 0.0) <= most_unused and choice.steps != 0]
    most_worlds = max(len(choice.worlds) for choice in good or fitting)
    best = [choice.lanes for choice in good or fitting if len(choice.worlds) == most_worlds]
    return planned if planned in best else best[0]


_MOST_REFS = 2_000_000  # most refs of a node that are computed to find the pieces of its samples


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank: bytes of all its lanes, in all its processes."""

    lanes: int
    refs: int
    """Bytes of the refs in shuffle buffers, in memory and in a saved state."""
    limit: int | None
    """`max_buffer_bytes` of a process. Items beyond it are rebuilt when they are yielded. None: there is no buffer."""
    processes: int


def plan_memory(settings: LoaderSettings, stages: LaneStages, *, ranks: int) -> RankMemory:
    """Return the memory of a rank for buffers, as far as the settings determine it."""
    lanes = stages.last.lane.count // ranks
    buffers = [stage for stage in stages.all if isinstance(stage, OnlinePacker | Balance | ShuffleBuffer)]
    limits = [stage.max_buffer_bytes for stage in buffers if stage.max_buffer_bytes]
    shuffled = [stage for stage in stages.all if isinstance(stage, ShuffleBuffer) and stage.yields == "samples"]
    refs = lanes * REF.itemsize * sum(buffer.capacity for buffer in shuffled)
    return RankMemory(lanes, refs, max(limits, default=None), max(1, settings.num_workers))


@dataclass(frozen=True)
class SourceBytes:
    """Bytes that a node reads of a source in an epoch, and its useful cache size."""

    name: str
    address: str
    remote: bool
    samples: int
    bytes: int
    """Bytes of all chosen samples."""
    node_bytes: float
    """Bytes of the samples of a node's lanes, in one epoch of the source."""
    least_cache: float
    """The least cache with which no sample is downloaded twice in an epoch. 0 for a local source, as the next two."""
    whole_cache: float
    """The cache in which the whole source fits. It is then downloaded in pieces of 8 MiB."""
    first_pass: float
    """Bytes that a node with such a cache downloads in the first epoch: the pieces with samples of its lanes."""


def plan_bytes(builder: LaneBuilder, stages: LaneStages, *, ranks: int, nodes: int) -> list[SourceBytes]:
    """Estimate the bytes of each source from the mean size of its samples."""
    return [_source_bytes(builder, number, stages, ranks, nodes) for number in range(len(stages.readers))]


def _source_bytes(builder: LaneBuilder, number: int, stages: LaneStages, ranks: int, nodes: int) -> SourceBytes:
    """Estimate what is read, downloaded and cached from a source."""
    reader = stages.readers[number]
    dataset, lanes = reader.dataset, stages.last.lane.count
    sample_bytes = sum(entry.size for entry in dataset.entries) / dataset.count
    remote = "://" in dataset.address
    node_lanes = ranks // nodes * (lanes // ranks)
    # samples of a lane that were requested and are not read yet
    ahead = dataset.prefetch_refs + sum(size for name, size in _buffered_refs(stages) if name == reader.info.branch)
    lane_samples = reader.population / lanes
    least = node_lanes * min(ahead, lane_samples) * sample_bytes / PREFETCH_FRACTION if remote else 0.0
    return SourceBytes(
        name=reader.info.branch,
        address=dataset.address,
        remote=remote,
        samples=reader.population,
        bytes=round(reader.population * sample_bytes),
        node_bytes=node_lanes * lane_samples * sample_bytes,
        least_cache=least,
        whole_cache=sum(entry.size for entry in dataset.entries) / PREFETCH_FRACTION if remote else 0.0,
        first_pass=_bytes_of_pieces(builder, number, lanes, ranks, nodes) if remote else 0.0,
    )


def _bytes_of_pieces(builder: LaneBuilder, number: int, lanes: int, ranks: int, nodes: int) -> float:
    """Return the bytes that the first node downloads in the first epoch of a source.

    Shards are downloaded in pieces of `PIECE` bytes, and only those with samples of the node's lanes. If there are too
    many refs to compute, return the bytes of all shards.
    """
    needed: set[tuple[int, int]] = set()  # number of a shard, and of a piece in it
    remaining_refs = _MOST_REFS
    for lane in (lane for lane in range(lanes) if lane % ranks < ranks // nodes):
        reader = builder.build(lane, lanes).readers[number]
        lane_samples = -(-reader.population // lanes)
        remaining_refs -= lane_samples
        if remaining_refs < 0:
            return float(sum(entry.size for entry in reader.dataset.entries))
        while lane_samples > 0 and len(refs := reader.take(lane_samples)):
            lane_samples -= len(refs)
            # the upper bits of an index are the tag of a blended source
            needed |= _pieces(reader, (refs["index"] & np.uint64((1 << TAG_SHIFT) - 1)).astype(np.int64))
    entries = reader.dataset.entries
    return float(sum(min(PIECE, entries[shard].size - piece * PIECE) for shard, piece in needed))


def _pieces(reader: RecordReader, indices: Rows) -> set[tuple[int, int]]:
    """Return the shard of each sample, and its piece of the shard, as if all samples of a shard had the same size."""
    firsts, entries = reader.dataset.firsts, reader.dataset.entries
    shards = np.searchsorted(firsts, indices, side="right") - 1
    sizes = np.array([entry.size / max(1, entry.samples) for entry in entries])
    pieces = ((indices - firsts[shards]) * sizes[shards] // PIECE).astype(np.int64)
    return set(zip(shards.tolist(), pieces.tolist(), strict=True))


def _buffered_refs(stages: LaneStages) -> list[tuple[str, int]]:
    """Return the capacity of the shuffle buffer after each reader, by the reader's branch.

    Samples in it are not read before they leave it.
    """
    capacities: list[tuple[str, int]] = []
    for before, stage in pairwise(stages.all):
        if isinstance(stage, ShuffleBuffer) and stage.yields == "samples":
            branches = {before.info.branch} if before.info.branch else {each.info.branch for each in stages.readers}
            capacities += [(branch, stage.capacity) for branch in branches]
    return capacities


@dataclass(frozen=True)
class WorkersNeeded:
    """Numbers of workers with which the loader keeps up with the trainers.

    They are the workers per rank and per CPU node, and the number of these nodes.
    """

    per_rank: int
    per_node: int
    nodes: int

    @classmethod
    def of(cls, batch_s: float, step_s: float, *, ranks: int, workers_per_node: int) -> WorkersNeeded:
        """Compute the workers from the seconds that a batch and a training step take.

        `workers_per_node` is the number on a CPU node. Raises ValueError unless all three are above 0.
        """
        if not (batch_s > 0 and step_s > 0 and workers_per_node > 0):
            raise ValueError("--batch-s, --step-s and --node-workers are given together, each more than 0")
        workers = round(batch_s / step_s, 9)  # fractional: each rank needs one batch per step
        return cls(math.ceil(workers), workers_per_node, math.ceil(ranks * workers / workers_per_node))


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run for `ranks` on `nodes`.

    Fields that are objects are explained by their classes.
    """

    target: str
    ranks: int
    nodes: int
    lanes: int
    """The lanes of the loader."""
    by_default: bool
    """Whether the loader was created without `lanes`."""
    planned_lanes: int
    """The lanes of this plan: the loader's, or the next number that the ranks divide."""
    better_lanes: int
    """The lanes that the plan advises, or `planned_lanes`."""
    path: str
    """The `repr` of the pipeline."""
    population: int
    """The number of samples of all sources."""
    steps: Steps
    choices: list[LanesChoice]
    memory: RankMemory
    sources: list[SourceBytes]
    workers: WorkersNeeded | None = None


def plan_run(
    settings: LoaderSettings, *, ranks: int = 1, nodes: int = 1, target: str = "", workers: WorkersNeeded | None = None
) -> RunPlan:
    """Plan a run with these settings on this many ranks and nodes.

    This opens the data and indexes it on first use, but encodes nothing. Raises ValueError for wrong arguments, and
    what the pipeline raises.
    """
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ValueError(
            f"--nodes must divide --ranks, so that each node has as many ranks: {ranks} ranks on {nodes} nodes"
        )
    lanes = next_lanes(settings.lanes, ranks)
    builder = LaneBuilder(settings)
    stages = builder.build(lane=0, lanes=lanes)
    choices = lanes_choices(settings, builder, ranks=ranks)
    return RunPlan(
        target=target,
        ranks=ranks,
        nodes=nodes,
        lanes=settings.lanes,
        by_default=settings.has_default_lanes,
        planned_lanes=lanes,
        better_lanes=better_lanes(settings, choices, planned=lanes),
        path=repr(stages.last),
        population=stages.population,
        steps=count_steps(settings, stages, ranks=ranks),
        choices=choices,
        memory=plan_memory(settings, stages, ranks=ranks),
        sources=plan_bytes(builder, stages, ranks=ranks, nodes=nodes),
        workers=workers,
    )
