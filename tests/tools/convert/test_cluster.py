"""Shards that other machines write or scan: the bytes are those of this machine's own processes."""

from __future__ import annotations

import gzip
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from savable_pipeline.core.job_engine import J, R
from savable_pipeline.data.shards.index_making import each_shard_by
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores.opening import find_source
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, jobs, run_conversion
from savable_pipeline.tools.convert.jobs import attempt
from savable_pipeline.tools.convert.range_job import RangeJob, write_range
from tests.support.processes import run_until_killed
from tests.support.toy_engine import ToyEngine
from tests.support.toy_files import SMALL, file_hashes, write_captioned_images, write_lines
from tests.support.toy_sources import HALVES, ONE_A_READER

SHORT = ("folder", "jsonl.gz", "mds", "tars")


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.long) for k in ONE_A_READER])
def test_lost_machines_do_not_change_the_written_bytes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ONE_A_READER[kind](tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    source = ONE_A_READER[kind](Path("again"))  # a relative path, and machines in other folders
    reshard = "tars" in source.name
    local = run_conversion(source, Path("local"), HALVES, reshard=reshard)
    engine = ToyEngine(tmp_path / "elsewhere")
    told: list[tuple[int, int]] = []
    far = run_conversion(
        source,
        Path("far"),
        HALVES,
        reshard=reshard,
        engine=engine,
        progress=lambda done, n, size: told.append((done, n)),
    )
    assert file_hashes(Path("far")) == file_hashes(Path("local"))
    assert far == local
    assert engine.runs > (1 if kind == "jsonl.gz" else local.shards)  # a compressed file is one job
    total = 1 if kind == "jsonl.gz" else 8
    assert (told[0], told[-1]) == ((0, total), (total, total)) and told == sorted(told)
    assert not [path for path in Path("far").rglob("*") if path.is_dir() and path.name != ".nv-meta"]


def test_compressed_tars_are_converted_to_the_same_bytes_on_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 15), tmp_path / "tars", SMALL)
    monkeypatch.chdir(tmp_path)
    Path("packed").mkdir()
    for tar in sorted(Path("tars").glob("*.tar")):
        Path("packed", f"{tar.name}.gz").write_bytes(gzip.compress(tar.read_bytes()))
    damaged = Path("packed/000003.tar.gz")
    damaged.write_bytes(damaged.read_bytes()[:200])
    local = run_conversion(Path("packed"), Path("local"), Options())
    engine, told = ToyEngine(tmp_path / "elsewhere"), list[int]()
    far = run_conversion(
        Path("packed"), Path("far"), Options(), engine=engine, workers=2, progress=lambda done, *_: told.append(done)
    )
    assert (far, len(far.rejected), told[0], told[-1]) == (local, 1, 0, 5)
    assert file_hashes(Path("far")) == file_hashes(Path("local"))


@pytest.mark.parametrize("step", [55, pytest.param(12, marks=pytest.mark.long)])
def test_killed_and_repeated_conversion_writes_the_same_bytes(tmp_path: Path, step: int) -> None:
    source = write_captioned_images(tmp_path / "in", 7, **{"003.jpg": b"bad", "nodot": b""})
    run_conversion(source, tmp_path / "local", SMALL)
    event = 1

    def far() -> None:
        run_conversion(source, tmp_path / "far", SMALL, engine=ToyEngine(tmp_path / "elsewhere"))

    while run_until_killed(far, tmp_path, event):
        far()
        assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local"), event
        shutil.rmtree(tmp_path / "far")
        event += step
    assert event > 100  # else the hook saw too little


def test_finished_shards_are_not_rewritten_by_any_engine(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 9)

    class Breaks(ToyEngine):
        def each(self, function: Callable[[J], R], jobs: Iterable[J]) -> Generator[tuple[J, R], None, None]:
            for done, pair in enumerate(super().each(function, jobs)):
                if done == 1:
                    raise SavableError("lost them all")
                yield pair

    with pytest.raises(SavableError, match="lost them all"):
        run_conversion(source, tmp_path / "far", SMALL, engine=Breaks(tmp_path / "elsewhere"))
    written = {path.stat().st_ino for path in (tmp_path / "far").rglob("*.tar")}
    assert len(written) == 2
    run_conversion(source, tmp_path / "far", SMALL)
    assert written < {path.stat().st_ino for path in (tmp_path / "far").glob("*.tar")}


