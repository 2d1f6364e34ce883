"""`RunFacts`: what holds for all lanes of a run alike, and is not among its settings: a state has it once.

    facts    nothing            shards joined        web 7, books 3 decided
    slot     0 …                96 …                 1200 …

It never changes: what follows has others. A position has those with which its lanes go on, and so has each request to
a worker, so that a lane is restored with the facts that it had. Of what was decided while the run went on
(`Decisions`), only what holds now is kept, and a digest of all that came before.
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
    """What is decided from the slot `since` on, with its epoch as in receipts: `epoch << 40 | slot`.

    `digest`: of all decisions so far, and their slots; 0 without any. `weights`: by the branch of a `Blend`, those of
    its sources. `excluded`: by the tag of a source, the ascending numbers of samples, 8 bytes each. `max_length`: of
    packs; 0 where none is decided.
    """

    since: SavedCount = 0
    digest: SavedCount = 0
    weights: dict[str, dict[str, SavedCount]] = {}
    excluded: dict[SavedCount, bytes] = {}
    max_length: SavedCount = 0

    def __post_init__(self) -> None:
        if any(len(numbers) % 8 for numbers in self.excluded.values()):
            raise ValueError("the numbers of excluded samples take 8 bytes each")
        if not all(map(any, (weights.values() for weights in self.weights.values()))):
            raise ValueError("all weights of a Blend are 0. Give at least one a weight above 0")

    def __bool__(self) -> bool:
        return bool(self.digest)

    def numbers(self, tag: int) -> frozenset[int]:
        """The numbers of the samples of a source that were excluded."""
        return frozenset(np.frombuffer(self.excluded.get(tag, b""), NUMBER).tolist())

    def __str__(self) -> str:
        said = [
            f"{name}={weight:,}"
            for branch, weights in sorted(self.weights.items())
            for name, weight in ((f"{branch}/{own}" if branch else own, found) for own, found in weights.items())
        ]
        if excluded := sum(len(numbers) // 8 for numbers in self.excluded.values()):
            said.append(f"{excluded:,} samples excluded")
        if self.max_length:
            said.append(f"max_length={self.max_length:,}")
        return f"from slot {self.since:,} on: {', '.join(said) or 'nothing that holds here'}"


NOTHING_DECIDED = Decisions()


Growth: TypeAlias = dict[str, list[tuple[EpochNumber, EpochNumber]]]  # by branch: (epoch, shards), see `GrowingSamples`
ChunkSizes: TypeAlias = dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class RunFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What holds for all lanes of a run alike.

    `growth`: by the branch of a reader, the number of shards in each epoch, where shards were added. `chunk_sizes`: by
    branch, the unit of the lanes' shares of this epoch, once its first batch is given. `decisions`: what was decided.
    """

    growth: Growth = {}
    chunk_sizes: ChunkSizes = {}
    decisions: Decisions = NOTHING_DECIDED

    @property
    def digest(self) -> int:
        """Of what a lane's batches depend on in any epoch; 0 without any. Each lane's state has it."""
        if not self.growth and not self.decisions:
            return 0
        return xxh3_64_intdigest(msgspec.msgpack.encode((self.growth, self.decisions.digest))) >> 2

    @property
    def version(self) -> int:
        """The name of these facts in requests: others have another."""
        decided = self.decisions
        said = self.growth, self.chunk_sizes, decided.digest, decided.weights, decided.max_length
        return xxh3_64_intdigest(msgspec.msgpack.encode(said))

    @property
    def of_next_epoch(self) -> RunFacts:
        """These at the start of an epoch, whose chunk sizes are not known yet."""
        return replace(self, chunk_sizes={}) if self.chunk_sizes else self


NO_FACTS = RunFacts()
