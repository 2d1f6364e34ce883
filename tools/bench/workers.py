"""What workers deliver beside peers and bare loops, and what they cost beside their work.

    python tools/bench/workers.py transport      batches of 9.6 MB that are only filled; the trainer reads every byte
    python tools/bench/workers.py blobs          1 MB blobs from tars; the trainer reads every byte
    python tools/bench/workers.py dicts          JSON of 1 kB as batches of dicts
    python tools/bench/workers.py arrays         the same as padded arrays of bytes, against no workers
    python tools/bench/workers.py pil            JPEG of 256 px, decoded by PIL, a random crop of 224, flip
    python tools/bench/workers.py torchvision    the same, decoded by torchvision
    python tools/bench/workers.py threads        two threads, processes and spdl's: blobs, and JPEG decoded without
                                                 Python's lock, by an idle trainer and by a busy one
    python tools/bench/workers.py scaling        N workers against one, on lanes that N does and does not divide
    python tools/bench/workers.py cost           processor time of state a batch, and of the trainer's thread a batch
    python tools/bench/workers.py nodes          two workers of this machine, and two of an agent on it,
                                                 with and without a code over the bodies of batches
    python tools/bench/workers.py first          seconds from `iter()` to the first batch, by start method

Two workers, unless it says otherwise. This module imports no torch, since spawned workers import it. Without a word,
all is measured.
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
import peers
from data import few_records, prepared, records_of
from ours import FunctionEncoder, filled, imported, loader, nothing, own_json, pipeline, slept, small_batch
from peers import Collate, Decode, decode_json
from rounds import Bench, Loader, Way, called, console, main, processor_s
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.state.lane_state import LaneState, pack_state
from savable_pipeline.run.transport import batch_pickle as wire
from savable_pipeline.run.transport.segments import SegmentReader, SegmentWriter

WORKERS = 2
JSON_BATCH, JSON_BUFFER, IMAGE_BATCH, BLOB_BATCH = 256, 10_000, 64, 8
Makers = dict[str, Callable[[], Loader]]
ours = partial(loader, workers=WORKERS)


def peer(make: Callable[..., Any], *words: Any, use: Callable[[Any], float] = len, **how: Any) -> Callable[[], Loader]:
    """A loader with worker processes."""
    return lambda: Loader(iter(make(*words, **how)), use, warm=2 * how.get("buffer", 0))


def spdl(
    folder: Path, part: str, decode: Decode, collate: Collate, size: int, use: Callable[[Any], float] = len
) -> Loader:
    """Threads of one process."""
    pool = peers.spdl_threads(folder, part, decode, collate, size=size, threads=WORKERS)
    return Loader(iter(pool), use, pool.stop)


# Bytes.


def read_bytes(batch: Any) -> float:
    """Read every byte of a tensor, an array, bytes, or a list of them; gives how many megabytes they are."""
    if isinstance(batch, list):
        return sum(map(read_bytes, batch))
    whole: Any = batch.numpy() if hasattr(batch, "numpy") else batch
    raw = memoryview(whole).cast("B")
    xxh3_64_intdigest(raw)
    return len(raw) / 1e6


def transport(bench: Bench) -> None:
    """Batches of 9.6 MB made of nothing."""
    from torch.utils.data import DataLoader

    def torchs() -> Loader:
        return Loader(iter(DataLoader(Filled(), None, num_workers=WORKERS)), read_bytes)  # type: ignore[arg-type]

    texts = prepared(bench.data, "json")
    makers: Makers = {
        "savable_pipeline": lambda: ours(texts, FunctionEncoder(nothing, filled), read_bytes, size=1),
        "torch DataLoader": torchs,
    }
    bench.loaders("batches of 64×3×224×224 uint8", "MB", makers)


class Filled:
    """Batches for torch's DataLoader that are only filled."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((64, 3, 224, 224), 7, dtype=torch.uint8)


def as_bytes(sample: Mapping[str, bytes]) -> bytes:
    """The blob."""
    return sample["bin"]


def in_place(sample: Any) -> Any:
    """Read to where the batch is made; no peer has the like."""
    import torch

    return torch.from_numpy(sample.array("bin"))


