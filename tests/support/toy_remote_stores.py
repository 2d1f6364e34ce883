"""Folders of every kind of file, with samples so large that the choice of fetched bytes matters."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support import toy_records
from tests.support.toy_stores import numbered

SIZES = [40, 66, 50, 80]
NAMES = "{0000..0003}"
PAD = 900  # bytes of a sample that nobody reads
TOKENS = 100  # tokens of a document


def pads(count: int) -> list[bytes]:
    """Return bytes that do not compress."""
    draw = np.random.default_rng(1)
    return [draw.bytes(PAD) for _ in range(count)]


def table_of(texts: list[str]) -> pa.Table:
    return pa.table({"pad": pa.array(pads(len(texts)), pa.binary()), "json": pa.array(texts, pa.string())})


def write_parquet(folder: Path) -> None:
    for shard, texts in enumerate(numbered(SIZES)):
        pq.write_table(table_of(texts), folder / f"{shard:04d}.parquet", row_group_size=20, compression="none")


def write_arrow(folder: Path) -> None:
    for shard, texts in enumerate(numbered(SIZES)):
        table = table_of(texts)
        writer = pa.ipc.new_file if shard % 2 else pa.ipc.new_stream
        with writer(folder / f"{shard:04d}.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=20)


def write_jsonl(folder: Path) -> None:
    for shard, texts in enumerate(numbered(SIZES)):
        lines = [json.dumps({**json.loads(text), "pad": "x" * PAD}) for text in texts]
        (folder / f"{shard:04d}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def write_tokens(folder: Path) -> None:
    """Write Megatron's `.bin` and `.idx`, and `.npy`, alternately."""
    first = 0
    for shard, size in enumerate(SIZES):
        tokens = np.arange(first, first + size * TOKENS, dtype=np.int32).reshape(size, TOKENS)
        first += size * TOKENS
        if shard % 2:
            np.save(folder / f"{shard:04d}.npy", tokens)
            continue
        tokens.tofile(folder / f"{shard:04d}.bin")
        lengths, pointers = np.full(size, TOKENS, "<i4"), np.arange(size, dtype="<i8") * 4 * TOKENS
        head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([4])
        head += size.to_bytes(8, "little") + (size + 1).to_bytes(8, "little")
        firsts = np.arange(size + 1, dtype="<i8")
        (folder / f"{shard:04d}.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes())


def records(folder_of: Callable[..., Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        numbers = range(sum(SIZES))
        data = (pad[: PAD // 3] for pad in pads(sum(SIZES)))  # small enough that a shard fits a small cache
        rows = [[struct.pack("<q", number), pad] for number, pad in zip(numbers, data, strict=True)]
        folder_of(folder, rows)

    return write


def write_mds(folder: Path, rows: list[list[bytes]]) -> None:
    toy_records.write_mds(folder, {"id": "int", "pad": "bytes"}, rows, a_shard=SIZES, packed="zstd")


def write_litdata(folder: Path, rows: list[list[bytes]]) -> None:
    spec = toy_records.dict_spec(["id", "pad"])
    toy_records.write_litdata(folder, ["int", "bytes"], spec, rows, a_chunk=SIZES)


WRITERS: dict[str, Callable[[Path], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": write_jsonl,
    "tokens": write_tokens,
    "mds": records(write_mds),
    "litdata": records(write_litdata),
}
READERS: dict[str, Any] = {
    "parquet": custom.ParquetReader,
    "arrow": custom.ArrowReader,
    "jsonl": custom.JsonlReader,
    "tokens": custom.TokenReader,
    "mds": custom.MdsReader,
    "litdata": custom.LitDataReader,
}
KINDS = list(WRITERS)
LISTED = ("mds", "litdata")  # kinds whose files an index.json lists


def names_of(kind: str) -> list[str]:
    """Return the names of the files of a folder."""
    if kind == "mds":
        return [f"shard.{shard:05d}.mds.zstd" for shard in range(len(SIZES))]
    if kind == "litdata":
        return [f"chunk-0-{shard}.bin" for shard in range(len(SIZES))]
    if kind == "tokens":
        return [f"{shard:04d}.{'npy' if shard % 2 else 'bin'}" for shard in range(len(SIZES))]
    return [f"{shard:04d}.{kind}" for shard in range(len(SIZES))]


def urls_of(url: str, kind: str) -> str | list[str]:
    """Return the URLs of a folder's files below `url`, or the folder's own if its index.json lists them."""
    return f"{url}/{kind}/" if kind in LISTED else [f"{url}/{kind}/{name}" for name in names_of(kind)]


class Ids(sp.TaskEncoder):
    """An encoder of the number, the key and a random number of each sample."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        tokens = sample.array("tokens") if "tokens" in sample else None
        number = sample.json()["id"] if tokens is None else (int(tokens[0]), int(tokens.sum()))
        return number, sample.key, rng.random()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def ids_pipeline(kind: str, files: Any, lane: sp.Lane, **settings: Any) -> custom.Stage:
    samples = sp.ShuffleBuffer(READERS[kind](files, lane, **settings), size=10)
    return sp.Batcher(sp.Encode(samples, Ids(), on_error=settings.get("on_error", "raise")), size=4)
