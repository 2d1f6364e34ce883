"""Readers of data that grew: each epoch is read as if there were no shards but its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.core.run_facts import Growth, RunFacts
from savable_pipeline.stages.readers.lane_shares import GrowingSamples
from tests.support.draws import few_examples
from tests.support.toy_dataset import NumberDataset, dataset_key, drain, take_refs

SIZES = st.lists(st.integers(0, 30), min_size=3, max_size=9).filter(lambda sizes: sizes[0] > 0)
HOW = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 8),
        "window": st.one_of(st.none(), st.integers(1, 4)),
        "subset": st.sampled_from([None, (0.0, 0.8)]),
    }
)


@st.composite
def grown(draw: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of shards, and the epochs at which some of them joined."""
    sizes = draw(SIZES)
    counts = draw(st.lists(st.integers(1, len(sizes)), min_size=2, max_size=3, unique=True))
    epochs = draw(st.lists(st.integers(1, 6), min_size=len(counts) - 1, max_size=len(counts) - 1, unique=True))
    return sizes, list(zip([0, *sorted(epochs)], sorted(counts), strict=True))


def reader(sizes: list[int], lane: int, lanes: int, growth: Growth | None = None, epoch: int = 0, **how: Any) -> Any:
    shared = {dataset_key("numbers"): NumberDataset(sizes)}
    return sp.TarShardReader(
        "numbers",
        sp.Lane(lane, lanes, 7, epoch=epoch, facts=RunFacts(growth or {}), worker=WorkerContext(shared=shared)),
        **how,
    )


def shards_of(epoch: int, pairs: list[tuple[int, int]]) -> int:
    return next(shards for begin, shards in reversed(pairs) if begin <= epoch)


def selects(sizes: list[int], how: dict[str, Any]) -> bool:
    """Return whether a subset leaves anything of the shards."""
    data = NumberDataset(sizes)
    chosen = None
    try:
        chosen = data.select(None, how["subset"])
    except sp.ShardError:
        return False
    return chosen is None or chosen.count > 0


@few_examples(12)
@given(grown(), st.integers(1, 7), HOW, st.data())
def test_growing_endless_run_reads_each_epoch_like_a_run_on_its_shards(
    data: tuple[list[int], list[tuple[int, int]]], lanes: int, how: dict[str, Any], draws: st.DataObject
) -> None:
    sizes, pairs = data
    if not selects(sizes[: pairs[0][1]], how):
        return
    lane = draws.draw(st.integers(0, lanes - 1))
    found = take_refs(reader(sizes, lane, lanes, {"": pairs}, **how), 250)
    expected: list[tuple[int, int]] = []
    for epoch in range(found[-1][1] + 1):
        alone = reader(sizes[: shards_of(epoch, pairs)], lane, lanes, **how)
        alone._move_to(epoch, 0)
        expected += [ref for ref in take_refs(alone, alone._span_length) if ref[1] == epoch]
    assert found == expected[:250]
    stage = reader(sizes, lane, lanes, {"": pairs}, **how)
    stage.take(cut := draws.draw(st.integers(0, 200)))
    by_hand = reader(sizes, lane, lanes, {"": pairs}, **how)
    by_hand.restore_state(stage.save_state())
    assert take_refs(by_hand, 50) == found[cut : cut + 50]


@few_examples(20)
@given(grown(), st.integers(1, 7), HOW, st.integers(0, 6), st.integers(1, 5))
def test_growing_finite_epoch_equals_one_on_its_shards(
    data: tuple[list[int], list[tuple[int, int]]], lanes: int, how: dict[str, Any], epoch: int, rows: int
) -> None:
    sizes, pairs = data
    if not selects(sizes[: pairs[0][1]], how):
        return
    for lane in range(lanes):
        here = reader(sizes, lane, lanes, {"": pairs}, epoch=epoch, epochs=1, **how)
        alone = reader(sizes[: shards_of(epoch, pairs)], lane, lanes, epoch=epoch, epochs=1, **how)
        at_first = reader(sizes, 0, lanes, {"": pairs}, epochs=1, **how)  # counts beforehand, for any pass
        for each in (here, alone, at_first):
            each.set_batch_size(rows, aligned=True)
        found = drain(here)
        assert found == drain(alone)
        assert at_first.count_of(lane, epoch) == len(found)


