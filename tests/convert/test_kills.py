"""Every kind of source: the same bytes whoever writes them, after kills, and after a disk that was full."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from savable_pipeline.convert import Options, convert
from savable_pipeline.errors import SavableError
from savable_pipeline.shards.tar_writer import ShardFile
from tests.support.kills import run_until_killed
from tests.support.toy_files import SMALL, fill, snapshot, write_lines
from tests.support.toy_records import write_captioned_litdata, write_captioned_mds

RECORDS = [{"image": "000.jpg", "n": i} for i in range(8)]


def array(folder: Path) -> Path:
    (fill(folder, 1) / "a.json").write_text(json.dumps(RECORDS))
    return folder / "a.json"


def packed(folder: Path) -> Path:
    lines = write_lines(fill(folder, 1) / "a.jsonl", *RECORDS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    return folder / "a.jsonl.gz"


def table(folder: Path) -> Path:
    (fill(folder, 1) / "t.csv").write_text("image,n\n" + "000.jpg,1\n" * 8)
    return folder / "t.csv"


def tars(folder: Path) -> Path:
    convert(fill(folder / "files", 8), folder / "tars", Options(shard_samples=4))
    return folder / "tars"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder": lambda folder: fill(folder, 8),
    "jsonl": lambda folder: write_lines(fill(folder, 1) / "a.jsonl", *RECORDS),
    "array": array,
    "packed": packed,
    "table": table,
    "mds": lambda folder: write_captioned_mds(folder, 8),
    "litdata": lambda folder: write_captioned_litdata(folder, 8),
    "tars": tars,
}
HALVES = Options(shard_samples=2, split=(("a", "0.5"), ("b", "0.5")))


def work(source: Path, target: Path, workers: int = 1) -> None:
    convert(source, target, HALVES, reshard="tars" in source.name, workers=workers)


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
    calm = snapshot(folder / "calm")
    assert sum(name.endswith(".tar") for name in calm) > 2
    killed = 0
    for moment in moments:
        killed += run_until_killed(lambda: work(source, folder / "out"), folder, moment)
        run_until_killed(lambda: work(source, folder / "out"), folder, moment + 7)
        work(source, folder / "out")
        assert snapshot(folder / "out") == calm, moment
        shutil.rmtree(folder / "out")
    assert killed > len(moments) // 2


@pytest.mark.parametrize("kind", SOURCES)
def test_a_conversion_that_is_killed_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    kill_and_go_on(tmp_path, SOURCES[kind](tmp_path / "in"), [12, 45])


@pytest.mark.long
@pytest.mark.parametrize("kind", SOURCES)
def test_thirty_kills_at_any_moment(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in")
    last = events(source, tmp_path / "out", tmp_path)
    draw = random.Random(kind)
    kill_and_go_on(tmp_path, source, [draw.randrange(1, last * 4 // 5) for _ in range(30)])


@pytest.mark.parametrize("kind", ["mds", "tars"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in")
    work(source, tmp_path / "one")
    work(source, tmp_path / "two", workers=2)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_copy_of_the_source_is_the_same_conversion(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in")
    work(source, tmp_path / "out")
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    place = source if source.is_dir() else source.parent
    shutil.copytree(place, tmp_path / "copy" / place.name)
    work(tmp_path / "copy" / source.relative_to(place.parent), tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in shards} == shards


@pytest.mark.parametrize("kind", ["mds", "litdata", "tars"])
def test_a_conversion_leaves_no_file_open(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in")
    work(source, tmp_path / "out")
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]  # noqa: PTH115
    assert not [link for link in links if link.startswith(str(tmp_path))]


def test_a_disk_that_is_full_is_a_clear_line_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, add, room = fill(tmp_path / "in", 9), ShardFile.add, [5]

    def full(shard: ShardFile, key: str, parts: dict[str, bytes]) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= 1
        add(shard, key, parts)

    monkeypatch.setattr(ShardFile, "add", full)
    with pytest.raises(SavableError, match=r"out: No space left on device: the disk is full, .* start again to go on"):
        convert(source, tmp_path / "out", SMALL)
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["000000.tar"]
    monkeypatch.undo()
    convert(source, tmp_path / "out", SMALL)
    convert(source, tmp_path / "calm", SMALL)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "calm")
