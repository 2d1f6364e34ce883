"""Simulates datasets of many shards: what it costs to open one, the first refs, a state, and to write an index.

    python tools/bench/many_shards.py                            1,000 to 1,000,000 shards of 1,000 samples, then 2.
    python tools/bench/many_shards.py open --shards 1000000      only these; --rounds 5
    python tools/bench/many_shards.py write --shards 100000      an index of 10**8 samples: time and memory
    python tools/bench/many_shards.py remote --shards 1000000    behind a web server of this machine, an empty cache
    python tools/bench/many_shards.py bucket --shards 1000000    the same of a bucket, which is listed first
    python tools/bench/many_shards.py ranks                      16,384 ranks, on paper

The shards are empty files of the right size, 1,000 a folder. Their index is written straight, its rows a hole: nothing
of them is read before a shard is opened. Each number is of a process of its own, the least and the median of the
rounds. "listed" is a start that lists the folder and looks at each shard, "known" one that finds the index marked as
fresh. Memory is the peak beyond a bare `import savable_pipeline`, with what is mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the server of the tests

COUNTS = [1_000, 10_000, 100_000, 1_000_000]
SAMPLES = 1_000  # of a shard
IN_FOLDER = 1_000  # shards
SHARD_BYTES = 1 << 20
NODES, RANKS, WORKERS = 2_048, 16_384, 4  # on paper: ranks of all nodes, workers of a rank
LOOKS_PER_S = 100_000  # that the metadata server of a shared file system answers
SHOWN = ("open", "first refs", "fingerprint", "memory", "fingerprint_bytes")
Numbers = dict[str, float]
console = Console(width=120)


def peak() -> int:
    """The most bytes of this process that were in memory at once. (`ru_maxrss` may be what its parent had.)"""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def bare_import() -> int:
    """The same of a process that has only imported the library."""
    code = "import savable_pipeline; print(open('/proc/self/status').read())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return int(told.split("VmHWM:")[1].split()[0]) * 1024


def shard_name(shard: int) -> str:
    return f"{shard // IN_FOLDER:04d}/{shard:07d}.tar"


def make_dataset(root: Path, shards: int, samples: int = SAMPLES) -> None:
    """Empty files, with an index that says each holds so many samples of one part."""
    from savable_pipeline.data.shards.index import check_of
    from savable_pipeline.data.shards.index_making import Columns, index_begin
    from savable_pipeline.data.shards.metadata import INDEX_NAME
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.shards.tar_format import TarSaid

    columns, draw = Columns(), np.random.default_rng(0)
    zeros = np.zeros(samples, "<u8")
    check = check_of(zeros, zeros, zeros)  # of rows that are a hole
    for shard, digest in enumerate(draw.integers(0, 1 << 63, shards).tolist()):
        path = root / shard_name(shard)
        if not shard % IN_FOLDER:
            path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(SHARD_BYTES)
        columns.add(ShardEntry(shard_name(shard), SHARD_BYTES, samples, digest), samples, check)
    said = TarSaid([(("bin", 1),)], members=1, size_bytes=4, sizes=shards * samples)
    begin = index_begin(columns, "tar", msgspec.msgpack.encode(said))
    (root / INDEX_NAME).parent.mkdir()
    (root / INDEX_NAME).write_bytes(begin)
    sizes = shards * samples * 4
    os.truncate(root / INDEX_NAME, len(begin) + shards * samples * 8 + sizes + -sizes % 8)


def open_one(root: str) -> Numbers:
    """Opens a dataset in this process."""
    import savable_pipeline as sp

    found: Numbers = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = work()
        found[name] = time.perf_counter() - began
        return done

    from savable_pipeline.run.state.fingerprint import fingerprint, pack_fingerprint

    reader = timed("open", lambda: sp.TarShardReader(root, sp.Lane(3, 96, 7)))
    timed("first refs", lambda: reader.take_refs(64))
    packed = timed("fingerprint", lambda: pack_fingerprint(fingerprint(reader, seed=7, lanes=96)))
    return {**found, "memory": peak() - bare_import(), "fingerprint_bytes": len(packed)}


def write_one(folder: Path, shards: int) -> Numbers:
    """Writes an index of random rows in this process."""
    from savable_pipeline.data.shards.index import ShardTable
    from savable_pipeline.data.shards.index_making import write_index
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.shards.tar_format import TARS, TarColumns

    draw = np.random.default_rng(0)
    starts, zeros = (np.arange(SAMPLES, dtype="<u8") * 1024).tobytes(), bytes(4 * SAMPLES)

    def tables() -> Iterator[ShardTable]:
        for i in range(shards):
            sizes = draw.integers(1, 512, SAMPLES).astype("<u8").tobytes()
            rows = TarColumns(starts, 0, [(("bin", 1),)], zeros, sizes)
            yield rows.table(ShardEntry(shard_name(i), SHARD_BYTES, SAMPLES, i))

    before, began = peak(), time.perf_counter()
    write_index(folder / "an.index", tables(), TARS)
    return {"write": time.perf_counter() - began, "memory": peak() - before}


def in_a_process(what: str, folder: Path | str, shards: int = 0) -> Numbers:
    """What this program finds, called for one round."""
    words = [sys.executable, __file__, what, "--shards", str(shards), "--one", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Numbers = json.loads(done.stdout)
    return found


def shown(name: str, values: list[float]) -> str:
    if "bytes" in name:
        return f"{values[0] / 1e3:,.1f} kB"
    if name == "memory":
        return f"{max(values) / 1e6:,.0f} MB"
    return f"{min(values):.3f} s ({statistics.median(values):.3f})"


def bench_open(counts: list[int], rounds: int, folder: Path) -> None:
    from savable_pipeline.data.shards.metadata import INDEX_NAME

    table = Table("shards", "start", *SHOWN, title="least (median) of the rounds", title_justify="left")
    for shards in counts:
        root = folder / str(shards)
        make_dataset(root, shards)
        time.sleep(3)  # until the folders are old enough to be marked
        rows: dict[str, list[Numbers]] = {"listed": [], "known": []}
        for _ in range(rounds):
            (root / f"{INDEX_NAME}.fresh").unlink(missing_ok=True)
            for found in rows.values():
                found.append(in_a_process("open", root))
        for start, found in rows.items():
            table.add_row(f"{shards:,}", start, *(shown(name, [each[name] for each in found]) for name in SHOWN))
    console.print(table)


def bench_remote(counts: list[int], rounds: int, folder: Path, *, bucket: bool = False) -> None:
    """Each round begins with an empty cache; "next open" finds in it what the first has fetched."""
    from savable_pipeline.data.shards.metadata import INDEX_NAME
    from tests.support.toy_server import s3_settings, serving

    columns = ("index", "open", "first refs", "fetched of it", "next open", "memory")
    table = Table("shards", *columns, title="a bucket" if bucket else "behind a web server", title_justify="left")
    for shards in counts:
        make_dataset(folder / str(shards), shards)
        size = (folder / str(shards) / INDEX_NAME).stat().st_size
        rows: list[Numbers] = []
        with serving(folder) as server:
            os.environ.update(s3_settings(server))
            server.changes = False
            server.page(str(shards), "", 0)
            root = f"s3://{shards}" if bucket else f"{server.url}/{shards}/"
            for i in range(rounds):
                os.environ["SAVABLE_CACHE"] = str(folder / f"cache{shards}_{i}")
                before = server.sent(INDEX_NAME)
                first = in_a_process("remote", root)
                sent = server.sent(INDEX_NAME) - before
                for changed in folder.glob("cache*/*/changed"):
                    changed.unlink()  # shards of no samples, which the first one has begun to fetch
                again = in_a_process("remote", root)
                rows.append({**first, "fetched of it": sent, "next open": again["open"]})
        times = {name: [row[name] for row in rows] for name in columns[1:]}
        cells = [f"{times[name][0] / 1e6:,.1f} MB" if "fetched" in name else shown(name, times[name]) for name in times]
        table.add_row(f"{shards:,}", f"{size / 1e6:,.1f} MB", *cells)
    console.print(table)


def bench_write(counts: list[int], rounds: int, folder: Path) -> None:
    table = Table("shards", "samples", "write", "memory", title="an index, least (median)", title_justify="left")
    for shards in counts:
        found = [in_a_process("write", folder, shards) for _ in range(rounds)]
        cells = [shown(name, [each[name] for each in found]) for name in ("write", "memory")]
        table.add_row(f"{shards:,}", f"{shards * SAMPLES:,}", *cells)
    console.print(table)


def bench_bucket(counts: list[int], rounds: int, folder: Path) -> None:
    """`bench_remote` of a bucket: the server's own time for the listing is in "open"."""
    bench_remote(counts, rounds, folder, bucket=True)


def bench_ranks(counts: list[int], rounds: int, folder: Path) -> None:
    """What a start of many ranks asks of a shared file system, were the metadata server all that it waits for."""
    processes = RANKS * (1 + WORKERS)
    title = f"on paper: {RANKS:,} ranks on {NODES:,} nodes, {WORKERS} workers each, {LOOKS_PER_S:,} looks/s"
    table = Table("shards", "each process looks at all", "one a node", "each at the folders", title=title)
    for shards in counts:
        looks = (processes * shards, NODES * shards, processes * -(-shards // IN_FOLDER))
        table.add_row(f"{shards:,}", *(f"{n:,} looks, {n / LOOKS_PER_S:,.1f} s" for n in looks))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benches = {
        "open": bench_open,
        "write": bench_write,
        "remote": bench_remote,
        "bucket": bench_bucket,
        "ranks": bench_ranks,
    }
    parser.add_argument("what", nargs="*", default=["open", "ranks"], choices=[*benches, []])
    parser.add_argument("--shards", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        writes = "write" in arguments.what
        one = write_one(Path(arguments.one), arguments.shards[0]) if writes else open_one(arguments.one)
        print(json.dumps(one))
        return
    for what in arguments.what:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            benches[what](arguments.shards, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
