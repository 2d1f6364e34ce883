"""Small folders of MDS and of LitData, written from the formats' definitions without their libraries."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zstandard

from tests.support.toy_files import jpeg

T = TypeVar("T")
LEAF = {"type": None, "context": None, "children_spec": []}


def block(records: list[bytes], config: bytes = b"") -> bytes:
    """Return a chunk: the number of records, the start of each and the end, a header, the records."""
    first = 4 + 4 * (len(records) + 1) + len(config)
    offsets = accumulate((len(record) for record in records), initial=first)
    head = b"".join(struct.pack("<I", number) for number in (len(records), *offsets))
    return head + config + b"".join(records)


def record(fields: list[bytes], fixed: list[int | None] | None = None) -> bytes:
    """Return the sizes of the fields that have no fixed size, then the fields."""
    fixed = fixed or [None] * len(fields)
    sizes = [struct.pack("<I", len(data)) for data, size in zip(fields, fixed, strict=True) if not size]
    return b"".join(sizes + fields)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "zstd": zstandard.compress,
}


def cut(rows: list[T], a_file: int | list[int]) -> list[list[T]]:
    """Split rows into files: a fixed number per file, or the listed numbers."""
    counts = [a_file] * -(-len(rows) // a_file) if isinstance(a_file, int) else a_file
    return [rows[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def write_mds(
    folder: Path,
    columns: dict[str, str],
    rows: list[list[bytes]],
    *,
    sizes: dict[str, int] | None = None,
    a_shard: int | list[int] = 4,
    packed: str = "",
) -> Path:
    """Write rows of encoded columns. Those in `sizes` have that size in every row. `packed` is their compression."""
    folder.mkdir(parents=True, exist_ok=True)
    fixed = [(sizes or {}).get(name) for name in columns]
    shards = []
    for number, some in enumerate(cut(rows, a_shard)):
        raw = block([record(row, fixed) for row in some], config=b'{"any": "thing"}')
        name = f"shard.{number:05d}.mds"
        zipped = PACKERS[packed](raw)
        (folder / (f"{name}.{packed}" if packed else name)).write_bytes(zipped)
        shards.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": fixed,
                "compression": packed or None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
                "samples": len(some),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": {"basename": f"{name}.{packed}", "bytes": len(zipped), "hashes": {}} if packed else None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def write_captioned_mds(folder: Path, count: int = 10, **settings: Any) -> Path:
    """Write images, captions, labels and vectors."""
    columns = {"caption": "str", "image": "jpeg", "label": "int", "vector": "ndarray:float32:2"}
    rows = [[f"no. {i}".encode(), jpeg(i), struct.pack("<q", i), np.full(2, i, "f4").tobytes()] for i in range(count)]
    return write_mds(folder, columns, rows, sizes={"label": 8, "vector": 8}, **settings)


def dict_spec(names: list[str], children: list[Any] | None = None) -> dict[str, Any]:
    """Return the tree of a dict in torch's notation."""
    children = children or [LEAF] * len(names)
    return {"type": "builtins.dict", "context": json.dumps(names), "children_spec": children}


def arrow_rows(rows: list[dict[str, Any]], *, compression: str | None = None, stream: bool = False) -> bytes:
    """Return a chunk of Arrow rows, two per batch, after records without bytes."""
    import pyarrow as pa

    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=2)
    data = sink.getvalue().to_pybytes()
    return block([b""] * len(rows)) + data + struct.pack("<I", len(data)) + b"LDARW01\0"


LAYOUTS: dict[str | None, Callable[[list[bytes]], bytes]] = {
    None: block,
    "chunk": block,
    "sample": lambda records: block([zstandard.compress(record) for record in records]),
}


def write_litdata(
    folder: Path, formats: list[str], spec: Any, rows: list[list[bytes]], *, a_chunk: int | list[int] = 4, **config: Any
) -> Path:
    """Write rows of encoded leaves. `compression_level` says which unit is compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = []
    for number, some in enumerate(cut(rows, a_chunk)):
        name = f"chunk-0-{number}.bin"
        data = LAYOUTS.get(config.get("compression_level"), block)([record(row) for row in some])
        if config.get("compression_level") == "chunk":
            name, data = f"chunk-0-{number}.zstd.bin", zstandard.compress(data)
        (folder / name).write_bytes(data)
        chunks.append({"chunk_bytes": 1, "chunk_size": len(some), "dim": None, "filename": name})
    settings = {"compression": None, "encryption": None, "item_loader": "PyTreeLoader", **config}
    settings |= {"data_format": formats, "data_spec": json.dumps([1, spec])}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": settings, "updated_at": "1"}))
    return folder


def write_captioned_litdata(folder: Path, count: int = 10, level: str | None = None) -> Path:
    """Write images, captions and labels. `level` is the compressed unit: chunk or sample."""
    rows = [[jpeg(i), f"no. {i}".encode(), struct.pack("<q", i)] for i in range(count)]
    packing = {"compression": "zstd", "compression_level": level} if level else {}
    return write_litdata(folder, ["jpeg", "str", "int"], dict_spec(["image", "caption", "label"]), rows, **packing)


def write_arrow_litdata(folder: Path, count: int = 10, **settings: Any) -> Path:
    """Write images, captions and labels as rows of Arrow."""
    write_litdata(folder, ["bytes", "str", "int"], dict_spec(["image", "caption", "label"]), [[b""]] * count)
    for number, path in enumerate(sorted(folder.glob("*.bin"))):
        here = range(4 * number, min(4 * number + 4, count))
        rows = [{"image": jpeg(i), "caption": f"no. {i}", "label": i} for i in here]
        path.write_bytes(arrow_rows(rows, **settings))
    return folder
