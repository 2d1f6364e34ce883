"""States: damage is noticed, what does not fit is refused, and those of older releases go on exactly.

`golden/state_v1.pt` was written by the release that introduced state version 1. It is never written again: a new
version gets a file of its own beside it, by `python -m tests.run.state.test_state golden/state_v2.pt`.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.errors import StateError
from savable_pipeline.run.state.fingerprint import Fingerprint, pack_fingerprint
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.run.state.state_dict import batches_before, check_flat, lane_name, lane_numbers, read_lanes
from tests.conftest import write_tar

GOLDEN = Path(__file__).parent / "golden" / "state_v1.pt"
ORDERS = Path(__file__).parent / "golden" / "orders.pt"
STATE = LaneState(3, epoch=1, batches=2, more=True, stages={"held": [[1, 0, 0]], "source": {"refs": b"\0" * 24}})


def test_a_state_comes_back_as_it_was() -> None:
    assert unpack_state(pack_state(STATE), LaneState, "lane 3") == STATE
    assert unpack_state(bytearray(pack_state(LaneState(0, 0))), LaneState, "lane 0") == LaneState(0, 0)


def test_a_state_is_its_magic_version_checksum_and_messagepack() -> None:
    raw = pack_state(LaneState(5, epoch=1))
    assert raw[:6] == b"SAVL\x01\x00"
    assert len(raw) < 60
    assert msgspec.msgpack.decode(raw[14:]) == {"lane": 5, "epoch": 1, "batches": 0, "more": None, "stages": None}


def test_every_flipped_byte_and_every_cut_is_a_state_error() -> None:
    raw = pack_state(STATE)
    damaged = [raw[:cut] for cut in range(len(raw))]
    damaged += [raw[:i] + bytes([raw[i] ^ 1 << bit]) + raw[i + 1 :] for i in range(len(raw)) for bit in (0, 7)]
    damaged += [raw + b"\0", raw + raw]
    for wrong in damaged:
        with pytest.raises(StateError, match="lane 3: "):
            unpack_state(wrong, LaneState, "lane 3")


def test_another_version_is_an_error_that_names_both() -> None:
    raw = pack_state(STATE)
    with pytest.raises(StateError, match="state version 2; this release reads version 1"):
        unpack_state(raw[:4] + b"\x02\x00" + raw[6:], LaneState, "lane 3")


@pytest.mark.parametrize("raw", [None, 5, "text", [1], torch.zeros(3)])
def test_what_is_no_bytes_is_a_state_error(raw: Any) -> None:
    with pytest.raises(StateError, match="lane 3: a state is bytes, not"):
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
    return {"format": 1, "lanes": of, "epoch": epoch, "slot": slot, "fingerprint": run, **states}


def test_lanes_lie_under_names_of_their_own() -> None:
    assert lane_name(7) == "lane_00007"
    assert lane_numbers({**flat([2, 0]), "lane_x": 1, "lanes": 4}) == [0, 2]


def test_lanes_are_read_and_checked_to_be_of_the_step() -> None:
    read = read_lanes(flat([0, 1, 2, 3]), [1, 3])
    assert {lane: state.batches for lane, state in read.items()} == {1: 2, 3: 1}


def test_a_lane_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(sp.CheckpointMismatchError, match="holds the lanes 0-1, 3 of 4, but this rank needs lane 2"):
        read_lanes(flat([0, 1, 3]), [0, 2])
    with pytest.raises(sp.CheckpointMismatchError, match="holds the lanes none of 4"):
        read_lanes(flat([]), [0])


@pytest.mark.parametrize("changes", [{"lane": 1}, {"epoch": 1}, {"batches": 3}])
def test_a_lane_of_another_step_is_an_error(changes: dict[str, int]) -> None:
    state = flat([0, 1, 2, 3])
    state["lane_00002"] = pack_state(LaneState(**{"lane": 2, "epoch": 0, "batches": 1, **changes}))
    with pytest.raises(sp.CheckpointMismatchError, match=r"lane_00002: its batch .* saved at different steps"):
        read_lanes(state, [0, 2])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "a state is a dict, not list"),
        ({}, "it holds nothing, but not epoch, fingerprint, format, lanes, slot"),
        ({**flat([0]), "format": 2}, "state version 2; this release reads version 1"),
        ({**flat([0]), "slot": -1}, "the state's slot is -1"),
        ({**flat([0]), "epoch": "1"}, "the state's epoch is '1'"),
        ({**flat([0]), "lanes": True}, "the state's lanes is True"),
        ({**flat([0]), "lanes": 0}, "no lanes"),
    ],
)
def test_what_is_no_flat_state_is_a_state_error(state: Any, message: str) -> None:
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
        ({**flat([1]), "lane_00001": flat([1], slot=2)["lane_00001"]}, "lane_00001: its batch 1 .*needs batch 2"),
    ],
)
def test_states_of_different_steps_or_runs_are_not_merged(other: dict[str, Any], message: str) -> None:
    with pytest.raises(sp.CheckpointMismatchError, match=message):
        sp.merge_states([flat([0]), other])


def test_a_damaged_lane_is_noticed_when_states_are_merged() -> None:
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


class GoldenEncoder(sp.TaskEncoder):
    """Skips, fans out and draws, all by numbers that never change."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = int(sample.json()["id"])
        if number % 11 == 0:
            return sp.Skip("eleventh")
        return self._parts(number, rng) if number % 5 == 0 else (number, rng.integers(1000))

    def _parts(self, number: int, rng: sp.Rng) -> Iterator[tuple[int, int]]:
        for _ in range(3):
            yield number, rng.integers(1000)

    def length(self, item: Any) -> int:
        return 1 + int(item[0]) % 7

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(1000), *items]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(1000), *items]


