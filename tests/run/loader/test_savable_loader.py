"""The order of the batches, for any number of ranks and workers, and what iterating means."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import subprocess
import sys
import weakref
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.savable_loader import run_of
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.testing import _take_step
from tests.support.processes import descendants, wait_until_gone
from tests.support.streams import next_hashes
from tests.support.toy_faults import number_pipeline, packed_numbers
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])))


@pytest.fixture
def finite(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=1)


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 12, "num_workers": num_workers, **settings})


# Order.


def test_slot_q_is_batch_q_over_l_of_lane_q_mod_l(make_shards: Any) -> None:
    """Unshuffled, lane i of 3 reads pairs i, i+3, i+6, … of file order; each batch is one pair."""
    pipeline = partial(number_pipeline, str(make_shards([12, 12])))
    found = [batch for _, batch in zip(range(6), loader(pipeline, lanes=3), strict=False)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    stages = [pipeline(sp.Lane(lane, 3, 3)) for lane in range(3)]
    by_hand = [[next(stage) for stage in stages] for _ in range(2)]
    assert [batch for a_round in by_hand for batch in a_round] == found


def test_slots_are_the_batches_of_the_lanes_in_turn_with_every_stage(pipeline: Any) -> None:
    stages = [pipeline(sp.Lane(lane, 12, 3)) for lane in range(12)]
    by_hand = [next_hashes(stage, 2) for stage in stages]
    with loader(pipeline) as own:
        assert next_hashes(own, 24) == [by_hand[q % 12][q // 12] for q in range(24)]


@pytest.mark.parametrize("world_size", [3, 12])
def test_slot_q_belongs_to_rank_q_mod_w(pipeline: Any, world_size: int) -> None:
    expected = next_hashes(loader(pipeline), 24)
    for rank in range(world_size):
        own = loader(pipeline, ranks=(rank, world_size))
        assert next_hashes(own, 24 // world_size) == expected[rank::world_size]


@pytest.mark.parametrize(("start", "world_size"), [(1, 2), (5, 4), (7, 3), (12, 4), (14, 4)])
def test_step_takes_consecutive_slots_of_all_ranks_from_any_start(pipeline: Any, start: int, world_size: int) -> None:
    first = loader(pipeline)
    next_hashes(first, start)
    state = first.state_dict()
    expected = next_hashes(first, 3 * world_size)

    ranks = [loader(pipeline, ranks=(rank, world_size)) for rank in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    for step in range(3):
        slots = range(start + step * world_size, start + (step + 1) * world_size)
        given = [next_hashes(rank, 1)[0] for rank in ranks]
        assert [given[slot % world_size] for slot in slots] == [expected[slot - start] for slot in slots]
        assert {rank.state_dict()["slot"] for rank in ranks} == {slots.stop}


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 7), (2, 1), (3, 2)])
def test_workers_and_prefetch_change_no_batch(pipeline: Any, num_workers: int, prefetch: int) -> None:
    with loader(pipeline, num_workers, workers=sp.Workers(prefetch=prefetch)) as own:
        assert next_hashes(own, 30) == next_hashes(loader(pipeline), 30)


def test_workers_change_no_batch_and_not_the_end_of_a_finite_run(finite: Any) -> None:
    with loader(finite, 2) as own:
        alone = loader(finite)
        for _ in range(3):
            assert next_hashes(own, 1000) == next_hashes(alone, 1000)


def test_more_workers_than_lanes_change_no_batch(pipeline: Any) -> None:
    with loader(pipeline, 3, lanes=2) as own:
        assert next_hashes(own, 10) == next_hashes(loader(pipeline, lanes=2), 10)
    with loader(pipeline, 3, ranks=(5, 6)) as own:
        assert next_hashes(own, 4) == next_hashes(loader(pipeline), 24)[5::6]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_change_no_batch(pipeline: Any, method: str) -> None:
    if method == "forkserver":  # whose workers need not import torch
        pipeline = partial(packed_numbers, *pipeline.args)
    with loader(pipeline, 1, workers=sp.Workers(start_method=method)) as own:
        assert next_hashes(own, 14) == next_hashes(loader(pipeline), 14)


PRINT_BATCHES = """
import sys
from functools import partial
import savable_pipeline as sp
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline

print(hash("a"))
for num_workers in (0, 2):
    with sp.SavableLoader(partial(toy_pipeline, sys.argv[1]), seed=3, lanes=12, num_workers=num_workers) as loader:
        print(*next_hashes(loader, 16))
        print(loader.state_dict()["fingerprint"].hex())
