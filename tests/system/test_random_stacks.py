"""Whatever an order was computed from is in the state: random stacks of stages, resumed after every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.support.draws import scaled_examples
from tests.support.random_stacks import stack, stacks
from tests.support.shards import write_numbered_shards

BATCHES = 9
PLAIN = {"branches": [(20, [])], "after": [], "by": "tokens", "fans_out": True, "size": 1, "last": "batch"}
SHUFFLED_PACKS = [("pack", ("best_fit", 40)), ("shuffle", 12)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("stacks")
    write_numbered_shards(folder, [20, 7, 33])
    return str(folder)


def fresh(shards: str, chosen: dict[str, Any], held_bytes: int) -> Any:
    """A stack in a lane of its own."""
    return stack(shards, sp.Lane(1, 2, 7), chosen, held_bytes=held_bytes)


@scaled_examples(200, suite=8)
@example({**PLAIN, "after": SHUFFLED_PACKS, "tells": False, "gap": 0, "candidates": 8})
@example({**PLAIN, "after": SHUFFLED_PACKS, "tells": True, "gap": 7, "candidates": 8})
@example({**PLAIN, "branches": [(20, SHUFFLED_PACKS)] * 2, "tells": False, "gap": 7, "candidates": None})
@example({**PLAIN, "branches": [(20, SHUFFLED_PACKS), (3, [])], "tells": True, "gap": 7, "candidates": 3})
@example(
    {**PLAIN, "after": [*SHUFFLED_PACKS[:1], ("pack", ("first_fit", 60))], "tells": True, "gap": 1, "candidates": None}
)
@example(  # packs whose sizes an own stage loses: a resume must not know them either
    {
        **PLAIN,
        "branches": [(20, [("choose", 7), ("swap", None), ("shuffle", 2)])],
        "after": [("shuffle", 12), ("filter", None)],
        "tells": True,
        "fans_out": False,
        "gap": 7,
        "candidates": 8,
        "size": 2,
    }
)
@given(chosen=stacks)
def test_random_pipeline_yields_the_same_batches_after_each_resume_and_with_any_memory(
    shards: str, chosen: dict[str, Any]
) -> None:
    stage = fresh(shards, chosen, 1 << 30)
    expected, states = [], []
    for _ in range(BATCHES):
        states.append(msgspec.msgpack.encode(stage.save_state()))
        expected.append(digest(next(stage)))
    for cut, state in enumerate(states):
        resumed = fresh(shards, chosen, (0, 900, 1 << 30)[cut % 3])
        resumed.restore_state(msgspec.msgpack.decode(state))
        assert [digest(next(resumed)) for _ in range(cut, BATCHES)] == expected[cut:], f"resumed after {cut} batches"
    frugal = fresh(shards, chosen, 0)
    assert [digest(next(frugal)) for _ in range(BATCHES)] == expected, "with nothing held in memory"
