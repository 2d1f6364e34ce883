"""Measures `savable index` beside `energon prepare`: processor time and memory for the same shards of 200,000 samples.

    python tools/bench/index.py [--samples 200000] [--rounds 3] [--energon /path/to/energon]
    python tools/bench/index.py hour [--samples 2000000]      what 8 processors index in an hour, from what one does

Shards of 10,000 pairs of a picture of 2 kB and JSON are written once, and stripped of their indexes before each run.
The two take turns, each a command of its own with one process that reads. Processor time is user and system time of the
command and of all processes below it, so that other work on the machine changes it little.

`hour` measures `savable index` with one process and with two, and takes apart what grows with the samples and is shared
by processes, and what one process does alone: it hands out the shards and writes the index in the end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

A_SHARD = 10_000
PICTURE = 2_000  # bytes
_SUBREAPER = 36  # prctl: processes whose parent ended become ours, so that their time is counted
_ENERGON = ["--num-workers=1", "--non-interactive", "--force-overwrite", "--split-ratio=1,0,0"]
_ENERGON += ["--sample-type=CaptioningSample", '--field-map={"image": "jpg", "caption": "json[caption]"}']


@dataclass
class Cost:
    """Of a command: seconds of processor time of all its processes, seconds by the clock, memory in bytes.

    `own_s` is the processor time of the first process alone, where that is known.
    """

    processor_s: float
    wall_s: float
    memory: int
    own_s: float = 0.0


def measured(command: list[str]) -> Cost:
    """Run a command, and wait for every process that it leaves behind."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as told:
        first = subprocess.Popen(command, stdout=told, stderr=told).pid
        total, memory = 0.0, 0
        while True:
            try:
                pid, status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            total += used.ru_utime + used.ru_stime
            memory = max(memory, used.ru_maxrss * 1024)
            if pid == first:
                wall = time.perf_counter() - begun
                if status:
                    told.seek(0)
                    raise SystemExit(f"{' '.join(command)} failed:\n{told.read().decode()[-2000:]}")
    return Cost(total, wall, memory)


def write_shards(folder: Path, samples: int) -> None:
    """Pairs of random bytes and a caption."""
    import numpy as np

    import savable_pipeline as sp

    noise = np.random.default_rng(0).bytes(2 * PICTURE)
    with sp.ShardWriter(folder, max_samples=A_SHARD, max_bytes=1 << 40) as writer:
        for i in range(samples):
            caption = {"caption": f"a picture of nothing, number {i}", "number": i}
            writer.write({"__key__": f"{i:09d}", "jpg": noise[i % PICTURE :][:PICTURE], "json": caption})
    strip(folder)


def strip(folder: Path) -> None:
    """Remove every index."""
    shutil.rmtree(folder / ".nv-meta", ignore_errors=True)
    for path in folder.rglob("*.idx"):
        path.unlink()


def ours(folder: Path, workers: int = 1) -> Cost:
    strip(folder)
    with tempfile.NamedTemporaryFile("r") as told:
        cost = measured([sys.executable, __file__, "--one", told.name, str(folder), str(workers)])
        cost.own_s = float(told.read())
    return cost


def index_one(told: str, folder: str, workers: str) -> None:
    """The command `savable index`, which tells in a file what processor time its own process took."""
    from savable_pipeline.tools.cli.main import app

    app(["index", folder, f"--workers={workers}"], standalone_mode=False)
    used = resource.getrusage(resource.RUSAGE_SELF)
    Path(told).write_text(str(used.ru_utime + used.ru_stime))


def energon(program: str, folder: Path) -> Cost:
    strip(folder)
    return measured([program, "prepare", *_ENERGON, str(folder)])


def compare(folder: Path, samples: int, rounds: int, program: str) -> None:
    from rich.console import Console
    from rich.table import Table

    runs: dict[str, Callable[[], Cost]] = {
        "savable index": lambda: ours(folder),
        "energon prepare": lambda: energon(program, folder),
    }
    found: dict[str, list[Cost]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    first = found["savable index"]
    table = Table("command", "processor s", "beside ours", "clock s", "memory MB", "samples a processor second")
    table.title, table.title_justify = f"{samples:,} samples, {rounds} rounds in turn", "left"
    for name, costs in found.items():
        ratios = [cost.processor_s / our.processor_s for cost, our in zip(costs, first, strict=True)]
        middle = statistics.median(cost.processor_s for cost in costs)
        table.add_row(
            name,
            f"{middle:.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.median(cost.wall_s for cost in costs):.1f}",
            f"{max(cost.memory for cost in costs) / 1e6:.0f}",
            f"{samples / middle:,.0f}",
        )
    Console(width=120).print(table)


def hour(folder: Path, samples: int, processors: int = 8) -> None:
    """Extrapolates: seconds = a sample's share of what one process does alone + what is shared / processors.

    Both are told by the difference to half of the shards, so that neither imports count, nor the seconds in which the
    command scans alone before it starts processes.
    """
    small = folder.with_name("small")
    small.mkdir()
    shards = sorted(folder.glob("*.tar"))
    for path in shards[: len(shards) // 2]:
        os.link(path, small / path.name)
    more = samples - len(shards) // 2 * A_SHARD
    one, one_small, two, two_small = ours(folder), ours(small), ours(folder, 2), ours(small, 2)
    alone = max(0.0, two.own_s - two_small.own_s) / more
    shared = max(0.0, one.processor_s - one_small.processor_s) / more - alone
    each = alone + shared / processors
    found = {
        "samples": samples,
        "seconds of one process": round(one.processor_s, 2),
        "of two, together": round(two.processor_s, 2),
        "microseconds a sample, shared": round(1e6 * shared, 3),
        "microseconds a sample, in the process that writes the index": round(1e6 * alone, 3),
        f"samples an hour on {processors} processors": f"{3600 / each:.2e}",
        "hours for 10**9": round(1e9 * each / 3600, 3),
    }
    print(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["compare", "hour"], default="compare")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--energon", default="energon", help="the program, where another environment has it")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        index_one(*given.one)
        return
    samples = given.samples or (200_000 if given.what == "compare" else 2_000_000)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "shards"
        write_shards(folder, samples)
        if given.what == "hour":
            hour(folder, samples)
        else:
            compare(folder, samples, given.rounds, given.energon)


if __name__ == "__main__":
    main()
