"""What is given comes again until it is acknowledged, in the same bytes, on any ranks; and never after."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from in_flight import history
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.errors import CheckpointMismatchError, SavableError, StateError
from savable_pipeline.run.loader import acknowledgements, rows_in_flight, run, savable_loader
from savable_pipeline.run.loader.acknowledgements import Acknowledgements
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.run import Run, voted_step
from savable_pipeline.run.state.flights import EPOCH_SHIFT, flight_columns, packed_flights
from savable_pipeline.run.state.lane_state import pack_state, unpack_state
from savable_pipeline.run.state.summary import read_checkpoint, summarize
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import steps_of_ranks
from savable_pipeline.tools.cli.main import app
from savable_pipeline.trainers.device import OnDevice
from savable_pipeline.trainers.elastic import complete_state
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.support.own_stages import Numbered
from tests.support.processes import wait_for_deaths, workers
from tests.support.signals import SignalAt, count_until_interrupt
from tests.support.streams import through_a_file
from tests.support.toy_faults import number_pipeline
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

LANES = 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support.shards import write_numbered_shards

    folder = tmp_path_factory.mktemp("acknowledged") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    return str(folder)


def loader(pipeline: Any, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": LANES, "acknowledge": True, **settings})


def run_of(own: sp.SavableLoader) -> Run:
    return own.__savable_run__()


def table_of(own: sp.SavableLoader) -> Acknowledgements:
    rows = run_of(own).observer(RowsInFlight)
    assert rows is not None
    return rows.table


def bare(batch: Any) -> str:
    """The bytes of a batch without its receipts."""
    return digest({name: part for name, part in batch.items() if name != "receipts"})


def listed(batch: Any) -> list[list[int]]:
    return [list(map(int, each)) for each in batch["receipts"]]


# What comes again.


@pytest.mark.parametrize(
    ("how", "tail"),
    [
        ({"pack": None}, "stop"),
        ({"pack": None, "size": 3, "drop_last": True}, "pad"),
        ({"pack": "items"}, "stop"),
        ({"pack": "buckets"}, "pad"),
        ({"pack": "groups"}, "stop"),
        ({"candidates": 3}, "pad"),
        ({"pack": "best_fit"}, "stop"),
        ({"pack": "first_fit"}, "pad"),
        ({"pack": "first_fit_decreasing"}, "pad"),
        ({"pack": "sequential"}, "stop"),
        ({"pack": "function"}, "pad"),
        ({"pack": "sequential", "candidates": 3, "too_long": "split", "max_length": 6}, "stop"),
        ({"blend": "items"}, "stop"),
        ({"blend": "nested", "by": "tokens"}, "pad"),
        ({"tells": True, "candidates": 4}, "stop"),
        ({"pack": None, "own": ("samples", "items")}, "pad"),
    ],
    ids=str,
)
def test_batch_is_repeated_byte_for_byte(shards: str, how: dict[str, Any], tail: str) -> None:
    """In epoch 1, whose keys are others than those of epoch 0."""
    pipeline = partial(toy_pipeline, shards, epochs=1, **how)
    with loader(pipeline, tail=tail) as own, loader(pipeline, tail=tail) as resumed:
        for batch in own:
            own.acknowledge(batch["receipts"])
        given = [batch for _, batch in zip(range(6), own, strict=False)]
        own.requeue(given[1]["receipts"])
        assert bare(next(own)) == bare(given[1])
        own.acknowledge(given[2]["receipts"])
        resumed.load_state_dict(through_a_file(own.state_dict()))
        came = [batch for _, batch in zip(range(5), resumed, strict=False)]
        assert list(map(bare, came)) == [bare(batch) for batch in given if batch is not given[2]]
        assert list(map(listed, came)) == [listed(batch) for batch in given if batch is not given[2]]
        assert all(first[0] >> EPOCH_SHIFT == 1 for batch in came for first in listed(batch)[:1])
        assert bare(next(resumed)) == bare(next(own))


def test_samples_and_batches_that_are_not_dicts_are_repeated(shards: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.TarShardReader(shards, lane), size=3)

    with loader(pipeline) as own, loader(pipeline) as resumed:
        assert own.receipts().shape == (0, 2)
        given = [[sample.key for sample in next(own)] for _ in range(3)]
        assert own.receipts().tolist() == [[2, row] for row in range(3)]
        own.acknowledge(own.receipts()[1])
        resumed.load_state_dict(own.state_dict())
        assert [[sample.key for sample in next(resumed)] for _ in range(3)] == given
        assert resumed.receipts().tolist() == [[2, 0], [-1, -1], [2, 2]]


@pytest.mark.parametrize("tail", ["stop", "pad"])
def test_row_excluded_on_load_is_closed_and_its_batch_is_shorter(shards: str, tmp_path: Path, tail: str) -> None:
    exclude = tmp_path / "exclude.txt"
    exclude.write_text("")

    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(shards, lane, exclude=str(exclude))
        return sp.Batcher(sp.Encode(samples, Ids()), size=3)

    filled = tail == "pad"
    with loader(pipeline, sample_ids=True, tail=tail) as own:
        first, second, third = next(own), next(own), next(own)
        state = own.state_dict()
        keys = [own.trace(lag=2).samples[1].key, *(sample.key for sample in own.trace(lag=1).samples)]
    exclude.write_text("".join(f"{key}\n" for key in keys))
    with loader(pipeline, sample_ids=True, tail=tail) as resumed:
        resumed.load_state_dict(state, allow=["exclude"])
        assert resumed.stats()["acknowledged/dropped/can no longer be made"] == 4
        again = next(resumed)
        assert listed(again) == [[0, 0], [0, 2], [-1, -1]][: 2 + filled]
        assert again["id"].tolist()[:2] == first["id"].tolist()[::2]
        assert again["sample_ids"].tolist()[:2] == first["sample_ids"].tolist()[::2]
        assert not filled or again["valid"].tolist() == [True, True, False]
        assert [sample.ref.index for sample in resumed.trace().samples] == again["sample_ids"][:2, 1].tolist()
        assert bare(next(resumed)) == bare(third) != bare(second)  # of which nothing is left
        assert {batch: len(rows) for batch, rows in _open(resumed.state_dict()).items()} == {0: 2, 2: 3}


class Pairs(custom.ItemStage):
    """Two items as a tuple, as a user writes it: `fetch` knows of no lost ones."""

    ref: Any = ()

    def __next__(self) -> Any:
        first, one = next(self.source), self.source.ref
        second, other = next(self.source), self.source.ref
        self.ref = (7, one, other)
        return first, second

    def fetch(self, ref: Any) -> Any:
        return tuple(self.source.fetch(part) for part in ref[1:])


def test_rows_of_a_merging_stage_lose_excluded_samples_and_empty_ones_have_no_receipt(
    shards: str, tmp_path: Path
) -> None:
    (exclude := tmp_path / "exclude.txt").write_text("")

    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(shards, lane, exclude=str(exclude)), Texts())
        return sp.Batcher(Pairs(items), size=3)

    with loader(pipeline) as own:
        rows = next(own)
        state = own.state_dict()
    exclude.write_text("".join(f"s{number:06d}\n" for number in (*rows[0], rows[1][0])))
    with loader(pipeline) as resumed:
        resumed.load_state_dict(state, allow=["exclude"])
        assert next(resumed) == [rows[1][1:], rows[2]] and resumed.receipts().tolist() == [[0, 1], [0, 2]]
        assert resumed.in_flight().rows == 2


class Texts(sp.TaskEncoder):
    """The number of a sample; batches are lists."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def length(self, item: Any) -> int:
        return 1

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return tuple(items)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def test_row_that_fails_on_repetition_shortens_its_batch_and_an_empty_batch_has_no_receipts(
    shards: str,
) -> None:
    broken: set[int] = set()

    class Failing(Texts):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            if super().encode(sample, rng) in broken:
                raise OSError("gone")
            return super().encode(sample, rng)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Failing(), on_error="skip"), size=2)

    with loader(pipeline) as own:
        first, second = next(own), next(own)
        broken |= {first[0], *second}
        own.requeue([(0, 0), (0, 1), (1, 0)])
        assert next(own) == first[1:] and own.receipts().tolist() == [[0, 1]]
        assert not {*second} & {*next(own)} and own.receipts().tolist() == [[-1, -1], [-1, -1]]
        assert own.in_flight() == (1, (0, 1))  # and the row that was not asked for is known to be lost, too
        assert own.stats()["acknowledged/dropped/can no longer be made"] == 3


