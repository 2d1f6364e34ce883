"""Rows that were announced are forgotten when they are read: what is remembered is bounded by what is awaited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from savable_pipeline.data.dataset.opening import open_store
from savable_pipeline.data.stores import grouped_store
from savable_pipeline.data.stores.grouped_store import AwaitedRows, DecodedBlocks

ENDS = [10, 20, 30]


def test_rows_that_are_read_or_taken_are_awaited_no_more_and_empty_groups_are_forgotten() -> None:
    awaited = AwaitedRows()
    awaited.announce(0, np.array([3, 4, 12, 3]), ENDS)
    assert (len(awaited), awaited.count((0, 0)), awaited.count((0, 1))) == (3, 2, 1)
    awaited.announce(0, np.array([3]), ENDS)  # twice is once
    for row in (3, 3, 5):
        awaited.done((0, 0), row)
    assert (awaited.count((0, 0)), repr(awaited)) == (1, "AwaitedRows(2 rows of 2 groups)")
    awaited.done((0, 0), 4)
    assert awaited.take((0, 1)) == [12] and awaited.take((7, 7)) == []
    assert repr(awaited) == "AwaitedRows(0 rows of 0 groups)"


def test_only_rows_that_are_still_awaited_count_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_store, "_MOST", 10)
    awaited = AwaitedRows()
    awaited.announce(0, np.array([29]), ENDS)
    for _ in range(10):
        awaited.announce(0, np.arange(8), ENDS)
        for row in range(8):
            awaited.done((0, 0), row)
    assert awaited.count((0, 2)) == 1  # although 81 were announced
    awaited.announce(0, np.arange(10), ENDS)
    assert (len(awaited), awaited.count((0, 2))) == (10, 0)


def test_epochs_of_a_store_leave_nothing_awaited_and_each_group_is_decoded_once_an_epoch(tmp_path: Path) -> None:
    pq.write_table(pa.table({"txt": ["x" * 1000] * 400}), tmp_path / "a.parquet", row_group_size=100)
    blocks = DecodedBlocks[Any](limit=150_000)
    store = open_store("parquet", tmp_path, blocks=blocks)
    for _ in range(3):
        order = np.arange(400).reshape(4, 100).T.ravel()  # row 0 of each group, then row 1, …
        store.prefetch(order)
        for row in np.sort(order).tolist():
            store.read(0, row, "txt")
            store.extensions(0, row)
        assert repr(store.awaited) == "AwaitedRows(0 rows of 0 groups)"
    assert blocks.decoded == 12
