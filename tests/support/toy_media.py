"""A video and an audio of known arrays, for encoders, without decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.media_files import tone


class ArrayVideo:
    """Video of frames uint8 (n, 3, height, width), `fps` per second, resized by Pillow. `shown` lists the read
    frames.
    """

    def __init__(self, pixels: NDArray[np.uint8], fps: float) -> None:
        self.pixels, self.fps = pixels, fps
        self.duration_s = len(pixels) / fps
        self.size = (pixels.shape[3], pixels.shape[2])
        self.shown: list[int] = []

    def frames(self, times_s: Sequence[float], *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Return the frames displayed at these times, which may be rounded by half a millisecond."""
        numbers = [math.floor((time + 0.0005) * self.fps) for time in times_s]
        self.shown += numbers
        found = self.pixels[numbers]
        return found if size is None else np.stack([_resized(frame, size) for frame in found])


def _resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> Any:
    image = Image.fromarray(frame.transpose(1, 2, 0)).resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


def plain_video(frames: int, fps: float, size: tuple[int, int]) -> ArrayVideo:
    """Return a video in which frame n has shade n."""
    shades = np.arange(frames, dtype=np.uint8)[:, None, None, None]
    return ArrayVideo(np.broadcast_to(shades, (frames, 3, size[1], size[0])), fps)


def noisy_video(frames: int, fps: float, size: tuple[int, int]) -> ArrayVideo:
    """Return a video of smooth noise that differs in each frame."""
    small = np.random.default_rng(frames).integers(0, 256, (frames, 3, 9, 12), np.uint8)
    return ArrayVideo(np.stack([_resized(frame, size) for frame in small]), fps)


class ToneAudio:
    """A rising tone of some samples at 16 kHz."""

    def __init__(self, samples: int) -> None:
        self.duration_s = samples / 16000
        self.tone = tone(self.duration_s, 16000, 1)[:, :samples]

    def samples(self, start_s: float = 0.0, stop_s: float | None = None, **_: Any) -> NDArray[np.float32]:
        """Return the whole tone."""
        return self.tone
