"""States: damage is noticed, and what does not fit is refused, such as those of other numbers."""

from __future__ import annotations

import io
import struct
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.core.run_facts import NO_FACTS
from savable_pipeline.core.state_numbers import LAST_COMMITS, ORDER, STATE
from savable_pipeline.errors import StateError
from savable_pipeline.run.state.fingerprint import Fingerprint, pack_fingerprint
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.run.state.state_dict import batches_before, check_flat, lane_name, lane_numbers, read_lanes
from savable_pipeline.run.state.summary import summarize

LANE = LaneState(3, epoch=1, batches=2, more=True, stages={"held": [[1, 0, 0]], "source": {"refs": b"\0" * 24}})


def test_packed_state_unpacks_to_an_equal_state() -> None:
    assert unpack_state(pack_state(LANE), LaneState, "lane 3") == LANE
    assert unpack_state(bytearray(pack_state(LaneState(0, 0))), LaneState, "lane 0") == LaneState(0, 0)


def test_a_state_is_its_magic_numbers_checksum_and_messagepack() -> None:
    raw = pack_state(LaneState(5, epoch=1))
    assert raw[:8] == b"SAVL" + struct.pack("<HH", STATE, ORDER)
    assert len(raw) < 70
    assert msgspec.msgpack.decode(raw[16:]) == {
        "lane": 5, "epoch": 1, "batches": 0, "more": None, "stages": None, "facts": 0,
    }  # fmt: skip


def test_every_flipped_byte_and_truncation_is_a_state_error() -> None:
    raw = pack_state(LANE)
    damaged = [raw[:cut] for cut in range(len(raw))]
    damaged += [raw[:i] + bytes([raw[i] ^ 1 << bit]) + raw[i + 1 :] for i in range(len(raw)) for bit in (0, 7)]
    damaged += [raw + b"\0", raw + raw]
    for wrong in damaged:
        with pytest.raises(StateError, match="lane 3: "):
            unpack_state(wrong, LaneState, "lane 3")


HERE = f"but this release reads ORDER {ORDER} and STATE {STATE}. "


@pytest.mark.parametrize(("order", "state"), [(ORDER, STATE + 1), (ORDER + 1, STATE), (ORDER - 1, STATE)])
def test_lane_of_other_versions_is_rejected_in_a_sentence_with_both(order: int, state: int) -> None:
    raw = pack_state(LANE)
    told = f"^lane 3: saved with ORDER {order} and STATE {state}, {HERE}"
    with pytest.raises(StateError, match=told):
        unpack_state(raw[:4] + struct.pack("<HH", state, order) + raw[8:], LaneState, "lane 3")


def test_state_of_other_versions_is_rejected_with_the_last_commit_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LAST_COMMITS, (1, 2), "abc1234")
    others = {"order": 1, "state": 2}
    for read in (check_flat, summarize, lambda state: sp.merge_states([state])):
        with pytest.raises(StateError, match=f"^the state: saved with ORDER 1 and STATE 2, {HERE}") as refused:
            read({**flat([0]), **others})
        assert str(refused.value).endswith("Load it with commit abc1234")


def test_lane_of_the_first_version_is_rejected_by_the_same_sentence() -> None:
    raw = b"SAVL\1\0" + pack_state(LANE)[8:]
    with pytest.raises(StateError, match=f"ORDER none and STATE 1, {HERE}Load it with commit d039fef"):
        unpack_state(raw, LaneState, "lane 3")


def test_state_without_versions_is_rejected_by_the_same_sentence() -> None:
    old = {"format": 1, **{name: value for name, value in flat([0]).items() if name not in ("order", "state")}}
    with pytest.raises(StateError, match=f"^the state: saved with ORDER none and STATE none, {HERE}") as refused:
        check_flat(old)
    assert str(refused.value).endswith("Load it with commit d039fef")


@pytest.mark.parametrize("raw", [None, 5, "text", [1], torch.zeros(3)])
def test_lane_that_is_not_bytes_is_a_state_error(raw: Any) -> None:
    with pytest.raises(StateError, match="lane 3: a state must be bytes, not"):
        unpack_state(raw, LaneState, "lane 3")


class Other(msgspec.Struct):
    lane: str


def test_a_state_of_another_kind_is_a_state_error() -> None:
    with pytest.raises(StateError, match="lane 3: "):
        unpack_state(pack_state(Other("three")), LaneState, "lane 3")


@given(st.integers(0, 300), st.integers(1, 40))
def test_batches_before_counts_the_slots_of_a_lane(slot: int, lanes: int) -> None:
    for lane in range(lanes):
        assert batches_before(slot, lane, lanes) == sum(q % lanes == lane for q in range(slot))


