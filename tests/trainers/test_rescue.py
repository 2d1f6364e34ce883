"""By the function on the page, a checkpoint of one rank becomes a whole one, bit for bit, or is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from tests.project.pages import ROOT, blocks_of
from tests.support.shards import write_numbered_shards
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline


def rescue(loader: sp.SavableLoader, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the page's function."""
    (block,) = (each.text for each in blocks_of(ROOT / "docs/trainers/index.md") if "def rescue" in each.text)
    names: dict[str, Any] = {"sp": sp}
    exec(block[: block.index("\nranks = ")], names)
    return dict(names["rescue"](loader, kept))


@pytest.fixture
def make(make_shards: Any) -> Any:
    shards = str(make_shards([60, 60]))

    def loader(*, epochs: int | None = None, seed: int = 3, **settings: Any) -> sp.SavableLoader:
        return sp.SavableLoader(partial(toy_pipeline, shards, epochs=epochs), seed=seed, lanes=6, **settings)

    return loader


def lanes_of_a_rank(state: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return what a trainer keeps that saves the state of one rank."""
    others = [lane for lane in range(6) if lane % world_size != rank]
    return {name: value for name, value in state.items() if name not in {f"lane_{lane:05d}" for lane in others}}


@pytest.mark.parametrize("epochs,taken,num_workers", [(None, 22, 1), (1, 10, 0), (1, 45, 0)])
def test_global_state_is_reconstructed(make: Any, epochs: int | None, taken: int, num_workers: int) -> None:
    one = make(epochs=epochs)
    while taken:
        taken -= len(next_hashes(one, taken))
    state = one.state_dict()
    expected = next_hashes(one, 5)
    assert epochs is None or taken or state["slot"], "in the middle of an epoch"
    with make(epochs=epochs, num_workers=num_workers) as fresh:
        found = rescue(fresh, lanes_of_a_rank(state, 0, 3))
        assert next_hashes(fresh, 5) == expected
    again = make(epochs=epochs)
    again.load_state_dict(found)
    assert next_hashes(again, 5) == expected


def test_rescue_is_suggested_when_a_state_is_rejected(make: Any) -> None:
    one = make()
    next_hashes(one, 6)
    with pytest.raises(sp.CheckpointMismatchError, match="To recover without these lanes"):
        make().load_state_dict(lanes_of_a_rank(one.state_dict(), 0, 2))


def test_a_state_of_another_run_is_rejected(make: Any) -> None:
    one = make(seed=4)
    next_hashes(one, 6)
    with pytest.raises(ValueError, match=r"fingerprint.* differ"):
        rescue(make(), lanes_of_a_rank(one.state_dict(), 0, 2))


def test_lanes_that_contradict_their_slots_are_rejected(make: Any) -> None:
    one = make()
    next_hashes(one, 6)
    early = one.state_dict()
    one.load_state_dict({**early, "lane_00000": early["lane_00000"]})
    next_hashes(one, 6)
    late = one.state_dict()
    mixed = {**late, "lane_00000": early["lane_00000"]}
    with pytest.raises(ValueError, match=r"\['lane_00000'\] differ"):
        rescue(make(), lanes_of_a_rank(mixed, 0, 2))


def test_a_slot_beyond_the_epoch_is_rejected(make: Any) -> None:
    one = make(epochs=1)
    next_hashes(one, 6)
    with pytest.raises(ValueError, match="differ"):
        rescue(make(epochs=1), {**lanes_of_a_rank(one.state_dict(), 0, 2), "slot": 600})


def test_run_with_joined_shards_is_rejected(tmp_path: Path) -> None:
    write_numbered_shards(tmp_path / "first", [20])
    write_numbered_shards(tmp_path / "all", [20, 20])

    def begin(folder: str) -> sp.SavableLoader:
        return sp.SavableLoader(partial(toy_pipeline, str(tmp_path / folder)), seed=3, lanes=6)

    short = begin("first")
    next_hashes(short, 7)
    one = begin("all")
    one.load_state_dict(short.state_dict(), allow={"shards"})
    next_hashes(one, 23)
    with pytest.raises(ValueError, match=r"lane_00000.* differ"):
        rescue(begin("all"), lanes_of_a_rank(one.state_dict(), 0, 2))
