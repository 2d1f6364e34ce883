"""Packs held and given in balanced order: nothing lost, exact on resume."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.item_buffer import built_items
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.testing import assert_exact_resume

SQUARE = sp.attention_cost(hidden=1)


class Texts(sp.TaskEncoder):
    """An item is (number, length); a pack the list of its items. `encoded` counts calls for each sample."""

    global_rng = False

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        self.encoded: dict[int, int] = {}
        self.skipped = skipped  # packs that start with one of these are skipped

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        self.encoded[number] = self.encoded.get(number, 0) + 1
        return [number, length_of(number)]

    def length(self, item: Any) -> int:
        return int(item[1])

    def cut(self, item: Any, start: int, stop: int) -> Any:
        return [item[0], stop - start]

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return sp.Skip("unlucky") if items[0][0] in self.skipped else list(items)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class TellingTexts(Texts):
    """Tells lengths without encoding, those of every tenth sample wrong if it `lies`."""

    def __init__(self, skipped: tuple[int, ...] = (), *, lies: int = 0) -> None:
        super().__init__(skipped)
        self.lies = lies

    def length_of(self, sample: sp.Sample) -> int | None:
        number = sample.json()["id"]
        return length_of(number) + (self.lies if number % 10 == 3 else 0)


def length_of(number: int) -> int:
    return 1 + number * number % 9


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([150, 90]))


def packs_of(
    shards: str, lane: sp.Lane, encoder: sp.TaskEncoder | None = None, epochs: int | None = 1, **how: Any
) -> sp.OnlinePacker:
    samples = sp.TarShardReader(shards, lane, epochs=epochs, block_size=4)
    items = sp.Encode(samples, encoder or Texts(), check=0.0)  # some count their calls
    return sp.OnlinePacker(items, max_length=16, **how)


def balanced(
    shards: str, lane: sp.Lane, candidates: int = 8, max_buffer_bytes: int = 1 << 20, **how: Any
) -> sp.Balance:
    packs = packs_of(shards, lane, max_buffer_bytes=max_buffer_bytes, **how)
    return sp.Balance(packs, candidates=candidates, cost=SQUARE, max_buffer_bytes=max_buffer_bytes)


def cost_of(pack: list[Any]) -> int:
    return sum(SQUARE(length, 0) for _, length in pack)


@pytest.mark.parametrize("candidates", [1, 2, 8, 1000])
def test_every_pack_is_yielded_once(shards: str, candidates: int) -> None:
    expected, found = list(packs_of(shards, sp.Lane())), list(balanced(shards, sp.Lane(), candidates))
    assert sorted(found) == sorted(expected)
    assert (found == expected) is (candidates == 1)


@pytest.mark.parametrize(
    ("epochs", "max_buffer_bytes", "encoder"), [(None, 0, Texts), (1, 0, TellingTexts), (1, 1 << 20, Texts)]
)
def test_a_resume_is_exact(shards: str, epochs: int | None, max_buffer_bytes: int, encoder: Any) -> None:
    def make(lane: sp.Lane) -> custom.Stage:
        how: Any = {"max_cost": 150, "cost": SQUARE, "epochs": epochs, "max_buffer_bytes": max_buffer_bytes}
        return sp.Batcher(balanced(shards, lane, encoder=encoder((3, 8, 40, 77)), **how), size=2)

    assert assert_exact_resume(make, lanes=3, steps=10, world_sizes=(1, 3), chains=1, after=2) > 10


@pytest.mark.parametrize("n", [3, 30, 170])
def test_restored_stage_yields_the_rest(shards: str, n: int) -> None:
    packs, again = (balanced(shards, sp.Lane(), epochs=None) for _ in range(2))
    for _ in range(n):
        next(packs)
    again.restore_state(packs.save_state())
    assert again.save_state() == packs.save_state()
    assert [next(again) for _ in range(40)] == [next(packs) for _ in range(40)]


def test_order_equals_the_golden_order(shards: str) -> None:
    packs = balanced(shards, sp.Lane(1, 2, 7), epochs=None)
    numbers = [number for _ in range(300) for number, _ in next(packs)]
    assert xxh3_64_hexdigest(np.array(numbers, "<u8").tobytes()) == "d82bd0d197b7f61c"


def test_lanes_yield_packs_of_similar_cost_in_a_step(shards: str) -> None:
    def waiting(make: Any) -> float:
        lanes = [make(shards, sp.Lane(index, 8, 3), epochs=None) for index in range(8)]
        costs = np.array([[cost_of(next(lane)) for lane in lanes] for _ in range(90)][30:])
        return 1 - float(costs.mean() / costs.max(axis=1).mean())

    assert waiting(balanced) < waiting(packs_of) / 2


def test_first_pack_waits_for_four_and_each_next_takes_two(shards: str) -> None:
    packs, taken = balanced(shards, sp.Lane(), candidates=7), []
    for _ in range(6):
        next(packs)
        taken.append(packs.source.counts["packs"])
    assert taken == [4, 6, 8, 10, 11, 12]
    assert (packs.counts["packs"], len(packs.save_state()["held"])) == (6, 6)


@pytest.mark.parametrize("encoder", [Texts, TellingTexts])
def test_a_skipped_pack_is_replaced_in_its_slot(shards: str, encoder: Any) -> None:
    all_of = balanced(shards, sp.Lane(), encoder=encoder())
    skipped = tuple(pack[0][0] for pack in list(all_of)[5:15])
    packs = balanced(shards, sp.Lane(), encoder=encoder(skipped))
    given = list(packs)
    assert len(given) == len(list(balanced(shards, sp.Lane()))) - 10
    assert packs._rule.count == packs.counts["packs"] == len(given)
    assert packs.counts["skipped/unlucky"] + packs.source.counts["skipped/unlucky"] == 10


@pytest.mark.parametrize("encoder", [Texts, TellingTexts])
def test_packs_that_are_all_skipped_are_an_error_not_a_spin(
    make_shards: Any, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageInfo, "max_empty", 50)
    with pytest.raises(sp.EncodeError, match="packs in a row"):
        next(balanced(str(make_shards([3])), sp.Lane(), encoder=encoder((0, 1, 2)), epochs=None))


def test_memory_budget_changes_no_batch(shards: str) -> None:
    held, made_again = balanced(shards, sp.Lane()), balanced(shards, sp.Lane(), max_buffer_bytes=0)
    assert [next(held) for _ in range(15)] == [next(made_again) for _ in range(15)]
    assert (built_items(held), built_items(made_again)) == (7, 0)


def test_declared_length_avoids_encoding_twice(shards: str) -> None:
    for encoder, most in (Texts(), 3), (TellingTexts(), 1):
        assert len(list(balanced(shards, sp.Lane(), encoder=encoder, max_buffer_bytes=0))) > 50
        assert max(encoder.encoded.values()) == most
        assert len(encoder.encoded) == 240


def test_declared_lengths_change_no_order(shards: str) -> None:
    assert list(balanced(shards, sp.Lane(), encoder=TellingTexts())) == list(balanced(shards, sp.Lane()))


def test_state_of_balance_has_only_refs_lengths_and_costs(shards: str) -> None:
    packs = balanced(shards, sp.Lane())
    costs = [cost_of(next(packs)) for _ in range(12)]
    state = packs.save_state()
    assert np.frombuffer(state["past"], "<i8").tolist() == costs
    assert state["count"] == 12
    for ref, arrival, sizes in map(msgspec.msgpack.decode, state["held"]):
        pack = packs.fetch(ref)
        assert sizes == [number for _, length in pack for number in (length, 0)]
        assert 0 <= arrival <= 12


def test_failing_pack_is_retried_and_nothing_is_lost(shards: str) -> None:
    class Fails(Texts):
        left = 5

        def pack(self, items: list[Any], rng: sp.Rng) -> Any:
            if items[0][0] % 3 == 0 and Fails.left:
                Fails.left -= 1
                raise OSError("for now")
            return super().pack(items, rng)

    expected, found, errors = list(balanced(shards, sp.Lane())), [], 0
    packs = balanced(shards, sp.Lane(), encoder=Fails(), max_buffer_bytes=0)
    while len(found) < len(expected):
        try:
            found.append(next(packs))
        except sp.EncodeError:
            errors += 1
    assert (errors, found) == (5, expected)


def test_blended_packs_are_balanced_by_their_contents(shards: str) -> None:
    def make(lane: sp.Lane, by: Any = "samples", encoder: Any = Texts) -> custom.Stage:
        own = encoder()
        branches = {name: packs_of(shards, lane, own, epochs=None) for name in "ab"}
        return sp.Balance(sp.Blend(branches, weights={"a": 3, "b": 1}, by=by), candidates=5, cost=SQUARE)

    for encoder in (Texts, TellingTexts):
        packs = make(sp.Lane(), encoder=encoder)
        next(packs)
        held = [msgspec.msgpack.decode(each)[2] for each in packs.save_state()["held"]]
        assert all(sum(sizes) <= 16 and len(sizes) > 2 for sizes in held)
        build = partial(batches_of, partial(make, encoder=encoder))
        assert assert_exact_resume(build, lanes=2, steps=5, chains=0, after=2) > 5


def batches_of(make: Any, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(make(lane), size=2)


def test_items_are_balanced_without_a_packer(shards: str) -> None:
    for encoder in (Texts(), TellingTexts()):
        items = sp.Encode(sp.TarShardReader(shards, sp.Lane(), epochs=1), encoder)
        found = list(sp.Balance(items, candidates=6, cost=SQUARE, max_buffer_bytes=0))
        assert sorted(number for number, _ in found) == list(range(240))


def test_the_sizes_of_a_pack_pass_a_filter(shards: str) -> None:
    class Full(custom.PassThrough, custom.ItemStage):
        def __next__(self) -> Any:
            return next(pack for pack in self.source if sum(length for _, length in pack) == 16)

    packs = sp.Balance(Full(packs_of(shards, sp.Lane())), candidates=6, cost=SQUARE)
    next(packs)
    held = [msgspec.msgpack.decode(each)[2] for each in packs.save_state()["held"]]
    assert all(sum(sizes) == 16 and len(sizes) > 2 for sizes in held)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"cost": 2048}, "cost must be a function"),
        ({"encoder": object()}, "takes a TaskEncoder"),
    ],
)
def test_wrong_settings_are_rejected(shards: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sp.Balance(packs_of(shards, sp.Lane()), **{"candidates": 8, "cost": SQUARE, **wrong})


def test_balance_may_follow_a_blend(shards: str) -> None:
    lane = sp.Lane()
    with pytest.raises(ValueError, match="after the Blend, not in its source 'a'"):
        sp.Blend({"a": balanced(shards, lane), "b": packs_of(shards, lane)}, weights={"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("held", [msgspec.msgpack.encode([(0, (0, 0, 0)), 0, [3, 0]])] * 9),
        ("held", [msgspec.msgpack.encode([(0, (0, 0, 0)), 0, [3]])]),
        ("held", [msgspec.msgpack.encode([(0, (0, 0, 0)), 0, [-3, 0]])]),
        ("held", [msgspec.msgpack.encode([(0, (0, 0, 0)), "x", [3, 0]])]),
        ("held", [b"\xc1"]),
        ("past", b"1234567"),
        ("past", bytes(8 * 16 * 8 + 8)),
    ],
)
def test_a_state_of_another_stage_or_a_forged_one_is_a_mismatch(shards: str, field: str, value: Any) -> None:
    packs = balanced(shards, sp.Lane())
    next(packs)
    state = {**packs.save_state(), field: value}
    with pytest.raises(sp.CheckpointMismatchError, match="Balance"):
        balanced(shards, sp.Lane()).restore_state(state)


def test_settings_include_candidates_and_cost(shards: str) -> None:
    assert balanced(shards, sp.Lane()).settings() == {"candidates": 8, "cost": "attention_cost(hidden=1)"}
    capped = packs_of(shards, sp.Lane(), max_cost=90, cost=sp.attention_cost(hidden=2))
    assert capped.settings().items() >= {"max_cost": 90, "cost": "attention_cost(hidden=2)"}.items()
    assert "max_cost" not in packs_of(shards, sp.Lane()).settings()


@pytest.mark.parametrize("wrong", [{"max_cost": 90}, {"cost": SQUARE}, {"max_cost": 6, "cost": SQUARE}])
def test_max_cost_needs_a_cost_and_room_for_a_token(shards: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"OnlinePacker: (set )?max_cost"):
        packs_of(shards, sp.Lane(), **wrong)
