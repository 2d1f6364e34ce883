"""Measure our loader without workers, its states and resumes, and reading from disk.

    python tools/bench/reading.py json      JSON of 1 kB, shuffle buffer of 10,000, batches of 256, no workers
    python tools/bench/reading.py short     JSON of 150 bytes with default settings, against a list in memory
    python tools/bench/reading.py state     size of a state of 10,000 buffered samples, and the time to save one
    python tools/bench/reading.py resume    seconds to the first batch after a resume, at 1 % and 95 % of an epoch
    python tools/bench/reading.py blobs     parts of 1 MB, against a bare os.pread loop into fresh memory
    python tools/bench/reading.py cold      JPEG of 25 kB, page cache dropped, against webdataset in file order

Without arguments it runs all of them. Put `--data` on a disk, because the cache of files in memory cannot be dropped.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peers
from data import RECORDS, few_records, prepare, short_record
from ours import FunctionEncoder, loader, pipeline, sample_json
from peers import decode_json
from rounds import Bench, Cost, Loader, Way, called, main

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders.captioning import CaptioningEncoder

BUFFER, BATCH = 10_000, 256


def long_json(bench: Bench) -> None:
    """Compare the loaders on JSON of 1 kB."""
    tars, parquet = prepare(bench.data, "json"), prepare(bench.data, "parquet")
    settings: dict[str, Any] = {"size": BATCH, "buffer": BUFFER}

    def ours(decode: Any) -> Callable[[], Loader]:
        return lambda: loader(tars, FunctionEncoder(decode, list), **settings)

    def peer(make: Callable[..., Iterator[Any]], *arguments: Any, **options: Any) -> Callable[[], Loader]:
        return lambda: Loader(make(*arguments, **settings, **options), warm=2 * BUFFER)

    makers = {
        "savable_pipeline, 96 lanes": ours(decode_json),
        "savable_pipeline, Sample.json": ours(sample_json),
        "bare json.loads loop": lambda: Loader(bare_loop()),
        "webdataset": peer(peers.web_dataset, tars, decode_json, list),
        "StatefulDataLoader": peer(peers.web_dataset, tars, decode_json, list, stateful=True),
        "HF datasets over parquet": peer(peers.hf_batches, parquet, peers.unchanged),
        "Megatron-Energon": peer(peers.energon, tars),
    }
    bench.loaders("JSON of 1 kB, no workers", "sample", makers)


def short_json(bench: Bench) -> None:
    """Compare default and tuned settings on short samples with torch's DataLoader over a list in memory."""
    folder, records = prepare(bench.data, "short-json"), few_records(short_record)

    def ours(function: Any, loader_options: dict[str, Any], **options: Any) -> Callable[[], Loader]:
        chain = sp.read(str(folder)).shuffle(BUFFER).map(function, **options).batch(BATCH)
        return lambda: Loader(iter(sp.SavableLoader(chain, seed=1, **loader_options)), warm=2 * BUFFER)

    ways = {
        "torch's DataLoader": lambda: Loader(peers.torch_loader(records, sample_id, None, size=BATCH)),
        "defaults": ours(sample_id, {}),
        "defaults, sample.json()": ours(lambda sample: sample.json()["id"], {}),
        "global_rng=False": ours(sample_id, {}, global_rng=False),
        "all, lanes=8": ours(lambda sample: sample.json()["id"], {"lanes": 8}, global_rng=False),
    }
    bench.loaders("JSON of 150 bytes, no workers", "sample", ways)


def sample_id(sample: Any) -> int:
    """Decode a JSON sample and return its id."""
    return decode_json(sample)["id"]  # type: ignore[no-any-return]


def bare_loop() -> Iterator[Any]:
    """Yield batches of `json.loads` over bytes in memory, an upper bound for all loaders."""
    records = [record["json"] for record in few_records()]
    while True:
        for start in range(0, len(records) - BATCH, BATCH):
            yield [json.loads(record) for record in records[start : start + BATCH]]


def json_pipeline(folder: Path) -> Callable[[sp.Lane], custom.Stage]:
    """Return a pipeline function: batches of 256 dicts from a shuffle buffer of 10,000."""
    return partial(pipeline, str(folder), FunctionEncoder(decode_json, list), size=BATCH, buffer=BUFFER)


def state(bench: Bench) -> None:
    """Measure the size of a loader's state, and the time of `state_dict()`.

    The loader's 96 lanes together buffer 10,000 sample IDs.
    """
    with sp.SavableLoader(json_pipeline(prepare(bench.data, "json")), seed=1) as running:
        for _ in range(200):
            next(running)
        size = sum(len(value) for value in running.state_dict().values() if isinstance(value, bytes))
        # `called` returns a `Way`, which measures the function
        save_100 = called(lambda: [running.state_dict() for _ in range(100)], units=100)
        bench.compare(f"10,000 sample IDs in 96 lanes: {size:,} bytes", "state", {"state_dict()": save_100})


