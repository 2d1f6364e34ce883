"""Which samples a `subset` draws: the same of a shard in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.selection import without_ending
from tests.conftest import write_tar

ROWS = {"a/train.001": 40, "a/train.002": 25, "b.x/0": 30}


def write_kind(folder: Path, kind: str) -> None:
    """The same rows in files of the same names, but for the ending."""
    for name, rows in ROWS.items():
        path = folder / f"{name}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        named = [f"{name}-{row:02d}" for row in range(rows)]
        table = pa.table({"id": named})
        if kind == "tar":
            write_tar(path, [(f"{row:02d}.id", key.encode()) for row, key in enumerate(named)])
        elif kind == "parquet":
            pq.write_table(table, path)
        elif kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        else:
            path.write_text("".join(f'{{"id": "{key}"}}\n' for key in named))


@pytest.mark.parametrize("subset", [0.3, (0.5, 0.75), 17])
def test_the_same_shards_in_any_format_have_the_same_subset(tmp_path: Path, subset: Any) -> None:
    readers = {
        "tar": sp.TarShardReader,
        "parquet": custom.ParquetReader,
        "arrow": custom.ArrowReader,
        "jsonl": custom.JsonlReader,
        "ndjson": custom.JsonlReader,
    }
    found = {}
    for kind, reader in readers.items():
        write_kind(tmp_path / kind, kind)
        samples = reader(tmp_path / kind, sp.Lane(), subset=subset, shuffle=False, epochs=1)  # type: ignore[operator]
        found[kind] = [sample["id"].decode() for sample in samples]
    assert len(found["tar"]) in (17, *range(23, 32))
    assert all(keys == found["tar"] for keys in found.values()), found


@pytest.mark.parametrize(
    ("name", "endings", "expected"),
    [
        ("a/train.001.tar", (".tar",), "a/train.001"),
        ("train.001.tar.gz", (".tar", ".tar.gz"), "train.001"),
        ("x.jsonl.gz", (".jsonl", ".jsonl.gz"), "x"),
        ("x.jsonl.gz", (".jsonl",), "x.jsonl.gz"),
        ("a.tar/b", (".tar",), "a.tar/b"),
        ("all", (), "all"),
    ],
)
def test_an_ending_is_that_of_the_format(name: str, endings: tuple[str, ...], expected: str) -> None:
    assert without_ending(name, endings) == expected