@pytest.mark.parametrize("size", [2, 5])
def test_padded_batch_is_repeated_at_its_old_size(shards: str, size: int) -> None:
    """Of 107 samples on 4 lanes, the last batches of the epoch have 2 of 3 rows, or 0."""
    pipeline = partial(counted_pipeline, shards)
    with loader(partial(pipeline, size=3), tail="pad") as own:
        given = list(own)
        for batch in given[:-6]:
            own.acknowledge(batch["receipts"])
        state = own.state_dict()
    assert any(0 < batch["valid"].sum() < 3 for batch in given[-6:])
    with loader(partial(pipeline, size=size), tail="pad") as resumed:
        resumed.load_state_dict(state, allow=["batch_size"])
        expected = [batch for batch in given[-6:] if batch["valid"].any()]
        assert resumed.in_flight().rows == sum(int(batch["valid"].sum()) for batch in expected)
        for batch in expected:
            again = next(resumed)
            assert bare(again) == bare(batch) and listed(again) == listed(batch)


def test_pack_in_flight_has_the_items_of_remaining_sources(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 1000)):
        with sp.ShardWriter(tmp_path / name) as writer:
            for number in range(first, first + 40):
                writer.write({"__key__": f"{number:06d}", "json": {"id": number}})

    def pipeline(sources: str, lane: sp.Lane) -> custom.Stage:
        readers = {name: sp.TarShardReader(tmp_path / name, lane) for name in sources}
        items = sp.Encode(sp.Blend(readers, weights=dict.fromkeys(sources, 1)), Texts())
        return sp.Batcher(sp.OnlinePacker(items, max_length=4, open_packs=2), size=2)

    with loader(partial(pipeline, "ab")) as own:
        given = [next(own) for _ in range(3)]
        state = own.state_dict()
    kept = [[tuple(number for number in row if number < 1000) for row in rows] for rows in given]
    assert any(0 < len(row) < 4 for rows in kept for row in rows)
    with loader(partial(pipeline, "a")) as resumed:
        resumed.load_state_dict(state, allow=["sources", "weights"])
        assert [next(resumed) for _ in given] == [[row for row in rows if row] for rows in kept]


