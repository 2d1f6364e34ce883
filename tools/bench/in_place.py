"""Measures reading in place beside other readers: processor time, each in a process of its own, in turn.

    python tools/bench/in_place.py rows      Parquet rows as dicts, through a buffer of 10,000
    python tools/bench/in_place.py images    Parquet rows with 20 kB of bytes, as Hugging Face has images
    python tools/bench/in_place.py arrow     the same rows in Arrow, in the trainer's process and in a worker
    python tools/bench/in_place.py arrow-images    the same with 20 kB of bytes
    python tools/bench/in_place.py tokens    windows of 2,048 tokens of .bin and .idx, against a bare numpy.memmap loop
    python tools/bench/in_place.py join      tars with captions joined by key, against tars that hold both
    python tools/bench/in_place.py joined-images    the same of images of 256 x 256, which are decoded
    python tools/bench/in_place.py mds       MDS of a number, a text and 2 kB of bytes, plain
    python tools/bench/in_place.py mds-zstd    the same in zstd, each shard a row group
    python tools/bench/in_place.py first     time to the first batch at 1 % and at 95 % of an epoch, of each store

HF datasets, LitData, Grain and Mosaic Streaming take part where they are installed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rich.console import Console
from rich.table import Table

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.replaceable import become_replaced

ROWS, BUFFER = 60_000, 10_000
UNBUFFERED = ("tokens", "join", "joined-images", "mds", "mds-zstd")
ROUNDS = 5
Reader = Callable[[Path], Iterator[Any]]


# The data.


def write_rows(folder: Path, payload: int = 0) -> None:
    """Six files: a number, a text of 200 characters, and `payload` bytes as Hugging Face has images."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    count = ROWS // 6 if not payload else ROWS // 24
    for file in range(6):
        numbers = range(file * count, (file + 1) * count)
        columns: dict[str, Any] = {"id": list(numbers), "caption": [f"{number} ".ljust(200, "x") for number in numbers]}
        if payload:
            columns["image"] = [{"bytes": draw.bytes(payload), "path": f"{number}.jpg"} for number in numbers]
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=1000)


def write_arrow(folder: Path, payload: int = 0) -> None:
    """The same as Arrow, in record batches of 1,000 rows."""
    write_rows(folder, payload)
    for path in folder.glob("*.parquet"):
        table = pq.read_table(path)
        with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=1000)
        path.unlink()


