"""Rows that are decoded in groups: all lanes read from the same few groups, each group is decoded about once."""

from __future__ import annotations

import logging
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.stages.readers.lane_shares import lane_span
from savable_pipeline.stages.readers.read_order import DealtOrder, EpochOrder
from tests.support.few_examples import few

ROW = 1000  # bytes


@few(30)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    lanes=st.integers(1, 7),
    block=st.integers(1, 9),
    window=st.integers(1, 4),
)
def test_the_lanes_get_each_sample_once_whatever_is_asked_for_at_a_time(
    sizes: list[int], lanes: int, block: int, window: int
) -> None:
    count = sum(sizes)
    inner = EpochOrder(np.cumsum([0, *sizes]), seed=1, source=2, epoch=3, block_size=block, window=window)
    spans = [lane_span(count, lane, lanes, 0) for lane in range(lanes)]
    order = DealtOrder(inner, np.array([*(begin for begin, _ in spans), count]), block)
    whole = [order.locate(begin, end).tolist() if end > begin else [] for begin, end in spans]
    assert sorted(chain(*whole)) == list(range(count))
    for (begin, end), found in zip(spans, whole, strict=True):
        assert [int(order.locate(i, i + 1)[0]) for i in range(begin, end)] == found


def write(folder: Path, *, files: int = 3, groups: int = 8, rows: int = 64) -> Path:
    for file in range(files):
        ids = range(file * groups * rows, (file + 1) * groups * rows)
        table = pa.table({"id": ids, "raw": [b"x" * ROW] * len(ids)})
        path = folder / f"{file}.parquet"
        pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    return folder


def read_in_turns(folder: Path, *, lanes: int, buffer: int, **settings: Any) -> tuple[list[int], float]:
    """An epoch of all lanes in one process, batch by batch in turn; and the row groups decoded per row group."""
    shared: dict[Any, Any] = {}
    readers = [
        custom.ParquetReader(folder, sp.Lane(i, lanes, 7, worker=WorkerContext(shared=shared)), epochs=1, **settings)
        for i in range(lanes)
    ]
    going: list[Any] = [sp.ShuffleBuffer(reader, size=buffer) for reader in readers]
    ids = []
    while going:
        for stage in list(going):
            batch = [sample.json("id") for sample in islice(stage, 4)]
            ids += batch
            if not batch:
                going.remove(stage)
    store: Any = readers[0].dataset.store
    groups = sum(len(store.group_rows(shard)) for shard in range(len(store.entries)))
    return ids, store.blocks.decoded / groups


def test_each_row_group_is_decoded_about_once_an_epoch_although_a_fraction_fits(tmp_path: Path) -> None:
    write(tmp_path)
    fits = 8 * 64 * (ROW + 30)  # of 24 row groups
    for settings in ({}, {"subset": 0.5}):
        ids, decoded = read_in_turns(tmp_path, lanes=12, buffer=3, cache_bytes=fits, **settings)
        assert len(set(ids)) == len(ids) and len(ids) == pytest.approx(1536 * settings.get("subset", 1), rel=0.01)
        assert decoded <= 1.2, settings
    _, decoded = read_in_turns(tmp_path, lanes=12, buffer=3, cache_bytes=fits, block_size=8)
    assert decoded > 5  # in the order of tars, as many groups are open as there are lanes


def test_row_groups_too_large_to_be_mixed_are_a_warning_with_the_size_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    with caplog.at_level(logging.WARNING):
        custom.ParquetReader(tmp_path, sp.Lane(), cache_bytes=4 * 70 * (ROW + 30))
    assert "samples of 1 of them at a time are mixed. Write row groups of at most 1.3 kB" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        custom.ParquetReader(tmp_path, sp.Lane())
    assert not caplog.text