@few_examples(20)
@given(grown(), st.integers(1, 7), HOW, st.booleans(), st.integers(1, 3), st.integers(0, 2))
def test_lanes_of_several_epochs_read_each_sample_once_per_epoch(
    data: tuple[list[int], list[tuple[int, int]]],
    lanes: int,
    how: dict[str, Any],
    shuffle: bool,
    epochs: int,
    number: int,
) -> None:
    sizes, pairs = data
    how = {**how, "shuffle": shuffle, "subset": None, "epochs": epochs}
    made = [reader(sizes, lane, lanes, {"": pairs}, epoch=number, **how) for lane in range(lanes)]
    given = [drain(each, 5) for each in made]
    expected = [
        (index, epoch)
        for epoch in range(number * epochs, (number + 1) * epochs)
        for index in range(sum(sizes[: shards_of(epoch, pairs)]))
    ]
    assert sorted(ref for refs in given for ref in refs) == sorted(expected)
    assert [made[0].count_of(lane, number) for lane in range(lanes)] == [len(refs) for refs in given]


def test_file_order_continues_at_the_lane_after_the_previous_epochs_last() -> None:
    """Blocks 0 to 3 of epoch 0, of one shard, then 0 to 5 of epoch 1, of two: dealt to three lanes in turn."""
    how = {"shuffle": False, "block_size": 2, "epochs": 2}
    given = [drain(reader([8, 4], lane, 3, {"": [(0, 1), (1, 2)]}, **how)) for lane in range(3)]
    blocks = [[index // 2 for index, _ in refs[::2]] for refs in given]
    assert blocks == [[0, 3, 2, 5], [1, 0, 3], [2, 1, 4]]


@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 2), (3, 3)],  # nothing is said of epoch 0
        [(0, 2), (0, 3)],
        [(0, 3), (2, 2)],
        [(0, 0), (2, 3)],
        [(0, 2), (2, 4)],  # there are only three shards
        [(0, 1), (2, 3)],  # the first shard is empty
    ],
)
def test_pairs_that_do_not_fit_the_dataset_are_rejected(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(
        sp.CheckpointMismatchError, match=r"numbers: (the state is of another dataset|the first 1 shards)"
    ):
        GrowingSamples(NumberDataset([0, 5, 5]), None, pairs)  # type: ignore[arg-type]


def test_fraction_of_an_epoch_applies_to_its_shards() -> None:
    """Half an epoch: of one shard of 12 samples 6, later of two shards 10."""
    growth = {"": [(0, 1), (2, 2)]}
    for epoch, count in [(0, 6), (1, 6), (2, 10)]:
        made = [reader([12, 8], lane, 2, growth, epoch=epoch, epochs=0.5) for lane in range(2)]
        assert sum(len(drain(each)) for each in made) == count
        assert sum(made[0].count_of(lane, epoch) for lane in range(2)) == count


def test_lane_counts_the_samples_it_has_started() -> None:
    stage = reader([8], 0, 2, epochs=2)
    assert stage.last_epoch_read == -1
    stage.take(1)
    assert stage.last_epoch_read == 0
    stage.take(3)  # the rest of its share
    assert stage.last_epoch_read == 0
    stage.take(1)
    assert stage.last_epoch_read == 1
    assert reader([8], 0, 2, epoch=3, epochs=2).last_epoch_read == 5
    assert (
        reader([1], 0, 2, epochs=1).last_epoch_read == 0
    )  # a lane without a share of the epoch, which might give it one
