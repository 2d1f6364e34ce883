"""`Medium`: what stands among text as tokens of one id; images, videos and sounds are such.

A medium makes of one image, video or sound a `Seen`: the number of its tokens, and the tensors that a model puts in
their place. An item holds these tensors end to end, in the order of their tokens; a cut of an item takes the rows of
what is inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch


class Grid(NamedTuple):
    """Tokens in time, height and width, row by row; `interval_s` is the time from one step to the next, in seconds."""

    steps: int
    rows: int
    columns: int
    interval_s: float = 0.0

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.steps * self.rows * self.columns


@dataclass(frozen=True)
class Seen:
    """What a medium makes of one image, video or sound.

    Args:
        medium: The medium.
        tokens: The number of its tokens.
        fields: Its rows of each of `medium.empty()`.
        grids: How its tokens lie; none where they only follow each other, as those of a sound.
    """

    medium: Medium
    tokens: int
    fields: dict[str, torch.Tensor]
    grids: tuple[Grid, ...] = ()


class MediaHeader(Protocol):
    """What a header says of an image, a video or a sound: `sample.media(part)`; None where it does not say it."""

    @property
    def width(self) -> int | None:
        """Pixels."""

    @property
    def height(self) -> int | None:
        """Pixels."""

    @property
    def duration_s(self) -> float | None:
        """Seconds."""

    @property
    def fps(self) -> float | None:
        """Frames in a second."""


class Unmeasured(Exception):
    """The tokens of something cannot be counted without decoding it."""


class Medium(ABC):
    """The base of `Vision`, `VideoTokens` and `AudioTokens`, which have these attributes as arguments."""

    kind: ClassVar[str]  # "image", "video" or "audio"
    token: int
    text: str
    before: str
    after: str

    def pieces(self, seen: Seen) -> Iterator[str | Seen]:
        """What stands in a sequence for an image, a video or a sound: texts, and what was seen."""
        yield self.before
        yield seen
        yield self.after

    @abstractmethod
    def seen(self, thing: Any) -> Seen:
        """Make the tokens and fields of an image, a video or a sound."""

    @abstractmethod
    def measured(self, info: MediaHeader) -> Seen:
        """The same without fields, by its header alone. Raises `Unmeasured` where that does not say enough."""

    @abstractmethod
    def empty(self) -> dict[str, torch.Tensor]:
        """The fields of an item that has none."""

    @abstractmethod
    def token_counts(self, item: dict[str, Any]) -> list[int]:
        """The number of tokens of each in an item."""

    @abstractmethod
    def select(self, item: dict[str, Any], first: int, last: int) -> dict[str, torch.Tensor]:
        """The fields of those numbered `first` to `last - 1`."""

    @abstractmethod
    def batch(self, joint: dict[str, torch.Tensor], counts: torch.Tensor) -> dict[str, Any]:
        """A batch's fields, of the fields of its rows end to end, and how many each row has, int64 (B,)."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Every argument, for `TaskEncoder.settings`."""

    def check_token(self) -> None:
        """Raise ValueError unless `token` is an id, and `text` is something."""
        name = type(self).__name__
        if not hasattr(self.token, "__index__"):
            raise ValueError(
                f"{name}: token is the id of a token, such as tokenizer.token_to_id({str(self.token)!r}), not "
                f"{self.token!r}; what a template writes in its place is text="
            )
        if not self.text:
            raise ValueError(f"{name}: text is what stands for {self.kind} in rendered text; it cannot be empty")


def join_fields(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows of each field end to end."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rows_of(sizes: torch.Tensor, first: int, last: int) -> slice:
    """The rows of the elements `first` to `last - 1`, of which `sizes`, int64 (n,), says how many rows each has."""
    start = int(sizes[:first].sum())
    return slice(start, start + int(sizes[first:last].sum()))
