"""Measures reading: opening, memory, descriptors, cold files, large parts, scale. Ratios hold, absolutes do not.

    python tools/bench/reading.py              all of it, about three minutes
    python tools/bench/reading.py open         10,000 indexed shards: time to open, and samples/s with 256 descriptors
    python tools/bench/reading.py memory       an index of 1,000,000 samples; 1,000,000 reads from one open shard
    python tools/bench/reading.py scale        1,000,000 shards and 10**10 samples, by simulation: plan and seek
    python tools/bench/reading.py blobs        parts of 1 MB, against a bare os.pread loop into fresh memory
    python tools/bench/reading.py cold         JPEG of 25 kB, page cache dropped, against webdataset in file order
    python tools/bench/reading.py window       how well a batch is mixed, by `window`; and what more open shards cost

The data lie in a temporary folder below `--folder`, which should be on a disk: files in memory are never cold.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.stages.readers.read_order import EpochOrder, lane_span

ALL = ["open", "memory", "scale", "blobs", "cold", "window"]
ROUNDS = 5
console = Console()


def write_shards(folder: Path, shards: int, samples: int, size: int, extension: str = "bin") -> Path:
    """Shards of samples of one part of `size` random bytes."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(samples):
                info = tarfile.TarInfo(f"{shard:06d}_{i:06d}.{extension}")
                info.size = size
                tar.addfile(info, io.BytesIO(draw.bytes(size)))
    return folder


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: its own, and those of files, which all processes share."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tell(title: str, rows: dict[str, str]) -> None:
    table = Table("what", "found", title=title, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    console.print(table)


class Length(sp.TaskEncoder):
    """How long the first part is: reads, and does nothing else."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return len(sample[next(iter(sample))])

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def drained(stage: custom.Stage, n: int) -> int:
    """Take items until there are n; gives the bytes they stand for."""
    taken = total = 0
    while taken < n:
        items, _ = stage.take(256)
        total += sum(items)
        taken += len(items)
    return total


def bench_open(folder: Path) -> None:
    """Many shards: opening them all, and reading from more of them than there are descriptors."""
    root = write_shards(folder / "many", 10_000, 10, 1000)
    first = seconds(lambda: open_any(root))
    opened = statistics.median(seconds(lambda: open_any(root)) for _ in range(ROUNDS))
    rates: dict[str, float] = {}
    for window in (32, 128, None):
        stage = sp.Encode(sp.TarShardReader(root, sp.Lane(seed=1), window=window), Length())
        drained(stage, 1000)
        rates[f"window {window}"] = 20_000 / seconds(lambda stage=stage: drained(stage, 20_000))  # type: ignore[misc]
    few = sp.Encode(sp.TarShardReader(str(root / "0000*.tar"), sp.Lane(seed=1), window=None), Length())
    drained(few, 1000)
    rates["100 shards"] = 20_000 / seconds(lambda: drained(few, 20_000))
    tell(
        "10,000 shards of 10 samples",
        {
            "first use: indexed and opened": f"{first:.2f} s",
            "opened again": f"{opened:.3f} s",
            **{f"samples/s, {what}": f"{rate:,.0f}" for what, rate in rates.items()},
        },
    )


def bench_memory(folder: Path) -> None:
    """What an index of a million samples takes, and whether reading goes on taking."""
    root = write_shards(folder / "million", 100, 10_000, 10)
    open_any(root)
    before = resident()
    dataset = open_any(root)
    opened = resident()
    refs = np.zeros(2000, REF)
    refs["index"] = np.linspace(0, dataset.count - 1, 2000).astype(np.int64)
    for sample in dataset.open_samples(refs):
        _ = sample["bin"]
    read = resident()
    one = open_any(root / "000000.tar")
    refs["index"] %= one.count
    samples = one.open_samples(refs)
    found = []
    for _ in range(5):
        for _ in range(100):
            for sample in samples:
                _ = sample["bin"]
        found.append(resident()[0])
    tell(
        "1,000,000 samples in 100 shards",
        {
            "opened: own memory": f"{(opened[0] - before[0]) / 1e6:.1f} MB",
            "read from each shard: own memory": f"{(read[0] - before[0]) / 1e6:.1f} MB",
            "the same, and pages of the index, which processes share": f"{(sum(read) - sum(before)) / 1e6:.1f} MB",
            "1,000,000 reads from one shard: growth after the first 200,000": f"{(found[-1] - found[0]) / 1e3:.0f} kB",
        },
    )


def bench_scale(folder: Path) -> None:
    """A lane's plan of a dataset that only exists as numbers, and finding places in it."""
    shards, samples = 1_000_000, 10**10
    firsts = np.arange(shards + 1, dtype=np.int64) * (samples // shards)
    ranks, before = 16_384, resident()[0]
    began = time.perf_counter()
    epoch = EpochOrder(firsts, seed=1, source=2, epoch=3, block_size=8, window=32)
    planned = time.perf_counter() - began
    begin, end = lane_span(samples, 12_345, ranks, 3)
    seeks = [seconds(lambda at=at: epoch.locate(at, min(at + 2048, end))) for at in range(begin, end, 60_000)]  # type: ignore[misc]
    tell(
        "1,000,000 shards, 10**10 samples, 16,384 lanes",
        {
            "plan of an epoch": f"{planned:.2f} s",
            "seek, the slowest": f"{max(seeks) * 1e3:.1f} ms",
            "memory of the plan": f"{(resident()[0] - before) / 1e6:.0f} MB",
        },
    )


def bench_blobs(folder: Path) -> None:
    """Parts of 1 MB from the page cache."""
    root = write_shards(folder / "blobs", 4, 100, 1_000_000)

    class Whole(Length):
        """The part itself, so that each is read into memory of its own."""

        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            return sample["bin"]

    def ours_read() -> None:
        for _ in range(8):
            stage.take(50)

    dataset = open_any(root)
    places = [(dataset.entries[shard].name, row) for shard in range(4) for row in range(100)]
    files = {name: os.open(root / name, os.O_RDONLY) for name, _ in places}
    stage = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(root, sp.Lane(seed=1)), size=100), Whole())
    ours_read()

    def bare() -> None:
        held = []
        for name, row in places:
            held.append(os.pread(files[name], 1_000_000, row * (512 + 1_000_448) + 512))
            if len(held) == 50:
                held.clear()

    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(400 / seconds(bare))
        ours.append(400 / seconds(ours_read))
    rate = statistics.median(ours)
    tell(
        "parts of 1 MB, no workers",
        {
            "through the data path": f"{rate / 1000:.2f} GB/s",
            "a bare os.pread loop": f"{statistics.median(theirs) / 1000:.2f} GB/s",
            "ratio": f"{rate / statistics.median(theirs):.2f}",
        },
    )


