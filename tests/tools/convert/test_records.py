"""MDS and LitData become samples: each encoding, what is refused, and what is damaged or changes."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.toy_files import SMALL, jpeg, reasons, snapshot, tar_files
from tests.support.toy_records import (
    LEAF,
    arrow_rows,
    dict_spec,
    write_arrow_litdata,
    write_captioned_litdata,
    write_captioned_mds,
    write_litdata,
    write_mds,
)

UNREAD = Options(shard_samples=3, check_images=False)  # bytes that only begin as media do

U32 = struct.Struct("<I").pack


def pil(mode: str, data: bytes) -> bytes:
    return U32(2) + U32(1) + U32(len(mode)) + mode.encode() + data


def several(images: list[bytes]) -> bytes:
    return U32(len(images)) + b"".join(U32(len(image)) for image in images) + b"".join(images)


def array(data: bytes) -> Any:
    return np.load(io.BytesIO(data))


def test_a_folder_of_mds_becomes_its_samples(tmp_path: Path) -> None:
    report = run_conversion(write_captioned_mds(tmp_path / "in"), tmp_path / "out", SMALL)
    assert (report.samples, report.shards, report.rejected) == (10, 4, [])
    files = tar_files(tmp_path / "out")
    assert [name for name in files if name.startswith("000000007")] == [
        f"000000007.{e}" for e in ("jpg", "json", "npy")
    ]
    assert files["000000007.jpg"] == jpeg(7)
    assert files["000000007.json"] == b'{"caption": "no. 7", "label": 7}'
    assert array(files["000000007.npy"]).tolist() == [7.0, 7.0]


def shards(folder: Path) -> dict[str, str]:
    """What a conversion wrote, less what it says of its source."""
    return {name: hashed for name, hashed in snapshot(folder).items() if "convert" not in name}


@pytest.mark.parametrize("packed", ["gz", "bz2", "zstd"])
def test_compressed_mds_makes_the_same_bytes(tmp_path: Path, packed: str) -> None:
    run_conversion(write_captioned_mds(tmp_path / "plain"), tmp_path / "one", SMALL)
    source = write_captioned_mds(tmp_path / "packed", packed=packed)
    run_conversion(source, tmp_path / "two", SMALL)
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    path = source / f"shard.00001.mds.{packed}"
    path.write_bytes(b"\xff" * 9 + path.read_bytes()[9:])
    with pytest.raises(ValueError, match=rf"shard\.00001\.mds\.{packed}: damaged: "):
        run_conversion(source, tmp_path / "three", SMALL)
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize("name", ["br", "snappy", "lz4"])
def test_mds_in_a_compression_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path, name: str) -> None:
    source = write_captioned_mds(tmp_path / "in", packed="gz")
    index = (source / "index.json").read_text()
    index = index.replace('"compression": "gz"', f'"compression": "{name}:2"').replace(".mds.gz", f".mds.{name}")
    (source / "index.json").write_text(index)
    for path in source.glob("*.gz"):
        path.rename(path.with_suffix(f".{name}"))
    told = (
        rf"compressed with '{name}', which is not read, where gz, bz2, zstd are: .* compression=\"zstd\", or decompress"
    )
    with pytest.raises(ValueError, match=told):
        run_conversion(source, tmp_path / "out", SMALL)
    with pytest.raises(sp.ShardError, match=told):
        sp.open_dataset(source)[0].key  # noqa: B018


@pytest.mark.parametrize("size", [0, 1 << 60])
def test_compressed_mds_of_another_size_than_the_index_says_is_damaged(tmp_path: Path, size: int) -> None:
    source = write_captioned_mds(tmp_path / "in", 3, packed="zstd")
    index = json.loads((source / "index.json").read_text())
    index["shards"][0]["raw_data"]["bytes"] = size
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"damaged: "):
        run_conversion(source, tmp_path / "out", SMALL)


@pytest.mark.parametrize(
    ("encoding", "data", "value"),
    [
        ("str", "é".encode(), "é"),
        ("json", b'{"a": [1]}', {"a": [1]}),
        ("int", struct.pack("<q", -5), -5),
        ("uint64", b"\xff" * 8, 2**64 - 1),
        ("int8", b"\xff", -1),
        ("float16", np.float16(0.5).tobytes(), 0.5),
        ("float64", struct.pack("<d", 0.1), 0.1),
        ("str_int", b"1" * 30, int("1" * 30)),
        ("str_float", b"0.25", 0.25),
        ("str_decimal", b"1.10", "1.10"),
    ],
)
def test_values_of_mds_are_in_the_json_of_a_sample(tmp_path: Path, encoding: str, data: bytes, value: Any) -> None:
    run_conversion(write_mds(tmp_path / "in", {"x": encoding}, [[data]]), tmp_path / "out", SMALL)
    assert json.loads(tar_files(tmp_path / "out")["000000000.json"]) == {"x": value}


@pytest.mark.parametrize(
    ("encoding", "data", "names"),
    [
        ("jpeg", jpeg(1), ["jpg"]),
        ("bytes", jpeg(1), ["jpg"]),
        ("bytes", b"RIFF0000WAVE", ["wav"]),
        ("bytes", b"anything", ["bin"]),
        ("jpeg_array", several([jpeg(1), jpeg(2)]), ["0.jpg", "1.jpg"]),
        ("list[jpeg]", U32(0) + several([jpeg(1)]), ["0.jpg"]),
        ("list[pil]", U32(0) + several([pil("L", b"ab")]), ["0.png"]),
        ("pil", pil("RGB", b"abcdef"), ["png"]),
        ("pil", pil("CMYK", b"abcdefgh"), ["tif"]),
        ("ndarray", bytes([17, 2 << 2, 1, 3]) + b"\1\0\2\0\3\0", ["npy"]),
        ("ndarray:int16", bytes([1 << 2 | 1, 3, 0]) + b"\1\0\2\0\3\0", ["npy"]),
        ("ndarray:int16:3", b"\1\0\2\0\3\0", ["npy"]),
    ],
)
def test_media_of_mds_are_parts_of_their_own(tmp_path: Path, encoding: str, data: bytes, names: list[str]) -> None:
    report = run_conversion(write_mds(tmp_path / "in", {"x": encoding}, [[data]]), tmp_path / "out", UNREAD)
    files = tar_files(tmp_path / "out")
    assert report.rejected == [] and list(files) == [f"000000000.{name}" for name in names]
    first = files[f"000000000.{names[0]}"]
    if names == ["npy"]:
        assert array(first).ravel().tolist() == [1, 2, 3]
    elif encoding == "pil":
        assert Image.open(io.BytesIO(first)).tobytes() == data[12 + data[8] :]
    else:
        assert first in data or encoding == "list[pil]"


def test_a_second_field_of_a_kind_has_its_own_name(tmp_path: Path) -> None:
    columns = {"image": "jpeg", "mask.1": "jpeg", "thumb": "bytes"}
    run_conversion(write_mds(tmp_path / "in", columns, [[jpeg(1), jpeg(2), jpeg(3)]]), tmp_path / "out", SMALL)
    files = tar_files(tmp_path / "out")
    assert files == {
        "000000000.jpg": jpeg(1),
        "000000000.mask_1.jpg": jpeg(2),
        "000000000.thumb.jpg": jpeg(3),
    }


def test_a_field_can_be_the_key(tmp_path: Path) -> None:
    rows = [[key.encode(), jpeg(1)] for key in ("a/1", "b", "a/1", "c.d")]
    source = write_mds(tmp_path / "in", {"id": "str", "image": "jpeg"}, rows)
    report = run_conversion(source, tmp_path / "out", Options(key_field="id"))
    assert [name for name in tar_files(tmp_path / "out") if name.endswith("jpg")] == ["a/1.jpg", "b.jpg"]
    assert [reject.reason for reject in report.rejected] == ["duplicate key", "name that a tar cannot carry"]


@pytest.mark.parametrize(
    ("encoding", "told"), [("pkl", "holds pickles, and unpickling runs"), ("mystery", "has the encoding 'mystery'")]
)
def test_pickles_and_unknown_encodings_are_refused_by_name(tmp_path: Path, encoding: str, told: str) -> None:
    source = write_mds(tmp_path / "in", {"ok": "str", "x": encoding}, [[b"", b""]])
    with pytest.raises(ValueError, match=f"the column 'x' {told}"):
        run_conversion(source, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


def test_damaged_records_are_rejected_and_the_others_taken(tmp_path: Path) -> None:
    columns = {"a": "ndarray:float32:2", "b": "int", "c": "json", "d": "pil", "e": "float64"}
    good = [bytes(8), bytes(8), b"1", pil("L", b"ab"), bytes(8)]
    bad = [bytes(7), bytes(3), b"{", pil("L", b"ab")[:9], struct.pack("<d", float("nan"))]
    rows = [good, *([*good[:i], bad[i], *good[i + 1 :]] for i in range(5)), good]
    report = run_conversion(write_mds(tmp_path / "in", columns, rows), tmp_path / "out", SMALL)
    assert report.samples == 2
    assert reasons(tmp_path / "out") == {
        **{f"shard.0000{i // 4}.mds, record {i}": "damaged record" for i in range(1, 5)},
        "shard.00001.mds, record 5": "value that JSON cannot hold",
    }


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "count"])
def test_files_that_are_not_what_the_index_says_are_an_error(tmp_path: Path, change: str) -> None:
    shard = write_captioned_mds(tmp_path / "in") / "shard.00001.mds"
    raw = shard.read_bytes()
    shard.unlink()
    if change != "gone":
        shard.write_bytes({"cut": raw[:-9], "longer": raw + b"x", "count": b"\7" + raw[1:]}[change])
    with pytest.raises(ValueError, match=r"shard\.00001\.mds: .*copy"):
        run_conversion(tmp_path / "in", tmp_path / "out", SMALL)


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    source = write_captioned_mds(tmp_path / "in")
    (source / "shard.00000.mds").rename(tmp_path / "secret")
    index = (source / "index.json").read_text().replace("shard.00000.mds", "../secret")
    (source / "index.json").write_text(index)
    with pytest.raises(ValueError, match="not there"):
        run_conversion(source, tmp_path / "out", SMALL)


def test_a_folder_of_litdata_becomes_its_samples(tmp_path: Path) -> None:
    report = run_conversion(write_captioned_litdata(tmp_path / "in"), tmp_path / "out", SMALL)
    assert (report.samples, report.rejected) == (10, [])
    files = tar_files(tmp_path / "out")
    assert files["000000009.jpg"] == jpeg(9)
    assert files["000000009.json"] == b'{"caption": "no. 9", "label": 9}'


@pytest.mark.parametrize(
    ("kind", "data", "name", "value"),
    [
        ("bool", b"\1", "json", {"item": True}),
        ("float", struct.pack("<d", 0.5), "json", {"item": 0.5}),
        ("json", b'["a"]', "json", {"item": ["a"]}),
        ("file:flac", b"fLaC", "flac", b"fLaC"),
        ("image:webp", b"", "", "empty file"),
        ("video:mp4", b"film", "mp4", b"film"),
        ("audio:wav", b"sound", "wav", b"sound"),
        ("tifffile", b"II", "", "unreadable image"),
        ("numpy", U32(1) + U32(2) + U32(1) + U32(2) + b"\1\0\2\0", "npy", [[1, 2]]),
        ("no_header_numpy:1", b"\1\0\2\0", "npy", [1, 2]),
        ("tensor", struct.pack(">IIII", 13, 2, 2, 1) + b"\1\0\2\0", "npy", [[1], [2]]),
        ("no_header_tensor:14", b"\1\0\2\0", "npy", [1, 2]),
        ("numpy", U32(14) + U32(0), "", "damaged record"),
        ("no_header_tensor:10", b"\1\0", "", "damaged record"),
        ("tensor", struct.pack(">III", 13, 1, 99), "", "damaged record"),
        ("int", b"\1", "", "damaged record"),
    ],
)
def test_each_format_of_litdata(tmp_path: Path, kind: str, data: bytes, name: str, value: Any) -> None:
    report = run_conversion(
        write_litdata(tmp_path / "in", [kind], LEAF, [[data]]), tmp_path / "out", UNREAD if name else SMALL
    )
    if not name:
        assert [reject.reason for reject in report.rejected] == [value]
        return
    found = tar_files(tmp_path / "out")[f"000000000.{name}"]
    assert {"npy": lambda: array(found).tolist(), "json": lambda: json.loads(found)}.get(name, lambda: found)() == value


def test_the_tree_of_an_item_is_that_of_its_values(tmp_path: Path) -> None:
    several = {"type": "builtins.list", "context": "null", "children_spec": [LEAF, LEAF]}
    spec = dict_spec(["a", "b", "c"], [dict_spec(["x", "y"]), several, {**several, "type": "builtins.tuple"}])
    formats = ["int", "bytes", "str", "str", "str", "bytes"]
    row = [struct.pack("<q", 1), jpeg(1), b"p", b"q", b"r", jpeg(2)]
    run_conversion(write_litdata(tmp_path / "in", formats, spec, [row]), tmp_path / "out", SMALL)
    files = tar_files(tmp_path / "out")
    assert json.loads(files["000000000.json"]) == {"a": {"x": 1}, "b": ["p", "q"], "c": {"0": "r"}}
    assert list(files) == ["000000000.c_1.jpg", "000000000.jpg", "000000000.json"]


@pytest.mark.parametrize(
    ("formats", "config", "message"),
    [
        (["pickle"], {}, "the format pickle holds pickles"),
        (["graph"], {}, "the format graph holds pickles"),
        (["nifti"], {}, "the format 'nifti' is not read"),
        (["str"], {"encryption": {"level": "chunk"}}, "encryption is not read"),
        (["str"], {"item_loader": "TokensLoader"}, "the item loader TokensLoader is not read"),
        (["str"], {"compression": "zstd", "compression_level": "item"}, "compression by item is not read"),
        (["str"], {"compression": "zstd", "compression_level": "batch"}, "compression by batch is not read: iterate"),
        (["str"], {"compression": "lz4"}, "the compression lz4 is not read"),
        (["str", "str"], {}, "2 formats for 1 leaves"),
    ],
)
def test_what_litdata_has_and_is_not_read_is_refused_by_name(
    tmp_path: Path, formats: list[str], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_conversion(write_litdata(tmp_path / "in", formats, LEAF, [[b""]], **config), tmp_path / "out", SMALL)


def test_chunks_that_litdata_decompressed_in_their_place_are_read(tmp_path: Path) -> None:
    source = write_captioned_litdata(tmp_path / "in")
    index = json.loads((source / "index.json").read_text())
    index["config"]["compression"] = "zstd"
    for chunk in index["chunks"]:
        chunk["filename"] = chunk["filename"].replace(".bin", ".zstd.bin")
    (source / "index.json").write_text(json.dumps(index))
    assert run_conversion(source, tmp_path / "out", SMALL).samples == 10
    (source / "chunk-0-1.bin").unlink()
    with pytest.raises(ValueError, match=r"chunk-0-1\.zstd\.bin: named by index\.json, and not there"):
        run_conversion(source, tmp_path / "two", SMALL)


@pytest.mark.parametrize("level", ["chunk", "sample"])
def test_compressed_litdata_makes_the_same_bytes(tmp_path: Path, level: str) -> None:
    run_conversion(write_captioned_litdata(tmp_path / "plain"), tmp_path / "one", SMALL)
    run_conversion(write_captioned_litdata(tmp_path / "packed", level=level), tmp_path / "two", SMALL)
    assert shards(tmp_path / "one") == shards(tmp_path / "two")


@pytest.mark.parametrize("how", [{}, {"compression": "zstd"}, {"compression": "lz4"}, {"stream": True}])
def test_rows_in_arrow_make_the_same_samples(tmp_path: Path, how: dict[str, Any]) -> None:
    run_conversion(write_captioned_litdata(tmp_path / "plain"), tmp_path / "one", SMALL)
    run_conversion(write_arrow_litdata(tmp_path / "rows", **how), tmp_path / "two", SMALL)
    assert shards(tmp_path / "one") == shards(tmp_path / "two")


def test_rows_in_arrow_keep_their_shape_and_bytes_become_parts(tmp_path: Path) -> None:
    source = write_litdata(tmp_path / "in", ["bytes"], LEAF, [[b""]] * 2)
    rows = [
        {"a": {"x": 1, "y": None}, "b": [1.5], "c": [jpeg(1), jpeg(2)], "d": {"bytes": b"fLaC", "path": "p"}},
        {"a": None, "b": [], "c": None, "d": {"bytes": b"fLaC", "path": None}},
    ]
    (source / "chunk-0-0.bin").write_bytes(arrow_rows(rows))
    assert run_conversion(source, tmp_path / "out", UNREAD).rejected == []
    files = tar_files(tmp_path / "out")
    assert json.loads(files["000000000.json"]) == {"a": {"x": 1, "y": None}, "b": [1.5], "d": {"path": "p"}}
    assert json.loads(files["000000001.json"]) == {"a": None, "b": [], "c": None, "d": {"path": None}}
    assert [files[f"000000000.{name}"] for name in ("jpg", "c_1.jpg", "flac")] == [jpeg(1), jpeg(2), b"fLaC"]


def test_a_sample_that_cannot_be_decompressed_is_rejected_and_the_others_taken(tmp_path: Path) -> None:
    source = write_captioned_litdata(tmp_path / "in", level="sample")
    path = source / "chunk-0-1.bin"
    raw = path.read_bytes()
    begin = raw.index(b"\x28\xb5\x2f\xfd")  # the magic of zstd
    path.write_bytes(raw[:begin] + bytes(4) + raw[begin + 4 :])
    assert run_conversion(source, tmp_path / "out", SMALL).samples == 9
    assert reasons(tmp_path / "out") == {"chunk-0-1.bin, record 4": "damaged record"}


def test_a_chunk_in_frames_is_refused_by_name_where_the_index_does_not_say_so(tmp_path: Path) -> None:
    source = write_captioned_litdata(tmp_path / "in")
    (source / "chunk-0-1.bin").write_bytes(b"LDFZ01\0\0" + bytes(80))
    with pytest.raises(ValueError, match=r"chunk-0-1\.bin: compression by batch is not read: iterate"):
        run_conversion(source, tmp_path / "out", SMALL)


def test_binary_json_of_litdata_is_refused_by_name_and_the_other_records_taken(tmp_path: Path) -> None:
    rows = [[b'{"a": 1}'], [b"\x05" + U32(1) + U32(1) + b"k" + b"\x0b"], [b"\x0b"]]
    source = write_litdata(tmp_path / "in", ["json"], LEAF, rows)
    report = run_conversion(source, tmp_path / "out", SMALL)
    assert (report.samples, [reject.reason for reject in report.rejected]) == (1, ["binary JSON"] * 2)
    assert "iterate over it with its own library" in report.rejected[0].detail
    with pytest.raises(sp.ShardError, match="row 1: binary JSON: a field in LitData's binary form of JSON") as caught:
        sp.open_dataset(source)[1].json()
    assert caught.value.reason == "binary JSON"


@pytest.mark.parametrize("damage", ["cut", "size", "none", "count"])
def test_rows_in_arrow_that_are_damaged_are_an_error(tmp_path: Path, damage: str) -> None:
    source = write_arrow_litdata(tmp_path / "in")
    path = source / "chunk-0-1.bin"
    raw = path.read_bytes()
    bad = {
        "cut": raw[:200] + raw[-12:],
        "size": raw[:-12] + U32(1 << 31) + raw[-8:],
        "none": raw[-8:],
        "count": arrow_rows([{"a": 1}]),
    }
    path.write_bytes(bad[damage])
    with pytest.raises(ValueError, match=r"chunk-0-1\.bin: .*copy it again"):
        run_conversion(source, tmp_path / "out", SMALL)


def test_rows_in_arrow_without_pyarrow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_arrow_litdata(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'need the package pyarrow: pip install "savable_pipeline\[parquet\]"'):
        run_conversion(source, tmp_path / "out", SMALL)
