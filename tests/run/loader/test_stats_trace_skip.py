"""What one can ask a loader: what happened, what a batch was made of, what it looks like; and passing over slots."""

from __future__ import annotations

import logging
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader import stats
from tests.support.streams import next_hashes
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import numbers, toy_pipeline


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])))


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 12, "num_workers": num_workers, **settings})


# Statistics.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stats_count_yielded_and_dropped_samples(make_shards: Any, num_workers: int) -> None:
    """Of 100 samples every seventh is skipped (15) and every fifth other makes three items: 17 x 3 + 68."""
    pipeline = partial(toy_pipeline, str(make_shards([100])), epochs=1, pack=None, size=1, buffer=None)
    with loader(pipeline, num_workers, lanes=1) as own:
        given = len(list(own))
        found = own.stats()
        assert given == found["batches"] == 68 + 3 * 17
        assert found["Encode/items"] == given and found["Encode/skipped/every 7th"] == 15
        assert found["restarts"] == found["moved_lanes"] == 0
        spent = {name for name in found if name.startswith("seconds/")}
        assert spent == {"seconds/TarShardReader", "seconds/Encode", "seconds/Batcher", "seconds/read"}
        assert found["wait_s"] > 0 and all(found[name] > 0 for name in spent)


def test_every_statistic_is_a_plain_number(pipeline: Any) -> None:
    with loader(pipeline, 2) as own:
        next_hashes(own, 5)
        for name, number in own.stats().items():
            assert isinstance(name, str) and type(number) in (int, float)


def test_rates_are_those_since_the_last_call(pipeline: Any) -> None:
    own = loader(pipeline)
    next_hashes(own, 5)
    assert own.stats()["batches_per_s"] > 0
    assert own.stats()["batches_per_s"] == 0


def test_batch_rebuilt_after_an_error_is_counted_once(make_shards: Any) -> None:
    class Sometimes(NumberEncoder):
        failed = False

        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            number = super().encode(sample, rng)
            if number == 5 and not self.failed:
                self.failed = True
                raise ValueError("once")
            return number

    own = loader(partial(number_pipeline, str(make_shards([40])), encoder=Sometimes()), lanes=1)
    with pytest.raises(sp.EncodeError):
        next_hashes(own, 10)
    next_hashes(own, 10 - int(own.stats()["batches"]))
    assert own.stats()["Encode/items"] == 20