"""


def test_a_fresh_interpreter_with_another_hash_seed_agrees_with_and_without_workers(
    pipeline: Any, make_shards: Any
) -> None:
    command = [sys.executable, "-c", PRINT_BATCHES, str(make_shards([40, 7, 60]))]
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = {**os.environ, "PYTHONHASHSEED": seed}
    other, *printed = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert int(other) != hash("a")
    own = loader(pipeline)
    batches = " ".join(next_hashes(own, 16))
    assert printed == [batches, own.state_dict()["fingerprint"].hex()] * 2


# Its names and arguments.


def test_loader_has_the_documented_public_names(pipeline: Any) -> None:
    iterating, looking = ["epoch", "skip", "close"], ["stats", "trace", "sources"]
    saving = ["state_dict", "load_state_dict", "save_state", "restore_state", "global_state_dict"]
    names = {name for name in [*dir(sp.SavableLoader), *dir(loader(pipeline))] if name[0] != "_"}
    acknowledging = ["receipts", "acknowledge", "drop", "requeue", "in_flight", "reconfigure"]
    assert names == {*iterating, *saving, *looking, *acknowledging}


def test_arguments_of_the_loader_are_its_settings() -> None:
    """Written out in its signature for those who read it there; every name, type and default but one is the same."""
    arguments = [*inspect.signature(sp.SavableLoader).parameters.values()]
    *settings, last = inspect.signature(LoaderSettings).parameters.values()
    assert str(last) == "has_default_lanes: 'bool' = False"
    assert [str(one).partition(" = Workers")[0] for one in arguments] == [
        str(one).partition(" = <fac")[0].replace("lanes: 'int' = 96", "lanes: 'int | None' = None") for one in settings
    ]
    assert len(arguments) == 13
    assert [one.kind for one in arguments] == [one.kind for one in settings]


# Iterating.


def test_iterating_after_break_continues(pipeline: Any) -> None:
    with loader(pipeline, 2) as own:
        assert next_hashes(own, 3) + next_hashes(own, 1) + next_hashes(own, 6) == next_hashes(loader(pipeline), 10)


def test_iterating_after_close_continues(pipeline: Any) -> None:
    for num_workers in (0, 2):
        own = loader(pipeline, num_workers)
        found = next_hashes(own, 5)
        own.close()
        own.close()
        found += next_hashes(own, 9)
        own.close()
        assert found == next_hashes(loader(pipeline), 14)


def test_epoch_ends_and_the_next_iter_starts_another(finite: Any) -> None:
    own = loader(finite)
    assert own.epoch == 0
    first = next_hashes(own, 1000)
    assert own.epoch == 1
    with pytest.raises(StopIteration):
        next(own)  # a finished iterator stays finished
    second = next_hashes(own, 1000)
    assert own.epoch == 2
    assert first and second and set(first).isdisjoint(second)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_finite_run_ends_at_a_whole_round(finite: Any, num_workers: int) -> None:
    lengths = [len(next_hashes(finite(sp.Lane(lane, 12, 3)), 1000)) for lane in range(12)]
    with loader(finite, num_workers) as own:
        assert len(next_hashes(own, 1000)) == 12 * min(lengths) > 0


def test_finite_run_whose_lanes_end_together_yields_every_sample(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([12, 12])), epochs=1)
    for num_workers in (0, 2):
        with loader(pipeline, num_workers, lanes=3) as own:
            assert sorted(number for batch in own for number in batch) == list(range(24))


def test_an_epoch_without_a_full_round_is_an_error_each_time(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([3])), epochs=1)
    for num_workers in (0, 2):
        with loader(pipeline, num_workers, lanes=12) as own:
            for _ in range(2):
                with pytest.raises(
                    sp.SavableError, match=r"epoch 0 has no batch.*Use fewer than .*\n  the data has 3 samples"
                ):
                    next(own)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pipeline_may_end_with_any_stage(make_shards: Any, num_workers: int) -> None:
    shards = str(make_shards([40, 7, 60]))
    for epochs in (None, 1):
        pipeline = partial(reader_and_buffer, shards, epochs)
        with loader(pipeline, num_workers) as own:
            samples = [sample.json()["id"] for _, sample in zip(range(500), own, strict=False)]
        assert len(samples) == (500 if epochs is None else 107 // 12 * 12)
        assert len(set(samples)) == (107 if epochs is None else len(samples))


def reader_and_buffer(shards: str, epochs: int | None, lane: sp.Lane) -> custom.Stage:
    return sp.ShuffleBuffer(sp.TarShardReader(shards, lane, epochs=epochs), size=5)


def test_unused_slots_at_the_end_of_an_epoch_warn(finite: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A run of one rank that goes on with four at slot 3: the last step would need 11 … 14, but the epoch has 12."""
    first = loader(finite)
    next_hashes(first, 3)
    ranks = [Run(LoaderSettings(finite, seed=3, lanes=12, ranks=(rank, 4))) for rank in range(4)]
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING):
        steps = [_take_step(ranks) for _ in range(3)]
    assert [[entry[:2] for entry in step] for step in steps] == [
        [(0, slot) for slot in range(3, 7)],
        [(0, slot) for slot in range(7, 11)],
        [(1, slot) for slot in range(4)],
    ]
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.startswith("the last")] == [
        "the last 1 slots of epoch 0 are dropped, because 4 ranks resumed at a slot that they do not divide"
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_released_loader_leaves_no_reference_cycle(pipeline: Any, num_workers: int) -> None:
    """So that its shards and workers are closed at once, not when the garbage collector comes by."""
    gc.disable()
    try:
        before = descendants(os.getpid())
        own = loader(pipeline, num_workers)
        next_hashes(own, 3)
        own.state_dict()
        own.stats()
        own.__iter__()
        references = weakref.ref(own), weakref.ref(run_of(own))
        its_own = set(descendants(os.getpid())).difference(before)
        del own
        assert [reference() for reference in references] == [None, None]
        wait_until_gone(list(its_own))
    finally:
        gc.enable()