def as_array(sample: Mapping[str, bytes]) -> Any:
    """NumPy's view of it."""
    return np.frombuffer(sample["bin"], np.uint8)


def as_tensor(sample: Mapping[str, bytes]) -> Any:
    """torch's view of it."""
    import torch

    return torch.from_numpy(as_array(sample))


def blobs(bench: Bench) -> None:
    """Blobs of 1 MB in batches of 8: as lists of bytes, and stacked, whichever suits a peer better."""
    from torch.utils.data import default_collate

    tars = prepared(bench.data, "blobs")
    how: dict[str, Any] = {"size": BLOB_BATCH, "use": read_bytes}
    torchs = {**how, "num_workers": WORKERS}
    makers: Makers = {
        "savable_pipeline, in place": lambda: ours(tars, FunctionEncoder(in_place), **how),
        "savable_pipeline, stacked": lambda: ours(tars, FunctionEncoder(as_tensor), **how),
        "savable_pipeline, bytes": lambda: ours(tars, FunctionEncoder(as_bytes, list), **how),
        "webdataset, stacked": peer(peers.web_dataset, tars, as_tensor, default_collate, **torchs),
        "webdataset, bytes": peer(peers.web_dataset, tars, as_bytes, list, **torchs),
        "Grain": peer(peers.grain_processes, tars, "bin", as_array, np.stack, workers=WORKERS, **how),
        "spdl, threads": lambda: spdl(tars, "bin", as_bytes, list, **how),
    }
    bench.loaders("blobs of 1 MB", "MB", makers)


# JSON.


def dicts(bench: Bench) -> None:
    """Batches of 256 dicts out of a shuffle buffer of 10,000."""
    texts, columns = prepared(bench.data, "json"), prepared(bench.data, "parquet")
    how: dict[str, Any] = {"size": JSON_BATCH, "buffer": JSON_BUFFER}
    torchs: dict[str, Any] = {"size": JSON_BATCH, "num_workers": WORKERS}
    records = few_records()
    makers: Makers = {
        "savable_pipeline": lambda: ours(texts, FunctionEncoder(decode_json, list), **how),
        "savable_pipeline, Sample.json": lambda: ours(texts, FunctionEncoder(own_json, list), **how),
        "webdataset": peer(peers.web_dataset, texts, decode_json, list, buffer=JSON_BUFFER, **torchs),
        "HF datasets over parquet": peer(peers.hf_batches, columns, peers.itself, buffer=JSON_BUFFER, **torchs),
        "Grain": peer(peers.grain_processes, texts, "json", decode_json, list, size=JSON_BATCH, workers=WORKERS),
        "spdl, threads": lambda: spdl(texts, "json", decode_json, list, JSON_BATCH),
        "torch DataLoader, in memory": peer(peers.torch_loader, records, decode_json, list, **torchs),
    }
    bench.loaders("JSON of 1 kB as dicts", "sample", makers)


def as_letters(sample: Mapping[str, bytes]) -> Any:
    """The text's bytes."""
    return np.frombuffer(json.loads(sample["json"])["text"].encode(), np.uint8)


def pad(items: list[Any]) -> Any:
    """One array of them."""
    lengths = np.array([len(item) for item in items])
    letters = np.zeros((len(items), lengths.max()), np.uint8)
    for row, item in zip(letters, items, strict=True):
        row[: len(item)] = item
    return {"letters": letters, "lengths": lengths}


def rows_of(batch: Any) -> float:
    """The samples of such a batch."""
    return len(batch["lengths"])


def arrays(bench: Bench) -> None:
    """The same as bytes padded into one array, with two workers and with none."""
    make = partial(loader, prepared(bench.data, "json"), FunctionEncoder(as_letters, pad), rows_of)
    how = {"size": JSON_BATCH, "buffer": JSON_BUFFER}
    makers: Makers = {f"{n} workers": partial(make, workers=n, **how) for n in (WORKERS, 0)}
    bench.loaders("JSON of 1 kB as padded bytes", "sample", makers)


# Images.


