"""Blend: what comes from where, sources that end, refs that name their source, and what may change at a restore."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT, tag_of, untagged
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_numbered_shards
from tests.support.draws import few_examples
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_dataset import NumberDataset, dataset_key, drain, index_epoch_pairs, take_refs


def make_readers(sizes: dict[str, int], lane: sp.Lane | None = None, **how: Any) -> dict[str, custom.Stage]:
    """Readers of datasets that are only numbers, of so many samples each."""
    shared: dict[Any, Any] = {dataset_key(name): NumberDataset([size]) for name, size in sizes.items()}
    lane = lane or sp.Lane(worker=WorkerContext(shared=shared))
    lane.worker.shared.update(shared)
    return {name: sp.TarShardReader(name, lane, **how) for name in sizes}


def tag(name: str) -> int:
    return 1 + derive_key("branch", name) % 32767


def named(refs: list[tuple[int, int]], names: list[str]) -> list[str]:
    """Which of some sources each ref is of."""
    by_tag = {tag(name): name for name in names}
    return [by_tag[tag_of(index)] for index, _ in refs]


def test_each_source_has_its_weight_and_its_own_order() -> None:
    readers = make_readers({"a": 100, "b": 50}, shuffle=False)
    refs = take_refs(sp.Blend(readers, weights={"a": 3, "b": 1}), 40)
    names = named(refs, ["a", "b"])
    assert Counter(names) == {"a": 30, "b": 10}
    of_b = [untagged(index) for (index, _), name in zip(refs, names, strict=True) if name == "b"]
    assert of_b == list(range(10))


def test_weights_that_name_no_source_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"weights must be a dict by the names of the sources, not \[3, 1\]"):
        sp.Blend(make_readers({"a": 4, "b": 4}), weights=[3, 1])  # type: ignore[arg-type]


def test_turns_of_an_ended_source_go_to_the_others() -> None:
    readers = make_readers({"a": 4, "b": 20, "c": 10}, epochs=1)
    names = named(drain(sp.Blend(readers, weights={"a": 2, "b": 1, "c": 1})), ["a", "b", "c"])
    assert Counter(names) == {"a": 4, "b": 20, "c": 10}
    assert Counter(names[8:24]) == {"b": 8, "c": 8}


def test_blend_can_stop_when_its_first_source_ends() -> None:
    readers = make_readers({"a": 4, "b": 20}, epochs=1)
    stage = sp.Blend(readers, weights={"a": 1, "b": 1}, until="first")
    names = named(drain(stage), ["a", "b"])
    assert 8 <= len(names) <= 9
    assert not len(stage.take(5))


def test_a_source_may_have_more_epochs_than_another() -> None:
    lane = sp.Lane()
    readers = {**make_readers({"a": 5}, lane, epochs=3), **make_readers({"b": 15}, lane, epochs=1)}
    assert Counter(named(drain(sp.Blend(readers, weights={"a": 1, "b": 1})), ["a", "b"])) == {"a": 15, "b": 15}


def test_blend_is_endless_if_a_source_is_endless() -> None:
    lane = sp.Lane()
    readers = {**make_readers({"a": 5}, lane), **make_readers({"b": 5}, lane, epochs=1)}
    assert sp.Blend(readers, weights={"a": 1, "b": 1}).info.endless
    assert not sp.Blend(readers, weights={"a": 1, "b": 1}, until="first").info.endless


class Draws(sp.TaskEncoder):
    """An item is (id, a random number); its length is the id plus one."""

    global_rng = False

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], rng.integers(10**9)

    def length(self, item: Any) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError("for now")
        return int(item[0]) + 1

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [*items, rng.integers(10**9)]


@pytest.fixture
def shards(make_shards: Any) -> Path:
    folder: Path = make_shards([30])
    return folder


def test_the_same_shards_under_two_names_are_two_sources(shards: Path) -> None:
    lane = sp.Lane()
    readers = {name: sp.TarShardReader(shards, lane) for name in "ab"}
    items = sp.Encode(sp.Blend(readers, weights={"a": 1, "b": 1}, stride=4), Draws())
    drawn: dict[int, list[int]] = {}
    order: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(60):  # an epoch of each
        number, random = next(items)
        drawn.setdefault(number, []).append(random)
        order["a" if tag_of(items.ref[0]) == tag("a") else "b"].append(number)
    assert all(len(set(randoms)) == 2 for randoms in drawn.values())
    assert sorted(order["a"]) == sorted(order["b"]) == list(range(30))
    assert order["a"] != order["b"]


def test_random_numbers_of_a_sample_depend_only_on_its_source(shards: Path) -> None:
    def items_of(names: str, weights: dict[str, float]) -> dict[int, int]:
        lane = sp.Lane()
        stage = sp.Blend({name: sp.TarShardReader(shards, lane) for name in names}, weights=weights)
        items, found = sp.Encode(stage, Draws()), {}
        while len(found) < 30:
            number, drawn = next(items)
            if tag_of(items.ref[0]) == tag("b") and items.ref[1] == 0:
                found[number] = drawn
        return found

    assert items_of("ab", {"a": 1, "b": 1}) == items_of("bcd", {"b": 0.1, "c": 3, "d": 2})


def test_refs_name_their_source_in_nested_blends(shards: Path) -> None:
    lane = sp.Lane()
    inner = sp.Blend({name: sp.TarShardReader(shards, lane) for name in "ab"}, weights={"a": 1, "b": 1})
    outer = sp.Blend({"x": inner, "c": sp.TarShardReader(shards, lane)}, weights={"x": 2, "c": 1})
    for _ in range(12):
        sample = next(outer)
        again = outer.fetch(outer.ref)
        assert (again.ref, again.json()) == (sample.ref, sample.json()) == (outer.fetch(sample.ref).ref, sample.json())
        assert 0 <= sample.ref.index < 30
    assert outer.info.tags == {tag("x/a"), tag("x/b"), tag("c")}
    with pytest.raises(sp.CheckpointMismatchError, match="none of the sources"):
        outer.fetch(custom.Ref(1, 0, 0))
    with pytest.raises(sp.CheckpointMismatchError, match="Restore it"):
        outer.fetch((5 << TAG_SHIFT, 0, 0))


def branches(shards: Path, lane: sp.Lane, *, by: Any = "samples", encoder: sp.TaskEncoder | None = None) -> sp.Blend:
    stages: dict[str, custom.Stage] = {}
    for name in "ab":
        samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=5)
        stages[name] = sp.Encode(samples, encoder or Draws())
    return sp.Blend(stages, weights={"a": 1, "b": 3}, by=by)


def test_branches_may_have_their_own_encoders(shards: Path) -> None:
    stage = branches(shards, sp.Lane())
    with pytest.raises(sp.EncodeError, match="Choose one of them with encoder="):
        next(sp.Batcher(stage, size=2))
    with pytest.raises(ValueError, match=r"samples \(custom.SampleStage\), not Blend, which yields items"):
        sp.Encode(stage, Draws())
    assert len(next(sp.Batcher(stage, size=2, encoder=Draws()))) == 3
    one = Draws()
    assert branches(shards, sp.Lane(), encoder=one).info.encoder is one


def test_by_tokens_the_weights_apply_to_tokens(shards: Path) -> None:
    stage = branches(shards, sp.Lane(), by="tokens")
    tokens: Counter[int] = Counter()
    for _ in range(400):
        number, _ = next(stage)
        tokens[tag_of(stage.ref[0])] += number + 1
        assert abs(4 * tokens[tag("a")] - tokens.total()) <= 4 * 2 * 30


@pytest.mark.parametrize("restore", [False, True])
def test_item_whose_length_raises_is_retried(shards: Path, restore: bool) -> None:
    expected = [next(stage) for stage in [branches(shards, sp.Lane(), by="tokens")] for _ in range(20)]
    encoder = Draws(failures=3)
    stage, items, errors = branches(shards, sp.Lane(), by="tokens", encoder=encoder), [], 0
    while len(items) < 20:
        try:
            items.append(next(stage))
        except sp.EncodeError as error:
            errors += 1
            assert "stage Blend, source" in str(error)
            if restore:
                state, stage = stage.save_state(), branches(shards, sp.Lane(), by="tokens", encoder=encoder)
                stage.restore_state(state)
    assert errors == 3
    assert items == expected


@pytest.mark.parametrize(("length", "packed"), [(0, False), (-3, False), (0.5, False), (0, True)])
def test_by_tokens_a_length_below_one_is_an_error(shards: Path, length: Any, packed: bool) -> None:
    class Empty(Draws):
        def length(self, item: Any) -> Any:
            return length

        def pack(self, items: list[Any], rng: sp.Rng) -> Any:
            return items[0]

    def source() -> Any:
        items = sp.Encode(sp.TarShardReader(shards, lane), Empty())
        return custom.ItemPacker(items, size=3, select=lambda items, rng: [items]) if packed else items

    lane = sp.Lane()
    stage = sp.Blend({"a": source(), "b": source()}, weights={"a": 1, "b": 1}, by="tokens")
    with pytest.raises(
        sp.EncodeError, match=r"an item of '[ab]' has .* tokens|Empty.length failed: TypeError"
    ) as caught:
        next(stage)
    assert length == 0.5 or "sample 's0000" in str(caught.value)


def test_refs_drawn_ahead_are_prefetched_after_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> sp.Blend:
        return sp.Blend(make_readers({"a": 40, "b": 2}, epochs=1), weights={"a": 1, "b": 1})

    stage = make()
    stage.take(30)  # b ends before that, and some of a that were to follow are not given
    state, again = stage.save_state(), make()
    ahead = index_epoch_pairs(np.frombuffer(state["ahead"]["a"], REF))
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(again.sources[0], "prefetch", lambda refs: announced.extend(index_epoch_pairs(refs)))
    again.restore_state(state)
    assert ahead == announced != []


# Settings.


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"weights": {"a": 1}}, "but b has none"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "no source for 'c'"),
        ({"weights": {"a": 1, "b": -1}}, "the weight of 'b' must be at least 0, not -1"),
        ({"weights": {"a": 0, "b": 0}}, "all weights are 0"),
        ({"weights": None, "by": "tokens"}, 'by="tokens" needs weights'),
        ({"by": "bytes"}, "by must be one of"),
        ({"by": "tokens"}, "Blend after Encode"),
        ({"until": "last"}, "until must be one of"),
        ({"stride": 0}, "stride must be at least 1"),
    ],
)
def test_wrong_settings_are_rejected(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError) as caught:
        sp.Blend(make_readers({"a": 3, "b": 3}), **{"weights": {"a": 1, "b": 1}, **how})
    assert what in str(caught.value)


def test_wrong_sources_are_rejected(shards: Path) -> None:
    readers = make_readers({"a": 3, "b": 3})
    for sources, what in [
        ({}, "at least one"),
        ({"a/b": readers["a"]}, "without / and #"),
        ({"a": 3}, "must be a stage, not int"),
        ({"a": readers["a"], "b": make_readers({"b": 3})["b"]}, "the same lane"),
    ]:
        with pytest.raises(ValueError, match=what):
            sp.Blend(sources, weights=dict.fromkeys(sources, 1))  # type: ignore[arg-type]
    lane = sp.Lane()
    mixed = {"a": sp.TarShardReader(shards, lane), "b": sp.Encode(sp.TarShardReader(shards, lane), Draws())}
    with pytest.raises(ValueError, match="all sources must have samples, or all items"):
        sp.Blend(mixed, weights={"a": 1, "b": 1})


# The name of a sample's source.


class Sources(sp.TaskEncoder):
    """The name of the source of a sample, beside its number."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.source, sample.json()["id"]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def with_sources(shards: str, lane: sp.Lane) -> custom.Stage:
    """The same shards under three names, one of them in a nested Blend."""
    readers = {name: sp.TarShardReader(shards, lane) for name in "abc"}
    inner = sp.Blend({name: readers[name] for name in "bc"}, weights={"b": 1, "c": 1})
    samples = sp.ShuffleBuffer(sp.Blend({"a": readers["a"], "rest": inner}, weights={"a": 2, "rest": 2}), size=5)
    return sp.Batcher(sp.Encode(samples, Sources()), size=8)


