"""Tars with links are refused by conversion, and info and check tell of them, with the cure."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from tests.data.shards.test_scan import FEW, HARD, SYMBOLIC, write

CURE = "pack the files again with `tar --hard-dereference`, and `--dereference` for symbolic links"


@pytest.mark.parametrize("indexed", [False, True])
def test_tars_with_links_are_rejected_with_a_fix(tmp_path: Path, indexed: bool) -> None:
    write(tmp_path / "source/0.tar", FEW)
    if indexed:
        sp.open_dataset(tmp_path / "source")
    with pytest.raises(ValueError, match=f"3 members are links .* such as b.txt in 0.tar: .*{CURE}"):
        run_conversion(tmp_path / "source", tmp_path / "out", Options(), reshard=True)
    assert not (tmp_path / "out").exists()


def test_links_that_are_not_parts_are_no_error(tmp_path: Path) -> None:
    write(tmp_path / "source/0.tar", [("a.txt", b"1"), ("plain", (HARD, "a.txt")), ("d", (SYMBOLIC, "a.txt"))])
    assert run_conversion(tmp_path / "source", tmp_path / "out", Options(), reshard=True).samples == 1


def test_a_compressed_tar_with_links_is_rejected_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    raw = write(tmp_path / "0.tar", FEW).read_bytes()
    (tmp_path / "source/0.tar.gz").write_bytes(gzip.compress(raw))
    (reject,) = run_conversion(tmp_path / "source", tmp_path / "plain", Options()).rejected
    assert (Path(reject.file).name, reject.reason) == ("0.tar.gz", "links")
    assert "3 members are links to other files of their tar, such as b.txt in 0.tar.gz" in reject.detail
    assert CURE in reject.detail


@pytest.mark.parametrize("command", ["info", "check"])
def test_info_and_check_report_links_with_a_fix(tmp_path: Path, command: str) -> None:
    for i in range(2):
        entries = [(name, part) for name, part in FEW if not name.endswith("jpg") or isinstance(part, tuple)]
        write(tmp_path / f"d/{i}.tar", [*entries, ("e.txt", b"")])
    result = CliRunner().invoke(app, [command, str(tmp_path / "d")])
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert "6 members are links to other files of their tar, such as b.txt in 0.tar" in text
    assert CURE in text
    assert "empty: txt in 2 samples" in text
