"""Every kind of source: the same bytes whoever writes them, after kills, and after a disk that was full."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert import run_conversion
from savable_pipeline.tools.convert.shard_series import ShardFile
from tests.support.processes import run_until_killed
from tests.support.toy_files import SMALL, file_hashes, write_captioned_images
from tests.support.toy_sources import ONE_A_READER, SOURCES, convert_in_halves


def work(source: Path, target: Path, workers: int | None = 1) -> None:
    convert_in_halves(source, target, workers=workers)


def events(source: Path, target: Path, below: Path) -> int:
    """The number of touches of files that a conversion takes, within a fourth."""
    number = 64
    while run_until_killed(lambda: work(source, target), below, number):
        shutil.rmtree(target, ignore_errors=True)
        number = number * 5 // 4
    shutil.rmtree(target)
    return number


def kill_and_go_on(folder: Path, source: Path, moments: list[int]) -> None:
    """After a kill at each moment, and at two in one conversion, the same command ends with the same bytes."""
    work(source, folder / "calm")
    calm = file_hashes(folder / "calm")
    assert sum(name.endswith(".tar") for name in calm) > 2
    killed = 0
    for moment in moments:
        killed += run_until_killed(lambda: work(source, folder / "out"), folder, moment)
        run_until_killed(lambda: work(source, folder / "out"), folder, moment + 7)
        work(source, folder / "out")
        assert file_hashes(folder / "out") == calm, moment
        shutil.rmtree(folder / "out")
    assert killed > len(moments) // 2


@pytest.mark.parametrize(("kind", "moment"), [("folder", 12), ("jsonl.gz", 45), ("mds", 12), ("tars", 45)])
def test_killed_conversion_resumes_to_the_same_bytes(tmp_path: Path, kind: str, moment: int) -> None:
    """Of every kind thirty times: below."""
    kill_and_go_on(tmp_path, SOURCES[kind](tmp_path / "in", 8), [moment])


@pytest.mark.long
@pytest.mark.parametrize("kind", SOURCES)
def test_thirty_kills_before_file_operations_change_no_byte(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 8)
    last = events(source, tmp_path / "out", tmp_path)
    draw = random.Random(kind)
    kill_and_go_on(tmp_path, source, [draw.randrange(1, last * 4 // 5) for _ in range(30)])


@pytest.mark.long
@pytest.mark.parametrize("kind", SOURCES)
def test_thirty_kills_at_random_times_change_no_byte(tmp_path: Path, kind: str) -> None:
    """SIGKILL at times spread over a run, up to three before it may end; each tenth to one with two writers."""
    source = SOURCES[kind](tmp_path / "in", 48)
    draw, out = random.Random(kind), tmp_path / "out"
    usual_s = {workers: seconds_of(source, tmp_path / f"calm{workers}", workers) for workers in (1, 2)}
    calm = file_hashes(tmp_path / "calm1")
    assert calm == file_hashes(tmp_path / "calm2") and sum(name.endswith(".tar") for name in calm) > 10
    kills, ends, shards = 0, 0, set()
    while kills < 30:
        for _ in range(draw.randint(1, 3)):
            workers = 2 if kills % 10 == 9 else 1
            kills += killed_after(draw.random() * usual_s[workers], source, out, workers)
            shards.add(len(list(out.rglob("*.tar"))))
        work(source, out)
        assert file_hashes(out) == calm, kills
        ends += 1
        shutil.rmtree(out)
    assert len(shards) > 3, "all kills came before the first shard, or after the last"
    print(f"{kind}: {kills} kills, with {sorted(shards)} shards written; {ends} ends with the same bytes")


def seconds_of(source: Path, target: Path, workers: int) -> float:
    """The time that a conversion takes in a process of its own."""
    begun = time.monotonic()
    assert not killed_after(600, source, target, workers)
    return time.monotonic() - begun


def work_in_fork(source: Path, target: Path, workers: int) -> None:
    """`work`, in a fork of a process whose fork server, if it has begun one, is not that of the fork."""
    vars(multiprocessing.forkserver._forkserver).update(_forkserver_pid=None)
    work(source, target, workers)


def killed_after(seconds: float, source: Path, target: Path, workers: int) -> bool:
    """Convert in a process that is killed after this time; tells whether it was."""
    process = multiprocessing.get_context("fork").Process(target=work_in_fork, args=(source, target, workers))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize(
    "kind",
    [k if k in ("folder", "jsonl", "mds", "tars") else pytest.param(k, marks=pytest.mark.long) for k in ONE_A_READER],
)
def test_a_copy_of_the_source_is_the_same_conversion(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 8)
    work(source, tmp_path / "out")
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    place = source if source.is_dir() else source.parent
    shutil.copytree(place, tmp_path / "copy" / place.name)
    work(tmp_path / "copy" / source.relative_to(place.parent), tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in shards} == shards


@pytest.mark.parametrize("kind", ["jsonl", "litdata.rows", "tars"])
def test_a_conversion_leaves_no_file_open(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 8)
    work(source, tmp_path / "out")
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]  # noqa: PTH115
    assert not [link for link in links if link.startswith(str(tmp_path))]


def test_full_disk_is_one_line_and_the_same_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, add, room = write_captioned_images(tmp_path / "in", 9), ShardFile.add, [5]

    def full(shard: ShardFile, key: str, parts: dict[str, bytes]) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= 1
        add(shard, key, parts)

    told = r"out: No space left on device: disk or quota is full\. .* start again to continue"
    with monkeypatch.context() as patch, pytest.raises(SavableError, match=told):
        patch.setattr(ShardFile, "add", full)
        run_conversion(source, tmp_path / "out", SMALL)
    assert [path.name for path in (tmp_path / "out").rglob("*.tar")] == ["000000.tar"]
    run_conversion(source, tmp_path / "out", SMALL)
    run_conversion(source, tmp_path / "calm", SMALL)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "calm")