RUNS = [pack_fingerprint(Fingerprint({"seed": seed}, {})) for seed in (0, 1)]


def flat(lanes: list[int], *, of: int = 4, slot: int = 6, epoch: int = 0, run: bytes = RUNS[0]) -> dict[str, Any]:
    """The state of some lanes after the batches of all slots before `slot`."""
    states = {
        lane_name(lane): pack_state(LaneState(lane, epoch, batches_before(slot, lane, of), stages={})) for lane in lanes
    }
    numbers = {"order": ORDER, "state": STATE, "lanes": of, "epoch": epoch, "slot": slot}
    return {**numbers, "fingerprint": run, "facts": pack_state(NO_FACTS), "acknowledge": 0, **states}


def test_lanes_have_their_own_keys() -> None:
    assert lane_name(7) == "lane_00007"
    assert lane_numbers({**flat([2, 0]), "lane_x": 1, "lanes": 4}) == [0, 2]


def test_lanes_are_checked_to_be_of_the_step() -> None:
    read = read_lanes(flat([0, 1, 2, 3]), [1, 3])
    assert {lane: state.batches for lane, state in read.items()} == {1: 2, 3: 1}


def test_missing_lane_is_an_error_that_lists_the_present_ones() -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="the state has lanes 0-1, 3 of 4, but this rank needs lane 2"):
        read_lanes(flat([0, 1, 3]), [0, 2])
    with pytest.raises(sp.CheckpointMismatchError, match="has lanes none of 4"):
        read_lanes(flat([]), [0])


@pytest.mark.parametrize("changes", [{"lane": 1}, {"epoch": 1}, {"batches": 3}])
def test_a_lane_of_another_step_is_an_error(changes: dict[str, int]) -> None:
    state = flat([0, 1, 2, 3])
    state["lane_00002"] = pack_state(LaneState(**{"lane": 2, "epoch": 0, "batches": 1, **changes}))
    with pytest.raises(sp.CheckpointMismatchError, match=r"lane_00002 is at batch .* Load states of one step"):
        read_lanes(state, [0, 2])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "a state must be a dict, not list"),
        ({}, r"it lacks epoch, fingerprint, lanes, slot\.\n  It has nothing\."),
        ({**flat([0]), "state": "2"}, f"STATE '2', {HERE}"),
        ({**flat([0]), "order": True}, f"ORDER True and STATE {STATE}, {HERE}"),
        ({**flat([0]), "slot": -1}, "slot of the state is -1, not a count"),
        ({**flat([0]), "epoch": "1"}, "epoch of the state is '1', not a count"),
        ({**flat([0]), "lanes": True}, "lanes of the state is True, not a count"),
        ({**flat([0]), "lanes": 0}, "the state has no lanes"),
    ],
)
def test_value_that_is_not_a_flat_state_is_a_state_error(state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        check_flat(state)
    with pytest.raises(StateError, match=message):
        sp.merge_states([state])


def test_the_ranks_states_are_merged_into_one() -> None:
    whole = flat([0, 1, 2, 3])
    assert sp.merge_states([flat([1, 3]), flat([0, 2])]) == whole
    assert sp.merge_states([whole]) == sp.merge_states(iter([whole, flat([2])])) == whole


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (flat([1], slot=8), "differ in slot: 8 and 6"),
        (flat([1], epoch=1), "differ in epoch: 1 and 0"),
        (flat([1], of=8), "differ in lanes: 8 and 4"),
        (flat([1], run=RUNS[1]), "differ in fingerprint; "),
        (
            {**flat([1]), "lane_00001": flat([1], slot=2)["lane_00001"]},
            "lane_00001 is at batch 1 of lane 1, epoch 0, instead of batch 2 of lane 1",
        ),
    ],
)
def test_states_of_different_steps_or_runs_are_not_merged(other: dict[str, Any], message: str) -> None:
    with pytest.raises(sp.CheckpointMismatchError, match=message):
        sp.merge_states([flat([0]), other])


def test_damaged_lane_is_detected_when_states_are_merged() -> None:
    damaged = flat([1])
    damaged["lane_00001"] = damaged["lane_00001"][:-1] + b"?"
    with pytest.raises(StateError, match="lane_00001: damaged"):
        sp.merge_states([flat([0]), damaged])


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one state"):
        sp.merge_states([])


def test_a_flat_state_passes_through_torch_load_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(flat([0, 1]), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == flat([0, 1])