def golden_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    reader = sp.TarShardReader(str(shards), lane, block_size=4, window=2)
    lane.rng("golden").random()
    items = sp.Encode(sp.ShuffleBuffer(reader, size=12), GoldenEncoder())
    return sp.Batcher(sp.OnlinePacker(items, max_length=15, open_packs=3), size=2)


def finite_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(str(shards), lane, epochs=1), GoldenEncoder()), size=3)


def file_order_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(str(shards), lane, shuffle=False), GoldenEncoder()), size=3)


def blended_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    readers = {name: sp.TarShardReader(str(shards / f"{name}.tar"), lane) for name in ("0", "3")}
    return sp.Batcher(sp.Encode(sp.Blend(readers, weights={"0": 7, "3": 3}), GoldenEncoder()), size=3)


def decreasing_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    items = sp.Encode(sp.TarShardReader(str(shards), lane), GoldenEncoder())
    packs = sp.OnlinePacker(items, max_length=15, policy="first_fit_decreasing", open_packs=2)
    return sp.Batcher(packs, size=2)


OTHER_ORDERS = {
    "finite": finite_pipeline,
    "file order": file_order_pipeline,
    "blended": blended_pipeline,
    "decreasing": decreasing_pipeline,
}


def golden_loader(folder: Path, pipeline: Any = golden_pipeline) -> sp.SavableLoader:
    """The run of the golden state: five shards, six lanes."""
    for shard, size in enumerate([30, 1, 25, 40, 12]):
        members = [(f"{n:03d}.json", b'{"id": %d}' % (100 * shard + n)) for n in range(size)]
        write_tar(folder / f"{shard}.tar", members)
    return sp.SavableLoader(partial(pipeline, folder), seed=7, lanes=6)


def next_digests(loader: sp.SavableLoader, n: int = 40) -> list[str]:
    """Of the next batches, all integers."""
    return [xxh3_64_hexdigest(repr(batch).encode()) for _, batch in zip(range(n), loader, strict=False)]


def write_golden(path: Path) -> None:
    """Write the state after 20 batches and the digests of the next 40."""
    with tempfile.TemporaryDirectory() as folder, golden_loader(Path(folder)) as loader:
        next_digests(loader, 20)
        state = loader.state_dict()
        torch.save({"data": state, "next": next_digests(loader)}, path)


def test_a_state_of_version_one_goes_on_exactly_as_it_did_when_it_was_written(tmp_path: Path) -> None:
    saved = torch.load(GOLDEN, weights_only=True)
    assert GOLDEN.stat().st_size < 20_000
    with golden_loader(tmp_path) as loader:
        loader.load_state_dict(saved["data"])
        assert next_digests(loader) == saved["next"]


def test_the_run_of_the_golden_state_has_buffers_half_full_and_a_fan_out_cut_in_its_middle() -> None:
    lanes = read_lanes(torch.load(GOLDEN, weights_only=True)["data"], range(6))
    stages = [state.stages for state in lanes.values() if state.stages]
    assert any(stage["source"]["packs"] for stage in stages)
    assert any(stage["source"]["source"]["part"] for stage in stages)
    assert all(stage["source"]["source"]["source"]["refs"] for stage in stages)


def test_this_release_writes_what_the_golden_state_holds(tmp_path: Path) -> None:
    write_golden(tmp_path / "again.pt")
    again, golden = torch.load(tmp_path / "again.pt", weights_only=True), torch.load(GOLDEN, weights_only=True)
    assert again["next"] == golden["next"]
    assert {**again["data"], "fingerprint": 0} == {**golden["data"], "fingerprint": 0}  # it names library versions


def write_orders(path: Path, number: int) -> None:
    """Add, under the number of their order, the states of other pipelines after 5 batches and the next 6 digests."""
    orders = torch.load(path, weights_only=True) if path.exists() else {}
    for name, pipeline in OTHER_ORDERS.items():
        with tempfile.TemporaryDirectory() as folder, golden_loader(Path(folder), pipeline) as loader:
            next_digests(loader, 5)
            orders[f"{number} {name}"] = {"data": loader.state_dict(), "next": next_digests(loader, 6)}
    torch.save(orders, path)


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_a_state_of_order_two_goes_on_exactly_as_it_did_when_it_was_written(tmp_path: Path, name: str) -> None:
    saved = torch.load(ORDERS, weights_only=True)[f"2 {name}"]
    with golden_loader(tmp_path, OTHER_ORDERS[name]) as loader:
        loader.load_state_dict(saved["data"])
        assert next_digests(loader, 6) == saved["next"]


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_a_state_of_order_one_is_refused_and_never_continued_in_another_order(tmp_path: Path, name: str) -> None:
    saved = torch.load(ORDERS, weights_only=True)[f"1 {name}"]
    with golden_loader(tmp_path, OTHER_ORDERS[name]) as loader:
        told = r"order: saved None, here 2 \(this stage .*: continue with the release that saved the state\)"
        with pytest.raises(sp.CheckpointMismatchError, match=told):
            loader.load_state_dict(saved["data"])
        with pytest.raises((sp.CheckpointMismatchError, ValueError), match=r"order"):
            loader.load_state_dict(saved["data"], allow={"TarShardReader.order", "Blend.order", "OnlinePacker.order"})


if __name__ == "__main__":
    write_golden(Path(__file__).parent / sys.argv[1])
