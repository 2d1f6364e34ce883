"""What `savable plan` tells is what a run does: steps, tail, bytes, lanes, waiting."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.tools.plan.report import advice, sections
from savable_pipeline.tools.plan.run_plan import RunPlan, Wanted, plan_run
from savable_pipeline.tools.plan.waits import balance, pack, waiting
from tests.conftest import MakeShards, write_tar
from tests.support.toy_server import serving


class Numbers(sp.TaskEncoder):
    """A sample's number, and what it is of: one item of each sample."""

    global_rng = False
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> dict[str, int]:
        return {"id": sample.json()["id"]}


class Words(sp.TaskEncoder):
    """Texts of as many tokens as a sample says."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        length = sample.json()["length"]
        return np.zeros(length, np.int16) if length else sp.Skip("empty")

    def pack(self, items: list[Any], rng: sp.Rng) -> dict[str, int]:
        return {"cost": sum(len(item) ** 2 for item in items)}


class Told(Words):
    """The same, whose lengths are told."""

    encoded = 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        self.encoded += 1
        return super().encode(sample, rng)

    def length_of(self, sample: sp.Sample) -> int | None:
        return sample.json()["length"] or None


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 samples of lognormal lengths, of which one in ten is empty."""
    folder, draw = tmp_path_factory.mktemp("words"), random.Random(3)
    for shard in range(6):
        lengths = [0 if i % 10 == 0 else 1 + int(min(99, draw.lognormvariate(2.5, 1))) for i in range(500)]
        members = [(f"{shard}{i:05}.json", json.dumps({"length": n}).encode()) for i, n in enumerate(lengths)]
        write_tar(folder / f"{shard}.tar", members)
    return folder


def _packed(folder: Path, encoder: sp.TaskEncoder, **reading: Any) -> Callable[[sp.Lane], sp.Stage]:
    def pipeline(lane: sp.Lane) -> sp.Stage:
        samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane, **reading), size=50)
        packs = sp.OnlinePacker(sp.Encode(samples, encoder), max_length=100)
        return sp.Batcher(packs, size=2)

    return pipeline


def _numbered(folder: Path, size: int, **reading: Any) -> Callable[[sp.Lane], sp.Stage]:
    return lambda lane: sp.Batcher(
        sp.Encode(sp.TarShardReader(folder, lane, epochs=1, **reading), Numbers()), size=size
    )


def _epoch(settings: LoaderSettings, ranks: int) -> list[list[Any]]:
    """The batches of an epoch that each rank is given; a rank's vote is all ranks', whose lanes are alike."""
    given = []
    for rank in range(ranks):
        with Run(replace(settings, rank=rank, world_size=ranks), agree=lambda vote: vote) as run:
            given.append(list(iter(run)))
    return given


@pytest.mark.parametrize("tail", ["stop", "pad"])
@pytest.mark.parametrize(("size", "lanes", "ranks"), [(3, 8, 4), (4, 6, 6), (7, 12, 3)])
def test_counted_steps_and_tail_are_those_of_a_real_epoch(
    make_shards: MakeShards, tail: Any, size: int, lanes: int, ranks: int
) -> None:
    settings = LoaderSettings(_numbered(make_shards([101, 57, 80]), size), seed=5, lanes=lanes, tail=tail)
    plan = plan_run(settings, Wanted(ranks=ranks, samples=20))
    given = _epoch(settings, ranks)
    assert {len(batches) for batches in given} == {plan.steps.steps}
    assert plan.steps.how == "counted" and plan.steps.error == 0
    valid = [batch.get("valid", np.ones(len(batch["id"]), bool)) for batches in given for batch in batches]
    rows, real = sum(map(len, valid)), sum(int(each.sum()) for each in valid)
    assert plan.steps.left_samples == 238 - real
    assert plan.steps.filler_rows == rows - real


def test_estimated_steps_are_near_those_of_a_real_epoch_of_packs(words: Path) -> None:
    settings = LoaderSettings(_packed(words, Words(), epochs=1), seed=5, lanes=4)
    plan = plan_run(settings, Wanted(ranks=1, samples=400))
    steps = len(_epoch(settings, 1)[0])
    assert plan.steps.how == "estimated"
    assert abs(plan.steps.steps - steps) <= plan.steps.error + 4  # the sample's error, and a round
    assert plan.lengths is not None
    assert plan.lengths.items_a_sample == pytest.approx(0.9, abs=0.05)
    assert plan.lengths.skipped == {"empty": plan.lengths.samples - plan.lengths.items}


