"""Sources behind URLs give the shards that they give from a disk, by whichever processes and machines."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from savable_pipeline.cli.main import app
from savable_pipeline.convert import Options, Report, convert, recognize
from savable_pipeline.convert.read import close_sources
from savable_pipeline.core.job_engine import J, R
from savable_pipeline.errors import RemoteError, SavableError
from savable_pipeline.remote.scratch import close_scratch
from tests.support.kills import run_until_killed
from tests.support.toy_engine import ToyEngine
from tests.support.toy_files import SMALL, fill, jpeg, snapshot
from tests.support.toy_server import ToyServer, serving, use_as_s3
from tests.support.toy_sources import HALVES, SOURCES, jsonl

RECORDS = [{"n": i, "text": "x" * 40 * i} for i in range(20)]


def rows() -> pa.Table:
    """Twenty rows, one of which has no picture that can be read."""
    pictures = [jpeg(i) if i != 7 else b"bad" for i in range(20)]
    return pa.table({"jpg": pa.array(pictures, pa.binary()), "txt": [f"row {i}" for i in range(20)]})


def write_parquet(folder: Path) -> Path:
    for name, first, last in (("a", 0, 5), ("sub/b", 5, 16), ("sub/c", 16, 20)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows().slice(first, last - first), folder / f"{name}.parquet", row_group_size=4)
    return folder


def write_arrow(folder: Path) -> Path:
    folder.mkdir(parents=True)
    with pa.ipc.new_file(folder / "a.arrow", rows().schema) as file:
        file.write_table(rows(), max_chunksize=6)
    return folder / "a.arrow"


def write_tars(folder: Path) -> Path:
    """Seven tars without an index."""
    convert(fill(folder.parent / "files", 20, **{"b/020.jpg": jpeg(1)}), folder, SMALL)
    shutil.rmtree(folder / ".nv-meta")
    return folder


def in_folder(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / name).write_bytes(data)
        return folder / name

    return write


def in_twenty(kind: str) -> Callable[[Path], Path]:
    return lambda folder: SOURCES[kind](folder / "in", 20)


FOLDERS = [kind for kind in SOURCES if kind.startswith(("mds", "litdata"))]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS) + b"\nbroken\n"
KINDS: dict[str, Callable[[Path], Path]] = {
    "tars": write_tars,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": in_folder("a.jsonl", LINES),
    "array": in_folder("a.json", json.dumps(RECORDS, indent=1).encode()),
    "packed": in_folder("a.jsonl.gz", gzip.compress(LINES)),
    "table": in_folder("t.csv", b"n,text\n" + b"".join(f"{i},row {i}\n".encode() for i in range(20))),
    **{kind: in_twenty(kind) for kind in FOLDERS},
}
SETTINGS = Options(shard_samples=4, split=(("a", "0.5"), ("b", "0.5")))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    (tmp_path / "www").mkdir()
    (tmp_path / "node").mkdir()
    get_temp_dir()  # of multiprocessing: for its sockets the path below would be too long
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "5")
    with serving(tmp_path / "www") as server:
        use_as_s3(server, monkeypatch)
        yield server
    close_scratch()


def url_of(server: ToyServer, source: Path, scheme: str = "s3") -> str:
    path = source.relative_to(server.folder).as_posix()
    return f"s3://{path}" if scheme == "s3" else f"{server.url}/{path}"


def shards_in(folder: Path) -> dict[str, str]:
    """What a conversion wrote; of its manifest all but where the source lies."""
    found = snapshot(folder)
    manifest = json.loads((folder / ".nv-meta/savable.convert.json").read_text())
    return {**found, ".nv-meta/savable.convert.json": json.dumps({**manifest, "place": ""})}


def converted(source: Path | str, target: Path, **more: Any) -> Report:
    return convert(source, target, SETTINGS, reshard="tars" in str(source), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_url_gives_the_shards_of_the_disk(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = converted(source, tmp_path / "local")
    assert local.samples >= 19 and local.shards > 3
    assert converted(url_of(server, source), tmp_path / "there") == local
    assert shards_in(tmp_path / "there") == shards_in(tmp_path / "local")
    size = sum(path.stat().st_size for path in source.parent.rglob("*") if path.is_file() and kind in str(path))
    assert sum(stop - start for _, start, stop in server.ranges) <= 1.2 * size + 5000, "each byte is fetched once"


SHORT = ("tars", "parquet", "jsonl", "mds")


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.long) for k in KINDS])
def test_machines_give_the_shards_of_the_disk_and_keep_nothing(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = converted(source, tmp_path / "local")

    class Tidy(ToyEngine):
        def _run(self, function: Callable[[J], R], job: J) -> R:
            result = super()._run(function, job)
            assert not list((tmp_path / "node").glob("*/tmp*")), "a job drops what it downloaded"
            return result

    engine = Tidy(tmp_path / "elsewhere")
    assert converted(url_of(server, source), tmp_path / "far", engine=engine) == local
    assert shards_in(tmp_path / "far") == shards_in(tmp_path / "local")
    assert engine.runs > local.shards
    assert not list((tmp_path / "node").iterdir())


@pytest.mark.parametrize(
    "kind", ["jsonl", "mds.zstd", *(pytest.param(k, marks=pytest.mark.long) for k in ("tars", "litdata"))]
)
def test_a_web_server_and_several_processes_give_them_too(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = converted(source, tmp_path / "local")
    url = url_of(server, source, "http") + ("/{000000..000006}.tar" if kind == "tars" else "")
    assert converted(url, tmp_path / "there", workers=2) == local
    assert shards_in(tmp_path / "there") == shards_in(tmp_path / "local")


@pytest.mark.parametrize(
    ("kind", "engine", "moments"),
    [
        ("parquet", True, [40]),
        ("jsonl", False, [40]),
        ("litdata.chunk", False, [40]),
        pytest.param("mds", True, range(10, 90, 16), marks=pytest.mark.long),
        pytest.param("litdata", False, range(10, 90, 16), marks=pytest.mark.long),
        pytest.param("tars", True, range(10, 90, 16), marks=pytest.mark.long),
        pytest.param("array", False, range(10, 90, 16), marks=pytest.mark.long),
    ],
)
def test_after_a_kill_the_same_command_goes_on_with_the_same_bytes(
    server: ToyServer, tmp_path: Path, kind: str, engine: bool, moments: Sequence[int]
) -> None:
    source, killed = KINDS[kind](tmp_path / "www" / kind), 0
    converted(source, tmp_path / "local")
    for moment in moments:

        def work() -> None:
            far = ToyEngine(tmp_path / "elsewhere") if engine else None
            converted(url_of(server, source), tmp_path / "there", engine=far, **({} if engine else {"workers": 1}))

        killed += run_until_killed(work, tmp_path / "there", moment)
        shutil.rmtree(tmp_path / "cache")  # as on another machine
        work()
        assert shards_in(tmp_path / "there") == shards_in(tmp_path / "local")
        shutil.rmtree(tmp_path / "there")
    assert killed > len(moments) // 2


@pytest.mark.parametrize("kind", ["parquet", "mds"])
def test_a_server_that_fails_midway_is_a_line_and_the_rerun_goes_on(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = converted(source, tmp_path / "local")
    monkeypatch.setenv("SAVABLE_RETRY_S", "0.3")

    def fails(done: int, total: int, size: int) -> None:
        if done:
            close_sources()  # which another machine has not open
            server.fault = lambda path, number: "503"

    def work(**more: Any) -> Report:
        return converted(url_of(server, source), tmp_path / "there", engine=ToyEngine(tmp_path / "elsewhere"), **more)

    with pytest.raises(RemoteError, match=rf"s3://{kind}.*: tried \d+ times in"):
        work(progress=fails)
    there = list((tmp_path / "there").glob("*.tar"))
    assert 0 < len(there) < local.shards
    times = {path: path.stat().st_mtime_ns for path in there}
    server.fault = lambda path, number: None
    assert work() == local
    assert shards_in(tmp_path / "there") == shards_in(tmp_path / "local")
    assert {path: path.stat().st_mtime_ns for path in there} == times, "what is finished is not written again"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "mds", pytest.param("tars", marks=pytest.mark.long)])
def test_a_machine_reads_no_other_object_than_was_planned(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    below = {"parquet": "/{a,sub/b,sub/c}.parquet", "tars": "/{000000..000006}.tar"}.get(kind, "")

    def replaces(done: int, total: int, size: int) -> None:
        for path in source.rglob("*") if source.is_dir() else [source]:
            if path.is_file():
                path.write_bytes(path.read_bytes().replace(b"text", b"TEXT").replace(b"caption", b"CAPTION"))
        close_sources()  # which another machine has not open
        shutil.rmtree(tmp_path / "cache")

    engine = ToyEngine(tmp_path / "elsewhere")
    with pytest.raises(SavableError, match=rf"{server.url}/{kind}/.*: it was replaced since it was looked at first"):
        converted(url_of(server, source, "http") + below, tmp_path / "there", progress=replaces, engine=engine)


def replace_parquet(source: Path) -> None:
    table = pa.table({"jpg": rows()["jpg"][:5], "txt": [f"ROW {i}" for i in range(5)]})
    pq.write_table(table, source / "a.parquet", row_group_size=4)


def replace_captions(source: Path) -> None:
    for path in source.iterdir():
        path.write_bytes(path.read_bytes().replace(b"no. 7", b"NO. 7"))


@pytest.mark.parametrize(
    ("kind", "below", "replace"),
    [
        ("parquet", "/{a,sub/b,sub/c}.parquet", replace_parquet),
        ("mds", "/", replace_captions),
        ("litdata", "/", replace_captions),
    ],
)
def test_objects_that_were_replaced_at_equal_size_since_are_noticed_and_equal_ones_are_not(
    server: ToyServer, tmp_path: Path, kind: str, below: str, replace: Callable[[Path], None]
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    url = url_of(server, source, "http") + below
    report = converted(url, tmp_path / "there")
    for path in source.rglob("*.*"):
        path.write_bytes(path.read_bytes())  # another stamp, where the server has one
    assert converted(url, tmp_path / "there") == report
    replace(source)
    with pytest.raises(SavableError, match=r"holds another conversion: "):
        converted(url, tmp_path / "there")


def test_files_that_records_name_come_from_a_folder_or_stay_text(server: ToyServer, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "www/in")
    url = url_of(server, source)
    local = convert(source, tmp_path / "local", HALVES)
    with pytest.raises(
        ValueError, match=r"a\.jsonl: the field 'image' names 'b/001\.jpg', and files beside a URL are not"
    ):
        convert(url, tmp_path / "there", HALVES)
    assert not (tmp_path / "there").exists()
    assert convert(url, tmp_path / "there", HALVES, files_from=source.parent) == local
    assert shards_in(tmp_path / "there") == shards_in(tmp_path / "local")
    text = Options(shard_samples=2, file_fields=())
    assert convert(url, tmp_path / "text", text) == convert(source, tmp_path / "text_here", text)
    assert shards_in(tmp_path / "text") == shards_in(tmp_path / "text_here")


@pytest.mark.parametrize(
    ("names", "url", "words"),
    [
        (["b/1.jpg", "b/1.txt"], "s3://b/", "a folder of files: not read behind a URL: copy it to a disk"),
        (["b/index.json"], "s3://b/", "a folder of files: not read behind a URL"),
        (["b/a.jsonl", "b/b.jsonl"], "s3://b", r"several files of JSONL: convert them one by one: a\.jsonl, b\.jsonl"),
        (["b/a.jsonl", "b/b.jsonl"], "s3://b/{a,b}.jsonl", "JSONL is converted one by one: name one of them"),
        (["b/a.tar.gz"], "s3://b/a.tar.gz", "compressed tars: not read behind a URL"),
        (["b/a.tar.gz"], "s3://b/", "compressed tars: not read behind a URL"),
        (
            ["b/a.parquet", "b/1.jpg"],
            "s3://b/",
            r"holds a\.parquet and other files \(1\.jpg\), which are not read with",
        ),
        (["b/a.zip"], "s3://b/a.zip", r"\.zip is not read here: unpack it"),
        ([], "{http}/data/", r"a web server cannot be listed: name the files, as in .*/data/\{000\.\.099\}\.tar"),
        ([], "s3://b/a.jsonl", r"s3://b/a\.jsonl: no such object on the server"),
        ([], "ftp://b/a.jsonl", "shards can be read from s3, gs, az, http, https"),
    ],
)
def test_what_is_not_read_behind_a_url_is_a_line_that_says_what_to_do(
    server: ToyServer, tmp_path: Path, names: list[str], url: str, words: str
) -> None:
    for name in names:
        (server.folder / name).parent.mkdir(exist_ok=True)
        (server.folder / name).write_bytes(b"x")
    result = CliRunner().invoke(app, ["convert", url.replace("{http}", server.url), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert re.search(words, " ".join(result.stderr.split())), result.stderr
    assert not (tmp_path / "out").exists()


OTHER = json.dumps({"shards": [{"format": "csv"}]}).encode()


@pytest.mark.parametrize(
    ("files", "url", "words"),
    [
        (
            {"b/1/index.json": OTHER, "b/2/index.json": OTHER},
            "s3://b",
            "several datasets: convert them one by one: 1, 2",
        ),
        ({"b/index.json": OTHER}, "s3://b", "shards of the format csv, where mds is read"),
        ({"b/index.json": OTHER}, "{http}/b/", "shards of the format csv, where mds is read"),
        ({"b/index.json": b"{}"}, "{http}/b/", "a web server cannot be listed"),
        ({"b/v1.5/index.json": OTHER}, "s3://b/v1.5", "behind a URL, end one whose name has a dot with /"),
        ({"b/v1.5/index.json": OTHER}, "s3://b/v1.5/", "shards of the format csv, where mds is read"),
    ],
)
def test_folders_with_an_index_are_told_by_it(server: ToyServer, files: dict[str, bytes], url: str, words: str) -> None:
    for name, data in files.items():
        (server.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (server.folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        recognize(url.replace("{http}", server.url))


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_file_of_an_index_that_is_gone_or_cut_is_a_line(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    cut = max(path for path in source.iterdir() if path.name != "index.json")
    cut.write_bytes(cut.read_bytes()[:3])
    with pytest.raises(ValueError, match=rf"{url_of(server, cut)}: .*; copy it again|{url_of(server, cut)}: damaged"):
        converted(url_of(server, source), tmp_path / "there")
    cut.unlink()
    with pytest.raises(ValueError, match=f"{url_of(server, cut)}: named by index.json, and not there; copy the whole"):
        converted(url_of(server, source), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_kind_that_is_named_must_be_one_that_is_read_there(server: ToyServer, tmp_path: Path) -> None:
    source = KINDS["jsonl"](tmp_path / "www/b")
    assert recognize(url_of(server, source), "jsonl").kind == "jsonl"
    assert recognize("s3://b/", "mds").kind == "mds"
    with pytest.raises(ValueError, match="compressed tars: not read behind a URL"):
        recognize("s3://b/", "packed")


def test_the_command_reads_a_url_and_says_what_it_is(server: ToyServer, tmp_path: Path) -> None:
    source = KINDS["jsonl"](tmp_path / "www/b")
    result = CliRunner().invoke(app, ["convert", url_of(server, source), str(tmp_path / "out"), "--skip-bad"])
    assert result.exit_code == 0, result.output
    assert "reading s3://b/a.jsonl: JSONL" in result.stderr
    assert "20 samples in 1 shard" in result.stdout and "a.jsonl:22: malformed JSON" in result.stdout


def test_a_source_within_the_target_is_refused(server: ToyServer, tmp_path: Path) -> None:
    KINDS["tars"](tmp_path / "www/tars")
    with pytest.raises(ValueError, match="lie one within the other; convert to a URL beside the source"):
        convert("s3://tars/", "s3://tars/out", SMALL, reshard=True)
