"""The order of an epoch: every sample once, in equal spans, window by window; rows in groups are decoded about once."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
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
from savable_pipeline.stages.readers.lane_shares import (
    batches_span,
    lane_span,
)
from savable_pipeline.stages.readers.read_order import DealtOrder, EpochOrder
from tests.support.draws import few_examples

SIZES = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 1])), min_size=1, max_size=20).filter(sum)


def shuffled(
    sizes: list[int], *, seed: int = 0, epoch: int = 0, block_size: int = 8, window: int | None = 32
) -> EpochOrder:
    return EpochOrder(np.cumsum([0, *sizes]), seed=seed, source=1, epoch=epoch, block_size=block_size, window=window)


def test_the_order_of_a_small_epoch_is_blocks_permuted_in_windows_of_permuted_shards() -> None:
    order = shuffled([4, 3, 1, 5], block_size=2, window=2).locate(0, 13).tolist()
    assert order[:5] == [7, 0, 1, 2, 3]  # shards 2 and 0, cut into 7 0 │ 1 2 │ 3
    assert order[5:] == [9, 10, 6, 8, 4, 5, 11, 12]  # shards 1 and 3, cut into 4 5 │ 6 8 │ 9 10 │ 11 12


def test_samples_of_a_block_stay_together() -> None:
    order = shuffled([800], block_size=8).locate(0, 800).reshape(100, 8)
    assert (order % 8 == np.arange(8)).all()
    assert not np.array_equal(order[:, 0], np.arange(0, 800, 8))


@few_examples(40)
@given(SIZES, st.integers(1, 12))
def test_window_has_the_requested_number_of_shards(sizes: list[int], window: int) -> None:
    shards = len(sizes)
    order = shuffled(sizes, block_size=3, window=window)
    windows = 1 if shards < 2 * window else -(-shards // window)
    shard_of = np.repeat(np.arange(shards), sizes)
    ends = [0, *order._window_ends.tolist()]
    assert len(ends) == windows + 1
    seen: list[set[int]] = [set(shard_of[order.locate(a, b)].tolist()) for a, b in itertools.pairwise(ends) if b > a]
    assert all(len(shards_seen) <= (shards if windows == 1 else window) for shards_seen in seen)
    assert sum(len(shards_seen) for shards_seen in seen) == sum(size > 0 for size in sizes)  # no shard in two windows


def test_another_seed_or_epoch_is_another_order() -> None:
    sizes = [10] * 10
    orders = [shuffled(sizes, seed=seed, epoch=epoch).locate(0, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@given(st.integers(1, 500), st.integers(1, 100), st.integers(0, 1000))
def test_spans_cover_an_epoch_and_differ_by_one_at_most(count: int, lanes: int, epoch: int) -> None:
    spans = sorted(lane_span(count, lane, lanes, epoch) for lane in range(lanes))
    assert spans[0][0] == 0 and spans[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    lengths = {stop - start for start, stop in spans}
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 60))
def test_batches_are_dealt_to_the_lanes_in_turn(count: int, rows: int, lanes: int) -> None:
    spans = [batches_span(count, rows, place, lanes) for place in range(lanes)]
    assert spans[0][0] == 0 and spans[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    batches = -(-count // rows)
    dealt = [len(range(place, batches, lanes)) for place in range(lanes)]
    assert [-(-(end - begin) // rows) for begin, end in spans] == dealt
    short = [place for place, (begin, end) in enumerate(spans) if (end - begin) % rows]
    assert short == ([(batches - 1) % lanes] if count % rows else [])


def test_every_lane_of_a_tiny_dataset_gets_samples_within_as_many_epochs_as_lanes() -> None:
    for lane in range(40):
        spans = [lane_span(3, lane, 40, epoch) for epoch in range(7, 47)]
        assert any(begin < end for begin, end in spans)


@pytest.mark.parametrize("window", [1, 32, None])
def test_first_samples_of_epochs_are_spread_over_the_dataset(window: int | None) -> None:
    counts = Counter(
        int(shuffled([10] * 100, epoch=epoch, window=window).locate(0, 1)[0]) // 100 for epoch in range(400)
    )
    assert len(counts) == 10
    assert max(counts.values()) < 80  # 40 expected


@few_examples(10)
@given(st.integers(2**16 * 8, 2**24))
def test_windows_too_large_for_a_table_have_every_sample_once(count: int) -> None:
    order = shuffled([count], block_size=1)
    positions = order.locate(count // 2, count // 2 + 5000)
    assert len(np.unique(positions)) == 5000
    assert positions.max() < count


ROW = 1000  # bytes


@few_examples(30)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    lanes=st.integers(1, 7),
    block=st.integers(1, 9),
    window=st.integers(1, 4),
)
def test_lanes_get_each_sample_once_for_any_chunk_size(sizes: list[int], lanes: int, block: int, window: int) -> None:
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


def test_each_row_group_is_decoded_about_once_per_epoch_with_a_small_cache(tmp_path: Path) -> None:
    write(tmp_path)
    fits = 8 * 64 * (ROW + 30)  # of 24 row groups
    for how in ({}, {"subset": 0.5}):
        ids, decoded = read_in_turns(tmp_path, lanes=12, buffer=3, cache_bytes=fits, **how)
        assert len(set(ids)) == len(ids) and len(ids) == pytest.approx(1536 * how.get("subset", 1), rel=0.01)
        assert decoded <= 1.2, how
    _, decoded = read_in_turns(tmp_path, lanes=12, buffer=3, cache_bytes=fits, block_size=8)
    assert decoded > 5  # in the order of tars, as many groups are open as there are lanes


def test_too_large_row_groups_warn_with_a_better_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path)
    with caplog.at_level(logging.WARNING):
        custom.ParquetReader(tmp_path, sp.Lane(), cache_bytes=4 * 70 * (ROW + 30))
    assert "only 1 are mixed at a time. Write groups of at most 1.3 kB" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        custom.ParquetReader(tmp_path, sp.Lane())
    assert not caplog.text
