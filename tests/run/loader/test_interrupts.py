"""Ctrl-C at any moment: a batch that the trainer has not got comes again, and none comes twice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from numpy._core import _internal

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader import epoch_end, misuse, run, savable_loader
from savable_pipeline.run.state.lane_state import LaneState, unpack_state
from savable_pipeline.stages.batch_difference import digest
from tests.support.signals import SignalAt, count_until_interrupt
from tests.support.toy_faults import packed_numbers
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline


@pytest.mark.landing
@pytest.mark.parametrize(
    ("epochs", "before", "batches"),
    [
        pytest.param(None, 0, 1, id="the first batch"),
        pytest.param(None, 3, 1, id="without end"),
        pytest.param(1, 5, 1, id="the ranks vote"),
        pytest.param(0, 4, 1, id="a length"),
    ],
)
def test_ctrl_c_at_any_bytecode_of_a_step_loses_and_repeats_no_batch(
    make_shards: Any, epochs: int | None, before: int, batches: int
) -> None:
    shards = str(make_shards([30, 30]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return counted_pipeline(shards, lane) if epochs == 0 else packed_numbers(shards, lane, epochs=epochs)

    def made() -> sp.SavableLoader:
        return sp.SavableLoader(pipeline, seed=3, lanes=3)

    whole = made()
    expected = [digest(next(whole)) for _ in range(before + batches + 1)]
    for at in range(1, 100_000):
        own = made()
        assert not before or count_until_interrupt(own, before) == before
        signal = SignalAt(at, [run, savable_loader, epoch_end, misuse])
        count = count_until_interrupt(own, batches, signal)
        if signal.left > 0:
            break
        assert own.state_dict()["slot"] == before + count, at
        assert digest(next(own)) == expected[before + count], at
        own.close()
    assert at > 100


def test_ctrl_c_in_a_numpy_comparison_of_a_restore_is_raised_as_ctrl_c(make_shards: Any) -> None:
    """In a comparison of structured arrays numpy makes a TypeError of it, which has lost its cause."""
    pipeline = partial(toy_pipeline, str(make_shards([30, 30])), pack=None, skip=0)
    with sp.SavableLoader(pipeline, seed=3, lanes=1) as own:
        state = own.state_dict()
        while "'part': 0" in str(unpack_state(state["lane_00000"], LaneState, "").stages or "'part': 0"):
            next(own)
            state = own.state_dict()
    for at in range(1, 200):
        with sp.SavableLoader(pipeline, seed=3, lanes=1) as resumed:
            resumed.load_state_dict(state)
            signal = SignalAt(at, [_internal])
            assert count_until_interrupt(resumed, 1, signal) == (
                signal.left > 0
            )  # it raises nothing but KeyboardInterrupt
        if signal.left > 0:
            break
