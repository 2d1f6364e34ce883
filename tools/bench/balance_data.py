"""The documents that `balance.py` packs: lognormal lengths, real texts, pictures with captions."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import savable_pipeline as sp

Lengths: TypeAlias = NDArray[np.int64]
HIDDEN = 2048
BYTES_A_TOKEN = 4  # of a text, about what a tokenizer makes of English and of programs
_CHUNK = 4096


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind: (length, images) of as many as asked for, and what one costs."""

    name: str
    draw: Callable[[np.random.Generator, int], tuple[Lengths, Lengths]]
    longest: int  # tokens; a longer document is left out
    cost: Callable[[int, int], int]

    def documents(self, seed: int) -> Iterator[tuple[int, int]]:
        """Endless (length, images)."""
        rng = np.random.default_rng(seed)
        while True:
            lengths, images = self.draw(rng, _CHUNK)
            kept = (lengths > 0) & (lengths <= self.longest)
            yield from zip(lengths[kept].tolist(), images[kept].tolist(), strict=True)

    def of_lanes(self, seed: int) -> Callable[[int], Iterator[tuple[tuple[int, int], ...]]]:
        """The documents of each lane by its number, each by itself."""
        return lambda lane: ((size,) for size in self.documents(seed * 1000 + lane))

    @property
    def dearest(self) -> int:
        """The cost of the longest document without images."""
        return self.cost(self.longest, 0)


def lognormal(median: float, sigma: float, longest: int) -> Corpus:
    """Lengths of many a web corpus."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths]:
        return rng.lognormal(np.log(median), sigma, n).astype(np.int64), np.zeros(n, np.int64)

    name = f"lognormal, median {median:,.0f}, sigma {sigma}, packs of {longest // 1024} k"
    return Corpus(name, draw, longest, sp.attention_cost(hidden=HIDDEN))


def of_files(name: str, sizes: list[int], longest: int) -> Corpus:
    """The lengths of real texts, drawn again and again."""
    known = np.array(sizes, np.int64) // BYTES_A_TOKEN

    def draw(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths]:
        return rng.choice(known, n), np.zeros(n, np.int64)

    name = f"{name}, {len(sizes):,} texts, packs of {longest // 1024} k"
    return Corpus(name, draw, longest, sp.attention_cost(hidden=HIDDEN))


def pictures(longest: int) -> Corpus:
    """A caption of lognormal length and 0 to 4 pictures of 64 to 1,280 tokens, each of four patches.

    The cost knows the number of pictures, not their sizes: each counts as one of the mean size.
    """

    def draw(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths]:
        images = rng.integers(0, 5, n)
        tokens = rng.integers(64, 1281, (n, 4)) * (np.arange(4) < images[:, None])
        return rng.lognormal(np.log(200), 1.0, n).astype(np.int64) + tokens.sum(axis=1), images

    cost = sp.attention_cost(hidden=HIDDEN, per_image=6 * 1024 * 4 * 672)
    return Corpus(f"captions with 0 to 4 pictures, packs of {longest // 1024} k", draw, longest, cost)


def python_texts() -> list[int]:
    """The sizes in bytes of Python's library sources, without what was installed into it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [path.stat().st_size for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
