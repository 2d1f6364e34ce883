"""Files that changed at equal sizes since they were converted, and names with dots in them."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from savable_pipeline.data.shards.part_types import dotted_parts
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from tests.conftest import write_tar
from tests.support.toy_files import snapshot

TEXTS = Options(shard_samples=4)


def texts(folder: Path, count: int = 10) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(f"text {i}")
    return folder


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("way", ["written", "dated back", "another folder", "put in its place"])
def test_files_that_were_written_since_are_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, done: bool
) -> None:
    source, other = texts(tmp_path / "in"), texts(tmp_path / "other")
    os.utime(other / "003.txt", (1, 1))
    if done:
        run_conversion(source, tmp_path / "out", TEXTS)
    else:
        monkeypatch.setattr("savable_pipeline.tools.convert.conversion.finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_conversion(source, tmp_path / "out", TEXTS)
        monkeypatch.undo()
    if way in ("written", "dated back"):
        (source / "003.txt").write_text("text X")
        os.utime(source / "003.txt", (1, 1) if way == "dated back" else None)
    elif way == "put in its place":
        source.rename(tmp_path / "old")
        other.rename(source)
    before = snapshot(tmp_path / "out")
    with pytest.raises(SavableError, match=r"has another conversion.*\n(source: .*\n)?input: other files"):
        run_conversion(other if way == "another folder" else source, tmp_path / "out", TEXTS)
    assert {name: found for name, found in snapshot(tmp_path / "out").items() if name in before} == before or not done


def test_a_copy_with_its_dates_is_the_same_conversion(tmp_path: Path) -> None:
    report = run_conversion(texts(tmp_path / "in"), tmp_path / "out", TEXTS)
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    again = run_conversion(tmp_path / "copy", tmp_path / "out", TEXTS)
    assert (again, again.already) == (report, True)


def test_a_rejected_file_that_was_repaired_is_a_change(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    (source / "bad.json").write_text("[1")
    for _ in range(2):
        assert len(run_conversion(source, tmp_path / "out", TEXTS).rejected) == 1
    (source / "bad.json").write_text("12")
    with pytest.raises(SavableError, match="input: other files, or files that were written since"):
        run_conversion(source, tmp_path / "out", TEXTS)


def test_a_compressed_tar_that_changed_at_equal_size(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for content in (b"1", b"2"):
        write_tar(tmp_path / "plain.tar", [("k.txt", content)])
        source.mkdir(exist_ok=True)
        (source / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes(), 0, mtime=0))
        if content == b"1":
            for _ in range(2):
                assert run_conversion(source, tmp_path / "out", Options()).samples == 1
    with pytest.raises(SavableError, match="input: other files"):
        run_conversion(source, tmp_path / "out", Options())


def test_of_two_names_that_would_have_one_key_the_second_is_rejected(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 0)
    (source / "a.b.txt").write_text("1")
    (source / "a_b.json").write_text("1")
    (source / "c.txt").write_text("1")
    report = run_conversion(source, tmp_path / "out", Options(key_end="last"))
    assert report.samples == 2
    assert [(reject.file, reject.reason) for reject in report.rejected] == [("a_b.json", "two names with one key")]


def test_samples_that_lack_a_part_that_nearly_all_have_are_counted(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 30)
    for i in range(28):
        (source / f"{i:03d}.json").write_text("1")
    told = "warning: 2 of 30 samples have no part json, which the others have"
    assert told in CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")]).output
    for command in ("info", "check"):
        run = CliRunner().invoke(app, [command, str(tmp_path / "out")])
        assert run.exit_code == 0 and told in run.output


def test_rare_dotted_parts_are_named_and_numbered_ones_are_not() -> None:
    assert not dotted_parts(100, {"json": 100, **{f"{i}.jpg": 100 // (i + 1) for i in range(300)}})
    assert not dotted_parts(100, {"jpg": 50, "png": 50, "seg.png": 50})
    (warning,) = dotted_parts(100, {f"{i:04d}.jpg": 1 for i in range(100)})
    assert warning.startswith("100 parts are in hardly any sample: 0000.jpg, 0001.jpg, ")
    assert dotted_parts(1, {"v1.0.jpg": 1}, 1200)[-1].startswith("one sample has 1200 parts; a key ends at the first")


def test_an_unknown_key_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="key_end must be 'first' or 'last', not 'middle'"):
        Options(key_end="middle")  # type: ignore[arg-type]
