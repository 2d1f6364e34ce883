"""Measure remote shards from a web server on this machine.

    python tools/bench/remote.py first [--gb 4] [--rounds 3]
    python tools/bench/remote.py blobs json

- `first` reads an epoch with an empty cache. Compare with one `curl` process per core that writes files, as the cache
  does.
- `blobs` and `json` read later epochs from the cache, with samples of 100 kB and 1 kB. Compare with local files.

It needs nginx and curl.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data import write_random
from rounds import Bench, Cost, Way, called, main

import savable_pipeline as sp
from savable_pipeline import custom

CORES = os.cpu_count() or 1
PORT = 8931
URL = f"http://127.0.0.1:{PORT}"
SHARDS = 40
CONFIG = """
worker_processes {cores}; daemon off; pid {root}/pid; error_log {root}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path {root}/t1; proxy_temp_path {root}/t2; fastcgi_temp_path {root}/t3; uwsgi_temp_path {root}/t4;
  scgi_temp_path {root}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}/www; }}
}}
"""


class Lengths(sp.TaskEncoder):
    """Encoder that reads each sample and returns its length."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return len(sample["bin"])

    def batch(self, items: list[int], rng: sp.Rng) -> int:
        return sum(items)


def pipeline(shards: str, cache: Path, lane: sp.Lane) -> custom.Stage:
    """Build a lane of one epoch, with a cache large enough for all shards."""
    reader = sp.TarShardReader(shards, lane, epochs=1, window=32, cache=cache, cache_bytes=1 << 40)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(reader, size=32), Lengths()), size=16)


@contextlib.contextmanager
def serve_shards(root: Path, size: int, sample_bytes: int) -> Iterator[Path]:
    """Serve a new folder of shards with nginx.

    Args:
        root: An empty folder.
        size: Bytes of all shards together.
        sample_bytes: Bytes of each sample.
    """
    root.chmod(0o755)
    shards = root / "www" / "shards"
    write_random(shards, shards=SHARDS, samples=max(1, size // SHARDS // sample_bytes), size=sample_bytes)
    sp.TarShardReader(str(shards), sp.Lane())  # writes the index
    (root / "nginx.conf").write_text(CONFIG.format(cores=CORES, root=root, port=PORT))
    server = subprocess.Popen(["nginx", "-c", str(root / "nginx.conf")])
    time.sleep(0.5)
    try:
        yield shards
    finally:
        server.terminate()
        server.wait()


def curl(folder: Path, target: Path) -> None:
    """Download all shards with one curl process per core."""
    target.mkdir()
    names = sorted(path.name for path in folder.glob("*.tar"))
    processes = []
    for core in range(CORES):
        downloads = [("-o", str(target / name), f"{URL}/shards/{name}") for name in names[core::CORES]]
        processes.append(subprocess.Popen(["curl", "-s", *itertools.chain.from_iterable(downloads)]))
    for process in processes:
        process.wait()


def first(bench: Bench) -> None:
    """Measure the first epoch, including the start of workers and of the download process."""
    gb, size = bench.options.gb, int(bench.options.gb * 1e9)
    with tempfile.TemporaryDirectory(dir=bench.data) as root, serve_shards(Path(root), size, 100_000) as shards:
        target = Path(root) / "target"

        def with_empty_target(work: Callable[[], None]) -> Way:
            def way() -> Cost:
                shutil.rmtree(target, ignore_errors=True)
                return called(work, gb)()

            return way

        def epoch() -> None:
            with loader(f"{URL}/shards/", target) as running:
                for _ in running:
                    pass

        works: dict[str, Callable[[], None]] = {"from the server": epoch, "curl to files": lambda: curl(shards, target)}
        bench.compare("the first epoch", "GB", {name: with_empty_target(work) for name, work in works.items()})


def later(sample_bytes: int, bench: Bench) -> None:
    """Measure an epoch whose samples are all in the cache."""
    gb = bench.options.gb if sample_bytes > 1_000 else 0.04
    size = int(gb * 1e9)
    with tempfile.TemporaryDirectory(dir=bench.data) as root, serve_shards(Path(root), size, sample_bytes) as shards:
        cache = Path(root) / "cache"
        with loader(f"{URL}/shards/", cache) as remote, loader(str(shards), cache) as local:

            def epoch(running: sp.SavableLoader) -> None:
                for _ in running:
                    pass

            epoch(remote)
            epoch(local)
            ways = {"from the cache": called(lambda: epoch(remote), gb), "local": called(lambda: epoch(local), gb)}
            bench.compare(f"later epochs, {sample_bytes:,} bytes a sample", "GB", ways)


def loader(shards: str, cache: Path) -> sp.SavableLoader:
    """Open our loader with one worker per core."""
    return sp.SavableLoader(functools.partial(pipeline, shards, cache), seed=1, lanes=8, num_workers=CORES)


if __name__ == "__main__":
    blobs, json = functools.partial(later, 100_000), functools.partial(later, 1_000)
    main(__doc__, {"first": first, "blobs": blobs, "json": json}, gb=1.0)
