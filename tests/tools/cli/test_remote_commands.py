"""The commands `info`, `index`, `check` and `preview` take URLs: they say of shards there what they say of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import run_conversion
from tests.conftest import write_tar
from tests.support.toy_files import SMALL, write_captioned_images
from tests.support.toy_remote_stores import KINDS, LISTED, SIZES, WRITERS, names_of
from tests.support.toy_server import ToyServer, serving


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write seven captioned images in three shards, with Energon's metadata and a split that excludes one."""
    run_conversion(write_captioned_images(tmp_path / "in", 7), tmp_path / "data", SMALL)
    splits = {"split_parts": {"train": ["00000{0..1}.tar"], "val": ["000002.tar"]}, "exclude": ["000001.tar/003"]}
    (tmp_path / "data/.nv-meta/split.yaml").write_text(json.dumps(splits))
    return tmp_path / "data"


@pytest.fixture
def server(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    """Serve the dataset by HTTP."""
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "1")
    with serving(tmp_path) as server:
        yield server


def temporary_folders(cache: Path) -> list[str]:
    """Return the check's temporary folders that are left in the cache."""
    return [path.name for path in cache.rglob("*") if path.name.startswith("check-")]


@pytest.mark.parametrize("shards", ["/data/00000{1..2}.tar"])
def test_remote_info_equals_local_info(server: ToyServer, data: Path, shards: str) -> None:
    here = json.loads(run("info", "--json", f"{data.parent}{shards}").stdout)
    there = json.loads(run("info", "--json", f"{server.url}{shards}").stdout)
    assert there == {**here, "root": f"{server.url}/data"}


def test_remote_check_equals_local_check(server: ToyServer, data: Path, tmp_path: Path) -> None:
    raw = bytearray((data / "000001.tar").read_bytes())
    raw[512:600] = bytes(88)
    (data / "000001.tar").write_bytes(raw)
    (data / "000000.tar.idx").write_bytes(bytes(32))
    (data / "000002.tar").unlink()
    before = server.sent()
    here = json.loads(run("check", "--json", data, "--workers", "1").stdout)
    result = run("check", "--json", f"{server.url}/data/", "--workers", "1")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {**here, "root": f"{server.url}/data"}
    reasons = [problem["reason"] for problem in here["problems"]]
    assert reasons == ["wrong .tar.idx", "unreadable image", "missing shard"]
    assert server.sent() - before == 2 * 10_240  # nothing is kept of what is checked
    assert temporary_folders(tmp_path / "cache") == []


def test_shard_unavailable_on_a_server_is_a_problem_of_that_shard_only(server: ToyServer) -> None:
    server.fault = lambda path, number: "403" if path.endswith("1.tar") else None
    report = json.loads(run("check", "--json", f"{server.url}/data/", "--workers", "1").stdout)
    assert [(problem["shard"], problem["reason"]) for problem in report["problems"]] == [
        ("000001.tar", "cannot be checked")  # one that is forbidden is not missing
    ]
    assert report["samples"] == 4


