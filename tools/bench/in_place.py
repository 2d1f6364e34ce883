"""Compare readers of Parquet, Arrow, tokens, MDS and joined tars, each in its own process.

    python tools/bench/in_place.py rows             Parquet rows as dicts, through a buffer of 10,000
    python tools/bench/in_place.py images           Parquet rows with 20 kB of bytes, as Hugging Face has images
    python tools/bench/in_place.py arrow            the same rows in Arrow, in the trainer's process and in a worker
    python tools/bench/in_place.py arrow-images     the same with 20 kB of bytes
    python tools/bench/in_place.py tokens           windows of 2,048 tokens, against a bare numpy.memmap loop
    python tools/bench/in_place.py mds              MDS of a number, a text and 2 kB of bytes, uncompressed
    python tools/bench/in_place.py mds-zstd         the same, compressed by zstd
    python tools/bench/in_place.py join             tars with captions joined by key, against tars that have both
    python tools/bench/in_place.py joined-images    the same with decoded images of 256 × 256

It compares HF datasets, LitData, Grain and Mosaic Streaming if they are installed. Without arguments it runs all cases.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pyarrow as pa
import pyarrow.parquet as pq
from data import jpeg_of, write_tar
from peers import chunks
from PIL import Image
from rounds import Bench, Loader, main

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.child_process import become_replaced

ROWS, BUFFER = 60_000, 10_000


def write_rows(folder: Path, payload: int = 0, *, arrow: bool = False) -> None:
    """Write six files of rows: a number, a text of 200 characters, and an image of `payload` bytes.

    Images are {"bytes", "path"} as in Hugging Face datasets. A row group has 1,000 rows. There are fewer rows if they
    have images.
    """
    rng = np.random.default_rng(0)
    count = ROWS // 6 if not payload else ROWS // 24
    for file in range(6):
        numbers = range(file * count, (file + 1) * count)
        columns: dict[str, Any] = {"id": list(numbers), "caption": [f"{number} ".ljust(200, "x") for number in numbers]}
        if payload:
            columns["image"] = [{"bytes": rng.bytes(payload), "path": f"{number}.jpg"} for number in numbers]
        table = pa.table(columns)
        if arrow:
            with pa.ipc.new_file(folder / f"{file}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=1000)
        else:
            pq.write_table(table, folder / f"{file}.parquet", row_group_size=1000)


def write_tokens(folder: Path) -> None:
    """Write 50 M tokens, uint16, in documents of 1,000, in the format of Megatron-LM."""
    tokens, documents = 50_000_000, 50_000
    np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16).tofile(folder / "a.bin")
    lengths = np.full(documents, tokens // documents, "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    firsts = np.arange(documents + 1).astype("<i8")
    (folder / "a.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes())


def write_pairs(folder: Path, *, images: bool = False) -> None:
    """Write 8 tars of JSON or JPEG, tars of captions with the same keys, and tars that have both."""
    kind, count = ("jpg", 500) if images else ("json", 5000)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    jpeg = jpeg_of(Image.fromarray(pixels).resize((256, 256)))

    def sample(number: int) -> dict[str, bytes]:
        text = json.dumps({"id": number, "text": "x" * 500}).encode()
        return {kind: jpeg if images else text, "txt": text}

    for name, parts in (("tars", [kind]), ("captions", ["txt"]), ("both", [kind, "txt"])):
        for shard in range(8):
            samples = map(sample, range(shard * count, (shard + 1) * count))
            write_tar(folder / name / f"{shard}.tar", ({part: each[part] for part in parts} for each in samples))


def write_mds(folder: Path, *, compressed: bool = False) -> None:
    """Write MDS: forty shards of 1,000 samples, compressed by zstd if `compressed`."""
    import zstandard

    rng, shards = np.random.default_rng(0), []
    columns = {"column_names": ["id", "caption", "image"], "column_encodings": ["int", "str", "bytes"]}
    for shard in range(40):
        records = []
        for number in range(1_000 * shard, 1_000 * shard + 1_000):
            text = f"caption number {number} ".encode() * 6
            sizes = struct.pack("<IIq", len(text), 2_000, number)
            records.append(sizes + text + rng.bytes(2_000))
        offsets = np.cumsum([4 + 4 * (len(records) + 1), *map(len, records)]).astype("<u4")
        raw = struct.pack("<I", len(records)) + offsets.tobytes() + b"".join(records)
        name = f"shard.{shard:05d}.mds"
        header = {**columns, "column_sizes": [8, None, None], "format": "mds", "version": 2, "samples": len(records)}
        header |= {"raw_data": {"basename": name, "bytes": len(raw), "hashes": {}}, "hashes": [], "size_limit": 1 << 26}
        data = zstandard.compress(raw) if compressed else raw
        name += ".zstd" if compressed else ""
        zip_data = {"basename": name, "bytes": len(data), "hashes": {}} if compressed else None
        shards.append({**header, "zip_data": zip_data, "compression": "zstd" if compressed else None})
        (folder / name).write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


class Items(sp.TaskEncoder):
    """Encoder whose items are `item(sample)`, and whose batches are lists of items."""

    def __init__(self, item: Callable[[sp.Sample], Any]) -> None:
        self._item = item

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return self._item(sample)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def batches(samples: custom.SampleStage, item: Callable[[sp.Sample], Any]) -> Iterator[Any]:
    """Yield batches of 256 items of endless samples."""
    return iter(sp.Batcher(sp.Encode(samples, Items(item)), size=256))


def row(sample: sp.Sample) -> Any:
    """Return a sample as a dict of Python values, with its image if it has one."""
    item = {"id": sample.json("id"), "caption": sample.text("caption")}
    image = next((name for name in ("image.jpg", "jpg") if name in sample), None)
    return item if image is None else {**item, "image": sample[image]}


def plain_row(sample: sp.Sample) -> Any:
    """Return a sample without image as a dict of Python values."""
    return {"id": sample.json("id"), "caption": sample.text("caption")}


def our_rows(item: Callable[[sp.Sample], Any], folder: Path) -> Iterator[Any]:
    """Yield batches of shuffled Parquet rows from our reader."""
    return batches(sp.ShuffleBuffer(custom.ParquetReader(folder, sp.Lane(seed=1)), size=BUFFER), item)


def our_arrow(item: Callable[[sp.Sample], Any], as_worker: bool, folder: Path) -> Iterator[Any]:
    """Yield batches of shuffled Arrow rows from our reader, as in a worker or as in the trainer's process."""
    if as_worker:  # a worker maps the files, whereas the trainer reads them
        become_replaced()
    return batches(sp.ShuffleBuffer(custom.ArrowReader(folder, sp.Lane(seed=1)), size=BUFFER), item)