def test_concurrent_attempts_at_a_shard_leave_its_bytes_and_no_other_file(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 9), tmp_path / "local", Options())
    found: list[RangeJob] = []

    class Keeps(ToyEngine):
        def each(self, function: Callable[[J], R], given: Iterable[J]) -> Generator[tuple[J, R], None, None]:
            found.extend(given)  # type: ignore[arg-type]
            threads = [threading.Thread(target=write_range, args=(job,)) for job in found * 6]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            yield from ((job, function(job)) for job in found)  # type: ignore[misc]

    run_conversion(tmp_path / "in", tmp_path / "far", Options(), engine=Keeps(tmp_path / "elsewhere"))
    assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local")
    with pytest.raises(FileNotFoundError):  # who was taken for lost and comes after the end
        attempt(found[0])
    assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local")


def test_shard_written_to_another_folder_by_a_machine_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unshared(job: RangeJob) -> object:
        work = tmp_path / "other machine" / job.work.relative_to("/")
        work.mkdir(parents=True, exist_ok=True)
        return attempt(replace(job, work=work))

    monkeypatch.setattr(jobs, "_VISIBLE_S", 0.3)
    monkeypatch.setattr(jobs, "attempt", unshared)
    with pytest.raises(SavableError, match=r"000000: finished by another machine, but not visible.* share"):
        run_conversion(
            write_captioned_images(tmp_path / "in", 3),
            tmp_path / "far",
            SMALL,
            engine=ToyEngine(tmp_path / "elsewhere"),
        )


def test_index_built_by_machines_equals_a_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 9), tmp_path / "local", SMALL)
    shutil.rmtree(tmp_path / "local/.nv-meta")
    shutil.copytree(tmp_path / "local", tmp_path / "far")
    monkeypatch.chdir(tmp_path)
    engine, told = ToyEngine(tmp_path / "elsewhere"), []
    index_files("local", TARS)
    _, faults = index_files(
        "far", TARS, each=each_shard_by(engine), progress=lambda done, total: told.append((done, total))
    )
    assert not faults and engine.runs >= 3
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert file_hashes(tmp_path / "far") == file_hashes(tmp_path / "local")


def test_tables_are_indexed_by_machines(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"n": 1}, {"n": 2})
    write_lines(tmp_path / "b.jsonl", {"n": 3})
    form, engine = find_source(str(tmp_path)).format, ToyEngine(tmp_path / "elsewhere")
    assert form is not None
    place, faults = index_files(str(tmp_path), form, each=each_shard_by(engine))
    far = place.read_bytes()
    place.unlink()
    assert (index_files(str(tmp_path), form)[0].read_bytes(), faults) == (far, [])
    assert engine.runs >= 2


def test_shard_of_another_size_on_a_machine_is_an_error(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 3), tmp_path / "out", SMALL)

    class Elsewhere(ToyEngine):
        def each(self, function: Callable[[J], R], jobs: Iterable[J]) -> Generator[tuple[J, R], None, None]:
            given = list(jobs)
            with (tmp_path / "out/000000.tar").open("ab") as file:
                file.write(bytes(512))
            yield from super().each(function, given)

    shutil.rmtree(tmp_path / "out/.nv-meta")
    with pytest.raises(OSError, match=r"000000\.tar has 10752 bytes here, and 10240 where the command runs"):
        index_files(tmp_path / "out", TARS, each=each_shard_by(Elsewhere(tmp_path / "elsewhere")))


def test_without_ray_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write_captioned_images(tmp_path / "in", 1)
    for command in (["convert", str(tmp_path / "in"), str(tmp_path / "out")], ["index", str(tmp_path / "in")]):
        result = CliRunner().invoke(app, [*command, "--engine", "ray"])
        assert result.exit_code == 2
        assert "pip install ray" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_unknown_engine_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["index", str(tmp_path), "--engine", "spark"])
    assert result.exit_code == 2 and "--engine is one of local, ray, not 'spark'" in result.output