def drop(root: Path) -> None:
    """Forget what the page cache has of the shards."""
    for path in root.glob("*.tar"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bench_cold(folder: Path) -> None:
    """Files of 25 kB from the disk: a shuffle of 10,000 against webdataset's reading in file order."""
    root = write_shards(folder / "cold", 20, 1000, 25_000, "jpg")
    count = 20_000
    open_any(root)
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for name, run in cold_runs(root, count).items():
            drop(root)
            rates.setdefault(name, []).append(count * 25e-3 / seconds(run))
    base = statistics.median(rates["webdataset, in file order"])
    tell(
        "25 kB, page cache dropped",
        {name: f"{statistics.median(r):,.0f} MB/s, {statistics.median(r) / base:.2f} ×" for name, r in rates.items()},
    )


def cold_runs(root: Path, count: int) -> dict[str, Callable[[], Any]]:
    def ours(**settings: Any) -> Callable[[], Any]:
        reader = sp.TarShardReader(root, sp.Lane(seed=1), **settings)
        return lambda: drained(sp.Encode(sp.ShuffleBuffer(reader, size=10_000), Length()), count - 300)

    def theirs() -> Iterator[Any]:
        import webdataset as wds

        urls = sorted(map(str, root.glob("*.tar")))
        return iter(wds.WebDataset(urls, shardshuffle=False, empty_check=False))

    def bare() -> None:
        for path in sorted(root.glob("*.tar")):
            path.read_bytes()

    return {
        "webdataset, in file order": lambda: [len(sample["jpg"]) for sample in theirs()],
        "ours, shuffle 10,000": ours(),
        "ours, shuffle 10,000, blocks of 64": ours(block_size=64),
        "whole files": bare,
    }


def bench_window(folder: Path) -> None:
    """Batches of 256 of data sorted by 100 classes over 500 shards: entropy against that of random batches."""
    classes, size, count, shards = 100, 256, 500_000, 500
    firsts = np.arange(shards + 1, dtype=np.int64) * (count // shards)
    draw = np.random.default_rng(0)
    rows = {}
    for window in (32, 64, 128, 256, None):
        epoch = EpochOrder(firsts, seed=1, source=2, epoch=0, block_size=8, window=window)
        shares = []
        for lane in range(0, 96, 8):
            begin, end = lane_span(count, lane, 96, 0)
            found = epoch.locate(begin, end) * classes // count
            shuffled = buffered(found, 2000, draw)
            shares += [entropy(batch, classes) for batch in shuffled[: len(shuffled) // size * size].reshape(-1, size)]
        rows[f"window {window}"] = f"{statistics.median(shares):.3f}, worst {min(shares):.3f}"
    best = statistics.median(entropy(draw.integers(0, classes, size), classes) for _ in range(300))
    tell(f"entropy of a batch in nats (random: {best:.3f}), 96 lanes, buffer 2,000", rows)


def buffered(values: np.ndarray[Any, Any], size: int, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """What a shuffle buffer of `size` makes of a sequence."""
    slots, given = list(values[:size]), []
    for value in values[size:]:
        slot = draw.integers(size)
        given.append(slots[slot])
        slots[slot] = value
    draw.shuffle(slots)
    return np.array(given + slots)


def entropy(batch: np.ndarray[Any, Any], classes: int) -> float:
    shares = np.bincount(batch, minlength=classes) / len(batch)
    return float(-sum(share * np.log(share) for share in shares if share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=ALL, choices=[*ALL, []])
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    benches = {
        "open": bench_open,
        "memory": bench_memory,
        "scale": bench_scale,
        "blobs": bench_blobs,
        "cold": bench_cold,
        "window": bench_window,
    }
    for what in arguments.what:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            benches[what](Path(folder))


if __name__ == "__main__":
    main()