def test_starving_trainer_gets_a_warning_with_the_slowest_stage(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats, "_WINDOW_S", 0.0)
    own = loader(pipeline)
    next_hashes(own, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "training waited for data" in record.message and "Encode" in record.message


# What a batch was made of.


@pytest.mark.parametrize(("num_workers", "pack"), [(0, None), (2, "best_fit")])
def test_trace_names_every_sample_of_the_last_batch_in_order(pipeline: Any, num_workers: int, pack: str | None) -> None:
    with loader(partial(pipeline, pack=pack), num_workers) as own:
        with pytest.raises(ValueError, match="none has been returned"):
            own.trace()
        for slot, batch in zip(range(30), own, strict=False):
            found = own.trace()
            assert (found.slot, found.lane) == (slot, slot % 12)
            assert [int(sample.key[1:]) for sample in found.samples] == numbers(batch)
            assert [len(row) for row in found.rows] == [len(item["items"]) if pack else 1 for item in batch["items"]]
            first = found.samples[0]
            assert first.ref.index == int(first.key[1:]) and first.shard.endswith(".tar")


# The data path.


def test_a_loader_is_shown_as_the_tree_of_its_stages(pipeline: Any) -> None:
    own = loader(pipeline, ranks=(1, 2))
    next_hashes(own, 2)
    assert repr(own).splitlines() == [
        "SavableLoader(seed=3, lanes=12, num_workers=0): rank 1 of 2, at slot 4 of epoch 0",
        "└─ Batcher(size=2, drop_last=False)",
        "   └─ OnlinePacker(max_length=20, policy='best_fit', open_packs=3)",
        "      └─ Encode(encoder='ToyEncoder', encoder.skip=7, encoder.fan_out=5)",
        "         └─ ShuffleBuffer(size=10)",
        "            └─ TarShardReader(shuffle=True, block_size=8, window=32, shards=3 of them)",
    ]


# Passing over slots.


@pytest.mark.parametrize(("num_workers", "epochs"), [(0, 1), (2, None)])
def test_skipped_slots_do_not_change_the_rest(pipeline: Any, num_workers: int, epochs: int | None) -> None:
    pipeline = partial(pipeline, epochs=epochs, size=1)
    expected = next_hashes(loader(pipeline), 60)
    with loader(pipeline, num_workers) as own:
        found = next_hashes(own, 5)
        own.skip(0)
        own.skip(9)
        found += [""] * 9 + next_hashes(own, 3)
        state = own.state_dict()
        own.skip(2)
        found += [""] * 2 + next_hashes(own, 20)
    assert [now or then for now, then in zip(found, expected, strict=False)] == expected[: len(found)]
    again = loader(pipeline)
    again.load_state_dict(state)
    assert next_hashes(again, 10) == expected[17:27]


def test_skipping_builds_no_batch(make_shards: Any) -> None:
    class Counting(NumberEncoder):
        batches = 0

        def batch(self, items: list[Any], rng: sp.Rng) -> Any:
            self.batches += 1
            return items

    encoder = Counting()
    own = loader(partial(number_pipeline, str(make_shards([80])), encoder=encoder))
    own.skip(24)
    next_hashes(own, 1)
    assert encoder.batches == 1


class Logged(sp.TaskEncoder):
    """Writes down from when to when it was at work on a sample."""

    global_rng = False

    def __init__(self, path: str) -> None:
        self.path = path

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        begun = time.monotonic()
        time.sleep(0.01)
        with Path(self.path).open("a") as file:
            file.write(f"{begun} {time.monotonic()}\n")
        return 1


def test_workers_skip_in_parallel(make_shards: Any, tmp_path: Path) -> None:
    encoder = Logged(str(tmp_path / "log"))
    with loader(partial(number_pipeline, str(make_shards([80])), encoder=encoder), 2) as own:
        own.skip(24)
        assert own.state_dict()["slot"] == 24
    spans = sorted(tuple(map(float, line.split())) for line in (tmp_path / "log").read_text().splitlines())
    assert any(later[0] < earlier[1] for earlier, later in pairwise(spans))


def test_skipping_stops_at_the_end_of_its_epoch(pipeline: Any) -> None:
    pipeline = partial(pipeline, epochs=1)
    alone = loader(pipeline)
    first, second, third = next_hashes(alone, 1000), next_hashes(alone, 1000), next_hashes(alone, 1000)
    own = loader(pipeline)
    own.skip(12_000)
    assert (own.epoch, own.state_dict()["epoch"], own.state_dict()["slot"]) == (0, 1, 0)
    own.skip(3)
    assert (own.epoch, own.state_dict()["epoch"], own.state_dict()["slot"]) == (0, 1, 3)
    assert next(own, None) is None, "the epoch is over"
    assert next_hashes(own, 1000) == second[3:]
    own.load_state_dict(loader(pipeline).state_dict())
    own.skip(12_000)
    own.skip(12_000)
    assert next_hashes(own, 1000) == third
    own.load_state_dict(loader(pipeline).state_dict())
    found = 0
    for _ in own:  # the running loop ends, too
        found += 1
        own.skip(12_000)
    assert found == 1 < len(first) and next_hashes(own, 1000) == second
    own.load_state_dict(loader(pipeline).state_dict())
    next_hashes(own, 1000)
    own.skip(2)
    assert own.epoch == 1 and next_hashes(own, 1000) == second[2:]


@pytest.mark.parametrize(
    ("num_workers", "how"), [(0, {"epochs": 1}), (2, {"epochs": None, "epoch_slots": 24})], ids=["pass", "slots"]
)
def test_after_an_epochs_last_batch_a_running_loader_skips_what_a_resumed_one_does(
    pipeline: Any, num_workers: int, how: dict[str, Any]
) -> None:
    epoch_slots = how.get("epoch_slots")
    make = partial(loader, partial(pipeline, epochs=how["epochs"]), num_workers, epoch_slots=epoch_slots)
    with make() as own:
        following = [next_hashes(own, 1000) for _ in range(2)][1]
    with make() as own, make() as resumed:
        for slot, _ in enumerate(own):
            if own.state_dict()["epoch"] or slot + 1 == epoch_slots:
                resumed.load_state_dict(own.state_dict())
                before, lagged = own.trace(), own.state_dict(lag=2)
                for each in (own, resumed):
                    each.skip(5)
                assert own.state_dict() == resumed.state_dict()
                assert own.epoch == 0 and own.trace() == before and own.state_dict(lag=2) == lagged
        assert slot + 1 == len(following) >= 12
        assert next_hashes(own, 1000) == next_hashes(resumed, 1000) == following[5:]


@pytest.mark.parametrize("how", [{}, {"ranks": (1, 3)}])
def test_skipped_slots_are_not_yielded_batches(pipeline: Any, how: dict[str, tuple[int, int]]) -> None:
    own, step = loader(pipeline, **how), how.get("ranks", (0, 1))[1]
    states, traces = [], []
    for skipped in (0, 14 * step, 3 * step, 0, 2 * step):
        states.append(own.state_dict())
        next_hashes(own, 1)
        traces.append(own.trace())
        own.skip(skipped)
        assert [own.trace(lag=lag) for lag in range(len(traces))] == traces[::-1]
        assert [own.state_dict(lag=lag) for lag in range(1, len(states) + 1)] == states[::-1]


def test_only_whole_steps_are_skipped(pipeline: Any) -> None:
    own = loader(pipeline, ranks=(0, 4))
    for slots in (-4, 3, 6):
        with pytest.raises(ValueError, match=f"a multiple of the 4 ranks, not {slots}"):
            own.skip(slots)
    own.skip(8)
    assert own.state_dict()["slot"] == 8


def test_more_workers_than_lanes_warns(pipeline: Any, caplog: pytest.LogCaptureFixture) -> None:
    loader(pipeline, 3, lanes=4, ranks=(0, 2)).close()
    assert "3 workers for the 2 lanes of this rank" in caplog.text and "lanes=6 or more" in caplog.text
