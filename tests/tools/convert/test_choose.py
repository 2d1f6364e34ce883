"""What of a source is taken, and into which split it goes; tars into other shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from tests.conftest import write_tar
from tests.support.toy_files import SMALL, file_hashes, reject_reasons, tar_files, write_captioned_images, write_lines

HALVES = Options(shard_samples=3, split=(("train", "0.75"), ("val", "0.25")))


def keys_of(folder: Path, split: str | None = None) -> list[str]:
    reader = sp.TarShardReader(folder, sp.Lane(), split=split, shuffle=False, epochs=1)
    return [sample.key for sample in reader]


def test_split_has_its_own_shards_and_samples_stay_in_their_split(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 60), tmp_path / "out", HALVES)
    train, val = keys_of(tmp_path / "out", "train"), keys_of(tmp_path / "out", "val")
    assert len(train) + len(val) == 60 and 35 < len(train) < 55 and not set(train) & set(val)
    assert {path.name.partition("-")[0] for path in (tmp_path / "out").glob("*.tar")} == {"train", "val"}
    assert train == sorted(train) and val == sorted(val), "each in the order of the source"
    run_conversion(write_captioned_images(tmp_path / "in", 90), tmp_path / "more", HALVES)
    assert set(train) < set(keys_of(tmp_path / "more", "train"))
    assert set(val) < set(keys_of(tmp_path / "more", "val"))


def test_converting_a_readable_source_without_split_warns_that_its_subsets_differ(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "rows.jsonl", *({"id": number} for number in range(20)))
    tars = tmp_path / "photos"
    for source, name, warns in (
        (write_captioned_images(tmp_path / "in", 20), "photos", False),
        (lines, "lines", True),
        (tars, "again", True),
        (lines, "halves", False),
    ):
        options = HALVES if name == "halves" else Options()
        report = run_conversion(source, tmp_path / name, options, reshard=source == tars)
        assert any("other samples than of the source. Use --split" in told for told in report.warnings) == warns


def test_split_of_a_key_equals_the_golden_value(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 12), tmp_path / "out", HALVES)
    assert keys_of(tmp_path / "out", "val") == ["003"]


@pytest.mark.parametrize(
    "split",
    [
        (("train", "0.9"),),
        (("train", "0.5"), ("train", "0.5")),
        (("a-b", "1"),),
        (("", "1"),),
        (("a", ""),),
        (("a", "-1"), ("b", "2")),
        (("a", "nan"),),
        (("../a", "1"),),
    ],
)
def test_impossible_splits_are_rejected(split: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ValueError, match=r"invalid split|add up to"):
        Options(split=split)


def test_only_named_parts_are_converted(tmp_path: Path) -> None:
    lines = [{"image": ["000.jpg", "b/001.jpg"]}, {"image": "000.jpg"}, {"x": 1}]
    source = write_lines(write_captioned_images(tmp_path / "in", 2) / "m.jsonl", *lines)
    report = run_conversion(source, tmp_path / "out", Options(only=("JPG",)))
    assert list(tar_files(tmp_path / "out")) == ["000000001.0.jpg", "000000001.1.jpg", "000000002.jpg"]
    assert [reject.reason for reject in report.rejected] == ["no chosen part"]
    with pytest.raises(ValueError, match=r"no sample has a part png. Use some of 0\.jpg, 1\.jpg, jpg, json"):
        run_conversion(source, tmp_path / "two", Options(only=("png",)))
    with pytest.raises(SavableError, match=r"only: \('JPG',\) there, \(\) here"):
        run_conversion(source, tmp_path / "out", Options())


@pytest.mark.parametrize(("only", "caption"), [((), True), (("jpg", "json"), True), (("jpg",), False)])
def test_energon_metadata_has_only_converted_parts(tmp_path: Path, only: tuple[str, ...], caption: bool) -> None:
    source = write_lines(
        write_captioned_images(tmp_path / "in", 1) / "m.jsonl", {"image": "000.jpg", "caption": "a cat"}
    )
    run_conversion(source, tmp_path / "out", Options(only=only))
    described = (tmp_path / "out/.nv-meta/dataset.yaml").read_text()
    assert ("json[caption]" in described) == caption
    assert ("CrudeWebdataset" in described) != caption


def test_command_options_choose_samples_and_parts(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "in", 6)
    (tmp_path / "keys.txt").write_text("000\n003\n\n")
    shares = ["--split", "a=0.5", "--split=b=0.5", "--only", "txt", "--keys", str(tmp_path / "keys.txt")]
    run = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), str(tmp_path / "out"), *shares])
    assert run.exit_code == 0, run.output
    assert sorted(tar_files(tmp_path / "out")) == ["000.txt", "003.txt"]
    (tmp_path / "keys.txt").write_text("000\nnowhere\n")
    run = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), str(tmp_path / "two"), *shares])
    assert run.exit_code == 2 and "no sample has 1 of the keys, such as nowhere" in run.stderr


def test_selection_without_any_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keys= is empty"):
        run_conversion(write_captioned_images(tmp_path / "in", 2), tmp_path / "out", SMALL, keys=[])


def test_tars_are_merged_or_split_into_new_shards(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 10), tmp_path / "threes", SMALL)
    run_conversion(tmp_path / "threes", tmp_path / "one", Options(), reshard=True)
    run_conversion(tmp_path / "one", tmp_path / "again", SMALL, reshard=True)
    assert len(list((tmp_path / "one").glob("*.tar"))) == 1
    tars = {name: hashed for name, hashed in file_hashes(tmp_path / "threes").items() if "tar" in name}
    assert {name: hashed for name, hashed in file_hashes(tmp_path / "again").items() if "tar" in name} == tars
    report = run_conversion(
        tmp_path / "one/000000.tar", tmp_path / "texts", Options(only=("txt",)), reshard=True, keys=["000"]
    )
    assert report.samples == 1 and list(tar_files(tmp_path / "texts")) == ["000.txt"]


def test_repeated_keys_get_the_name_of_their_shard(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/a.tar", [("./k.txt", b"1"), ("./l.cls", b"")])
    write_tar(tmp_path / "in/b.v2.tar", [("k.txt", b"2"), ("m.txt", b"3"), ("k.txt", b"4")])
    report = run_conversion(tmp_path / "in", tmp_path / "out", Options(), reshard=True)
    assert tar_files(tmp_path / "out") == {"k.txt": b"1", "l.cls": b"", "b_v2/k.txt": b"2", "m.txt": b"3"}
    assert "2 keys occur again, and got the name of their shard before them: k" in report.warnings
    assert reject_reasons(tmp_path / "out") == {"b.v2.tar, record 4": "duplicate key"}
