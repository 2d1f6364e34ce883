"""Measures the loader against its peers and against a bare loop, interleaved in one run; ratios hold, absolutes do not.

    python tools/bench_loader.py              all of it, about five minutes
    python tools/bench_loader.py throughput   JSON of 1 kB: samples/s of each loader, in turn
    python tools/bench_loader.py transport    batches of 9.6 MB from two workers, against torch's DataLoader
    python tools/bench_loader.py resume       seconds to the first batch after a resume, at 1 % and 95 % of an epoch
    python tools/bench_loader.py state        bytes of a state and time to take one
    python tools/bench_loader.py memory       a buffer of 100,000 images against one of 1,000

Peers that are not installed are left out with a word; `pip install 'savable_pipeline[bench]'` brings them.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, IterableDataset
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from task_encoders.captioning import CaptioningEncoder

SAMPLES, PER_SHARD = 160_000, 10_000
BUFFER, BATCH = 10_000, 256
ROUNDS, SECONDS = 5, 2.0  # each loader is measured so often, and so long each time
PRELOADED = 20_000  # samples of the bare loop
ALL = ["throughput", "transport", "resume", "state", "memory"]
console = Console()


# The data: JSON of 1 kB, and images of 25 kB.


def write_json_shards(folder: Path) -> None:
    """160,000 samples of 1 kB of JSON in 16 shards, with the metadata that Energon reads."""
    counts = {}
    for shard in range(SAMPLES // PER_SHARD):
        name = f"{shard:06d}.tar"
        write_tar(folder / name, "json", (json_record(shard * PER_SHARD + i) for i in range(PER_SHARD)))
        counts[name] = PER_SHARD
    meta = folder / ".nv-meta"
    meta.mkdir(exist_ok=True)
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": list(counts)}, "exclude": []}))
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    sp.TarShardReader(str(folder), sp.Lane())  # makes the indexes


def json_record(number: int) -> bytes:
    draw = np.random.default_rng(number)
    words = [f"w{word:05d}" for word in draw.integers(0, 50_000, 120)]
    record = {
        "id": number,
        "url": f"http://example.com/{number}",
        "score": float(draw.random()),
        "text": " ".join(words),
    }
    return json.dumps(record).encode()


def write_image_shards(folder: Path, samples: int, per_shard: int) -> None:
    """Images of about 25 kB with a caption."""
    draw = np.random.default_rng(0)
    pixels = [draw.integers(0, 256, (24, 24, 3), dtype=np.uint8) for _ in range(64)]
    images = [jpeg(pixel) for pixel in pixels]
    for shard in range(samples // per_shard):
        write_tar(folder / f"{shard:06d}.tar", "jpg", (images[i % 64] for i in range(per_shard)), caption=b"a picture")


def jpeg(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).resize((256, 256), Image.Resampling.NEAREST).save(file, "JPEG", quality=93)
    return file.getvalue()


def write_tar(path: Path, extension: str, payloads: Iterator[bytes], caption: bytes | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, payload in enumerate(payloads):
            for part, raw in [(extension, payload), *([("txt", caption)] if caption else [])]:
                member = tarfile.TarInfo(f"{path.stem}_{i:06d}.{part}")
                member.size = len(raw)
                tar.addfile(member, io.BytesIO(raw))


# The loaders: each gives batches of 256 decoded samples from a shuffle buffer of 10,000.


class JsonEncoder(sp.TaskEncoder):
    """Decodes, draws nothing, and leaves a batch a list."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return json.loads(sample["json"])

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def json_pipeline(folder: str, buffer: int, lane: sp.Lane) -> sp.Stage:
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane), size=-(-buffer // lane.count))
    return sp.Batcher(sp.Encode(samples, JsonEncoder()), size=BATCH)


def ours(folder: Path, lanes: int) -> Iterator[Any]:
    return iter(sp.SavableLoader(partial(json_pipeline, str(folder), BUFFER), seed=1, lanes=lanes))


def bare_loop(folder: Path) -> Iterator[Any]:
    """`json.loads` over bytes in memory, in batches: what no loader can beat."""
    records = [json_record(i) for i in range(PRELOADED)]
    while True:
        for start in range(0, PRELOADED - BATCH, BATCH):
            yield [json.loads(record) for record in records[start : start + BATCH]]


def web_dataset(folder: Path) -> Any:
    import webdataset as wds

    shards = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).repeat()
    return dataset.shuffle(BUFFER).map(lambda sample: json.loads(sample["json"])).batched(BATCH, collation_fn=list)


