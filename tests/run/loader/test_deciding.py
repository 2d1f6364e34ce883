"""`reconfigure`: the run goes on as if stopped and resumed with other settings, and each resume and rank knows it."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.run_facts import NOTHING_DECIDED, Decisions
from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.errors import StateError
from savable_pipeline.run.ledger.records import Facts, read_records
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.state_dict import merge_states
from savable_pipeline.run.state.summary import summarize
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.testing import steps_of_ranks
from tests.conftest import write_numbered_shards
from tests.support import deciding_ranks
from tests.support.processes import started_workers
from tests.support.toy_pipelines import toy_pipeline

LANES = 4
OTHERS = [("stop", True), ("pad", False)]  # tails, and whether the items are packed
NAMES = ("a", "b", "text/c", "text/d")


class Ids(sp.TaskEncoder):
    """Items of 1 to 8 tokens; the batch is what it is made of."""

    one_to_one = True

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
) -> custom.Stage:
    """A Blend in a Blend, a buffer, a packer and batches."""
    reader = {
        name: sp.TarShardReader(folder / name, lane, block_size=2, epochs=epochs, exclude=(exclude or {}).get(name))
        for name in "abcd"
    }
    text = sp.Blend({name: reader[name] for name in "cd"}, weights={"c": 1, "d": 2})
    outer = {"a": reader["a"], "b": reader["b"], "text": text}
    samples = sp.ShuffleBuffer(sp.Blend(outer, weights=weights or {"a": 2, "b": 1, "text": 1}), size=6)
    items: custom.ItemStage = sp.Encode(samples, Ids())
    if max_length is not None:
        items = sp.OnlinePacker(items, max_length=max_length, policy=policy, open_packs=3)
    return sp.Batcher(items, size=2)


def run(folder: Path, rank: int = 0, world_size: int = 1, *, settings: Any = None, **how: Any) -> Run:
    kept: dict[str, Any] = {"pipeline": partial(pipeline, folder, **how), "seed": 5, "lanes": LANES}
    return Run(LoaderSettings(**kept, ranks=(rank, world_size), **(settings or {})))


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


def taken(one: Run, plan: Mapping[int, Any], slots: int) -> Iterator[Any]:
    while one.position.slot < slots:
        if one.position.slot in plan:
            assert one.reconfigure(**plan[one.position.slot]) == one.position.slot
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
                if slot in plan and (not slot or ranks[0].position.facts.decisions.since < slot):
                    assert {rank.reconfigure(**plan[slot]) for rank in ranks} == {slot}
                found += [batch for _, batch in sorted((rank.position.own_slot, next(rank)) for rank in ranks)]
            state = merge_states(rank.state_dict() for rank in ranks)
    return found[:slots]


@pytest.mark.parametrize("policy", ["best_fit", "sequential"])
def test_a_replay_on_other_ranks_over_resumes_equals_the_run_that_decided(shards: Path, policy: str) -> None:
    draw = random.Random(policy)
    plan = plan_of(draw, 100, 8)
    expected = straight(shards, plan, 100, policy=policy)
    assert over_ranks(shards, plan, 100, draw, policy=policy) == expected
    assert straight(shards, {}, 30, policy=policy) != expected[:30]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["best_fit", "first_fit", "first_fit_decreasing", "sequential"])
def test_a_thousand_steps_with_fifty_decisions_are_replayed(shards: Path, policy: str) -> None:
    draw = random.Random(policy)
    plan = plan_of(draw, 1000, 50)
    expected = straight(shards, plan, 1000, policy=policy)
    assert over_ranks(shards, plan, 1000, draw, policy=policy) == expected


def test_killed_workers_replay_decisions_and_the_ledger_rebuilds_their_batches(shards: Path, tmp_path: Path) -> None:
    plan = plan_of(random.Random(1), 24, 4)
    expected = straight(shards, plan, 24)
    settings = {"num_workers": 2, "ledger": tmp_path, "workers": sp.Workers(timeout=60.0)}
    with loader(shards, settings=settings) as made:
        for slot, batch in enumerate(expected):
            if slot in plan:
                assert made.reconfigure(**plan[slot]) == slot
            if slot % 9 == 5:
                pids = started_workers(made)
                os.kill(pids[slot % len(pids)], signal.SIGKILL)  # one may not have started again
            assert next(made) == batch
    (file,) = tmp_path.glob("*.ledger")
    noted = [record.facts.decisions for record in read_records(file) if isinstance(record, Facts)]
    assert sorted({each.since for each in noted if each}) == sorted(plan)
    ledger = sp.Ledger(tmp_path)
    assert all(ledger.batch(partial(pipeline, shards), slot=slot) == expected[slot] for slot in range(0, 24, 3))


@pytest.mark.parametrize("at", [0, 6, 21])
def test_decision_equals_a_run_resumed_with_other_settings(shards: Path, tmp_path: Path, at: int) -> None:
    file = tmp_path / "gone"
    file.write_text("".join(f"s{number:06d}\n" for number in range(0, 40, 3)))
    weights = {"a": 1, "b": 5, "text": 1}
    with loader(shards) as one, loader(shards, weights=weights, exclude={"a": str(file)}) as other:
        for _ in range(at):
            next(one)
        other.load_state_dict(one.state_dict(), allow={"weights", "exclude"})
        one.reconfigure(weights=weights, exclude=[key("a", number) for number in range(0, 40, 3)])
        for _ in range(40):
            batch = next(one)
            assert batch == next(other)
            assert not {f"s{number:06d}" for number in range(0, 40, 3)} & set(keys_of(one, "a"))


def keys_of(made: sp.SavableLoader, name: str) -> list[str]:
    """The keys of the samples of a source in the last batch."""
    stages = upstream(made.__savable_run__().local.last_stage)
    (reader,) = [stage for stage in stages if not stage.sources and stage.info.branch == name]
    return [sample.key for sample in made.trace().samples if sample.ref.source in reader.info.origins]


def test_every_resume_has_the_decision_and_a_state_without_any_has_no_byte_of_it(shards: Path) -> None:
    with loader(shards) as one:
        before = one.state_dict()
        assert b"decisions" not in b"".join(value for value in before.values() if isinstance(value, bytes))
        next(one)
        one.reconfigure(weights={"a": 1, "b": 1, "text": 0}, max_length=9)
        one.reconfigure(exclude=["s000001"])
        states, expected = [one.state_dict()], []
        for _ in range(9):
            expected.append(next(one))
            states.append(one.state_dict())
        shown = summarize(states[-1]).settings["decided"]
        assert shown == "from slot 1 on: a=1, b=1, text=0, 4 samples excluded, max_length=9"
        assert shown in repr(one)
    for given, state in enumerate(states):
        with loader(shards) as other:
            other.load_state_dict(torch.load(io_of(state), weights_only=True))
            assert [next(other) for _ in expected[given:]] == expected[given:]
            other.load_state_dict(before)  # of before: as if nothing had been decided
            assert sp_decisions(other) == NOTHING_DECIDED


def io_of(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def sp_decisions(made: sp.SavableLoader) -> Decisions:
    return made.__savable_run__().position.facts.decisions


@pytest.mark.parametrize(
    ("tail", "packed"),
    [("stop", False), ("pad", True), *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)],
)
def test_finite_run_applies_a_decision_in_its_next_epochs(shards: Path, tail: str, packed: bool) -> None:
    how: dict[str, Any] = {"epochs": 1, "max_length": 16 if packed else None, "settings": {"tail": tail}}
    plan = {
        5: {"exclude": ["s000001", *(key("b", number) for number in range(9))]},
        (1 << 40) + 6: {"weights": {"a": 1, "b": 9, "text": 1}},
        2 << 40: {"exclude": [key("text/c", number) for number in range(30)]},
    }
    with loader(shards, **how) as one:
        batches, states = passes(one, plan)
        assert sp_decisions(one).since == 2 << 40 and len(states) > 60
    for given in (0, 7, len(states) // 2, len(states) - 5):
        with loader(shards, **how) as other:
            other.load_state_dict(states[given])
            assert str(passes(other, plan)[0]) == str(batches[given:])


@pytest.mark.parametrize(("world_size", "at"), [(1, 2), (1, 8), (2, 2), (2, 8)])
def test_counted_epoch_yields_the_rest_after_half_of_it_is_excluded(shards: Path, world_size: int, at: int) -> None:

    def plain(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards / "a", lane, epochs=1), Ids()), size=2)

    settings = {"seed": 5, "lanes": LANES, "tail": "pad"}
    with ExitStack() as opened:
        ranks = [
            opened.enter_context(sp.SavableLoader(plain, ranks=(rank, world_size), **settings))
            for rank in range(world_size)
        ]  # type: ignore[arg-type]
        steps = steps_of_ranks(ranks)
        early = [key for _ in range(at // world_size) for batch in next(steps) for key in sources_of(batch)]
        for rank in ranks:
            assert rank.reconfigure(exclude=[f"s{number:06d}" for number in range(0, 47, 2)]) == at
        state = merge_states(rank.state_dict() for rank in ranks)
        rest = [batch for step in steps_of_ranks(ranks) for batch in step]
        with sp.SavableLoader(plain, seed=5, lanes=LANES, tail="pad") as resumed:
            resumed.load_state_dict(state)
            assert str(list(resumed)) == str(rest)
    assert any(batch["valid"].any() for batch in rest[-world_size:])  # it is not longer either
    late = {batch["items"][row]["id"][0] for batch in rest for row in range(2) if batch["valid"][row]}
    assert late == {f"s{number:06d}" for number in range(1, 47, 2)} - set(early)


def passes(made: sp.SavableLoader, plan: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
    """The batches up to the end of the third epoch, and the state before each, as saved just before a decision."""
    found, states, run = [], [made.state_dict()], made.__savable_run__()
    if run.position.next_batch_number in plan:
        assert made.reconfigure(**plan[run.position.next_batch_number]) == run.position.next_batch_number
    while run.position.next_batch_number < 3 << 40:
        for batch in made:
            found.append(batch)
            states.append(made.state_dict())
            if run.position.next_batch_number in plan:
                assert made.reconfigure(**plan[run.position.next_batch_number]) == run.position.next_batch_number
    return found, states[:-1]


def test_lag_does_not_reach_before_a_decision(shards: Path) -> None:
    with loader(shards) as one:
        for _ in range(3):
            next(one)
        one.state_dict(lag=2)
        one.reconfigure(max_length=8)
        with pytest.raises(ValueError, match="can be taken back"):
            one.state_dict(lag=1)
        assert one.trace().slot == 2
        next(one)
        assert one.state_dict(lag=1)["slot"] == 3
        with pytest.raises(ValueError, match="at most 1 batches can be taken back"):
            one.state_dict(lag=2)


def test_packs_started_after_a_decision_have_the_new_length(shards: Path) -> None:
    for policy in ("best_fit", "first_fit_decreasing", "sequential"):
        with loader(shards, policy=policy) as one:
            lengths = [item["length"] for _ in range(30) for item in next(one)["items"]]
            one.reconfigure(max_length=8)
            late = [item["length"] for _ in range(70) for item in next(one)["items"]][80:]
            one.reconfigure(max_length=16)
            last = [item["length"] for _ in range(70) for item in next(one)["items"]][80:]
        assert max(lengths) == 16 and 6 <= max(late) <= 8 and max(last) == 16


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({}, "pass weights="),
        ({"weights": {"a": 1, "b": 1}}, "but text has none"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "no source is called 'c'. The sources are a, b, text, text/c"),
        ({"weights": {"a": 1, "b": "much", "text": 1}}, "must be a number"),
        ({"weights": {"text/c": 0, "text/d": 0}}, "all weights are 0: 'c', 'd'. Set at least one above 0"),
        ({"weights": 3}, "a dict"),
        ({"exclude": "s000001"}, "must be a list: \\['s000001'\\]"),
        ({"exclude": [("c", "s000001")]}, "no source is called 'c'. The sources are 'a', 'b', 'text/c', 'text/d'"),
        ({"exclude": [7]}, "not 7"),
        ({"max_length": 17}, "must be 1 to 16"),
        ({"max_length": 0}, "must be 1 to 16"),
        ({"max_length": True}, "must be 1 to 16"),
    ],
)
def test_invalid_decision_is_an_error_and_changes_nothing(shards: Path, what: Any, says: str) -> None:
    with loader(shards) as one:
        next(one)
        before = one.state_dict()
        with pytest.raises(ValueError, match=says):
            one.reconfigure(**what)
        assert one.state_dict() == before


def test_a_pipeline_without_the_stage_or_with_several_or_a_pass_that_is_repeated_is_an_error(shards: Path) -> None:
    def plain(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.TarShardReader(shards / "a", lane), size=2)

    def two(lane: sp.Lane) -> custom.Stage:
        sources = {
            name: sp.OnlinePacker(sp.Encode(sp.TarShardReader(shards / name, lane), Ids()), max_length=9)
            for name in "ab"
        }
        return sp.Batcher(sp.Blend(sources), size=1)

    def ends(lane: sp.Lane) -> custom.Stage:
        sources = {"a": sp.TarShardReader(shards / "a", lane), "b": sp.TarShardReader(shards / "b", lane, epochs=1)}
        return sp.Batcher(sp.Blend(sources, weights={"a": 1, "b": 1}), size=1)

    for make, what, says in [
        (plain, {"weights": {"a": 1}}, "needs a Blend"),
        (plain, {"max_length": 3}, "This pipeline has none"),
        (plain, {"exclude": [("a", "s000001")]}, "no source is called 'a'. The sources are ''"),
        (two, {"max_length": 3}, "a/OnlinePacker.max_length, b/OnlinePacker.max_length"),
        (ends, {"weights": {"a": 0, "b": 1}}, "would make the run finite"),
    ]:
        with sp.SavableLoader(make, seed=1, lanes=2) as one, pytest.raises(ValueError, match=says):
            one.reconfigure(**what)
    with loader(shards, settings={"on_iter": "restart"}) as one, pytest.raises(ValueError, match="restart"):
        one.reconfigure(max_length=3)
    with loader(shards, policy=by_pairs) as one, pytest.raises(ValueError, match="a policy function"):
        one.reconfigure(max_length=3)


def by_pairs(lengths: list[int]) -> list[list[int]]:
    return [[place] for place in range(len(lengths))]


def test_different_decisions_of_ranks_are_named_when_states_are_merged(shards: Path) -> None:
    def states(*weights: int) -> list[Any]:
        found = []
        for rank, weight in enumerate(weights):
            with run(shards, rank, len(weights)) as one:
                next(one)
                if weight:
                    one.reconfigure(weights={"text/c": 1, "text/d": weight})
                found.append(one.state_dict())
        return found

    merge_states(states(3, 3))
    with pytest.raises(sp.CheckpointMismatchError, match=r"lane 0: .*text/d=3; lane 1: .*text/d=4"):
        merge_states(states(3, 4))
    with pytest.raises(sp.CheckpointMismatchError, match=r"lane 0: .*text/d=3; lane 1: nothing"):
        merge_states(states(3, 0))


def test_settings_passed_after_a_decision_win_with_a_warning(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loader(shards) as one:
        next(one)
        one.reconfigure(weights={"a": 1, "b": 1, "text": 1}, max_length=8, exclude=["s000001"])
        state = one.state_dict()
    weights = {"a": 1, "b": 9, "text": 1}
    with loader(shards, weights=weights) as other:
        other.load_state_dict(state, allow={"weights"})
        decided = sp_decisions(other)
        assert (decided.weights, decided.max_length) == ({}, 8) and len(decided.excluded) == 4
        assert "replace an earlier reconfigure" in caplog.text
        drawn = [(len(keys_of(other, "b")), len(other.trace().samples)) for _ in range(60) if next(other)]
        of_b, of_all = map(sum, zip(*drawn, strict=True))
        assert of_b > of_all / 2
        again = other.state_dict()
    with loader(shards, weights=weights) as other:
        other.load_state_dict(again)
        assert sp_decisions(other) == decided


def test_rows_in_flight_without_exclusions_are_repeated_unchanged(shards: Path) -> None:
    settings = {"acknowledge": True}
    with loader(shards, settings=settings) as one:
        given = [next(one) for _ in range(4)]
        one.reconfigure(weights={"a": 1, "b": 5, "text": 1}, max_length=8)
        next(one)
        one.acknowledge(one.receipts())
        state, following = one.state_dict(), next(one)
    with loader(shards, settings=settings) as other:
        other.load_state_dict(state)
        for batch in given:
            again = next(other)
            assert {**again, "receipts": None} == {**batch, "receipts": None}
            assert torch.equal(again["receipts"], batch["receipts"])
        assert next(other)["items"] == following["items"]


def left_of(given: list[Any], gone: set[str]) -> list[Any]:
    """What is left of batches without these keys: of each row its receipt, and its keys with their drawn numbers."""
    found = []
    for batch in given:
        rows = []
        for receipt, item in zip(batch["receipts"].tolist(), batch["items"], strict=True):
            pairs = [pair for pair in zip(item["id"], item["drawn"], strict=True) if pair[0] not in gone]
            rows += [(receipt, pairs)] if pairs and receipt[0] >= 0 else []
        found += [rows] if rows else []
    return found


@pytest.mark.parametrize(
    ("when", "num_workers", "packed"),
    [("after a resume", 0, False), ("asked for again", 1, True), ("before the save", 0, True)],
)
def test_excluded_sample_in_flight_is_closed_and_not_repeated(
    shards: Path, packed: bool, num_workers: int, when: str
) -> None:
    how: dict[str, Any] = {"max_length": 16 if packed else None}
    settings = {"acknowledge": True, "num_workers": num_workers}
    with loader(shards, **how, settings=settings) as one, loader(shards, **how, settings=settings) as other:
        given = [next(one) for _ in range(6)]
        gone = {given[0]["items"][0]["id"][0], *sources_of(given[3])}
        expected = left_of(given, gone)
        if when == "asked for again":
            for batch in given:
                one.requeue(batch["receipts"])
        closing = one
        if when != "before the save":
            state = one.state_dict()
        if when == "after a resume":
            closing = other
            closing.load_state_dict(state)
        assert closing.reconfigure(exclude=sorted(gone)) == 6
        rows = [row for batch in expected for row in batch]
        assert closing.in_flight().rows == len(rows)
        assert closing.stats()["acknowledged/dropped/can no longer be made"] == 12 - len(rows) > 1
        if when == "before the save":
            other.load_state_dict(one.state_dict())
            closing = other
            assert closing.in_flight().rows == len(rows)
        came = left_of([next(closing) for _ in given], set())  # a batch with nothing left takes no turn: then a new one
        assert [batch for batch in came if batch[0][0][0] < 6] == expected
        assert not gone & {key for batch in came for _, pairs in batch for key, _ in pairs}
        state = closing.state_dict()
    with loader(shards, **how, settings=settings) as last:
        last.load_state_dict(state)
        assert left_of([next(last) for _ in expected], set()) == expected


def test_ledger_numbers_the_rows_of_a_shortened_batch_like_its_receipts(shards: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_length": None, "settings": {"acknowledge": True, "ledger": tmp_path}}
    with loader(shards, **how) as one:
        first = next(one)
        (gone,), (kept,) = (row["id"] for row in first["items"])
        one.reconfigure(exclude=[gone])
        one.requeue(first["receipts"])
        assert next(one)["receipts"].tolist() == [[0, 1]]
        one.acknowledge(one.receipts())
    seen = sp.Ledger(tmp_path).find([gone, kept])
    assert [(each.again, each.outcome) for each in seen[gone] or ()] == [(False, "dropped: can no longer be made")]
    assert [(each.again, each.outcome) for each in seen[kept] or ()] == [(False, "repeated"), (True, "trained")]


def test_excluded_keys_take_eight_bytes_each_in_a_state_and_tiny_weights_are_bounded(shards: Path) -> None:
    with loader(shards) as one:
        one.reconfigure(weights={"a": 3.3124783621789234e-25, "b": 1.0, "text": 0})
        tiny, before = sp_decisions(one).weights[""], one.state_dict()["facts"]
        assert tiny["a"] == 1 and tiny["text"] == 0 and tiny["b"] > (1 << 30) - 9
        one.reconfigure(exclude=[key("a", number) for number in range(40)])
        assert 320 <= len(one.state_dict()["facts"]) - len(before) < 380
        one.reconfigure(weights={"a": 0.7, "b": 0.3, "text": 0})
        assert sp_decisions(one).weights == {"": {"a": 7, "b": 3, "text": 0}}


def test_a_state_with_damaged_decisions_is_rejected(shards: Path) -> None:
    with loader(shards) as one:
        next(one)
        one.reconfigure(exclude=["s000001"])
        state = one.state_dict()
    body = msgspec.msgpack.decode(state["facts"][16:])
    body["decisions"]["excluded"] = {1: b"odd"}
    with loader(shards) as other, pytest.raises(StateError, match="8 bytes each"):
        other.load_state_dict({**state, "facts": forged(body)})


def forged(body: Any) -> bytes:
    packed = msgspec.msgpack.encode(body)
    return b"SAVL" + struct.pack("<HH", STATE, ORDER) + xxh3_64_intdigest(packed).to_bytes(8, "little") + packed


@pytest.mark.parametrize("other", ["from slot 7 on: a=2", "ValueError: decide: pass weights="])
def test_different_decisions_of_communicating_ranks_are_an_immediate_error(shards: Path, other: str) -> None:
    class Talking(Ranks):
        has_group = True

        def gather(self, value: Any) -> list[Any]:
            return [value, (other, 1)]

    with run(shards, 0, 2) as one:
        next(one)
        before = one.state_dict()
        one.ranks = Talking(0, 2, None)
        with pytest.raises(ValueError, match=f"rank 0 from slot 2 on: max_length=7, but rank 1 {other}"):
            one.reconfigure(max_length=7)
        assert one.state_dict() == before


@pytest.mark.landing
def test_different_decisions_of_real_ranks_raise_on_both_and_change_nothing(shards: Path, tmp_path: Path) -> None:
    folder = shards / "a"
    command = ["tests.support.forked_ranks", "tests.support.deciding_ranks", "2", str(folder), str(tmp_path)]
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=root, timeout=120)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(ranks):
        mine, theirs = f"max_length={7 - rank}", f"max_length={6 + rank}"
        other = f"rank {rank} from slot 2 on: {mine}, but rank {1 - rank} from slot 2 on: {theirs}"
        assert other in found["said"][0] and found["said"][1] == 14 and found["slot"] == 38
    assert (
        "rank 0 from slot 26 on: max_length=8, but rank 1 ValueError: reconfigure: max_length must be 1 to 20"
        in ranks[0]["said"][2]
    )
    assert ranks[1]["said"][2].startswith("reconfigure: max_length must be 1 to")
    with sp.SavableLoader(partial(toy_pipeline, str(folder)), **deciding_ranks.SETTINGS) as alone:
        expected = [digest(next(alone)) for _ in range(14)]
        assert alone.reconfigure(max_length=9) == 14
        expected += [digest(next(alone)) for _ in range(24)]
    assert expected == [batch for step in zip(*(rank["batches"] for rank in ranks), strict=True) for batch in step]


def mixed(folder: Path, lane: sp.Lane, *, weights: Any, by: Any = "samples") -> custom.Stage:
    """A Blend of items, by their number or their tokens, in buckets of equal lengths."""
    encoder = Ids()
    items = {name: sp.Encode(sp.TarShardReader(folder / name, lane, block_size=2), encoder) for name in "ab"}
    blend = sp.Blend(items, weights=weights, by=by)
    return custom.BucketBatcher(blend, bounds=[4], max_tokens=24, candidates=4, encoder=encoder)


SCHEDULES: dict[str, dict[str, Any]] = {
    "step": {"weights": sp.Schedule([(0, {"a": 3, "b": 1}), (150, {"b": 1}), (400, {"a": 1})])},
    "scheduled tokens": {"weights": sp.Schedule([(0, {"a": 1}), (900, {"b": 1})], unit="tokens"), "by": "tokens"},
    "tokens": {"weights": {"a": 3, "b": 1}, "by": "tokens"},
}


@pytest.mark.parametrize("name", ["step", "scheduled tokens", "tokens"])
def test_decided_weights_replace_a_schedule_by_tokens_on_other_ranks(shards: Path, name: str) -> None:
    how, decided = SCHEDULES[name], {"weights": {"a": 1, "b": 4}}
    made = partial(mixed, shards, **how)
    with loader_of(made) as one:
        early = [next(one) for _ in range(10)]
        before = one.state_dict()
        assert one.reconfigure(**decided) == 10
        state, late, drawn = one.state_dict(), [], {"a": 0, "b": 0}
        for number in range(80):
            late.append(next(one))
            for source, keys in ((source, keys_of(one, source)) for source in drawn if number >= 40):
                drawn[source] += sum(1 + int(key[1:]) % 8 for key in keys) if "by" in how else len(keys)
        assert 3.2 < drawn["b"] / drawn["a"] < 5
    with loader_of(made) as kept:
        assert [next(kept) for _ in range(10)] == early and [next(kept) for _ in late] != late
    with loader_of(partial(mixed, shards, **{**how, **decided})) as other:
        other.load_state_dict(before, allow={"weights"} if name == "tokens" else {"weights", "Blend.schedule"})
        assert [next(other) for _ in late] == late
    ranks = [loader_of(made, ranks=(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [next(ranks[slot % 2]) for slot in range(len(late))] == late


def loader_of(made: Any, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(made, seed=5, lanes=LANES, **settings)