def write_tokens(folder: Path) -> None:
    """50 M tokens, uint16, in documents of 1,000, as Megatron-LM writes them."""
    folder.mkdir(parents=True)
    tokens, documents = 50_000_000, 50_000
    np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16).tofile(folder / "a.bin")
    lengths = np.full(documents, tokens // documents, "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    firsts = np.arange(documents + 1).astype("<i8")
    (folder / "a.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes())


def write_pairs(folder: Path, images: bool = False) -> None:
    """8 tars of JSON, or of JPEG, each with captions for them in a tar of its own, and with both in one."""
    kind, count = ("jpg", 500) if images else ("json", 5000)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(pixels).resize((256, 256)).save(jpeg, "JPEG", quality=90)
    for name, extensions in (("tars", [kind]), ("captions", ["txt"]), ("both", [kind, "txt"])):
        (folder / name).mkdir(parents=True)
        for shard in range(8):
            with tarfile.open(folder / name / f"{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for number, extension in itertools.product(range(shard * count, (shard + 1) * count), extensions):
                    told = json.dumps({"id": number, "text": "x" * 500}).encode()
                    raw = jpeg.getvalue() if extension == "jpg" else told
                    info = tarfile.TarInfo(f"s{number:06d}.{extension}")
                    info.size = len(raw)
                    tar.addfile(info, io.BytesIO(raw))


def write_mds(folder: Path, *, packed: bool = False) -> None:
    """Forty shards of 1,000 samples."""
    import zstandard

    folder.mkdir(parents=True)
    draw, shards = np.random.default_rng(0), []
    columns = {"column_names": ["id", "caption", "image"], "column_encodings": ["int", "str", "bytes"]}
    for shard in range(40):
        records = []
        for number in range(1_000 * shard, 1_000 * shard + 1_000):
            text = f"caption number {number} ".encode() * 6
            sizes = struct.pack("<IIq", len(text), 2_000, number)
            records.append(sizes + text + draw.bytes(2_000))
        offsets = np.cumsum([4 + 4 * (len(records) + 1), *map(len, records)]).astype("<u4")
        raw = struct.pack("<I", len(records)) + offsets.tobytes() + b"".join(records)
        name = f"shard.{shard:05d}.mds"
        told = {**columns, "column_sizes": [8, None, None], "format": "mds", "version": 2, "samples": len(records)}
        told |= {"raw_data": {"basename": name, "bytes": len(raw), "hashes": {}}, "hashes": [], "size_limit": 1 << 26}
        data = zstandard.compress(raw) if packed else raw
        name += ".zstd" if packed else ""
        zipped = {"basename": name, "bytes": len(data), "hashes": {}} if packed else None
        shards.append({**told, "zip_data": zipped, "compression": "zstd" if packed else None})
        (folder / name).write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


# The readers.


class Plain(sp.TaskEncoder):
    """Its batches are lists of items."""

    global_rng = False

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class Dicts(Plain):
    """A row as a dict of Python's values."""

    def __init__(self, image: bool = False) -> None:
        self.image = image

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        item = {"id": sample.json("id"), "caption": sample.text("caption")}
        if self.image:
            item["image"] = sample["image.jpg"] if "image.jpg" in sample else sample["jpg"]
        return item


def items_of(items: sp.Encode) -> Iterator[Any]:
    """Each item of an endless pipeline, from batches of 256, as a loader has them made."""
    return itertools.chain.from_iterable(sp.Batcher(items, size=256))


def ours(folder: Path) -> Iterator[Any]:
    image = "image" in pq.read_schema(next(folder.glob("*.parquet"))).names
    samples = sp.ShuffleBuffer(custom.ParquetReader(folder, sp.Lane(seed=1)), size=BUFFER)
    return items_of(sp.Encode(samples, Dicts(image)))


def our_arrow(folder: Path, *, image: bool = False, worker: bool = False) -> Iterator[Any]:
    if worker:  # which maps the files
        become_replaced()
    samples = sp.ShuffleBuffer(custom.ArrowReader(folder, sp.Lane(seed=1)), size=BUFFER)
    return items_of(sp.Encode(samples, Dicts(image)))


def hf_datasets(folder: Path) -> Iterator[Any]:
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, folder.glob("*.parquet")))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return iter(rows.repeat(None).shuffle(seed=1, buffer_size=BUFFER))


def litdata(folder: Path) -> Iterator[Any]:
    from litdata import StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    index_parquet_dataset(str(folder))
    rows = StreamingDataset(str(folder), item_loader=ParquetLoader(), shuffle=True)
    return itertools.chain.from_iterable(itertools.repeat(rows))


def grain(folder: Path) -> Iterator[Any]:
    import grain as grain_

    files = sorted(map(str, folder.glob("*.parquet")))
    read = grain_.experimental.InterleaveIterDataset(
        grain_.MapDataset.source(files).map(lambda path: grain_.experimental.ParquetIterDataset(path)), cycle_length=6
    )
    return itertools.chain.from_iterable(
        iter(grain_.experimental.WindowShuffleIterDataset(read, window_size=BUFFER, seed=epoch))
        for epoch in itertools.count()
    )


def our_tokens(folder: Path) -> Iterator[Any]:
    samples = custom.TokenReader(folder, sp.Lane(seed=1), length=2049, stride=2048)
    return items_of(sp.Encode(samples, Windows()))


class Windows(Plain):
    """The tokens of a window, int64."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.array("tokens").astype(np.int64)


def bare_memmap(folder: Path) -> Iterator[Any]:
    tokens = np.memmap(folder / "a.bin", dtype=np.uint16, mode="r")
    draw = np.random.default_rng(1)
    for window in itertools.chain.from_iterable(draw.permutation((len(tokens) - 1) // 2048) for _ in itertools.count()):
        yield np.array(tokens[window * 2048 : window * 2048 + 2049]).astype(np.int64)


class Pairs(Plain):
    """The JSON or the image of a sample, and its caption."""

    def __init__(self, caption: str, images: bool) -> None:
        self.caption = caption
        self.decodes = images

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return np.asarray(sample.image("jpg")) if self.decodes else sample.json(), sample[self.caption]


def joined(folder: Path, *, images: bool = False) -> Iterator[Any]:
    reader = sp.TarShardReader(str(folder / "tars"), sp.Lane(seed=1))
    return items_of(
        sp.Encode(custom.Join(reader, {"captions": str(folder / "captions")}), Pairs("captions.txt", images))
    )


def in_one(folder: Path, *, images: bool = False) -> Iterator[Any]:
    return items_of(sp.Encode(sp.TarShardReader(str(folder / "both"), sp.Lane(seed=1)), Pairs("txt", images)))


def our_mds(folder: Path) -> Iterator[Any]:
    for sample in custom.MdsReader(folder, sp.Lane(seed=1)):
        yield sample.json(), sample["bin"]


def mosaic(folder: Path) -> Iterator[Any]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    yield from StreamingDataset(local=str(folder), shuffle=True, batch_size=16)


CASES: dict[str, tuple[Callable[[Path], None], int, dict[str, Reader]]] = {
    "rows": (write_rows, 60_000, {"ours": ours, "hf": hf_datasets, "litdata": litdata, "grain": grain}),
    "images": (
        lambda folder: write_rows(folder, 20_000),
        15_000,
        {"ours": ours, "hf": hf_datasets, "litdata": litdata, "grain": grain},
    ),
    "arrow": (write_arrow, 60_000, {"ours": our_arrow, "worker": partial(our_arrow, worker=True)}),
    "arrow-images": (
        lambda folder: write_arrow(folder, 20_000),
        15_000,
        {"ours": partial(our_arrow, image=True), "worker": partial(our_arrow, image=True, worker=True)},
    ),
    "tokens": (write_tokens, 40_000, {"ours": our_tokens, "bare": bare_memmap}),
    "mds": (write_mds, 30_000, {"ours": our_mds, "mosaic": mosaic}),
    "mds-zstd": (partial(write_mds, packed=True), 30_000, {"ours": our_mds, "mosaic": mosaic}),
    "join": (write_pairs, 40_000, {"ours": joined, "one tar": in_one}),
    "joined-images": (
        partial(write_pairs, images=True),
        4_000,
        {"ours": partial(joined, images=True), "one tar": partial(in_one, images=True)},
    ),
}


def run_one(case: str, name: str, folder: Path) -> None:
    """Print the processor time of as many samples, after a tenth of them."""
    _, count, readers = CASES[case]
    samples = readers[name](folder)
    for _ in itertools.islice(samples, (0 if case in UNBUFFERED else BUFFER) + count // 10):
        pass
    begun = time.process_time()
    for _ in itertools.islice(samples, count):
        pass
    print(time.process_time() - begun, flush=True)
    os._exit(0)


def compare(case: str, folder: Path, rounds: int) -> None:
    write, count, readers = CASES[case]
    write(folder / case)
    spent: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name in readers:
            command = [sys.executable, __file__, case, "--one", name, "--folder", str(folder / case)]
            run = subprocess.run(["timeout", "60", *command], capture_output=True, text=True)
            if run.returncode == 0:
                spent[name].append(float(run.stdout.split()[-1]))
            elif not spent[name]:
                print(name, "does not run:", run.stderr.strip().splitlines()[-1:], file=sys.stderr)
    table = Table("reader", "samples a second of processor time", "time beside ours", title=case, title_justify="left")
    for name, times in spent.items():
        if times:
            ratios = [time_ / our for time_, our in zip(times, spent["ours"], strict=False)]
            table.add_row(
                name,
                f"{count / statistics.median(times):,.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            )
    Console().print(table)


def first(folder: Path) -> None:
    """Time to the first sample of a restored reader, early and late in an epoch."""
    write_rows(folder / "rows")
    write_tokens(folder / "tokens")
    write_pairs(folder / "pairs")
    stores: dict[str, Callable[[], custom.SampleStage]] = {
        "Parquet": lambda: custom.ParquetReader(folder / "rows", sp.Lane(seed=1)),
        "tokens": lambda: custom.TokenReader(folder / "tokens", sp.Lane(seed=1), length=2049, stride=2048),
        "tars": lambda: sp.TarShardReader(str(folder / "pairs/tars"), sp.Lane(seed=1)),
    }
    table = Table("store", "at 1 %", "at 95 %", title="first sample after a restore", title_justify="left")
    for name, make in stores.items():
        count = make().info.population
        found = [
            statistics.median(_restored(make, int(count * share)) for _ in range(ROUNDS)) for share in (0.01, 0.95)
        ]
        table.add_row(name, *(f"{1000 * seconds:.1f} ms" for seconds in found))
    Console().print(table)


def _restored(make: Callable[[], custom.SampleStage], position: int) -> float:
    reader = make()
    state = reader.save_state() | {"position": position}
    begun = time.perf_counter()
    reader.restore_state(state)
    sample = next(reader)
    sample[next(iter(sample))]
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES, "first"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given.cases[0], given.one, given.folder)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for case in given.cases:
            if case == "first":
                first(Path(folder) / "first")
            else:
                compare(case, Path(folder), given.rounds)


if __name__ == "__main__":
    main()