class Ids(sp.TaskEncoder):
    """The number of a sample, in a dict."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"]}


def _open(state: dict[str, Any]) -> dict[int, list[int]]:
    """The open rows of each batch in a state."""
    from savable_pipeline.run.state.flights import read_flights

    flights = [flight for of_lane in read_flights(state).values() for flight in of_lane]
    return {each.batch: [row for row in range(each.rows) if each.open_rows >> row & 1] for each in flights}


def test_requeued_rows_are_yielded_alone_before_prefetched_batches(shards: str) -> None:
    with loader(partial(counted_pipeline, shards, size=3)) as own:
        given = [next(own) for _ in range(4)]
        own.requeue([(1, 2), (0, 0), (1, 0), (99, 0)])
        assert own.in_flight() == (12, (0, 0))
        taken = [next(own) for _ in range(3)]
        assert list(map(bare, taken[:2])) == [bare(given[1]), bare(given[0])]
        assert list(map(listed, taken[:2])) == [[[1, 0], [-1, -1], [1, 2]], [[0, 0], [-1, -1], [-1, -1]]]
        assert listed(taken[2])[0] == [4, 0] and own.in_flight() == (15, (0, 0))
        assert own.trace().slot == 4 and own.stats()["acknowledged/again"] == 3
        assert own.stats()["acknowledged/repeated"] == 3 and own.stats()["acknowledged/unknown"] == 1
        assert own.stats()["samples"] == 15 and own.stats()["batches"] == 7


def test_rows_requested_again_are_yielded_before_the_epochs_end_and_len_counts_slots(shards: str) -> None:
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        taken = []
        for batch in own:
            taken.append(listed(batch)[0])
            if len(taken) == len(own):
                own.requeue(batch["receipts"])
        assert len(taken) == len(own) + 1 and taken[-1] == taken[-2]
        own.requeue([taken[0]])
        with pytest.raises(StopIteration):  # it has ended: the next pass gives it
            next(own)
        later = [listed(batch)[0] for _, batch in zip(range(2), own, strict=False)]
        assert later == [taken[0], [1 << EPOCH_SHIFT, 0]] and own.epoch == 1


def test_open_rows_stay_in_the_state_and_are_first_in_the_next_epoch(shards: str) -> None:
    pipeline = partial(counted_pipeline, shards, size=4)
    with loader(pipeline) as own, loader(pipeline) as resumed:
        given = list(own)
        for batch in given[:-2]:
            own.acknowledge(batch["receipts"])
        resumed.load_state_dict(own.state_dict())
        taken = list(resumed)
        assert list(map(bare, taken[:2])) == list(map(bare, given[-2:])) and len(taken) == len(resumed) + 2


def test_trainer_killed_after_the_last_batch_of_an_epoch_learns_how_many_rows_repeat(
    shards: str,
) -> None:
    pipeline = partial(counted_pipeline, shards, size=4)
    with loader(pipeline) as own, loader(pipeline) as resumed:
        given = list(own)
        for batch in given[:-3]:
            own.acknowledge(batch["receipts"])
        own.acknowledge(given[-1]["receipts"][:1])
        rows = [*listed(given[-3]), *listed(given[-2]), *listed(given[-1])[1:]]
        resumed.load_state_dict(own.state_dict())
        assert resumed.in_flight() == (len(rows), tuple(rows[0])) == (own.in_flight().rows, tuple(rows[0]))
        assert resumed.stats()["in_flight"] == len(rows)
        came = []
        while len(came) < len(rows):
            came += [row for row in listed(next(resumed)) if row[0] >= 0]
        assert came == rows and resumed.in_flight().rows == len(rows)


# Acknowledging.


@pytest.mark.parametrize(
    "form",
    [
        lambda each: each,
        lambda each: each.numpy(),
        lambda each: each.tolist(),
        lambda each: each.numpy().astype(np.int32),
        lambda each: each[torch.tensor([3, 1, 0, 2])],
        lambda each: torch.cat([each, torch.full((2, 2), -1)]),
    ],
)
def test_receipts_are_accepted_in_any_form_and_order(shards: str, form: Any) -> None:
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        first = next(own)["receipts"]
        next(own)
        own.acknowledge(form(first))
        assert own.in_flight() == (4, (1, 0)) and own.stats()["acknowledged/done"] == 4
        assert "acknowledged/unknown" not in own.stats()


def minus_one(rows: Any, where: int) -> Any:
    rows[where] = -1
    return rows


@pytest.mark.parametrize("write", [lambda each: minus_one(each, 1), lambda each: minus_one(each.numpy(), 1)])
def test_receipts_changed_by_the_trainer_are_used_as_changed(shards: str, write: Any) -> None:
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        batch = next(own)
        write(batch["receipts"])
        own.acknowledge(batch["receipts"])
        assert _open(own.state_dict()) == {0: [1]} and own.in_flight() == (1, (0, 1))
        before = own.state_dict()
        receipts = next(own)["receipts"]
        receipts[:] = -1
        own.load_state_dict(before)
        assert [listed(next(own))[row] for row in range(2)] == [[-1, -1], [1, 1]]


def test_state_command_shows_rows_in_flight(shards: str, tmp_path: Path) -> None:
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        torch.save({"data": own.state_dict()}, tmp_path / "none.pt")
        given = [next(own)["receipts"] for _ in range(6)]
        own.acknowledge(torch.cat([given[0], given[1][:3], given[3]]))
        torch.save({"data": own.state_dict()}, tmp_path / "some.pt")
    assert "in flight" not in CliRunner().invoke(app, ["state", str(tmp_path / "none.pt")]).output
    told = " ".join(CliRunner().invoke(app, ["state", str(tmp_path / "some.pt")], terminal_width=250).output.split())
    settings = summarize(read_checkpoint(tmp_path / "some.pt")).settings
    assert settings["in flight"] == "13 rows, the oldest row 3 of slot 1, epoch 0; lane 0: 4, lane 1: 5, lane 2: 4"
    assert "in flight" in told and "13 rows" in told


def test_receipts_acknowledged_twice_are_unknown_and_those_of_another_loader_count(shards: str) -> None:
    pipeline = partial(counted_pipeline, shards, size=4)
    with loader(pipeline) as own, loader(pipeline) as other:
        first, second = next(own)["receipts"], next(other)["receipts"]
        own.acknowledge(first)
        own.acknowledge(first)
        assert own.stats()["acknowledged/unknown"] == 4
        own.requeue(next(own)["receipts"])
        other.acknowledge(second)
        assert other.in_flight() == (0, None) and _open(own.state_dict()) == {1: [0, 1, 2, 3]}
        own.acknowledge(own.receipts())
        assert not table_of(own)._by_tensor and not table_of(other)._by_tensor


def test_receipts_after_a_load_belong_to_the_batch_yielded_after_it(shards: str) -> None:
    """And so is the trace: batches are counted anew."""
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        own.acknowledge(next(own)["receipts"])
        state = own.state_dict()
        own.requeue(next(own)["receipts"])
        next(own)
        own.load_state_dict(state)
        assert own.receipts().shape == (0, 2)
        for slot in (1, 2, 3):
            assert listed(next(own))[0] == [slot, 0] == own.receipts()[0].tolist() and own.trace().slot == slot


def test_receipts_changed_by_another_process_are_used_as_changed(shards: str) -> None:
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        receipts = next(own)["receipts"]
        receipts.share_memory_()  # as torch.multiprocessing does with what it sends
        receipts[2] = -1
        own.acknowledge(receipts)
        assert _open(own.state_dict()) == {0: [2]}


def test_unknown_receipts_are_counted_and_others_rejected(shards: str) -> None:
    with loader(partial(counted_pipeline, shards, size=4)) as own:
        first = next(own)["receipts"]
        own.drop(first[:1], "stale")
        own.drop(first[:2], "stale")
        own.drop([(0, 3), (0, 3)], "odd")
        own.acknowledge([(0, 4), (1, 0), (0, 1 << 40), (0, -7), (5 << EPOCH_SHIFT, 0)])
        own.acknowledge([])
        numbers = own.stats()
        assert (numbers["acknowledged/dropped/stale"], numbers["acknowledged/dropped/odd"]) == (2, 1)
        assert numbers["acknowledged/unknown"] == 2 + 5 and numbers["in_flight"] == 1
        for wrong in ([0.5, 1.0], [[1, 2, 3]], "x", [["a", "b"]]):
            with pytest.raises(ValueError, match="receipts must be integers"):
                own.acknowledge(wrong)
        own.acknowledge(first)
        assert own.in_flight() == (0, None) and not _open(own.state_dict())


def test_max_in_flight_waits_for_another_thread_and_raises_after_the_timeout(shards: str) -> None:
    made: list[int] = []

    class Outcomes(Ids):
        def batch(self, items: list[Any], rng: sp.Rng) -> Any:
            made.append(items[0]["id"])
            return super().batch(items, rng)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Outcomes()), size=4)

    with loader(pipeline, acknowledge=sp.Acknowledge(8), workers=sp.Workers(timeout=0.05)) as own:
        first = next(own)
        next(own)
        with pytest.raises(SavableError, match=r"max_in_flight=8.*Call acknowledge or drop") as caught:
            next(own)
        assert "8 rows are in flight and the next batch has 4" in str(caught.value)
        own.acknowledge(first["receipts"][:3])
        with pytest.raises(SavableError, match="max_in_flight"):
            next(own)
        own.acknowledge(first["receipts"][3:])
        assert listed(next(own))[0] == [2, 0] and len(made) == 3  # the batch that had been ready
    with loader(
        partial(counted_pipeline, shards, size=4), acknowledge=sp.Acknowledge(2), workers=sp.Workers(timeout=60)
    ) as own:
        first = next(own)  # more than that: it is alone in flight
        timer = threading.Timer(0.05, own.acknowledge, [first["receipts"]])
        timer.start()
        assert listed(next(own))[0] == [1, 0]
        timer.join()


def test_threads_acknowledge_while_others_save_and_iterate(shards: str) -> None:
    """Each state names just the rows that are open at its slot: none twice, none lost."""
    pipeline = partial(counted_pipeline, shards, size=2)
    with loader(pipeline) as own:
        given: queue.Queue[Any] = queue.Queue()
        states: list[dict[str, Any]] = []
        over = threading.Event()

        def train() -> None:
            while (batch := given.get()) is not None:
                own.acknowledge(batch["receipts"])

        def save() -> None:
            while not over.wait(0.001):
                states.append(own.state_dict())

        threads = [threading.Thread(target=each) for each in (train, train, save)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            given.put(next(own))
        given.put(None)
        given.put(None)
        for thread in threads[:2]:
            thread.join()
        over.set()
        threads[2].join()
        assert own.stats()["acknowledged/done"] == 80 and own.in_flight() == (0, None)
    for state in states:
        assert all(batch < state["slot"] for batch in _open(state))
        loader(pipeline).load_state_dict(state)


def test_lagged_state_has_the_rows_yielded_before_it(shards: str) -> None:
    with loader(partial(counted_pipeline, shards)) as own:
        for _ in range(5):
            next(own)
        before = run_of(own).position
        for _ in range(5):
            next(own)
        assert len(_open(own.state_dict())) == 10
        assert list(_open(run_of(own).state_dict(position=before))) == [0, 4, 1, 2, 3]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tail", ["stop", "pad"])
def test_batches_in_columns_are_saved_like_batches_read_again(shards: str, seed: int, tail: str) -> None:
    draw, given, in_columns = random.Random(seed), [], 0
    with loader(partial(counted_pipeline, shards, size=2), lanes=2, tail=tail) as own:
        lanes = table_of(own)._lanes.values()
        for _ in range(60):
            for _ in range(draw.randrange(8)):
                batch = next(own, None)
                if batch is None:
                    iter(own)
                else:
                    given += batch["receipts"].tolist()
            for _ in range(draw.choice([0] * 12 + [1, max(0, len(given) - 1), len(given)])):
                receipts = [given.pop(draw.randrange(len(given)))] if given else []
                (own.requeue if draw.random() < 0.1 else own.acknowledge)(receipts)
            saved = own.state_dict()
            for number, lane in enumerate(lanes):
                in_columns += lane.in_columns(2)[:1] == [lane.columns] != [None]
                read_again = flight_columns(list(lane.flights.values()), 2)
                assert saved[f"flight_0000{number}"] == packed_flights(number, read_again, lane.packed[0])
    assert in_columns > 3 or tail == "pad", in_columns


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_ctrl_c_at_any_bytecode_leaves_the_state_consistent_with_the_batch(shards: str, every: int) -> None:
    pipeline = partial(number_pipeline, shards)
    modules = [rows_in_flight, acknowledgements, run, savable_loader]
    for how in ("new", "again", "loaded"):
        for at in range(1, 100_000, every):
            own = loader(pipeline, lanes=2)
            assert count_until_interrupt(own, 2) == 2
            before = {0: [0, 1], 1: [0, 1]}
            if how == "again":
                own.requeue([(1, 0)])
            if how == "loaded":
                state = own.state_dict()
                own = loader(pipeline, lanes=2)
                own.load_state_dict(state)
            interrupt = SignalAt(at, modules)
            count = count_until_interrupt(own, 1, interrupt)
            if interrupt.left > 0:
                break
            assert own.receipts().tolist()[:1] == [[{"new": 2, "again": 1, "loaded": 0}[how], 0]] or not count
            assert _open(own.state_dict()) == before | ({2: [0, 1]} if count and how == "new" else {}), (how, at)
            next(own)
            own.acknowledge(own.receipts())
            expected = {"new": 2 + count, "again": 1 + count, "loaded": count}[how]
            assert expected not in _open(own.state_dict()) or how == "again", (how, at, count)
            assert own.in_flight().rows == {"new": 4 + 2 * count, "again": 3 + count, "loaded": 2}[how], (
                how,
                at,
            )
            own.close()
        assert at > 100


@pytest.mark.parametrize("kind", ["acknowledge", "requeue"])
def test_ctrl_c_at_any_bytecode_of_an_acknowledgement_leaves_a_valid_state(shards: str, kind: str) -> None:
    modules = [acknowledgements]
    pipeline = partial(number_pipeline, shards)
    with loader(pipeline, lanes=2) as own, loader(pipeline, lanes=2) as other:
        for at in range(1, 10_000):
            next(own)
            receipts = own.receipts()
            place = int(receipts[0, 0])
            receipts = receipts if at % 2 else receipts.tolist()
            interrupt = SignalAt(at // 2 + 1, modules)
            count_until_interrupt(saying(partial(getattr(own, kind), receipts)), 1, interrupt)
            if interrupt.left > 0:
                break
            rows, is_open = own.in_flight().rows, place in _open(own.state_dict())
            assert (rows, is_open) in ((2, True), (0, False)), at
            other.load_state_dict(own.state_dict())
            own.acknowledge(receipts)
            assert own.in_flight() == (0, None) and not _open(own.state_dict())
            while coming(own):
                next(own)
        assert at > 100


def coming(own: sp.SavableLoader) -> bool:
    return bool(table_of(own).waiting)


def saying(say: Any) -> Any:
    yield say()


# Ranks.


def ranks_of(pipeline: Any, world_size: int, **settings: Any) -> list[sp.SavableLoader]:
    return [loader(pipeline, ranks=(rank, world_size), **settings) for rank in range(world_size)]


def taken(ranks: Sequence[sp.SavableLoader]) -> list[Any]:
    """The batches of the next step."""
    return voted_step([iter(run_of(rank)) for rank in ranks])


@pytest.mark.parametrize("tail", ["stop", "pad"])
@pytest.mark.parametrize("whole", [True, False])
def test_each_rank_repeats_equally_many_rows_by_state_or_vote(shards: str, tail: str, whole: bool) -> None:
    pipeline = partial(toy_pipeline, shards, epochs=1)
    before = ranks_of(pipeline, 2, tail=tail)
    steps = [taken(before) for _ in range(4)]
    before[1].acknowledge(steps[0][1]["receipts"])
    before[1].acknowledge(steps[2][1]["receipts"])
    states = [rank.state_dict() for rank in before]
    after = ranks_of(pipeline, 2, tail=tail)
    for rank, state in zip(after, states, strict=True):
        rank.load_state_dict(sp.merge_states(states) if whole else state)
    first = list(zip(*(taken(after) for _ in range(4)), strict=True))
    assert list(map(bare, first[0])) == [bare(step[0]) for step in steps]
    assert [bare(batch) for batch in first[1][:2]] == [bare(step[1]) for step in (steps[1], steps[3])]
    for filler in first[1][2:]:
        assert not filler["valid"].any() and filler["items"] and (filler["receipts"] == -1).all()
    assert list(map(bare, taken(after))) == list(map(bare, taken(before)))
    assert not any(batch.get("valid", torch.ones(1)).logical_not().all() for batch in taken(after))


def test_acknowledgements_of_another_ranks_rows_apply_when_states_are_merged(shards: str) -> None:
    ranks = ranks_of(partial(counted_pipeline, shards), 4)
    steps = [taken(ranks) for _ in range(2)]
    ranks[3].acknowledge(steps[0][1]["receipts"])
    ranks[3].acknowledge(steps[0][1]["receipts"])  # known
    ranks[2].drop(steps[1][1]["receipts"][:1], "stale")
    ranks[2].requeue(steps[1][3]["receipts"])  # of another rank: not known here
    assert ranks[3].stats()["acknowledged/unknown"] == ranks[2].stats()["acknowledged/unknown"] == 2
    states = [rank.state_dict() for rank in ranks]
    assert [[name for name in state if "acks" in name] for state in states] == [[], [], ["acks_00002"], ["acks_00003"]]
    merged = sp.merge_states(states)
    assert not any("acks" in name for name in merged)
    assert _open(merged) == {batch: [0, 1] for batch in range(8) if batch not in (1, 5)} | {5: [1]}
    apart = sp.merge_states([sp.merge_states(states[2:]), sp.merge_states(states[:2])])
    assert _open(apart) == _open(merged)
    assert ranks[1].in_flight().rows == 4
    for rank, state in zip(ranks, states, strict=True):
        assert run_of(rank).joined(state, states) == merged
    assert ranks[1].in_flight() == (1, (5, 1)) and "acks_00003" not in ranks[3].state_dict()
    assert "acks_00003" in sp.merge_states([states[0], states[3]])  # whose lanes are not there yet
    ranks[1].load_state_dict(states[1])  # its own file alone: it gives such rows again
    assert [listed(next(ranks[1]))[0][0] for _ in range(2)] == [1, 5]


def test_merge_closes_rows_of_one_batch_that_two_ranks_acknowledge(shards: str) -> None:
    ranks = ranks_of(partial(counted_pipeline, shards), 2)
    own, _ = taken(ranks)
    ranks[0].acknowledge(own["receipts"][:1])
    ranks[1].acknowledge(own["receipts"][1:])
    assert _open(sp.merge_states([rank.state_dict() for rank in ranks])) == {1: [0, 1]}


def test_receipt_of_a_rank_ahead_is_saved_once_the_state_passes_it(shards: str) -> None:
    ranks = ranks_of(partial(counted_pipeline, shards), 2)
    ahead = next(ranks[1])
    ranks[0].acknowledge(ahead["receipts"])
    assert "acks_00000" not in ranks[0].state_dict()
    next(ranks[0])
    assert _open(sp.merge_states([rank.state_dict() for rank in ranks])) == {0: [0, 1]}


def test_rows_requested_again_are_yielded_once_even_if_done_in_the_meantime(shards: str) -> None:
    ranks = ranks_of(partial(counted_pipeline, shards), 2)
    step = taken(ranks)
    for rank, batch in zip(ranks, step, strict=True):
        rank.requeue(batch["receipts"])
    ranks[0].acknowledge(step[0]["receipts"])
    assert [listed(batch) for batch in taken(ranks)] == [[[-1, -1]] * 2, [[1, 0], [1, 1]]]
    assert [listed(batch)[0] for batch in taken(ranks)] == [[2, 0], [3, 0]]


def test_padding_batch_does_not_change_rows_in_flight(shards: str) -> None:
    before = ranks_of(partial(counted_pipeline, shards), 2)
    steps = [taken(before), taken(before)]
    before[1].acknowledge(steps[1][1]["receipts"])
    after = ranks_of(partial(counted_pipeline, shards), 2)
    for rank in after:
        rank.load_state_dict(sp.merge_states([each.state_dict() for each in before]))
    for _ in range(2):
        taken(after)
    assert [listed(batch)[0] for batch in taken(after)] == [[4, 0], [5, 0]]
    assert sorted(_open(sp.merge_states([rank.state_dict() for rank in after]))) == [0, 1, 2, 4, 5]


class OwnValid(sp.TaskEncoder):
    """Its batches have a key "valid" of their own, which counts tokens."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"id": torch.tensor(items), "valid": torch.tensor([sum(items)])}


