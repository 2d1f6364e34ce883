"""What `savable plan` says is what a run does: steps, tail, bytes, lanes; and it encodes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.tools.plan.report import advice, lanes_rows, sections, verdict
from savable_pipeline.tools.plan.run_plan import plan_run
from tests.conftest import MakeShards
from tests.support.toy_server import serving


class Numbers(sp.TaskEncoder):
    """Encoder to one item: the number of a sample, and its source."""

    global_rng = False
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> dict[str, int]:
        return {"id": sample.json()["id"]}


class AnyNumber(Numbers):
    """Encoder that may return any number of items for a sample."""

    one_to_one = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        raise AssertionError("a plan encodes nothing")

    def length(self, item: Any) -> int:
        return 1

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def _numbered(folder: Path, size: int, **reading: Any) -> Callable[[sp.Lane], custom.Stage]:
    return lambda lane: sp.Batcher(
        sp.Encode(sp.TarShardReader(folder, lane, epochs=1, **reading), Numbers()), size=size
    )


def _epoch(settings: LoaderSettings, ranks: int) -> list[list[Any]]:
    """Return the batches of an epoch for each rank. One rank votes for all, because their lanes are alike."""
    given = []
    for rank in range(ranks):
        with Run(replace(settings, ranks=(rank, ranks)), vote_function=lambda vote: vote) as run:
            given.append(list(iter(run)))
    return given


@pytest.mark.parametrize("tail", ["stop", "pad"])
@pytest.mark.parametrize(("size", "lanes", "ranks"), [(3, 8, 4), (4, 6, 6), (7, 12, 3)])
def test_counted_steps_and_tail_equal_a_real_epoch(
    make_shards: MakeShards, tail: Any, size: int, lanes: int, ranks: int
) -> None:
    settings = LoaderSettings(_numbered(make_shards([101, 57, 80]), size), seed=5, lanes=lanes, tail=tail)
    plan = plan_run(settings, ranks=ranks)
    given = _epoch(settings, ranks)
    assert {len(batches) for batches in given} == {plan.steps.steps}
    assert plan.steps.how == "counted"
    valid = [batch.get("valid", np.ones(len(batch["id"]), bool)) for batches in given for batch in batches]
    rows, real = sum(map(len, valid)), sum(int(each.sum()) for each in valid)
    assert plan.steps.unused_samples == 238 - real
    assert plan.steps.filler_rows == rows - real


@pytest.mark.parametrize("epochs", [1, None])
def test_steps_of_an_encoder_that_may_skip_assume_one_item_per_sample(
    make_shards: MakeShards, epochs: int | None
) -> None:
    folder = make_shards([101, 57, 80])

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(folder, lane, epochs=epochs), AnyNumber()), size=3)

    plan = plan_run(LoaderSettings(pipeline, seed=5, lanes=8), ranks=4)
    assert plan.steps.how == "one item a sample"
    counted = plan_run(LoaderSettings(_numbered(folder, 3), seed=5, lanes=8), ranks=4).steps
    assert plan.steps.steps == (238 / 3 / 4 if epochs is None else counted.steps)
    assert plan.steps.unused_samples == (0 if epochs is None else counted.unused_samples)
    slots = plan_run(LoaderSettings(pipeline, seed=5, lanes=8, epoch_slots=40), ranks=4) if epochs is None else None
    assert slots is None or (slots.steps.steps, slots.steps.how) == (10, "counted")


def test_steps_that_depend_on_lengths_are_unknown(make_shards: MakeShards) -> None:
    folder = make_shards([64])

    def packed(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(
            sp.OnlinePacker(sp.Encode(sp.TarShardReader(folder, lane), AnyNumber()), max_length=9), size=2
        )

    def bucketed(lane: sp.Lane) -> custom.Stage:
        return custom.BucketBatcher(sp.Encode(sp.TarShardReader(folder, lane), AnyNumber()), bounds=[9], size=2)

    for pipeline in (packed, bucketed):
        plan = plan_run(LoaderSettings(pipeline, seed=5, lanes=4), ranks=2)
        assert "steps" not in {section.title for section in sections(plan)}
        assert verdict(plan).endswith("4 lanes: the steps depend on lengths, so see loader.stats() of a short run")
        assert lanes_rows(plan)[0] == ("lanes", "ranks", "workers per rank")
        assert plan.memory.limit == 1 << 30 if pipeline is packed else plan.memory.limit is None


def test_lanes_that_the_ranks_do_not_divide_are_named_and_the_next_are_planned(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([900]), 2), seed=5, lanes=96)
    plan = plan_run(settings, ranks=64, nodes=8)
    assert plan.planned_lanes == 128
    assert verdict(plan).endswith(": 64 ranks do not divide its 96 lanes. This plan is for lanes=128.")
    assert [(each.lanes, each.fits) for each in plan.choices][:3] == [(64, True), (96, False), (128, True)]
    for each in plan.choices:
        for world in each.worlds:
            replace(settings, lanes=each.lanes, ranks=(0, world)).find_ranks()  # raises where it does not serve


def test_suggested_lanes_do_not_drop_more_of_an_epoch(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([200]), 2), seed=5, lanes=32)
    plan = plan_run(settings, ranks=4)
    left = {each.lanes: each.unused_share for each in plan.choices}
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


def test_plan_explains_suggested_lanes_and_lists_the_planned_ones(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([210]), 1), seed=5, lanes=3, num_workers=2)
    plan = plan_run(settings, ranks=3)
    assert any("lets a rank have" in line and "though" not in line for line in advice(plan))
    settings = LoaderSettings(_numbered(make_shards([200]), 2), seed=5, lanes=98)
    plan = plan_run(settings, ranks=5)
    assert plan.planned_lanes == 100 and 100 in [choice.lanes for choice in plan.choices]
    assert plan.better_lanes == 100 and not advice(plan)


@pytest.mark.parametrize("cache_bytes", [10**8, 10**6])
def test_node_downloads_the_planned_bytes(
    make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    sp.TarShardReader(make_shards([100] * 4, text="t" * 4000), sp.Lane())  # makes the index
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(cache_bytes))
    with serving(tmp_path) as server:
        url = f"{server.url}/shards/"

        def pipeline(lane: sp.Lane) -> custom.Stage:
            return sp.Batcher(sp.Encode(sp.TarShardReader(url, lane, epochs=1), Numbers()), size=5)

        settings = LoaderSettings(pipeline, seed=5, lanes=8)
        monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "planning"))
        (source,) = plan_run(settings, ranks=4, nodes=4).sources
        monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "node"))
        server.ranges.clear()
        with Run(replace(settings, ranks=(0, 4)), vote_function=lambda vote: vote) as node:
            assert len(list(iter(node))) == 20
        fetched = server.sent()
    assert source.remote and source.samples == 400
    assert source.node_bytes == pytest.approx(source.bytes / 4)
    planned = source.first_pass if source.whole_cache <= cache_bytes else source.node_bytes
    assert planned == pytest.approx(fetched, rel=0.1)
    assert 0 < source.least_cache <= source.node_bytes / 0.75


def test_a_plan_downloads_no_sample(make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sp.TarShardReader(make_shards([200] * 4, text="t" * 4000), sp.Lane())  # makes the index
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path) as server:
        url = f"{server.url}/shards/"

        def pipeline(lane: sp.Lane) -> custom.Stage:
            return sp.Batcher(sp.Encode(sp.TarShardReader(url, lane, epochs=1), Numbers()), size=5)

        plan_run(LoaderSettings(pipeline, seed=5, lanes=8), ranks=4, nodes=4)
        assert server.sent() == 0  # of the shards


def test_batches_of_samples_and_of_a_blend_are_planned(make_shards: MakeShards) -> None:
    one, two = make_shards([60], "one"), make_shards([40], "two")

    def pipeline(lane: sp.Lane) -> custom.Stage:
        readers = {name: sp.TarShardReader(folder, lane) for name, folder in [("one", one), ("two", two)]}
        return sp.Batcher(sp.Blend(readers, weights={"one": 1, "two": 1}), size=4)

    plan = plan_run(LoaderSettings(pipeline, seed=5, lanes=2), ranks=2)
    assert [source.name for source in plan.sources] == ["one", "two"]
    assert plan.steps.steps == pytest.approx(100 / 4 / 2)


def test_more_nodes_than_divide_the_ranks_are_rejected(make_shards: MakeShards) -> None:
    settings = LoaderSettings(_numbered(make_shards([9]), 2), seed=5, lanes=8)
    for ranks, nodes in ((8, 3), (0, 1), (8, 0)):
        with pytest.raises(ValueError, match="--nodes must divide --ranks"):
            plan_run(settings, ranks=ranks, nodes=nodes)
