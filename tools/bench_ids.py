"""Measures what `ids=True` and `ledger=` cost: processor time of the same steps with and without, in turn.

    python tools/bench_ids.py                        JSON of 1 kB, batches of 256, no workers, seven rounds
    python tools/bench_ids.py --turns 24 --rounds 9

The loaders take turns of 16 batches, of which one is timed by the loader itself, each turn in another order, so that
what else the machine does touches all. A round's ratio is of the medians of its turns; the table has the median of the
rounds. "nothing" is a second plain loader: what its ratio is off from 1 is noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bench_data import FOLDER, console, prepared
from bench_pipelines import FunctionEncoder, decode_json, pipeline
from rich.table import Table

import savable_pipeline as sp

BATCH, BUFFER, TURN, LANES = 256, 10_000, 16, 96


def as_dict(items: list[Any]) -> dict[str, Any]:
    """A batch that `ids=True` can add to."""
    return {"items": items}


def seconds(batches: Iterator[Any], number: int) -> float:
    """Processor seconds of taking so many batches."""
    start = time.process_time()
    for _ in islice(batches, number):
        pass
    return time.process_time() - start


def one_round(loaders: dict[str, Iterator[Any]], turns: int) -> dict[str, float]:
    """The median processor seconds of a batch of each loader."""
    spent: dict[str, list[float]] = {name: [] for name in loaders}
    names = list(loaders)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            spent[name].append(seconds(loaders[name], TURN) / TURN)
    return {name: statistics.median(times) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=FOLDER)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    texts = prepared(args.data, "json")
    run = partial(pipeline, str(texts), FunctionEncoder(decode_json, as_dict), BATCH, BUFFER)
    console.print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {args.rounds} rounds of {args.turns}")
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        cases: dict[str, dict[str, Any]] = {
            "plain": {}, "nothing": {}, "ids=True": {"ids": True}, "ledger=": {"ledger": folders[0]},
            "both": {"ids": True, "ledger": folders[1]},
        }  # fmt: skip
        loaders: dict[str, Iterator[Any]] = {}
        for name, settings in cases.items():
            loaders[name] = iter(stack.enter_context(sp.SavableLoader(run, seed=1, lanes=LANES, **settings)))
            seconds(loaders[name], LANES)  # every lane once: buffers are full
        rounds = [one_round(loaders, args.turns) for _ in range(args.rounds)]
    table = Table("with", "median ratio", "least", "most", "µs a batch", title="processor time, JSON of 1 kB")
    for name in cases:
        ratios = sorted(times[name] / times["plain"] for times in rounds)
        spent = statistics.median(times[name] for times in rounds) * 1e6
        table.add_row(name, f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f}", f"{ratios[-1]:.3f}", f"{spent:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