def our_tokens(folder: Path) -> Iterator[Any]:
    """Yield batches of windows of tokens from our reader."""
    samples = custom.TokenReader(folder, sp.Lane(seed=1), length=2049, stride=2048)
    return batches(samples, lambda sample: sample.array("tokens").astype(np.int64))


def bare_memmap(folder: Path) -> Iterator[Any]:
    """Yield batches of shuffled windows of tokens from a memory-mapped file."""
    tokens = np.memmap(folder / "a.bin", dtype=np.uint16, mode="r")
    rng = np.random.default_rng(1)
    windows = itertools.chain.from_iterable(rng.permutation((len(tokens) - 1) // 2048) for _ in itertools.count())
    return chunks(np.array(tokens[n * 2048 : n * 2048 + 2049]).astype(np.int64) for n in windows)


def our_mds(folder: Path) -> Iterator[Any]:
    """Yield batches of MDS samples from our reader."""
    return chunks((sample.json(), sample["bin"]) for sample in custom.MdsReader(folder, sp.Lane(seed=1)))


def pair(part: str, caption: str) -> Callable[[sp.Sample], Any]:
    """Return a function that reads a pair: the JSON or image of a sample, and its caption in the part `caption`."""
    if part == "jpg":
        return lambda sample: (np.asarray(sample.image("jpg")), sample[caption])
    return lambda sample: (sample.json(), sample[caption])


def joined(part: str, folder: Path) -> Iterator[Any]:
    """Yield batches of pairs, whose captions are joined by key from other tars."""
    reader = sp.TarShardReader(str(folder / "tars"), sp.Lane(seed=1))
    return batches(custom.Join(reader, {"captions": str(folder / "captions")}), pair(part, "captions.txt"))


def unjoined(part: str, folder: Path) -> Iterator[Any]:
    """Yield batches of pairs from tars that have both parts."""
    return batches(sp.TarShardReader(str(folder / "both"), sp.Lane(seed=1)), pair(part, "txt"))


PEERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "HF datasets": lambda folder: chunks(peers.hf_datasets(folder, buffer=BUFFER)),
    "LitData": lambda folder: chunks(peers.litdata_parquet(folder)),
    "Grain": lambda folder: chunks(peers.grain_parquet(folder, buffer=BUFFER)),
}
MOSAIC = {"Mosaic Streaming": lambda folder: chunks(peers.mosaic(folder))}
CASES: dict[str, tuple[Callable[[Path], None], dict[str, Callable[[Path], Iterator[Any]]]]] = {
    "rows": (write_rows, {"ours": partial(our_rows, plain_row), **PEERS}),
    "images": (partial(write_rows, payload=20_000), {"ours": partial(our_rows, row), **PEERS}),
    "arrow": (
        partial(write_rows, arrow=True),
        {"ours": partial(our_arrow, plain_row, False), "in a worker": partial(our_arrow, plain_row, True)},
    ),
    "arrow-images": (
        partial(write_rows, payload=20_000, arrow=True),
        {"ours": partial(our_arrow, row, False), "in a worker": partial(our_arrow, row, True)},
    ),
    "tokens": (write_tokens, {"ours": our_tokens, "numpy.memmap": bare_memmap}),
    "mds": (write_mds, {"ours": our_mds, **MOSAIC}),
    "mds-zstd": (partial(write_mds, compressed=True), {"ours": our_mds, **MOSAIC}),
    "join": (write_pairs, {"ours": partial(joined, "json"), "one tar": partial(unjoined, "json")}),
    "joined-images": (
        partial(write_pairs, images=True),
        {"ours": partial(joined, "jpg"), "one tar": partial(unjoined, "jpg")},
    ),
}


def measure(case: str, bench: Bench) -> None:
    """Compare the readers of a case. Its data is written on first use."""
    write, readers = CASES[case]
    folder = bench.data / f"in-place-{case}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        (folder / "done").touch()
    warm = 2 * BUFFER if case in ("rows", "images", "arrow", "arrow-images") else 0
    makers = {name: lambda make=make: Loader(make(folder), warm=warm) for name, make in readers.items()}
    bench.loaders(case, "sample", makers)


if __name__ == "__main__":
    main(__doc__, {case: partial(measure, case) for case in CASES})