def test_sample_has_the_name_of_its_source_also_when_rebuilt(shards: Path) -> None:
    stage = with_sources(str(shards), sp.Lane(seed=3))
    batches = [next(stage) for _ in range(6)]
    counted = Counter(name for batch in batches for name, _ in batch)
    assert counted.keys() == {"a", "rest/b", "rest/c"} and 20 <= counted["a"] <= 28
    assert with_sources(str(shards), sp.Lane(seed=3)).fetch(stage.ref) == batches[-1]
    assert_exact_resume(partial(with_sources, str(shards)), lanes=4, steps=8, world_sizes=(1, 2), chains=1, after=2)


def test_source_without_blend_has_no_name_and_pickled_samples_have_theirs(shards: Path) -> None:
    lane = sp.Lane()
    assert next(sp.TarShardReader(shards, lane)).source == ""
    sample = next(sp.Blend({"web": sp.TarShardReader(shards, lane)}))
    assert pickle.loads(pickle.dumps(sample)).source == sample.source == "web"


# Weights that are left out, or 0.


def test_without_weights_sources_are_weighted_by_size() -> None:
    stage = sp.Blend(make_readers({"a": 30, "b": 90}, shuffle=False))
    assert stage.settings()["weights"] == {"a": 1, "b": 3}
    assert Counter(named(take_refs(stage, 80), ["a", "b"])) == {"a": 20, "b": 60}
    assert drain(sp.Blend(make_readers({"a": 5, "b": 9}, epochs=1), weights=None)) == drain(
        sp.Blend(make_readers({"a": 5, "b": 9}, epochs=1), weights={"a": 5, "b": 9})
    )


