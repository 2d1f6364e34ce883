"""Items that were given or told and cannot be made: refs and counts are of what is in the batch."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.state.lane_state import LaneState, unpack_state
from savable_pipeline.run.state.state_dict import lane_name
from savable_pipeline.stages.chunked_stage import chunked
from savable_pipeline.stages.item_ref import Element
from tests.conftest import write_numbered_shards
from tests.support.streams import through_a_file

SAMPLES = 107
BAD = frozenset(range(3, SAMPLES, 10))


class Texts(sp.TaskEncoder):
    """An item is (number, start, length). Fails for samples in `bad`, by `error`; `unlucky` packs are skipped."""

    global_rng = False
    bad: frozenset[int] = frozenset()
    unlucky: frozenset[int] = frozenset()
    error: Exception = ValueError("bad")

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number in self.bad:
            raise self.error.with_traceback(None)  # else it would keep the frames of each time, and their open shards
        return number, 0, length_of(number)

    def length(self, item: Any) -> int:
        return int(item[2])

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return item[0], start, stop - start

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return sp.Skip("unlucky") if items[0][0] in self.unlucky else list(items)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items}


class TellingTexts(Texts):
    """Tells all lengths without encoding."""

    def length_of(self, sample: sp.Sample) -> int:
        return length_of(sample.json()["id"])


def length_of(number: int) -> int:
    return 1 + number * number % 9


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lost") / "shards"
    write_numbered_shards(folder, [40, 7, SAMPLES - 47])
    return str(folder)


def pipeline(shards: str, encoder: sp.TaskEncoder, how: dict[str, Any], lane: sp.Lane) -> custom.Stage:
    def source(name: str) -> Any:
        samples = sp.TarShardReader(shards, lane, epochs=how.get("epochs", 1), exclude=how.get("exclude"))
        items: Any = sp.Encode(samples, encoder, on_error="skip", max_errors=1.0)
        if how.get("policy"):
            items = sp.OnlinePacker(items, max_length=20, policy=how["policy"], open_packs=3)
        return sp.ShuffleBuffer(items, size=5, max_buffer_bytes=0) if how.get("buffer") else items

    packs = sp.Blend({"a": source("a"), "b": source("b")}) if how.get("blend") else source("")
    if how.get("buckets"):
        same: Any = {"same_bucket": True, "candidates": how["candidates"]} if how.get("candidates") else {}
        return custom.BucketBatcher(packs, bounds=[3, 6, 9], size=3, **same)
    if how.get("candidates"):
        packs = sp.Balance(packs, candidates=how["candidates"], cost=sp.attention_cost(hidden=1), encoder=encoder)
    return sp.Batcher(packs, size=2, encoder=encoder)


def loader(shards: str, encoder: sp.TaskEncoder, how: dict[str, Any]) -> sp.SavableLoader:
    return sp.SavableLoader(partial(pipeline, shards, encoder, how), seed=3, lanes=2, tail="stop", sample_ids=False)


def rows_of(batch: Any) -> list[list[int]]:
    """The samples of each row of a batch."""
    rows = [row if isinstance(row, list) else [row] for row in batch["items"]]
    return [[number for number, _, _ in row] for row in rows]


def traced(own: sp.SavableLoader) -> list[list[int]]:
    return [[sample.ref.index for sample in row] for row in own.trace().rows]


def skips(stats: dict[str, Any]) -> int:
    return sum(number for name, number in stats.items() if "/skipped/" in name and "source/" not in name)


TOLD = [
    {"policy": "best_fit", "candidates": 4},
    {"policy": "sequential", "candidates": 4},
    {"policy": "best_fit", "candidates": 4, "blend": True},
    {"policy": "best_fit"},
    {"policy": "sequential"},
    {"policy": None, "candidates": 4},
    {"policy": None, "candidates": 4, "blend": True},
]


@pytest.mark.parametrize("how", TOLD)
def test_sample_that_fails_after_its_length_was_declared_is_skipped_once_and_not_listed(
    shards: str, how: dict[str, Any]
) -> None:
    encoder = TellingTexts()
    encoder.bad = BAD
    own, given, tokens = loader(shards, encoder, {**how, "epochs": None}), Counter[int](), 0
    for _ in range(25):
        batch = next(own)
        assert traced(own) == rows_of(batch)
        assert not BAD & {number for row in rows_of(batch) for number in row}
        given.update(number for row in rows_of(batch) for number in row)
        tokens += sum(length for row in batch["items"] for _, _, length in (row if type(row) is list else [row]))
    stats = own.stats()
    assert stats["samples"] == sum(given.values())
    if how["policy"] is not None:
        assert stats["OnlinePacker/items"] >= stats["samples"]
        assert stats["tokens"] >= tokens


@pytest.mark.parametrize("how", TOLD)
def test_declared_items_are_counted_as_yielded_or_skipped(shards: str, how: dict[str, Any]) -> None:
    encoder = TellingTexts()
    encoder.bad, encoder.error = BAD, OSError("without a number: of the data")
    stage: Any = pipeline(shards, encoder, how, sp.Lane())
    pieces = [piece for batch in stage for row in batch["items"] for piece in (row if type(row) is list else [row])]
    counts = Counter[str]()
    while stage is not None:
        for each in [stage] if not isinstance(stage, sp.Blend) else []:
            counts.update({f"{type(each).__name__}/{name}": n for name, n in each.counts.items()})
        sources, stage = stage.sources, stage.sources[0] if len(stage.sources) == 1 else None
    if how.get("blend"):
        for last in sources:
            for each in [last, *last.sources]:
                counts.update({f"{type(each).__name__}/{name}": n for name, n in each.counts.items()})
    times = 2 if how.get("blend") else 1
    assert counts["Encode/items"] == times * (SAMPLES - len(BAD)) == sum(1 for _, start, _ in pieces if not start)
    assert skips(counts) == counts["Encode/skipped/OSError"] == times * len(BAD)
    if how["policy"] is not None:
        assert counts["OnlinePacker/items"] == len(pieces)
        assert counts["OnlinePacker/tokens"] == sum(length for _, _, length in pieces)
        packs = counts["OnlinePacker/packs"]
        assert counts["OnlinePacker/tokens"] + counts["OnlinePacker/room"] == 20 * packs


HELD = [
    {"policy": "best_fit"},
    {"policy": "sequential"},
    {"policy": "best_fit", "buffer": True},
    {"policy": "best_fit", "candidates": 4},
    {"policy": "best_fit", "candidates": 4, "blend": True},
    {"policy": None, "buffer": True},
    {"policy": None, "buckets": True},
    {"policy": None, "buckets": True, "blend": True},
    {"policy": None, "buckets": True, "candidates": 4},
]


@pytest.mark.parametrize(
    ("how", "telling"), [*((how, False) for how in HELD), *((HELD[number], True) for number in (1, 2, 4, 5))]
)
def test_saved_items_that_cannot_be_rebuilt_are_not_listed(shards: str, how: dict[str, Any], telling: bool) -> None:
    encoder = TellingTexts() if telling else Texts()
    encoder.error = OSError(5, "a disk that fails")
    before = loader(shards, encoder, {**how, "epochs": None})
    lost = 0
    for _ in range(3):
        encoder.bad = frozenset()
        for _ in range(4):
            next(before)
        state = through_a_file(before.state_dict())
        encoder.bad = BAD
        own = loader(shards, encoder, {**how, "epochs": None})
        own.load_state_dict(state)
        passing = loader(shards, encoder, {**how, "epochs": None})
        passing.load_state_dict(state)
        for step in range(8):
            batch = next(own)
            assert traced(own) == rows_of(batch)
            assert len(batch["items"]) == (3 if how.get("buckets") else 2)
            assert not BAD & {number for row in rows_of(batch) for number in row}
            if step < 4:
                passing.skip(1)
            else:
                assert rows_of(next(passing)) == rows_of(batch)
        stats = own.stats()
        lost += skips(stats)
        if how.get("blend"):
            assert stats["source/a/skipped"] + stats["source/b/skipped"] == skips(stats)
    assert lost


@pytest.mark.parametrize("telling", [False, True])
def test_items_lost_after_a_resume_are_not_subtracted_from_those_counted_since(shards: str, telling: bool) -> None:
    class Counting(TellingTexts if telling else Texts):  # type: ignore[misc]
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            item = super().encode(sample, rng)
            encoded.add(sample.index)
            return item

    encoded = set[int]()
    encoder, how = Counting(), {"policy": None, "buckets": True, "epochs": None}
    before = loader(shards, encoder, how)
    for _ in range(4):
        next(before)
    state = before.state_dict()
    lanes = [unpack_state(state[lane_name(lane)], LaneState, "lane") for lane in range(2)]
    encoder.bad = frozenset(ref[0] & 0xFFFF for lane in lanes for bucket in lane.stages["buckets"] for ref, _ in bucket)
    own = loader(shards, encoder, how)
    own.load_state_dict(state)
    encoded.clear()
    next(own)
    assert own.stats()["Encode/skipped/ValueError"] > 0
    assert own.stats()["Encode/items"] >= len(encoded) > 0


@pytest.mark.parametrize("how", [*HELD, *TOLD])
def test_no_number_of_a_run_is_negative_while_it_loses_items(shards: str, how: dict[str, Any]) -> None:
    """Half of the items that a run has counted are lost in the middle of it, or after a resume."""
    encoder = TellingTexts()
    encoder.error = OSError(5, "a disk that fails")
    before, own = (loader(shards, encoder, {**how, "epochs": None}) for _ in range(2))
    for _ in range(3):
        next(before)
    own.load_state_dict(through_a_file(before.state_dict()))
    encoder.bad = frozenset(range(0, SAMPLES, 2))
    for run in (own, before):
        for _ in range(6):
            next(run)
            assert min(run.stats().values()) >= 0, run.stats()


def test_bucket_batch_is_full_although_an_item_is_lost(shards: str) -> None:
    encoder = Texts()
    how: dict[str, Any] = {"policy": None, "buckets": True}
    before = pipeline(shards, encoder, how, sp.Lane())
    next(before)
    state = before.save_state()
    held = {ref[0] for bucket in state["buckets"] for ref, _ in bucket}
    encoder.bad = frozenset(held)
    stage = pipeline(shards, encoder, how, sp.Lane())
    stage.restore_state(state)
    assert stage.more()
    batches = list(stage)
    assert [len(batch["items"]) for batch in batches[:-3]] == [3] * (len(batches) - 3)
    assert not held & {number for batch in batches for (number,) in rows_of(batch)}
    assert stage.source.counts["skipped/ValueError"] == len(held)


def test_padding_does_not_use_a_lost_item(shards: str) -> None:
    encoder = Texts()
    lane = sp.Lane(pad=True)
    stage: Any = pipeline(shards, encoder, {"policy": None}, lane)
    next(stage)
    state = stage.save_state()
    encoder.bad = frozenset({state["first"][0]})
    stage = pipeline(shards, encoder, {"policy": None}, lane)
    stage.restore_state(state)
    assert not encoder.bad & {number for (number,) in rows_of(stage.filler())}


def test_item_lost_in_a_blend_is_not_yielded(shards: str) -> None:
    def blend() -> Any:
        sources = {name: sp.Encode(sp.TarShardReader(shards, lane), encoder, on_error="skip") for name in "ab"}
        return sp.Blend(sources, weights={"a": 1, "b": 1}, by="tokens")

    lane, encoder = sp.Lane(), Texts()
    stage = blend()
    next(stage)
    (tag,) = stage.sources[0].info.tags
    state = {**stage.save_state(), "ahead": {"a": [((tag << 48 | 3, 0, 0), None)]}}  # as an error leaves it
    encoder.bad = frozenset({3})
    stage = blend()
    stage.restore_state(state)
    assert all(type(next(stage)) is tuple for _ in range(5))
    assert stage.sources[0].counts["skipped/ValueError"] == 1


# Counts by source.


@pytest.mark.parametrize(
    ("how", "telling"),
    [
        ({"policy": "best_fit", "candidates": 4}, True),
        ({"policy": "best_fit"}, False),
        ({"policy": "best_fit"}, True),
        ({"policy": None, "buckets": True}, False),
        ({"policy": None, "buffer": True}, True),
    ],
)
def test_skips_by_source_add_up_to_all_skips(shards: str, tmp_path: Path, how: dict[str, Any], telling: bool) -> None:
    encoder = TellingTexts() if telling else Texts()
    encoder.bad, encoder.unlucky = BAD, frozenset(range(0, 107, 4))
    how = {**how, "blend": True, "epochs": None}
    before = loader(shards, encoder, how)
    for _ in range(5):
        next(before)
    file = tmp_path / "forget"
    file.write_text("".join(f"s{number:06d}\n" for number in range(0, SAMPLES, 6)))
    own = loader(shards, encoder, {**how, "exclude": str(file)})
    own.load_state_dict(before.state_dict(), allow={"exclude"})
    for _ in range(40):
        next(own)
    stats = own.stats()
    assert stats["source/a/skipped"] + stats["source/b/skipped"] == skips(stats) > 20


def test_a_batcher_of_samples_counts_excluded_ones_by_source(shards: str, tmp_path: Path) -> None:
    def samples(lane: sp.Lane) -> custom.Stage:
        sources = {name: sp.TarShardReader(shards, lane, exclude=str(file)) for name in "ab"}
        return sp.Batcher(sp.Blend(sources), size=2)

    file = tmp_path / "forget"
    file.write_text("".join(f"s{number:06d}\n" for number in range(0, SAMPLES, 6)))
    own = sp.SavableLoader(samples, seed=3, lanes=2)
    for _ in range(40):
        next(own)
    stats = own.stats()
    assert stats["source/a/skipped"] + stats["source/b/skipped"] == stats["Batcher/skipped/excluded"] > 5


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("excluded", [False, True])
def test_buffered_pack_that_lost_an_item_is_listed_without_it(
    shards: str, tmp_path: Path, bucketed: bool, excluded: bool
) -> None:
    def batches(exclude: str | None) -> Any:
        samples = sp.TarShardReader(shards, sp.Lane(), exclude=exclude)
        packs = sp.OnlinePacker(sp.Encode(samples, encoder, on_error="skip"), max_length=20)
        if bucketed:
            return custom.BucketBatcher(packs, bounds=[12, 15, 16, 17, 18, 19, 20], size=3, group=len)
        return sp.Batcher(packs, size=3)

    class Packs(Texts):
        def length(self, item: Any) -> int:
            return super().length(item) if isinstance(item, tuple) else sum(length for _, _, length in item)

    encoder = Packs()
    before = batches(None)
    next(before)
    assert before.more()
    state = before.save_state()
    held = [ref for elements in (state["buckets"] if bucketed else [state["held"]]) for ref, _ in elements]
    gone = {ref[1][0] for ref in held}
    (tmp_path / "gone").write_text("".join(f"s{number:06d}\n" for number in gone))
    if not excluded:
        encoder.bad = frozenset(gone)
    stage = batches(str(tmp_path / "gone") if excluded else None)
    stage.restore_state(state)
    left = {number for ref in held for number, *_ in ref[1:]} - gone
    given = set()
    for _ in range(20):
        batch = next(stage)
        assert [[part[0] for part in ref[1:]] for ref in stage.ref[1:]] == rows_of(batch)
        assert len(batch["items"]) == 3
        given |= {number for row in rows_of(batch) for number in row}
        encoder.bad = frozenset()
    assert left <= given and left


@pytest.mark.parametrize("kind", [Texts, TellingTexts])
def test_a_pack_of_packs_has_a_size_for_each_pack_that_lost_items(shards: str, kind: type[Texts]) -> None:
    """Later stages decide by these sizes: an order must not depend on whether a pack in a pack is whole."""

    class Nested(kind):  # type: ignore[misc, valid-type]
        bad = BAD

        def length(self, item: Any) -> int:
            return sum(map(self.length, item)) if isinstance(item, list) else int(item[2])

    items = sp.Encode(sp.TarShardReader(shards, sp.Lane(seed=7), epochs=1), Nested(), on_error="skip", max_errors=1.0)
    packs = sp.OnlinePacker(sp.OnlinePacker(items, max_length=20), max_length=60)
    sizes = []
    for _ in packs:
        assert packs.sizes is not None and len(packs.sizes) == len(packs.ref) - 1
        sizes += packs.sizes
    assert sum(length for length, _ in sizes) == sum(map(length_of, set(range(SAMPLES)) - BAD))


class Unchanged(custom.PassThrough, custom.ItemStage):
    """A user's stage of all elements of its source."""

    def __next__(self) -> Any:
        return next(self.source)


def test_own_stage_that_changes_no_element_rebuilds_as_its_source(shards: str) -> None:
    encoder = Texts()
    items = sp.Encode(sp.TarShardReader(shards, sp.Lane(), shuffle=False), encoder, on_error="skip")
    own = Unchanged(sp.OnlinePacker(Unchanged(items), max_length=20, policy="first_fit"))
    whole = next(own)
    encoder.bad = frozenset([whole[1][0]])
    element = Element(own.ref)
    chunked(own).make([element])
    assert element.value == [whole[0], *whole[2:]] and element.ref == (*own.ref[:2], *own.ref[3:])
    certain = Unchanged(sp.Encode(sp.TarShardReader(shards, sp.Lane(), shuffle=False), Texts()))
    assert chunked(certain).is_certain((0, 0, 0)) and not chunked(Unchanged(items)).is_certain((0, 0, 0))
