"""Conversions of what is read in place: Parquet, Arrow, and what HF datasets writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.toy_files import reject_reasons

ROWS: list[dict[str, Any]] = [
    {"name": f"k{i:03d}", "txt": f"text {i}", "picture": {"bytes": bytes([i] * 9), "path": f"{i}.raw"}, "n": [i, 1]}
    for i in range(40)
]


def write_parquet(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for i in range(2):
        pq.write_table(pa.Table.from_pylist(ROWS[20 * i : 20 * i + 20]), folder / f"{i}.parquet", row_group_size=6)
    return folder


def write_saved(folder: Path) -> Path:
    """As `save_to_disk` writes a dataset."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("write", "workers"), [(write_parquet, 2), (write_saved, 1)])
def test_each_row_becomes_a_sample_with_its_parts(tmp_path: Path, write: Any, workers: int) -> None:
    source = write(tmp_path / "source")
    report = run_conversion(source, tmp_path / "out", Options(shard_samples=15), workers=workers)
    assert (report.samples, len(report.rejected)) == (40, 0)
    there = list(sp.open_dataset(source))
    here = list(sp.open_dataset(tmp_path / "out"))
    assert [sample.key for sample in there][:2] == [f"{there[0].shard}:0", f"{there[0].shard}:1"]
    assert [sample.key for sample in here] == [
        sample.key.replace(sample.shard + ":", sample.shard.split(".")[0] + "/") for sample in there
    ]
    for sample, other in zip(here, there, strict=True):
        assert {name.lower(): part for name, part in sample.items()} == {
            name.lower(): part for name, part in other.items()
        }


def test_a_saved_dataset_of_splits_is_converted_split_by_split(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved/train")
    (tmp_path / "saved/dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises((ValueError, sp.ShardError), match="train"):
        run_conversion(tmp_path / "saved", tmp_path / "out", Options())
    assert run_conversion(tmp_path / "saved/train", tmp_path / "out", Options()).samples == 40


def test_rows_have_no_links_to_other_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_outside= does not apply to parquet files"):
        run_conversion(write_parquet(tmp_path / "source"), tmp_path / "out", Options(allow_outside=True))


@pytest.mark.parametrize("only", [(), ("txt",)])
def test_row_without_parts_is_rejected_with_its_position(tmp_path: Path, only: tuple[str, ...]) -> None:
    rows = [{"txt": "one"}, {"txt": None}, {"txt": "three"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    report = run_conversion(tmp_path / "a.parquet", tmp_path / "out", Options(only=only))
    assert report.samples == 2
    assert reject_reasons(tmp_path / "out") == {"a.parquet, record 1": "no part"}


def test_file_changed_during_a_conversion_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_parquet(tmp_path / "source")
    run_conversion(source, tmp_path / "out", Options())
    pq.write_table(pa.Table.from_pylist(ROWS[:7]), source / "0.parquet")
    with pytest.raises((ValueError, sp.SavableError)):
        run_conversion(source, tmp_path / "out", Options())
