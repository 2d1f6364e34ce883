"""A store of one's own: the rows of a SQLite table, as docs/own-store.md shows it, with the whole promise."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.testing import assert_exact_resume
from tests.project.pages import ROOT, blocks_of
from tests.support.toy_pipelines import ToyEncoder

PAGE = ROOT / "docs/own-store.md"


def store_of_the_page() -> Any:
    """The class on the page."""
    (block,) = (each.text for each in blocks_of(PAGE) if "class TableStore" in each.text)
    names: dict[str, Any] = {"__name__": __name__, "sp": sp, "custom": custom}
    exec(compile(block, str(PAGE), "exec"), names)
    assert len(block.splitlines()) < 100
    return names["TableStore"]


TableStore = store_of_the_page()


def write_table(path: Path, count: int) -> Path:
    with sqlite3.connect(path) as table:
        table.execute("create table samples (id integer primary key, key text, json blob)")
        rows = [(n, f"s{n:06d}", b'{"id": %d}' % n) for n in range(count)]
        table.executemany("insert into samples values (?, ?, ?)", rows)
    return path


def table_pipeline(path: Path, lane: sp.Lane, **settings: Any) -> custom.Stage:
    store = lane.shared("table", lambda: TableStore(path))
    samples = sp.ShuffleBuffer(custom.RecordReader(store, lane, **settings), size=10)
    return sp.Batcher(sp.OnlinePacker(sp.Encode(samples, ToyEncoder()), max_length=20, open_packs=3), size=2)


def test_a_table_resumes_exactly_with_other_workers_and_ranks(tmp_path: Path) -> None:
    pipeline = partial(table_pipeline, write_table(tmp_path / "a.db", 60))
    assert_exact_resume(pipeline, seed=3, lanes=2, steps=5, workers=(0, 1), world_sizes=(1, 2), chains=1)


def test_state_is_rejected_if_the_table_changed(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.db", 60)
    with sp.SavableLoader(partial(table_pipeline, path), seed=1, lanes=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with sqlite3.connect(path) as table:
        table.execute("update samples set json = '{}' where id = 3")
    with (
        sp.SavableLoader(partial(table_pipeline, path), seed=1, lanes=2) as loader,
        pytest.raises(sp.CheckpointMismatchError, match=r"RecordReader\.shards: rewritten: samples"),
    ):
        loader.load_state_dict(state)


def test_a_store_without_metadata_has_subsets_but_no_splits(tmp_path: Path) -> None:
    store = TableStore(write_table(tmp_path / "a.db", 60))
    assert len(list(custom.RecordReader(store, sp.Lane(), epochs=1, subset=(0.5, 1.0)))) == 30
    with pytest.raises(sp.ShardError, match="split='train', but this dataset has no splits"):
        custom.RecordReader(store, sp.Lane(), split="train")
    with pytest.raises(ValueError, match="RecordReader: block_size must be at least 1, not 0"):
        custom.RecordReader(store, sp.Lane(), block_size=0)
