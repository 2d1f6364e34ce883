"""Measure throughput and costs of workers, and compare other loaders and bare loops.

    python tools/bench/workers.py transport      constant batches of 9.6 MB; the trainer reads every byte
    python tools/bench/workers.py blobs          1 MB blobs from tars; the trainer reads every byte
    python tools/bench/workers.py dicts          JSON of 1 kB as batches of dicts
    python tools/bench/workers.py arrays         JSON of 1 kB as padded arrays of bytes, against no workers
    python tools/bench/workers.py pil            JPEG of 256 px, decoded by PIL, a random crop of 224, flip
    python tools/bench/workers.py torchvision    the same, decoded by torchvision
    python tools/bench/workers.py threads        two threads, two processes and two threads of spdl, on blobs and on
                                                 JPEG decoded without the GIL, with an idle and a busy trainer
    python tools/bench/workers.py scaling        N workers against one, on lanes that N does and does not divide
    python tools/bench/workers.py cost           CPU time per batch of its state, and of the trainer's thread
    python tools/bench/workers.py nodes          two workers of this machine, and two of an agent on it,
                                                 with and without authentication of the bytes of batches
    python tools/bench/workers.py first          seconds from `iter()` to the first batch, by start method

There are two workers unless stated otherwise. Without arguments it runs all of them. This module does not import torch,
because spawned workers import this module.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ours
import peers
from data import few_records, prepare, records_of
from ours import FunctionEncoder, loader, pipeline
from peers import Collate, Decode, decode_json
from rounds import Bench, Loader, Way, called, console, cpu_seconds, main
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.state.lane_state import LaneState, pack_state
from savable_pipeline.run.transport import batch_pickle as wire
from savable_pipeline.run.transport.segments import SegmentReader, SegmentWriter

WORKERS = 2
JSON_BATCH, JSON_BUFFER, IMAGE_BATCH, BLOB_BATCH = 256, 10_000, 64, 8
Makers = dict[str, Callable[[], Loader]]
our_loader = partial(loader, workers=WORKERS)


def peer(
    make: Callable[..., Any], *args: Any, use: Callable[[Any], float] = len, **kwargs: Any
) -> Callable[[], Loader]:
    """Return a function that opens another loader with worker processes by `make(*args, **kwargs)`."""
    return lambda: Loader(iter(make(*args, **kwargs)), use, warm=2 * kwargs.get("buffer", 0))


def spdl(
    folder: Path, part: str, decode: Decode, collate: Collate, size: int, use: Callable[[Any], float] = len
) -> Loader:
    """Open spdl, which runs threads of this process."""
    pool = peers.spdl_threads(folder, part, decode, collate, size=size, threads=WORKERS)
    return Loader(iter(pool), use, pool.stop)


def read_bytes(batch: Any) -> float:
    """Read every byte of a tensor, an array, bytes, or a list of them. Return the number of megabytes."""
    if isinstance(batch, list):
        return sum(map(read_bytes, batch))
    whole: Any = batch.numpy() if hasattr(batch, "numpy") else batch
    raw = memoryview(whole).cast("B")
    xxh3_64_intdigest(raw)
    return len(raw) / 1e6


def transport(bench: Bench) -> None:
    """Compare the transport of constant batches of 9.6 MB."""
    from torch.utils.data import DataLoader

    def open_torch() -> Loader:
        return Loader(iter(DataLoader(LargeBatches(), None, num_workers=WORKERS)), read_bytes)  # type: ignore[arg-type]

    texts, encoder = prepare(bench.data, "json"), FunctionEncoder(ours.constant_item, ours.large_batch)
    makers: Makers = {
        "savable_pipeline": lambda: our_loader(texts, encoder, read_bytes, size=1),
        "torch DataLoader": open_torch,
    }
    bench.loaders("batches of 64×3×224×224 uint8", "MB", makers)


class LargeBatches:
    """Dataset of constant batches of 9.6 MB for torch's DataLoader."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((64, 3, 224, 224), 7, dtype=torch.uint8)


def as_bytes(sample: Mapping[str, bytes]) -> bytes:
    """Return the blob as bytes."""
    return sample["bin"]


def in_place(sample: Any) -> Any:
    """Read the blob directly into the memory of the batch, which the other loaders cannot do."""
    import torch

    return torch.from_numpy(sample.array("bin"))


def as_array(sample: Mapping[str, bytes]) -> Any:
    """View the blob as a NumPy array."""
    return np.frombuffer(sample["bin"], np.uint8)


def as_tensor(sample: Mapping[str, bytes]) -> Any:
    """View the blob as a tensor."""
    import torch

    return torch.from_numpy(as_array(sample))


