"""Measures one process of the loader against its peers and against a bare loop, and its states; ratios hold.

    python tools/bench/loader.py              all of it, about four minutes
    python tools/bench/loader.py throughput   JSON of 1 kB, no workers: samples/s of each loader, in turn
    python tools/bench/loader.py resume       seconds to the first batch after a resume, at 1 % and 95 % of an epoch
    python tools/bench/loader.py state        bytes of a state and time to take one
    python tools/bench/loader.py memory       a buffer of 100,000 images against one of 1,000

Peers that are not installed are left out with a word; `pip install 'savable_pipeline[bench]'` brings them.
`engine.py` measures what workers deliver, `workers.py` what they cost.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from data import FOLDER, TEXTS, console, json_record, prepared
from peer_energon import energon
from pipelines import Decode, FunctionEncoder, decode_json, own_json, pipeline
from rich.table import Table
from rounds import Contender, Loader, compete

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders.captioning import CaptioningEncoder

BUFFER, BATCH = 10_000, 256


def json_pipeline(folder: Path, decode: Decode = decode_json) -> Callable[[sp.Lane], custom.Stage]:
    """Batches of 256 dicts from a shuffle buffer of 10,000."""
    return partial(pipeline, str(folder), FunctionEncoder(decode, list), BATCH, BUFFER)


def bare_loop() -> Iterator[Any]:
    """`json.loads` over bytes in memory, in batches: what no loader can beat."""
    records = [json.dumps(json_record(i)).encode() for i in range(20_000)]
    while True:
        for start in range(0, len(records) - BATCH, BATCH):
            yield [json.loads(record) for record in records[start : start + BATCH]]


def throughput(folder: Path) -> dict[str, Any]:
    """Samples/s of each contender, in turn."""
    texts, columns = prepared(folder, "json"), prepared(folder, "parquet")
    settings = {"size": BATCH, "buffer": BUFFER, "workers": 0}

    def ours(lanes: int, decode: Decode = decode_json) -> Callable[[], Contender]:
        return lambda: Loader(iter(sp.SavableLoader(json_pipeline(texts, decode), seed=1, lanes=lanes)), len)

    makers: dict[str, Callable[[], Contender]] = {
        "savable_pipeline, 96 lanes": ours(96),
        "savable_pipeline, 8 lanes": ours(8),
        "savable_pipeline, Sample.json": ours(96, own_json),
        "bare json.loads loop": lambda: Loader(bare_loop(), len),
        "webdataset": lambda: Loader(peers.web_dataset(texts, decode_json, list, **settings), len),
        "StatefulDataLoader": lambda: Loader(peers.stateful_dataloader(texts, decode_json, list, **settings), len),
        "HF datasets over parquet": lambda: Loader(peers.hf_datasets(columns, **settings), len),
        "Megatron-Energon": lambda: Loader(energon(texts, size=BATCH, buffer=BUFFER), len),
    }
    return compete("JSON of 1 kB, no workers", "sample", makers)


def image_pipeline(folder: str, buffer: int, lane: sp.Lane) -> custom.Stage:
    encoder = CaptioningEncoder(image_size=64)
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane), size=-(-buffer // lane.count))
    packs = sp.OnlinePacker(sp.Encode(samples, encoder), max_length=128)
    return sp.Batcher(packs, size=1)


def resume(folder: Path) -> dict[str, Any]:
    """Seconds from a fresh loader and a state to the first batch, two workers begun by fork.

    Packed images on 8 lanes, so that every lane has begun at 1 % of an epoch of 10,000; the first packs of a lane that
    has not begun take longer, since many images go into its open packs before one is full.
    """
    texts, images = prepared(folder, "json"), prepared(folder, "images")
    cases: dict[str, tuple[Callable[[sp.Lane], custom.Stage], int, int]] = {
        "text": (json_pipeline(texts), TEXTS // BATCH, 96),
        "packed images": (partial(image_pipeline, str(images), 2_000), 10_000 // 11, 8),
    }
    table = Table("first batch after resume, s", "at 1 %", "at 95 %", "95 % / 1 %", title="resume")
    result = {}
    for name, (run, steps, lanes) in cases.items():
        states = []
        with sp.SavableLoader(run, seed=1, lanes=lanes) as loader:
            for step, _ in enumerate(loader, start=1):
                if step in (max(1, steps // 100), steps * 95 // 100):
                    states.append(loader.state_dict())
                if step > steps * 95 // 100:
                    break
        early, late = [], []
        for _ in range(10):
            early.append(first_batch(run, lanes, states[0]))
            late.append(first_batch(run, lanes, states[1]))
        one, ninety_five = statistics.median(early), statistics.median(late)
        result[name] = {"at_1_percent_s": one, "at_95_percent_s": ninety_five}
        table.add_row(name, f"{one:.3f}", f"{ninety_five:.3f}", f"{ninety_five / one:.2f}")
    console.print(table)
    return result


def first_batch(run: Callable[[sp.Lane], custom.Stage], lanes: int, state: dict[str, Any]) -> float:
    start = time.perf_counter()
    with sp.SavableLoader(run, seed=1, lanes=lanes, num_workers=2) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - start


def state(folder: Path) -> dict[str, Any]:
    """Size of a state with 10,000 refs over 96 lanes, and the time that `state_dict()` takes."""
    with sp.SavableLoader(json_pipeline(prepared(folder, "json")), seed=1) as loader:
        for _, _ in zip(range(200), loader, strict=False):
            pass
        times = []
        for _ in range(200):
            start = time.perf_counter()
            taken = loader.state_dict()
            times.append(time.perf_counter() - start)
        file = io.BytesIO()
        torch.save(taken, file)
    raw = sum(len(value) for value in taken.values() if isinstance(value, bytes))
    bound = 12 * BUFFER + 2_000 * 96
    table = Table("state", "", title="state, buffer of 10,000 over 96 lanes")
    table.add_row("bytes", f"{raw:,} (12 a sample and 2,000 a lane: {bound:,})")
    table.add_row("as torch.save writes it", f"{len(file.getvalue()):,}")
    table.add_row("state_dict()", f"{statistics.median(times) * 1e6:.0f} µs")
    console.print(table)
    return {"bytes": raw, "state_dict_us": statistics.median(times) * 1e6}


def memory(folder: Path) -> dict[str, Any]:
    """Peak memory of a process that runs one lane with a buffer of 1,000 images, and of 100,000."""
    images = prepared(folder, "images")
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for size in (1_000, 100_000):
        with context.Pool(1) as pool:
            peaks[size] = pool.apply(peak_megabytes, (str(images), size))
    table = Table("buffer", "peak MB", title="memory, one lane, images of 25 kB")
    for size, peak in peaks.items():
        table.add_row(f"{size:,}", f"{peak:,.1f}")
    table.add_row("difference", f"{peaks[100_000] - peaks[1_000]:,.1f}")
    console.print(table)
    return {"difference_mb": peaks[100_000] - peaks[1_000]}


def image_bytes(sample: Any) -> int:
    return len(sample["jpg"])


def peak_megabytes(folder: str, size: int) -> float:
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, sp.Lane()), size=size)
    batches = sp.Batcher(sp.Encode(samples, FunctionEncoder(image_bytes, list)), size=64)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of starting up
    for _, _ in zip(range(2_000), batches, strict=False):
        pass
    status = Path("/proc/self/status").read_text()  # VmHWM: peak resident kB
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {
        "throughput": throughput, "resume": resume, "state": state, "memory": memory,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--data", type=Path, default=FOLDER)
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    args = parser.parse_args()
    console.print(f"{os.cpu_count()} processors, Python {sys.version.split()[0]}, torch {torch.__version__}")
    numbers = {name: measures[name](args.data) for name in args.what or measures}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
