"""The same numbered samples in every store: JSON `{"id": n}`, cut alike into shards."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import savable_pipeline as sp
from tests.conftest import write_numbered_shards
from tests.support import toy_records
from tests.support.toy_pipelines import ToyEncoder


def numbered(sizes: list[int]) -> list[list[str]]:
    """The JSON texts of each shard."""
    counted = iter(range(sum(sizes)))
    return [[json.dumps({"id": next(counted)}) for _ in range(size)] for size in sizes]


def write_parquet(folder: Path, sizes: list[int], *, rows: int = 7) -> None:
    """Files of a column `json`, in row groups of `rows` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, texts in enumerate(numbered(sizes)):
        table = pa.table({"json": pa.array(texts, pa.string())})
        pq.write_table(table, folder / f"{shard:04d}.parquet", row_group_size=rows, write_page_checksum=True)


def write_arrow(folder: Path, sizes: list[int], *, rows: int = 7) -> None:
    """Streams and files in turn, of a column `json`, in batches of `rows` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, texts in enumerate(numbered(sizes)):
        table = pa.table({"json": pa.array(texts, pa.string())})
        writer = pa.ipc.new_file if shard % 2 else pa.ipc.new_stream
        with writer(folder / f"{shard:04d}.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=rows)


def write_jsonl(folder: Path, sizes: list[int]) -> None:
    """Files of a line a sample."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, texts in enumerate(numbered(sizes)):
        (folder / f"{shard:04d}.jsonl").write_text("".join(f"{text}\n" for text in texts))


def write_mds(folder: Path, sizes: list[int]) -> None:
    """Compressed shards of an MDS folder."""
    rows = [[struct.pack("<q", number)] for number in range(sum(sizes))]
    toy_records.write_mds(folder, {"id": "int"}, rows, sizes={"id": 8}, a_shard=sizes, packed="zstd")


def write_litdata(folder: Path, sizes: list[int]) -> None:
    """Chunks of LitData in frames."""
    rows = [[struct.pack("<q", number)] for number in range(sum(sizes))]
    packing = {"compression": "zstd", "compression_level": "batch"}
    toy_records.write_litdata(folder, ["int"], toy_records.dict_spec(["id"]), rows, a_chunk=sizes, **packing)


WRITERS: dict[str, Callable[[Path, list[int]], None]] = {
    "tar": write_numbered_shards,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": write_jsonl,
    "mds": write_mds,
    "litdata": write_litdata,
}
READERS: dict[str, Any] = {
    "tar": sp.TarShardReader,
    "parquet": sp.ParquetReader,
    "arrow": sp.ArrowReader,
    "jsonl": sp.JsonlReader,
    "mds": sp.MdsReader,
    "litdata": sp.LitDataReader,
}


def store_pipeline(
    kind: str, folder: str, lane: sp.Lane, *, buffer: int = 10, size: int = 2, packed: bool = True, **settings: Any
) -> sp.Stage:
    """A reader of this kind of store, a buffer, the toy encoder, a packer and batches."""
    samples = sp.ShuffleBuffer(READERS[kind](folder, lane, **settings), size=buffer)
    items: sp.ItemStage = sp.Encode(samples, ToyEncoder())
    return sp.Batcher(sp.OnlinePacker(items, max_length=20, open_packs=3) if packed else items, size=size)
