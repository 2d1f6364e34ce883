"""`Schedule`: weights that change by what was drawn, exactly, in every lane, for every number of ranks."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.blending.schedule import TargetCounts
from savable_pipeline.testing import assert_exact_resume

NAMES = ["a", "b", "c"]


def random_schedule(draw: random.Random, shape: Any, last: int = 3000) -> sp.Schedule:
    starts = [0, *sorted(draw.sample(range(1, last), draw.randint(0, 4)))]
    points = [(start, {name: draw.choice([0, 1, 2, 0.3, 7]) for name in NAMES} | {"a": 1}) for start in starts]
    points[-1][1].update(b=1, c=2)
    return sp.Schedule(points, shape=shape)


def integral(schedule: sp.Schedule, count: int) -> list[Fraction]:
    """What each source should have given by a count, point by point."""
    ends = [*schedule.starts[1:], 1 << 60]
    shares = [[Fraction(w.get(name, 0), sum(w.values())) for name in NAMES] for w in schedule.weights]
    targets = [Fraction(0)] * 3
    for i, (start, end) in enumerate(zip(schedule.starts, ends, strict=True)):
        length, x = end - start, max(0, min(count, end) - start)
        following = shares[i + 1] if schedule.shape == "linear" and i + 1 < len(shares) else shares[i]
        for j in range(3):
            targets[j] += shares[i][j] * x + (following[j] - shares[i][j]) * Fraction(x * x, 2 * length)
    return targets


@pytest.mark.parametrize("shape", ["step", "linear"])
def test_target_counts_are_the_integral_of_the_weights(shape: Any) -> None:
    draw = random.Random(1)
    for _ in range(25):
        schedule = random_schedule(draw, shape)
        targets = TargetCounts(schedule, NAMES)
        for count in [0, 1, 5000, *(draw.randrange(4000) for _ in range(6))]:
            assert [Fraction(due, targets.unit) for due in targets.at(count)] == integral(schedule, count)


def blend(shards: str, lane: sp.Lane, schedule: Any, by: Any = "samples") -> custom.Stage:
    sources: Any = {name: sp.TarShardReader(shards, lane) for name in NAMES}
    if by == "tokens":
        sources = {name: sp.Encode(source, LENGTHS) for name, source in sources.items()}
    return sp.Blend(sources, weights=schedule, by=by)


class Lengths(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"], "source": sample.source, "length": 1 + rng.integers(9)}

    def length(self, item: Any) -> int:
        return int(item["length"])


LENGTHS = Lengths()


def test_source_is_not_drawn_from_while_its_weight_is_0(make_shards: Any) -> None:
    shards = str(make_shards([50]))
    points = [(0, {"a": 1}), (160, {"b": 3, "c": 1}), (320, {"c": 1})]
    stage = blend(shards, sp.Lane(1, 2, 5), sp.Schedule(points))
    drawn = [next(stage).source for _ in range(200)]
    assert set(drawn[:80]) == {"a"} and set(drawn[80:160]) == {"b", "c"} and set(drawn[160:]) == {"c"}


def test_schedule_by_tokens_counts_tokens(make_shards: Any) -> None:
    points = [(0, {"a": 3, "b": 1}), (4000, {"b": 1, "c": 3})]
    stage = blend(str(make_shards([50, 60])), sp.Lane(1, 2, 5), sp.Schedule(points, unit="tokens"), "tokens")
    tokens = dict.fromkeys(NAMES, 0)
    while sum(tokens.values()) < 1950:
        item = next(stage)
        tokens[item["source"]] += item["length"]
    assert tokens["c"] == 0 and abs(tokens["a"] - 3 * tokens["b"]) < 80
    before = dict(tokens)
    while sum(tokens.values()) < 3900:
        item = next(stage)
        tokens[item["source"]] += item["length"]
    assert tokens["a"] - before["a"] < 40 and abs(tokens["c"] - 3 * (tokens["b"] - before["b"])) < 80


def pipeline(shards: str, lane: sp.Lane, *, schedule: Any, by: Any = "samples") -> custom.Stage:
    stage: Any = blend(shards, lane, schedule, by)
    if by == "samples":
        stage = sp.Encode(sp.ShuffleBuffer(stage, size=9), LENGTHS)
    return sp.Batcher(stage, size=3, encoder=LENGTHS)


@pytest.mark.parametrize(("by", "shape"), [("samples", "linear"), ("tokens", "step")])
def test_schedule_resumes_exactly_before_during_and_after_a_change(make_shards: Any, by: Any, shape: Any) -> None:
    points = [(0, {"a": 3, "b": 1}), (20, {"b": 1, "c": 3}), (45, {"a": 1, "c": 1})]
    if by == "tokens":
        points = [(5 * start, weights) for start, weights in points]
    schedule = sp.Schedule(points, unit=by, shape=shape)
    settings: dict[str, Any] = {"lanes": 6, "steps": 18, "world_sizes": [1, 2, 3], "after": 1, "chains": 1}
    assert_exact_resume(partial(pipeline, str(make_shards([50, 60])), schedule=schedule, by=by), **settings)


def test_schedule_continues_after_a_source_has_ended(make_shards: Any) -> None:
    shards = str(make_shards([16]))

    def build(lane: sp.Lane) -> custom.Stage:
        sources = {name: sp.TarShardReader(shards, lane, epochs=1 if name == "b" else None) for name in NAMES}
        points = [(0, {"a": 1, "b": 1}), (20, {"b": 1, "c": 1}), (66, {"a": 1, "b": 1, "c": 2})]
        return sp.Batcher(sp.Blend(sources, weights=sp.Schedule(points, shape="linear")), size=2)

    loader = sp.SavableLoader(build, seed=0, lanes=2)
    given = [sample.source for _, batch in zip(range(28), loader, strict=False) for sample in batch]
    assert given.count("b") == 16 and "b" not in given[-10:]
    assert_exact_resume(build, lanes=2, steps=28, world_sizes=[1, 2], chains=1, after=2)


def test_past_points_need_no_weight_for_remaining_sources(make_shards: Any) -> None:
    shards = str(make_shards([100]))

    def blended(points: Any) -> Any:
        epochs, lane = {"a": 1, "b": None}, sp.Lane()
        sources = {name: sp.TarShardReader(shards, lane, epochs=epochs[name]) for name in "ab"}
        return sp.Blend(sources, weights=sp.Schedule(points))

    stage = blended([(0, {"a": 1}), (50, {"a": 1, "b": 1})])
    drawn = [next(stage).source for _ in range(300)]
    assert drawn.count("a") == 100 and set(drawn[-140:]) == {"b"}
    stage = blended([(0, {"b": 1}), (10, {"a": 1}), (900, {"b": 1})])
    with pytest.raises(ValueError, match=r"at 10 all of b have weight 0"):
        [next(stage) for _ in range(300)]


def test_schedule_is_changed_from_the_current_position_on(make_shards: Any) -> None:
    shards = str(make_shards([50, 60]))

    def begun(weights: Any) -> sp.SavableLoader:
        return sp.SavableLoader(partial(pipeline, shards, schedule=weights), seed=3, lanes=2)

    constant = begun({"a": 1, "b": 1, "c": 1})
    for _ in range(20):
        next(constant)  # 60 items, and what the buffers of the lanes hold
    later = begun(sp.Schedule([(0, {"a": 1, "b": 1, "c": 1}), (200, {"b": 1}), (260, {"c": 1})]))
    with pytest.raises(sp.CheckpointMismatchError, match=r"schedule.*weights"):
        later.load_state_dict(constant.state_dict())
    later.load_state_dict(constant.state_dict(), allow={"weights"})
    drawn = "".join(item for _, batch in zip(range(100), later, strict=False) for item in batch["source"])
    assert set(drawn[-60:]) == {"c"}  # of the 118 that were drawn after item 260
    assert drawn.count("a") in range(40, 54) and drawn.count("b") in range(100, 114)  # 78 had been drawn, 18 are held


class FailsOnce(Lengths):
    """Its `length` fails for the first item of source b."""

    failed = False

    def length(self, item: Any) -> int:
        if item["source"] == "b" and not FailsOnce.failed:
            FailsOnce.failed = True
            raise ValueError("not now")
        return super().length(item)


def test_buffered_item_of_a_disabled_source_waits_until_it_is_enabled(make_shards: Any) -> None:
    """It was taken, and an error kept it from being given."""
    shards, encoder = str(make_shards([50])), FailsOnce()

    def blended(weights: dict[str, int]) -> Any:
        lane = sp.Lane(seed=2)
        return sp.Blend(
            {n: sp.Encode(sp.TarShardReader(shards, lane), encoder) for n in "ab"}, weights=weights, by="tokens"
        )

    stage = blended({"a": 1, "b": 1})
    with pytest.raises(sp.EncodeError, match="not now"):
        [next(stage) for _ in range(100)]
    without = blended({"a": 1, "b": 0})
    without.restore_state(stage.save_state())
    assert {next(without)["source"] for _ in range(20)} == {"a"}
    (kept,) = stage.save_state()["ahead"]["b"]
    after = blended({"a": 1, "b": 1})
    after.restore_state(without.save_state())
    refs = []
    while len(refs) < 20:
        next(after)
        refs.append(after.ref)
    assert refs.count(kept[0]) == 1


def test_wrong_schedules_are_rejected(make_shards: Any) -> None:
    for points in ([], [(1, {"a": 1})], [(0, {"a": 1}), (0, {"a": 2})], [(0, {"a": 1}), (0.5, {"a": 1})]):
        with pytest.raises(ValueError, match="Schedule: "):
            sp.Schedule(points)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight"):
        sp.Schedule([(0, {"a": 0})])
    with pytest.raises(ValueError, match="unit must be one of samples, tokens"):
        sp.Schedule([(0, {"a": 1})], unit="bytes")  # type: ignore[arg-type]
    shards = str(make_shards([20]))
    lane = sp.Lane()
    sources = {name: sp.TarShardReader(shards, lane, epochs=1) for name in "ab"}
    with pytest.raises(ValueError, match=r"but b has none"):
        sp.Blend(sources, weights=sp.Schedule([(0, {"a": 1})]))
    with pytest.raises(ValueError, match="needs by='tokens'"):
        sp.Blend(sources, weights=sp.Schedule([(0, {"a": 1, "b": 1})], unit="tokens"))
    with pytest.raises(ValueError, match="needs an endless source"):
        sp.Blend(sources, weights=sp.Schedule([(0, {"a": 1, "b": 1})]))


class Texts(sp.TaskEncoder):
    """Texts of 1 to 7 tokens, and the source of each pack."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.source, 1 + sample.json()["id"] % 7

    def length(self, item: Any) -> int:
        return int(item[1])

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items[0][0]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def test_a_blend_of_packs_changes_its_weights_at_the_step_that_the_page_computes(make_shards: Any) -> None:
    read, encoder, step, rows = (
        sp.read(str(make_shards([60]))),
        Texts(),
        6,
        8 * 2,
    )  # two ranks, four lanes: 6 is a multiple of 2
    phases = sp.Schedule([(0, {"web": 1}), (step * rows, {"books": 1})])
    packed = {name: read.shuffle(30).encode(encoder).pack(16) for name in ("web", "books")}
    with sp.SavableLoader(sp.blend(packed, weights=phases).batch(8), seed=7, lanes=4) as loader:
        given = [set(next(loader)) for _ in range(2 * 10)]
    assert given == [{"web"}] * 2 * step + [{"books"}] * 2 * 4
