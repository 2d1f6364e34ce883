"""`SharedRanks`: the sequence of random ranks that all lanes of a run share, by which they choose alike unasked."""

from __future__ import annotations

from savable_pipeline.core.keyed_random import derive_key, permutation, word

RANKS = 1 << 32  # of `SharedRanks.rank`


class SharedRanks:
    """A random rank for each number n; each block of `steps` numbers has every step once, in random order.

    `key` is the same in all lanes of a run.
    """

    def __init__(self, *, key: int, steps: int) -> None:
        self._key = key
        self._count = steps
        self._block = -1
        self._steps: list[int] = []

    def step(self, n: int) -> int:
        """The step of number n, 0 … steps - 1."""
        block, i = divmod(n, self._count)
        if block != self._block:
            self._block = block
            self._steps = permutation(derive_key(self._key, block), self._count).tolist()
        return self._steps[i]

    def rank(self, n: int) -> int:
        """The rank of number n, 0 … RANKS - 1: somewhere in its step."""
        return ((self.step(n) << 32) + (word(self._key, n) >> 32)) // self._count
