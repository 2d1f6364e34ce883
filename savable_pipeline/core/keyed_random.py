"""Keyed random words and permutations: all the arithmetic that decides an order.

It is integer arithmetic written here, so no release of NumPy, torch or Python changes an order. A *key* is 64 bits: the
xxh3_64 hash of its purpose, such as (seed, "lane", index, epoch). A *word* is 64 random bits. The words of a key are
those of SplitMix64 started at the key: word n is `finalize(key + (n + 1) * GAMMA)`, so any word is computed without the
ones before it (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Words: TypeAlias = NDArray[np.uint64]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_FAST_SORT_WORDS = 1 << 13  # from this many words on, `sorted_order` sorts them with their positions
_TABLE_LIMIT = 1 << 16  # a permutation up to this length is stored as a table (128 kB); a longer one is computed
_ROUNDS = 6  # rounds of the Feistel network


def derive_key(*parts: int | str) -> int:
    """Return the 64-bit key of a tuple of integers and strings.

    Each part is tagged with its type and length, so ("ab", "c") and ("a", "bc") have different keys.
    """
    encoded = bytearray()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else int(part).to_bytes(16, "little", signed=True)
        encoded += (b"s" if isinstance(part, str) else b"i") + len(raw).to_bytes(4, "little") + raw
    return xxh3_64_intdigest(bytes(encoded))


def word(key: int, n: int) -> int:
    """Return word number `n` of `key`: 64 random bits."""
    z = (key + (n + 1) * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * _MIX1) & MASK
    z = ((z ^ (z >> 27)) * _MIX2) & MASK
    return z ^ (z >> 31)


def words(key: int, start: int, count: int) -> Words:
    """Return words `start` to `start + count - 1` of `key`: uint64 (count,)."""
    return _finalize(np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(key))


def _finalize(z: Words) -> Words:
    """Mix the bits of 64-bit words, as the last step of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


def below(drawn: Words, limit: int) -> NDArray[np.int64]:
    """Turn words into integers in [0, limit): int64 of the same shape.

    The limit must be below 2**31.
    """
    return (((drawn >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)


def permutation(key: int, n: int) -> NDArray[np.int64]:
    """Return a random permutation of 0 … n-1: int64 (n,).

    It is the order that sorts the first n words of the key.
    """
    return sorted_order(words(key, 0, n))


def sorted_order(drawn: Words) -> NDArray[np.int64]:
    """Return the indices that sort words, stably, as `argsort` does: int64 (n,).

    Many words are sorted with their positions in the lowest bits, which takes half as long. If two words are equal in
    all other bits, they are sorted the slow way. For a million random words, that happens once in thirty times.
    """
    count = len(drawn)
    if count >= _FAST_SORT_WORDS:
        bits = np.uint64((count - 1).bit_length())
        low_bits = (np.uint64(1) << bits) - np.uint64(1)
        numbered = (drawn & ~low_bits) | np.arange(count, dtype=np.uint64)
        numbered.sort()
        if not ((numbered[1:] ^ numbered[:-1]) <= low_bits).any():
            return (numbered & low_bits).astype(np.int64)
    return np.argsort(drawn, kind="stable")


class Bijection:
    """Random permutation of 0 … n-1 that computes only the values asked for.

    n is at most 2**62. For small n it is a table. For large n it is a Feistel network over the bits of n-1, applied
    repeatedly until the result is below n, less than twice on average (Black, Rogaway: Ciphers with Arbitrary Finite
    Domains, 2002).
    """

    def __init__(self, key: int, n: int) -> None:
        self._n = n
        self._table = permutation(key, n).astype(np.uint16) if n <= _TABLE_LIMIT else None
        bits = max(n - 1, 1).bit_length()
        self._widths = np.uint64(bits - bits // 2), np.uint64(bits // 2)  # bits of the left and of the right half
        self._keys = words(key, 0, _ROUNDS)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of `positions`, each in [0, n): int64 of the same shape."""
        if self._table is not None:
            return self._table[positions].astype(np.int64)
        image = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(image >= self._n)
        while len(outside):
            image[outside] = self._encrypt(image[outside])
            outside = outside[image[outside] >= self._n]
        return image.astype(np.int64)

    def _encrypt(self, values: Words) -> Words:
        """Apply the network once.

        The halves swap positions and widths in each round. After an even number of rounds, they are as at the start.
        """
        wide, narrow = self._widths
        left, right = values >> narrow, values & _ones(narrow)
        for round_key in self._keys:
            left, right = right, left ^ (_finalize(right + round_key) & _ones(wide))
            wide, narrow = narrow, wide
        return (left << narrow) | right


def _ones(bits: np.uint64) -> np.uint64:
    """Return a number whose lowest `bits` bits are 1."""
    return (np.uint64(1) << bits) - np.uint64(1)


RANKS = 1 << 32  # bound of `SharedRanks.rank`


class SharedRanks:
    """Random ranks of n = 0, 1, …, the same in all lanes without communication.

    A rank, here, is no process but an integer below `RANKS`. This range is divided into `steps` equal steps. The ranks
    of `steps` consecutive numbers, a block, are in different steps, in random order. `key` is the same in all lanes of
    a run.
    """

    def __init__(self, *, key: int, steps: int) -> None:
        self._key, self._count = key, steps
        self._block = -1  # the block whose steps are in `_steps`
        self._steps: list[int] = []

    def step(self, n: int) -> int:
        """Return the step that has the rank of number n, 0 … steps - 1."""
        block, i = divmod(n, self._count)
        if block != self._block:
            self._block = block
            self._steps = permutation(derive_key(self._key, block), self._count).tolist()
        return self._steps[i]

    def rank(self, n: int) -> int:
        """Return the rank of number n, a random one within `step(n)`: 0 … RANKS - 1."""
        return ((self.step(n) << 32) + (word(self._key, n) >> 32)) // self._count
