"""Workers on other machines: the same batches and states as local ones, and from one to the other and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from tests.conftest import write_numbered_shards
from tests.support.agents import agents, remote
from tests.support.toy_faults import packed_numbers

LANES = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nodes") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    return str(folder)


def taken(loader: sp.SavableLoader, steps: int) -> list[tuple[Any, Any]]:
    """Batches, each with the state after it."""
    return [(next(loader), loader.state_dict()) for _ in range(steps)]


def test_batches_and_states_are_those_of_local_workers(shards: str, tmp_path: Path) -> None:
    pipeline = partial(packed_numbers, shards)
    expected = taken(sp.SavableLoader(pipeline, seed=3, lanes=LANES), 24)
    with agents(tmp_path, 2, 1) as (made, key_file):
        workers = remote(made, key_file)
        with sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers) as loader:
            assert taken(loader, 24) == expected
            assert loader.stats()["num_workers"] == 3