@pytest.mark.parametrize("own_key", [True, False])
def test_key_valid_of_the_encoder_stays(shards: str, own_key: bool) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), OwnValid() if own_key else Ids()), size=3)

    with loader(pipeline, sample_ids=True) as own:
        first = next(own)
        own.requeue(first["receipts"])
        assert digest(next(own)) == digest(first) and first["sample_ids"].shape == (3, 3)
    before = ranks_of(pipeline, 2, sample_ids=True)
    taken(before)
    before[1].acknowledge(before[1].receipts())
    after = ranks_of(pipeline, 2, sample_ids=True)
    for rank in after:
        rank.load_state_dict(sp.merge_states([each.state_dict() for each in before]))
    filler = taken(after)[1]
    assert listed(filler) == [[-1, -1]] * 3
    assert filler["valid"].tolist() == ([int(filler["id"].sum())] if own_key else [False] * 3)


def test_ranks_without_communication_load_their_own_files(shards: str) -> None:
    pipeline = partial(toy_pipeline, shards)
    ranks = ranks_of(pipeline, 2)
    given = [[next(rank) for rank in ranks] for _ in range(2)]
    ranks[1].acknowledge(given[0][1]["receipts"])
    resumed = ranks_of(pipeline, 2)
    for rank, own in zip(resumed, ranks, strict=True):
        rank.load_state_dict(own.state_dict())
    assert [listed(next(resumed[1]))[0][0] for _ in range(2)] == [3, 5]
    assert [listed(next(resumed[0]))[0][0] for _ in range(3)] == [0, 2, 4]


