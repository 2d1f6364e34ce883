"""`sp.convert`: the command as a function, each setting an argument."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, conversion, run_conversion
from tests.support.toy_files import file_hashes, write_captioned_images


def test_convert_has_the_settings_of_a_conversion_with_their_defaults() -> None:
    arguments = {name: each.default for name, each in inspect.signature(sp.convert).parameters.items()}
    settings = {field.name: field.default for field in msgspec.structs.fields(Options)}
    more = {name: each.default for name, each in inspect.signature(run_conversion).parameters.items()}
    del more["options"]
    assert arguments.keys() == {"format", *settings, *more}
    differ = {"file_fields", "split", "only", "progress"}  # as people write them; None where all or none is meant
    for name, default in {**settings, **more}.items():
        assert arguments[name] == (None if name in differ else default), name


def test_each_setting_reaches_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def note(source: Any, target: Any, options: Options, **more: Any) -> None:
        given.update(msgspec.structs.asdict(options), source=source, target=target, **more)

    def tell(done: int, total: int, size: int) -> None:
        pass

    monkeypatch.setattr(conversion, "run_conversion", note)
    settings: dict[str, Any] = {
        "shard_bytes": 5,
        "shard_samples": 6,
        "check_images": False,
        "allow_outside": True,
        "key_field": "id",
        "key_end": "last",
        "classes": True,
        "files_from": tmp_path,
        "reshard": True,
        "unpacked_bytes": 7,
        "workers": 2,
        "engine": object(),
        "progress": tell,
    }
    path = write_captioned_images(tmp_path / "in", 2)
    sp.convert(
        str(path),
        "s3://bucket/out",
        format="folder",
        file_fields=["image"],
        split={"train": "0.75", "val": 0.24999, "rest": 0.00001},
        only=["txt"],
        keys=(key for key in "ab"),
        **settings,
    )
    source = given.pop("source")
    assert (source.form.name, source.path, given.pop("target")) == ("folder", str(path), "s3://bucket/out")
    assert given == {
        **settings,
        "file_fields": ("image",),
        "split": (("train", "0.75"), ("val", "0.24999"), ("rest", "0.00001")),
        "only": ("txt",),
        "keys": ("a", "b"),
    }


def test_convert_writes_the_commands_bytes_and_resumes_its_conversion(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 40)
    told = ["--split", "train=0.7", "--split", "val=0.3", "--only", "txt", "--shard-samples", "7"]
    assert CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "told"), *told]).exit_code == 0
    settings: dict[str, Any] = {"split": {"train": 0.7, "val": 0.3}, "only": ["txt"], "shard_samples": 7}
    done: list[int] = []
    report = sp.convert(
        source, str(tmp_path / "called"), progress=lambda count, total, size: done.append(count), **settings
    )
    assert (report.samples, report.already, done[-1]) == (40, False, 40)
    assert file_hashes(tmp_path / "called") == file_hashes(tmp_path / "told")
    assert sp.convert(str(source), tmp_path / "told", **settings).already


@pytest.mark.parametrize("name", ["file_fields", "only", "keys"])
def test_single_str_is_not_treated_as_many(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {name: "txt"}
    with pytest.raises(ValueError, match=rf"{name} must be a list, not a str. Pass \['txt'\]"):
        sp.convert(write_captioned_images(tmp_path / "in", 2), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only": []}, "only= names no part"),
        ({"keys": []}, "keys= is empty"),
        ({"format": "pictures"}, "no format 'pictures'. Use one of tar, mds, "),
        ({"engine": "dask"}, "engine must be \"ray\", or None .*, not 'dask'"),
        ({"split": {"train": 0.5, "val": 0.4}}, r"add up to 0\.9, not 1"),
        ({"split": {"train": float("nan")}}, "invalid split"),
    ],
)
def test_a_wrong_setting_is_rejected_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sp.convert(write_captioned_images(tmp_path / "in", 2), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_is_reported_within_a_range(tmp_path: Path, workers: int) -> None:
    source, reports = tmp_path / "a.jsonl", list[tuple[int, int, int]]()
    source.write_text('{"n": 1}\n' * 1000)
    sp.convert(source, tmp_path / "out", shard_samples=500, workers=workers, progress=lambda *all: reports.append(all))
    assert reports[0] == (0, 1000, 0) and reports[-1][:2] == (1000, 1000)
    assert {done for done, _, _ in reports} - {0, 500, 1000} and reports == sorted(reports)