def resume(bench: Bench) -> None:
    """Measure the time from a new loader with a state to its first batch, with two workers.

    Packed images have only 8 lanes, so that each lane has yielded a pack at 1 % of an epoch of 10,000 images. The
    first pack of a lane takes longer, because many images enter its open packs before one is full.
    """
    tars, images = prepare(bench.data, "json"), prepare(bench.data, "images")
    packed = partial(image_pipeline, str(images), 2_000)
    for name, run, steps, lanes in (
        ("text", json_pipeline(tars), RECORDS // BATCH, 96),
        ("packed images", packed, 10_000 // 11, 8),  # 11 images a pack
    ):
        ways: dict[str, Way] = {}
        with sp.SavableLoader(run, seed=1, lanes=lanes) as running:
            for step in range(1, steps * 95 // 100 + 1):
                next(running)
                if step in (steps // 100, steps * 95 // 100):
                    ways[f"step {step}"] = called(partial(first_batch, run, lanes, running.state_dict()))
        bench.compare(f"first batch after a resume, {name}, {steps} steps an epoch", "start", ways)


def image_pipeline(folder: str, buffer: int, lane: sp.Lane) -> custom.Stage:
    """Build a lane of packs of captioned images."""
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane), size=-(-buffer // lane.count))
    return sp.Batcher(sp.OnlinePacker(sp.Encode(samples, CaptioningEncoder(image_size=64)), max_length=128), size=1)


def first_batch(run: Callable[[sp.Lane], custom.Stage], lanes: int, saved: dict[str, Any]) -> None:
    """Resume from a state and build one batch."""
    with sp.SavableLoader(run, seed=1, lanes=lanes, num_workers=2) as running:
        running.load_state_dict(saved)
        next(running)


class Length(sp.TaskEncoder):
    """Encoder that reads the first part of a sample and returns its length."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return len(sample[next(iter(sample))])

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class Whole(Length):
    """Encoder that returns the part itself, so that each is read into its own memory."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample["bin"]


def blobs(bench: Bench) -> None:
    """Compare reading parts of 1 MB from the page cache with `os.pread`."""
    root = prepare(bench.data, "blobs")
    stage = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(root, sp.Lane(seed=1)), size=100), Whole())
    files = [os.open(path, os.O_RDONLY) for path in sorted(root.glob("*.tar"))[:13]]
    # Each of the 32 members of a tar has a header of 512 bytes and 1,000,000 bytes, padded to 1,000,448.
    offsets = [(file, 512 + row * (512 + 1_000_448)) for file in files for row in range(32)][:400]

    def ours() -> None:
        for _ in range(8):
            stage.take(50)

    def bare() -> None:
        parts = []
        for file, offset in offsets:
            parts.append(os.pread(file, 1_000_000, offset))
            if len(parts) == 50:  # as many as `ours` has in memory at once
                parts.clear()

    ours()
    bench.compare("parts of 1 MB, no workers", "part", {"ours": called(ours, 400), "os.pread loop": called(bare, 400)})


def cold(bench: Bench) -> None:
    """Compare shuffled reads of 25 kB from the disk with webdataset's reads in file order."""
    root = prepare(bench.data, "cold")

    def ours(**settings: Any) -> None:
        reader = sp.TarShardReader(root, sp.Lane(seed=1), **settings)
        stage, count = sp.Encode(sp.ShuffleBuffer(reader, size=10_000), Length()), 0
        while count < 19_700:  # just below the 20,000 samples of the data
            count += len(stage.take(256))

    def file_order() -> None:
        import webdataset as wds

        urls = sorted(map(str, root.glob("*.tar")))
        for sample in itertools.islice(wds.WebDataset(urls, shardshuffle=False, empty_check=False), 19_700):
            len(sample["jpg"])

    def with_empty_cache(call: Callable[[], None]) -> Way:
        def way() -> Cost:
            drop_page_cache(root)
            return called(call, 19_700)()

        return way

    ways: dict[str, Callable[[], None]] = {
        "ours, shuffle 10,000": ours,
        "blocks of 64": partial(ours, block_size=64),
        "webdataset": file_order,
    }
    bench.compare("25 kB, page cache dropped", "sample", {name: with_empty_cache(call) for name, call in ways.items()})


def drop_page_cache(root: Path) -> None:
    """Drop the shards from the page cache."""
    for path in root.glob("*.tar"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    measures = {"json": long_json, "short": short_json, "state": state, "resume": resume, "blobs": blobs, "cold": cold}
    main(__doc__, measures)
