"""`.filter`: what is kept, what is counted, and errors; before and after encoding."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.stages.filters import Filter
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import MakeShards
from tests.support.draws import few_examples
from tests.support.shards import write_numbered_shards
from tests.support.toy_stores import number_of


def number(sample: sp.Sample) -> int:
    return number_of(sample)


def three_of_ten(sample: sp.Sample, rng: sp.Rng) -> bool:
    return rng.random() < 0.3


def short(item: int) -> bool:
    return item % 5 > 1


@few_examples(8)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(2, 9))
def test_filtered_samples_and_items_equal_a_comprehension(
    tmp_path_factory: pytest.TempPathFactory, buffer: int, size: int, divisor: int
) -> None:
    shards = tmp_path_factory.mktemp("shards")
    write_numbered_shards(shards, [40, 3])
    read = sp.read(str(shards), shuffle=False)
    kept = [n for n in range(43) if n % divisor]
    assert [number_of(s) for s in read.filter(lambda s: number_of(s) % divisor)] == kept
    assert list(read.map(number).filter(lambda n: n % divisor > 0)) == kept
    shuffled = list(read.filter(lambda s: number_of(s) % divisor).shuffle(buffer).map(number))
    assert sorted(shuffled) == kept
    batches = list(read.map(number).filter(lambda n: n % divisor > 0).batch(size))
    assert [int(n) for batch in batches for n in batch] == kept


def test_filters_that_draw_numbers_resume_exactly_and_draw_others_than_the_encoder(make_shards: MakeShards) -> None:
    def drawn(sample: sp.Sample, rng: sp.Rng) -> float:
        return rng.random()

    read = sp.read(str(make_shards([60, 30])))
    chain = read.filter(three_of_ten).shuffle(5).map(number).filter(short).batch(2)
    assert assert_exact_resume(chain, lanes=4, steps=12, chains=1, after=2, world_sizes=(1, 2)) > 12
    assert max(read.filter(three_of_ten).map(drawn)) > 0.3  # the same numbers would all be below


def test_filtered_samples_are_counted_apart_from_skips(make_shards: MakeShards) -> None:
    def odd_or_skip(sample: sp.Sample) -> Any:
        return sp.Skip("seven") if number_of(sample) == 7 else number_of(sample)

    def odd(sample: sp.Sample) -> bool:
        return number_of(sample) % 2 == 1

    chain = sp.read(str(make_shards([40])), epochs=1).filter(odd).map(odd_or_skip).filter(short).batch(2)
    loader = sp.SavableLoader(chain, seed=0, lanes=1)
    given_ = [int(n) for batch in loader for n in batch]
    assert sorted(given_) == [n for n in range(40) if n % 2 and n != 7 and n % 5 > 1]
    stats = loader.stats()
    assert stats["Encode/skipped/seven"] == 1
    assert stats["Filter/filtered"] == 20 + sum(n % 2 and n != 7 and n % 5 <= 1 for n in range(40))


def test_excluded_samples_are_not_passed_to_the_filter_and_are_dropped_later(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    (tmp_path / "gone").write_text("s000003\n")

    def checked(sample: sp.Sample) -> bool:
        assert number_of(sample) != 3
        return number_of(sample) > 1

    chain = sp.read(str(make_shards([6])), exclude=str(tmp_path / "gone")).filter(checked).map(number)
    assert sorted(chain) == [2, 4, 5]


@pytest.mark.parametrize("after", [False, True])
def test_error_of_a_filter_is_raised_or_skipped_and_retried(make_shards: MakeShards, after: bool) -> None:
    broken = {"is": True}

    def tried(value: Any) -> bool:
        if (value if isinstance(value, int) else number_of(value)) == 4 and broken["is"]:
            raise RuntimeError("no four")
        return True

    shards = str(make_shards([9]))

    def chain(**settings: Any) -> Any:
        read = sp.read(shards, shuffle=False, epochs=1)
        return read.map(number).filter(tried, **settings) if after else read.filter(tried, **settings).map(number)

    loader = sp.SavableLoader(chain().batch(3), seed=0, lanes=1)
    assert next(loader).tolist() == [0, 1, 2]  # the fault is met where it is due, though more was read ahead
    state = loader.state_dict()
    with pytest.raises(sp.EncodeError, match=r"filter\(.*tried\) failed.*RuntimeError: no four") as caught:
        next(loader)
    assert "\n  stage Filter, " in str(caught.value)
    broken["is"] = False
    resumed = sp.SavableLoader(chain().batch(3), seed=0, lanes=1)
    resumed.load_state_dict(state)
    for each in (loader, resumed):
        assert [batch.tolist() for batch in each] == [[3, 4, 5], [6, 7, 8]]
    broken["is"] = True
    loader = sp.SavableLoader(chain(on_error="skip").batch(3), seed=0, lanes=1)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 5, 6], [7, 8]]
    assert loader.stats()["Filter/skipped/RuntimeError"] == 1
    assert "Filter/filtered" not in loader.stats()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("taken", [1, 20])
def test_elements_dropped_before_an_error_are_counted_once(make_shards: MakeShards, after: bool, taken: int) -> None:
    failures = {3: 2, 11: 1}

    def tried(value: Any) -> bool:
        found = value if isinstance(value, int) else number_of(value)
        if failures.get(found):
            failures[found] -= 1
            raise RuntimeError("not now")
        return found > 3 and found % 2 == 1

    read = sp.read(str(make_shards([14])), shuffle=False, epochs=1)
    stage: Any = (read.map(number) if after else read).filter(tried)(sp.Lane())
    passed, errors = 0, 0
    for _ in range(12):
        try:
            passed += len(stage.take(taken))
        except sp.EncodeError:
            errors += 1
    assert passed == 5 and 1 <= errors <= 3
    assert stage.counts["filtered"] == 9
    assert stage.save_state()["samples"] == 14


def test_errors_of_a_filter_of_blended_packs_are_counted_by_source(make_shards: MakeShards, tmp_path: Path) -> None:
    class Packs(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            return [number_of(sample)]

        def pack(self, items: list[Any], rng: sp.Rng) -> list[int]:
            return [number for item in items for number in item]

    def fails(pack: list[int]) -> bool:
        if 4 in pack:
            raise RuntimeError("no four")
        return True

    shards = str(make_shards([12]))
    packs = {name: sp.read(shards, epochs=1).encode(Packs()).pack(2) for name in "ab"}
    chain = sp.blend(packs, weights={"a": 1, "b": 1}).filter(fails, on_error="skip")
    stage = chain(sp.Lane())
    assert len(list(stage)) == 10
    skipped = {name: found for name, found in stage.counts.items() if name.endswith("/skipped/RuntimeError")}
    assert [*skipped.values()] == [1, 1]
    assert [stage.counts[name.replace("skipped/RuntimeError", "items")] for name in skipped] == [5, 5]


def test_filter_of_items_raises_errors_that_may_not_happen_again(make_shards: MakeShards) -> None:
    """It saves no list of items to avoid, so that a resumed run would yield an item that this one skipped."""

    def unreadable(value: int) -> bool:
        if value == 2:
            raise OSError(errno.EIO, "a bad disk")
        return True

    chain = sp.read(str(make_shards([9])), shuffle=False, epochs=1).map(number).filter(unreadable, on_error="skip")
    with pytest.raises(sp.EncodeError, match="a bad disk"):
        list(sp.SavableLoader(chain.batch(3), seed=0, lanes=1))


def test_an_error_of_a_wrong_setting_names_the_filter(make_shards: MakeShards) -> None:
    samples = sp.read(str(make_shards([3])))(sp.Lane())
    with pytest.raises(ValueError, match="Filter: on_error"):
        Filter(samples, bool, on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [False, True])
def test_a_filter_that_forgets_to_return_is_an_error(make_shards: MakeShards, after: bool) -> None:
    def forgets(value: Any) -> Any:
        bool(value)

    read = sp.read(str(make_shards([3])))
    with pytest.raises(sp.EncodeError, match="returned None; return True or False"):
        list(read.map(number).filter(forgets) if after else read.filter(forgets))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("epochs", [1, None])
def test_filter_that_drops_everything_is_an_error(make_shards: MakeShards, after: bool, epochs: int | None) -> None:
    def nothing(value: Any) -> bool:
        return False

    read = sp.read(str(make_shards([8])), epochs=epochs)
    chain = read.map(number).filter(nothing) if after else read.filter(nothing).map(number)
    with pytest.raises(sp.EncodeError, match=r"nothing\) dropped (all 8 of an epoch|1,24. in a row)"):
        next(sp.SavableLoader(chain.batch(2), seed=0, lanes=1))


def early(value: Any) -> bool:
    return (value if isinstance(value, int) else number_of(value)) < 8


@pytest.mark.parametrize("after", [False, True])
def test_filter_of_early_samples_ends_a_resumed_run_like_an_uninterrupted_one(
    make_shards: MakeShards, after: bool
) -> None:
    def chain(keep: Any) -> Any:
        return read.map(number).filter(keep).batch(1) if after else read.filter(keep).map(number).batch(1)

    def state_after(stage: Any, batches: int) -> Any:
        assert len(list(zip(range(batches), stage, strict=False))) == batches
        return msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state()))

    read = sp.read(str(make_shards([40])), shuffle=False, epochs=1)
    for cut in range(9):
        stage = chain(early)(sp.Lane())
        stage.restore_state(state_after(chain(early)(sp.Lane()), cut))
        assert [int(batch[0]) for batch in stage] == list(range(cut, 8))
    nothing = chain(lambda value: False)(sp.Lane())
    nothing.restore_state(state_after(nothing, 0))
    with pytest.raises(sp.EncodeError, match="all 40 of an epoch"):
        next(nothing)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("share", [0.95, 1.0])
def test_a_filter_whose_errors_are_skipped_has_a_limit(make_shards: MakeShards, after: bool, share: float) -> None:
    def fails(value: Any) -> bool:
        found = value if isinstance(value, int) else number_of(value)
        if found < share * 40:
            raise RuntimeError("no")
        return True

    read = sp.read(str(make_shards([40])))
    chain = (
        read.map(number).filter(fails, on_error="skip") if after else read.filter(fails, on_error="skip").map(number)
    )
    with pytest.raises(sp.EncodeError, match=r"(?s)10\d of the first 1\d\d (samples|items) .*RuntimeError: no"):
        sum(1 for _, _item in zip(range(10_000), chain.batch(1)(sp.Lane()), strict=False))


def test_lane_whose_samples_are_all_filtered_is_no_error(make_shards: MakeShards) -> None:
    def first(sample: sp.Sample) -> bool:
        return number_of(sample) == 0

    chain = sp.read(str(make_shards([30])), epochs=1, block_size=1).filter(first).map(number).batch(1)
    given = [[int(n) for batch in chain(sp.Lane(lane, 3)) for n in batch] for lane in range(3)]
    assert sorted(given) == [[], [], [0]]
