"""Measures remote shards over a web server on this machine: `python tools/bench/remote.py [--gb 1] [--rounds 3]`.

Interleaved in each round, ratios at the end:

- every byte of an epoch through the loader with an empty cache, against one `curl` a core that writes files, as the
  cache does, and against one that throws the bytes away; by pieces of 8 MiB, and by blocks of 8 samples, which is what
  a cache smaller than the dataset gets; with and without the time that workers and fetchers take to start;
- the second epoch, from the cache, against the same from local files, for blobs and for JSON of 1 kB;
- bytes sent by the server in an epoch over bytes in the dataset, with a cache of twice the window.

Needs nginx and curl.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
  log_format sent '$uri $body_bytes_sent'; access_log {root}/access.log sent buffer=64k flush=1s;
  sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path {root}/t1; proxy_temp_path {root}/t2; fastcgi_temp_path {root}/t3; uwsgi_temp_path {root}/t4;
  scgi_temp_path {root}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}/www; }}
}}
"""


class Lengths(sp.TaskEncoder):
    """Reads each sample, and keeps only its length."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return len(sample["bin"])

    def batch(self, items: list[int], rng: sp.Rng) -> int:
        return sum(items)


def pipeline(shards: str, window: int, cache: Path, cache_bytes: int, lane: sp.Lane) -> custom.Stage:
    reader = sp.TarShardReader(shards, lane, epochs=1, window=window, cache=cache, cache_bytes=cache_bytes)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(reader, size=32), Lengths()), size=16)


def epochs_s(shards: str, cache: Path, cache_bytes: int, *, window: int = 32, epochs: int = 1) -> list[float]:
    """Seconds of each epoch, workers' start and the index's download not counted in the second and later ones."""
    job = functools.partial(pipeline, shards, window, cache, cache_bytes)
    times = []
    with sp.SavableLoader(job, seed=1, lanes=8, num_workers=CORES) as loader:
        for _ in range(epochs):
            begin = time.perf_counter()
            for _ in loader:
                pass
            times.append(time.perf_counter() - begin)
    return times


def write_shards(folder: Path, total: int, sample_bytes: int) -> None:
    folder.mkdir(parents=True)
    payload = os.urandom(sample_bytes)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for number in range(total // SHARDS // sample_bytes):
                info = tarfile.TarInfo(f"{shard:04d}{number:06d}.bin")
                info.size = sample_bytes
                tar.addfile(info, io.BytesIO(payload))
    sp.TarShardReader(str(folder), sp.Lane())  # makes the index


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[None]:
    (root / "nginx.conf").write_text(CONFIG.format(cores=CORES, root=root, port=PORT))
    server = subprocess.Popen(["nginx", "-c", str(root / "nginx.conf")])
    time.sleep(0.5)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def sent(root: Path) -> int:
    """Bytes of tars that the server has sent so far."""
    time.sleep(1.5)
    rows = (line.rsplit(" ", 1) for line in (root / "access.log").read_text().splitlines())
    return sum(int(count) for uri, count in rows if uri.endswith(".tar"))


def curl_s(folder: Path, out: Path | None) -> float:
    """Seconds in which one curl a core fetches all the shards between them."""
    names = sorted(path.name for path in folder.glob("*.tar"))
    if out is not None:
        out.mkdir()
    begin = time.perf_counter()
    running = []
    for core in range(CORES):
        command = ["curl", "-s"]
        for name in names[core::CORES]:
            command += ["-o", "/dev/null" if out is None else str(out / name), f"{URL}/{folder.name}/{name}"]
        running.append(subprocess.Popen(command))
    for one in running:
        one.wait()
    seconds = time.perf_counter() - begin
    if out is not None:
        shutil.rmtree(out)
    return seconds


def measure(root: Path, rounds: int) -> dict[str, list[float]]:
    blobs, json = root / "www" / "blobs", root / "www" / "json"
    total, cache = size_of(blobs), root / "cache"
    works: dict[str, Callable[[], Any]] = {
        "curl to files": lambda: curl_s(blobs, root / "out"),
        "curl to nothing": lambda: curl_s(blobs, None),
        "pieces": lambda: epochs_s(f"{URL}/blobs/", cache, 2 * total, epochs=2),
        "warm": lambda: epochs_s(f"{URL}/blobs/", cache, 2 * total, epochs=2),
        "blocks": lambda: epochs_s(f"{URL}/blobs/", cache, total, epochs=1),
        "local blobs": lambda: epochs_s(str(blobs), cache, total, epochs=2),
        "remote json": lambda: epochs_s(f"{URL}/json/", cache, 2 * total, epochs=3),
        "local json": lambda: epochs_s(str(json), cache, total, epochs=3),
    }
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, work in works.items():
            if name != "warm":
                shutil.rmtree(cache, ignore_errors=True)
            seconds = work()
            for epoch, value in enumerate(seconds if isinstance(seconds, list) else [seconds], 1):
                found.setdefault(f"{name}, epoch {epoch}", []).append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Remote shards against curl and against local files.")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--sample-bytes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder unless it is given")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=given.folder))
    root.chmod(0o755)
    try:
        write_shards(root / "www" / "blobs", int(given.gb * 1e9), given.sample_bytes)
        write_shards(root / "www" / "json", 40_000_000, 1000)
        blobs = root / "www" / "blobs"
        with nginx(root):
            found = measure(root, given.rounds)
            before = sent(root)
            shutil.rmtree(root / "cache", ignore_errors=True)
            window = SHARDS // 10
            limit = 2 * window * size_of(blobs) // SHARDS
            epochs_s(f"{URL}/blobs/", root / "cache", limit, window=window)
            ratio = (sent(root) - before) / size_of(blobs)
        middle = {name: statistics.median(values) for name, values in found.items()}
        for name, value in middle.items():
            print(f"{name:24} {value:7.2f} s   {found[name]}")
        start = middle["warm, epoch 1"] - middle["warm, epoch 2"]
        print(f"{'start, from a warm cache':24} {start:7.2f} s")
        for name in ("pieces", "blocks"):
            middle[f"{name} without the start"] = middle[f"{name}, epoch 1"] - start
        for name, against in [
            ("pieces, epoch 1", "curl to files, epoch 1"),
            ("pieces without the start", "curl to files, epoch 1"),
            ("blocks without the start", "curl to files, epoch 1"),
            ("pieces without the start", "curl to nothing, epoch 1"),
            ("pieces, epoch 2", "local blobs, epoch 2"),
            ("remote json, epoch 3", "local json, epoch 3"),
        ]:
            print(f"rate of {name} over {against}: {middle[against] / middle[name]:.2f}")
        print(f"bytes sent over bytes in the dataset, cache of twice the window: {ratio:.3f}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
