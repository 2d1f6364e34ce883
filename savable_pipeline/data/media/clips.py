"""`Clips`: short stretches of a video, of a sound or of both in step, at random or at fixed places.

0 s                                                          duration_s
├───────────────────┼───────────────────┼───────────────────┼────────┤
 stratum 0           stratum 1           stratum 2           length_s     count=3: one clip begins in each
├──────┼──────┼──────┼──────┼──────┼──────┼──────┼──────┼──┤               stride_s: one clip begins at each mark
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.media.audio import Audio
from savable_pipeline.data.media.video import Video
from savable_pipeline.errors import MediaError

_ROUNDED = 1e-6  # of a stride: what is lost of a place at which the last clip just fits


@dataclass(frozen=True, slots=True)
class Clip:
    """A stretch of a video, of a sound, or of both.

    Attributes:
        start_s: Where it begins, in seconds from the begin of the video, or of the sound alone.
        times_s: The time of each frame, float64 (frames,), in seconds; None without a video.
        frames: The frame on display at each of these times, uint8 (frames, 3, height, width); None without a video.
        audio: The sound from `start_s` on, float32 (channels, samples); None without one.
    """

    start_s: float
    times_s: NDArray[np.float64] | None
    frames: NDArray[np.uint8] | None
    audio: NDArray[np.float32] | None


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Which clips to take of a video, of a sound or of both: `encode` returns `clips.of(…)`, an item for each clip.

    Every clip has `round(length_s * fps)` frames and `round(length_s * rate)` samples. A medium that is shorter than a
    clip gives one that begins at 0: the last frame is repeated, and the sound is followed by zeros. Beside a video a
    sound that ends sooner is followed by zeros, too.

    Args:
        length_s: The length of a clip, in seconds.
        fps: Frames to take of each second; only sound can do without.
        count: Clips of each sample. The places at which a clip can begin are cut into as many equal stretches, and a
            clip begins at random in each, by the random numbers of that part alone; clips of a short medium overlap.
        stride_s: Begin clips at 0, `stride_s`, 2 · `stride_s`, …, as long as they fit, in place of random places.
        align: "exact": clips begin where they were drawn; "keyframe": at the last frame at or before it from which
            decoding can begin, which decodes less. Two clips of one sample may be the same then.
        size: Width and height to resize frames to; None: as they are.

    Raises:
        ValueError: A setting is out of its range, or both `count` and `stride_s` are given.

    Example:
        ```python
        class TwoClips(sp.TaskEncoder):
            clips = sp.Clips(length_s=2.0, fps=8, count=2, size=(224, 224))

            def encode(self, sample, rng):
                video = sample.video("mp4")
                if video.duration_s < 2:
                    return sp.Skip("shorter than a clip")
                return self.clips.of(video, rng, make=lambda clip: {"frames": clip.frames})  # uint8 (16, 3, 224, 224)

            def settings(self):
                return self.clips.settings()

        TwoClips().settings()["count"]  # 2
        ```
    """

    length_s: float
    fps: float | None = None
    count: int | None = None
    stride_s: float | None = None
    align: Literal["exact", "keyframe"] = "exact"
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("length_s", "fps", "stride_s"):
            value = getattr(self, name)
            if (value is None and name == "length_s") or (value is not None and not 0 < value < math.inf):
                raise ValueError(f"Clips: {name} must be a number above 0, not {value!r}")
        if self.fps is not None and not round(self.length_s * self.fps):
            raise ValueError(f"Clips: {self.length_s} s at {self.fps} frames a second is less than one frame")
        if self.count is not None and (self.stride_s is not None or not isinstance(self.count, int) or self.count < 1):
            raise ValueError(f"Clips: pass count= of at least 1, or stride_s, not {self.count!r} and {self.stride_s!r}")
        if self.align not in ("exact", "keyframe"):
            raise ValueError(f'Clips: align must be "exact" or "keyframe", not {self.align!r}')
        if self.size is not None and not _is_size(self.size):
            raise ValueError(f"Clips: size must be a width and a height in pixels, not {self.size!r}")

    def settings(self) -> dict[str, Any]:
        """Return the arguments, for the `settings()` of an encoder."""
        return asdict(self)

    def of(
        self,
        video: Video | None,
        rng: Rng,
        *,
        audio: Audio | None = None,
        rate: int | None = None,
        make: Callable[[Clip], Any] | None = None,
    ) -> ClipIterator:
        """Return an iterator over the clips of one sample, each decoded when it is taken, for `encode` to return.

        A resume in the middle of the sample decodes only the clips that are left.

        Args:
            video: The video; None for sound alone.
            rng: The random numbers given to `encode`.
            audio: The sound; None for a video alone.
            rate: Samples of the sound in a second, in Hz; None: its own.
            make: Makes the item of a clip; None: the item is the `Clip`.

        Raises:
            ValueError: There is neither video nor sound, a video without `fps`, or a rate below one sample a clip.
            MediaError: The video, or the sound alone, lasts no time.
        """
        return ClipIterator(_Media(self, video, audio, rate), rng, make)

    def one(self, video: Video | None, rng: Rng, *, audio: Audio | None = None, rate: int | None = None) -> Clip:
        """Decode one clip, at random from the whole of a sample: for encoders that make one item of it.

        Args:
            video: As for `of`; so are the others.
            rng: The random numbers given to `encode`.
            audio: The sound.
            rate: Samples of the sound in a second.

        Raises:
            ValueError: There is a `stride_s`, or a `count` of more than 1; or as `of`.
            MediaError: As `of`; or a medium is damaged.
        """
        if self.stride_s is not None or (self.count or 1) > 1:
            raise ValueError("Clips.one returns one random clip. Leave out stride_s and count")
        clip: Clip = next(self.of(video, rng, audio=audio, rate=rate))
        return clip


