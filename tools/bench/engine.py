"""Measures what two workers deliver, against the peers and against a bare loop, interleaved in one run.

    python tools/bench/engine.py              all of it, about eight minutes
    python tools/bench/engine.py transport    batches of 9.6 MB that the worker only fills; the trainer reads every byte
    python tools/bench/engine.py blobs        1 MB blobs from tars; the trainer reads every byte
    python tools/bench/engine.py dicts        JSON of 1 kB as batches of dicts
    python tools/bench/engine.py arrays       the same as padded arrays of bytes, against no workers
    python tools/bench/engine.py pil          JPEG of 256 px, decoded by PIL, RandomResizedCrop(224), flip
    python tools/bench/engine.py torchvision  the same, decoded by torchvision

Peers that are not installed are left out with a word; `pip install 'savable_pipeline[bench]'` brings them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from data import BLOB_BYTES, FOLDER, console, json_record, prepared
from pipelines import Collate, Decode, FunctionEncoder, decode_json, filled, nothing, own_json, pipeline
from rounds import Contender, Loader, compete
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline.core.global_rng import seeder

WORKERS = 2
JSON_BATCH, JSON_BUFFER, IMAGE_BATCH, BLOB_BATCH = 256, 10_000, 64, 8
SHAPE = (64, 3, 224, 224)


def ours(
    folder: Path, encoder: sp.TaskEncoder, use: Callable[[Any], float], *, size: int, buffer: int = 0,
    workers: int = WORKERS,
) -> Loader:  # fmt: skip
    loader = sp.SavableLoader(partial(pipeline, str(folder), encoder, size, buffer), seed=1, num_workers=workers)
    return Loader(iter(loader), use, loader.close)


# Transport.


def read_bytes(batch: Any) -> float:
    """Read every byte of a tensor, an array, bytes, or a list of them; gives how many megabytes they are."""
    if isinstance(batch, list):
        return sum(map(read_bytes, batch))
    whole: Any = batch.numpy() if isinstance(batch, torch.Tensor) else batch
    raw = memoryview(whole).cast("B")
    xxh3_64_intdigest(raw)
    return len(raw) / 1e6


class Filled(IterableDataset[Any]):
    """Batches for torch's DataLoader that are only filled."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.full(SHAPE, 7, dtype=torch.uint8)


def transport(folder: Path) -> dict[str, Any]:
    """Batches of 9.6 MB made of nothing."""
    texts = prepared(folder, "json")
    makers: dict[str, Callable[[], Contender]] = {
        "savable_pipeline": lambda: ours(texts, FunctionEncoder(nothing, filled), read_bytes, size=1),
        "torch DataLoader": lambda: Loader(iter(DataLoader(Filled(), None, num_workers=WORKERS)), read_bytes),
    }
    return compete("batches of 64×3×224×224 uint8, two workers", "MB", makers)


def as_bytes(sample: Mapping[str, bytes]) -> bytes:
    return sample["bin"]


def in_place(sample: Any) -> Any:
    """Read to where the batch is made; no peer has the like."""
    return torch.from_numpy(sample.array("bin"))


def as_array(sample: Mapping[str, bytes]) -> Any:
    return np.frombuffer(sample["bin"], np.uint8)


def as_tensor(sample: Mapping[str, bytes]) -> Any:
    return torch.from_numpy(np.frombuffer(sample["bin"], np.uint8))


def blobs(folder: Path) -> dict[str, Any]:
    """Blobs of 1 MB in batches of 8: as lists of bytes, and stacked, whichever suits a peer better."""
    tars = prepared(folder, "blobs")
    both = {"size": BLOB_BATCH, "buffer": 0, "workers": WORKERS}

    def loaded(make: Callable[..., Any], *arguments: Any, **settings: int) -> Callable[[], Contender]:
        return lambda: Loader(iter(make(tars, *arguments, **settings)), read_bytes)

    makers: dict[str, Callable[[], Contender]] = {
        "savable_pipeline, in place": lambda: ours(tars, FunctionEncoder(in_place, None), read_bytes, size=BLOB_BATCH),
        "savable_pipeline, stacked": lambda: ours(tars, FunctionEncoder(as_tensor, None), read_bytes, size=BLOB_BATCH),
        "savable_pipeline, bytes": lambda: ours(tars, FunctionEncoder(as_bytes, list), read_bytes, size=BLOB_BATCH),
        "webdataset, stacked": loaded(peers.web_dataset, as_tensor, default_collate, **both),
        "webdataset, bytes": loaded(peers.web_dataset, as_bytes, list, **both),
        "StatefulDataLoader, stacked": loaded(peers.stateful_dataloader, as_tensor, default_collate, **both),
        "Grain": loaded(peers.grain_processes, "bin", as_array, np.stack, size=BLOB_BATCH, workers=WORKERS),
        "spdl, threads": lambda: threads(tars, "bin", as_bytes, list, read_bytes, size=BLOB_BATCH),
    }
    return compete(f"blobs of {BLOB_BYTES // 1000:,} kB, two workers", "MB", makers)


def threads(
    folder: Path, part: str, decode: Decode, collate: Collate, use: Callable[[Any], float], *, size: int
) -> Loader:
    pool = peers.Threads(folder, part, decode, collate, size=size, threads=WORKERS)
    return Loader(iter(pool), use, pool.close)


# JSON.


