"""Files that changed at equal sizes since they were converted, and names with dots in them."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from savable_pipeline.data.shards.part_types import dotted_parts
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from tests.conftest import write_tar
from tests.support.toy_files import file_hashes

TEXTS = Options(shard_samples=4)


def texts(folder: Path, count: int = 10) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(f"text {i}")
    return folder


def later(path: Path) -> None:
    """As if the shards had been written an hour ago."""
    for shard in path.rglob("*.tar"):
        os.utime(shard, (time.time() - 3600,) * 2)


def test_changed_contents_of_equal_size_are_another_conversion(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    report = run_conversion(source, tmp_path / "out", TEXTS)
    later(tmp_path / "out")
    assert run_conversion(source, tmp_path / "out", TEXTS) == report  # every byte is compared, since each file is newer
    (source / "003.txt").write_text("text X")
    os.utime(source / "003.txt", (1, 1))  # its old date hides nothing
    before = file_hashes(tmp_path / "out")
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\n003\.txt"):
        run_conversion(source, tmp_path / "out", TEXTS)
    assert file_hashes(tmp_path / "out") == before


def test_a_file_that_is_overwritten_and_dated_back_is_a_change(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    for path in source.iterdir():
        os.utime(path, (1, 1))
    run_conversion(source, tmp_path / "out", TEXTS)
    (source / "003.txt").write_text("text X")
    os.utime(source / "003.txt", (1, 1))
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\n003\.txt"):
        run_conversion(source, tmp_path / "out", TEXTS)


@pytest.mark.parametrize("way", ["of another name", "put in its place", "a folder in it put in its place"])
def test_another_source_of_equal_names_and_sizes_is_another_conversion(tmp_path: Path, way: str) -> None:
    source, other = texts(tmp_path / "in" / "sub"), texts(tmp_path / "other" / "sub")
    (other / "003.txt").write_text("text X")  # before anything is converted: no file of it is newer than a shard
    first = run_conversion(source.parent, tmp_path / "out", TEXTS)
    if way == "put in its place":
        source.parent.rename(tmp_path / "old")
        other.parent.rename(source.parent)
    elif way == "a folder in it put in its place":
        source.rename(tmp_path / "old")
        other.rename(source)
    again = tmp_path / "other" if way == "of another name" else tmp_path / "in"
    before = file_hashes(tmp_path / "out")
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\nsub/003\.txt"):
        run_conversion(again, tmp_path / "out", TEXTS)
    assert file_hashes(tmp_path / "out") == before
    (again / "sub/003.txt").write_text("text 3")
    assert run_conversion(again, tmp_path / "out", TEXTS) == first


def test_conversion_of_another_source_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = texts(tmp_path / "in"), texts(tmp_path / "other")
    (other / "009.txt").write_text("text Y")
    monkeypatch.setattr("savable_pipeline.tools.convert.conversion.finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_conversion(source, tmp_path / "out", TEXTS, workers=1)
    monkeypatch.undo()
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\n009\.txt"):
        run_conversion(other, tmp_path / "out", TEXTS)


def test_repaired_file_of_a_fully_rejected_shard_is_a_change(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 4)
    for i in range(5, 7):
        (source / f"{i:03d}.json").write_text("[1")
    assert len(run_conversion(source, tmp_path / "out", TEXTS).rejected) == 2
    (source / "006.json").write_text("12")
    with pytest.raises(SavableError, match=r"at the same size.*\n006\.json"):
        run_conversion(source, tmp_path / "out", TEXTS)


def test_resumed_conversion_detects_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = texts(tmp_path / "in")
    monkeypatch.setattr("savable_pipeline.tools.convert.conversion.finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_conversion(source, tmp_path / "out", TEXTS, workers=1)
    monkeypatch.undo()
    (source / "009.txt").write_text("text Y")
    with pytest.raises(SavableError, match="1 files changed at the same size"):
        run_conversion(source, tmp_path / "out", TEXTS)


def test_repaired_rejected_file_is_a_change(tmp_path: Path) -> None:
    source = texts(tmp_path / "in")
    (source / "bad.json").write_text("[1")
    assert len(run_conversion(source, tmp_path / "out", TEXTS).rejected) == 1
    assert len(run_conversion(source, tmp_path / "out", TEXTS).rejected) == 1
    (source / "bad.json").write_text("12")
    with pytest.raises(SavableError, match=r"at the same size.*\nbad\.json"):
        run_conversion(source, tmp_path / "out", TEXTS)


def test_compressed_tar_changed_at_equal_size_is_another_conversion(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for content in (b"1", b"2"):
        write_tar(tmp_path / "plain.tar", [("k.txt", content)])
        source.mkdir(exist_ok=True)
        (source / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes(), 0, mtime=0))
        if content == b"1":
            for _ in range(2):
                assert run_conversion(source, tmp_path / "out", Options()).samples == 1
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\na\.tar\.gz"):
        run_conversion(source, tmp_path / "out", Options())


def test_another_compressed_tar_of_equal_name_and_size_is_detected(tmp_path: Path) -> None:
    for name, content in (("in", b"1"), ("other", b"2")):
        write_tar(tmp_path / "plain.tar", [("k.txt", content)])
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes(), 0, mtime=0))
    assert run_conversion(tmp_path / "in", tmp_path / "out", Options()).samples == 1
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\na\.tar\.gz"):
        run_conversion(tmp_path / "other", tmp_path / "out", Options())


def test_two_names_that_would_have_one_key_are_rejected(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 0)
    (source / "a.b.txt").write_text("1")
    (source / "a_b.json").write_text("1")
    (source / "c.txt").write_text("1")
    report = run_conversion(source, tmp_path / "out", Options(key_end="last"))
    assert report.samples == 1
    assert [reject.reason for reject in report.rejected] == ["two names with one key"] * 2


def test_samples_without_a_common_part_are_counted(tmp_path: Path) -> None:
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
