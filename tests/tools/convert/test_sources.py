"""What a source is taken for, by its marks; and what is refused, with what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, recognize, run_conversion
from savable_pipeline.tools.convert.sources import WORDS
from tests.conftest import write_tar
from tests.support.toy_files import SMALL, fill, tar_files
from tests.support.toy_records import write_captioned_litdata, write_captioned_mds

LIST = b'[\n {"a": 1}]'
HTTP = b"url\nhttp://x/a.jpg\n"


def files(folder: Path, *names: str, **contents: bytes) -> Path:
    for name, content in {**dict.fromkeys(names, b"x"), **contents}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", b"{}\n", "jsonl"),
        ("a.ndjson.gz", b"", "jsonl"),
        ("a.JSONL.ZST", b"", "jsonl"),
        ("a.json", b"\xef\xbb\xbf" + LIST, "json"),
        ("a.json.gz", gzip.compress(LIST, mtime=0), "json"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "jsonl"),
        ("a.csv", b"", "csv"),
        ("a.tsv.xz", b"", "csv"),
        ("a.tar", b"", "tars"),
        ("a.tgz", b"", "packed"),
        ("a.parquet", b"", "parquet"),
        ("a.arrow", b"", "arrow"),
    ],
)
def test_file_is_recognized_by_name_and_first_bytes(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    files(tmp_path, **{name: content})
    assert recognize(tmp_path / name).kind == kind


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.zip", r"\.zip is not read here: unpack it"),
        ("a.tfrecord", "write its samples with sp.ShardWriter"),
        ("shard.00000.mds", "name the folder with its index.json"),
        ("a.xyz", "unknown format.*\nKnown: a folder of files"),
        ("a.json", "expected a list of objects"),
    ],
)
def test_unsupported_file_is_rejected_with_a_fix(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recognize(files(tmp_path, **{name: b'{"a": [1,\n2]}'}) / name)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.jpg", "b/c.d/a.txt"], "folder"),
        (["a.tar", "b/c.tar", "a.tar.idx", "a.json", "a.parquet", "a_stats.json", "README.md", ".x/y.jpg"], "tars"),
        (["a.tar.gz", "b/c.tar"], "packed"),
        (["a.TAR.GZ", "b/c.TAR"], "packed"),
        (["a.tar.gz", "a.parquet"], "packed"),
        (["a.tar", "a.jpg"], "folder"),  # where each tar is rejected
        (["a.csv", "a.jpg"], "folder"),  # a sample with a part csv
        (["a.bin", "a.idx"], "folder"),
        (["a.json", "b.json"], "folder"),
        (["data/train-0.parquet", ".gitattributes"], "hub"),
        (["x.parquet", "y.txt", "README.md", "load.py", "z.yaml"], "parquet"),
        (["state.json", "dataset_info.json", "data-0.arrow"], "hf"),
        (["dataset_dict.json", "train/data-0.arrow"], "hf"),
        (["data-0.arrow"], "arrow"),
    ],
)
def test_folder_is_recognized_by_its_contents(tmp_path: Path, names: list[str], kind: str) -> None:
    assert recognize(files(tmp_path, *names)).kind == kind


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"metadata.csv": b"", "a.jpg": b""}, r"the lines of metadata\.csv may be the samples.* --as folder"),
        ({"d/0.jsonl.gz": b"", "d/1.jsonl.gz": b""}, r"the lines of d/0\.jsonl\.gz"),
        ({"llava.json": LIST, "img/a.jpg": b""}, r"the lines of llava\.json"),
        ({"llava.json.gz": gzip.compress(LIST), "img/a.jpg": b""}, r"the lines of llava\.json\.gz"),
        (
            {"metadata.parquet": b"", "a.jpg": b""},
            r"has metadata\.parquet and other files \(a\.jpg\)\. .* --as parquet",
        ),
        (
            {"m.parquet": b"", "a.jpg": b"", ".gitattributes": b""},
            r"other files \(a\.jpg\)\. Pass --as hub for the rows alone",
        ),
        ({"x.parquet": b"", "y.arrow": b""}, r"other files \(y\.arrow\)"),
        ({"x.arrow": b"", "y.tar": b""}, r"other files \(y\.tar\)"),
        ({"a.zip": b"", "a/b.jpg": b""}, r"has a\.zip, and \.zip is not read here: unpack it"),
        (
            {"x/data/a.lance": b"", "x/_versions/1.manifest": b""},
            r"\.lance is not read here: write it as Parquet, `pyarr",
        ),
        ({"a.tar.gz": b"", "b.jpg": b""}, r"compressed tars \(a\.tar\.gz\) beside other files \(b\.jpg\)"),
        ({"a.tar": b"", "b/B.TAR": b""}, r"readers read tars named \.tar\. Rename b/B\.TAR"),
        ({"t.bin": b"", "t.idx": b"MMIDIDX\0\0 and more"}, "Megatron token files"),
        ({"shard.00000.mds": b""}, r"and \.mds is not read here: name the folder"),
        ({"chunk-0-0.bin": b""}, r"chunks of LitData \(chunk-0-0\.bin\) without index\.json"),
        ({"index.json": json.dumps({"shards": [{"format": "xsv"}]}).encode()}, "shards of the format xsv"),
    ],
)
def test_unsupported_folder_is_rejected_with_a_fix(tmp_path: Path, found: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recognize(files(tmp_path, **found))


def test_mds_and_litdata_are_recognized_by_index_and_several_are_named(tmp_path: Path) -> None:
    assert recognize(write_captioned_mds(tmp_path / "in/train")).kind == "mds"
    assert recognize(write_captioned_litdata(tmp_path / "in/val")).kind == "litdata"
    with pytest.raises(ValueError, match=r"has several datasets\. Convert them one by one: train, val"):
        recognize(tmp_path / "in")


def test_recognized_format_is_printed_and_can_be_set(tmp_path: Path) -> None:
    source = files(tmp_path / "in", "metadata.csv", "a.jpg", "a.txt")
    arguments = ["convert", str(source), str(tmp_path / "out"), "--no-check-images"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    told = CliRunner().invoke(app, [*arguments, "--as", "folder"])
    assert told.exit_code == 0 and told.stderr.startswith(f"reading {source}: a folder of files\n")
    told = CliRunner().invoke(app, [*arguments, "--as", "files"])
    assert told.exit_code == 2 and f"the kind of a source is one of {', '.join(WORDS)}, not 'files'" in told.stderr


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_records_that_name_urls_are_rejected_before_anything_is_written(tmp_path: Path, name: str) -> None:
    files(tmp_path, **{"a.jsonl": b'{"image": "https://x/a.jpg"}\n', "a.csv": HTTP})
    with pytest.raises(ValueError, match=r"URLs, not files.* with img2dataset"):
        run_conversion(tmp_path / name, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    assert run_conversion(tmp_path / name, tmp_path / "out", Options(file_fields=())).samples == 1
    assert b"http" in tar_files(tmp_path / "out")[f"00000000{1 + 0}.json"]
    with pytest.raises(ValueError, match=r"a Path cannot hold a URL. Pass it as a str"):
        recognize(Path("s3://bucket/data"))


def test_source_url_is_recognized(tmp_path: Path) -> None:
    files(tmp_path, **{"a.jsonl": b'[1]\n{"image": "https://x/a.jpg"}\n'})
    with pytest.raises(ValueError, match=r"such as the field 'image' names 'https://x/a\.jpg'. Download"):
        run_conversion(tmp_path / "a.jsonl", tmp_path / "out", SMALL)


def test_tars_are_read_unchanged_with_a_message(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/a.tar", [("k.txt", b"x")])
    with pytest.raises(ValueError, match=r"tars need no conversion\. Read them by sp\.TarShardReader.* --reshard"):
        run_conversion(tmp_path / "in", tmp_path / "out", SMALL)
    with pytest.raises(ValueError, match="a folder of files: --reshard is only for tars"):
        run_conversion(fill(tmp_path / "files", 2), tmp_path / "out", SMALL, reshard=True)
    (tmp_path / "in/a.tar").rename(tmp_path / "in/a.tar.gz")
    with pytest.raises(ValueError, match=r"re-packed as they are\. Convert them first"):
        run_conversion(tmp_path / "in", tmp_path / "out", SMALL, reshard=True)
