"""`MRope`: positions in time, height and width for rotary embeddings of three parts (Wang et al., 2024, section 2.1).

`a`, an image of 2 × 3 tokens, `b`, and a video of 2 steps of 2 × 1 tokens, 3 positions apart, and `c`:

    token   a  # # # # # #  b  @ @ @ @   c
    time    0  1 1 1 1 1 1  4  5 5 8 8   9
    height  0  1 1 1 2 2 2  4  5 6 5 6   9
    width   0  1 2 3 1 2 3  4  5 5 5 5   9

What follows begins one behind the greatest position so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from task_encoders.parts.medium import Grid


@dataclass(frozen=True)
class MRope:
    """Gives each token its position in time, height and width.

    Args:
        tokens_per_second: The positions in a second of video: 2 for Qwen2.5-VL (`vision_config.tokens_per_second`), 25
            for Qwen2.5-Omni. None: one for each step, whatever time it takes, as Qwen2-VL.

    Raises:
        ValueError: It is not above 0.

    Example:
        ```python
        from task_encoders import MRope
        MRope(tokens_per_second=2).settings()    # {'tokens_per_second': 2}
        MRope(0)                                 # ValueError: MRope: tokens_per_second is above 0, not 0
        ```
    """

    tokens_per_second: float | None = 2

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise ValueError(f"MRope: tokens_per_second is above 0, not {self.tokens_per_second}")

    def positions(self, runs: Sequence[int | Grid]) -> torch.Tensor:
        """Number the tokens of a sequence.

        Args:
            runs: The numbers of tokens that follow each other, and the grids of others, in order.

        Returns:
            int64 (n, 3): time, height and width of each.
        """
        begin, made = 0, [torch.empty(0, 3, dtype=torch.int64)]
        for run in runs:
            made.append(begin + (self._grid(run) if isinstance(run, Grid) else _line(run)))
            begin = int(made[-1].max()) + 1 if len(made[-1]) else begin
        return torch.cat(made)

    def settings(self) -> dict[str, Any]:
        """Every argument, for `TaskEncoder.settings`."""
        return asdict(self)

    def _grid(self, grid: Grid) -> torch.Tensor:
        step = 1.0 if self.tokens_per_second is None else self.tokens_per_second * grid.interval_s
        time = (torch.arange(grid.steps, dtype=torch.float32) * step).long()
        axes = torch.meshgrid(time, torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
        return torch.stack(axes, -1).view(-1, 3)


def lengthened(positions: torch.Tensor, length: int, *, begin: int | None = None) -> torch.Tensor:
    """Positions int64 (n, 3), padded to `length`: counted on, or from `begin`."""
    if len(positions) == length:
        return positions
    begin = int(positions.max()) + 1 if begin is None and len(positions) else begin or 0
    return torch.cat([positions, begin + _line(length - len(positions))])


def _line(tokens: int) -> torch.Tensor:
    return torch.arange(tokens)[:, None].expand(-1, 3)
