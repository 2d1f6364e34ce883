"""`RunFacts`: facts shared by all lanes of a run, which a state saves once.

    facts    nothing            shards joined        web 7, books 3 decided
    slot     0 …                96 …                 1200 …

Unlike settings, facts may change during a run. A `RunFacts` never changes, but later slots may have another one. A
position has the facts that its lanes continue with, and so has each request to a worker. So a lane is restored with the
facts that it had. Of the decisions of a run (`Decisions`), only those in force are saved, with a digest of all earlier
ones.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.state_numbers import EpochNumber, SavedCount

NUMBER = "<u8"


class Decisions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decisions that hold from the slot `since` on.

    `since`: the slot with its epoch, as in receipts: `epoch << 40 | slot`. `digest`: hash of all decisions so far and
    their slots; 0 if there are none. `weights`: weights of the sources of each `Blend`, by its branch. `excluded`:
    ascending indices of excluded samples, 8 bytes each, by the tag of a source. `max_length`: length of packs; 0 if
    none was decided.
    """

    since: SavedCount = 0
    digest: SavedCount = 0
    weights: dict[str, dict[str, SavedCount]] = {}
    excluded: dict[SavedCount, bytes] = {}
    max_length: SavedCount = 0

    def __post_init__(self) -> None:
        if any(len(numbers) % 8 for numbers in self.excluded.values()):
            raise ValueError("the numbers of excluded samples take 8 bytes each")
        if not all(any(weights.values()) for weights in self.weights.values()):
            raise ValueError("all weights of a Blend are 0. Set at least one above 0")

    def __bool__(self) -> bool:
        return bool(self.digest)

    def numbers(self, tag: int) -> frozenset[int]:
        """Return the indices of the excluded samples of a source."""
        return frozenset(np.frombuffer(self.excluded.get(tag, b""), NUMBER).tolist())

    def __str__(self) -> str:
        lines = [
            f"{branch}/{name}={weight:,}" if branch else f"{name}={weight:,}"
            for branch, weights in sorted(self.weights.items())
            for name, weight in weights.items()
        ]
        if excluded := sum(len(numbers) // 8 for numbers in self.excluded.values()):
            lines.append(f"{excluded:,} samples excluded")
        if self.max_length:
            lines.append(f"max_length={self.max_length:,}")
        return f"from slot {self.since:,} on: {', '.join(lines) or 'nothing that holds here'}"


NOTHING_DECIDED = Decisions()


Growth: TypeAlias = dict[str, list[tuple[EpochNumber, EpochNumber]]]  # by branch: (epoch, shards), see `GrowingSamples`
ChunkSizes: TypeAlias = dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class RunFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that are the same for all lanes of a run.

    `growth`: the number of shards in each epoch, by the branch of a reader whose dataset got new shards. `chunk_sizes`:
    how many samples lanes take at a time in this epoch, by branch, once its first batch is yielded. `decisions`: see
    `Decisions`.
    """

    growth: Growth = {}
    chunk_sizes: ChunkSizes = {}
    decisions: Decisions = NOTHING_DECIDED

    @property
    def digest(self) -> int:
        """Hash of the facts that decide a lane's batches in any epoch; 0 for none.

        Each lane's state has this hash, so it must fit into a `SavedCount`.
        """
        if not self.growth and not self.decisions:
            return 0
        return xxh3_64_intdigest(msgspec.msgpack.encode((self.growth, self.decisions.digest))) >> 2

    @property
    def version(self) -> int:
        """Number that identifies these facts in requests."""
        decisions = self.decisions
        fields = self.growth, self.chunk_sizes, decisions.digest, decisions.weights, decisions.max_length
        return xxh3_64_intdigest(msgspec.msgpack.encode(fields))

    @property
    def of_next_epoch(self) -> RunFacts:
        """These facts at the start of the next epoch, whose chunk sizes are not known yet."""
        return replace(self, chunk_sizes={}) if self.chunk_sizes else self


NO_FACTS = RunFacts()