def test_source_of_weight_0_does_not_change_the_others() -> None:
    sizes = {"a": 9, "b": 9, "c": 9}
    for lane in [sp.Lane(), sp.Lane(index=3, count=8)]:
        readers = make_readers(sizes, lane)
        without = {name: readers[name] for name in "ac"}
        expected = take_refs(sp.Blend(without, weights={"a": 2, "c": 1}), 50)
        assert take_refs(sp.Blend(make_readers(sizes, lane), weights={"a": 2, "b": 0, "c": 1}), 50) == expected


@pytest.mark.parametrize("until", ["all", "first"])
def test_source_that_is_off_does_not_end_the_blend(until: Any) -> None:
    finite, endless = make_readers({"a": 4}, epochs=1), make_readers({"b": 4})
    lane = finite["a"].lane
    lane.worker.shared.update(endless["b"].lane.worker.shared)
    readers = {**finite, "b": sp.TarShardReader("b", lane)}
    stage = sp.Blend(readers, weights={"a": 1, "b": 0}, until=until)
    assert not stage.info.endless
    assert len(drain(stage)) == 4


def test_source_turned_off_and_on_continues_at_its_position() -> None:
    state, of_b = None, []
    for weights in [{"a": 1, "b": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 1}]:
        stage = sp.Blend(make_readers({"a": 50, "b": 50}, shuffle=False), weights=weights, stride=4)
        if state is not None:
            stage.restore_state(state)
        refs = take_refs(stage, 20)
        of_b.append([untagged(index) for index, _ in refs if tag_of(index) == tag("b")])
        state = stage.save_state()
    assert of_b == [[*range(10)], [], [*range(10, 20)]]


