"""`Lengths`: what a sample of documents tells of all: their lengths and images, and how large an item is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.item_ref import MISSING, ItemRef
from savable_pipeline.stages.memory_budget import size_of
from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.plan.path_parts import LaneBuilder, PathParts

_LANES = 8  # from which documents are taken, spread over all
_MADE = 8  # items made for their size where the encoder tells lengths


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
    """Whether `length_of` told the lengths, and nothing was encoded for them."""

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
