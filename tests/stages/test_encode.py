"""Encoding: one item, none or several of a sample; sizes declared; errors that say where; nothing lost or twice."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.encode import DeclaredSize
from savable_pipeline.stages.mapped_function import MappedFunction
from savable_pipeline.stages.stage_info import StageInfo
from tests.conftest import write_tar
from tests.support.draws import few_examples
from tests.support.values_and_refs import values_and_refs


class Made(sp.TaskEncoder):
    """An encoder that calls a function of the sample's number."""

    global_rng = False

    def __init__(self, make: Callable[[int, sp.Rng], Any]) -> None:
        self.make = make
        self.calls: list[int] = []

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = int(sample.json()["id"])
        self.calls.append(number)
        return self.make(number, rng)


@pytest.fixture
def encoded(make_shards: Any) -> Callable[..., sp.Encode]:
    """Build the `Encode` of the samples 0, 1, 2, … in file order."""
    folder = make_shards([4, 6])

    def build(
        make: Callable[[int, sp.Rng], Any], *, epochs: int | None = 1, check: float | None = None, **how: Any
    ) -> sp.Encode:
        reader = sp.TarShardReader(folder, sp.Lane(**how), epochs=epochs, shuffle=False)
        return sp.Encode(reader, Made(make), check=check)

    return build


def test_encode_yields_one_item_per_sample_with_its_ref(encoded: Any) -> None:
    stage = encoded(lambda n, rng: n * 10)
    assert next(stage) == 0
    assert stage.ref == (0, 0, 0)
    assert values_and_refs(stage, 3) == ([10, 20, 30], [(1, 0, 0), (2, 0, 0), (3, 0, 0)])
    assert list(stage) == [40, 50, 60, 70, 80, 90]
    assert values_and_refs(stage, 3) == ([], [])


def test_none_is_reported_as_a_forgotten_return(encoded: Any) -> None:
    with pytest.raises(sp.EncodeError, match=r"'s000000' of .*it returned None; return an item or Skip\(reason\)"):
        next(encoded(lambda n, rng: None))


def without_sources(counts: Counter[str]) -> dict[str, int]:
    """What was counted, without what is counted by source."""
    return {name: count for name, count in counts.items() if not name.startswith("source/")}


class Unmapped(sp.TaskEncoder):
    """Calls a function as an encoder does, one sample after the other."""

    def __init__(self, function: Callable[[sp.Sample], Any], *, global_rng: bool | None) -> None:
        self.function, self.global_rng = function, global_rng

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return self.function(sample)


@pytest.mark.parametrize("global_rng", [None, False])
@few_examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), kinds=st.sampled_from(["ii", "iisn", "iise", "iif", "iisefnt"]))
def test_a_mapped_series_has_the_items_counts_and_states_of_single_calls(
    mapped_folder: str, global_rng: bool | None, seed: int, kinds: str
) -> None:
    """Results are an int, a str, a Skip, an error, None, an iterator, or a draw, mostly after some series of ints."""
    calls: Counter[int] = Counter()

    def function(sample: sp.Sample) -> Any:
        number = int(sample.json()["id"])
        calls[number] += 1
        rng = random.Random(seed + number)
        kind = rng.choice(kinds) if number > 60 and rng.random() < 0.1 else "i"
        if kind == "e":
            raise ValueError(number)
        if kind == "f":
            return iter(range(number % 4))
        drawn = random.random() if kind == "t" and global_rng is None else 0
        return {"i": number, "s": sp.Skip("odd"), "n": None, "t": (number, drawn)}[kind]

    def stage(encoder: sp.TaskEncoder) -> sp.Encode:
        reader = sp.TarShardReader(mapped_folder, sp.Lane(seed=3), epochs=1, shuffle=False)
        return sp.Encode(reader, encoder, on_error="skip", max_errors=1000)

    mapped = stage(MappedFunction(".map", function, global_rng=global_rng))
    single = stage(Unmapped(function, global_rng=global_rng))
    sizes = random.Random(seed)
    while True:
        n = sizes.choice([1, 7, 16, 40, 64])
        elements, expected = mapped.take(n), single.take(n)
        assert [(each.ref, each.value) for each in elements] == [(each.ref, each.value) for each in expected]
        assert mapped.counts == single.counts
        assert mapped.save_state() == single.save_state()
        if not elements:
            break
        if sizes.random() < 0.1:  # as after the death of a worker
            for each in (mapped, single):
                each.avoid(elements[-1].ref[0] + 5, 0, "avoided")
    assert len(calls) >= 290