def stateful_dataloader(folder: Path) -> Iterator[Any]:
    """torchdata's loader over webdataset's pipeline: what people combine it with for tars."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(web_dataset(folder), batch_size=None, collate_fn=lambda batch: batch))


def energon(folder: Path) -> Iterator[Any]:
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        TextSample,
        WorkerConfig,
        basic_sample_keys,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    @stateless  # type: ignore[untyped-decorator]
    def cook(sample: Any) -> Any:
        return TextSample(**basic_sample_keys(sample), text=sample["json"])  # decoded by its SampleDecoder

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        cookers = [Cooker(cook)]  # noqa: RUF012

        @stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Any]) -> Any:
            return samples

    logging.disable(logging.WARNING)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=BATCH, shuffle_buffer_size=BUFFER, max_samples_per_sequence=100,
        task_encoder=Encoder(),
    )  # fmt: skip
    return iter(get_savable_loader(dataset))


def contenders(folder: Path) -> dict[str, Callable[[], Iterator[Any]]]:
    """By name, what makes each loader; the bare loop first, then ours."""
    found: dict[str, Callable[[], Iterator[Any]]] = {
        "bare json.loads loop": partial(bare_loop, folder),
        "savable_pipeline, 96 lanes": partial(ours, folder, 96),
        "savable_pipeline, 8 lanes": partial(ours, folder, 8),
        "webdataset": lambda: iter(web_dataset(folder)),
        "StatefulDataLoader": partial(stateful_dataloader, folder),
        "Megatron-Energon": partial(energon, folder),
    }
    if importlib.util.find_spec("megatron") is None:
        console.print("Megatron-Energon is not installed: left out")
        del found["Megatron-Energon"]
    return found


# What is measured.


def throughput(folder: Path) -> dict[str, Any]:
    """Samples/s of each contender, in turn, `ROUNDS` times; the median, and ratios to ours within each round."""
    running = {}
    for name, make in contenders(folder).items():
        running[name] = make()
        next(running[name])  # starts it and fills its buffer
    rates: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, batches in running.items():
            rates[name].append(rate(batches))
    mine = rates["savable_pipeline, 96 lanes"]
    table = Table("JSON of 1 kB, no workers", "samples/s", "ours (96 lanes) / it", title="throughput")
    result = {}
    for name, found in rates.items():
        ratio = statistics.median(own / its for own, its in zip(mine, found, strict=True))
        result[name] = {"samples_per_s": statistics.median(found), "ours_over_it": ratio}
        table.add_row(name, f"{statistics.median(found):,.0f}", f"{ratio:.2f}")
    console.print(table)
    return result


def rate(batches: Iterator[Any]) -> float:
    start, samples = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        samples += len(next(batches))
    return samples / (time.perf_counter() - start)


class FilledEncoder(JsonEncoder):
    """Fills batches of 64×3×224×224 uint8, whatever the samples are."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return 7

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return sp.empty((64, 3, 224, 224), torch.uint8).fill_(7)


def filled_pipeline(folder: str, lane: sp.Lane) -> sp.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(folder, lane), FilledEncoder()), size=1)


