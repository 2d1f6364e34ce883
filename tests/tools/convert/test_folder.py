"""Folders of files: names whose dots would build one sample of many, and folders that are classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from torchvision.datasets import ImageFolder
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from task_encoders import ClassificationEncoder, SquareCrop
from tests.support.toy_files import jpeg, write_captioned_images

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


@pytest.mark.parametrize(("name", "dotted"), [*zip(NAMES, (1, 2, 20, 100), strict=True)])
def test_names_merged_by_dots_stop_a_conversion_with_a_fix(tmp_path: Path, name: str, dotted: int) -> None:
    plain = [f"photo_{i}.txt" for i in range(100 - dotted)]
    source = write(tmp_path / "in", *(name.format(i) for i in range(dotted)), *plain)
    stopped = run("convert", source, tmp_path / "out")
    key, _, part = name.format(0).partition(".")
    assert stopped.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"so {dotted} file{'s' * (dotted > 1)} would become 1 sample: " in flat(stopped.output)
    assert all(
        each in flat(stopped.output)
        for each in ("--key-end last", "--key-end first", f"would be the part {part} of the sample {key}.")
    )
    last = run("convert", "--key-end", "last", source, tmp_path / "last")
    assert last.exit_code == 0 and "100 samples in 1 shard" in last.output and last.output.count("warning") == 1
    assert f"warning: {dotted} key{'s' * (dotted > 1)} had dots, which become _ in tars" in last.output
    first = run("convert", "--key-end", "first", source, tmp_path / "first")
    assert first.exit_code == 0 and f"{101 - dotted} sample" in first.output
    for command in ("info", "check") if dotted > 2 else ("info",):
        told = run(command, tmp_path / "first")
        assert told.exit_code == 0 and f"such as {part}" in flat(told.output), told.output


@pytest.mark.parametrize("count", [9])
def test_names_repeated_in_each_folder_are_detected_as_merged(tmp_path: Path, count: int) -> None:
    source = write(tmp_path / "in", *(f"{name}/frame.{i:03d}.txt" for name in "ab" for i in range(count)))
    stopped = run("convert", source, tmp_path / "out")
    assert stopped.exit_code == 2
    told = f"{2 * count} files would become 2 samples: a/frame.000.txt would be the part 000.txt of the sample a/frame"
    assert told in flat(stopped.output)


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
def test_dots_at_the_start_of_a_part_are_no_error(tmp_path: Path, names: list[str]) -> None:
    done = run("convert", write(tmp_path / "in", *names), tmp_path / "out")
    assert done.exit_code == 0 and "--key-end" not in done.output


def test_case_and_jpeg_spelling_do_not_make_a_missing_part(tmp_path: Path) -> None:
    names = [*(f"{i}.jpg" for i in range(94)), *(f"{i}.JPG" for i in range(94, 97)), "97.jpeg", "98.JPEG"]
    source = write(
        tmp_path / "in", *names, *(name.rpartition(".")[0] + ".TXT" for name in names[:97]), "99.txt", "99.jpg"
    )
    done = run("convert", "--no-check-images", source, tmp_path / "out")
    assert "warning: 2 of 100 samples have no part txt, which the others have\nnothing rejected" in done.output


CLASSES = [f"{name}/{part}/{i}.jpg" for name in ("dog", "cat", "10") for part in ("big", "small") for i in range(4)]


def test_top_folder_becomes_the_class_numbered_like_by_torchvision(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 0, **{name: jpeg(i) for i, name in enumerate(CLASSES)})
    done = run("convert", "--classes", source, tmp_path / "out")
    assert done.exit_code == 0 and "warning" not in done.output
    assert json.loads((tmp_path / "out/classes.json").read_text()) == ["10", "cat", "dog"]
    samples = sp.open_dataset(tmp_path / "out")
    expected = ImageFolder(source).class_to_idx
    assert {sample.key.partition("/")[0]: int(sample["cls"]) for sample in samples} == expected
    assert all(list(sample) == ["cls", "jpg"] for sample in samples)
    items = sp.Encode(
        sp.TarShardReader(tmp_path / "out", sp.Lane(), epochs=1), ClassificationEncoder(3, crop=SquareCrop(4))
    )
    assert sorted(item["label"] for item in items) == [label for label in range(3) for _ in range(8)]
    assert "nothing was written" in run("convert", "--classes", source, tmp_path / "out").output
    again = run("convert", tmp_path / "out", tmp_path / "small", "--reshard", "--shard-samples", "5")
    assert again.exit_code == 0 and "24 samples in 5 shards" in again.output


def test_classes_do_not_depend_on_chosen_parts_and_keys(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in", *(f"{name}/{i}.{part}" for name in "abc" for i in range(3) for part in ("txt", "md"))
    )
    report = sp.convert(source, tmp_path / "out", classes=True, only=["txt"], keys=["c/1", "b/0"])
    assert report.samples == 2
    assert {sample.key: (list(sample), sample["cls"]) for sample in sp.open_dataset(tmp_path / "out")} == {
        "b/0": (["cls", "txt"], b"1"),
        "c/1": (["cls", "txt"], b"2"),
    }


def test_samples_without_a_folder_or_with_their_own_class_are_rejected(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "notes.md", "a/0.txt", "a/1.txt", "a/1.cls", "b/0.txt")
    report = sp.convert(source, tmp_path / "out", classes=True)
    assert report.samples == 2
    assert {(reject.key, reject.reason) for reject in report.rejected} == {
        ("notes", "no class"),
        ("a/1", "two parts with one extension"),
    }


def test_classes_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: classes= does not apply to jsonl files"):
        sp.convert(tmp_path / "a.jsonl", tmp_path / "out", classes=True)


@pytest.mark.parametrize(
    ("names", "hinted"),
    [
        (CLASSES, True),
        ([f"{name}/{i}.jpg" for name in ("n01440764", "n01443537") for i in range(4)], True),
        ([f"{digit}/{i}.wav" for digit in range(10) for i in range(4)], True),
        ([f"{split}/{i}.jpg" for split in ("train", "val", "test") for i in range(4)], False),
        ([f"{i // 4:05d}/{i}.jpg" for i in range(12)], False),
        ([f"2024-05-0{i}/{j}.jpg" for i in range(1, 4) for j in range(4)], False),
        ([f"{name}/{i}.{part}" for name in "ab" for i in range(4) for part in ("jpg", "txt")], False),
        ([*CLASSES, "loose.jpg"], False),
        ([f"{i}/image.jpg" for i in range(9)], False),
    ],
)
def test_folders_that_look_like_classes_get_a_hint(tmp_path: Path, names: list[str], hinted: bool) -> None:
    done = run("convert", "--no-check-images", write(tmp_path / "in", *names), tmp_path / "out")
    assert done.exit_code == 0 and ("look like classes: --classes" in flat(done.output)) == hinted