def dicts(folder: Path) -> dict[str, Any]:
    """Batches of 256 dicts out of a shuffle buffer of 10,000."""
    texts, columns = prepared(folder, "json"), prepared(folder, "parquet")
    both = {"size": JSON_BATCH, "buffer": JSON_BUFFER, "workers": WORKERS}
    records = [{"json": json.dumps(json_record(i)).encode()} for i in range(20_000)]
    decode = decode_json

    def memory() -> Contender:
        return Loader(peers.in_memory(records, decode, list, size=JSON_BATCH, workers=WORKERS), len)

    makers: dict[str, Callable[[], Contender]] = {
        "savable_pipeline": lambda: ours(
            texts, FunctionEncoder(decode, list), len, size=JSON_BATCH, buffer=JSON_BUFFER
        ),
        "savable_pipeline, Sample.json": lambda: ours(
            texts, FunctionEncoder(own_json, list), len, size=JSON_BATCH, buffer=JSON_BUFFER
        ),
        "webdataset": lambda: Loader(peers.web_dataset(texts, decode, list, **both), len),
        "StatefulDataLoader": lambda: Loader(peers.stateful_dataloader(texts, decode, list, **both), len),
        "HF datasets over parquet": lambda: Loader(peers.hf_datasets(columns, **both), len),
        "Grain": lambda: Loader(
            peers.grain_processes(texts, "json", decode, list, size=JSON_BATCH, workers=WORKERS), len
        ),
        "spdl, threads": lambda: threads(texts, "json", decode, list, len, size=JSON_BATCH),
        "torch DataLoader, in memory": memory,
    }
    return compete("JSON of 1 kB as dicts, two workers", "sample", makers)


def as_letters(sample: Mapping[str, bytes]) -> Any:
    return np.frombuffer(json.loads(sample["json"])["text"].encode(), np.uint8)


def pad(items: list[Any]) -> Any:
    lengths = np.array([len(item) for item in items])
    letters = np.zeros((len(items), lengths.max()), np.uint8)
    for row, item in zip(letters, items, strict=True):
        row[: len(item)] = item
    return {"letters": letters, "lengths": lengths}


def arrays(folder: Path) -> dict[str, Any]:
    """The same as bytes padded into one array, with two workers and with none."""
    texts = prepared(folder, "json")
    encoder = FunctionEncoder(as_letters, pad)

    def made(workers: int) -> Callable[[], Contender]:
        return lambda: ours(texts, encoder, _rows, size=JSON_BATCH, buffer=JSON_BUFFER, workers=workers)

    return compete("JSON of 1 kB as padded bytes", "sample", {"two workers": made(WORKERS), "no workers": made(0)})


def _rows(batch: Any) -> float:
    return len(batch["lengths"])


# Images.

_crop = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])


def by_pil(sample: Mapping[str, bytes]) -> Any:
    from io import BytesIO

    from PIL import Image

    return functional.pil_to_tensor(_crop(Image.open(BytesIO(sample["jpg"])).convert("RGB")))


def by_torchvision(sample: Mapping[str, bytes]) -> Any:
    raw = torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8)
    return _crop(decode_jpeg(raw, ImageReadMode.RGB))


class BareLoops:
    """Two processes that decode bytes in memory, seed as we do for each, and stack batches that no one gets."""

    def __init__(self, records: list[dict[str, bytes]], decode: Decode) -> None:
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(WORKERS)]
        self._ends = [ours for ours, _ in pairs]
        arguments = [(theirs, records, decode) for _, theirs in pairs]
        self._processes = [context.Process(target=bare_loop, args=given, daemon=True) for given in arguments]
        for process in self._processes:
            process.start()

    def run(self, seconds: float) -> tuple[float, float]:
        """Have both go on."""
        for end in self._ends:
            end.send(seconds)
        told = [end.recv() for end in self._ends]
        images = sum(done for done, _ in told)
        return images, images / sum(done / took for done, took in told)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()


def bare_loop(orders: Any, records: list[dict[str, bytes]], decode: Decode) -> None:
    torch.set_num_threads(1)
    seed = seeder(True)
    assert seed is not None
    at = 0
    while True:
        seconds, done, start = orders.recv(), 0, time.perf_counter()
        while (took := time.perf_counter() - start) < seconds:
            items = []
            for _ in range(IMAGE_BATCH):
                seed(xxh3_64_intdigest(at.to_bytes(8, "little")))
                items.append(decode(records[at % len(records)]))
                at += 1
            torch.stack(items)
            done += IMAGE_BATCH
        orders.send((done, took))


def images(name: str, decode: Decode, folder: Path) -> dict[str, Any]:
    """Batches of 64 images; beside the bare loops, how much of their rate a loader reaches."""
    tars = prepared(folder, "images")
    samples = sp.TarShardReader(str(tars), sp.Lane())
    records = [{"jpg": next(samples)["jpg"]} for _ in range(1000)]
    both = {"size": IMAGE_BATCH, "workers": WORKERS}

    makers: dict[str, Callable[[], Contender]] = {
        "savable_pipeline": lambda: ours(tars, FunctionEncoder(decode, None, seeded=True), len, size=IMAGE_BATCH),
        "two bare loops": lambda: BareLoops(records, decode),
        "webdataset": lambda: Loader(peers.web_dataset(tars, decode, default_collate, buffer=0, **both), len),
        "spdl, threads": lambda: threads(tars, "jpg", decode, torch.stack, len, size=IMAGE_BATCH),
        "torch DataLoader, in memory": lambda: Loader(peers.in_memory(records, decode, default_collate, **both), len),
    }
    return compete(f"images decoded by {name}, two workers", "image", makers, seconds=3.0)


def main() -> None:
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {
        "transport": transport, "blobs": blobs, "dicts": dicts, "arrays": arrays, "pil": partial(images, "PIL", by_pil),
        "torchvision": partial(images, "torchvision", by_torchvision),
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--data", type=Path, default=FOLDER)
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # no one writes to it
    console.print(f"{os.cpu_count()} processors, Python {sys.version.split()[0]}, torch {torch.__version__}")
    numbers = {name: measures[name](args.data) for name in args.what or measures}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
