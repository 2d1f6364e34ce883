"""Positions in time, height and width."""

from __future__ import annotations

import pytest
import torch

from task_encoders.parts.medium import Grid, MRope, pad_positions


def position_lines(positions: torch.Tensor) -> list[str]:
    """Return the time, height and width of all tokens, one line each."""
    return [" ".join(map(str, axis)) for axis in positions.T.tolist()]


def test_text_after_media_starts_after_their_greatest_position() -> None:
    made = MRope(tokens_per_second=2).positions([1, Grid(1, 2, 3), 1, Grid(2, 2, 1, interval_s=1.5), 2])
    assert position_lines(made) == [
        "0 1 1 1 1 1 1 4 5 5 8 8 9 10",
        "0 1 1 1 2 2 2 4 5 6 5 6 9 10",
        "0 1 2 3 1 2 3 4 5 5 5 5 9 10",
    ]
    assert made.dtype == torch.int64


def test_steps_are_counted_if_time_is_not() -> None:
    grid = Grid(3, 1, 1, interval_s=0.25)
    assert MRope(None).positions([grid])[:, 0].tolist() == [0, 1, 2]
    assert MRope(2).positions([grid])[:, 0].tolist() == [0, 0, 1]  # half a position a step, rounded down
    assert MRope(25).positions([grid])[:, 0].tolist() == [0, 6, 12]


def test_padding_positions_count_up_or_restart() -> None:
    positions = MRope().positions([1, Grid(1, 1, 2)])
    assert pad_positions(positions, 5)[3:].tolist() == [[3, 3, 3], [4, 4, 4]]
    assert pad_positions(positions, 5, start=0)[3:].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert pad_positions(positions, 3) is positions


def test_positions_that_do_not_advance_are_rejected() -> None:
    with pytest.raises(ValueError, match="tokens_per_second must be above 0, not 0"):
        MRope(0)


def test_positions_do_not_depend_on_the_default_type_of_tensors() -> None:
    runs = [Grid(900, 1, 1, 0.37)]
    plain = MRope(25).positions(runs)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(MRope(25).positions(runs), plain)
    finally:
        torch.set_default_dtype(torch.float32)
