"""`Decisions`: what was decided for the rest of a run while it went on, as each of its lanes has it in its state.

Only what holds now is kept, and a digest of all that came before:

    slot       0 …                 12 …               30 …
    decided                        web 7, books 3     web 1, books 1; 2 samples excluded
    a state    nothing             12, web 7 …        30, web 1 …; 2 numbers
"""

from __future__ import annotations

import msgspec
import numpy as np

from savable_pipeline.core.saved_count import SavedCount

NUMBER = "<u8"


class Decisions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is decided from the slot `place` on, with its epoch as in receipts: `epoch << 40 | slot`.

    `digest`: of all decisions so far, and their places; 0 without any. `weights`: by the branch of a `Blend`, those of
    its sources. `excluded`: by the tag of a source, the ascending numbers of samples, 8 bytes each. `max_length`: of
    packs; 0 where none is decided.
    """

    place: SavedCount = 0
    digest: SavedCount = 0
    weights: dict[str, dict[str, SavedCount]] = {}
    excluded: dict[SavedCount, bytes] = {}
    max_length: SavedCount = 0

    def __post_init__(self) -> None:
        if any(len(numbers) % 8 for numbers in self.excluded.values()):
            raise ValueError("the numbers of excluded samples take 8 bytes each")
        if not all(map(any, (weights.values() for weights in self.weights.values()))):
            raise ValueError("of the weights of a Blend one at least is above 0")

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
        return f"from slot {self.place:,} on: {', '.join(said) or 'nothing that holds here'}"


NOTHING_DECIDED = Decisions()