def blobs(bench: Bench) -> None:
    """Compare batches of 8 blobs of 1 MB, as lists of bytes and stacked, whichever is faster in a loader."""
    from torch.utils.data import default_collate

    tars = prepare(bench.data, "blobs")
    options: dict[str, Any] = {"size": BLOB_BATCH, "use": read_bytes}
    torch_options = {**options, "num_workers": WORKERS}
    makers: Makers = {
        "savable_pipeline, in place": lambda: our_loader(tars, FunctionEncoder(in_place), **options),
        "savable_pipeline, stacked": lambda: our_loader(tars, FunctionEncoder(as_tensor), **options),
        "savable_pipeline, bytes": lambda: our_loader(tars, FunctionEncoder(as_bytes, list), **options),
        "webdataset, stacked": peer(peers.web_dataset, tars, as_tensor, default_collate, **torch_options),
        "webdataset, bytes": peer(peers.web_dataset, tars, as_bytes, list, **torch_options),
        "Grain": peer(peers.grain_processes, tars, "bin", as_array, np.stack, workers=WORKERS, **options),
        "spdl, threads": lambda: spdl(tars, "bin", as_bytes, list, **options),
    }
    bench.loaders("blobs of 1 MB", "MB", makers)


def dicts(bench: Bench) -> None:
    """Compare batches of 256 dicts from a shuffle buffer of 10,000."""
    texts, columns = prepare(bench.data, "json"), prepare(bench.data, "parquet")
    options: dict[str, Any] = {"size": JSON_BATCH, "buffer": JSON_BUFFER}
    torch_options: dict[str, Any] = {"size": JSON_BATCH, "num_workers": WORKERS}
    buffered, records = {**torch_options, "buffer": JSON_BUFFER}, few_records()
    makers: Makers = {
        "savable_pipeline": lambda: our_loader(texts, FunctionEncoder(decode_json, list), **options),
        "savable_pipeline, Sample.json": lambda: our_loader(texts, FunctionEncoder(ours.sample_json, list), **options),
        "webdataset": peer(peers.web_dataset, texts, decode_json, list, **buffered),
        "HF datasets over parquet": peer(peers.hf_batches, columns, peers.unchanged, **buffered),
        "Grain": peer(peers.grain_processes, texts, "json", decode_json, list, size=JSON_BATCH, workers=WORKERS),
        "spdl, threads": lambda: spdl(texts, "json", decode_json, list, JSON_BATCH),
        "torch DataLoader, in memory": peer(peers.torch_loader, records, decode_json, list, **torch_options),
    }
    bench.loaders("JSON of 1 kB as dicts", "sample", makers)


def text_bytes(sample: Mapping[str, bytes]) -> Any:
    """Return the bytes of a sample's text."""
    return np.frombuffer(json.loads(sample["json"])["text"].encode(), np.uint8)


def pad(items: list[Any]) -> Any:
    """Pad texts to one array."""
    lengths = np.array([len(item) for item in items])
    texts = np.zeros((len(items), lengths.max()), np.uint8)
    for row, item in zip(texts, items, strict=True):
        row[: len(item)] = item
    return {"texts": texts, "lengths": lengths}


def count_rows(batch: Any) -> float:
    """Count the texts of a batch of `pad`."""
    return len(batch["lengths"])


def arrays(bench: Bench) -> None:
    """Compare two workers with none, on texts padded to one array."""
    make = partial(loader, prepare(bench.data, "json"), FunctionEncoder(text_bytes, pad), count_rows)
    options = {"size": JSON_BATCH, "buffer": JSON_BUFFER}
    makers: Makers = {f"{n} workers": partial(make, workers=n, **options) for n in (WORKERS, 0)}
    bench.loaders("JSON of 1 kB as padded bytes", "sample", makers)


def images(name: str, decode: Decode, bench: Bench) -> None:
    """Compare batches of 64 images with bare loops that decode and stack the same images in memory."""
    import torch
    from torch.utils.data import default_collate

    tars = prepare(bench.data, "images")
    records = records_of(tars, 64)
    options: dict[str, Any] = {"size": IMAGE_BATCH, "num_workers": WORKERS}
    makers: Makers = {
        "savable_pipeline": lambda: our_loader(tars, FunctionEncoder(decode), size=IMAGE_BATCH),
        "two bare loops": lambda: Loader(bare_loops(records, decode), float),
        "webdataset": peer(peers.web_dataset, tars, decode, default_collate, **options),
        "spdl, threads": lambda: spdl(tars, "jpg", decode, torch.stack, IMAGE_BATCH),
        "torch DataLoader, in memory": peer(peers.torch_loader, records, decode, default_collate, **options),
    }
    bench.loaders(f"images decoded by {name}", "image", makers)


