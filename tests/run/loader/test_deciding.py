"""`decide`: the run goes on as if stopped and resumed with other settings, and each resume, replay and rank knows it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.core.decisions import NOTHING_DECIDED, Decisions
from savable_pipeline.run.ledger.records import Decided, read_records
from savable_pipeline.run.loader.deciding import DecidingRun
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.lane_state import LaneState, unpack_state
from savable_pipeline.run.state.state_dict import lane_name, merge_states
from savable_pipeline.run.state.summary import summarize
from savable_pipeline.trainers.rescue import rescue
from tests.conftest import write_numbered_shards

LANES = 4
NAMES = ("a", "b", "text/c", "text/d")


class Ids(sp.TaskEncoder):
    """Items of 1 to 8 tokens, told before they are made; the batch is what it is made of."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return {"id": [sample.key], "length": 1 + number % 8, "drawn": [rng.integers(1000)]}

    def length(self, item: Any) -> int:
        return int(item["length"])

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return {**item, "length": stop - start}

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        joined = {name: [each for item in items for each in item[name]] for name in ("id", "drawn")}
        return {**joined, "length": sum(item["length"] for item in items), "own": rng.integers(1000)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items, "own": rng.integers(1000)}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decide") / "shards"
    for place, name in enumerate("abcd"):
        write_numbered_shards(folder / name, [40, 7 + place])
    return folder


def pipeline(
    folder: Path,
    lane: sp.Lane,
    *,
    epochs: int | None = None,
    max_length: int | None = 16,
    policy: Any = "best_fit",
    weights: Any = None,
    exclude: Mapping[str, str] | None = None,
) -> sp.Stage:
    """A Blend in a Blend, a buffer, a packer and batches."""
    reader = {
        name: sp.TarShardReader(folder / name, lane, block_size=2, epochs=epochs, exclude=(exclude or {}).get(name))
        for name in "abcd"
    }
    text = sp.Blend({name: reader[name] for name in "cd"}, weights={"c": 1, "d": 2})
    outer = {"a": reader["a"], "b": reader["b"], "text": text}
    samples = sp.ShuffleBuffer(sp.Blend(outer, weights=weights or {"a": 2, "b": 1, "text": 1}), size=6)
    items: sp.ItemStage = sp.Encode(samples, Ids())
    if max_length is not None:
        items = sp.OnlinePacker(items, max_length=max_length, policy=policy, open_packs=3)
    return sp.Batcher(items, size=2)


def run(folder: Path, rank: int = 0, world_size: int = 1, *, settings: Any = None, **how: Any) -> DecidingRun:
    kept: dict[str, Any] = {"pipeline": partial(pipeline, folder, **how), "seed": 5, "lanes": LANES}
    return DecidingRun(LoaderSettings(**kept, rank=rank, world_size=world_size, **(settings or {})))


def loader(folder: Path, *, settings: Any = None, **how: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(pipeline, folder, **how), seed=5, lanes=LANES, **(settings or {}))


def sources_of(batch: Any) -> list[str]:
    return [key for item in batch["items"] for key in item["id"]]


def key(name: str, number: int) -> tuple[str, str]:
    return name, f"s{number:06d}"


def drawn_decision(draw: random.Random) -> dict[str, Any]:
    """One of all that can be decided."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"weights": {"a": draw.random(), "b": draw.randrange(3), "text": 1}},
        lambda: {"weights": {"text/c": draw.randrange(1, 9), "text/d": 10.0 ** -draw.randrange(25)}},
        lambda: {"exclude": [key(draw.choice(NAMES), draw.randrange(40)) for _ in range(3)]},
        lambda: {"exclude": [f"s{draw.randrange(40):06d}"]},
        lambda: {"max_length": draw.randrange(5, 17)},
    ]
    first, second = draw.sample(kinds, 2)
    return first() | second() if draw.random() < 0.3 else first()


def plan_of(draw: random.Random, slots: int, decisions: int, step: int = LANES) -> dict[int, dict[str, Any]]:
    """Decisions by the slots before which they are made, multiples of all ranks that replay them."""
    return {slot: drawn_decision(draw) for slot in sorted(draw.sample(range(0, slots, step), decisions))}


def straight(folder: Path, plan: Mapping[int, Any], slots: int, **how: Any) -> list[Any]:
    with run(folder, **how) as one:
        return list(taken(one, plan, slots))


def taken(one: DecidingRun, plan: Mapping[int, Any], slots: int) -> Iterator[Any]:
    while one.position.slot < slots:
        if one.position.slot in plan and one.position.decisions.place != one.position.slot:
            assert one.decide(**plan[one.position.slot]) == one.position.slot
        yield next(one)


def over_ranks(folder: Path, plan: Mapping[int, Any], slots: int, draw: random.Random, **how: Any) -> list[Any]:
    """The same batches by runs of 1, 2 and 4 ranks, each resumed from the state of the one before."""
    found: list[Any] = []
    state: Any = None
    while len(found) < slots:
        world = draw.choice([world for world in (1, 2, 4) if not len(found) % world])
        with ExitStack() as opened:
            ranks = [opened.enter_context(run(folder, rank, world, **how)) for rank in range(world)]
            for rank in ranks:
                if state is not None:
                    rank.load_state_dict(state)
            for _ in range(draw.randrange(1, 6)):
                slot = len(found)
                if slot in plan and (not slot or ranks[0].position.decisions.place < slot):
                    assert {rank.decide(**plan[slot]) for rank in ranks} == {slot}
                found += [batch for _, batch in sorted((rank.position.own_slot, next(rank)) for rank in ranks)]
            state = merge_states(rank.state_dict() for rank in ranks)
    return found[:slots]


@pytest.mark.parametrize("policy", ["best_fit", "first_fit", "first_fit_decreasing", "sequential"])
def test_a_replay_on_other_ranks_over_resumes_equals_the_run_that_decided(shards: Path, policy: str) -> None:
    draw = random.Random(policy)
    plan = plan_of(draw, 160, 12)
    expected = straight(shards, plan, 160, policy=policy)
    assert over_ranks(shards, plan, 160, draw, policy=policy) == expected
    assert straight(shards, {}, 160, policy=policy) != expected
