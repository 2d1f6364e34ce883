"""Folders of files: names whose dots would make one sample of many files."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from savable_pipeline.tools.cli.main import app

NAMES = ["2024.05.08_cat_{}.txt", "v1.0_img_{}.txt", "coco.val.{:04d}.txt", "img.{}.txt"]


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dotted", [1, 2, 4, 20, 100])
def test_names_that_dots_would_merge_into_one_sample_stop_a_conversion_that_names_the_cure(
    tmp_path: Path, name: str, dotted: int
) -> None:
    plain = [f"photo_{i}.txt" for i in range(100 - dotted)]
    source = write(tmp_path / "in", *(name.format(i) for i in range(dotted)), *plain)
    stopped = run("convert", source, tmp_path / "out")
    key, _, part = name.format(0).partition(".")
    assert stopped.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"so that {dotted} file{'s' * (dotted > 1)} would make 1 sample: " in flat(stopped.output)
    assert all(each in flat(stopped.output) for each in ("--key-end last", "--key-end first", f"{key} the part {part}"))
    last = run("convert", "--key-end", "last", source, tmp_path / "last")
    assert last.exit_code == 0 and "100 samples in 1 shard" in last.output and "warning" not in last.output
    first = run("convert", "--key-end", "first", source, tmp_path / "first")
    assert first.exit_code == 0 and f"{101 - dotted} sample" in first.output
    for command in ("info", "check"):
        told = run(command, tmp_path / "first")
        assert told.exit_code == 0 and f"such as {part}" in flat(told.output), told.output


def test_names_that_begin_anew_in_each_folder_are_found_merged_too(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(f"{name}/frame.{i:03d}.txt" for name in "ab" for i in range(20)))
    stopped = run("convert", source, tmp_path / "out")
    assert stopped.exit_code == 2
    assert "40 files would make 2 samples: a/frame.000.txt would be of the sample a/frame" in flat(stopped.output)


@pytest.mark.parametrize(
    "names",
    [
        ["cat.txt", "cat.seg.txt", *(f"dog{i}.txt" for i in range(20))],
        [f"{i}.seg.txt" for i in range(9)],
        [f"{i}/view.{side}.txt" for i in range(3) for side in ("left", "right")],
        [*(f"document.{i}.txt" for i in range(40)), "document.md"],
        [f"{name}.cam{i:02d}.txt" for name in "ab" for i in range(30)],
    ],
)
def test_dots_that_begin_the_name_of_a_part_are_no_fault(tmp_path: Path, names: list[str]) -> None:
    done = run("convert", write(tmp_path / "in", *names), tmp_path / "out")
    assert done.exit_code == 0 and "--key-end" not in done.output


def test_letters_of_another_case_and_jpeg_are_no_other_part_that_samples_lack(tmp_path: Path) -> None:
    names = [*(f"{i}.jpg" for i in range(94)), *(f"{i}.JPG" for i in range(94, 97)), "97.jpeg", "98.JPEG"]
    source = write(
        tmp_path / "in", *names, *(name.rpartition(".")[0] + ".TXT" for name in names[:97]), "99.txt", "99.jpg"
    )
    done = run("convert", "--no-check-images", source, tmp_path / "out")
    assert "warning: 2 of 100 samples have no part txt, which the others have\nnothing rejected" in done.output