def _is_size(size: object) -> bool:
    return isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)


class ClipIterator:
    """The clips of one sample, part by part; the random numbers of each are set before it is taken."""

    def __init__(self, media: _Media, rng: Rng, make: Callable[[Clip], Any] | None) -> None:
        self._media, self._rng, self._make = media, rng, make
        self._left = self._count = media.count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        part = self._count - self._left
        self._left -= 1
        clip = self._media.clip(self._media.start(part, self._rng))
        return clip if self._make is None else self._make(clip)

    def pass_over(self, parts: int) -> int:
        """Go on behind this many more clips, none of them decoded; returns how many there were."""
        passed = min(parts, self._left)
        self._left -= passed
        return passed


class _Media:
    """A video, a sound or both, from which clips are cut."""

    def __init__(self, clips: Clips, video: Video | None, audio: Audio | None, rate: int | None) -> None:
        whole = audio if video is None else video
        if whole is None:
            raise ValueError("Clips: neither video nor audio. Pass one or both")
        if video is not None and clips.fps is None:
            raise ValueError("Clips: clips of a video need fps=, the frames to take per second")
        self._clips, self._video, self._audio = clips, video, audio
        self._rate = rate or (audio.rate if audio is not None else 0)
        self._samples = round(clips.length_s * self._rate)
        if audio is not None and self._samples < 1:
            raise ValueError(f"Clips: {clips.length_s} s at {self._rate} Hz is less than one sample")
        self._duration = whole.duration_s
        if not 0 < self._duration < math.inf:
            raise MediaError(f"{whole.name}: no clip fits in its {self._duration} s")
        self._room = max(0.0, self._duration - clips.length_s)  # a clip can begin from 0 to here

    @property
    def count(self) -> int:
        """The number of clips."""
        clips = self._clips
        if self._duration < clips.length_s:
            return 1
        return (clips.count or 1) if clips.stride_s is None else int(self._room / clips.stride_s + _ROUNDED) + 1

    def start(self, part: int, rng: Rng) -> float:
        """Where a clip begins, in seconds."""
        stride_s = self._clips.stride_s
        drawn = (part + rng.random()) / self.count * self._room if stride_s is None else part * stride_s
        if self._video is None:
            return drawn
        self._video.begin_anew(drawn)
        return self._video.keyframe_at(drawn) if self._clips.align == "keyframe" else drawn

    def clip(self, start: float) -> Clip:
        """Decode the clip that begins there."""
        times = frames = audio = None
        if self._video is not None:
            assert self._clips.fps is not None
            count = round(self._clips.length_s * self._clips.fps)
            times = np.minimum(start + np.arange(count) / self._clips.fps, self._duration)
            frames = self._video.frames(times.tolist(), size=self._clips.size)
        if self._audio is not None:
            audio = self._audio.samples(start, start + self._samples / self._rate, rate=self._rate)
        return Clip(start, times, frames, audio)
