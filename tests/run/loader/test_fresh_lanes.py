"""An epoch that goes on with batches of another size, before each lane has given its first batch of it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.state_dict import lane_name
from savable_pipeline.testing import _take_step
from savable_pipeline.trainers.elastic import complete_state
from tests.conftest import write_numbered_shards
from tests.support.draws import scaled_examples
from tests.support.streams import through_a_file

Given = list[tuple[int, int]]  # epoch and number of each sample that counts


class Numbers(sp.TaskEncoder):
    """A batch is a dict of the numbers and the epochs of its samples."""

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"], "epoch": sample.epoch}


def pipeline(
    shards: str, lane: sp.Lane, *, size: int, buffer: int | None = None, blend: bool = False, **how: Any
) -> custom.Stage:
    def reader(folder: str) -> custom.SampleStage:
        return sp.TarShardReader(folder, lane, **how)

    samples = sp.Blend({"a": reader(shards)}, weights={"a": 1}) if blend else reader(shards)
    mixed = samples if buffer is None else sp.ShuffleBuffer(samples, size=buffer)
    return sp.Batcher(sp.Encode(mixed, Numbers()), size=size)


def loader(make: Any, **more: Any) -> sp.SavableLoader:
    return sp.SavableLoader(make, **{"seed": 3, **more})


def counted(batch: dict[str, Any]) -> Given:
    pairs = zip(batch["epoch"].tolist(), batch["id"].tolist(), strict=True)
    valid = batch["valid"].tolist() if "valid" in batch else [True] * len(batch["id"])
    return [pair for pair, counts in zip(pairs, valid, strict=True) if counts]


def run_of_sizes(make: Any, sizes: list[int], steps: list[int], **more: Any) -> Given:
    """What a run gives in its first pass, with so many batches of each size, and as many as there are of the last."""
    found: Given = []
    state: dict[str, Any] | None = None
    for leg, size in enumerate(sizes):
        with loader(partial(make, size=size), **more) as own:
            if state is not None:
                own.load_state_dict(state, allow={"batch_size"})
            for batch in islice(own, steps[leg] if leg + 1 < len(sizes) else None):
                found += counted(batch)
            state = through_a_file(own.state_dict())
        if state["epoch"]:
            break
    return found


ORDERS: list[dict[str, Any]] = [
    {"shuffle": True},
    {"shuffle": True, "block_size": 1},
    {"shuffle": True, "buffer": 7},
    {"shuffle": True, "blend": True},
    {"shuffle": False},
    {"shuffle": False, "block_size": 3},
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples in shards of several sizes, by their number."""
    folder = tmp_path_factory.mktemp("numbered")
    for samples in (1, 17, 60, 96):
        write_numbered_shards(
            folder / str(samples), [samples // 2, samples - samples // 2 - samples // 5, samples // 5]
        )
    return folder


@given(
    samples=st.sampled_from([17, 60, 96]),
    order=st.sampled_from(ORDERS),
    epochs=st.sampled_from([1, 2, 1.5]),
    lanes=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
@scaled_examples(20)
def test_padded_epoch_yields_each_sample_once(
    shards: Path, samples: int, order: dict[str, Any], epochs: float, lanes: int, sizes: list[int], steps: list[int]
) -> None:
    make = partial(pipeline, str(shards / str(samples)), epochs=epochs, **order)
    found = Counter(run_of_sizes(make, sizes, steps, lanes=lanes, tail="pad"))
    assert set(found.values()) == {1} and len(found) == int(epochs * samples)


@given(
    order=st.sampled_from(ORDERS),
    lanes=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    steps=st.lists(st.integers(0, 9), min_size=2, max_size=2),
)
@scaled_examples(8)
def test_no_sample_repeats_before_the_first_lane_is_exhausted(
    shards: Path, order: dict[str, Any], lanes: int, sizes: list[int], steps: list[int]
) -> None:
    make = partial(pipeline, str(shards / "96"), epochs=1, **order)
    found = Counter(run_of_sizes(make, sizes, steps, lanes=lanes, tail="stop"))
    assert set(found.values()) <= {1}


@given(
    block_size=st.sampled_from([None, 3]),
    lanes=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    steps=st.integers(0, 12),
)
@scaled_examples(8)
def test_endless_run_in_file_order_yields_each_sample_once_per_epoch(
    shards: Path, block_size: int | None, lanes: int, sizes: list[int], steps: int
) -> None:
    make = partial(pipeline, str(shards / "60"), shuffle=False, block_size=block_size)
    with loader(partial(make, size=sizes[0]), lanes=lanes) as own:
        found = [pair for _ in range(steps) for pair in counted(next(own))]
        state = own.state_dict()
    with loader(partial(make, size=sizes[1]), lanes=lanes) as own:
        own.load_state_dict(state, allow={"batch_size"})
        found += [pair for _ in range(2 * 60) for pair in counted(next(own))]
    assert set(Counter(found).values()) == {1}
    assert {number for epoch, number in found if epoch == 0} == set(range(60))


@pytest.mark.parametrize(("tail", "shuffle"), [("pad", True), ("pad", False), ("stop", True)])
def test_all_96_samples_are_yielded_in_5_batches_of_4_then_8(shards: Path, tail: str, shuffle: bool) -> None:
    make = partial(pipeline, str(shards / "96"), epochs=1, shuffle=shuffle)
    found = run_of_sizes(make, [4, 8], [5], lanes=8, tail=tail)
    assert len(set(found)) == len(found) and len(found) >= (96 if tail == "pad" else 84)


@pytest.mark.parametrize("first", ["given", "skipped"])
def test_rank_with_only_fresh_lanes_knows_their_spans(shards: Path, first: str) -> None:
    """As after DCP has resharded a state over more ranks."""
    make = partial(pipeline, str(shards / "96"), epochs=1)
    with loader(partial(make, size=4), lanes=8, tail="pad") as own:
        found = counted(next(own)) if first == "given" else own.skip(1) or []
        state = own.state_dict()
    runs = []
    for rank in range(2):
        runs.append(Run(LoaderSettings(partial(make, size=8), seed=3, lanes=8, tail="pad", ranks=(rank, 2))))
        held = {lane_name(lane) for lane in range(1 - rank, 8, 2)}
        runs[rank].load_state_dict({k: v for k, v in state.items() if k not in held}, allow={"batch_size"})
    while (taken := _take_step(runs))[0].epoch == 0:
        found += [pair for entry in taken for pair in counted(entry.batch)]
    assert set(Counter(found).values()) == {1} and len(found) == (96 if first == "given" else 92)


def test_fresh_lanes_of_a_dead_rank_have_the_spans_of_the_survivors(shards: Path) -> None:
    make = partial(pipeline, str(shards / "96"), epochs=1)
    with loader(partial(make, size=4), lanes=8, tail="pad") as both:
        start = both.state_dict()
        found = [pair for _ in range(2) for pair in counted(next(both))]
    survivor = Run(LoaderSettings(partial(make, size=4), seed=3, lanes=8, tail="pad", ranks=(0, 2)), vote_function=int)
    survivor.skip(2)
    with loader(partial(make, size=4), lanes=8, tail="pad") as both:
        state = complete_state(both, [survivor.state_dict()], start)
    runs = []
    for rank in range(2):
        runs.append(Run(LoaderSettings(partial(make, size=8), seed=3, lanes=8, tail="pad", ranks=(rank, 2))))
        held = {lane_name(lane) for lane in range(1 - rank, 8, 2)}
        runs[rank].load_state_dict({k: v for k, v in state.items() if k not in held}, allow={"batch_size"})
    while (taken := _take_step(runs))[0].epoch == 0:
        found += [pair for entry in taken for pair in counted(entry.batch)]
    assert set(Counter(found).values()) == {1} and len(found) == 96


def test_new_batch_size_applies_to_spans_at_the_start_of_an_epoch(shards: Path) -> None:
    make = partial(pipeline, str(shards / "96"), epochs=1)
    with loader(partial(make, size=4), lanes=8) as own:
        start = own.state_dict()
        next(own)
        assert own.state_dict(lag=1) == start
        later = own.state_dict()
    with loader(partial(make, size=6), lanes=8) as own, loader(partial(make, size=6), lanes=8) as resumed:
        resumed.load_state_dict(start, allow={"batch_size"})
        assert list(map(counted, resumed)) == list(map(counted, own))
        resumed.load_state_dict(later, allow={"batch_size"})
        assert sum(1 for _ in resumed) and list(map(counted, resumed)) == list(map(counted, own)), "the next epoch"


def run_to(make: Any, steps: int | None, state: dict[str, Any] | None = None, **more: Any) -> tuple[list[Given], Any]:
    """What each batch of the first pass gives, `steps` of them (None: all), and the state then."""
    with loader(make, **more) as own:
        if state is not None:
            own.load_state_dict(state)
        found = [counted(batch) for batch in islice(own, steps)]
        return found, through_a_file(own.state_dict())


def resumed_in(shards: str, order: dict[str, Any], first: str, steps: int, *, lanes: int, size: int) -> list[Given]:
    """The batches of a pass that is begun with one tail, and goes on with the other. Skips one that cannot begin."""
    make = partial(pipeline, shards, size=size, epochs=1, **order)
    try:
        found, state = run_to(make, steps, lanes=lanes, tail=first)
    except sp.SavableError as error:
        assert "has no batch" in str(error) and first == "stop"
        assume(False)
    assume(state["slot"] and not state["epoch"])
    found += run_to(make, None, state, lanes=lanes, tail="pad" if first == "stop" else "stop")[0]
    return [batch for batch in found if all(epoch == 0 for epoch, _ in batch)]  # of an epoch that was not over there


@given(
    samples=st.sampled_from([17, 60, 96]),
    order=st.sampled_from(ORDERS),
    lanes=st.integers(1, 9),
    size=st.integers(1, 9),
    steps=st.integers(1, 12),
)
@example(samples=17, order=ORDERS[0], lanes=9, size=3, steps=2)
@scaled_examples(14)
def test_epoch_started_with_tail_stop_and_resumed_with_pad_yields_each_sample_once(
    shards: Path, samples: int, order: dict[str, Any], lanes: int, size: int, steps: int
) -> None:
    found = resumed_in(str(shards / str(samples)), order, "stop", steps, lanes=lanes, size=size)
    assert sorted(chain(*found)) == [(0, number) for number in range(samples)]


@given(
    samples=st.sampled_from([17, 60, 96]),
    order=st.sampled_from(ORDERS[:4]),
    lanes=st.integers(1, 9),
    size=st.integers(1, 9),
    steps=st.integers(1, 12),
)
@example(samples=17, order=ORDERS[0], lanes=9, size=2, steps=3)
@example(samples=17, order={"shuffle": True, "blend": True}, lanes=4, size=4, steps=7)
@scaled_examples(14)
def test_epoch_started_with_tail_pad_and_resumed_with_stop_ends_before_an_incomplete_round(
    shards: Path, samples: int, order: dict[str, Any], lanes: int, size: int, steps: int
) -> None:
    found = resumed_in(str(shards / str(samples)), order, "pad", steps, lanes=lanes, size=size)
    of_pad, _ = run_to(
        partial(pipeline, str(shards / str(samples)), size=size, epochs=1, **order), None, lanes=lanes, tail="pad"
    )
    rounds = next(n for n in count() if sum(map(bool, of_pad[n * lanes : (n + 1) * lanes])) < lanes)
    begun = -(-steps // lanes) * lanes  # what is left of the round that was started comes if each of its lanes has some
    ends = begun if order.get("blend") and all(of_pad[steps:begun]) else steps  # where the length is not counted
    assert found == of_pad[: max(ends, rounds * lanes)]


def test_ranks_agree_on_the_end_of_an_epoch_resumed_with_another_tail(shards: Path) -> None:
    """Also a rank that was given fresh lanes alone."""
    make = partial(pipeline, str(shards / "17"), size=3, epochs=1)
    found, state = run_to(make, 1, lanes=8, tail="stop")
    runs = []
    for rank in range(2):
        runs.append(Run(LoaderSettings(make, seed=3, lanes=8, tail="pad", ranks=(rank, 2))))
        held = {lane_name(lane) for lane in range(1 - rank, 8, 2)}
        runs[rank].load_state_dict({k: v for k, v in state.items() if k not in held})
    given = list(chain(*found))
    while (taken := _take_step(runs))[0].epoch == 0:
        given += [pair for entry in taken for pair in counted(entry.batch)]
    assert sorted(given) == [(0, number) for number in range(17)]


def test_new_tail_applies_to_spans_at_the_start_of_an_epoch(shards: Path) -> None:
    make = partial(pipeline, str(shards / "17"), size=3, epochs=1)
    _, state = run_to(make, 0, lanes=9, tail="stop")
    assert run_to(make, None, state, lanes=9, tail="pad") == run_to(make, None, lanes=9, tail="pad")
