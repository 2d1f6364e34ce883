"""A folder whose shards are not all there: a conversion, or a writer of it, was stopped."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.check.dataset_check import check_dataset
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import run_conversion
from tests.support.toy_files import SMALL, write_captioned_images


def stopped_conversion(source: Path, target: Path) -> None:
    """A conversion that is stopped when it has written some shards."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("savable_pipeline.tools.convert.finish.write_index", stop)
        run_conversion(source, target, SMALL, workers=1)


def write(folder: Path, number: int, *, part: tuple[int, int] | None = None, fail: bool = False) -> None:
    with sp.ShardWriter(folder, max_samples=2, part=part) as writer:
        for i in range(writer.written, number):
            writer.write({"__key__": f"{part}-{i}", "txt": str(i)})
        if fail:
            raise RuntimeError("the program fails")


def warned(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        len(sp.open_dataset(folder))
    return [record.getMessage() for record in caplog.records]


def test_output_of_an_interrupted_conversion_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = write_captioned_images(tmp_path / "in", 9), tmp_path / "out"
    stopped_conversion(source, target)
    (warning,) = warned(target, caplog)
    assert warning.startswith(f"{target}: samples are missing") and "same command again" in warning
    assert [problem.reason for problem in check_dataset(target, processes=1).problems] == ["unfinished"]
    assert "\nunfinished: " in CliRunner().invoke(app, ["check", str(target)]).stdout
    run_conversion(source, target, SMALL)
    assert warned(target, caplog) == []
    assert check_dataset(target, processes=1).problems == []


def test_output_of_an_interrupted_writer_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError):
        write(tmp_path, 5, fail=True)
    (warning,) = warned(tmp_path, caplog)
    assert "sp.ShardWriter" in warning
    assert [problem.reason for problem in check_dataset(tmp_path, processes=1).problems] == ["unfinished"]
    write(tmp_path, 5)
    assert warned(tmp_path, caplog) == []


def test_interrupted_and_missing_parts_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 3, part=(0, 4))
    with pytest.raises(RuntimeError):
        write(tmp_path, 3, part=(2, 4), fail=True)
    (warning,) = warned(tmp_path, caplog)
    assert "parts 1, 2, 3 of 4" in warning
    shown = CliRunner().invoke(app, ["index", str(tmp_path)])
    assert "parts 1, 2, 3 of 4" in " ".join(shown.output.split())
    for i in range(4):
        write(tmp_path, 3 if i else 0, part=(i, 4))
    assert warned(tmp_path, caplog) == []
