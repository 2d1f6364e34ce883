"""Finite passes in which every sample counts: the uneven end is filled up and masked, and the length is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import _take_step, assert_exact_resume
from tests.support.toy_pipelines import ToyEncoder


class Ids(sp.TaskEncoder):
    """A batch is a dict of the ids, and of numbers drawn for the batch."""

    global_rng = False
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"id": torch.tensor(items), "drawn": rng.random()}


class Listed(Ids):
    """Batches that are no dicts."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class Marked(Ids):
    """Batches with a key of that name."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"valid": 1}


class SkipsMost(Ids):
    """Items of the samples from 40 on only."""

    one_to_one = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = super().encode(sample, rng)
        return number if number >= 40 else sp.Skip("early")


class Packs(ToyEncoder):
    """The toy encoder, whose batches are dicts already."""


def evaluation(
    shards: str, lane: sp.Lane, *, encoder: sp.TaskEncoder | None = None, size: int = 4, packed: bool = False
) -> custom.Stage:
    stage: custom.Stage = sp.TarShardReader(shards, lane, epochs=1, shuffle=False, block_size=1)
    stage = sp.Encode(stage, encoder or Ids())
    if packed:
        stage = sp.OnlinePacker(stage, max_length=20, open_packs=2)
    return sp.Batcher(stage, size=size)


def loader(pipeline: Any, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 4, "tail": "pad", **settings})


def valid_ids(batches: list[Any]) -> list[int]:
    return [number for batch in batches for number in batch["id"][batch["valid"]].tolist()]


@pytest.mark.parametrize(("samples", "num_workers"), [(1, 0), (3, 2), (16, 0), (50, 2), (61, 0)])
def test_padded_epoch_yields_every_sample_once_in_batches_of_one_shape(
    make_shards: Any, samples: int, num_workers: int
) -> None:
    with loader(partial(evaluation, str(make_shards([samples]))), num_workers=num_workers) as own:
        length = len(own)
        batches = list(own)
        assert own.epoch == 1
        assert Counter(valid_ids(batches)) == Counter(range(samples))
        assert {(batch["id"].shape, batch["valid"].shape) for batch in batches} == {((4,), (4,))}
        assert len(batches) == length
        assert Counter(valid_ids(list(own))) == Counter(range(samples)), "the next epoch"


def blended(shards: str, lane: sp.Lane, *, packed: bool) -> custom.Stage:
    """Two branches with an encoder, in packs of their own or not."""
    branches: dict[str, custom.Stage] = {}
    for name in "ab":
        samples = sp.TarShardReader(shards, lane, epochs=1, shuffle=False, block_size=1)
        branches[name] = sp.Encode(samples, Packs() if packed else Ids())
        if packed:
            branches[name] = sp.OnlinePacker(branches[name], max_length=20, open_packs=2)
    blend = sp.Blend(branches, weights={"a": 1, "b": 1})
    return sp.Batcher(blend, size=4, encoder=Packs() if packed else Ids())


@pytest.mark.parametrize("packed", [False, True])
def test_lanes_without_samples_of_a_blend_are_padded(make_shards: Any, packed: bool) -> None:
    with loader(partial(blended, str(make_shards([2])), packed=packed)) as own:
        batches = list(own)
    assert 1 <= len(batches) <= 4
    assert 1 <= sum(int(batch["valid"].sum()) for batch in batches) <= 4


@pytest.mark.parametrize("samples", [3, 50])
def test_ranks_together_yield_the_same_as_one(make_shards: Any, samples: int) -> None:
    pipeline = partial(evaluation, str(make_shards([samples])))
    expected = [digest(batch) for batch in loader(pipeline)]
    for world_size in (1, 2, 4):
        assert_ranks(pipeline, world_size, expected)


def assert_ranks(pipeline: Any, world_size: int, expected: list[str]) -> None:
    assert len(loader(pipeline, ranks=(0, world_size))) == -(-len(expected) // world_size)
    settings = LoaderSettings(pipeline, seed=3, lanes=4, tail="pad")
    runs = [Run(replace(settings, ranks=(rank, world_size))) for rank in range(world_size)]
    found = [entry for _ in range(-(-len(expected) // world_size)) for entry in _take_step(runs)]
    assert [digest(batch) for _, _, batch in found][: len(expected)] == expected
    assert not any(batch["valid"].any() for _, _, batch in found[len(expected) :])
    assert [next(own, None) for own in runs] == [None] * world_size


def test_padded_epoch_resumes_exactly(make_shards: Any) -> None:
    shards = str(make_shards([50]))
    settings: dict[str, Any] = {"lanes": 4, "steps": 20, "chains": 1, "world_sizes": [1, 2, 4], "tail": "pad"}
    assert assert_exact_resume(partial(evaluation, shards), workers=[0, 1], **settings) > 20
    assert assert_exact_resume(partial(evaluation, shards, encoder=SkipsMost()), **settings) > 12
    assert assert_exact_resume(partial(evaluation, shards, encoder=Packs(), packed=True, size=2), **settings) > 12


def steps_of_four(pipeline: Any, steps: int) -> list[list[Any]]:
    """The first batches of four ranks, by step."""
    settings = LoaderSettings(pipeline, seed=3, lanes=4, tail="pad")
    runs = [Run(replace(settings, ranks=(rank, 4))) for rank in range(4)]
    return [[entry.batch for entry in _take_step(runs)] for _ in range(steps)]


def test_ranks_that_start_between_two_steps_end_together(make_shards: Any) -> None:
    shards = make_shards([36])

    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(shards, lane, epochs=1, shuffle=False, block_size=2)
        return sp.Batcher(sp.Encode(samples, Ids()), size=2)

    alone = sp.SavableLoader(pipeline, seed=0, lanes=6, ranks=(0, 1))
    for _ in range(5):
        next(alone)
    state = alone.state_dict()
    given = []
    for rank in range(2):
        own = sp.SavableLoader(pipeline, seed=0, lanes=6, ranks=(rank, 2))
        own.load_state_dict(state)
        given.append([batch["id"].tolist() for batch in own])
    even, odd = ([[2 * slot, 2 * slot + 1] for slot in slots] for slots in (range(6, 17, 2), range(5, 16, 2)))
    assert given == [even, odd], "slot 17 is half a step: of no rank"


def test_lane_without_samples_pads_with_the_first_samples(make_shards: Any) -> None:
    (batches,) = steps_of_four(partial(evaluation, str(make_shards([1]))), 1)
    assert [batch["id"].tolist() for batch in batches] == [[0, 0, 0, 0]] * 4
    assert [batch["valid"].tolist() for batch in batches] == [[True, False, False, False]] + [[False] * 4] * 3
    assert len(list(loader(partial(evaluation, str(make_shards([1])))))) == 1


def test_padding_batch_has_no_sample_ids(make_shards: Any) -> None:
    own = loader(partial(evaluation, str(make_shards([1]))), ranks=(2, 4))
    assert (next(own)["valid"].sum().item(), len(own.trace().samples)) == (0, 0)


def test_padding_without_any_item_is_an_error(make_shards: Any) -> None:
    with pytest.raises(sp.SavableError):
        list(loader(partial(evaluation, str(make_shards([30])), encoder=SkipsMost())))


@pytest.mark.parametrize("encoder", [Listed(), Marked()])
def test_batches_without_a_place_for_the_valid_mask_are_an_error(make_shards: Any, encoder: Any) -> None:
    with pytest.raises(sp.EncodeError, match=r"must return a dict without a key"):
        next(loader(partial(evaluation, str(make_shards([30])), encoder=encoder)))


def test_pipeline_without_a_batcher_cannot_be_padded(make_shards: Any) -> None:
    shards = str(make_shards([30]))
    with pytest.raises(ValueError, match=r"needs a last stage with filler\(\)"):
        next(loader(lambda lane: sp.Encode(sp.TarShardReader(shards, lane, epochs=1), Ids())))
    with pytest.raises(ValueError, match="tail must be 'stop' or 'pad', not 'drop'"):
        loader(partial(evaluation, shards), tail="drop")


# Lengths.


def test_length_equals_the_number_of_batches_of_an_epoch(make_shards: Any) -> None:
    shards = str(make_shards([103]))
    for settings in ({"tail": "stop"}, {"tail": "pad"}, {"tail": "stop", "lanes": 3}):
        own = loader(partial(evaluation, shards), **settings)
        for _ in range(3):  # lanes have other shares in other epochs
            assert len(own) == len(list(own)) > 0


def test_asking_for_an_unknown_length_raises(make_shards: Any) -> None:
    shards = str(make_shards([40]))
    endless = loader(lambda lane: sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), Ids()), size=2), tail="stop")
    for own in (
        loader(partial(evaluation, shards, encoder=SkipsMost())),
        loader(partial(evaluation, shards, encoder=Packs(), packed=True)),
        endless,
    ):
        with pytest.raises(TypeError, match="Set epoch_slots="):
            len(own)
        assert own, "it is true, as things without a length are"


def test_encoder_that_contradicts_its_declared_length_is_an_error(make_shards: Any) -> None:
    class Liar(SkipsMost):
        one_to_one = True

    with pytest.raises(sp.EncodeError, match="one_to_one"):
        list(loader(partial(evaluation, str(make_shards([60])), encoder=Liar())))
