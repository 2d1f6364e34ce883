"""Small folders of MDS and of LitData, written from the facts of the formats, not by their libraries."""

from __future__ import annotations

import gzip
import json
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.toy_files import jpeg

LEAF = {"type": None, "context": None, "children_spec": []}


def block(records: list[bytes], config: bytes = b"") -> bytes:
    """Number of records, where each begins and the last ends, a header that is passed over, the records."""
    first = 4 + 4 * (len(records) + 1) + len(config)
    offsets = accumulate((len(record) for record in records), initial=first)
    head = b"".join(struct.pack("<I", number) for number in (len(records), *offsets))
    return head + config + b"".join(records)


def record(fields: list[bytes], fixed: list[int | None] | None = None) -> bytes:
    """The sizes of the fields that have none of their own, then the fields."""
    fixed = fixed or [None] * len(fields)
    sizes = [struct.pack("<I", len(data)) for data, size in zip(fields, fixed, strict=True) if not size]
    return b"".join(sizes + fields)


def write_mds(
    folder: Path,
    columns: dict[str, str],
    rows: list[list[bytes]],
    *,
    sizes: dict[str, int] | None = None,
    a_shard: int = 4,
    packed: bool = False,
) -> Path:
    """Rows of encoded columns; those in `sizes` have that size in every row."""
    folder.mkdir(parents=True)
    fixed = [(sizes or {}).get(name) for name in columns]
    shards = []
    for number, first in enumerate(range(0, len(rows), a_shard)):
        some = rows[first : first + a_shard]
        raw = block([record(row, fixed) for row in some], config=b'{"any": "thing"}')
        name = f"shard.{number:05d}.mds"
        zipped = gzip.compress(raw, mtime=0)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(zipped if packed else raw)
        shards.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": fixed,
                "compression": "gz:9" if packed else None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
                "samples": len(some),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": {"basename": f"{name}.gz", "bytes": len(zipped), "hashes": {}} if packed else None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def write_captioned_mds(folder: Path, count: int = 10, **settings: Any) -> Path:
    """Images, captions, labels and vectors."""
    columns = {"caption": "str", "image": "jpeg", "label": "int", "vector": "ndarray:float32:2"}
    rows = [[f"no. {i}".encode(), jpeg(i), struct.pack("<q", i), np.full(2, i, "f4").tobytes()] for i in range(count)]
    return write_mds(folder, columns, rows, sizes={"label": 8, "vector": 8}, **settings)


def dict_spec(names: list[str], children: list[Any] | None = None) -> dict[str, Any]:
    """The tree of a dict, as torch writes it."""
    children = children or [LEAF] * len(names)
    return {"type": "builtins.dict", "context": json.dumps(names), "children_spec": children}


def write_litdata(
    folder: Path, formats: list[str], spec: Any, rows: list[list[bytes]], *, a_chunk: int = 4, **config: Any
) -> Path:
    """Rows of encoded leaves."""
    folder.mkdir(parents=True)
    chunks = []
    for number, first in enumerate(range(0, len(rows), a_chunk)):
        some = rows[first : first + a_chunk]
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(block([record(row) for row in some]))
        chunks.append({"chunk_bytes": 1, "chunk_size": len(some), "dim": None, "filename": name})
    settings = {"compression": None, "encryption": None, "item_loader": "PyTreeLoader", **config}
    settings |= {"data_format": formats, "data_spec": json.dumps([1, spec])}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": settings, "updated_at": "1"}))
    return folder


def write_captioned_litdata(folder: Path, count: int = 10) -> Path:
    """Images, captions and labels."""
    rows = [[jpeg(i), f"no. {i}".encode(), struct.pack("<q", i)] for i in range(count)]
    return write_litdata(folder, ["jpeg", "str", "int"], dict_spec(["image", "caption", "label"]), rows)
