"""`assert_exact_resume` finds what does not resume, and says at which step and in which field."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import assert_exact_resume, sorted_by_slot, steps_of_ranks
from tests.support.streams import next_hashes
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def shards(make_shards: Any) -> Path:
    folder: Path = make_shards([40, 7, 60])
    return folder


def test_the_toy_pipeline_passes_and_the_resumes_are_counted(shards: Path) -> None:
    count = assert_exact_resume(
        partial(toy_pipeline, str(shards)), steps=10, chains=1, workers=(0, 1), world_sizes=(1, 2)
    )
    assert count > 11


@pytest.mark.parametrize(
    ("seed", "chains"), [(0, 3), *(pytest.param(seed, 8, marks=pytest.mark.long) for seed in (0, 1, 2, 3))]
)
def test_finite_pipeline_passes_with_ranks_that_start_at_odd_slots(shards: Path, seed: int, chains: int) -> None:
    pipeline = partial(toy_pipeline, str(shards), epochs=1)
    assert_exact_resume(pipeline, seed=seed, steps=40, after=1, chains=chains, world_sizes=(1, 2, 3, 4))


# Stages.


class Forgetful(custom.PassThrough, custom.ItemStage):
    """Gives each item with the one before it, which it does not save."""

    def __init__(self, source: custom.Stage) -> None:
        super().__init__(source)
        self.last = -1

    def __next__(self) -> Any:
        item = next(self.source)
        self.last, before = item, self.last
        return [before, item]


class LooksAhead(custom.PassThrough, custom.ItemStage):
    """Holds one item back, and neither saves it nor makes it again."""

    held: list[Any] | None = None

    def __next__(self) -> Any:
        if self.held is None:
            self.held = [next(self.source)]
        self.held.append(next(self.source))
        return self.held.pop(0)


@pytest.mark.parametrize("stage", [Forgetful, LooksAhead])
@pytest.mark.parametrize("epochs", [None, 1])
def test_stage_with_an_incomplete_state_fails(shards: Path, stage: type[custom.Stage], epochs: int | None) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(str(shards), lane, epochs=epochs), NumberEncoder())
        return sp.Batcher(stage(items), size=2)

    with pytest.raises(AssertionError, match=r"resumed at step 1: the batch at step 1 differs in .*batch\[0\]"):
        assert_exact_resume(pipeline, lanes=1)


# Encoders.


class Remembers(NumberEncoder):
    """Counts its samples."""

    def __init__(self) -> None:
        self.seen = 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        self.seen += 1
        return {"id": super().encode(sample, rng), "seen": self.seen}


class Unseeded(NumberEncoder):
    """Draws from a generator that no one seeds."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": super().encode(sample, rng), "noise": random.SystemRandom().random()}


class NotForItself(NumberEncoder):
    """Draws from torch's generator although it says that it does not."""

    global_rng = ("python",)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": super().encode(sample, rng), "noise": torch.rand(3)}


class BatchesUnseeded(NumberEncoder):
    """Draws when it makes a batch."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"ids": torch.tensor(items), "mixed": torch.rand(len(items))}


@pytest.mark.parametrize(
    "encoder,field",
    [
        (Remembers(), r"batch\[0\]\['seen'\]"),
        (Unseeded(), r"batch\[0\]\['noise'\]"),
        (NotForItself(), r"batch\[0\]\['noise'\], sample 0 \(3 of 3 differ\)"),
        (BatchesUnseeded(), r"batch\['mixed'\], sample 0 \(2 of 2 differ\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, sp.TaskEncoder) else "",
)
def test_assert_exact_resume_fails_for_an_impure_encoder(shards: Path, encoder: sp.TaskEncoder, field: str) -> None:
    """Built once and shared, as encoders are: nothing of it is made anew by a resume in one process."""
    pipeline = partial(number_pipeline, str(shards), encoder=encoder)
    with pytest.raises(AssertionError, match=rf"resumed at step \d+: the batch at step \d+ differs in {field}"):
        assert_exact_resume(pipeline, lanes=3)


class WhereItRuns(NumberEncoder):
    """Depends on the process: no resume in one process shows it."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        import os

        return {"ids": items, "process": os.getpid()}


def test_an_encoder_that_depends_on_its_process_fails_as_soon_as_workers_are_drawn(shards: Path) -> None:
    pipeline = partial(number_pipeline, str(shards), encoder=WhereItRuns())
    assert_exact_resume(pipeline, lanes=2, steps=6, chains=2)
    with pytest.raises(AssertionError, match=r"chain 0, resumed .* × 1 workers .*differs in batch\['process'\]"):
        assert_exact_resume(pipeline, lanes=2, steps=6, workers=(1,))


# The end of an epoch.


class EndsEarlier(custom.PassThrough, custom.ItemStage):
    """Gives nine items, counted from wherever it was restored."""

    given = 0

    def __next__(self) -> Any:
        if self.given == 9:
            raise StopIteration
        self.given += 1
        return next(self.source)


