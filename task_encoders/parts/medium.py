"""`Medium`: an image, video or audio that appears in text as tokens of one id.

A medium turns one image, video or audio into `MediumTokens`, the number of its tokens and the tensors that a model puts
at their positions. An item concatenates these tensors in the order of their tokens. A cut of an item selects the rows
of the media inside the cut.

`MRope` gives positions in time, height and width for rotary embeddings of three parts (Wang et al., 2024, section 2.1).
`a`, an image of 2 × 3 tokens, `b`, and a video of 2 steps of 2 × 1 tokens, 3 positions apart, and `c`:

    token   a  # # # # # #  b  @ @ @ @   c
    time    0  1 1 1 1 1 1  4  5 5 8 8   9
    height  0  1 1 1 2 2 2  4  5 6 5 6   9
    width   0  1 2 3 1 2 3  4  5 5 5 5   9

The next token's position is the greatest position so far plus 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch


class Grid(NamedTuple):
    """Grid of tokens in time, height and width.

    Its fields are the numbers of steps, rows and columns.

    `interval_s` is the time from one step to the next, in seconds.
    """

    steps: int
    rows: int
    columns: int
    interval_s: float = 0.0

    @property
    def tokens(self) -> int:
        """The number of tokens of the grid."""
        return self.steps * self.rows * self.columns


@dataclass(frozen=True)
class MediumTokens:
    """Tokens and tensors of one image, video or audio.

    Args:
        medium: The medium.
        tokens: The number of its tokens.
        fields: Its rows of the fields of `medium.empty()`.
        grids: The grids of its tokens; empty for audio, whose tokens are a plain sequence.
        texts: The text before each of its grids; empty for models without such texts.
    """

    medium: Medium
    tokens: int
    fields: dict[str, torch.Tensor]
    grids: tuple[Grid, ...] = ()
    texts: tuple[str, ...] = ()


class MediaHeader(Protocol):
    """Facts about an image, video or audio from its header; None if unknown.

    `sample.media(part)` is an example.
    """

    @property
    def width(self) -> int | None:
        """The width in pixels."""

    @property
    def height(self) -> int | None:
        """The height in pixels."""

    @property
    def duration_s(self) -> float | None:
        """The duration in seconds."""

    @property
    def fps(self) -> float | None:
        """The number of frames per second."""


class Unmeasured(Exception):
    """Raised if the tokens of a medium cannot be counted from its header."""


class Medium(ABC):
    """Base class of `Vision`, `VideoTokens` and `AudioTokens`.

    The attributes are arguments of the subclasses.
    """

    kind: ClassVar[str]  # "image", "video" or "audio"
    token: int
    text: str
    before: str
    after: str

    def pieces(self, tokens: MediumTokens) -> Iterator[str | MediumTokens]:
        """Yield the texts and tokens of an image, video or audio in a sequence."""
        yield self.before
        yield tokens
        yield self.after

    @abstractmethod
    def tokenize(self, content: Any) -> MediumTokens:
        """Build the tokens and fields of a decoded image, or of an open video or audio."""

    @abstractmethod
    def measure(self, info: MediaHeader) -> MediumTokens:
        """Count the tokens from the header alone, without fields.

        Raises `Unmeasured` if the header does not suffice.
        """

    @abstractmethod
    def empty(self) -> dict[str, torch.Tensor]:
        """Return the fields of an item without such media."""

    @abstractmethod
    def token_counts(self, item: dict[str, Any]) -> list[int]:
        """Count the tokens of each image, video or audio of an item."""

    @abstractmethod
    def select(self, item: dict[str, Any], first: int, last: int) -> dict[str, torch.Tensor]:
        """Return the fields of the media `first` to `last - 1` of an item."""

    @abstractmethod
    def batch(self, joint: dict[str, torch.Tensor], counts: torch.Tensor) -> dict[str, Any]:
        """Return a batch's fields from the concatenated fields of its rows.

        `counts`, int64 (B,), is the number of images, videos or audio parts of each row.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return every argument, for `TaskEncoder.settings`."""

    def check_token(self) -> None:
        """Raise ValueError unless `token` is an id and `text` is not empty."""
        name = type(self).__name__
        if not hasattr(self.token, "__index__"):
            raise ValueError(
                f"{name}: token={self.token!r}: expected an id, such as tokenizer.token_to_id({str(self.token)!r}). "
                "Pass the text of a template as text="
            )
        if not self.text:
            raise ValueError(f"{name}: text= must not be empty. Pass the text that stands for {self.kind}")


def join_fields(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the rows of each field of several parts."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def element_rows(sizes: torch.Tensor, first: int, last: int) -> slice:
    """Return the rows of the elements `first` to `last - 1`.

    `sizes`, int64 (n,), is the number of rows of each element.
    """
    start = int(sizes[:first].sum())
    return slice(start, start + int(sizes[first:last].sum()))


@dataclass(frozen=True)
class MRope:
    """Rule for the positions of tokens in time, height and width.

    Args:
        tokens_per_second: The number of positions per second of video: 2 (default) for Qwen2.5-VL
            (`vision_config.tokens_per_second`), 25 for Qwen2.5-Omni. None: one per step, as in Qwen2-VL.

    Raises:
        ValueError: `tokens_per_second` is not above 0.

    Example:
        ```python
        from task_encoders import MRope
        MRope(tokens_per_second=2).settings()    # {'tokens_per_second': 2}
        MRope(0)                                 # ValueError: MRope: tokens_per_second must be above 0, not 0
        ```
    """

    tokens_per_second: float | None = 2

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise ValueError(f"MRope: tokens_per_second must be above 0, not {self.tokens_per_second}")

    def positions(self, runs: Sequence[int | Grid]) -> torch.Tensor:
        """Compute the positions of the tokens of a sequence.

        Args:
            runs: In order, the lengths of runs of plain tokens and the grids of media.

        Returns:
            int64 (n, 3): time, height and width of each token.
        """
        next_position = 0
        positions = [torch.empty(0, 3, dtype=torch.int64)]
        for run in runs:
            positions.append(next_position + (self._grid_positions(run) if isinstance(run, Grid) else _count_up(run)))
            next_position = int(positions[-1].max()) + 1 if len(positions[-1]) else next_position
        return torch.cat(positions)

    def settings(self) -> dict[str, Any]:
        """Return every argument, for `TaskEncoder.settings`."""
        return asdict(self)

    def _grid_positions(self, grid: Grid) -> torch.Tensor:
        """Return the three axes of positions of a grid of patches: time, row and column."""
        step = 1.0 if self.tokens_per_second is None else self.tokens_per_second * grid.interval_s
        time = (torch.arange(grid.steps, dtype=torch.float32) * step).long()
        axes = torch.meshgrid(time, torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
        return torch.stack(axes, -1).view(-1, 3)


def pad_positions(positions: torch.Tensor, length: int, *, start: int | None = None) -> torch.Tensor:
    """Pad positions, int64 (n, 3), to `length`.

    Padding counts up from `start`. None (default): from the position after the last.
    """
    if len(positions) == length:
        return positions
    start = int(positions.max()) + 1 if start is None and len(positions) else start or 0
    return torch.cat([positions, start + _count_up(length - len(positions))])


def _count_up(tokens: int) -> torch.Tensor:
    """Return positions 0, 1, 2, … that are equal in time, height and width: int64 (tokens, 3)."""
    return torch.arange(tokens)[:, None].expand(-1, 3)
