"""What a run takes: memory for the refs of buffers, the bytes that a node fetches, and the cache that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT
from savable_pipeline.data.remote.cache_files import PIECE
from savable_pipeline.data.remote.cache_space import PREFETCH_SHARE
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.stage import ItemStage
from savable_pipeline.tools.plan.path_parts import LaneBuilder, PathParts

_LOOKED_AT = 2_000_000  # refs of a node, to learn where its samples are


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rank: of all its lanes, in however many processes."""

    lanes: int
    refs: int
    """Of samples in shuffle buffers, in memory and in a saved state."""
    limit: int | None
    """`max_held_bytes` of a process: what is beyond is made again when it is given; None where nothing is held."""
    processes: int


def plan_memory(settings: LoaderSettings, parts: PathParts, *, ranks: int) -> RankMemory:
    """The memory of a rank, as far as the settings say."""
    lanes = parts.last.lane.count // ranks
    holding = [stage for stage in parts.stages if isinstance(stage, OnlinePacker | Balance | ShuffleBuffer)]
    limits = [stage.max_held_bytes for stage in holding if stage.max_held_bytes]
    refs = sum(stage.size * REF.itemsize for stage in _buffers(parts) if not isinstance(stage, ItemStage))
    return RankMemory(lanes, lanes * refs, max(limits, default=None), max(1, settings.num_workers))


def _buffers(parts: PathParts) -> list[ShuffleBuffer]:
    return [stage for stage in parts.stages if isinstance(stage, ShuffleBuffer)]


@dataclass(frozen=True)
class SourceBytes:
    """What a node reads of a source in a pass, and what its cache should hold if the source is behind a URL."""

    name: str
    address: str
    remote: bool
    samples: int
    bytes: int
    """Of all samples that are chosen."""
    node_bytes: float
    """Of the samples of a node's lanes in one pass over the source."""
    least_cache: float
    """With which no sample is fetched twice within a pass; 0 for a source on a disk, as the next two."""
    whole_cache: float
    """In which the source is kept for all passes; it is then fetched in pieces of 8 MiB."""
    first_pass: float
    """That a node with such a cache fetches in the first pass: the pieces that hold samples of its lanes."""


def plan_bytes(builder: LaneBuilder, parts: PathParts, *, ranks: int, nodes: int) -> list[SourceBytes]:
    """The bytes of each source, from the index: by the mean size of a sample in its shards."""
    return [_of(builder, number, parts, ranks, nodes) for number in range(len(parts.readers))]


def _of(builder: LaneBuilder, number: int, parts: PathParts, ranks: int, nodes: int) -> SourceBytes:
    reader = parts.readers[number]
    dataset, lanes = reader.dataset, parts.last.lane.count
    sample = sum(entry.size for entry in dataset.entries) / dataset.count
    remote = "://" in dataset.address
    own = ranks // nodes * (lanes // ranks)
    held = dataset.prefetch_refs + sum(size for name, size in _held_refs(parts) if name == reader.info.branch)
    share = reader.population / lanes
    least = own * min(held, share) * sample / PREFETCH_SHARE if remote else 0.0
    chosen = reader.population * sample
    return SourceBytes(
        reader.info.branch,
        dataset.address,
        remote,
        reader.population,
        round(chosen),
        own * share * sample,
        least,
        sum(entry.size for entry in dataset.entries) / PREFETCH_SHARE if remote else 0.0,
        _touched(builder, number, lanes, ranks, nodes) if remote else 0.0,
    )


def _touched(builder: LaneBuilder, number: int, lanes: int, ranks: int, nodes: int) -> float:
    """Bytes of the pieces that hold samples of the first node's lanes in a pass; of all, where that is too many."""
    touched: set[tuple[int, int]] = set()
    left = _LOOKED_AT
    for lane in (lane for lane in range(lanes) if lane % ranks < ranks // nodes):
        reader = builder.build(lane, lanes).readers[number]
        wanted = -(-reader.population // lanes)
        left -= wanted
        if left < 0:
            return float(sum(entry.size for entry in reader.dataset.entries))
        while wanted > 0 and len(refs := reader.take_refs(wanted)):
            wanted -= len(refs)
            touched |= _pieces(reader, (refs["index"] & np.uint64((1 << TAG_SHIFT) - 1)).astype(np.int64))
    entries = reader.dataset.entries
    return float(sum(min(PIECE, entries[shard].size - piece * PIECE) for shard, piece in touched))


def _pieces(reader: RecordReader, indices: Rows) -> set[tuple[int, int]]:
    """Shard and number of the piece of each sample, as if all samples of a shard were of one size."""
    firsts, entries = reader.dataset.firsts, reader.dataset.entries
    shards = np.searchsorted(firsts, indices, side="right") - 1
    sizes = np.array([entry.size / max(1, entry.samples) for entry in entries])
    pieces = ((indices - firsts[shards]) * sizes[shards] // PIECE).astype(np.int64)
    return set(zip(shards.tolist(), pieces.tolist(), strict=True))


def _held_refs(parts: PathParts) -> list[tuple[str, int]]:
    """For each reader's branch, the samples of a buffer behind it, whose bytes are not read before they are given."""
    found: list[tuple[str, int]] = []
    for before, stage in pairwise(parts.stages):
        if isinstance(stage, ShuffleBuffer) and not isinstance(stage, ItemStage):
            branches = {before.info.branch} if before.info.branch else {each.info.branch for each in parts.readers}
            found += [(branch, stage.size) for branch in branches]
    return found
