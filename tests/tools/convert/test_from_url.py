"""Sources behind URLs give the shards that they give from a disk, by whichever processes and machines."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from savable_pipeline.core.job_engine import J, R
from savable_pipeline.errors import RemoteError, SavableError
from savable_pipeline.tools.convert import Options, Report, run_conversion
from savable_pipeline.tools.convert.source import close_all
from tests.support.processes import run_until_killed
from tests.support.toy_engine import ToyEngine
from tests.support.toy_files import SMALL
from tests.support.toy_server import ToyServer
from tests.support.toy_sources import HALVES, jsonl, watch_written_ranges
from tests.support.url_sources import KINDS, convert_source, rows, url_of, written_files

EACH = ("tars", "parquet", "jsonl", "table", "mds", "litdata.rows")
SHORT = ("parquet",)


@pytest.mark.parametrize("kind", [k if k in EACH else pytest.param(k, marks=pytest.mark.long) for k in KINDS])
def test_remote_source_converts_to_the_same_shards(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = convert_source(source, tmp_path / "local")
    assert local.samples >= 19 and local.shards > 3
    assert convert_source(url_of(server, source), tmp_path / "there") == local
    assert written_files(tmp_path / "there") == written_files(tmp_path / "local")
    size = sum(path.stat().st_size for path in source.parent.rglob("*") if path.is_file() and kind in str(path))
    assert sum(stop - start for _, start, stop in server.ranges) <= 1.2 * size + 5000, "each byte is fetched once"


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.long) for k in KINDS])
def test_machines_convert_remote_sources_to_the_same_shards_and_leave_nothing(
    server: ToyServer, tmp_path: Path, kind: str
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = convert_source(source, tmp_path / "local")

    class Tidy(ToyEngine):
        def _run(self, function: Callable[[J], R], job: J) -> R:
            result = super()._run(function, job)
            assert not list((tmp_path / "node").glob("*/tmp*")), "a job drops what it downloaded"
            return result

    engine = Tidy(tmp_path / "elsewhere")
    assert convert_source(url_of(server, source), tmp_path / "far", engine=engine) == local
    assert written_files(tmp_path / "far") == written_files(tmp_path / "local")
    assert engine.runs > (1 if kind in ("packed", "tars.gz") else local.shards)  # a range has whole compressed files
    assert not list((tmp_path / "node").iterdir())


@pytest.mark.parametrize(
    "kind", ["mds.zstd", *(pytest.param(k, marks=pytest.mark.long) for k in ("jsonl", "tars", "litdata"))]
)
def test_web_source_and_several_processes_convert_to_the_same_shards(
    server: ToyServer, tmp_path: Path, kind: str
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = convert_source(source, tmp_path / "local")
    url = url_of(server, source, "http") + ("/{000000..000006}.tar" if kind == "tars" else "")
    assert convert_source(url, tmp_path / "there", workers=2) == local
    assert written_files(tmp_path / "there") == written_files(tmp_path / "local")


@pytest.mark.parametrize(
    ("kind", "engine", "moments"),
    [
        ("parquet", True, [40]),
        *(pytest.param(kind, False, [40], marks=pytest.mark.long) for kind in ("litdata.chunk", "jsonl")),
        pytest.param("mds", True, range(10, 90, 16), marks=pytest.mark.long),
        pytest.param("litdata", False, range(10, 90, 16), marks=pytest.mark.long),
        pytest.param("tars", True, range(10, 90, 16), marks=pytest.mark.long),
        pytest.param("array", False, range(10, 90, 16), marks=pytest.mark.long),
    ],
)
def test_killed_remote_conversion_resumes_with_the_same_bytes(
    server: ToyServer, tmp_path: Path, kind: str, engine: bool, moments: Sequence[int]
) -> None:
    source, killed = KINDS[kind](tmp_path / "www" / kind), 0
    convert_source(source, tmp_path / "local")
    for moment in moments:

        def work() -> None:
            far = ToyEngine(tmp_path / "elsewhere") if engine else None
            convert_source(url_of(server, source), tmp_path / "there", engine=far, **({} if engine else {"workers": 1}))

        killed += run_until_killed(work, tmp_path / "there", moment)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # as on another machine
        work()
        assert written_files(tmp_path / "there") == written_files(tmp_path / "local")
        shutil.rmtree(tmp_path / "there")
    assert killed > len(moments) // 2


@pytest.mark.parametrize("kind", ["parquet", pytest.param("mds", marks=pytest.mark.long)])
def test_server_failure_is_one_line_and_a_rerun_resumes(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = convert_source(source, tmp_path / "local")
    monkeypatch.setenv("SAVABLE_RETRY_S", "0.3")

    def fails(done: int, total: int, size: int) -> None:
        if done:
            close_all()  # which another machine has not open
            server.fault = lambda path, number: "503"

    def work(**more: Any) -> Report:
        return convert_source(
            url_of(server, source), tmp_path / "there", engine=ToyEngine(tmp_path / "elsewhere"), **more
        )

    with pytest.raises(RemoteError, match=rf"s3://{kind}.*: \d+ tries in"):
        work(progress=fails)
    finished = {path.parent.name for path in (tmp_path / "there").rglob("record")}
    names = watch_written_ranges(monkeypatch)
    server.fault = lambda path, number: None
    assert work() == local
    assert written_files(tmp_path / "there") == written_files(tmp_path / "local")
    assert finished and names and not finished & names


@pytest.mark.parametrize(
    "kind", ["jsonl", "mds", *(pytest.param(k, marks=pytest.mark.long) for k in ("parquet", "tars"))]
)
def test_machine_reads_only_planned_objects(server: ToyServer, tmp_path: Path, kind: str) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    below = {"parquet": "/{a,sub/b,sub/c}.parquet", "tars": "/{000000..000006}.tar"}.get(kind, "")

    def replaces(done: int, total: int, size: int) -> None:
        for path in source.rglob("*") if source.is_dir() else [source]:
            if path.is_file():
                path.write_bytes(path.read_bytes().replace(b"text", b"TEXT").replace(b"caption", b"CAPTION"))
        close_all()  # which another machine has not open
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    engine = ToyEngine(tmp_path / "elsewhere")
    with pytest.raises(
        SavableError,
        match=rf"{server.url}/{kind}/.*: (its files, or the samples in them, differ|it was replaced since)",
    ):
        convert_source(url_of(server, source, "http") + below, tmp_path / "there", progress=replaces, engine=engine)


def replace_parquet(source: Path) -> None:
    table = pa.table({"jpg": rows()["jpg"][:5], "txt": [f"ROW {i}" for i in range(5)]})
    pq.write_table(table, source / "a.parquet", row_group_size=4)


def replace_captions(source: Path) -> None:
    for path in source.iterdir():
        path.write_bytes(path.read_bytes().replace(b"no. 7", b"NO. 7"))


@pytest.mark.parametrize(
    ("kind", "below", "replace"),
    [
        ("mds", "/", replace_captions),
        pytest.param("parquet", "/{a,sub/b,sub/c}.parquet", replace_parquet, marks=pytest.mark.long),
        pytest.param("litdata", "/", replace_captions, marks=pytest.mark.long),
    ],
)
def test_objects_replaced_at_equal_size_are_detected_unless_equal(
    server: ToyServer, tmp_path: Path, kind: str, below: str, replace: Callable[[Path], None]
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    url = url_of(server, source, "http") + below
    report = convert_source(url, tmp_path / "there")
    for path in source.rglob("*.*"):
        path.write_bytes(path.read_bytes())  # another stamp, where the server has one
    assert convert_source(url, tmp_path / "there") == report
    replace(source)
    with pytest.raises(SavableError, match=r"has another conversion"):
        convert_source(url, tmp_path / "there")


def test_files_named_by_records_come_from_a_folder_or_stay_text(server: ToyServer, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "www/in")
    url = url_of(server, source)
    local = run_conversion(source, tmp_path / "local", HALVES)
    with pytest.raises(
        ValueError, match=r"a\.jsonl: the field 'image' names 'b/001\.jpg', but files of remote tables are not"
    ):
        run_conversion(url, tmp_path / "there", HALVES)
    assert not (tmp_path / "there").exists()
    assert run_conversion(url, tmp_path / "there", HALVES, files_from=source.parent) == local
    assert written_files(tmp_path / "there") == written_files(tmp_path / "local")
    text = Options(shard_samples=2, file_fields=())
    assert run_conversion(url, tmp_path / "text", text) == run_conversion(source, tmp_path / "text_here", text)
    assert written_files(tmp_path / "text") == written_files(tmp_path / "text_here")


@pytest.mark.parametrize("kind", ["mds", pytest.param("litdata", marks=pytest.mark.long)])
def test_small_cache_converts_to_the_same_shards(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = KINDS[kind](tmp_path / "www" / kind)
    local = convert_source(source, tmp_path / "local")
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(1 << 13))
    assert convert_source(url_of(server, source), tmp_path / "there", workers=1) == local
    assert written_files(tmp_path / "there") == written_files(tmp_path / "local")
    assert sum(path.stat().st_size for path in source.iterdir()) > 1 << 13, "not all of it fits into the cache"


def test_a_source_within_the_target_is_rejected(server: ToyServer, tmp_path: Path) -> None:
    KINDS["tars"](tmp_path / "www/tars")
    with pytest.raises(ValueError, match=r"must not contain each other. Convert to another URL"):
        run_conversion("s3://tars/", "s3://tars/out", SMALL, reshard=True)