# What may change at a restore.

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 4}


def blended(shards: str, lane: sp.Lane, *, weights: dict[str, float], kind: str = "readers") -> custom.Stage:
    """Packs of a blend, where refs are held in every stage."""
    readers = {name: sp.TarShardReader(shards, lane) for name in weights}
    encoder = Packs()
    if kind == "readers":
        items: custom.Stage = sp.Encode(sp.ShuffleBuffer(sp.Blend(readers, weights=weights), size=7), encoder)
    else:
        branches = {name: sp.Encode(sp.ShuffleBuffer(r, size=7), encoder) for name, r in readers.items()}
        items = sp.Blend(branches, weights=weights)
    return sp.Batcher(sp.OnlinePacker(items, max_length=60, open_packs=3), size=2)


class Packs(Draws):
    """Items carry their ref's source and epoch."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], rng.integers(10**9), tag_of(sample.index), sample.epoch

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [item for pack in items for item in pack]


@few_examples(5)
@given(kind=st.sampled_from(["readers", "branches"]), steps=st.integers(1, 12))
def test_new_weights_change_no_position_and_no_random_number(
    tmp_path_factory: pytest.TempPathFactory, kind: str, steps: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    write_numbered_shards(folder, [40])
    before, after = {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 5.0}
    with sp.SavableLoader(partial(blended, str(folder), weights=before, kind=kind), **SETTINGS) as loader:
        seen = [item for _, batch in zip(range(steps), loader, strict=False) for item in batch]
        state = through_a_file(loader.state_dict())
    with sp.SavableLoader(partial(blended, str(folder), weights=after, kind=kind), **SETTINGS) as loader:
        with pytest.raises(sp.CheckpointMismatchError, match=r"weights: saved \{'a': 1, 'b': 1\}, here"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, allow={"weights"})
        seen += [item for _, batch in zip(range(30), loader, strict=False) for item in batch]
    assert len(seen) == len(set(seen)), "a sample came twice"
    by_sample: dict[tuple[int, int, int], int] = {}
    with sp.SavableLoader(partial(blended, str(folder), weights=before, kind=kind), **SETTINGS) as loader:
        for _, batch in zip(range(60), loader, strict=False):
            by_sample.update({(number, source, epoch): drawn for number, drawn, source, epoch in batch})
    shared = [item for item in seen if (item[0], item[2], item[3]) in by_sample]
    assert len(shared) > 30
    assert all(by_sample[number, source, epoch] == drawn for number, drawn, source, epoch in shared)


@pytest.mark.parametrize("kind", ["readers", "branches"])
def test_sources_may_be_added_and_removed(shards: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make = partial(blended, str(shards), kind=kind)
    with sp.SavableLoader(partial(make, weights={"a": 1, "b": 1}), **SETTINGS) as loader:
        seen = [item for _, batch in zip(range(7), loader, strict=False) for item in batch]
        state = through_a_file(loader.state_dict())
    with sp.SavableLoader(partial(make, weights={"b": 3, "c": 3}), **SETTINGS) as loader:
        with pytest.raises(sp.CheckpointMismatchError) as caught:
            loader.load_state_dict(state)
        assert str(caught.value).splitlines()[1:-1] == ["  sources: saved ['a', 'b'], here ['b', 'c']"]
        with caplog.at_level(logging.WARNING):
            loader.load_state_dict(state, allow={"sources"})
        assert "sources differs: saved ['a', 'b'], here ['b', 'c']" in caplog.text
        later = [item for _, batch in zip(range(20), loader, strict=False) for item in batch]
    assert {item[2] for item in later} == {tag("b"), tag("c")}
    kept = [item for item in [*seen, *later] if item[2] == tag("b")]
    assert len(kept) == len(set(kept)), "a sample of the source that stayed came twice"
    first_epoch = Counter(item[0] for item in kept if item[3] == 0)
    assert set(first_epoch.values()) == {1}
    assert len(first_epoch) == 30


def test_weights_of_remaining_sources_are_compared_relatively(shards: Path) -> None:
    make = partial(blended, str(shards))
    with sp.SavableLoader(partial(make, weights={"a": 1, "b": 2, "c": 2}), **SETTINGS) as loader:
        state = loader.state_dict()
    with sp.SavableLoader(partial(make, weights={"b": 1, "c": 1}), **SETTINGS) as loader:
        loader.load_state_dict(state, allow={"sources"})
    with sp.SavableLoader(partial(make, weights={"b": 1, "c": 2}), **SETTINGS) as loader:
        with pytest.raises(sp.CheckpointMismatchError, match="weights"):
            loader.load_state_dict(state, allow={"sources"})
        loader.load_state_dict(state, allow={"sources", "weights"})


def test_buffered_items_of_a_removed_source_are_dropped_and_counted(shards: Path) -> None:
    stage = blended(str(shards), sp.Lane(), weights={"a": 1, "b": 1})
    next(stage)
    state = stage.save_state()
    after = blended(str(shards), sp.Lane(), weights={"b": 1})
    after.restore_state(state)
    path = [after, after.source, after.source.source, after.source.source.source]
    assert sum(each.counts["dropped/source removed"] for each in path) > 0
    assert {item[2] for _ in range(20) for item in next(after)} == {tag("b")}


def test_equal_weights_in_another_notation_are_no_difference(shards: Path) -> None:
    make = partial(blended, str(shards))
    with sp.SavableLoader(partial(make, weights={"a": 1, "b": 3}), **SETTINGS) as loader:
        next_hashes(loader, 3)
        state = loader.state_dict()
        expected = next_hashes(loader, 3)
    with sp.SavableLoader(partial(make, weights={"b": 0.75, "a": 0.25}), **SETTINGS) as loader:
        loader.load_state_dict(state)
        assert next_hashes(loader, 3) == expected


# Cuts by hand, where sources end.


@few_examples(30)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    until=st.sampled_from(["all", "first"]),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_resume_after_any_chunk_is_exact(sizes: list[int], weights: list[int], until: Any, chunks: list[int]) -> None:
    named_sizes = dict(zip("abcd", sizes, strict=False))

    def make() -> sp.Blend:
        return sp.Blend(
            make_readers(named_sizes, epochs=1),
            weights=dict(zip(named_sizes, weights, strict=False)),
            until=until,
        )

    expected, stage, given = drain(make(), 1), make(), []
    for chunk in chunks:
        given += index_epoch_pairs(stage.take(chunk))
        state, stage = stage.save_state(), make()
        stage.restore_state(state)
        assert stage.save_state() == state
    assert given + drain(stage) == expected
    if until == "all":
        assert Counter(named(expected, list("abcd"))) == named_sizes