def bare_loops(records: list[dict[str, bytes]], decode: Decode) -> Iterator[int]:
    """Run two processes that decode and stack batches. Yield only the batch sizes, so nothing is transported."""
    import torch

    context = multiprocessing.get_context("fork")
    batch_sizes = context.Queue(2 * WORKERS)

    def stack() -> None:
        torch.set_num_threads(1)
        endless = cycle(records)
        while True:
            batch_sizes.put(len(torch.stack([decode(record) for record in islice(endless, IMAGE_BATCH)])))

    for _ in range(WORKERS):
        context.Process(target=stack, daemon=True).start()
    while True:
        yield batch_sizes.get()


def decode_without_gil(sample: Mapping[str, bytes]) -> Any:
    """Decode a JPEG to uint8 (3, 224, 224) with functions that release the GIL."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    image = decode_jpeg(torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8), ImageReadMode.RGB)
    return functional.resize(image, [224, 224], antialias=True)


def with_busy_trainer(use: Callable[[Any], float], batch: Any) -> float:
    """Use a batch, and then compute in Python for 5 ms, which keeps the GIL busy."""
    units, until = use(batch), time.perf_counter() + 0.005
    while time.perf_counter() < until:
        pass
    return units


def threads(bench: Bench) -> None:
    """Compare worker threads with worker processes, for idle and busy trainers."""
    import torch

    torch.set_num_threads(1)
    blobs, images = prepare(bench.data, "blobs"), prepare(bench.data, "images")
    kinds: dict[str, tuple[Path, str, Any, Any, int, Callable[[Any], float]]] = {
        "blobs of 1 MB as bytes": (blobs, "bin", as_bytes, list, BLOB_BATCH, read_bytes),
        "JPEG, decode_jpeg": (images, "jpg", decode_without_gil, None, IMAGE_BATCH, len),
    }
    for name, (tars, part, decode, collate, size, use_batch) in kinds.items():
        for trainer, use in (("", use_batch), (", a busy trainer", partial(with_busy_trainer, use_batch))):
            encoder = FunctionEncoder(decode, collate)
            makers: Makers = {
                kind: partial(our_loader, tars, encoder, use, size=size, method=method)
                for kind, method in (("threads", "thread"), ("processes", "fork"))
            }
            makers["spdl, threads"] = partial(spdl, tars, part, decode, collate or torch.stack, size, use)
            bench.loaders(f"{name}{trainer}", "unit", makers)


def scaling(bench: Bench) -> None:
    """Compare numbers of workers on batches that take 40 ms of sleep each."""
    tars, encoder = prepare(bench.data, "json"), FunctionEncoder(ours.constant_item, ours.sleep_40_ms)
    for lanes, worker_counts in [(96, (1, 3, 5, 7)), (6, (1, 4)), (12, (1, 8))]:
        makers: Makers = {
            f"{n} workers": partial(loader, tars, encoder, partial(units_per_worker, n), size=1, lanes=lanes, workers=n)
            for n in worker_counts
        }
        bench.loaders(f"{lanes} lanes, an encoder that sleeps", unit="batch and worker", makers=makers)


def units_per_worker(workers: int, batch: Any) -> float:
    """Count a batch as 1/N units with N workers, so that perfect scaling takes the same time per unit."""
    return 1 / workers


def cost(bench: Bench) -> None:
    """Print the CPU time of a batch besides its building: saving its state, and the trainer's thread."""
    tars = prepare(bench.data, "json")
    costs = state_costs(tars)
    console.print("CPU time of a batch's state, one lane with a buffer of 10,000:")
    console.print(", ".join(f"{name} {us:.0f} µs" for name, us in costs.items()), f"all {sum(costs.values()):.0f}")
    run = partial(pipeline, str(tars), FunctionEncoder(ours.constant_item, ours.large_batch), size=1)
    with sp.SavableLoader(run, seed=1, num_workers=WORKERS) as running:
        batches, batch_s = iter(running), []
        for _ in range(10):
            before = time.thread_time()
            for _ in range(100):
                next(batches)
            batch_s.append((time.thread_time() - before) / 100)
    console.print(f"trainer's thread, a batch of 9.6 MB: {statistics.median(batch_s[1:]) * 1e6:.0f} µs")


