"""What batches by length cost, with and without `same_bucket`, beside packs: `python tools/bench/buckets.py`.

Simulated with the stages themselves, 96 lanes, batches 500 to 1,000 of each, lognormal lengths. Batches are padded to
the bound of their bucket; the bounds double up to the longest document. For each way: how much of a batch is padding;
the share of the ranks of a step that have the bucket most of them have; the share of all ranks' time spent waiting for
the slowest at 8, 32 and 96 ranks, if a batch costs its padded tokens, and if it costs attention, too; and the 99th
percentile of the batches of a lane for which an item is held.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from balance_data import Corpus, lognormal
from numpy.typing import NDArray
from packs import Told, balance, pack, waiting

import savable_pipeline as sp
from savable_pipeline import custom

LANES, RANKS = 96, (8, 32, 96)
_BUCKETS = 6


class Lengths(sp.TaskEncoder):
    """An item is its length, a batch the list of them."""

    global_rng = False

    def length(self, item: int) -> int:
        """Itself."""
        return item

    def batch(self, items: list[int], rng: sp.Rng) -> list[int]:
        """The items."""
        return items


class Documents(Told):
    """Yields the lengths themselves."""

    def take(self, n: int, *, deferred: bool = False) -> tuple[list[Any], list[Any]]:
        """The next one."""
        _, refs = super().take(n, deferred=deferred)
        return [length for length, _ in self.sizes or ()], refs


@dataclass
class Batches:
    """The batches of all lanes."""

    bounds: NDArray[np.int64]  # of the bucket of each batch, (lanes, batches)
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]  # that are no padding
    held: NDArray[np.int64]  # batches of the lane between an item's arrival and its own batch, of every item


def batches_of(corpus: Corpus, *, first: int, last: int, seed: int, **settings: Any) -> Batches:
    """The batches `first` to `last` of each lane that `BucketBatcher(**settings)` makes."""
    sizes = corpus.of_lanes(seed)
    found = np.zeros((3, LANES, last), np.int64)
    held: list[NDArray[np.int64]] = []
    for index in range(LANES):
        told = Documents(sizes(index), sp.Lane(index, LANES, seed), Lengths())
        stage = custom.BucketBatcher(told, **settings)
        given = []
        for n, lengths in enumerate(islice(stage, last)):
            given.append(told.given)
            found[:, index, n] = max(lengths), len(lengths), sum(lengths)
            if n >= first:
                held.append(n - np.searchsorted(given, [ref[0] for ref in stage.ref[1:]], side="right"))
    longest, rows, tokens = found[:, :, first:]
    bounds = np.array(settings["bounds"])
    return Batches(bounds[np.searchsorted(bounds, longest)], rows, tokens, np.concatenate(held))


def report(corpus: Corpus, *, first: int, last: int, seed: int, holds: list[int]) -> None:
    """Print a table of one kind of documents."""
    print(f"\n{corpus.name.partition(', packs')[0]}, up to {corpus.longest:,}")
    print(f"{'':36}{'padding':>9}{'same':>7}{'tokens 8/32/96':>20}{'attention 8/32/96':>20}{'held':>6}", flush=True)
    bounds = [corpus.longest >> n for n in reversed(range(_BUCKETS))]
    for sized in ({"size": 8}, {"max_tokens": 2 * corpus.longest}):
        named = ", ".join(f"{name}={value:,}" for name, value in sized.items())
        for hold in (0, *holds):
            same: dict[str, Any] = {"same_bucket": True, "hold": hold} if hold else {}
            made = batches_of(corpus, first=first, last=last, seed=seed, bounds=bounds, **sized, **same)
            print_batches(f"  same_bucket, hold={hold}" if hold else named, made, corpus)
    print_packs(corpus, first=first, last=last, seed=seed)


def print_batches(name: str, made: Batches, corpus: Corpus) -> None:
    """Print the row of batches by length."""
    padded = made.bounds * made.rows
    attention = made.rows * np.vectorize(lambda bound: corpus.cost(bound, 0))(made.bounds)
    steps = made.bounds.T.reshape(-1, RANKS[0])
    same = np.mean([np.unique(step, return_counts=True)[1].max() / RANKS[0] for step in steps])
    print_row(name, 1 - made.tokens.sum() / padded.sum(), f"{same:7.0%}", padded, attention)
    print(f"{np.percentile(made.held, 99):6.0f}", flush=True)


def print_packs(corpus: Corpus, *, first: int, last: int, seed: int) -> None:
    """Print the row of packs, held and given by `Balance(hold=32)`."""
    hold = 32

    def given(cost: Callable[[int, int], int]) -> tuple[NDArray[np.int64], float]:
        documents = corpus.of_lanes(seed)
        packs = pack(documents, cost, lanes=LANES, packs=last + hold, seed=seed, max_length=corpus.longest)
        return balance(packs.costs, hold=hold, slots=last, seed=seed).costs[:, first:], packs.fill

    (tokens, fill), (attention, _) = given(lambda length, images: length), given(corpus.cost)
    print_row(f"OnlinePacker, Balance(hold={hold})", 1 - fill, "", tokens, attention)
    print(flush=True)


def print_row(name: str, padding: float, same: str, *costs: NDArray[np.int64]) -> None:
    """Print one row but its end."""
    shares = ["/".join(f"{100 * waiting(each, ranks):.1f}" for ranks in RANKS) for each in costs]
    print(f"{name:36}{padding:9.1%}{same:7}{shares[0]:>20}{shares[1]:>20}", end="")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=500, help="the first batch of a lane that counts")
    parser.add_argument("--last", type=int, default=1000)
    parser.add_argument("--hold", type=int, action="append", help="16, 32 and 64 unless given")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for corpus in (lognormal(400, 1.0, 4 << 10), lognormal(1500, 1.4, 32 << 10)):
        how: dict[str, Any] = {"first": arguments.first, "last": arguments.last, "seed": arguments.seed}
        report(corpus, **how, holds=arguments.hold or [16, 32, 64])


if __name__ == "__main__":
    main()
