"""A sample that ends its worker again and again is left out if the policy says so, by every resume too."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.on_error import OnError
from tests.support.toy_faults import FaultyEncoder, NumberEncoder


def tolerant(shards: str, how: str, cured: Path, on_error: OnError, lane: sp.Lane) -> custom.Stage:
    samples = sp.TarShardReader(shards, lane, shuffle=False, block_size=2)
    return sp.Batcher(sp.Encode(samples, FaultyEncoder(how, 9, cured), on_error=on_error), size=2)


def loader(pipeline: Any, num_workers: int = 2, timeout: float = 60) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=3, lanes=12, num_workers=num_workers, workers=sp.Workers(timeout=timeout))


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_avoided_sample_is_dropped_if_the_policy_skips(make_shards: Any, tmp_path: Path, how: str, caplog: Any) -> None:
    shards, cured = str(make_shards([60, 60])), tmp_path / "cured"
    pipeline = partial(tolerant, shards, how, cured, "skip")
    with loader(pipeline, timeout=0.5 if how == "hang" else 60) as own:
        found = [next(own) for _ in range(24)]
        state = own.state_dict()
        assert own.stats()["restarts"] == 4
    plain = [[2 * i, 2 * i + 1] for i in range(24)]
    assert found[:4] == plain[:4] and found[4] == [8, 32], "lane 4 goes on with the next sample of its own"
    assert found[16] == [33, 56] and not any(9 in batch for batch in found)
    assert "key 's000009'" in caplog.text and "The sample is skipped from now on" in caplog.text

    cured.touch()  # and yet the resumed run leaves it out: its peers may not have been as lucky
    for num_workers in (0, 1):
        with loader(pipeline, num_workers) as fresh:
            fresh.load_state_dict(state)
            again = [next(fresh) for _ in range(12)]
        with loader(pipeline, 0) as never:
            whole = [next(never) for _ in range(36)]
        assert again[4] == [57, 80] != whole[28] and again[5] == whole[29]


def test_on_error_function_decides_case_by_case(make_shards: Any, tmp_path: Path) -> None:
    told: list[Exception] = []

    def policy(error: Exception) -> bool:
        told.append(error)
        return True

    pipeline = partial(tolerant, str(make_shards([60, 60])), "kill", tmp_path / "cured", policy)
    with loader(pipeline) as own:
        found = [next(own) for _ in range(6)]
    assert found[4] == [8, 32] and [type(error) for error in told] == [sp.WorkerError] and "'s000009'" in str(told[0])


class KillsWhenMadeAgain(FaultyEncoder):
    """Ends the process over a sample that it has made before."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number == self.at:
            if self.cured.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            self.cured.touch()
        return number

    def length(self, item: Any) -> int:
        return 3

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def test_sample_that_cannot_be_rebuilt_leaves_its_open_pack(make_shards: Any, tmp_path: Path) -> None:
    encoder = KillsWhenMadeAgain("kill", 4, tmp_path / "made")
    shards = str(make_shards([60]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(shards, lane, shuffle=False), encoder, on_error="skip", check=0.0)
        return sp.Batcher(sp.OnlinePacker(items, max_length=9, policy="first_fit", open_packs=1), size=1)

    first = sp.SavableLoader(pipeline, seed=3, lanes=1)
    assert next(first) == [[0, 1, 2]]
    with sp.SavableLoader(pipeline, seed=3, lanes=1, num_workers=1) as own:
        own.load_state_dict(first.state_dict())
        assert [next(own) for _ in range(2)] == [
            [[3, 4, 5]],
            [[6, 7, 8]],
        ]  # 3 was in hand, 4 is made for the first time
    with sp.SavableLoader(pipeline, seed=3, lanes=1, num_workers=1) as own:
        own.load_state_dict(first.state_dict())
        assert next(own)[0][:2] == [3, 5] and next(own) is not None


def test_policy_of_the_samples_branch_applies(make_shards: Any, tmp_path: Path) -> None:
    shards = str(make_shards([20]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        def branch(encoder: sp.TaskEncoder, on_error: OnError) -> custom.ItemStage:
            samples = sp.TarShardReader(shards, lane, shuffle=False, epochs=1)
            return sp.Encode(samples, encoder, on_error=on_error, check=0.0)

        faulty = FaultyEncoder("kill", 9, tmp_path / "cured")
        branches = {"a": branch(NumberEncoder(), "raise"), "b": branch(faulty, "skip")}
        return sp.Batcher(sp.Blend(branches), size=2, encoder=NumberEncoder())

    with sp.SavableLoader(pipeline, seed=3, lanes=1, num_workers=1) as own:
        found = Counter(number for batch in own for number in batch)
    assert found == Counter({number: 1 if number == 9 else 2 for number in range(20)})
