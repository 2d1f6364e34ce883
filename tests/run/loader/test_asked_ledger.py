"""`sp.Ledger`: when samples were given, as the run gave them, and the batches themselves."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.errors import CheckpointMismatchError, SavableError
from savable_pipeline.stages.batch_difference import digest
from tests.conftest import write_numbered_shards


def pipeline(at: Path, lane: sp.Lane, size: int = 4) -> custom.Stage:
    sources = {name: sp.TarShardReader(str(at / name), lane) for name in ("web", "books")}
    return sp.Batcher(sp.Blend(sources, weights={"web": 3, "books": 1}), size=size)


@pytest.fixture
def given(tmp_path: Path) -> dict[tuple[int, int], list[Any]]:
    """The batches of two ranks that gave slots 0 to 9, and from the state after slot 3 were resumed as one, by slot.

    The number 0 is of the first start, 1 of the second.
    """
    write_numbered_shards(tmp_path / "web", [40, 40], source="web")
    write_numbered_shards(tmp_path / "books", [25], source="books")  # with keys that samples of the other have too
    make = partial(sp.SavableLoader, partial(pipeline, tmp_path), seed=3, lanes=4, ledger=tmp_path / "ledger")
    ranks = [make(ranks=(rank, 2)) for rank in range(2)]
    found: dict[tuple[int, int], list[Any]] = {}
    states: list[dict[str, Any]] = []
    for slot in range(10):
        found[0, slot] = next(ranks[slot % 2])
        states += [rank.state_dict() for rank in ranks if slot == 3]
    for rank in ranks:
        rank.close()
    with make() as alone:
        alone.load_state_dict(sp.merge_states(states))
        found |= {(1, slot): next(alone) for slot in range(4, 9)}
    return found


def test_seen_lists_each_yield_of_a_sample_with_source_and_rank(
    tmp_path: Path, given: dict[tuple[int, int], list[Any]]
) -> None:
    expected: dict[str, list[tuple[Any, ...]]] = {}
    for (start, slot), batch in given.items():
        for sample in batch:
            ranks, lost = (1, False) if start else (2, slot >= 4)
            record = (sample.json()["source"], 0, slot, slot // ranks, slot % ranks, ranks, lost)
            expected.setdefault(sample.key, []).append(record)
    never = sorted({f"s{i:06d}" for i in range(80)} - expected.keys())
    found = sp.Ledger(str(tmp_path / "ledger")).find([*expected, *never, "no such key"])
    assert found.pop("no such key") is None
    assert list(found) == [*expected, *never] and never
    names = ("source", "epoch", "slot", "step", "rank", "world_size", "lost")
    records = {key: [tuple(getattr(each, name) for name in names) for each in found[key] or []] for key in found}
    assert {key: sorted(each) for key, each in records.items()} == {
        **{key: sorted(each) for key, each in expected.items()},
        **{key: [] for key in never},
    }
    assert any(each[-1] for each in expected[given[0, 5][0].key])
    with pytest.raises(FrozenInstanceError):
        (found[given[0, 0][0].key] or [])[0].slot = 1  # type: ignore[misc]


def test_each_batch_that_counts_is_rebuilt(tmp_path: Path, given: dict[tuple[int, int], list[Any]]) -> None:
    ledger = sp.Ledger(tmp_path / "ledger")
    for (start, slot), batch in given.items():
        if start == 1 or slot < 4:
            again = ledger.batch(partial(pipeline, tmp_path), epoch=0, slot=slot)
            assert [sample.key for sample in again] == [sample.key for sample in batch]
            assert digest([sample.json() for sample in again]) == digest([sample.json() for sample in batch])
    with pytest.raises(SavableError, match="slot 9 of epoch 0 is not in the ledger"):
        ledger.batch(partial(pipeline, tmp_path), slot=9)
    with pytest.raises(CheckpointMismatchError, match="size"):
        ledger.batch(partial(pipeline, tmp_path, size=5), slot=8)


@pytest.mark.usefixtures("given")
def test_single_str_is_not_treated_as_many_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keys must be a list: \['s000001'\]"):
        sp.Ledger(tmp_path / "ledger").find("s000001")


@pytest.mark.usefixtures("given")
def test_yields_of_a_source_whose_data_moved_can_be_queried(tmp_path: Path) -> None:
    (tmp_path / "web").rename(tmp_path / "moved")
    ledger = sp.Ledger(tmp_path / "ledger")
    with pytest.raises(SavableError, match="no such file or folder"):
        ledger.find(["s000079"])
    assert ledger.find(["s000079"], source="web", data=str(tmp_path / "moved"))["s000079"] is not None
    assert ledger.find(["s000079"], source="books") == {"s000079": None}
