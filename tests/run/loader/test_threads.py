"""A loader is moved by one thread at a time; its state can be taken from any."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from tests.support.streams import next_hashes
from tests.support.toy_faults import NumberEncoder, number_pipeline, packed_numbers


class Waits(NumberEncoder):
    """Waits at sample 4 until it is let go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = super().encode(sample, rng)
        if number == 4:
            self.reached.set()
            assert self.go_on.wait(30)
        return number


def test_second_thread_gets_an_error_at_once_without_side_effects(make_shards: Any) -> None:
    encoder = Waits()
    own = sp.SavableLoader(partial(number_pipeline, str(make_shards([20])), encoder=encoder), seed=3, lanes=1)
    found = [next(own), next(own)]
    before = own.state_dict()
    other = threading.Thread(target=lambda: found.append(next(own)))
    other.start()
    assert encoder.reached.wait(30)
    for call in (partial(next, own), partial(own.skip, 1), partial(own.load_state_dict, before)):
        with pytest.raises(sp.SavableError, match="two threads use one loader"):
            call()
    assert own.state_dict() == own.state_dict(lag=0) == before
    encoder.go_on.set()
    other.join()
    found.append(next(own))
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_saved_continuously_by_another_thread_are_complete(make_shards: Any, num_workers: int) -> None:
    pipeline = partial(packed_numbers, str(make_shards([40, 7, 60])), epochs=1)
    expected = []
    with sp.SavableLoader(pipeline, seed=3, lanes=6, num_workers=num_workers) as own:
        states = {(0, 0): own.state_dict()}
        ended = threading.Event()

        def save() -> None:
            while not ended.is_set():
                state = own.state_dict()
                states[state["epoch"], state["slot"]] = state

        saver = threading.Thread(target=save)
        saver.start()
        ends = []
        for _ in range(3):
            expected += next_hashes(own, 1000)
            ends.append(len(expected))
        ended.set()
        saver.join()
    assert len(states) > 3
    for (epoch, slot), state in list(states.items())[::4]:
        fresh = sp.SavableLoader(pipeline, seed=3, lanes=6)
        fresh.load_state_dict(state)
        at = slot + (ends[epoch - 1] if epoch else 0)
        assert next_hashes(fresh, 1) == expected[at : at + 1] or epoch == 3
