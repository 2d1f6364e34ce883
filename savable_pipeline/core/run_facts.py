"""`RunFacts`: what holds for all lanes of a run alike, and is not among its settings: a state has it once.

    facts    nothing            shards joined        web 7, books 3 decided
    slot     0 …                96 …                 1200 …

It never changes: what follows has others. A position has those with which its lanes go on, and so has each request to
a worker, so that a lane is restored with the facts that it had.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.decisions import NOTHING_DECIDED, Decisions
from savable_pipeline.core.saved_count import EpochNumber

Growth: TypeAlias = dict[str, list[tuple[EpochNumber, EpochNumber]]]  # by branch: (epoch, shards), see states.py
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