@pytest.fixture(scope="module")
def mapped_folder(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("mapped")
    numbers = iter(range(300))
    for name in ("000000.tar", "000001.tar"):
        write_tar(folder / name, [(f"s{n:06d}.json", b'{"id": %d}' % n) for n in (next(numbers) for _ in range(150))])
    return str(folder)


def test_a_mapped_series_calls_its_function_once_for_each_sample(mapped_folder: str) -> None:
    calls: list[int] = []

    def function(sample: sp.Sample) -> int:
        calls.append(sample.index)
        return sample.index

    reader = sp.TarShardReader(mapped_folder, sp.Lane(seed=3), epochs=1, shuffle=False)
    stage: Any = sp.Encode(reader, MappedFunction(".map", function, global_rng=False), check=0.0)
    first, map_series, unmapped = stage.take(40), stage._map_series, []
    stage._map_series = lambda *series: unmapped.append(map_series(*series))
    assert [each.value for each in first + stage.take(100)] == calls == [*range(140)]
    assert unmapped == [None] * len(unmapped) != [], "later series are mapped"


def test_skipped_samples_are_counted_by_reason(encoded: Any) -> None:
    stage = encoded(lambda n, rng: sp.Skip("odd" if n % 2 else "zero") if n % 2 or not n else n)
    assert list(stage) == [2, 4, 6, 8]
    assert without_sources(stage.counts) == {"items": 4, "skipped/odd": 5, "skipped/zero": 1}


@pytest.mark.parametrize("item", [[1, 2], (1, 2), {"a": 1}, "text", {1, 2}, np.arange(2)])
def test_value_without_next_is_one_item(encoded: Any, item: Any) -> None:
    items, refs = values_and_refs(encoded(lambda n, rng: item), 3)
    assert [one is item for one in items] == [True, True, True]
    assert refs == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def fan(n: int, rng: sp.Rng) -> Iterator[Any]:
    """n % 4 parts of a sample, of which the second is left out."""
    for part in range(n % 4):
        yield sp.Skip("second") if part == 1 else (n, part, rng.integers(1000))


def test_a_sample_may_fan_out_into_several_items(encoded: Any) -> None:
    stage = encoded(fan)
    items, refs = values_and_refs(stage, 100)
    assert [item[:2] for item in items] == [(1, 0), (2, 0), (3, 0), (3, 2), (5, 0), (6, 0), (7, 0), (7, 2), (9, 0)]
    assert refs == [(n, 0, part) for n, part, _ in items]
    assert without_sources(stage.counts) == {"items": 9, "skipped/second": 4, "skipped/an iterator without items": 3}


def mixed(n: int, rng: sp.Rng) -> Any:
    """Items, skips and fan-outs in turn, each with random numbers."""
    if n % 4 == 0:
        return sp.Skip("fourth")
    return (n, 0, rng.integers(1000)) if n % 3 == 0 else fan(n, rng)


@few_examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_items_do_not_depend_on_chunk_size_or_interruption(encoded: Any, takes: list[int], cuts: list[bool]) -> None:
    whole = encoded(mixed, epochs=2)
    expected = values_and_refs(whole, 1000)
    stage, items, refs = encoded(mixed, epochs=2), [], []
    skips: Counter[str] = Counter()
    for n, cut in zip(takes * 8, cuts * 8, strict=False):
        taken = values_and_refs(stage, n)
        items, refs = items + taken[0], refs + taken[1]
        if cut:
            state, skips = stage.save_state(), skips + stage.counts
            stage = encoded(mixed, epochs=2)
            stage.restore_state(state)
    rest = values_and_refs(stage, 1000)
    assert (items + rest[0], refs + rest[1]) == expected
    assert skips + stage.counts == whole.counts


def test_state_within_a_fan_out_has_the_remaining_refs_and_yielded_parts(encoded: Any) -> None:
    stage = encoded(lambda n, rng: iter([(n, i) for i in range(5)]))
    values_and_refs(stage, 7)  # all of sample 0, and parts 0 and 1 of sample 1
    state = stage.save_state()
    refs = np.frombuffer(state["refs"], dtype=[("index", "<u8"), ("epoch", "<u4")])
    assert state["part"] == 2
    assert refs["index"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    after = encoded(lambda n, rng: iter([(n, i) for i in range(5)]))
    after.restore_state(state)
    assert values_and_refs(after, 4)[0] == [(1, 2), (1, 3), (1, 4), (2, 0)]


def test_restoring_reads_and_encodes_nothing(encoded: Any) -> None:
    stage = encoded(fan)
    values_and_refs(stage, 4)
    after = encoded(fan)
    after.restore_state(stage.save_state())
    assert after.info.encoder.calls == []
    assert after.save_state() == stage.save_state()


def test_fetch_rebuilds_every_item_and_part_without_side_effects(encoded: Any) -> None:
    stage, helper = encoded(mixed), encoded(mixed)
    taken: list[tuple[Any, Any]] = []
    for item in stage:
        taken.append((item, stage.ref))
        for old, ref in taken[-3:]:
            assert stage.fetch(ref) == old
    assert [item for item, _ in taken] == values_and_refs(helper, 100)[0]
    index, epoch, part = taken[-1][1]
    assert stage.fetch(custom.Ref(0, epoch, index, part)) == taken[-1][0]


def test_fetching_a_part_that_is_not_yielded_is_an_error(encoded: Any) -> None:
    with pytest.raises(sp.EncodeError, match=r"did not yield item 9 of sample 's000003' of 0000.tar"):
        encoded(fan).fetch((3, 0, 9))


class Counting:
    """Five parts of a sample, each with a random number, that can be passed over; `made` lists those that were not."""

    def __init__(self, n: int, rng: sp.Rng, made: list[int]) -> None:
        self.n, self.rng, self.made = n, rng, made
        self.part = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.part == 5:
            raise StopIteration
        self.made.append(self.part)
        self.part += 1
        return sp.Skip("second") if self.part == 2 else (self.n, self.part - 1, self.rng.integers(1000))

    def pass_over(self, parts: int) -> int:
        before, self.part = self.part, min(5, self.part + parts)
        return self.part - before


@pytest.mark.parametrize("given", range(1, 9))
def test_resume_within_a_sample_skips_its_earlier_parts(encoded: Any, given: int) -> None:
    whole, made = encoded(lambda n, rng: Counting(n, rng, [])), list[int]()
    expected = values_and_refs(whole, 12)
    stage, after = (encoded(lambda n, rng: Counting(n, rng, made)) for _ in range(2))
    values_and_refs(stage, given)
    made.clear()
    after.restore_state(stage.save_state())
    rest = values_and_refs(after, 12 - given)
    assert rest == tuple(taken[given:] for taken in expected)
    assert made[0] == (expected[1][given - 1][2] + 1) % 5
    assert len(made) <= 12 - given + 3  # three skipped parts
    made.clear()
    assert [after.fetch(ref) for ref in rest[1]] == rest[0]
    assert made == [part for _, _, part in rest[1]]


def test_fewer_skipped_parts_than_were_yielded_are_an_error(encoded: Any) -> None:
    stage = encoded(lambda n, rng: Counting(n, rng, []))
    values_and_refs(stage, 3)
    state = {**stage.save_state(), "part": 6}
    stage.restore_state(state)
    with pytest.raises(
        sp.CheckpointMismatchError, match=r"sample 's000000' of .* yields fewer items than in the saved run"
    ):
        values_and_refs(stage, 1)
    with pytest.raises(sp.EncodeError, match=r"did not yield item 5 of sample 's000000' of 0000\.tar"):
        stage.fetch((0, 0, 5))
    with pytest.raises(sp.EncodeError, match=r"did not yield item 6 of sample 's000000' of 0000\.tar"):
        stage.fetch((0, 0, 6))


def test_skipping_parts_without_their_number_is_an_encoder_error(encoded: Any, monkeypatch: Any) -> None:
    stage = encoded(lambda n, rng: Counting(n, rng, []))
    values_and_refs(stage, 2)
    stage.restore_state(stage.save_state())
    monkeypatch.setattr(Counting, "pass_over", lambda self, parts: None)
    with pytest.raises(sp.EncodeError, match=r"'s000000' of .*: TypeError: 'NoneType' object"):
        values_and_refs(stage, 1)


class Fails:
    """An encode function that raises for one sample as often as told."""

    def __init__(self, number: int, times: int, part: int | None = None) -> None:
        self.number, self.times, self.part = number, times, part

    def __call__(self, n: int, rng: sp.Rng) -> Any:
        if self.part is not None and n == self.number:
            return self._parts(n)
        if n == self.number:
            self._maybe()
        return sp.Skip("first") if n == 0 else n

    def _parts(self, n: int) -> Iterator[Any]:
        for part in range(3):
            if part == self.part:
                self._maybe()
            yield (n, part)

    def _maybe(self) -> None:
        if self.times:
            self.times -= 1
            raise ZeroDivisionError("no such luck")


def test_an_error_says_stage_shard_key_offset_and_cause(encoded: Any) -> None:
    stage = encoded(Fails(5, 1))
    with pytest.raises(sp.EncodeError) as caught:
        values_and_refs(stage, 10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for part in ("Made.encode failed on sample 's000005' of 0001.tar: ZeroDivisionError: no such luck", "stage Encode"):
        assert part in str(caught.value)
    assert "byte offset 1024" in str(caught.value)


@pytest.mark.parametrize("part", [None, 0, 1, 2])
@pytest.mark.parametrize("n", [1, 4, 100])
@pytest.mark.parametrize("restore", [False, True])
def test_sample_is_retried_after_an_error_without_loss_or_repetition(
    encoded: Any, part: int | None, n: int, restore: bool
) -> None:
    expected = encoded(Fails(5, 0, part))
    expected_items = values_and_refs(expected, 100)[0]
    stage, items, errors = encoded(Fails(5, 2, part)), [], 0
    while True:
        try:
            taken, _ = values_and_refs(stage, n)
        except sp.EncodeError:
            errors += 1
            if restore:
                state, encoder, skips = stage.save_state(), stage.info.encoder, stage.counts
                stage = sp.Encode(stage.source, encoder)
                stage.source.restore_state(state["source"])
                stage.restore_state(state)
                stage.counts.update(skips)
            continue
        if not taken:
            break
        items += taken
    assert errors == 2
    assert items == expected_items
    assert stage.counts == expected.counts


class Texts(sp.TaskEncoder):
    """The text of a sample, as one item or as one of several."""

    def __init__(self, fan_out: bool) -> None:
        self.fan_out = fan_out

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return (sample.text() for _ in range(2)) if self.fan_out else sample.text()


@pytest.mark.parametrize("fan_out", [False, True])
def test_unreadable_shard_is_a_shard_error_not_an_encoder_error(tmp_path: Path, fan_out: bool) -> None:
    write_tar(tmp_path / "a.tar", [(f"{key}.{extension}", b"{}") for key in "ab" for extension in ("json", "txt")])
    stage = sp.Encode(sp.TarShardReader(tmp_path, sp.Lane(), shuffle=False), Texts(fan_out))
    assert next(stage) == "{}"
    os.truncate(tmp_path / "a.tar", 3584)  # the last payload is gone
    with pytest.raises(sp.ShardError, match=r"a\.tar: 2 bytes at byte 3584 are missing"):
        values_and_refs(stage, 3)
    with pytest.raises(sp.ShardError, match=r"a\.tar: 2 bytes"):
        stage.fetch((1, 0, 0))


def drawn(n: int, rng: sp.Rng) -> list[Any]:
    """What the global generators and the sample's own give."""
    return [random.random(), np.random.rand(), torch.rand(1).item(), rng.random()]


@pytest.mark.parametrize(
    ("setting", "seeded"),
    [
        (None, {0, 1, 2}),
        (True, {0, 1, 2}),
        (False, set()),
        (("numpy",), {1}),
        (("python", "torch"), {0, 2}),
        ((), set()),
    ],
)
def test_global_generators_are_seeded_for_each_call_as_global_rng_says(
    encoded: Any, setting: Any, seeded: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Made, "global_rng", setting)
    one = values_and_refs(encoded(drawn, check=0.0), 100)[0]
    random.random(), np.random.rand(), torch.rand(1)
    two = values_and_refs(encoded(drawn, check=0.0), 100)[0]
    for generator in range(4):
        same = [a[generator] == b[generator] for a, b in zip(one, two, strict=True)]
        assert all(same) if generator in {*seeded, 3} else not any(same)
        assert len({item[generator] for item in one}) == len(one)


def test_random_numbers_belong_to_seed_epoch_and_sample_not_to_the_lane(encoded: Any) -> None:
    def numbers(**how: Any) -> dict[Any, float]:
        stage = encoded(lambda n, rng: rng.random(), epochs=2, **how)
        items, refs = values_and_refs(stage, 100)
        return dict(zip(refs, items, strict=True))

    alone = numbers(seed=3)
    assert len(set(alone.values())) == 20
    assert {**numbers(seed=3, index=0, count=2), **numbers(seed=3, index=1, count=2)} == alone
    assert not set(numbers(seed=4).values()) & set(alone.values())


def test_parts_of_a_sample_have_random_numbers_of_their_own(encoded: Any) -> None:
    items, _ = values_and_refs(encoded(lambda n, rng: (rng.random() for _ in range(3))), 100)
    assert len(set(items)) == 30


@pytest.mark.parametrize("nothing", [lambda: sp.Skip("never"), lambda: iter([]), lambda: iter([sp.Skip("never")] * 3)])
@pytest.mark.parametrize("n", [1, 5000])
def test_encoder_that_never_returns_an_item_is_an_error(encoded: Any, nothing: Any, n: int) -> None:
    stage = encoded(lambda n, rng: nothing(), epochs=None)
    with pytest.raises(sp.EncodeError, match="skipped 1,300 samples in a row"):
        values_and_refs(stage, n)


def test_many_skips_between_items_are_no_error_for_any_chunk_size(encoded: Any) -> None:
    stage = encoded(lambda n, rng: n if n % 2 else sp.Skip("even"), epochs=None)
    assert stage.info.max_empty == 1300
    assert values_and_refs(stage, 3000)[0] == [1, 3, 5, 7, 9] * 600


def test_encoder_that_stops_returning_items_within_a_call_is_an_error(encoded: Any) -> None:
    calls = iter(range(10**9))
    stage = encoded(lambda n, rng: n if next(calls) < 5 else sp.Skip("later"), epochs=None, check=0.0)
    with pytest.raises(sp.EncodeError, match="1,300 samples in a row"):
        values_and_refs(stage, 100)


def test_error_limit_is_thirty_epochs_and_at_most_100_000(encoded: Any) -> None:
    info = encoded(lambda n, rng: n).info
    limits = [dataclasses.replace(info, population=n).max_empty for n in (0, 1, 10, 10**9)]
    assert limits == [1000, 1030, 1300, 100_000]


def test_settings_are_those_of_the_encoder_and_its_class() -> None:
    class Sized(Made):
        def settings(self) -> dict[str, Any]:
            return {"image_size": 3}

    assert "Sized" in sp.Encode(_Source(), Sized(mixed)).settings()["encoder"]
    assert sp.Encode(_Source(), Sized(mixed)).settings()["encoder.image_size"] == 3


class _Source(custom.SampleStage):
    """A source of nothing."""

    def __init__(self) -> None:
        none = frozenset([0])
        self.info = StageInfo(sp.Lane(), 0, population=1, endless=True, tags=none, origins=none)


def test_the_state_of_another_stage_is_a_mismatch(encoded: Any) -> None:
    stage = encoded(mixed)
    with pytest.raises(sp.CheckpointMismatchError, match="no state of Encode"):
        stage.restore_state(stage.source.save_state())


def test_source_may_be_an_object_with_only_next(encoded: Any, tmp_path: Path) -> None:
    class EveryOther(custom.PassThrough, custom.SampleStage):
        def __next__(self) -> sp.Sample:
            next(self.source)
            return next(self.source)  # type: ignore[no-any-return]

    write_tar(tmp_path / "own" / "a.tar", [(f"{i}.json", b'{"id": %d}' % i) for i in range(7)])

    def build() -> sp.Encode:
        reader = sp.TarShardReader(tmp_path / "own", sp.Lane(), epochs=1, shuffle=False)
        return sp.Encode(EveryOther(reader), Made(lambda n, rng: n))

    stage = build()
    assert values_and_refs(stage, 2)[0] == [1, 3]
    after = build()
    after.restore_state(stage.save_state())
    assert list(after) == list(stage) == [5]


class Telling(sp.TaskEncoder):
    """Numbers as items of a length and images of their own; `told` and `told_images` change what is told."""

    global_rng = False
    told = told_images = 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number == 11:
            return sp.Skip("eleven")
        return self.parts(number) if number == 12 else number

    def parts(self, number: int) -> Iterator[int]:
        yield from (number, number)

    def length(self, item: int) -> int:
        return 1 + item % 4

    def images(self, item: int) -> int:
        return item % 3

    def length_of(self, sample: sp.Sample) -> int | None:
        number = int(sample.json()["id"])
        return None if number in (11, 12) and not self.told else 1 + number % 4 + (self.told if number > 4 else 0)

    def images_of(self, sample: sp.Sample) -> int:
        return int(sample.json()["id"] % 3) + self.told_images

    def cut(self, item: int, start: int, stop: int) -> Any:
        raise NotImplementedError

    def pack(self, items: list[int], rng: sp.Rng) -> Any:
        return list(items)


def packs(make_shards: Any, encoder: sp.TaskEncoder, *, skip: int = 0, **how: Any) -> sp.OnlinePacker:
    samples = sp.TarShardReader(str(make_shards([20])), sp.Lane(), epochs=1, shuffle=False)
    return sp.OnlinePacker(sp.Encode(samples, encoder, **how), max_length=6, policy="first_fit", open_packs=1)


def test_declared_sizes_place_items_and_others_are_encoded(make_shards: Any) -> None:
    found = [number for pack in packs(make_shards, Telling()) for number in pack]
    assert sorted(found) == sorted([*range(11), 12, *range(12, 20)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"told": 1}, r"Telling.length_of declared 3, but length of the item is 2.*\n.* sample 's000005'"),
        ({"told_images": 2}, r"Telling.images_of declared 2, but images of the item is 0.*\n.* sample 's000000'"),
    ],
)
def test_size_that_differs_from_the_declared_one_is_an_error_with_both(
    make_shards: Any, wrong: dict[str, int], message: str
) -> None:
    encoder = Telling()
    vars(encoder).update(wrong)
    with pytest.raises(sp.EncodeError, match=message):
        list(packs(make_shards, encoder))


@pytest.mark.parametrize(("number", "message"), [(11, "encode skipped the sample.*'eleven'"), (12, "yields several")])
def test_declared_length_of_a_fan_out_is_an_error(make_shards: Any, number: int, message: str) -> None:
    class TellingOne(Telling):
        def length_of(self, sample: sp.Sample) -> int | None:
            return 1 if sample.index == number else super().length_of(sample)

    items = sp.Encode(sp.TarShardReader(str(make_shards([20])), sp.Lane(), shuffle=False), TellingOne())
    with pytest.raises(sp.EncodeError, match=f"(?s)length_of declared .*{message}.*sample 's0000{number}'"):
        for _ in range(20):
            next(items)


def test_a_length_of_zero_is_an_error(make_shards: Any) -> None:
    encoder = Telling()
    encoder.told = -2
    with pytest.raises(sp.EncodeError, match=r"Telling.length_of failed: ValueError: it is 0, but"):
        list(packs(make_shards, encoder))


class Failing(Telling):
    """Fails for two samples: where it tells one's length, and where it encodes the other."""

    def length_of(self, sample: sp.Sample) -> int | None:
        if sample.json()["id"] == 2:
            raise OverflowError("too long to tell")
        return super().length_of(sample)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        if sample.json()["id"] == 5:
            raise OverflowError("too long to encode")
        return super().encode(sample, rng)


def test_error_of_length_follows_the_policy_of_encode(make_shards: Any) -> None:
    with pytest.raises(sp.EncodeError, match="too long to tell"):
        next(packs(make_shards, Failing()))
    stage = packs(make_shards, Failing(), on_error="skip")
    found = [number for pack in stage for number in pack]
    assert sorted(found) == sorted([0, 1, 3, 4, *range(6, 11), 12, *range(12, 20)])
    assert stage.source.counts["skipped/OverflowError"] == 2


def test_encoder_with_images_must_declare_their_number_too() -> None:
    class LengthsAlone(Telling):
        images_of = sp.TaskEncoder.images_of

    assert DeclaredSize(Telling()).known
    assert not DeclaredSize(LengthsAlone()).known
    assert not DeclaredSize(sp.TaskEncoder()).known


class Views(sp.TaskEncoder):
    """Several dicts of each sample, as a list or one by one."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return self.make({"id": sample.json()["id"], "view": view} for view in range(2))


class PaddedViews(Views):
    """The same, with a batch of its own."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


@pytest.mark.parametrize(
    ("encoder", "doubted"),
    [(Views(list), True), (Views(iter), False), (Views(tuple), False), (PaddedViews(list), False)],
)
def test_list_of_dicts_as_an_item_warns_once(
    make_shards: Any, caplog: pytest.LogCaptureFixture, encoder: sp.TaskEncoder, doubted: bool
) -> None:
    chain = sp.read(str(make_shards([9])), shuffle=False).encode(encoder).batch(2)
    chain.take(3)
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("stages.encode")]
    assert len(messages) == doubted
    assert not doubted or messages[0].startswith("Views.encode returned a list of 2 dicts, which is a single item: ")
