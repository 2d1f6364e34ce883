"""The same numbered samples in every store, in equal shards: JSON `{"id": n}` with a key, or windows of tokens.

PyArrow and the readers are imported where they are used, because many short-lived processes import this file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support import toy_records
from tests.support.shards import write_numbered_shards, write_tar

WIDTH = 3  # tokens per sample in a token file


def numbered(sizes: list[int]) -> list[list[str]]:
    """Return the JSON texts of each shard."""
    counted = iter(range(sum(sizes)))
    return [[json.dumps({"id": next(counted)}) for _ in range(size)] for size in sizes]


def _table(texts: list[str]) -> Any:
    import pyarrow as pa

    keys = [f"s{json.loads(text)['id']:06d}" for text in texts]
    return pa.table({"json": pa.array(texts, pa.string()), "key": keys})


def _write_parquet(path: Path, texts: list[str], number: int) -> None:
    import pyarrow.parquet as pq

    pq.write_table(_table(texts), path.with_suffix(".parquet"), row_group_size=7, write_page_checksum=True)


def _write_arrow(path: Path, texts: list[str], number: int) -> None:
    """Write streams and files alternately."""
    import pyarrow as pa

    table = _table(texts)
    writer = pa.ipc.new_file if number % 2 else pa.ipc.new_stream
    with writer(path.with_suffix(".arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=7)


def _write_jsonl(path: Path, texts: list[str], number: int) -> None:
    path.with_suffix(".jsonl").write_text(
        "".join(f'{text[:-1]}, "key": "s{json.loads(text)["id"]:06d}"}}\n' for text in texts)
    )


def _write_csv(path: Path, texts: list[str], number: int) -> None:
    numbers = [json.loads(text)["id"] for text in texts]
    path.with_suffix(".csv").write_text("id,key\n" + "".join(f"{each},s{each:06d}\n" for each in numbers))


def _write_folder(folder: Path, sizes: list[int]) -> None:
    """Write files of one sample each. The folder is one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(sum(sizes)):
        (folder / f"s{number:06d}.json").write_text(json.dumps({"id": number}))


def _write_tokens(path: Path, texts: list[str], number: int) -> None:
    """Write tokens: sample n is the tokens 3n to 3n + 2."""
    first = WIDTH * json.loads(texts[0])["id"]
    np.save(path.with_suffix(".npy"), np.arange(first, first + WIDTH * len(texts), dtype=np.uint16))


def _files(write: Callable[[Path, list[str], int], None], folder: Path, sizes: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(numbered(sizes)):
        write(folder / f"{number:04d}", texts, number)


def _write_mds(folder: Path, sizes: list[int]) -> None:
    """Write compressed shards of an MDS folder."""
    rows = [[struct.pack("<q", number), f"s{number:06d}".encode()] for number in range(sum(sizes))]
    toy_records.write_mds(folder, {"id": "int", "key": "str"}, rows, sizes={"id": 8}, a_shard=sizes, packed="zstd")


def _write_litdata(folder: Path, sizes: list[int]) -> None:
    """Write chunks of LitData with compressed items."""
    rows = [[struct.pack("<q", number), f"s{number:06d}".encode()] for number in range(sum(sizes))]
    packing = {"compression": "zstd", "compression_level": "sample"}
    spec = toy_records.dict_spec(["id", "key"])
    toy_records.write_litdata(folder, ["int", "str"], spec, rows, a_chunk=sizes, **packing)


WRITERS: dict[str, Callable[[Path, list[int]], None]] = {
    "tar": write_numbered_shards,
    "parquet": partial(_files, _write_parquet),
    "arrow": partial(_files, _write_arrow),
    "jsonl": partial(_files, _write_jsonl),
    "csv": partial(_files, _write_csv),
    "folder": _write_folder,
    "tokens": partial(_files, _write_tokens),
    "mds": _write_mds,
    "litdata": _write_litdata,
}
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tar": ("TarShardReader", {}),
    "parquet": ("ParquetReader", {"key": "key"}),
    "arrow": ("ArrowReader", {"key": "key"}),
    "jsonl": ("JsonlReader", {"key": "key"}),
    "csv": ("CsvReader", {"key": "key"}),
    "folder": ("FolderReader", {}),
    "tokens": ("TokenReader", {"length": WIDTH}),
    "mds": ("MdsReader", {"key": "key"}),
    "litdata": ("LitDataReader", {"key": "key"}),
}
KEYED = [kind for kind in READERS if kind != "tokens"]  # stores whose samples have keys, the same as in tars


def reader_of(kind: str, files: str, lane: sp.Lane, **settings: Any) -> custom.SampleStage:
    """Return the reader of a kind of store."""
    name, own = READERS[kind]
    reader: custom.SampleStage = getattr(sp if name in sp.__all__ else custom, name)(files, lane, **own, **settings)
    return reader


def number_of(sample: sp.Sample) -> int:
    """Return the number of a sample of any store."""
    return int(sample.array("tokens")[0]) // WIDTH if "tokens" in sample else int(sample.json()["id"])


def write_captions(folder: Path, count: int) -> None:
    """Write a tar of captions, to be joined, for most of the first `count` samples."""
    captions = [(f"s{i:06d}.txt", f"caption {i}".encode()) for i in range(count) if i % 11]
    write_tar(folder / "0.tar", captions)
