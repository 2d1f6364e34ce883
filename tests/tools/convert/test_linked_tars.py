"""Tars with links are converted with the bytes that these lead to, and info and check tell of them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from savable_pipeline.tools.convert.linked_tars import holds_links
from tests.data.shards.test_tar_links import FEW, HARD, SYMBOLIC, WHOLE, write
from tests.support.toy_files import reasons


def samples_of(folder: Path) -> dict[str, dict[str, bytes]]:
    return {sample.key: dict(sample) for sample in sp.open_dataset(folder)}


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_convert_writes_out_what_links_lead_to_without_being_asked(tmp_path: Path, indexed: bool, workers: int) -> None:
    source = tmp_path / "source"
    write(source / "0.tar", FEW)
    if indexed:
        assert samples_of(source) == {"a": WHOLE["a"], "b": {"jpg": b"image b"}}
    options = Options(shard_samples=2, check_images=False)
    report = run_conversion(source, tmp_path / "out", options, workers=workers)
    assert (report.samples, report.rejected) == (3, [])
    assert samples_of(tmp_path / "out") == WHOLE
    assert not holds_links(tmp_path / "out")
    assert run_conversion(source, tmp_path / "out", options).samples == 3  # again: all is there


def test_tars_without_links_have_nothing_to_convert_and_their_samples_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "source/0.tar", [("a.txt", b"1"), ("plain", (HARD, "a.txt")), ("d", (SYMBOLIC, "a.txt"))])
    for _ in range(2):  # with and without an index
        with pytest.raises(ValueError, match="tars are read as they are, with nothing to convert"):
            run_conversion(tmp_path / "source", tmp_path / "out", Options())
        sp.open_dataset(tmp_path / "source")


def test_keys_of_several_tars_and_links_to_nothing_are_told_by_name(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"source/{i}.tar", [*FEW, ("d.txt", (HARD, "gone.txt"))])
    report = run_conversion(tmp_path / "source", tmp_path / "out", Options(check_images=False))
    assert report.samples == 6
    assert {key: parts for key, parts in samples_of(tmp_path / "out").items() if "/" in key} == {
        f"1/{key}": parts for key, parts in WHOLE.items()
    }
    assert "3 keys occur again" in report.warnings[0]
    assert reasons(tmp_path / "out") == dict.fromkeys(["0.tar", "1.tar"], "link without a file")
    assert report.rejected[0].detail == "d.txt -> gone.txt: it leads to no file of the tar"


def test_a_tar_that_changes_while_it_is_converted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from savable_pipeline.tools.convert import run

    path = write(tmp_path / "source/0.tar", FEW)

    def replaced(*args: Any) -> Any:
        write(path, [(name, part.upper() if isinstance(part, bytes) else part) for name, part in FEW])
        return made(*args)

    made = run.make_plan
    monkeypatch.setattr(run, "make_plan", replaced)
    with pytest.raises(sp.SavableError, match=r"0\.tar"):
        run_conversion(tmp_path / "source", tmp_path / "out", Options(check_images=False))


def test_compressed_tars_are_repacked_with_their_links_and_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    raw = write(tmp_path / "0.tar", FEW).read_bytes()
    (tmp_path / "source/0.tar.gz").write_bytes(gzip.compress(raw))
    report = run_conversion(tmp_path / "source", tmp_path / "plain", Options())
    assert (tmp_path / "plain/0.tar").read_bytes() == raw
    assert "3 members are links to other files of their tar, such as b.txt in 0.tar" in report.warnings[0]
    run_conversion(tmp_path / "plain", tmp_path / "out", Options(check_images=False))
    assert samples_of(tmp_path / "out") == WHOLE


@pytest.mark.parametrize("command", ["info", "check"])
def test_info_and_check_tell_of_links_with_the_cure(tmp_path: Path, command: str) -> None:
    for i in range(2):
        entries = [(name, part) for name, part in FEW if not name.endswith("jpg") or isinstance(part, tuple)]
        write(tmp_path / f"d/{i}.tar", [*entries, ("e.txt", b"")])
    result = CliRunner().invoke(app, [command, str(tmp_path / "d")])
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert "6 members are links to other files of their tar, such as b.txt in 0.tar" in text
    assert f"`savable convert {tmp_path}/d DST`" in text
    assert "empty: txt in 2 samples" in text
