"""Measure datasets of very many (simulated) shards: opening one, first refs, fingerprint, and writing an index.

    python tools/bench/many_shards.py open --shards 1000000      1,000 to 1,000,000 shards of 1,000 samples
    python tools/bench/many_shards.py write --shards 100000      an index of 10**8 samples: time and memory
    python tools/bench/many_shards.py remote --shards 1000000    from a web server on this machine, with an empty cache

The shards are empty files of the right size, 1,000 per folder. The rows of their index are a hole of a sparse file,
because nothing reads them before a shard is opened. Each measurement runs in its own process. Tables show the minimum
and median of the rounds. "listed" is a start that lists the folder and stats each shard, and "known" a start that finds
a `.fresh` file and trusts the index. Memory is the peak beyond that of `import savable_pipeline`, with mapped files.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to import `tests.support`

SAMPLES = 1_000  # per shard
SHARDS_PER_FOLDER = 1_000
SHARD_BYTES = 1 << 20
COLUMNS = ("open", "first refs", "fingerprint", "memory", "fingerprint_bytes")
Measurements = dict[str, float]


def peak_bytes(status: str = "") -> int:
    """Return the peak memory of this process, or of the one with this /proc/PID/status.

    `ru_maxrss` would be wrong, because a process inherits it from its parent.
    """
    text = status or Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def import_peak_bytes() -> int:
    """Return the peak memory of a process that only imports the library."""
    code = "import savable_pipeline; print(open('/proc/self/status').read())"
    return peak_bytes(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def shard_name(shard: int) -> str:
    """Return the path of a shard, relative to the dataset."""
    return f"{shard // SHARDS_PER_FOLDER:04d}/{shard:07d}.tar"


def make_dataset(root: Path, shards: int, samples: int = SAMPLES) -> None:
    """Write empty files, and an index by which each has `samples` samples of one part."""
    from savable_pipeline.data.shards.index import check_of
    from savable_pipeline.data.shards.index_making import Columns, encode_index_head
    from savable_pipeline.data.shards.metadata import INDEX_NAME
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.shards.tar_format import TarIndexHeader

    columns, rng = Columns(), np.random.default_rng(0)
    zeros = np.zeros(samples, "<u8")
    check = check_of(zeros, zeros, zeros)  # the rows are a hole of the file, which reads as zeros
    for shard, digest in enumerate(rng.integers(0, 1 << 63, shards).tolist()):
        path = root / shard_name(shard)
        if not shard % SHARDS_PER_FOLDER:
            path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(SHARD_BYTES)
        columns.add(ShardEntry(shard_name(shard), SHARD_BYTES, samples, digest), samples, check)
    header = TarIndexHeader([(("bin", 1),)], members=1, size_bytes=4, sizes=shards * samples)
    begin = encode_index_head(columns, "tar", msgspec.msgpack.encode(header))
    (root / INDEX_NAME).parent.mkdir()
    (root / INDEX_NAME).write_bytes(begin)
    sizes = shards * samples * 4
    os.truncate(root / INDEX_NAME, len(begin) + shards * samples * 8 + sizes + -sizes % 8)


def open_one(root: str) -> Measurements:
    """Measure how long it takes to open a dataset in this process, and how much memory."""
    import savable_pipeline as sp
    from savable_pipeline.run.state.fingerprint import fingerprint, pack_fingerprint

    seconds: Measurements = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        return result

    reader = timed("open", lambda: sp.TarShardReader(root, sp.Lane(3, 96, 7)))
    timed("first refs", lambda: reader.take(64))
    packed = timed("fingerprint", lambda: pack_fingerprint(fingerprint(reader, seed=7, lanes=96)))
    return {**seconds, "memory": peak_bytes() - import_peak_bytes(), "fingerprint_bytes": len(packed)}


def write_one(folder: str, shards: int) -> Measurements:
    """Measure how long it takes to write an index of random rows in this process, and how much memory."""
    from savable_pipeline.data.shards.index_making import write_index
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.shards.tar_format import TarColumns
    from savable_pipeline.data.stores.tar_store import TARS

    rng = np.random.default_rng(0)
    starts, zeros = (np.arange(SAMPLES, dtype="<u8") * 1024).data, memoryview(bytes(4 * SAMPLES))

    def tables() -> Iterator[Any]:
        for i in range(shards):
            sizes = rng.integers(1, 512, SAMPLES).astype("<u8").data
            rows = TarColumns(starts, 0, [(("bin", 1),)], zeros, sizes)
            yield rows.table(ShardEntry(shard_name(i), SHARD_BYTES, SAMPLES, i))

    before, start = peak_bytes(), time.perf_counter()
    write_index(Path(folder) / "an.index", tables(), TARS)
    return {"write": time.perf_counter() - start, "memory": peak_bytes() - before}


def run_in_process(root: Path | str, shards: int = 0) -> Measurements:
    """Run `open_one`, or `write_one` if `shards` is passed, in a new process."""
    call = f"write_one({str(root)!r}, {shards})" if shards else f"open_one({str(root)!r})"
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from many_shards import *\n"
    command = [sys.executable, "-c", f"{code}print(json.dumps({call}))"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stderr)
    measurements: Measurements = json.loads(process.stdout)
    return measurements


def format_measurement(name: str, values: list[float]) -> str:
    """Format one measurement of all rounds as a table cell."""
    if "bytes" in name:
        return f"{values[0] / 1e3:,.1f} kB"
    if name in ("memory", "fetched of it"):
        return f"{max(values) / 1e6:,.1f} MB"
    return f"{min(values):.3f} s ({statistics.median(values):.3f})"


def table_cells(rows: list[Measurements]) -> list[str]:
    """Format all measurements of some rounds as table cells."""
    return [format_measurement(name, [row[name] for row in rows]) for name in rows[0]]


def bench_open(bench: Bench) -> None:
    """Compare starts that list the folder with starts that trust the index."""
    from savable_pipeline.data.shards.metadata import INDEX_NAME

    table = Table("shards", "start", *COLUMNS, title="least (median) of the rounds", title_justify="left")
    for shards in bench.options.shards:
        with tempfile.TemporaryDirectory(dir=bench.data) as parent:
            root = Path(parent) / "many"
            make_dataset(root, shards)
            time.sleep(3)  # an index is trusted only if the folders have not changed in the last seconds
            rows: dict[str, list[Measurements]] = {"listed": [], "known": []}
            for _ in range(bench.rounds):
                (root / f"{INDEX_NAME}.fresh").unlink(missing_ok=True)
                for measurements in rows.values():
                    measurements.append(run_in_process(root))
        for start, measurements in rows.items():
            table.add_row(f"{shards:,}", start, *table_cells(measurements))
    console.print(table)


def bench_remote(bench: Bench) -> None:
    """Measure remote datasets. Each round starts with an empty cache, which "next open" then uses."""
    import savable_pipeline as sp
    from savable_pipeline.data.remote.shard_cache import ShardCache
    from savable_pipeline.data.shards.metadata import INDEX_NAME
    from tests.support.toy_server import serving

    heads = (*COLUMNS, "fetched of it", "next open")
    table = Table("shards", "index", *heads, title="from a web server", title_justify="left")
    for shards in bench.options.shards:
        with tempfile.TemporaryDirectory(dir=bench.data) as parent, serving(folder := Path(parent)) as server:
            make_dataset(folder / "many", shards)
            size = (folder / "many" / INDEX_NAME).stat().st_size
            server.changes = False
            server.page("many", "", 0)
            rows: list[Measurements] = []
            for i in range(bench.rounds):
                os.environ["SAVABLE_CACHE"] = str(folder / f"cache{i}")
                before = server.sent(INDEX_NAME)
                first = run_in_process(f"{server.url}/many/")
                sent = server.sent(INDEX_NAME) - before
                for version in {path.parent for path in folder.glob(f"cache{i}/*/*/*/*")}:
                    with contextlib.suppress(OSError, ValueError, sp.SavableError):
                        # The first process has started to download shards, which differ from the index: they are empty.
                        ShardCache(version).forget_changed()
                second = run_in_process(f"{server.url}/many/")
                rows.append({**first, "fetched of it": sent, "next open": second["open"]})
            table.add_row(f"{shards:,}", f"{size / 1e6:,.1f} MB", *table_cells(rows))
    console.print(table)


def bench_write(bench: Bench) -> None:
    """Measure writing an index of random rows."""
    table = Table("shards", "samples", "write", "memory", title="an index, least (median)", title_justify="left")
    for shards in bench.options.shards:
        with tempfile.TemporaryDirectory(dir=bench.data) as folder:
            rows = [run_in_process(folder, shards) for _ in range(bench.rounds)]
        table.add_row(f"{shards:,}", f"{shards * SAMPLES:,}", *table_cells(rows))
    console.print(table)


if __name__ == "__main__":
    measures = {"open": bench_open, "write": bench_write, "remote": bench_remote}
    main(__doc__, measures, shards=[1_000, 100_000, 1_000_000])