def test_steps_of_ranks_yields_the_same_in_one_process(shards: str) -> None:
    ranks = ranks_of(partial(counted_pipeline, shards), 2)
    step = next(steps_of_ranks(ranks))
    state = sp.merge_states([rank.state_dict() for rank in ranks])
    alone = loader(partial(counted_pipeline, shards))
    alone.load_state_dict(state)
    assert [bare(next(alone)), bare(next(alone))] == list(map(bare, step))


@pytest.mark.parametrize(
    "seed", [*range(120), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(120, 600))]
)
def test_random_history_equals_a_plain_list_model(shards: str, seed: int) -> None:
    """Kill, other ranks, rows done, dropped and asked for again; `tools/soak/soak.py in_flight` runs 10,000."""
    history(seed, shards)


# What it costs, and what is refused.


def test_state_has_at_most_20_bytes_per_sample_in_flight(shards: str) -> None:
    for size, batches in ((1, 200), (8, 25)):
        with loader(partial(counted_pipeline, shards, size=size), epoch_slots=None) as own:
            empty = len(pickled(own.state_dict()))
            for _ in range(batches):
                next(iter(own))
            state = own.state_dict()
            flights = sum(len(value) for name, value in state.items() if name.startswith("flight_"))
            assert empty and flights <= 20 * size * batches
            for batch in list(_open(state)):
                own.acknowledge([(batch, row) for row in range(size)])
            assert not _open(own.state_dict())
            assert [name for name in own.state_dict() if name.startswith("flight_")] == [
                name.replace("lane", "flight") for name in state if name.startswith("lane_")
            ]


