"""Datasets of many shards, simulated: what it costs to open one, the first refs, a state, and to write an index.

    python tools/bench/many_shards.py open --shards 1000000      1,000 to 1,000,000 shards of 1,000 samples
    python tools/bench/many_shards.py write --shards 100000      an index of 10**8 samples: time and memory
    python tools/bench/many_shards.py remote --shards 1000000    behind a web server of this machine, an empty cache

The shards are empty files of the right size, 1,000 a folder. Their index is written straight, its rows a hole: nothing
of them is read before a shard is opened. Each number is of a process of its own, the least and the median of the
rounds. "listed" is a start that lists the folder and looks at each shard, "known" one that finds the index marked as
fresh. Memory is the peak beyond a bare `import savable_pipeline`, with what is mapped.
"""

from __future__ import annotations

import contextlib
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
from rich.table import Table
from rounds import Bench, console, main

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the server of the tests

SAMPLES = 1_000  # of a shard
IN_FOLDER = 1_000  # shards
SHARD_BYTES = 1 << 20
SHOWN = ("open", "first refs", "fingerprint", "memory", "fingerprint_bytes")
Numbers = dict[str, float]


def peak(status: str = "") -> int:
    """The most bytes of this process that were in memory at once. (`ru_maxrss` may be what its parent had.)"""
    text = status or Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def bare_import() -> int:
    """The same of a process that has only imported the library."""
    code = "import savable_pipeline; print(open('/proc/self/status').read())"
    return peak(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def shard_name(shard: int) -> str:
    """Of so many in a folder."""
    return f"{shard // IN_FOLDER:04d}/{shard:07d}.tar"


def make_dataset(root: Path, shards: int, samples: int = SAMPLES) -> None:
    """Empty files, with an index that says each holds so many samples of one part."""
    from savable_pipeline.data.shards.index import check_of
    from savable_pipeline.data.shards.index_making import Columns, index_begin
    from savable_pipeline.data.shards.metadata import INDEX_NAME
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.shards.tar_format import TarIndexHeader

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
    header = TarIndexHeader([(("bin", 1),)], members=1, size_bytes=4, sizes=shards * samples)
    begin = index_begin(columns, "tar", msgspec.msgpack.encode(header))
    (root / INDEX_NAME).parent.mkdir()
    (root / INDEX_NAME).write_bytes(begin)
    sizes = shards * samples * 4
    os.truncate(root / INDEX_NAME, len(begin) + shards * samples * 8 + sizes + -sizes % 8)


def open_one(root: str) -> Numbers:
    """Opens a dataset in this process."""
    import savable_pipeline as sp
    from savable_pipeline.run.state.fingerprint import fingerprint, pack_fingerprint

    found: Numbers = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = work()
        found[name] = time.perf_counter() - began
        return done

    reader = timed("open", lambda: sp.TarShardReader(root, sp.Lane(3, 96, 7)))
    timed("first refs", lambda: reader.take(64))
    packed = timed("fingerprint", lambda: pack_fingerprint(fingerprint(reader, seed=7, lanes=96)))
    return {**found, "memory": peak() - bare_import(), "fingerprint_bytes": len(packed)}


def write_one(folder: str, shards: int) -> Numbers:
    """Writes an index of random rows in this process."""
    from savable_pipeline.data.shards.index_making import write_index
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.shards.tar_format import TarColumns
    from savable_pipeline.data.stores.tar_store import TARS

    draw = np.random.default_rng(0)
    starts, zeros = (np.arange(SAMPLES, dtype="<u8") * 1024).tobytes(), bytes(4 * SAMPLES)

    def tables() -> Iterator[Any]:
        for i in range(shards):
            sizes = draw.integers(1, 512, SAMPLES).astype("<u8").tobytes()
            rows = TarColumns(starts, 0, [(("bin", 1),)], zeros, sizes)
            yield rows.table(ShardEntry(shard_name(i), SHARD_BYTES, SAMPLES, i))

    before, began = peak(), time.perf_counter()
    write_index(Path(folder) / "an.index", tables(), TARS)
    return {"write": time.perf_counter() - began, "memory": peak() - before}


def in_a_process(root: Path | str, shards: int = 0) -> Numbers:
    """What `open_one` finds, or `write_one` of so many shards."""
    call = f"write_one({str(root)!r}, {shards})" if shards else f"open_one({str(root)!r})"
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from many_shards import *\n"
    words = [sys.executable, "-c", f"{code}print(json.dumps({call}))"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Numbers = json.loads(done.stdout)
    return found


def shown(name: str, values: list[float]) -> str:
    """A cell."""
    if "bytes" in name:
        return f"{values[0] / 1e3:,.1f} kB"
    if name in ("memory", "fetched of it"):
        return f"{max(values) / 1e6:,.1f} MB"
    return f"{min(values):.3f} s ({statistics.median(values):.3f})"


def columns_of(rows: list[Numbers]) -> list[str]:
    """The cells of some rounds."""
    return [shown(name, [row[name] for row in rows]) for name in rows[0]]


def bench_open(bench: Bench) -> None:
    """Listed and known."""
    from savable_pipeline.data.shards.metadata import INDEX_NAME

    table = Table("shards", "start", *SHOWN, title="least (median) of the rounds", title_justify="left")
    for shards in bench.options.shards:
        with tempfile.TemporaryDirectory(dir=bench.data) as room:
            root = Path(room) / "many"
            make_dataset(root, shards)
            time.sleep(3)  # until the folders are old enough to be marked
            rows: dict[str, list[Numbers]] = {"listed": [], "known": []}
            for _ in range(bench.rounds):
                (root / f"{INDEX_NAME}.fresh").unlink(missing_ok=True)
                for found in rows.values():
                    found.append(in_a_process(root))
        for start, found in rows.items():
            table.add_row(f"{shards:,}", start, *columns_of(found))
    console.print(table)


def bench_remote(bench: Bench) -> None:
    """Each round begins with an empty cache; "next open" finds in it what the first has fetched."""
    import savable_pipeline as sp
    from savable_pipeline.data.remote.shard_cache import ShardCache
    from savable_pipeline.data.shards.metadata import INDEX_NAME
    from tests.support.toy_server import serving

    heads = (*SHOWN, "fetched of it", "next open")
    table = Table("shards", "index", *heads, title="behind a web server", title_justify="left")
    for shards in bench.options.shards:
        with tempfile.TemporaryDirectory(dir=bench.data) as room, serving(folder := Path(room)) as server:
            make_dataset(folder / "many", shards)
            size = (folder / "many" / INDEX_NAME).stat().st_size
            server.changes = False
            server.page("many", "", 0)
            rows: list[Numbers] = []
            for i in range(bench.rounds):
                os.environ["SAVABLE_CACHE"] = str(folder / f"cache{i}")
                before = server.sent(INDEX_NAME)
                first = in_a_process(f"{server.url}/many/")
                sent = server.sent(INDEX_NAME) - before
                for version in {path.parent for path in folder.glob(f"cache{i}/*/*/*/*")}:
                    with contextlib.suppress(OSError, ValueError, sp.SavableError):
                        ShardCache(version).forget_changed()  # shards of no samples, which the first has begun to fetch
                again = in_a_process(f"{server.url}/many/")
                rows.append({**first, "fetched of it": sent, "next open": again["open"]})
            table.add_row(f"{shards:,}", f"{size / 1e6:,.1f} MB", *columns_of(rows))
    console.print(table)


def bench_write(bench: Bench) -> None:
    """An index of random rows."""
    table = Table("shards", "samples", "write", "memory", title="an index, least (median)", title_justify="left")
    for shards in bench.options.shards:
        with tempfile.TemporaryDirectory(dir=bench.data) as room:
            found = [in_a_process(room, shards) for _ in range(bench.rounds)]
        table.add_row(f"{shards:,}", f"{shards * SAMPLES:,}", *columns_of(found))
    console.print(table)


if __name__ == "__main__":
    measures = {"open": bench_open, "write": bench_write, "remote": bench_remote}
    main(__doc__, measures, shards=[1_000, 100_000, 1_000_000])