class Filled(IterableDataset[Any]):
    """The same batches for torch's DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.full((64, 3, 224, 224), 7, dtype=torch.uint8)


def transport(folder: Path) -> dict[str, Any]:
    """Batches/s of 9.6 MB from two workers; the trainer reads every byte, by a hash."""
    loader = sp.SavableLoader(partial(filled_pipeline, str(folder)), seed=1, lanes=8, num_workers=2)
    running: dict[str, Iterator[Any]] = {
        "savable_pipeline": iter(loader),
        "torch DataLoader": iter(DataLoader(Filled(), None, num_workers=2)),
    }
    rates: dict[str, list[float]] = {name: [] for name in running}
    for warm_up in (True, *[False] * ROUNDS):
        for name, batches in running.items():
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < SECONDS:
                xxh3_64_intdigest(memoryview(next(batches).view(-1).numpy()))
                count += 1
            if not warm_up:
                rates[name].append(count / (time.perf_counter() - start))
    loader.close()
    ratio = statistics.median(own / its for own, its in zip(*rates.values(), strict=True))
    table = Table("batches of 64×3×224×224 uint8, two workers", "batches/s", title="transport")
    for name, found in rates.items():
        table.add_row(name, f"{statistics.median(found):,.0f}")
    table.add_row("ratio", f"{ratio:.2f}")
    console.print(table)
    return {"batches_per_s": {name: statistics.median(found) for name, found in rates.items()}, "ratio": ratio}


def image_pipeline(folder: str, buffer: int, lane: sp.Lane) -> sp.Stage:
    encoder = CaptioningEncoder(image_size=64)
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane), size=-(-buffer // lane.count))
    packs = sp.OnlinePacker(sp.Encode(samples, encoder), max_length=128)
    return sp.Batcher(packs, size=1)


def resume(folder: Path, images: Path) -> dict[str, Any]:
    """Seconds from a fresh loader and a state to the first batch, two workers begun by fork.

    Packed images on 8 lanes, so that every lane has begun at 1 % of an epoch of 10,000; the first packs of a lane that
    has not begun take longer, since many images go into its open packs before one is full.
    """
    cases = {
        "text": (partial(json_pipeline, str(folder), BUFFER), SAMPLES // BATCH, 96),
        "packed images": (partial(image_pipeline, str(images), 2_000), 10_000 // 11, 8),
    }
    table = Table("first batch after resume, s", "at 1 %", "at 95 %", "95 % / 1 %", title="resume")
    result = {}
    for name, (pipeline, steps, lanes) in cases.items():
        states = []
        with sp.SavableLoader(pipeline, seed=1, lanes=lanes) as loader:
            for step, _ in enumerate(loader, start=1):
                if step in (max(1, steps // 100), steps * 95 // 100):
                    states.append(loader.state_dict())
                if step > steps * 95 // 100:
                    break
        early, late = [], []
        for _ in range(10):
            early.append(first_batch(pipeline, lanes, states[0]))
            late.append(first_batch(pipeline, lanes, states[1]))
        one, ninety_five = statistics.median(early), statistics.median(late)
        result[name] = {"at_1_percent_s": one, "at_95_percent_s": ninety_five}
        table.add_row(name, f"{one:.3f}", f"{ninety_five:.3f}", f"{ninety_five / one:.2f}")
    console.print(table)
    return result


def first_batch(pipeline: Callable[[sp.Lane], sp.Stage], lanes: int, state: dict[str, Any]) -> float:
    start = time.perf_counter()
    with sp.SavableLoader(pipeline, seed=1, lanes=lanes, num_workers=2) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - start


def state(folder: Path) -> dict[str, Any]:
    """Size of a state with 10,000 refs over 96 lanes, and the time that `state_dict()` takes."""
    with sp.SavableLoader(partial(json_pipeline, str(folder), BUFFER), seed=1) as loader:
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


def memory(images: Path) -> dict[str, Any]:
    """Peak memory of a process that runs one lane with a buffer of 1,000 images, and of 100,000."""
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


class RawEncoder(JsonEncoder):
    """Reads the image and keeps its size."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return len(sample["jpg"])


def peak_megabytes(folder: str, size: int) -> float:
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, sp.Lane()), size=size)
    batches = sp.Batcher(sp.Encode(samples, RawEncoder()), size=64)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of starting up
    for _, _ in zip(range(2_000), batches, strict=False):
        pass
    status = Path("/proc/self/status").read_text()  # VmHWM: peak resident kB
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*ALL, []], default=[])
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "savable_pipeline_bench")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    args = parser.parse_args()
    wanted = args.what or ALL
    texts, images = args.data / "json", args.data / "images"
    if not (images / "done").exists():
        console.print(f"writing the data to {args.data}")
        write_json_shards(texts)
        write_image_shards(images, 120_000, 6_000)
        (images / "done").touch()
    console.print(f"{os.cpu_count()} processors, Python {sys.version.split()[0]}, torch {torch.__version__}")
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": partial(throughput, texts),
        "transport": partial(transport, texts),
        "resume": partial(resume, texts, images),
        "state": partial(state, texts),
        "memory": partial(memory, images),
    }
    numbers = {name: measures[name]() for name in wanted}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
