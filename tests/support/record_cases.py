"""Folders of MDS and of LitData for each encoding, compression and shape of items, and damaged records."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.toy_files import jpeg
from tests.support.toy_records import (
    LEAF,
    PACKERS,
    arrow_rows,
    dict_spec,
    write_arrow_litdata,
    write_captioned_litdata,
    write_captioned_mds,
    write_litdata,
    write_mds,
)

U32 = struct.Struct("<I").pack


def pil(mode: str, data: bytes) -> bytes:
    return U32(2) + U32(1) + U32(len(mode)) + mode.encode() + data


def several(images: list[bytes]) -> bytes:
    return U32(len(images)) + b"".join(U32(len(image)) for image in images) + b"".join(images)


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), shade).save(file, "PNG")
    return file.getvalue()


MDS: dict[str, list[bytes]] = {
    "str": ["é".encode(), b""],
    "json": [b'{"a": [1]}', b"null"],
    "int": [struct.pack("<q", -5)],
    **{kind: [np.array([7], kind).tobytes()] for kind in ("uint8", "uint16", "uint32", "int16", "int32", "int64")},
    "uint64": [b"\xff" * 8],
    "int8": [b"\xff"],
    "float16": [np.float16(0.5).tobytes()],
    "float32": [np.float32(0.1).tobytes()],
    "float64": [struct.pack("<d", 0.1)],
    "str_int": [b"1" * 30],
    "str_float": [b"0.25"],
    "str_decimal": [b"1.10"],
    "jpeg": [jpeg(1)],
    "png": [png(3)],
    "bytes": [jpeg(1), png(1), b"RIFF0000WAVE", b"\0\0\0\0ftypisom", b"GIF89a", b"fLaC", b"anything", b""],
    "jpeg_array": [several([jpeg(1), jpeg(2)])],
    "jpegarray": [several([jpeg(1)])],
    "list[jpeg]": [U32(0) + several([jpeg(1)])],
    "list[png]": [U32(0) + several([png(1), png(2)])],
    "list[pil]": [U32(0) + several([pil("L", b"ab"), pil("CMYK", b"abcdefgh")])],
    "pil": [pil("RGB", b"abcdef"), pil("CMYK", b"abcdefgh"), pil("I;16", b"abcd")],
    "ndarray": [bytes([17, 2 << 2, 1, 3]) + b"\1\0\2\0\3\0"],
    "ndarray:int16": [bytes([1 << 2 | 1, 3, 0]) + b"\1\0\2\0\3\0"],
    "ndarray:int16:3": [b"\1\0\2\0\3\0"],
    "ndarray:float64:2,1": [struct.pack("<dd", 1, 2)],
}
LITDATA: dict[str, list[bytes]] = {
    "str": [b"a"],
    "text": ["é".encode()],
    "bool": [b"\1", b"\0"],
    "int": [struct.pack("<q", -5)],
    "float": [struct.pack("<d", 0.5)],
    "json": [b'["a"]', b'{"k": null}'],
    "bytes": [b"anything", jpeg(1)],
    "file:flac": [b"fLaC"],
    "file": [b"OggS"],
    "image": [jpeg(2)],
    "image:png": [png(2)],
    "jpeg": [jpeg(2)],
    "jpeg_array": [several([jpeg(1), jpeg(2)])],
    "video:mp4": [b"film"],
    "video": [b"film"],
    "audio:wav": [b"sound"],
    "pdf": [b"%PDF-"],
    "pil": [pil("RGB", b"abcdef"), pil("CMYK", b"abcdefgh")],
    "numpy": [U32(1) + U32(2) + U32(1) + U32(2) + b"\1\0\2\0"],
    "no_header_numpy:1": [b"\1\0\2\0"],
    "tensor": [struct.pack(">IIII", 13, 2, 2, 1) + b"\1\0\2\0"],
    "no_header_tensor:14": [b"\1\0\2\0"],
}


def one_column(encoding: str, folder: Path) -> Path:
    return write_mds(folder, {"x.y": encoding}, [[data] for data in MDS[encoding]])


def one_leaf(kind: str, folder: Path) -> Path:
    return write_litdata(folder, [kind], LEAF, [[data] for data in LITDATA[kind]])


def tree(folder: Path) -> Path:
    """Write nested dicts, lists and tuples with values and parts."""
    several_leaves = {"type": "builtins.list", "context": "null", "children_spec": [LEAF, LEAF]}
    spec = dict_spec(
        ["a", "b", "c"], [dict_spec(["x", "y"]), several_leaves, {**several_leaves, "type": "builtins.tuple"}]
    )
    row = [struct.pack("<q", 1), jpeg(1), b"p", b"q", b"r", jpeg(2)]
    return write_litdata(folder, ["int", "bytes", "str", "str", "str", "bytes"], spec, [row, row])


def listed(folder: Path) -> Path:
    """Write items that are lists."""
    spec = {"type": "builtins.list", "context": "null", "children_spec": [LEAF, LEAF, LEAF]}
    return write_litdata(folder, ["str", "bytes", "int"], spec, [[b"a", jpeg(1), struct.pack("<q", 3)]])


def nested_rows(folder: Path) -> Path:
    """Write rows of Arrow with bytes in structs and lists, and nulls."""
    source = write_litdata(folder, ["bytes"], LEAF, [[b""]] * 2)
    rows = [
        {"a": {"x": 1, "y": None}, "b": [1.5], "c": [jpeg(1), jpeg(2)], "d": {"bytes": b"fLaC", "path": "p"}},
        {"a": None, "b": [], "c": None, "d": {"bytes": b"fLaC", "path": None}},
    ]
    (source / "chunk-0-0.bin").write_bytes(arrow_rows(rows))
    return source


def many_chunks(folder: Path) -> Path:
    """Write more than ten chunks whose order differs from that of their names."""
    rows = [[f"no. {i}".encode()] for i in range(24)]
    return write_litdata(folder, ["str"], dict_spec(["text"]), rows, a_chunk=2)


def damaged_columns(folder: Path) -> Path:
    """Write seven records, of which the first and the last two are whole."""
    columns = {"a": "ndarray:float32:2", "b": "int", "c": "json", "d": "pil", "e": "float64"}
    good = [bytes(8), bytes(8), b"1", pil("L", b"ab"), bytes(8)]
    others = [bytes(7), bytes(3), b"{", pil("L", b"ab")[:9], struct.pack("<d", float("nan"))]
    rows = [good, *([*good[:i], others[i], *good[i + 1 :]] for i in range(5)), good]
    return write_mds(folder, columns, rows)


def second_fields(folder: Path) -> Path:
    """Write several fields of one kind, of which the later ones are called by their names."""
    columns = {"image": "jpeg", "mask.1": "jpeg", "thumb": "bytes", "_x/y": "png", "z": "png"}
    return write_mds(folder, columns, [[jpeg(1), jpeg(2), jpeg(3), png(1), png(2)]])


def raw_and_packed(folder: Path) -> Path:
    """Write shards of which some exist raw and compressed, and some only compressed."""
    source = write_captioned_mds(folder, packed="zstd")
    write_captioned_mds(folder.with_name("raw"))
    (folder.with_name("raw") / "shard.00001.mds").rename(folder / "shard.00001.mds")
    return source


CASES: dict[str, Callable[[Path], Path]] = {
    **{f"mds {encoding}": partial(one_column, encoding) for encoding in MDS},
    **{f"litdata {kind}": partial(one_leaf, kind) for kind in LITDATA},
    **{f"mds in {packed or 'no packing'}": partial(write_captioned_mds, packed=packed) for packed in PACKERS},
    **{f"litdata by {level}": partial(write_captioned_litdata, level=level) for level in (None, "chunk", "sample")},
    "rows": write_arrow_litdata,
    "rows in zstd": partial(write_arrow_litdata, compression="zstd"),
    "rows as a stream": partial(write_arrow_litdata, stream=True),
    "nested rows": nested_rows,
    "tree": tree,
    "list": listed,
    "many chunks": many_chunks,
    "damaged columns": damaged_columns,
    "second fields": second_fields,
    "raw and packed": raw_and_packed,
}


def comparable(name: str, data: bytes) -> str:
    """Return what is compared of a part: for encoded pixels their decoded values, because Pillow's releases differ."""
    if name.endswith((".png", ".tif")):
        with Image.open(io.BytesIO(data)) as image:
            return f"{image.mode} {image.size} {hashlib.sha256(image.tobytes()).hexdigest()[:16]}"
    return data.decode() if name.endswith(".json") else hashlib.sha256(data).hexdigest()[:16]


def comparable_parts(parts: dict[str, bytes]) -> dict[str, Any]:
    """Return all members of shards, or parts of samples, by name, as `comparable` returns them."""
    return {name: comparable(name, data) for name, data in parts.items()}