def test_distributed_checkpoint_restores_rows_in_flight_in_a_new_loader(shards: str, tmp_path: Path) -> None:
    """It loads the keys of the state that it is handed, which is a fresh loader's, and says nothing of others."""
    with loader(partial(counted_pipeline, shards)) as own, loader(partial(counted_pipeline, shards)) as fresh:
        for _ in range(6):
            next(own)
        own.acknowledge([(0, 0), (3, 0), (3, 1)])
        checkpoint.save({"data": own.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        loaded = {"data": fresh.state_dict()}
        checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        fresh.load_state_dict(loaded["data"])
        assert _open(fresh.state_dict()) == _open(own.state_dict()) != {}


def test_a_distributed_checkpoint_with_rows_in_flight_is_rejected_by_a_loader_that_would_lose_them(
    shards: str, tmp_path: Path
) -> None:
    with (
        loader(partial(counted_pipeline, shards)) as own,
        loader(partial(counted_pipeline, shards), acknowledge=False) as plain,
    ):
        for _ in range(6):
            next(own)
        checkpoint.save({"data": own.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        told = "Load all entries of the checkpoint"
        with pytest.raises(sp.CheckpointMismatchError, match=told):
            checkpoint.load({"data": plain}, checkpoint_id=tmp_path, no_dist=True)


def pickled(state: dict[str, Any]) -> bytes:
    return b"".join(value for value in state.values() if isinstance(value, bytes))


def test_without_acknowledge_nothing_changes_and_its_methods_are_rejected(shards: str) -> None:
    with (
        loader(partial(counted_pipeline, shards)) as own,
        loader(partial(counted_pipeline, shards), acknowledge=False) as plain,
    ):
        for _ in range(3):
            batch, other = next(own), next(plain)
            own.acknowledge(batch["receipts"])
            assert bare(batch) == bare(other) and "receipts" not in other
        lanes = {name: value for name, value in own.state_dict().items() if "flight_" not in name}
        assert lanes == {**plain.state_dict(), "acknowledge": 1} and not _open(own.state_dict())
        plain.load_state_dict(own.state_dict())
        assert not [name for name in plain.stats() if "acknowledged" in name or "in_flight" in name]
        for ask in (plain.receipts, plain.in_flight, partial(plain.acknowledge, []), partial(plain.requeue, [])):
            with pytest.raises(ValueError, match="need acknowledge=True"):
                ask()
        next(own)
        with pytest.raises(CheckpointMismatchError, match="acknowledge=True"):
            plain.load_state_dict(own.state_dict())
        own.load_state_dict(plain.state_dict())
        assert own.in_flight() == (0, None) and not _open(own.state_dict())


def test_settings_incompatible_with_acknowledge_are_rejected_in_one_sentence(shards: str) -> None:
    pipeline = partial(counted_pipeline, shards)
    for wrong, message in [
        ({"on_iter": "restart"}, "acknowledge= does not apply"),
        ({"acknowledge": sp.Acknowledge(3), "on_iter": "restart"}, "acknowledge= does not apply"),
    ]:
        with pytest.raises(ValueError, match=message):
            loader(pipeline, **wrong)
    with loader(pipeline) as own:
        next(own)
        with pytest.raises(ValueError, match="lag must be 0"):
            own.state_dict(lag=1)
        makers = [TrainerLoader, lambda each: OnDevice(each, "cpu"), lambda each: complete_state(each, [], {})]
        for make in makers:
            with pytest.raises(ValueError, match="Remove it for a trainer"):
                make(own)
        with pytest.raises(CheckpointMismatchError, match="acknowledge=True"):
            sp.StatefulDataset(pipeline, seed=3, lanes=LANES).load_state_dict(
                {"shares": 1, "iteration": 0, **own.state_dict()}
            )


class Odd(Numbered):
    """Its refs do not show rows."""

    row: Any = 5

    def __next__(self) -> Any:
        batch = super().__next__()
        self.ref = (self.ref[0], self.ref[1], self.row)
        return batch


class Unsaved(Odd):
    """No state can hold its refs."""

    row = (np.int64(5), 0, 0)


def test_stage_without_row_refs_and_encoder_with_the_key_are_named(shards: str) -> None:
    with (
        loader(lambda lane: Odd(toy_pipeline(shards, lane, pack=None))) as own,
        pytest.raises(SavableError, match="the ref of Odd"),
    ):
        next(own)
    with (
        loader(lambda lane: Unsaved(toy_pipeline(shards, lane, pack=None))) as own,
        pytest.raises(TypeError, match="int64"),
    ):
        next(own)

    class Taken(Ids):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            return {"receipts": 1}

    with (
        loader(lambda lane: sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Taken()), size=2)) as own,
        pytest.raises(sp.EncodeError, match="'receipts'"),
    ):
        next(own)


# Forged states.


def forged(state: dict[str, Any], change: Any) -> dict[str, Any]:
    import msgspec

    class Plain(msgspec.Struct):
        lane: Any
        saved_with: Any
        epochs: Any

    name = next(name for name in state if name.startswith("flight_"))
    plain = unpack_state(state[name], Plain, name)
    change(plain)
    return {**state, name: pack_state(plain)}


def change(field: str, value: Any, at: int | None = None) -> Any:
    def changed(plain: Any) -> None:
        if field == "lane":
            plain.lane = value
            return
        column = ["epoch", "rounds", "refs", "done"].index(field)
        if at is None:
            plain.epochs[0][column] = value
        else:
            plain.epochs[0][column][at] = value

    return changed


@pytest.mark.parametrize(
    "wrong",
    [
        change("lane", 1),
        change("epoch", 5),
        change("epoch", -1),
        change("rounds", [2**40]),
        change("rounds", [7]),
        change("rounds", [0, 0]),
        change("rounds", []),
        *(change("refs", ref, at=0) for ref in ([], 5, [1], [0, [1, 0, 0], 5], [0, ["a"]], {"a": 1}, None, [[[]]])),
        change("done", [b"\x03"]),
        change("done", [b"\x04"]),
        change("done", [b"", b""]),
        change("done", [5]),
    ],
)
def test_a_forged_batch_in_flight_is_a_state_error_and_changes_nothing(shards: str, wrong: Any) -> None:
    with loader(partial(counted_pipeline, shards)) as own:
        next(own)
        state = own.state_dict()
        with pytest.raises(StateError):
            own.load_state_dict(forged(state, wrong))
        damaged = {**state, "flight_00000": state["flight_00000"][:-1] + b"\x7f"}
        with pytest.raises(StateError):
            own.load_state_dict(damaged)
        assert own.in_flight().rows == 2 and listed(next(own))[0] == [1, 0]


@pytest.mark.parametrize("ref", [[0, [10**9, 0, 0]], [0, [1, 0, 7]], [0, [[1, 0, 0], 0]], [0, [1]]])
def test_forged_ref_of_no_sample_is_a_savable_error_when_its_batch_is_built(shards: str, ref: Any) -> None:
    with loader(partial(toy_pipeline, shards, pack=None)) as own:
        next(own)
        own.load_state_dict(forged(own.state_dict(), change("refs", ref, at=0)))
        with pytest.raises(SavableError):
            next(own)


@pytest.mark.parametrize("merged", [True, False])
def test_a_state_without_an_entry_of_rows_in_flight_or_with_that_of_another_save_is_rejected(
    shards: str, merged: bool
) -> None:
    def saved() -> dict[str, Any]:
        states = [rank.state_dict() for rank in ranks]
        return sp.merge_states(states) if merged else states[1]

    pipeline = partial(counted_pipeline, shards)
    ranks = ranks_of(pipeline, 2)
    for _ in range(4):
        taken(ranks)
    ranks[0].acknowledge([(1, 0)])  # of the other rank
    old = saved()
    for _ in range(4):
        taken(ranks)
    state = saved()
    fresh = loader(pipeline, **({} if merged else {"ranks": (1, 2)}))
    plain = loader(pipeline, acknowledge=False, **({} if merged else {"ranks": (1, 2)}))
    for name in (name for name in state if name.startswith("flight_")):
        without = {key: value for key, value in state.items() if key != name}
        for refusing, wrong, says in [
            (fresh, without, f"but no {name}"),
            (plain, without, f"but no {name}"),
            (fresh, {**state, name: old[name]}, f"{name} was saved with another"),
            (plain, {**state, name: old[name]}, f"{name} was saved with another"),
        ]:
            with pytest.raises(CheckpointMismatchError, match=says):
                refusing.load_state_dict(wrong)
            if merged:
                with pytest.raises(CheckpointMismatchError, match=says):
                    sp.merge_states([{**wrong, "acks_00000": ranks[0].state_dict()["acks_00000"]}])
    fresh.load_state_dict(state)
    assert fresh.in_flight().rows == 16 * (1 + merged) - (merged and 1)
    fresh.load_state_dict(old)  # a whole one
    bare_of_flights = {name: value for name, value in state.items() if name.startswith(("lane_", "acks_"))}
    with pytest.raises(StateError, match="acknowledge"):
        fresh.load_state_dict({**state, **bare_of_flights, "acknowledge": "yes"})
    assert fresh.in_flight().rows == 8 * (1 + merged) - (merged and 1)


def test_plain_state_in_an_acknowledging_loader_has_nothing_in_flight(shards: str) -> None:
    pipeline = partial(counted_pipeline, shards)
    with loader(pipeline, acknowledge=False) as plain, loader(pipeline) as own:
        next(plain)
        own.load_state_dict(plain.state_dict())
        assert own.in_flight() == (0, None) and bare(next(own)) == bare(next(plain))


# Workers.


def test_workers_rebuild_batches_and_a_killed_one_is_replaced(shards: str) -> None:
    pipeline = partial(toy_pipeline, shards)
    with loader(pipeline) as own, loader(pipeline, num_workers=2) as resumed:
        given = [next(own) for _ in range(9)]
        resumed.load_state_dict(own.state_dict())
        came = [next(resumed)]
        os.kill(workers(resumed)[0], signal.SIGKILL)
        came += [next(resumed) for _ in range(8)]
        assert list(map(bare, came)) == list(map(bare, given))
        assert bare(next(resumed)) == bare(next(own))
        resumed.requeue(given[4]["receipts"])
        assert bare(next(resumed)) == bare(given[4])
        assert through_a_file(resumed.state_dict()).keys() == own.state_dict().keys()
        wait_for_deaths(resumed, 1)
        assert set(run_of(resumed).backend._lanes) <= set(range(LANES))  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_histories_on_real_ranks_with_killed_workers_equal_a_list_model(shards: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.forked_ranks", "tests.support.in_flight_ranks", "2,1,4,2"]
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), str(root / "tools/soak")])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([*command, shards, str(tmp_path), "50"], check=True, cwd=root, env=environment, timeout=1800)
