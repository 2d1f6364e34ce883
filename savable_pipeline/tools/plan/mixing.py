"""`Mixing`: how well batches are mixed: the entropy of the shards and of the neighbours in them, beside random ones.

The order is the pipeline's own: refs are taken from its last stage that gives samples, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.dataset.ref import TAG_SHIFT, RefArray
from savable_pipeline.tools.plan.path_parts import LaneBuilder, PathParts

NEIGHBOURS = 64  # neighbouring samples of a shard
_BATCHES = 16  # of each lane
_LANES = 64
_DRAWN = 100_000  # refs at most

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Entropy:
    """Bits: the mean over batches of the entropy of their samples' places, and that of as many drawn at random."""

    ours: float
    random: float

    @property
    def share(self) -> float:
        """Ours in units of random; 1.0 where everything is in one place."""
        return self.ours / self.random if self.random else 1.0


@dataclass(frozen=True)
class Mixing:
    """Of a batch of one lane, and of the step of all ranks."""

    samples_a_batch: int
    lanes: int
    """That gave refs: those of the ranks, at most 64."""
    batch_shards: Entropy
    batch_neighbours: Entropy
    step_shards: Entropy
    step_neighbours: Entropy


def measure_mixing(builder: LaneBuilder, parts: PathParts, *, ranks: int, samples_a_batch: int) -> Mixing | None:
    """The mixing of the first batches of an epoch; None where sources are encoded each by itself."""
    if parts.samples is None or samples_a_batch < 1:
        return None
    lanes = min(ranks, _LANES)
    batches = max(1, min(_BATCHES, _DRAWN // (lanes * samples_a_batch)))
    taken = [_taken(builder.build(lane, parts.last.lane.count), batches * samples_a_batch) for lane in range(lanes)]
    least = min(len(refs) for refs in taken) // samples_a_batch
    if not least:
        return None
    refs = np.stack([refs[: least * samples_a_batch].reshape(least, samples_a_batch) for refs in taken])
    return _of(parts, refs)


def _taken(parts: PathParts, n: int) -> RefArray:
    stage = parts.samples
    assert stage is not None
    found: list[RefArray] = []
    while n and len(refs := stage.take_refs(n)):
        found.append(refs)
        n -= len(refs)
    return np.concatenate(found) if found else stage.take_refs(0)


def _of(parts: PathParts, refs: RefArray) -> Mixing:
    """Of refs (lanes, batches, samples)."""
    batches = refs.reshape(-1, refs.shape[2])
    steps = refs.transpose(1, 0, 2).reshape(refs.shape[1], -1)
    return Mixing(
        refs.shape[2],
        refs.shape[0],
        *[_beside_random(parts, rows, places) for rows in (batches, steps) for places in (_shards, _neighbours)],
    )


def _beside_random(parts: PathParts, refs: RefArray, places: Callable[[PathParts, RefArray], Indices]) -> Entropy:
    return Entropy(_entropy(places(parts, refs)), _entropy(places(parts, _random_like(parts, refs))))


def _random_like(parts: PathParts, refs: RefArray) -> RefArray:
    """Samples drawn at random from the same sources."""
    rng = np.random.default_rng(0)
    drawn = refs.copy()
    tags = refs["index"] >> np.uint64(TAG_SHIFT)
    for reader in parts.readers:
        (tag,) = reader.info.tags
        mine = tags == tag
        indices = rng.integers(0, reader.dataset.count, int(mine.sum())).astype(np.uint64)
        drawn["index"][mine] = indices | np.uint64(tag << TAG_SHIFT)
    return drawn


def _shards(parts: PathParts, refs: RefArray) -> Indices:
    """A number for each sample's shard."""
    places = np.zeros(refs.shape, np.int64)
    first = 0
    for reader in parts.readers:
        (tag,) = reader.info.tags
        mine = refs["index"] >> np.uint64(TAG_SHIFT) == tag
        places[mine] = first + np.searchsorted(reader.dataset.firsts, _untagged(refs[mine]), side="right")
        first += len(reader.dataset.firsts) + 1
    return places


def _neighbours(parts: PathParts, refs: RefArray) -> Indices:
    """A number for each sample's stretch of neighbours."""
    tags = (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)
    return (tags << 40) + _untagged(refs) // NEIGHBOURS


def _untagged(refs: RefArray) -> Indices:
    return (refs["index"] & np.uint64((1 << TAG_SHIFT) - 1)).astype(np.int64)


def _entropy(places: Indices) -> float:
    """The mean over rows of the entropy of the places in it, in bits."""
    return float(np.mean([_bits(row) for row in places]))


def _bits(row: Indices) -> float:
    shares = np.unique(row, return_counts=True)[1] / len(row)
    return abs(float(-(shares * np.log2(shares)).sum()))