def test_a_run_without_end_has_passes_and_one_of_epoch_slots_has_these(words: Path) -> None:
    settings = LoaderSettings(_packed(words, Words()), seed=5, lanes=4)
    steps = plan_run(settings, Wanted(ranks=2, samples=400)).steps
    documents = 2700
    assert steps.endless and steps.left_samples == 0
    with Run(replace(settings, rank=0, world_size=1)) as run:
        for _ in range(40):
            next(run)
        numbers = run.stats.numbers()
    real = documents / (numbers["OnlinePacker/items"] / numbers["OnlinePacker/packs"]) / 2 / 2
    assert steps.steps == pytest.approx(real, rel=0.15)
    assert plan_run(replace(settings, epoch_slots=40), Wanted(ranks=2)).steps.steps == 20


def test_lanes_that_the_ranks_do_not_divide_are_named_and_the_next_are_planned(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([900]), 2), seed=5, lanes=96)
    plan = plan_run(settings, Wanted(ranks=64, nodes=8, samples=20))
    assert plan.planned_lanes == 128
    assert "64 ranks do not divide the 96 lanes" in advice(plan)[0]
    assert [(each.lanes, each.fits) for each in plan.choices][:3] == [(64, True), (96, False), (128, True)]
    for each in plan.choices:
        for world in each.worlds:
            replace(settings, lanes=each.lanes, rank=0, world_size=world).find_ranks()  # raises where it does not serve


def test_better_lanes_do_not_leave_more_of_an_epoch(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([200]), 2), seed=5, lanes=32)
    plan = plan_run(settings, Wanted(ranks=4, samples=20))
    left = {each.lanes: each.left_share for each in plan.choices}
    assert left[32] == pytest.approx(8 / 200)  # 3 rounds of 32 batches of 2
    assert (left[plan.better_lanes] or 0) <= min(share or 0 for share in left.values()) + 0.01
    assert plan.better_lanes != 32
    (advised,) = advice(plan)
    assert "instead of 4.00%" in advised
    fewer = plan.better_lanes // 4
    assert (
        advised.endswith(f", though a rank then has at most {fewer} worker{'s' * (fewer > 1)}")
        and "lets" not in advised
    )


def test_more_workers_are_a_reason_and_planned_lanes_are_one_of_the_choices(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([210]), 1), seed=5, lanes=3, num_workers=2)
    plan = plan_run(settings, Wanted(ranks=3, samples=20))
    assert any("lets a rank have" in line and "though" not in line for line in advice(plan))
    settings = LoaderSettings(_numbered(make_shards([200]), 2), seed=5, lanes=98)
    plan = plan_run(settings, Wanted(ranks=5, samples=20))
    assert plan.planned_lanes == 100 and 100 in [choice.lanes for choice in plan.choices]
    assert plan.better_lanes == 100 and len(advice(plan)) == 1


def test_what_lengths_are_told_nothing_is_encoded_for(words: Path) -> None:
    encoder = Told()
    plan = plan_run(LoaderSettings(_packed(words, encoder), seed=5, lanes=4), Wanted(ranks=4, samples=400))
    assert plan.lengths is not None and plan.lengths.told and len(plan.lengths.sizes) == 400
    assert encoder.encoded <= 100  # the empty ones, whose length is not told, and a few items for their size
    assert plan.memory.open_packs == 0  # by refs alone


@pytest.mark.parametrize("cache_bytes", [10**8, 10**6])
def test_a_node_fetches_from_a_server_what_was_planned(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    sp.TarShardReader(make_shards([100] * 4, text="t" * 4000), sp.Lane())  # makes the index
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(cache_bytes))
    with serving(tmp_path) as server:
        url = f"{server.url}/shards/"

        def pipeline(lane: sp.Lane) -> sp.Stage:
            return sp.Batcher(sp.Encode(sp.TarShardReader(url, lane, epochs=1), Numbers()), size=5)

        settings = LoaderSettings(pipeline, seed=5, lanes=8)
        monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "planning"))
        (source,) = plan_run(settings, Wanted(ranks=4, nodes=4, samples=8)).sources
        monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "node"))
        server.ranges.clear()
        with Run(replace(settings, rank=0, world_size=4), agree=lambda vote: vote) as node:
            assert len(list(iter(node))) == 20
        fetched = server.sent()
    assert source.remote and source.samples == 400
    assert source.node_bytes == pytest.approx(source.bytes / 4)
    planned = source.first_pass if source.whole_cache <= cache_bytes else source.node_bytes
    assert planned == pytest.approx(fetched, rel=0.1)
    assert 0 < source.least_cache <= source.node_bytes / 0.75


def test_a_plan_downloads_no_more_than_its_sample(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sp.TarShardReader(make_shards([200] * 4, text="t" * 4000), sp.Lane())  # makes the index
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**6))  # not in pieces
    with serving(tmp_path) as server:
        url = f"{server.url}/shards/"

        def pipeline(lane: sp.Lane) -> sp.Stage:
            return sp.Batcher(sp.Encode(sp.TarShardReader(url, lane, epochs=1), Numbers()), size=5)

        plan_run(LoaderSettings(pipeline, seed=5, lanes=8), Wanted(ranks=4, nodes=4, samples=16))
        assert server.sent() < 5120 * 8 * 16 * 1.1  # what 8 lanes open at a time, of 800 samples


