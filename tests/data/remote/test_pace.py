"""What is asked for at once follows the speed at which bytes come: little on a slow link, much on a fast one."""

from __future__ import annotations

import pytest

from savable_pipeline.data.remote.cache_files import PIECE
from savable_pipeline.data.remote.object_store import Pace


class Clock:
    """Goes on when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def pace_of(bytes_per_s: float, seconds: float = 10.0, step_s: float = 0.1) -> Pace:
    """The pace of a process to which bytes have come at this speed."""
    clock = Clock()
    pace = Pace(clock)
    with pace.asking() as came:
        for _ in range(round(seconds / step_s)):
            clock.now += step_s
            came(int(bytes_per_s * step_s))
    return pace


@pytest.mark.parametrize(
    ("bytes_per_s", "at_once", "request_bytes"),
    [
        (1e4, 1 << 19, 1 << 17),
        (5e5, 1e6, 2.5e5),
        (2.5e6, 5e6, 1 << 20),
        (1e7, 2e7, 2.5e6),
        (1e9, 2e9, PIECE),
    ],
)
def test_two_seconds_of_bytes_are_asked_for_at_once(bytes_per_s: float, at_once: float, request_bytes: float) -> None:
    pace = pace_of(bytes_per_s)
    assert pace.at_once == pytest.approx(at_once, rel=0.02)
    assert pace.request == pytest.approx(request_bytes, rel=0.02)
    assert pace.chunk <= pace.request / 16


def test_a_link_that_gets_slower_or_faster_is_noticed_within_three_seconds() -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.asking() as came:
        for speed in (1e8, 1e6, 1e8):
            for _ in range(12):
                clock.now += 0.25
                came(int(speed * 0.25))
            assert pace.at_once == pytest.approx(2 * speed, rel=0.15)


def test_time_in_which_nothing_was_asked_for_does_not_count() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(20):
        clock.now += 1000
        with pace.asking() as came:
            clock.now += 0.125  # shorter than what is measured over
            came(1 << 19)
    assert pace.at_once == pytest.approx(8 << 20, rel=0.01)
