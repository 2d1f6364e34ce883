"""Which frames of a video are taken: at a rate, no fewer and no more than wanted, spread over all of it.

Of 10 frames, 5 a second, at a rate of 2 a second (`|` begins a share, `*` is taken from its begin or its middle):

    frame    0 1 2 3 4 5 6 7 8 9
    begin    *   |*  |  *  |*        4 frames: numbers 0, 2, 5, 7
    middle     * |   *|   *|  *      4 frames: numbers 1, 3, 6, 8
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from task_encoders.parts.medium import MediaHeader, Unmeasured


class Timing(Protocol):
    """How long a video is."""

    @property
    def duration_s(self) -> float:
        """Its length, in seconds."""

    @property
    def fps(self) -> float:
        """Frames in a second, on average."""


class FrameSource(Timing, Protocol):
    """A video: what `sample.video()` opens, or whatever has these."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""

    def frames(self, times_s: Sequence[float], *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """The frames on display at these times, uint8 (frames, 3, height, width), resized to `size`."""


@dataclass(frozen=True)
class KnownVideo:
    """What a header says of a video."""

    duration_s: float
    fps: float
    size: tuple[int, int]

    @classmethod
    def of(cls, info: MediaHeader) -> KnownVideo:
        """Raises `Unmeasured` where the header does not say all of it."""
        if info.duration_s is None or not info.fps or info.width is None or info.height is None:
            raise Unmeasured
        return cls(info.duration_s, info.fps, (info.width, info.height))


class FrameRule:
    """Which frames of a video are taken: the base of `VideoTokens` and `VideoFrames`, which have these as arguments."""

    fps: float
    min_frames: int
    max_frames: int

    def check_rule(self) -> None:
        """Raise ValueError where a setting is out of its range."""
        if not self.fps > 0 or not 1 <= self.min_frames <= self.max_frames:
            raise ValueError(
                f"{type(self).__name__}: expected fps above 0 and 1 ≤ min_frames ≤ max_frames, found {self.fps}, "
                f"{self.min_frames} and {self.max_frames}"
            )

    def times(self, video: Timing, *, multiple: int = 1, at: Literal["begin", "middle"] = "begin") -> list[float]:
        """When the frames that are taken are on display, in seconds; a multiple of `multiple` where there are enough.

        Raises ValueError where the video does not say its frame rate.
        """
        total = frames_of(video)
        most = min(self.max_frames, total) // multiple * multiple
        wanted = min(max(total / video.fps * self.fps, self.min_frames), most)
        count = max(1, math.floor(wanted / multiple) * multiple)
        shift = 0.0 if at == "begin" else 0.5
        return [(number + shift) * total / count / video.fps for number in range(count)]


def frames_of(video: Timing) -> int:
    """The number of frames of a video, by its length and its rate. Raises ValueError where it does not say the rate."""
    if not video.fps > 0:
        raise ValueError("the video does not say how many frames it has in a second")
    return max(1, round(video.duration_s * video.fps))
