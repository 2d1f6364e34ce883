"""The index of files behind a URL, read by other machines: the bytes of the index that is made here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.remote.session import close_scratch
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.opening import index_any
from savable_pipeline.data.stores.remote_indexing import RemoteScan, scan_remotely
from savable_pipeline.errors import RemoteError
from savable_pipeline.tools.convert import run_conversion
from tests.support.processes import run_until_killed
from tests.support.toy_engine import ToyEngine
from tests.support.toy_files import SMALL, write_captioned_images
from tests.support.toy_remote_stores import KINDS, WRITERS
from tests.support.toy_server import ToyServer, serving_a_machine


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    """Five tars and a folder of JSONL, without an index; machines have a folder for what passes through."""
    run_conversion(write_captioned_images(tmp_path / "in", 15), tmp_path / "www/tar", SMALL)
    shutil.rmtree(tmp_path / "www/tar/.nv-meta")
    (tmp_path / "www/jsonl").mkdir()
    WRITERS["jsonl"](tmp_path / "www/jsonl")
    with serving_a_machine(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bytes, list[ShardEntry]]]:
    """Index what lies behind a URL in the cache of this name; gives the bytes of the index, and the faults."""

    def make(url: str, cache: str, engine: Engine | None = None, progress: Sequence[object] = ()) -> object:
        monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / cache))
        told = list[tuple[int, int]]()
        note = lambda done, total: told.append((done, total))  # noqa: E731
        place, faults = index_any(url, progress=note, engine=engine)
        assert told[0][0] <= told[-1][0] == told[-1][1]
        return place.read_bytes(), faults

    return make  # type: ignore[return-value]


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "jsonl"]


@pytest.mark.parametrize("kind", ["tar", "jsonl", *LONG])
def test_remote_scan_equals_a_local_index_and_leaves_nothing(
    server: ToyServer, tmp_path: Path, kind: str, index: Callable[..., object]
) -> None:
    if kind not in ("tar", "jsonl"):
        (tmp_path / "www" / kind).mkdir()
        WRITERS[kind](tmp_path / "www" / kind)
    here = index(f"s3://{kind}/", "here")
    engine = ToyEngine(tmp_path / "elsewhere")
    assert index(f"s3://{kind}/", "far", engine) == here
    assert engine.runs > 4
    close_scratch()
    assert not list((tmp_path / "node").iterdir())
    sent = server.requests
    dataset = open_any(f"s3://{kind}/")
    assert dataset.count == open_any(str(tmp_path / "www" / kind)).count
    assert server.requests < sent + 20, "what is indexed is not read again"


def test_machines_read_each_tar_once_and_report_damage(
    server: ToyServer, tmp_path: Path, index: Callable[..., tuple[bytes, list[ShardEntry]]]
) -> None:
    damaged = tmp_path / "www/tar/000003.tar"
    damaged.write_bytes(damaged.read_bytes()[:900])
    here = index("s3://tar/", "here")
    before, engine = server.sent(), ToyEngine(tmp_path / "elsewhere")
    assert index("s3://tar/", "far", engine) == here
    assert [entry.name for entry in here[1]] == ["000003.tar"]
    size = sum(path.stat().st_size for path in (tmp_path / "www/tar").glob("*.tar"))
    assert size <= server.sent() - before <= size * engine.runs / 5 + 30_000
    assert not list((tmp_path / "far").rglob("*.tar")), "what machines read does not pass through this one"


@pytest.mark.parametrize("moments", [[56], pytest.param(range(5, 80, 5), marks=pytest.mark.long)])
def test_killed_scan_resumes_and_builds_the_same_index(
    server: ToyServer, tmp_path: Path, moments: Sequence[int], index: Callable[..., tuple[bytes, list[ShardEntry]]]
) -> None:
    here, killed, less = index("s3://tar/", "here"), 0, 0
    for moment in moments:

        def work() -> None:
            index("s3://tar/", "far", ToyEngine(tmp_path / "elsewhere"))

        killed += run_until_killed(work, tmp_path / "far", moment)
        engine = ToyEngine(tmp_path / "elsewhere", seed=1)
        assert index("s3://tar/", "far", engine) == here
        less += engine.runs < 5
        shutil.rmtree(tmp_path / "far")
    assert killed > len(moments) // 2 and less


@pytest.mark.parametrize("name", ["tar/000001.tar", "jsonl/0001.jsonl"])
def test_shards_indexed_by_machines_are_pinned(
    server: ToyServer, tmp_path: Path, name: str, index: Callable[..., object]
) -> None:
    files = f"{server.url}/{name}" if name.endswith(".tar") else "s3://jsonl/"
    index(files, "far", ToyEngine(tmp_path / "elsewhere"))
    dataset, path = open_any(files), tmp_path / "www" / name
    path.write_bytes(path.read_bytes().replace(b"caption", b"CAPTION").replace(b"xxx", b"yyy"))
    with pytest.raises(sp.ShardError, match=r"the shard was rewritten on the server"):
        for shard, row in zip(*(found.tolist() for found in dataset.locate(np.arange(dataset.count))), strict=True):
            for extension in dataset.store.extensions(shard, row):
                dataset.read(shard, row, extension)


def test_growing_and_failing_files_are_reported_by_name(
    server: ToyServer, tmp_path: Path, index: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (("jsonl", "0001.jsonl"), ("tar", "000001.tar")):
        with pytest.raises(sp.ShardError, match=rf"{name}: \d+ bytes, but 5 when"):
            scan_remotely(RemoteScan(format_named(kind), f"s3://{kind}", name, 5))
    close_scratch()
    monkeypatch.setenv("SAVABLE_RETRY_S", "0.2")
    server.fault = lambda path, number: "503" if path.endswith("000002.tar") else None
    with pytest.raises(RemoteError, match=r"s3://tar/000002\.tar: \d+ tries"):
        index("s3://tar/", "far", ToyEngine(tmp_path / "elsewhere"))
    server.fault = lambda path, number: None
    assert index("s3://tar/", "far", ToyEngine(tmp_path / "elsewhere")) == index("s3://tar/", "here")
