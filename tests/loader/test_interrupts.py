"""Ctrl-C at any moment: a batch that the trainer has not got comes again, and none comes twice."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.loader import run, savable_loader
from savable_pipeline.stages.batch_difference import digest
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline


class PendingSignal:
    """A SIGINT that has come, which Python delivers where it next looks for one, as it does with a user's Ctrl-C.

    It is raised by an operator in place of a call: behind a call Python would deliver it here.
    """

    __neg__ = ctypes.pythonapi.PyErr_SetInterrupt
    __neg__.restype = None


class SignalAt:
    """Has a SIGINT come before the `at`-th bytecode that the loader runs."""

    FILES = (run.__file__, savable_loader.__file__)

    def __init__(self, at: int) -> None:
        self.left = at
        self.signal: Any = PendingSignal()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if not self.left:
                sys.settrace(None)  # the next call of this function would deliver it too
                self.sent = -self.signal
        return self


def got(batches: Iterable[Any], most: int, tracer: Any = None) -> int:
    """How many batches the body of a loop got, at most so many, until Ctrl-C."""
    count, before = 0, sys.gettrace()
    try:
        sys.settrace(tracer)
        for _ in batches:
            count += 1
            if count == most:
                break
        sys.settrace(before)  # at the latest here a signal is delivered
    except KeyboardInterrupt:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("epochs", "before", "batches"),
    [
        pytest.param(None, 0, 1, id="the first batch"),
        pytest.param(None, 3, 1, id="without end"),
        pytest.param(1, 5, 1, id="the ranks vote"),
        pytest.param(0, 4, 1, id="a length"),
    ],
)
def test_ctrl_c_at_any_bytecode_of_a_step_loses_no_batch_and_gives_none_twice(
    make_shards: Any, epochs: int | None, before: int, batches: int
) -> None:
    shards = str(make_shards([30, 30]))

    def pipeline(lane: sp.Lane) -> sp.Stage:
        return counted_pipeline(shards, lane) if epochs == 0 else toy_pipeline(shards, lane, epochs=epochs)

    def made() -> sp.SavableLoader:
        return sp.SavableLoader(pipeline, seed=3, lanes=3)

    whole = made()
    expected = [digest(next(whole)) for _ in range(before + batches + 1)]
    for at in range(1, 100_000):
        own = made()
        assert not before or got(own, before) == before
        signal = SignalAt(at)
        count = got(own, batches, signal)
        if signal.left > 0:
            break
        assert own.state_dict()["slot"] == before + count, at
        assert digest(next(own)) == expected[before + count], at
        own.close()
    assert at > 100
