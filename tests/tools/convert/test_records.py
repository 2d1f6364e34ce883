"""MDS and LitData become samples: each encoding, what is refused, and what is damaged or changes."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.record_cases import CASES, comparable_parts
from tests.support.toy_files import SMALL, jpeg, reject_reasons, tar_files
from tests.support.toy_records import (
    LEAF,
    arrow_rows,
    write_arrow_litdata,
    write_captioned_litdata,
    write_captioned_mds,
    write_litdata,
    write_mds,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "data/stores/golden_records.json").read_text())
UNREAD = Options(shard_samples=3, check_images=False)  # bytes that only start as media do

U32 = struct.Struct("<I").pack


@pytest.mark.parametrize("case", CASES)
def test_each_encoding_becomes_its_documented_parts(tmp_path: Path, case: str) -> None:
    """The same file says what a store gives: tests/data/stores/test_record_folder_store.py."""
    report = run_conversion(CASES[case](tmp_path / "in"), tmp_path / "out", UNREAD)
    assert comparable_parts(tar_files(tmp_path / "out")) == GOLDEN[case]["parts"]
    assert [[reject.file, reject.key, reject.reason] for reject in report.rejected] == GOLDEN[case]["rejected"]


@pytest.mark.parametrize("size", [0, 1 << 60])
@pytest.mark.parametrize("packed", ["gz", "zstd"])
def test_compressed_mds_of_another_size_or_content_is_damaged(tmp_path: Path, packed: str, size: int) -> None:
    source = write_captioned_mds(tmp_path / "in", 3, packed=packed)
    index = json.loads((source / "index.json").read_text())
    index["shards"][0]["raw_data"]["bytes"] = size
    (source / "index.json").write_text(json.dumps(index))
    path = source / f"shard.00000.mds.{packed}"
    if packed == "gz":
        path.write_bytes(b"\xff" * 9 + path.read_bytes()[9:])
    with pytest.raises(ValueError, match=rf"{path}: damaged: "):
        run_conversion(source, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["br", "snappy", "lz4"])
def test_mds_of_an_unsupported_compression_is_rejected_with_the_supported_ones(tmp_path: Path, name: str) -> None:
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


def test_a_field_can_be_the_key(tmp_path: Path) -> None:
    rows = [[key.encode(), jpeg(1)] for key in ("a/1", "b", "a/1", "c.d")]
    source = write_mds(tmp_path / "in", {"id": "str", "image": "jpeg"}, rows)
    report = run_conversion(source, tmp_path / "out", Options(key_field="id"))
    assert [name for name in tar_files(tmp_path / "out") if name.endswith("jpg")] == ["a/1.jpg", "b.jpg"]
    assert [reject.reason for reject in report.rejected] == ["duplicate key", "name that a tar cannot carry"]


@pytest.mark.parametrize(
    ("encoding", "told"), [("pkl", "has pickles, which could run code"), ("mystery", "has the encoding 'mystery'")]
)
def test_pickles_and_unknown_encodings_are_rejected_by_name(tmp_path: Path, encoding: str, told: str) -> None:
    source = write_mds(tmp_path / "in", {"ok": "str", "x": encoding}, [[b"", b""]])
    with pytest.raises(ValueError, match=f"the column 'x' {told}"):
        run_conversion(source, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "count"])
def test_files_that_are_not_what_the_index_says_are_an_error(tmp_path: Path, change: str) -> None:
    shard = write_captioned_mds(tmp_path / "in") / "shard.00001.mds"
    raw = shard.read_bytes()
    shard.unlink()
    if change != "gone":
        shard.write_bytes({"cut": raw[:-9], "longer": raw + b"x", "count": b"\7" + raw[1:]}[change])
    with pytest.raises(ValueError, match=r"shard\.00001\.mds: .*[Cc]opy (it again|the whole folder)"):
        run_conversion(tmp_path / "in", tmp_path / "out", SMALL)


def test_index_may_not_refer_outside_its_folder(tmp_path: Path) -> None:
    source = write_captioned_mds(tmp_path / "in")
    (source / "shard.00000.mds").rename(tmp_path / "secret")
    index = (source / "index.json").read_text().replace("shard.00000.mds", "../secret")
    (source / "index.json").write_text(index)
    with pytest.raises(ValueError, match="outside the folder"):
        run_conversion(source, tmp_path / "out", SMALL)


@pytest.mark.parametrize(
    ("formats", "config", "message"),
    [
        (["pickle"], {}, "the format pickle has pickles"),
        (["graph"], {}, "the format graph has pickles"),
        (["nifti"], {}, "the format 'nifti' is not supported"),
        (["str"], {"encryption": {"level": "chunk"}}, "encryption is not supported"),
        (["str"], {"item_loader": "TokensLoader"}, "the item loader TokensLoader is not supported"),
        (["str"], {"compression": "zstd", "compression_level": "item"}, "compression by item is not supported"),
        (
            ["str"],
            {"compression": "zstd", "compression_level": "batch"},
            r"compression by batch is not supported\. Read it",
        ),
        (["str"], {"compression": "lz4"}, "the compression lz4 is not supported"),
        (["str", "str"], {}, "2 formats for 1 leaves"),
    ],
)
def test_unsupported_litdata_features_are_rejected_by_name(
    tmp_path: Path, formats: list[str], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_conversion(write_litdata(tmp_path / "in", formats, LEAF, [[b""]], **config), tmp_path / "out", SMALL)


def test_chunks_decompressed_in_place_by_litdata_are_read(tmp_path: Path) -> None:
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


def test_sample_that_cannot_be_decompressed_is_rejected_alone(tmp_path: Path) -> None:
    source = write_captioned_litdata(tmp_path / "in", level="sample")
    path = source / "chunk-0-1.bin"
    raw = path.read_bytes()
    begin = raw.index(b"\x28\xb5\x2f\xfd")  # the magic of zstd
    path.write_bytes(raw[:begin] + bytes(4) + raw[begin + 4 :])
    assert run_conversion(source, tmp_path / "out", SMALL).samples == 9
    assert reject_reasons(tmp_path / "out") == {"chunk-0-1.bin, record 4": "damaged record"}


def test_undeclared_framed_chunk_is_rejected_by_name(tmp_path: Path) -> None:
    source = write_captioned_litdata(tmp_path / "in")
    (source / "chunk-0-1.bin").write_bytes(b"LDFZ01\0\0" + bytes(80))
    with pytest.raises(ValueError, match=r"chunk-0-1\.bin: compression by batch is not supported\. Read it"):
        run_conversion(source, tmp_path / "out", SMALL)


def test_binary_json_of_litdata_is_rejected_by_name_alone(tmp_path: Path) -> None:
    rows = [[b'{"a": 1}'], [b"\x05" + U32(1) + U32(1) + b"k" + b"\x0b"], [b"\x0b"]]
    source = write_litdata(tmp_path / "in", ["json"], LEAF, rows)
    report = run_conversion(source, tmp_path / "out", SMALL)
    assert (report.samples, [reject.reason for reject in report.rejected]) == (1, ["binary JSON"] * 2)
    assert "Read it with its own library" in report.rejected[0].detail
    with pytest.raises(sp.ShardError, match="row 1: binary JSON: LitData's binary form of JSON") as caught:
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
    with pytest.raises(ValueError, match=r"chunk-0-1\.bin: .*Copy it again"):
        run_conversion(source, tmp_path / "out", SMALL)


def test_rows_in_arrow_without_pyarrow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_arrow_litdata(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"need pyarrow. Run `pip install pyarrow`"):
        run_conversion(source, tmp_path / "out", SMALL)