def state_costs(tars: Path, repeats: int = 300) -> dict[str, float]:
    """Measure the CPU microseconds of each step from saving a state to its arrival in the trainer.

    The last three steps transport a delivery with the state and no batch.
    """
    stage = pipeline(str(tars), FunctionEncoder(ours.constant_item, list), sp.Lane(), size=256, buffer=10_000)
    writer, reader = SegmentWriter(), SegmentReader()
    rows = []
    for _ in range(repeats):
        next(stage)
        times = [time.thread_time_ns()]
        stages = stage.save_state()
        times.append(time.thread_time_ns())
        state = pack_state(LaneState(0, 0, 1, True, stages))
        times.append(time.thread_time_ns())
        pieces, _ = wire.dumps(Delivery(None, state, True))
        times.append(time.thread_time_ns())
        written = writer.write([], pieces)
        times.append(time.thread_time_ns())
        if written.fd is not None:
            reader.add(written.segment, written.fd)
        wire.loads(reader.read(written.segment, written.spans)[0], [])
        times.append(time.thread_time_ns())
        rows.append([after - before for before, after in pairwise(times)])
    names = ("save_state", "pack", "pickle", "into shared memory", "out of it")
    return {name: statistics.median(column) / 1000 for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def nodes(bench: Bench) -> None:
    """Compare the transport of large and small batches through shared memory and through TCP on this machine."""
    tars = str(prepare(bench.data, "json"))
    key_file = bench.data / "nodes.key"
    key_file.touch(mode=0o600)
    key_file.write_text("a key for this benchmark alone")
    command = [sys.executable, "-c", "from savable_pipeline.tools.cli.main import app; app()", "serve"]
    options = ["--listen=127.0.0.1:0", f"--key-file={key_file}", f"--workers={WORKERS}"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as agent:
        address = str(agent.stdout and agent.stdout.readline().decode().split()[-1])
        ways = {
            "local": sp.Workers(WORKERS, start_method="forkserver"),
            "agent": sp.SocketWorkers([address], key_file=key_file),
            "agent, trusted network": sp.SocketWorkers([address], key_file=key_file, trusted_network=True),
        }
        for size, collate, count in (("9.6 MB", ours.large_batch, 200), ("10 kB", ours.small_batch, 5000)):
            run = partial(pipeline, tars, FunctionEncoder(ours.constant_item, collate), size=1)
            for name, workers in [*ways.items()] * 3:
                with sp.SavableLoader(run, seed=1, workers=workers) as running:
                    trainer, total, wall = times_per_batch(iter(running), count)
                console.print(f"{size} {name}: trainer {trainer:.2f}, all {total:.2f}, wall {wall:.2f} ms a batch")
        agent.terminate()


def times_per_batch(batches: Iterator[Any], count: int) -> list[float]:
    """Measure milliseconds per batch: CPU time of this process, with descendants, and wall time."""
    for _ in range(count // 5):
        next(batches)
    before = time.process_time(), cpu_seconds(os.getpid()), time.perf_counter()
    for _ in range(count):
        next(batches)
    after = time.process_time(), cpu_seconds(os.getpid()), time.perf_counter()
    return [(end - start) / count * 1e3 for start, end in zip(before, after, strict=True)]


def first(bench: Bench) -> None:
    """Compare start methods by the time to the first batch, and with two bare interpreters."""
    encoder = FunctionEncoder(decode_json, ours.imported_modules)
    run = partial(pipeline, str(prepare(bench.data, "json")), encoder, size=256, buffer=10_000)
    modules: dict[str, list[str]] = {}

    def start_workers(method: str) -> Way:
        def way() -> Any:
            with sp.SavableLoader(run, seed=1, num_workers=2, workers=sp.Workers(start_method=method)) as running:
                time.sleep(1.0)  # a trainer builds its model in this time
                batches = iter(running)
                return called(lambda: modules.update({method: next(batches)}))()

        return way

    ways = {method: start_workers(method) for method in ("fork", "forkserver", "spawn")}
    bench.compare("start of two workers", "first batch", {**ways, "two interpreters": called(two_interpreters)})
    large = [
        name for name in ("torch", "torchvision", "webdataset", "rich", "PIL", "numpy") if name in modules["spawn"]
    ]
    console.print(f"a spawned worker has imported {len(modules['spawn'])} modules; of the large ones: {large}")


def two_interpreters() -> None:
    """Start two bare interpreters side by side that import this module, and wait for them."""
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import workers"]
    processes = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": search}) for _ in range(2)]
    for process in processes:
        process.wait()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # no one writes to it
    measures: dict[str, Callable[[Bench], None]] = {
        "transport": transport, "blobs": blobs, "dicts": dicts, "arrays": arrays,
        "pil": partial(images, "PIL", peers.crop_by_pillow),
        "torchvision": partial(images, "torchvision", peers.crop_by_torchvision),
        "threads": threads, "scaling": scaling, "cost": cost, "nodes": nodes, "first": first,
    }  # fmt: skip
    main(__doc__, measures)
