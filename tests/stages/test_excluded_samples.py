"""`exclude=` of the readers: what is left out, where, and that nothing else moves."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset import key_index as key_lookup
from savable_pipeline.stages.item_buffer import is_whole, known_refs
from savable_pipeline.stages.stage_info import ExcludedSamples
from savable_pipeline.testing import assert_exact_resume
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_pipelines import ToyEncoder, numbers, toy_pipeline

GONE = frozenset([*range(0, 40, 3), 100, 101])


class Ids(sp.TaskEncoder):
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"]}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.conftest import write_numbered_shards

    folder = tmp_path_factory.mktemp("exclude") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    return str(folder)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "forget"
    path.write_text("".join(f"s{number:06d}\n" for number in sorted(GONE)))
    return str(path)


def simple(shards: str, exclude: str | None, lane: sp.Lane, *, encode: bool = True, **how: Any) -> custom.Stage:
    samples: Any = sp.TarShardReader(shards, lane, exclude=exclude, **how)
    samples = sp.Blend({"a": samples, "b": sp.TarShardReader(shards, lane, exclude=exclude, shuffle=False, **how)})
    samples = sp.ShuffleBuffer(samples, size=10)
    return sp.Batcher(sp.Encode(samples, Ids()) if encode else samples, size=1)


def loader(pipeline: Any, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=3, lanes=4, **settings)


def ids_by_lane(own: sp.SavableLoader, steps: int) -> dict[int, list[int]]:
    """The samples that each lane gives in so many steps."""
    found: dict[int, list[int]] = {}
    for _, batch in zip(range(steps), own, strict=False):
        ids = [sample.json()["id"] for sample in batch] if isinstance(batch, list) else numbers(batch)
        found.setdefault(own.trace().lane, []).extend(ids)
    return found


def rows_of(batch: Any) -> list[Any]:
    """The items of a batch that count."""
    return [item for item, valid in zip(batch["items"], batch.get("valid", [True] * 9), strict=False) if valid]


def without(streams: dict[int, list[int]]) -> dict[int, list[int]]:
    return {lane: [number for number in ids if number not in GONE] for lane, ids in streams.items()}


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize("begun", [0, 9])
def test_exclusion_does_not_change_the_order_of_other_samples(shards: str, file: str, encode: bool, begun: int) -> None:
    plain = loader(partial(simple, shards, None, encode=encode))
    next_hashes(plain, begun)
    state = plain.state_dict()
    expected = without(ids_by_lane(plain, 120))
    own = loader(partial(simple, shards, file, encode=encode))
    own.load_state_dict(state, allow="exclude")
    found = ids_by_lane(own, 90)
    assert sum(map(len, found.values())) == 90
    for lane, ids in found.items():
        assert ids == expected[lane][: len(ids)]
    (counted,) = [n for name, n in own.stats().items() if name.endswith("skipped/excluded")]
    assert counted > 5


@pytest.mark.parametrize("encode", [True, False])
def test_an_epoch_has_each_other_sample_once(shards: str, file: str, encode: bool) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(shards, lane, epochs=1, exclude=file)
        return sp.Batcher(sp.Encode(samples, Ids()) if encode else samples, size=1, encoder=None if encode else Ids())

    own = loader(pipeline, tail="pad" if encode else "stop")
    seen = [row.key if isinstance(row, sp.Sample) else f"s{row['id']:06d}" for batch in own for row in rows_of(batch)]
    expected = [f"s{number:06d}" for number in range(107) if number not in GONE]
    if encode:
        assert sorted(seen) == expected
    assert len(seen) == len({*seen} & {*expected}) > 60


def test_padding_has_no_excluded_samples(shards: str, file: str) -> None:
    def pipeline(exclude: str | None, lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(shards, lane, epochs=1, shuffle=False, block_size=1, exclude=exclude)
        return sp.Batcher(sp.Encode(samples, Ids()), size=3)

    plain = loader(partial(pipeline, None), tail="pad")
    next_hashes(plain, 4)  # the first item of lane 0, which would fill up its batches, is sample 0
    own = loader(partial(pipeline, file), tail="pad")
    own.load_state_dict(plain.state_dict(), allow="exclude")
    for batch in own:
        assert not GONE & set(numbers(batch))


def test_lane_without_samples_is_not_padded_with_excluded_ones(make_shards: Any, tmp_path: Path) -> None:
    class OfSamples(sp.TaskEncoder):
        def batch(self, items: list[Any], rng: sp.Rng) -> Any:
            return {"items": [{"id": sample.json()["id"]} for sample in items]}

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.TarShardReader(few, lane, epochs=1, exclude=file), size=1, encoder=OfSamples())

    few, file = str(make_shards([3])), tmp_path / "first"
    file.write_text("s000000")
    assert {number for batch in loader(pipeline, tail="pad") for number in numbers(batch)} == {1, 2}


# What a state holds.

HOLDERS = [
    {"pack": "best_fit", "candidates": 4},
    {"pack": "best_fit", "candidates": 4, "tells": True, "max_cost": 40},
    {"pack": "first_fit_decreasing", "too_long": "split", "max_length": 7},
    {"pack": "sequential", "size": 3, "max_buffer_bytes": 0},
    {"pack": "buckets"},
    {"pack": None, "candidates": 3},
    {"pack": "best_fit", "blend": "nested", "candidates": 3},
    {"pack": "best_fit", "blend": "items", "by": "tokens"},
]


def toy(shards: str, exclude: str | None, lane: sp.Lane, **how: Any) -> custom.Stage:
    return toy_pipeline(shards, lane, exclude=exclude, **{"skip": 0, **how})


@pytest.mark.parametrize("how", HOLDERS)
def test_excluded_samples_in_a_state_are_not_yielded(shards: str, file: str, how: dict[str, Any]) -> None:
    plain, held = loader(partial(toy, shards, None, **how)), 0
    for _ in range(2):
        next_hashes(plain, 7)
        state = through_a_file(plain.state_dict())
        own = loader(partial(toy, shards, file, **how))
        own.load_state_dict(state, allow="exclude")
        for _, batch in zip(range(12), own, strict=False):
            assert not GONE & set(numbers(batch))
            assert not GONE & {sample.ref.index for sample in own.trace().samples}
        held += sum(n for name, n in own.stats().items() if name.endswith("skipped/excluded"))
    assert held


@pytest.mark.parametrize(("pack", "candidates"), [(None, None), ("best_fit", 4), ("first_fit_decreasing", None)])
def test_other_samples_in_a_state_are_not_lost(
    shards: str, file: str, pack: str | None, candidates: int | None
) -> None:
    how: dict[str, Any] = {"pack": pack, "candidates": candidates, "epochs": 1, "fan_out": 0, "open_packs": 4}
    plain = loader(partial(toy, shards, None, **how), tail="pad")
    given = [number for _, batch in zip(range(5), plain, strict=False) for number in numbers(batch)]
    own = loader(partial(toy, shards, file, **how), tail="pad")
    own.load_state_dict(plain.state_dict(), allow="exclude")
    after = {number for batch in own for number in numbers(batch)}
    assert not GONE & after
    assert {*given} | after == set(range(107)) - (GONE - {*given})


def test_workers_and_resumes_after_exclusion_agree(shards: str, file: str) -> None:
    how: dict[str, Any] = HOLDERS[6]
    pipeline = partial(toy, shards, file, **how)
    assert_exact_resume(pipeline, lanes=4, steps=8, after=2, chains=1, world_sizes=(1, 2, 4))
    plain = loader(partial(toy, shards, None, **how))
    next_hashes(plain, 7)
    own = loader(partial(toy, shards, file, **how))
    own.load_state_dict(plain.state_dict(), allow="exclude")
    expected = next_hashes(own, 14)
    with loader(partial(toy, shards, file, **how), num_workers=2) as other:
        other.load_state_dict(plain.state_dict(), allow="exclude")
        found = next_hashes(other, 8)
        state = other.state_dict()
    again = loader(partial(toy, shards, file, **how))
    again.load_state_dict(state)
    assert found + next_hashes(again, 6) == expected


def test_buffered_pack_drops_its_excluded_item_and_its_size(shards: str, file: str) -> None:
    def balance(exclude: str | None) -> sp.Balance:
        items = sp.Encode(sp.TarShardReader(shards, sp.Lane(seed=3), exclude=exclude), ToyEncoder(skip=0))
        packs = sp.OnlinePacker(items, max_length=20, open_packs=3)
        return sp.Balance(packs, candidates=6, cost=sp.attention_cost(hidden=1))

    plain, own = balance(None), balance(file)
    for _ in range(4):
        next(plain)
    state = plain.save_state()
    own.restore_state(state)
    before, after = ([msgspec.msgpack.decode(raw) for raw in each["held"]] for each in (state, own.save_state()))
    assert len(after) == len(before) > 3 and before != after
    for (ref, arrival, sizes), (old_ref, old_arrival, old_sizes) in zip(after, before, strict=True):
        old = list(zip(old_ref[1:], old_sizes[::2], old_sizes[1::2], strict=True))
        left = [row for row in old if np.ravel(row[0][0])[0] not in GONE]
        assert [arrival, ref[1:]] == [old_arrival, [row[0] for row in left]]
        assert sizes == [number for row in left for number in row[1:]]


def test_pack_that_may_not_lose_a_part_is_dropped_whole(shards: str, file: str) -> None:
    stage = sp.Encode(sp.TarShardReader(shards, sp.Lane(), exclude=file), Ids())
    whole, part = (7, (1, 0, 0), (2, 0, 0)), (8, (3, 0, 0), (4, 0, 0))
    assert known_refs(stage, [whole, part]) == [whole, (8, (4, 0, 0))]
    assert is_whole(stage, whole) and not is_whole(stage, part)
    assert stage.counts["skipped/excluded"] == 2


def test_excluded_item_buffered_by_a_blend_is_dropped(shards: str, file: str) -> None:
    def blend(exclude: str | None) -> custom.Stage:
        sources = {name: sp.Encode(sp.TarShardReader(shards, lane, exclude=exclude), Ids()) for name in "ab"}
        return sp.Blend(sources, weights={"a": 1, "b": 1})

    lane = sp.Lane()
    plain, own = blend(None), blend(file)
    next(plain)
    state = plain.save_state()
    (tag,) = plain.sources[0].info.tags
    state["taken"] = ("a", (tag << 48, 0, 0))  # as an error leaves it
    own.restore_state(state)
    assert not GONE & {next(own)["id"] for _ in range(20)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_changed_exclude_file_ends_the_run_and_a_resume_uses_the_new_one(
    shards: str, file: str, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(key_lookup, "_CHECK_INTERVAL_S", 0)
    pipeline = partial(simple, shards, file)
    with loader(pipeline, num_workers=num_workers) as own:
        next_hashes(own, 5)
        with Path(file).open("a") as more:
            more.write("s000001\n")
        with pytest.raises(sp.SavableError, match="changed during the run"):
            next_hashes(own, 20)
        state = own.state_dict()
    with loader(pipeline) as own:
        own.load_state_dict(state, allow="exclude")
        assert 1 not in chain(*ids_by_lane(own, 100).values())


# The fingerprint.


def test_a_state_of_another_list_is_rejected_and_one_of_an_empty_list_is_not(
    shards: str, file: str, tmp_path: Path
) -> None:
    states = {name: loader(partial(simple, shards, path)).state_dict() for name, path in [("no", None), ("own", file)]}
    (tmp_path / "empty").write_text("gone\n")
    loader(partial(simple, shards, str(tmp_path / "empty"))).load_state_dict(states["no"], allow="exclude")
    loader(partial(simple, shards, str(tmp_path / "empty"))).load_state_dict(states["no"])
    loader(partial(simple, shards, file)).load_state_dict(states["own"])
    for path, state in [(file, states["no"]), (None, states["own"])]:
        with pytest.raises(sp.CheckpointMismatchError, match="a/exclude: saved"):
            loader(partial(simple, shards, path)).load_state_dict(state)
        loader(partial(simple, shards, path)).load_state_dict(state, allow={"exclude"})


# Pipelines that could not leave them out.


class Pairs(custom.BatchStage):
    ref: Any = ()

    def __next__(self) -> Any:
        pair = [(next(self.source), self.source.ref) for _ in range(2)]
        self.ref = (0, *[ref for _, ref in pair])
        return [sample for sample, _ in pair]


def test_pipeline_that_would_yield_excluded_samples_is_rejected(shards: str, file: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return Pairs(sp.TarShardReader(shards, lane, exclude=file))

    with pytest.raises(ValueError, match="between the reader and Pairs"):
        next(loader(pipeline))


def test_lane_with_only_excluded_samples_is_an_error(shards: str, tmp_path: Path) -> None:
    (tmp_path / "all").write_text("".join(f"s{number:06d}\n" for number in range(107)))
    with pytest.raises(sp.EncodeError, match="the last one with 'excluded'"):
        next(loader(partial(simple, shards, str(tmp_path / "all"))))


def test_refs_are_filtered_by_exclusion() -> None:
    excluded = ExcludedSamples({0: frozenset([1])}) | ExcludedSamples({2: frozenset([5])})
    tagged = 2 << 48 | 5
    for ref, left in [
        ((1, 0, 0), None),
        ((5, 0, 0), (5, 0, 0)),
        ((tagged, 0, 0), None),
        (((1, 0, 0), 3, 7), None),
        ((9, (1, 0, 0), (2, 0, 0), ((tagged, 0, 0), 0, 4)), (9, (2, 0, 0))),
        ((9, (1, 0, 0)), None),
        ((4, (9, (1, 0, 0), (2, 0, 0)), (8, (3, 0, 0))), (4, (9, (2, 0, 0)), (8, (3, 0, 0)))),
        (((1, 0, 0), (2, 0, 0)), None),  # of a user's own stage
        (((3, 0, 0), (2, 0, 0)), ((3, 0, 0), (2, 0, 0))),
    ]:
        assert excluded.remaining(ref) == left, ref


def test_encoder_is_not_called_for_excluded_samples(shards: str, file: str) -> None:
    called = []

    class Noting(ToyEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            called.append(sample.json()["id"])
            return super().encode(sample, rng)

    encode = sp.Encode(sp.TarShardReader(shards, sp.Lane(), epochs=1, exclude=file), Noting())
    assert not GONE & {item["id"] for item in encode}
    assert not GONE & set(called) and encode.counts["skipped/excluded"] == len(GONE)
    assert isinstance(encode.fetch((3, 0, 0)), sp.Skip)
    assert np.array_equal(encode.fetch((1, 0, 0))["id"], 1)


def test_number_of_items_is_unknown_with_exclusions(shards: str, file: str) -> None:
    plain, own = (
        sp.Encode(sp.TarShardReader(shards, sp.Lane(), epochs=1, exclude=each), Ids()) for each in (None, file)
    )
    assert (plain.count_of(0, 0), own.count_of(0, 0)) == (107, None)