def images(name: str, decode: Decode, bench: Bench) -> None:
    """Batches of 64 images; beside the bare loops, how much of their rate a loader reaches."""
    import torch
    from torch.utils.data import default_collate

    tars = prepared(bench.data, "images")
    records = records_of(tars, 64)
    torchs: dict[str, Any] = {"size": IMAGE_BATCH, "num_workers": WORKERS}
    makers: Makers = {
        "savable_pipeline": lambda: ours(tars, FunctionEncoder(decode), size=IMAGE_BATCH),
        "two bare loops": lambda: Loader(bare_loops(records, decode), float),
        "webdataset": peer(peers.web_dataset, tars, decode, default_collate, **torchs),
        "spdl, threads": lambda: spdl(tars, "jpg", decode, torch.stack, IMAGE_BATCH),
        "torch DataLoader, in memory": peer(peers.torch_loader, records, decode, default_collate, **torchs),
    }
    bench.loaders(f"images decoded by {name}", "image", makers)


def bare_loops(records: list[dict[str, bytes]], decode: Decode) -> Iterator[int]:
    """Two processes that decode bytes in memory and stack batches that no one gets."""
    import torch

    context = multiprocessing.get_context("fork")
    done = context.Queue(2 * WORKERS)

    def stack() -> None:
        torch.set_num_threads(1)
        records_again = cycle(records)
        while True:
            done.put(len(torch.stack([decode(record) for record in islice(records_again, IMAGE_BATCH)])))

    for _ in range(WORKERS):
        context.Process(target=stack, daemon=True).start()
    while True:
        yield done.get()


# Threads.


