"""The ledger tells of each sample whether it was trained, dropped, given again, or seen by a model that is gone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.tools.cli.main import app
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

Told = list[tuple[bool, str, bool]]


def loader(pipeline: Any, ledger: Path, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=3, lanes=4, acknowledge=True, ledger=ledger, **settings)


def told(ledger: Path, keys: list[str]) -> list[Told]:
    """Of each key and each time that it was given: whether again, what became of it, and whether that is lost."""
    found = sp.Ledger(ledger).find(keys)
    return [[(each.again, each.outcome, each.lost) for each in found[key] or []] for key in keys]


def keys_of(own: sp.SavableLoader) -> list[str]:
    return [sample.key for sample in own.trace().samples]


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([40, 20]))


def test_ledger_lists_each_yield_of_a_sample_with_its_outcome(shards: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    pipeline = partial(counted_pipeline, shards)
    with loader(pipeline, ledger) as own:
        given, keys = [], []
        for _ in range(3):
            given.append(next(own)["receipts"])
            keys.append(keys_of(own))
        own.acknowledge(given[0])
        own.drop(given[1][:1], "stale")
        own.requeue(given[1][1:])
        next(own)
        state = own.state_dict()  # open: the second row of slot 1, and both of slot 2
        own.acknowledge(given[2])  # in a model that is not saved
        next(own)
        lost = keys_of(own)
    with loader(pipeline, ledger, num_workers=1) as resumed:
        resumed.load_state_dict(state)
        for _ in range(2):
            resumed.acknowledge(next(resumed)["receipts"])
        resumed.drop(next(resumed)["receipts"], "too old")
    again, trained = (True, "trained", False), (False, "trained", False)
    assert told(ledger, keys[0]) == [[trained], [trained]]
    assert told(ledger, keys[1]) == [
        [(False, "dropped: stale", False)],
        [(False, "repeated", False), (True, "repeated", False), again],
    ]
    assert told(ledger, keys[2]) == [[(False, "trained", True), again]] * 2
    assert told(ledger, lost) == [[(False, "", True), (False, "dropped: too old", False)]] * 2
    shown = CliRunner().invoke(app, ["ledger", "find", str(ledger), keys[1][0], keys[2][0]]).output
    place = f"{keys[2][0]}: epoch 0, slot 2, step 2, rank 0 of 1"
    assert shown.splitlines() == [
        f"{keys[1][0]}: epoch 0, slot 1, step 1, rank 0 of 1, dropped: stale",
        f"{place}, trained, lost: the run was resumed from a place before it",
        f"{place}, again, trained",
    ]


def test_rank_records_acknowledgements_of_other_ranks_and_packs_by_row(shards: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    pipeline = partial(toy_pipeline, shards, pack="best_fit", skip=0, fan_out=0)
    ranks = [loader(pipeline, ledger, ranks=(rank, 2)) for rank in range(2)]
    receipts = [next(rank)["receipts"] for rank in ranks]
    rows = [[[sample.key for sample in row] for row in rank.trace().rows] for rank in ranks]
    ranks[0].acknowledge(receipts[1][:1])
    ranks[0].drop(receipts[1][1:], "stale")
    for rank in ranks:
        rank.close()
    assert told(ledger, rows[1][0]) == [[(False, "trained", False)]] * len(rows[1][0])
    assert told(ledger, rows[1][1]) == [[(False, "dropped: stale", False)]] * len(rows[1][1])
    assert told(ledger, rows[0][0]) == [[(False, "", False)]] * len(rows[0][0])


def test_repeated_batch_has_no_slot_in_the_ledger_and_can_be_rebuilt(shards: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    pipeline = partial(counted_pipeline, shards)
    with loader(pipeline, ledger) as own:
        first = next(own)
        own.requeue(first["receipts"])
        next(own)
        own.requeue(first["receipts"])  # twice in a row
        next(own)
        next(own)
    files = LedgerFiles(ledger)
    assert [given.batch.slot for given in files.batches() if not given.batch.again] == [0, 1]
    assert [given.batch.repeated_rows for given in files.batches()][:2] == [0, 3]
    assert sp.Ledger(ledger).batch(pipeline, slot=0)["id"].tolist() == first["id"].tolist()