def test_remote_index_writes_files_to_upload(
    server: ToyServer, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("savable_pipeline.tools.cli.console._LINE_EVERY_S", 0.0)
    (data / INDEX_NAME).unlink()
    made = run("index", f"{server.url}/data/")
    assert made.exit_code == 0
    assert made.stderr.splitlines()[-1].startswith("indexing: 3 of 3 shards")
    (data / INDEX_NAME).write_bytes(Path(made.stdout.removeprefix("index: ").strip()).read_bytes())
    assert open_any(str(data)).manifest() == open_any(f"{server.url}/data/").manifest()
    assert server.sent() == 3 * 10_240


def test_remote_index_lists_damage(server: ToyServer, data: Path) -> None:
    (data / INDEX_NAME).unlink()
    os.truncate(data / "000001.tar", 3000)
    result = run("index", f"{server.url}/data/")
    assert result.exit_code == 1
    assert "000001.tar: no tar header at byte 2560: truncated" in result.stdout


def test_remote_preview_shows_the_same_samples(server: ToyServer, data: Path, tmp_path: Path) -> None:
    pages = []
    for shards in (str(data), f"{server.url}/data/"):
        assert run("preview", shards, "-o", tmp_path / "page.html").exit_code == 0
        pages.append((tmp_path / "page.html").read_text().replace(shards.rstrip("/"), ""))
    assert pages[0] == pages[1]
    assert "caption of b/c.d/005.jpg" in pages[0]


@pytest.mark.parametrize("command", ["info", "index", "check", "preview"])
def test_missing_remote_dataset_is_one_line_and_exit_code_two(server: ToyServer, command: str) -> None:
    result = run(command, f"{server.url}/nowhere/")
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: {server.url}/nowhere: no .nv-meta/savable.index")


def test_preview_downloads_only_the_shown_part_of_a_long_sample(server: ToyServer, tmp_path: Path) -> None:
    film = os.urandom(9 << 20)
    write_tar(tmp_path / "films/0.tar", [("a/b.mp4", film), ("a/b.txt", b"x" * 20_000)])
    sp.TarShardReader(str(tmp_path / "films"), sp.Lane())
    dataset: Any = open_any(f"{server.url}/films/")
    assert dataset.head(0, 0, "MP4", 1000) == (film[:1000], len(film))
    assert dataset.head(0, 0, "txt", 100) == (b"x" * 100, 20_000)
    assert dataset.head(0, 0, "txt", 0) == (b"", 20_000)
    assert dataset.key(0, 0) == "a/b"
    assert server.sent() == 1000 + 100 + 512
    with pytest.raises(KeyError, match="no part 'jpg'"):
        dataset.head(0, 0, "jpg", 1)
    assert dataset.read(0, 0, "mp4") == film
    short: Any = open_any(f"{server.url}/data/")
    assert short.head(0, 0, "txt", 7) == (b"caption", len("caption of 000.txt"))


@pytest.mark.parametrize("kind", ["parquet", pytest.param("tokens", marks=pytest.mark.long)])
def test_every_command_reports_remote_files_like_local_ones(server: ToyServer, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    WRITERS[kind](folder)
    assert run("index", folder).exit_code == 0
    url = f"{server.url}/rows"
    assert run("index", f"{url}/").exit_code == 0
    here, there = (json.loads(run("info", "--json", place).stdout) for place in (str(folder), f"{url}/"))
    assert there == {**here, "root": url}
    sent = server.sent("")
    here, there = (
        json.loads(run("check", "--json", place, "--workers", "1").stdout) for place in (str(folder), f"{url}/")
    )
    assert there == {**here, "root": url}
    assert not there["problems"]
    assert server.sent("") - sent < 1.2 * sum(path.stat().st_size for path in folder.rglob("*.*"))
    pages = []
    for place in (str(folder), url):
        assert run("preview", place, "-o", tmp_path / "page.html").exit_code == 0
        written = (tmp_path / "page.html").read_text().replace(place, "")
        pages.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", written))
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    "kind", [k if k in ("parquet", "mds") else pytest.param(k, marks=pytest.mark.long) for k in KINDS]
)
def test_remote_index_of_files_writes_files_to_upload(server: ToyServer, tmp_path: Path, kind: str) -> None:
    (tmp_path / "rows").mkdir()
    WRITERS[kind](tmp_path / "rows")
    made = run("index", f"{server.url}/rows/{'' if kind in LISTED else names_of(kind)[0]}")
    assert made.exit_code == 0
    place = tmp_path / "rows" / format_named(kind).index_name
    place.parent.mkdir()
    place.write_bytes(Path(made.stdout.removeprefix("index: ").strip()).read_bytes())
    assert open_any(f"{server.url}/rows/").count == (sum(SIZES) if kind in LISTED else SIZES[0])
