"""How long ranks wait for the slowest, with and without `Balance` and `max_cost`: `python tools/bench/balance.py`.

For each kind of documents: the share of all ranks' time spent waiting at 8, 32 and 96 ranks, 96 lanes, over packs 1,000
to 2,000 of each lane, when a step lasts as long as its dearest pack; the longest and the 99th percentile of the time
that a pack is held, in units of `hold` slots; how full packs are; and processor time a pack, of the stage alone.

`--ranks` runs two processes that train for as long as a pack costs, with and without `Balance`, and compares what that
saves with the simulation. `--loading` measures the processor time of a pipeline with and without it, by turns.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from balance_data import Corpus, lognormal, of_files, pictures, python_texts
from numpy.typing import NDArray
from packs import Packs, balance, pack, waiting

LANES, RANKS = 96, (8, 32, 96)


def corpora() -> dict[str, Corpus]:
    """All kinds of documents, by the name that `--only` takes."""
    return {
        "32k": lognormal(1500, 1.4, 32 << 10),
        "4k": lognormal(400, 1.0, 4 << 10),
        "python": of_files("Python's library", python_texts(), 16 << 10),
        "pictures": pictures(8 << 10),
    }


def report(corpus: Corpus, *, first: int, last: int, seed: int, holds: list[int]) -> None:
    """Print a table of one kind of documents."""
    print(f"\n{corpus.name}")
    print(f"{'packs':34}{'waiting at 8/32/96':>20}{'longest':>9}{'p99':>6}{'fill':>7}{'µs':>6}", flush=True)
    limit, ample = corpus.longest, 2 * corpus.longest
    capped: dict[str, Any] = {"max_cost": corpus.dearest, "cost": corpus.cost}
    for name, settings in [
        (f"{limit:,} tokens", {"max_length": limit}),
        (f"{ample:,} tokens", {"max_length": ample}),
        (f"{ample:,}, cost of {limit:,}", {"max_length": ample, **capped}),
    ]:
        documents = corpus.of_lanes(seed)
        packs = pack(documents, corpus.cost, lanes=LANES, packs=last + max(holds), seed=seed, **settings)
        print_row(name, packs.costs[:, first:last], "", packs.fill, None)
        for hold in holds:
            print_balanced(packs, hold, first=first, last=last, seed=seed)


def print_balanced(packs: Packs, hold: int, *, first: int, last: int, seed: int) -> None:
    """Print the row of one `hold`."""
    given = balance(packs.costs, hold=hold, slots=last, seed=seed)
    longest, p99 = given.held.max() / hold, np.percentile(given.held, 99) / hold
    print_row(f"  Balance(hold={hold})", given.costs[:, first:last], f"{longest:9.1f}{p99:6.1f}", None, given.us)


def print_row(name: str, costs: NDArray[np.int64], held: str, fill: float | None, us: float | None) -> None:
    """Print one row."""
    shares = " / ".join(f"{100 * waiting(costs, ranks):.1f}" for ranks in RANKS)
    filled = "" if fill is None else f"{fill:7.1%}"
    print(f"{name:34}{shares:>20}{held:15}{filled:7}{'' if us is None else f'{us:6.0f}'}", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(corpora()), action="append", help="these documents alone")
    parser.add_argument("--first", type=int, default=1000, help="the first pack of a lane that counts")
    parser.add_argument("--last", type=int, default=2000)
    parser.add_argument("--hold", type=int, action="append", help="16, 32 and 64 unless given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", action="store_true", help="two processes in place of the tables")
    parser.add_argument("--loading", action="store_true", help="processor time in place of the tables")
    arguments = parser.parse_args()
    if arguments.ranks or arguments.loading:
        from balance_runs import loading, two_ranks

        (two_ranks if arguments.ranks else loading)(seed=arguments.seed)
        return
    for name, corpus in corpora().items():
        if arguments.only is None or name in arguments.only:
            holds = arguments.hold or [16, 32, 64]
            report(corpus, first=arguments.first, last=arguments.last, seed=arguments.seed, holds=holds)


if __name__ == "__main__":
    main()
