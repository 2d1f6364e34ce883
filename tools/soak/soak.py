"""Stress tests: kill workers, ranks and trainers at random moments, and compare every batch and loss.

    python tools/soak/soak.py            all of it: about half an hour on two cores
    python tools/soak/soak.py --quick    the same with fewer repetitions: a few minutes
    python tools/soak/soak.py faults     200 workers killed at random moments, and 20 at each difficult moment
    python tools/soak/soak.py starts     1,000 starts and stops leave nothing
    python tools/soak/soak.py trainer    a trainer killed 100 times
    python tools/soak/soak.py losses     the losses of 1, 2 and 4 ranks, killed and resumed
    python tools/soak/soak.py elastic    other numbers of ranks and workers, another batch size, killed ranks
    python tools/soak/soak.py in_flight  10,000 random histories of rows in flight
    python tools/soak/soak.py fuzz       hostile states, indexes, tars and YAML are read or rejected

It exits with 1 if a batch, a loss or a process is not as expected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

PROOFS = ("faults", "starts", "trainer", "losses", "elastic", "in_flight", "fuzz")


def main() -> None:
    """Run the stress tests that the command line names, and print a table."""
    # Spawned workers import this file, so we import slow modules here and not at the top.
    from elastic import elastic
    from faults import faults
    from fuzz import fuzz
    from in_flight import in_flight
    from losses import losses
    from pipeline import write_shards
    from report import make_table
    from rich.console import Console
    from trainer import starts, trainer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("proofs", nargs="*", choices=[*PROOFS, []], default=[])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    args = parser.parse_args()
    quick, console = args.quick, Console(highlight=False)
    start = time.perf_counter()
    rows = []
    with tempfile.TemporaryDirectory(prefix="savable_pipeline_soak") as name:
        folder = Path(name)
        shards = folder / "shards"
        write_shards(shards)
        kills = {"fork": 20, "forkserver": 10, "spawn": 5} if quick else {"fork": 200, "forkserver": 200, "spawn": 40}
        runs = {
            "faults": lambda: faults(shards, kills=kills, each=3 if quick else 20),
            "starts": lambda: starts(shards, {"fork": 50, "spawn": 4} if quick else {"fork": 1000, "spawn": 50}),
            "trainer": lambda: trainer(shards, folder / "trainer", 8 if quick else 100),
            "losses": lambda: losses(shards, folder / "losses"),
            "elastic": lambda: elastic(shards, folder / "elastic", saves=4 if quick else 20, kills=2 if quick else 50),
            "in_flight": lambda: in_flight(folder / "in_flight", 400 if quick else 10_000),
            "fuzz": lambda: fuzz(folder / "fuzz", 500 if quick else 20_000),
        }
        for proof in args.proofs or PROOFS:
            for row in runs[proof]():
                console.print(
                    f"{time.perf_counter() - start:5.0f} s  {row.proof}: {row.case}: {row.problem or 'equal'}"
                )
                rows.append(row)
    console.print(make_table(rows))
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    sys.exit(any(row.problem for row in rows))


if __name__ == "__main__":
    main()
