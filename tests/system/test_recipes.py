"""What trainers do with acknowledgements and decisions, killed and resumed: rollouts, and a mixture by losses."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import steps_of_ranks
from tests.support.shards import write_numbered_shards
from tests.support.streams import through_a_file
from tests.support.toy_async_training import SAVED_EVERY, Killed, Trainer, vectors
from tests.support.toy_online_mixing import DOMAINS, EVERY, MixedTraining, mixed_loader
from tests.support.toy_rollouts import PROMPTS, TRAINED_TOGETHER, Checkpoint, Rollouts, duration


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rollouts") / "shards"
    write_numbered_shards(folder, [400, PROMPTS - 400])
    return str(folder)


def killed(shards: str, world_size: int, *, acknowledge: bool, saved_at: int = 10) -> Checkpoint:
    """The checkpoint after as many updates, of a run that is killed an update later."""
    trainer = Rollouts(shards, world_size, acknowledge=acknowledge)
    saved = None
    for trained in trainer.updates():
        if trained == saved_at * TRAINED_TOGETHER:
            saved = trainer.checkpoint()
        if trained == (saved_at + 1) * TRAINED_TOGETHER:
            break
    assert saved is not None
    return Checkpoint(saved.seen, through_a_file(saved.loader))


def resumed(shards: str, world_size: int, checkpoint: Checkpoint, *, acknowledge: bool) -> Rollouts:
    """Trained to the end of the epoch."""
    trainer = Rollouts(shards, world_size, checkpoint, acknowledge=acknowledge)
    assert list(trainer.updates())
    return trainer


@pytest.mark.parametrize(
    ("before", "after"), [(4, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 1), (1, 2)))]
)
def test_of_736_prompts_none_is_skipped_and_none_is_trained_twice(prompts: str, before: int, after: int) -> None:
    checkpoint = killed(prompts, before, acknowledge=True)
    assert checkpoint.seen.total() == 320
    assert resumed(prompts, after, checkpoint, acknowledge=True).seen == dict.fromkeys(range(PROMPTS), 1)


def test_prompts_in_flight_at_an_epochs_end_are_first_in_the_next(prompts: str) -> None:
    checkpoint = killed(prompts, 1, acknowledge=True, saved_at=21)
    assert checkpoint.seen.total() == 672
    assert resumed(prompts, 2, checkpoint, acknowledge=True).seen == dict.fromkeys(range(PROMPTS), 2)


def test_position_alone_would_skip_95_of_736_prompts_in_flight(prompts: str) -> None:
    seen = resumed(prompts, 1, killed(prompts, 1, acknowledge=False), acknowledge=False).seen
    skipped = set(range(PROMPTS)) - set(seen)
    assert len(skipped) == 95 and max(seen.values()) == 1
    assert median(map(duration, skipped)) > 2 * median(map(duration, seen))


@pytest.mark.parametrize("kills", [(SAVED_EVERY, 11)])
def test_each_prompt_of_an_asynchronous_loop_is_trained_or_dropped_once(
    make_shards: Any, tmp_path: Path, kills: tuple[int, ...]
) -> None:
    pipeline = partial(vectors, str(make_shards([150, 27])))
    for kill_at in (*kills, None):
        with sp.SavableLoader(pipeline, seed=3, lanes=4, tail="pad", acknowledge=True) as loader:
            trainer = Trainer(loader, tmp_path / "checkpoint.pt")
            if kill_at is None:
                trainer.train()
                assert loader.in_flight() == (0, None) and "acknowledged/unknown" not in loader.stats()
            else:
                with pytest.raises(Killed):
                    trainer.train(kill_at=kill_at)
    fates = trainer.model.fates
    assert sorted(fates) == list(range(177)) and {len(each) for each in fates.values()} == {1}
    assert ["dropped"] in fates.values() and ["trained"] in fates.values()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixed")
    for name in DOMAINS:
        write_numbered_shards(folder / name, [40, 9])
    return str(folder)


@pytest.fixture(scope="module")
def straight(mixed: str) -> MixedTraining:
    """A training of 60 steps that is never stopped."""
    training = MixedTraining(mixed)
    training.train(60)
    return training


@pytest.mark.parametrize("kill_at", [EVERY + 3, pytest.param(4 * EVERY, marks=pytest.mark.long)])
def test_a_mixture_by_losses_decides_the_same_after_a_kill(mixed: str, straight: MixedTraining, kill_at: int) -> None:
    first = MixedTraining(mixed)
    first.train(kill_at)
    second = MixedTraining(mixed, copy.deepcopy(first.saved()))
    second.train(60)
    assert first.decided | second.decided == straight.decided and len(straight.decided) == 9
    assert list(map(digest, first.batches + second.batches)) == list(map(digest, straight.batches))
    assert torch.equal(second.model.slopes, straight.model.slopes)


def test_mixture_by_losses_yields_the_decided_weights(straight: MixedTraining) -> None:
    given = torch.cat([batch["domain"] for batch in straight.batches[54:]]).bincount(minlength=len(DOMAINS)) / 48
    assert given.tolist() == pytest.approx(list(straight.decided[54].values()), abs=0.05)
    assert given[DOMAINS.index("noisy")] > 0.9, "the others are learnt by then"


def test_decisions_of_a_mixture_by_losses_are_replayed_on_two_ranks(mixed: str, straight: MixedTraining) -> None:
    ranks = [mixed_loader(mixed, rank, 2) for rank in range(2)]
    found = []
    for slot in range(0, 60, 2):
        if slot in straight.decided:
            assert {rank.reconfigure(weights=straight.decided[slot]) for rank in ranks} == {slot}
        found += next(steps_of_ranks(ranks))
    assert list(map(digest, found)) == list(map(digest, straight.batches))


class Prompts(sp.TaskEncoder):
    """As verl's collation makes them: an array of objects, none of them a tensor, beside a tensor."""

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"index": sample.json()["id"], "messages": [{"role": "user", "content": f"{rng.random()}"}]}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        columns = {name: np.fromiter((each[name] for each in items), dtype=object) for name in items[0]}
        return {"dummy": torch.zeros(len(items), 1), **columns}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_single_prompts_are_repeated_after_a_resume_until_done(make_shards: Any, num_workers: int) -> None:
    """verl's rollouter asks for `len` prompts less those that were trained on, and for whole ones alone."""
    shards = str(make_shards([20, 9]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane, epochs=1, block_size=1), Prompts()), size=1)

    settings = {"seed": 3, "lanes": 1, "ranks": (0, 1), "acknowledge": True, "num_workers": num_workers}
    with sp.SavableLoader(pipeline, **settings) as loader, sp.SavableLoader(pipeline, **settings) as resumed:
        given = [next(loader) for _ in range(12)]
        trained, open_ones = (
            [given[place] for place in (7, 0, 3, 11)],
            [given[place] for place in (1, 2, 4, 5, 6, 8, 9, 10)],
        )
        for batch in trained:
            loader.acknowledge(batch["receipts"])
        resumed.load_state_dict(through_a_file(loader.state_dict()))
        rest = list(resumed)
        assert len(rest) == len(resumed) - len(trained) == 25
        assert all((batch["receipts"] >= 0).all() for batch in rest)
        assert list(map(digest, rest[:8])) == list(map(digest, open_ones))
        assert sorted(int(batch["index"][0]) for batch in trained + rest) == list(range(29))
