"""`savable info`, `index`, `check` and `preview` know every store."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from savable_pipeline.tools.cli.main import app
from tests.data.stores.test_columnar_store import flipped
from tests.data.stores.test_token_store import DOCUMENTS, write_bin
from tests.support.toy_stores import WRITERS

SIZES = [23, 1, 31]
KINDS = ["parquet", "arrow", "jsonl", "tokens"]


def write(kind: str, folder: Path) -> None:
    if kind == "tokens":
        folder.mkdir()
        for name in "abc":
            write_bin(folder / f"{name}.bin", DOCUMENTS)
    else:
        WRITERS[kind](folder, SIZES)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.parametrize(
    "kind", [k if k in ("jsonl", "parquet", "tokens") else pytest.param(k, marks=pytest.mark.long) for k in KINDS]
)
def test_each_command_reads_each_store(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "data"
    write(kind, folder)
    samples = 15 if kind == "tokens" else sum(SIZES)
    assert (
        f"no problem found in {samples} samples (3 shards, " in run("check", str(folder))
        and not (folder / ".nv-meta").exists()
    )
    found = json.loads(run("info", str(folder), "--json"))
    part = "tokens" if kind == "tokens" else "json"
    assert (found["shards"], found["samples"], part in found["parts"]) == (3, samples, True)
    assert f"savable.{kind}.index" in run("index", str(folder))
    run("preview", str(folder), "-o", str(tmp_path / "page.html"))
    assert part in (tmp_path / "page.html").read_text()


def test_check_lists_damage_once_a_row_group_and_bad_json_by_its_line(tmp_path: Path) -> None:
    WRITERS["parquet"](tmp_path / "rows", [30])
    flipped(tmp_path / "rows/0000.parquet")
    assert "1 problem found in 30 samples (" in run("check", str(tmp_path / "rows"), code=1)
    WRITERS["jsonl"](tmp_path / "lines", [3])
    with (tmp_path / "lines/0000.jsonl").open("a") as file:
        begins = file.tell()
        file.write('{"id": \n')
    found = " ".join(run("check", str(tmp_path / "lines"), code=1).split())
    assert f"0000.jsonl: malformed JSON: row 3, at byte {begins}: invalid JSON: Expecting value" in found


def test_check_finds_a_part_that_is_all_zeros(tmp_path: Path) -> None:
    rows = [{"bin": bytes([i]) * 64} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = run("check", str(tmp_path / "a.parquet"), code=1)
    assert "1 problem" in found and "a.parquet:0.bin: zero-filled: all 64 bytes are zeros" in found


def test_folder_of_several_formats_is_rejected_but_not_one_of_tars(tmp_path: Path) -> None:
    for kind in ("parquet", "jsonl"):
        WRITERS[kind](tmp_path / "data", SIZES)
    result = CliRunner().invoke(app, ["info", str(tmp_path / "data")])
    assert result.exit_code == 2 and "several kinds of files, jsonl" in result.stderr
    assert "23 samples" in run("info", str(tmp_path / "data/0000.parquet"))
    WRITERS["tar"](tmp_path / "data", [5])
    assert json.loads(run("info", str(tmp_path / "data"), "--json"))["samples"] == 5


def test_deleted_file_is_named_and_index_continues_without_it(tmp_path: Path) -> None:
    WRITERS["jsonl"](tmp_path / "lines", SIZES)
    run("index", str(tmp_path / "lines"))
    (tmp_path / "lines/0001.jsonl").unlink()
    result = CliRunner().invoke(app, ["info", str(tmp_path / "lines")])
    assert result.exit_code == 2 and "1 indexed shards are gone, such as 0001.jsonl" in result.stderr
    run("index", str(tmp_path / "lines"))
    assert "54" in run("info", str(tmp_path / "lines"))