def test_epoch_that_ends_differently_after_a_resume_fails(shards: Path) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(str(shards), lane, epochs=1), NumberEncoder())
        return EndsEarlier(items)

    with pytest.raises(AssertionError, match="an epoch went on at step 9, otherwise than uninterrupted"):
        assert_exact_resume(pipeline, lanes=1)


def test_an_epoch_without_a_batch_is_an_error(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([3])), epochs=1)
    with pytest.raises(sp.SavableError, match="epoch 0 has no batch"):
        assert_exact_resume(pipeline, lanes=12)


def test_the_batches_of_a_step_are_sorted_by_slot() -> None:
    """A step of 3 ranks from slot 4 on: slot 4 is of rank 1, slot 5 of rank 2, slot 6 of rank 0."""
    assert sorted_by_slot(["six", "four", "five"], 4) == ["four", "five", "six"]


# The ranks of a run in one process.


def ranks_of(pipeline: Any, world_size: int, **settings: Any) -> list[sp.SavableLoader]:
    settings = {"seed": 3, "lanes": 12, **settings}
    return [sp.SavableLoader(pipeline, ranks=(rank, world_size), **settings) for rank in range(world_size)]


def in_slots(steps: Any, first: int = 0) -> list[str]:
    """The hashes of all batches of these steps, of which the first begins at slot `first`, in the order of slots."""
    found = []
    for step in steps:
        found += [digest(batch) for batch in sorted_by_slot(step, first)]
        first += len(step)
    return found


@pytest.mark.parametrize(("tail", "world_size"), [("pad", 1), ("stop", 2), ("pad", 4)])
def test_ranks_of_a_finite_run_in_one_process_yield_what_one_rank_yields(
    make_shards: Any, tail: Any, world_size: int
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([150, 27])), epochs=1)
    alone = sp.SavableLoader(pipeline, seed=3, lanes=12, tail=tail)
    ranks = ranks_of(pipeline, world_size, tail=tail)
    for epoch in range(2):
        expected, found = next_hashes(alone, 1000), in_slots(steps_of_ranks(ranks))
        assert len(expected) > 12 and found[: len(expected)] == expected, f"epoch {epoch}"
        assert len(found) - len(expected) < world_size, "only what fills up the last step"
        assert [rank.epoch for rank in ranks] == [epoch + 1] * world_size


def test_ranks_saved_between_two_steps_resume_on_others(shards: Path) -> None:
    pipeline = partial(toy_pipeline, str(shards), epochs=1)
    expected = in_slots([batch] for batch in sp.SavableLoader(pipeline, seed=3, lanes=12))
    ranks = ranks_of(pipeline, 2)
    steps = steps_of_ranks(ranks)
    found = in_slots(next(steps) for _ in range(3))
    states = [rank.state_dict() for rank in ranks]
    assert found + in_slots(steps, 6) == expected, "the state is taken, and the steps go on"
    others = ranks_of(pipeline, 3)
    for other in others:
        other.load_state_dict(sp.merge_states(states))
    assert found + in_slots(steps_of_ranks(others), 6) == expected
    broken_off = ranks_of(pipeline, 2)
    assert in_slots([next(steps_of_ranks(broken_off))]) == expected[:2]
    assert in_slots(steps_of_ranks(broken_off), 2) == expected[2:], "goes on, as the loaders would"


@pytest.mark.parametrize(
    ("ranks", "listed"), [((), "none"), ((0,), "0 of 2"), ((1, 0), "1 of 2, 0 of 2"), ((0, 0), "0 of 2, 0 of 2")]
)
def test_loaders_that_are_not_all_ranks_in_their_order_are_rejected(
    shards: Path, ranks: tuple[int, ...], listed: str
) -> None:
    there = ranks_of(partial(number_pipeline, str(shards), epochs=1), 2)
    with pytest.raises(ValueError, match=f"the loaders of all ranks in their order, not {listed}$"):
        steps_of_ranks([there[rank] for rank in ranks])


@pytest.mark.parametrize("settings", [{"seed": 4}, {"lanes": 4}, {"tail": "pad"}])
def test_loaders_of_several_runs_are_rejected(shards: Path, settings: dict[str, Any]) -> None:
    pipeline = partial(number_pipeline, str(shards), epochs=1)
    with pytest.raises(ValueError, match="the loaders differ in seed, lanes, tail or epoch_slots"):
        steps_of_ranks([ranks_of(pipeline, 2)[0], ranks_of(pipeline, 2, **settings)[1]])


def test_ranks_at_different_positions_are_rejected(make_shards: Any) -> None:
    ranks = ranks_of(partial(number_pipeline, str(make_shards([40, 40])), epochs=None), 2)
    next(ranks[1])
    with pytest.raises(ValueError, match=r"the ranks are at slot 0 of epoch 0, slot 2 of epoch 0\. Load one state"):
        next(steps_of_ranks(ranks))


def test_an_epoch_of_epoch_slots_ends_in_all_ranks(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([40, 40])), epochs=None)
    ranks = ranks_of(pipeline, 2, epoch_slots=12)
    expected = next_hashes(sp.SavableLoader(pipeline, seed=3, lanes=12), 24)
    assert in_slots(steps_of_ranks(ranks)) + in_slots(steps_of_ranks(ranks)) == expected