def decoded(sample: Mapping[str, bytes]) -> Any:
    """A JPEG as uint8 (3, 224, 224), by code that lets go of Python's lock."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    image = decode_jpeg(torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8), ImageReadMode.RGB)
    return functional.resize(image, [224, 224], antialias=True)


def busily(use: Callable[[Any], float], batch: Any) -> float:
    """The same by a trainer that computes in Python for 5 ms a batch."""
    found, until = use(batch), time.perf_counter() + 0.005
    while time.perf_counter() < until:
        pass
    return found


def threads(bench: Bench) -> None:
    """Workers of each kind in a process of their own, for its memory too."""
    import torch

    torch.set_num_threads(1)
    blobs, images = prepared(bench.data, "blobs"), prepared(bench.data, "images")
    kinds: dict[str, tuple[Path, str, Any, Any, int, Callable[[Any], float]]] = {
        "blobs of 1 MB as bytes": (blobs, "bin", as_bytes, list, BLOB_BATCH, read_bytes),
        "JPEG, decode_jpeg": (images, "jpg", decoded, None, IMAGE_BATCH, len),
    }
    for name, (tars, part, decode, collate, size, plain) in kinds.items():
        for trainer, use in (("", plain), (", a busy trainer", partial(busily, plain))):
            encoder = FunctionEncoder(decode, collate)
            makers: Makers = {
                kind: partial(ours, tars, encoder, use, size=size, method=method)
                for kind, method in (("threads", "thread"), ("processes", "fork"))
            }
            makers["spdl, threads"] = partial(spdl, tars, part, decode, collate or torch.stack, size, use)
            bench.loaders(f"{name}{trainer}", "unit", makers)


# What they cost.


def scaling(bench: Bench) -> None:
    """Batches of an encoder that sleeps 40 ms for each."""
    tars, encoder = prepared(bench.data, "json"), FunctionEncoder(nothing, slept)
    for lanes, several in [(96, (1, 3, 5, 7)), (6, (1, 4)), (12, (1, 8))]:
        makers: Makers = {
            f"{n} workers": partial(loader, tars, encoder, partial(share_of, n), size=1, lanes=lanes, workers=n)
            for n in several
        }
        bench.loaders(f"{lanes} lanes, an encoder that sleeps", "batch and worker", makers)


def share_of(workers: int, batch: Any) -> float:
    """A batch, of the work of so many."""
    return 1 / workers


def cost(bench: Bench) -> None:
    """What a batch costs beside making it."""
    tars = prepared(bench.data, "json")
    parts = state_parts(tars)
    console.print("processor time of state, a batch, one lane with a buffer of 10,000:")
    console.print(", ".join(f"{name} {part:.0f} µs" for name, part in parts.items()), f"all {sum(parts.values()):.0f}")
    run = partial(pipeline, str(tars), FunctionEncoder(nothing, filled), 1, 0)
    with sp.SavableLoader(run, seed=1, num_workers=WORKERS) as running:
        batches, taken = iter(running), []
        for _ in range(10):
            before = time.thread_time()
            for _ in range(100):
                next(batches)
            taken.append((time.thread_time() - before) / 100)
    console.print(f"trainer's thread, a batch of 9.6 MB: {statistics.median(taken[1:]) * 1e6:.0f} µs")


def state_parts(tars: Path, repeats: int = 300) -> dict[str, float]:
    """Processor microseconds of a batch's state; the last three for a delivery of nothing else."""
    stage = pipeline(str(tars), FunctionEncoder(nothing, list), 256, 10_000, sp.Lane())
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
    """Batches of 9.6 MB and of 10 kB, through shared memory and through TCP on this machine."""
    tars = str(prepared(bench.data, "json"))
    key_file = bench.data / "nodes.key"
    key_file.touch(mode=0o600)
    key_file.write_text("measured here, only")
    command = [sys.executable, "-c", "from savable_pipeline.tools.cli.main import app; app()", "serve"]
    options = ["--listen=127.0.0.1:0", f"--key-file={key_file}", f"--workers={WORKERS}"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as agent:
        address = str(agent.stdout and agent.stdout.readline().decode().split()[-1])
        ways = {
            "local": sp.Workers(WORKERS, start_method="forkserver"),
            "agent": sp.SocketWorkers([address], key_file=key_file),
            "agent, trusted network": sp.SocketWorkers([address], key_file=key_file, trusted_network=True),
        }
        for size, collate, count in (("9.6 MB", filled, 200), ("10 kB", small_batch, 5000)):
            run = partial(pipeline, tars, FunctionEncoder(nothing, collate), 1, 0)
            for name, workers in [*ways.items()] * 3:
                with sp.SavableLoader(run, seed=1, workers=workers) as running:
                    spent = processor_times(iter(running), count)
                console.print(
                    f"{size} {name}: trainer {spent[0]:.2f}, all {spent[1]:.2f}, wall {spent[2]:.2f} ms a batch"
                )
        agent.terminate()


def processor_times(batches: Iterator[Any], count: int) -> list[float]:
    """Milliseconds a batch: of this process, of all below it too, and by wall."""
    for _ in range(count // 5):
        next(batches)
    before = time.process_time(), processor_s(os.getpid()), time.perf_counter()
    for _ in range(count):
        next(batches)
    after = time.process_time(), processor_s(os.getpid()), time.perf_counter()
    return [(then - now) / count * 1e3 for now, then in zip(before, after, strict=True)]


def first(bench: Bench) -> None:
    """Two workers' first batch of text, beside two bare interpreters that import the same."""
    run = partial(pipeline, str(prepared(bench.data, "json")), FunctionEncoder(decode_json, imported), 256, 10_000)
    modules: dict[str, list[str]] = {}

    def started(method: str) -> Way:
        def way() -> Any:
            with sp.SavableLoader(run, seed=1, num_workers=2, workers=sp.Workers(start_method=method)) as running:
                time.sleep(1.0)  # as a model is built meanwhile
                batches = iter(running)
                return called(lambda: modules.update({method: next(batches)}))()

        return way

    ways = {method: started(method) for method in ("fork", "forkserver", "spawn")}
    bench.compare("start of two workers", "first batch", {**ways, "two interpreters": called(two_interpreters)})
    large = [
        name for name in ("torch", "torchvision", "webdataset", "rich", "PIL", "numpy") if name in modules["spawn"]
    ]
    console.print(f"a spawned worker has imported {len(modules['spawn'])} modules; of the large ones: {large}")


def two_interpreters() -> None:
    """Start two bare interpreters side by side that import this module, and wait for them."""
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import workers"]
    started = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": search}) for _ in range(2)]
    for process in started:
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