def test_mixing_tells_a_shuffled_run_from_one_in_order(make_shards: MakeShards) -> None:
    folder = make_shards([256] * 8)

    def plan(shuffle: bool) -> RunPlan:
        settings = LoaderSettings(_numbered(folder, 16, shuffle=shuffle), seed=5, lanes=4)
        return plan_run(settings, Wanted(ranks=4, samples=20))

    shuffled, in_order = plan(True).mixing, plan(False).mixing
    assert shuffled is not None and in_order is not None
    assert in_order.batch_shards.ours == 0 and in_order.batch_neighbours.ours <= 1
    assert shuffled.step_shards.share > 0.75 > in_order.step_shards.share
    assert shuffled.batch_shards.random == pytest.approx(2.6, abs=0.2)  # of log2(8) bits, in 16 samples


def test_waiting_is_that_of_the_real_batches_of_all_ranks(words: Path) -> None:
    def plan(hold: int) -> tuple[RunPlan, float]:
        def pipeline(lane: sp.Lane) -> sp.Stage:
            items = sp.Encode(sp.TarShardReader(words, lane), Words())
            packs: sp.ItemStage = sp.OnlinePacker(items, max_length=100)
            packs = sp.Balance(packs, hold=hold, cost=_square) if hold else packs
            return sp.Batcher(packs, size=1)

        settings = LoaderSettings(pipeline, seed=5, lanes=8, rank=0, world_size=1)
        with Run(settings) as run:
            costs = [int(next(run)["cost"][0]) for _ in range(8 * 100)]
        return plan_run(settings, Wanted(ranks=8, samples=600)), waiting(np.array(costs[8 * 20 :]).reshape(-1, 8).T, 8)

    balanced, real = plan(16)
    assert balanced.waits is not None and balanced.waits.cost.startswith("the pipeline's own")
    shares = {way.name: way.share for way in balanced.waits.ways}
    assert shares["as it is"] == pytest.approx(real, rel=0.25)
    free, real = plan(0)
    assert shares["without Balance"] == pytest.approx(real, rel=0.25)
    assert shares["as it is"] < shares["without Balance"] / 2
    assert free.waits is not None and free.waits.ways[0].name == "as it is"


def _square(length: int, images: int) -> int:
    return length * length


def test_every_way_to_wait_less_is_told_and_max_cost_helps(words: Path) -> None:
    plan = plan_run(LoaderSettings(_packed(words, Words()), seed=5, lanes=8), Wanted(ranks=8, hidden=1, samples=400))
    assert plan.waits is not None
    shares = [way.share for way in plan.waits.ways]
    assert len(shares) == 4 and plan.waits.ways[0].yours
    assert shares[1] < shares[0] / 2 and shares[2] < shares[0] and shares[3] < shares[2]


def test_nothing_is_told_of_lengths_that_are_not_known(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([50]), 2), seed=5, lanes=2)
    plan = plan_run(settings, Wanted(ranks=2, samples=10))
    assert plan.waits is None and plan.lengths is not None and not plan.lengths.sizes
    assert "waiting for the slowest rank" not in [section.title for section in sections(plan)]


def test_batches_of_samples_and_of_a_blend_are_planned_too(make_shards: MakeShards) -> None:
    one, two = make_shards([60], "one"), make_shards([40], "two")

    def pipeline(lane: sp.Lane) -> sp.Stage:
        readers = {name: sp.TarShardReader(folder, lane) for name, folder in [("one", one), ("two", two)]}
        return sp.Batcher(sp.Blend(readers, weights={"one": 1, "two": 1}), size=4)

    plan = plan_run(LoaderSettings(pipeline, seed=5, lanes=2), Wanted(ranks=2))
    assert plan.lengths is None and plan.mixing is not None
    assert [source.name for source in plan.sources] == ["one", "two"]
    assert plan.steps.steps == pytest.approx(100 / 4 / 2)


def test_more_nodes_than_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="--nodes must divide --ranks"):
        Wanted(ranks=8, nodes=3)


def test_the_simulation_balances_what_it_packed() -> None:
    def documents(lane: int) -> Any:
        rng = np.random.default_rng(lane)
        while True:
            yield ((int(rng.integers(1, 90)), 0),)

    packs = pack(documents, _square, lanes=4, packs=60, seed=1, max_length=100)
    given = balance(packs.costs, hold=8, slots=50, seed=1).costs
    for own, before in zip(given.tolist(), packs.costs.tolist(), strict=True):
        assert not set(own) - set(before)
    assert waiting(given[:, 10:], 4) < waiting(packs.costs[:, 10:50], 4)
    assert waiting(np.array([[1, 1], [3, 1]]), 2) == pytest.approx(1 - 6 / (2 * 4))
