"""What lies behind a URL is told by its marks; what is not read there is a line that says what to do."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from savable_pipeline.errors import ShardError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import find_files
from tests.support.toy_server import ToyServer
from tests.support.url_sources import FOLDERS, KINDS, convert_source, url_of


@pytest.mark.parametrize(
    ("names", "url", "words"),
    [
        (["b/1.jpg", "b/1.txt"], "s3://b/", "raw files are read from disks alone. Copy them to a disk"),
        (["b/index.json"], "s3://b/", "raw files are read from disks alone"),
        (
            ["b/a.parquet", "b/1.jpg"],
            "s3://b/",
            r'folder \(1 file, such as 1\.jpg\), parquet .*Pass format="parquet" or format="folder"',
        ),
        (["b/a.zip"], "s3://b/a.zip", r"\.zip is not read here \(.*a\.zip\): unpack it"),
        ([], "{http}/data/", r"web servers cannot be listed\. Name the shards, as in .*/data/\{000\.\.099\}\.tar"),
        ([], "s3://b/a.jsonl", r"s3://b/a\.jsonl: no such object on the server"),
        ([], "ftp://b/a.jsonl", "unsupported URL. Use one of s3, gs, az, http, https"),
    ],
)
def test_unsupported_remote_source_is_one_line_with_a_fix(
    server: ToyServer, tmp_path: Path, names: list[str], url: str, words: str
) -> None:
    for name in names:
        (server.folder / name).parent.mkdir(exist_ok=True)
        (server.folder / name).write_bytes(b"x")
    result = CliRunner().invoke(app, ["convert", url.replace("{http}", server.url), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert re.search(words, " ".join(result.stderr.split())), result.stderr
    assert not (tmp_path / "out").exists()


def test_remote_compressed_tar_named_like_a_plain_one_is_detected(server: ToyServer) -> None:
    (server.folder / "b").mkdir()
    (server.folder / "b/a.tar").write_bytes(gzip.compress(bytes(2000)))
    (found,) = find_files("s3://b/a.tar").packed
    assert found[:3] == ("s3://b/a.tar", "a.tar", (server.folder / "b/a.tar").stat().st_size)


def test_several_remote_tables_are_one_source(server: ToyServer, tmp_path: Path) -> None:
    for name in ("b/a.jsonl", "b/c/b.jsonl"):
        (server.folder / name).parent.mkdir(exist_ok=True)
        (server.folder / name).write_text(f'{{"n": "{name}"}}\n')
    for url in ("s3://b/", "s3://b/{a,c/b}.jsonl"):
        assert convert_source(url, tmp_path / f"out{len(url)}").samples == 2


OTHER = json.dumps({"shards": [{"format": "csv"}]}).encode()


@pytest.mark.parametrize(
    ("files", "url", "words"),
    [
        (
            {"b/1/index.json": OTHER, "b/2/index.json": OTHER},
            "s3://b",
            "raw files are read from disks alone",
        ),
        ({"b/index.json": OTHER}, "s3://b", "shards of the format csv, not mds"),
        ({"b/index.json": OTHER}, "{http}/b/", "shards of the format csv, not mds"),
        ({"b/index.json": b"{}"}, "{http}/b/", r"web servers cannot be listed\. Name the shards"),
        ({"b/v1.5/index.json": OTHER}, "s3://b/v1.5", "shards of the format csv, not mds"),
        ({"b/v1.5/index.json": OTHER}, "s3://b/v1.5/", "shards of the format csv, not mds"),
    ],
)
def test_remote_folders_are_recognized_by_their_index(
    server: ToyServer, files: dict[str, bytes], url: str, words: str
) -> None:
    for name, data in files.items():
        (server.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (server.folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        find_files(url.replace("{http}", server.url))


@pytest.mark.parametrize(
    "kind", [k if k in ("mds", "litdata.chunk") else pytest.param(k, marks=pytest.mark.long) for k in FOLDERS]
)
def test_missing_or_truncated_indexed_file_is_one_line(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    cut = max(path for path in source.iterdir() if path.name != "index.json")
    cut.write_bytes(cut.read_bytes()[:3])
    with pytest.raises(
        (ValueError, ShardError), match=rf"{url_of(server, cut)}: .*\. Copy it again|{url_of(server, cut)}: damaged"
    ):
        convert_source(url_of(server, source), tmp_path / "there")
    cut.unlink()
    with pytest.raises(ValueError, match=f"{url_of(server, cut)}: named by index.json, and not there. Copy the whole"):
        convert_source(url_of(server, source), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_named_format_must_be_readable_remotely(server: ToyServer, tmp_path: Path) -> None:
    source = KINDS["jsonl"](tmp_path / "www/b")
    assert find_files(url_of(server, source), "jsonl").form.name == "jsonl"
    with pytest.raises(ValueError, match=r"no index\.json\. Name the one folder that has it"):
        find_files("s3://b/", "mds")
    with pytest.raises(ValueError, match="no format 'packed'"):
        find_files("s3://b/", "packed")


def test_command_reads_a_url_and_prints_its_format(server: ToyServer, tmp_path: Path) -> None:
    source = KINDS["jsonl"](tmp_path / "www/b")
    result = CliRunner().invoke(app, ["convert", url_of(server, source), str(tmp_path / "out"), "--skip-bad"])
    assert result.exit_code == 0, result.output
    assert "reading s3://b/a.jsonl: format jsonl" in result.stderr
    assert "20 samples in 1 shard" in result.stdout and "a.jsonl:22: malformed JSON" in result.stdout
