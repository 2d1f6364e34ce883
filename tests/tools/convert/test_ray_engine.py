"""`--engine ray` on a Ray cluster of two nodes: the bytes of one machine's processes, whoever is killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores.remote_indexing import index_remote
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert import Options, run_conversion
from tests.project.pages import ROOT, blocks_of, run_blocks, write_captioned_shards, write_files
from tests.support.ray_cluster import RayCluster, is_writing, ray_cluster, writer
from tests.support.real_servers import bucket_of
from tests.support.toy_files import SMALL, file_hashes, write_captioned_images
from tests.support.toy_sources import HALVES, ONE_A_READER
from tests.support.url_sources import KINDS, convert_source, written_files

PAGE = ROOT / "docs/convert-remote.md"
pytestmark = pytest.mark.long
FEW = Options(shard_samples=8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch, ray_cluster(2, patch) as found:
        yield found


@pytest.mark.usefixtures("cluster")
def test_every_source_converts_to_the_same_bytes_on_ray(tmp_path: Path) -> None:
    from savable_pipeline.tools.convert.ray_engine import RayEngine

    with RayEngine() as engine:
        for kind, make in ONE_A_READER.items():
            source = make(tmp_path / kind / "in")
            reshard = "tars" in source.name
            told: list[int] = []
            local = run_conversion(source, tmp_path / kind / "local", HALVES, reshard=reshard)
            far = run_conversion(
                *(source, tmp_path / kind / "far", HALVES),
                reshard=reshard,
                engine=engine,
                progress=lambda done, total, size, told=told: told.append(done),
            )
            assert far == local, kind
            assert file_hashes(tmp_path / kind / "far") == file_hashes(tmp_path / kind / "local"), kind
            assert (told[0], told[-1]) == (0, 8), kind


def test_killed_node_costs_only_its_shards_in_progress(tmp_path: Path, cluster: RayCluster) -> None:
    from savable_pipeline.tools.convert.ray_engine import RayEngine

    source = write_captioned_images(tmp_path / "in", 400)
    run_conversion(source, tmp_path / "local", FEW)
    lost = cluster.add()
    killed: list[int] = []

    def progress(done: int, total: int, size: int) -> None:
        end = time.monotonic() + 20
        while done and not killed and time.monotonic() < end:
            if is_writing(lost, tmp_path / "far"):
                cluster.kill(lost)
                killed.append(done)

    with RayEngine() as engine:
        report = run_conversion(source, tmp_path / "far", FEW, engine=engine, progress=progress)
    assert killed and killed[0] < 400
    assert report.samples == 400
    assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local")
    assert not [path for path in (tmp_path / "far").rglob("*") if path.is_dir() and path.name != ".nv-meta"]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("shards", [*range(0, 50, 2), 1, 3, 5, 47, 49])  # finished when the driver is killed
def test_killed_driver_resumes_to_the_same_bytes(tmp_path: Path, shards: int) -> None:
    source = write_captioned_images(tmp_path / "in", 400)
    run_conversion(source, tmp_path / "local", FEW)
    command = [sys.executable, "-m", "savable_pipeline.tools.cli.main", "convert", str(source), str(tmp_path / "far")]
    command += ["--engine", "ray", "--shard-samples", "8"]
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while len(list((tmp_path / "far").glob("*.tar"))) < shards or not (tmp_path / "far").exists():
        assert driver.poll() is None
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "400 samples in 50 shards" in done.stdout
    assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local")
    assert not [path for path in (tmp_path / "far").rglob("*") if path.is_dir() and path.name != ".nv-meta"]


@pytest.mark.usefixtures("cluster")
def test_index_command_on_ray_writes_the_same_index(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 24), tmp_path / "local", SMALL)
    (tmp_path / "local/000003.tar").write_bytes((tmp_path / "local/000003.tar").read_bytes()[:900])
    shutil.rmtree(tmp_path / "local/.nv-meta")
    shutil.copytree(tmp_path / "local", tmp_path / "far")
    _, faults = index_files(tmp_path / "local", TARS)
    command = [sys.executable, "-m", "savable_pipeline.tools.cli.main", "index", "far", "--engine", "ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, len(faults)) == (1, 1), done.stderr
    assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local")


@pytest.mark.usefixtures("cluster")
def test_error_of_a_task_equals_that_of_a_local_process(tmp_path: Path) -> None:
    from savable_pipeline.tools.convert.ray_engine import RayEngine

    source = write_captioned_images(tmp_path / "in", 9)

    def shrink(done: int, total: int, size: int) -> None:
        (source / "b/c.d/008.jpg").write_bytes(b"")

    with RayEngine() as engine, pytest.raises(SavableError, match=r"008\.jpg: expected \d+ bytes, found 0: it changed"):
        run_conversion(source, tmp_path / "far", SMALL, engine=engine, progress=shrink)


@dataclass
class Refused:
    """A job that cannot be done."""

    name: str
    how: str


def refuse(job: Refused) -> None:
    """Fail as told."""
    if job.how == "file":
        Path("/nowhere/at/all").read_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("cluster")
def test_failure_of_a_node_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from savable_pipeline.tools.convert import ray_engine

    with ray_engine.RayEngine() as engine:
        with pytest.raises(SavableError, match=r"node \S+: .*/nowhere/at/all'\. Use storage that all"):
            list(engine.each(refuse, [Refused("a.tar", "file")]))
        monkeypatch.setattr(ray_engine, "_RETRIES", 1)
        with pytest.raises(SavableError, match=r"a\.tar: Ray gave up after 1 retries\. .* run it again\n"):
            list(engine.each(refuse, [Refused("a.tar", "kill")]))
        monkeypatch.setattr(ray_engine, "_versions", lambda: {"pillow": "0.1"})
        with pytest.raises(SavableError, match=r"node \S+ has .*'pillow': '\d+.*, this machine .*'0\.1'"):
            list(engine.each(refuse, [Refused("a.tar", "file")]))


@pytest.mark.usefixtures("cluster")
def test_docs_page_matches_the_commands_for_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_captioned_shards(tmp_path / "shards")
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of(PAGE) if block.why is not None and "test_ray_engine" in block.why]
    run_blocks(blocks, {})
    assert len(blocks) == 1


def test_missing_cluster_is_one_line_that_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    from savable_pipeline.tools.convert.ray_engine import RayEngine

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"no Ray cluster at 127\.0\.0\.1:1\. Start one by `ray start --head`"):
        RayEngine()


def test_nodes_convert_remote_sources_although_a_process_and_a_node_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    sources = {
        kind: KINDS[kind](tmp_path / "data" / kind)
        for kind in ("tars", "parquet", "jsonl", "table", "mds", "litdata.chunk")
    }
    for kind, source in sources.items():
        convert_source(source, tmp_path / "local" / kind)
    python, killed = [sys.executable, "-m", "savable_pipeline.tools.cli.main"], set[str]()
    with bucket_of(tmp_path / "data", monkeypatch), ray_cluster(2, monkeypatch) as cluster:  # it knows the bucket
        kept, lost = cluster.nodes
        index_remote("s3://data/some/where/tars/", TARS, Session.of())
        local = {path.name: path.read_bytes() for path in (tmp_path / "cache").rglob("index")}
        shutil.rmtree(tmp_path / "cache")
        command = [*python, "index", "s3://data/some/where/tars/", "--engine", "ray"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert {path.name: path.read_bytes() for path in (tmp_path / "cache").rglob("index")} == local
        for kind, source in sources.items():
            url = f"s3://data/some/where/{source.relative_to(tmp_path / 'data')}"
            command = [*python, "convert", url, str(tmp_path / "far" / kind), "--engine", "ray", "--skip-bad"]
            command += ["--shard-samples", "4", "--split", "a=0.5", "--split", "b=0.5"]
            command += ["--reshard"] if kind == "tars" else []
            driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            while len(killed) < 2 and driver.poll() is None:
                if "process" not in killed and (pid := writer(kept, tmp_path / "far" / kind)):
                    os.kill(pid, signal.SIGKILL)
                    killed.add("process")
                if "node" not in killed and is_writing(lost, tmp_path / "far" / kind):
                    cluster.kill(lost)
                    killed.add("node")
            assert driver.wait(240) == 0, driver.stderr and driver.stderr.read()
            assert written_files(tmp_path / "far" / kind) == written_files(tmp_path / "local" / kind), kind
    assert killed == {"process", "node"}, "killed while they wrote"


def test_nodes_write_to_a_bucket_although_the_driver_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_captioned_images(tmp_path / "in", 200)
    run_conversion(source, tmp_path / "local", FEW)
    (tmp_path / "nothing").mkdir()
    command = [sys.executable, "-m", "savable_pipeline.tools.cli.main", "convert", str(source), "s3://data/out"]
    command += ["--engine", "ray", "--shard-samples", "8"]
    with bucket_of(tmp_path / "nothing", monkeypatch) as bucket, ray_cluster(1, monkeypatch):  # it knows the bucket
        bucket.objects.all().delete()
        driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while sum(each.key.endswith(".tar") for each in bucket.objects.all()) < 8:
            assert driver.poll() is None
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = {each.key.removeprefix("out/"): each.get()["Body"].read() for each in bucket.objects.all()}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == file_hashes(tmp_path / "local")
