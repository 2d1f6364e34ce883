"""`Clips`: short ranges of video, audio or both, at random or fixed times.

0 s                                                          duration_s
├───────────────────┼───────────────────┼───────────────────┼────────┤
 stratum 0           stratum 1           stratum 2           length_s     count=3: one clip starts in each
├──────┼──────┼──────┼──────┼──────┼──────┼──────┼──────┼──┤               stride_s: one clip starts at each mark
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.media.container import Audio
from savable_pipeline.data.media.video import Video
from savable_pipeline.errors import MediaError

_STRIDE_ERROR = 1e-6  # fraction of a stride by which rounding may hide the last clip


@dataclass(frozen=True, slots=True)
class Clip:
    """Range of a video, of audio, or of both.

    Attributes:
        start_s: Where the clip starts, in seconds from the start of the video, or of the audio if there is no video.
        times_s: The time of each frame, float64 (frames,), in seconds; None without a video.
        frames: The frame on display at each of `times_s`, uint8 (frames, 3, height, width); None without a video.
        audio: The audio from `start_s`, float32 (channels, samples); None without audio.
    """

    start_s: float
    times_s: NDArray[np.float64] | None
    frames: NDArray[np.uint8] | None
    audio: NDArray[np.float32] | None


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Choice of clips of a video, of audio or of both, for `encode` to return.

    `encode` returns `clips.of(…)`, which yields an item per clip. Every clip has `round(length_s * fps)` frames and
    `round(length_s * rate)` samples. A medium shorter than a clip yields one clip that starts at 0. Its last frame is
    repeated, and its audio is padded with zeros. Audio that ends before its video is padded with zeros too.

    Args:
        length_s: The length of a clip, in seconds.
        fps: Frames per second of a clip. Required for video.
        count: Clips of each sample. The possible starts are divided into as many equal ranges, and a clip starts at
            random in each, by random numbers of its own. Clips of a short medium overlap. None (default):
            1.
        stride_s: Start clips at 0, `stride_s`, 2 · `stride_s`, …, as long as they fit. None (default): at random.
        align: "exact" (default): clips start where they were drawn. "keyframe": at the last keyframe at or before that
            time, which decodes less. Two clips of one sample may then be equal.
        size: Width and height to resize frames to. None (default): no resizing.

    Raises:
        ValueError: A setting is out of range, or both `count` and `stride_s` are set.

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
        is_pair = isinstance(self.size, tuple | list) and len(self.size) == 2
        if self.size is not None and not (is_pair and all(isinstance(n, int) and n > 0 for n in self.size)):
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
        """Return an iterator over the clips of one sample, for `encode` to return.

        Each clip is decoded when it is taken. A resume in the middle of the sample decodes only the remaining clips.

        Args:
            video: The video. None: audio only.
            rng: The random numbers that `encode` got.
            audio: The audio. None (default): video only.
            rate: Samples per second of the audio, in Hz. None (default): its own rate.
            make: Turns a clip into an item. None (default): the item is the `Clip`.

        Raises:
            ValueError: There is neither video nor audio, `fps` is missing for a video, or a clip has less than one
                sample.
            MediaError: The duration of the video, or of the audio alone, is zero.
        """
        return ClipIterator(_Media(self, video, audio, rate), rng, make)

    def one(self, video: Video | None, rng: Rng, *, audio: Audio | None = None, rate: int | None = None) -> Clip:
        """Decode one random clip of a sample, for encoders that build one item of it.

        Args:
            video: As for `of`.
            rng: The random numbers that `encode` got.
            audio: As for `of`.
            rate: As for `of`.

        Raises:
            ValueError: `stride_s` is set, or `count` is above 1; or as `of`.
            MediaError: As `of`; or a medium is damaged.
        """
        if self.stride_s is not None or (self.count or 1) > 1:
            raise ValueError("Clips.one returns one random clip. Leave out stride_s and count")
        clip: Clip = next(self.of(video, rng, audio=audio, rate=rate))
        return clip


class ClipIterator:
    """Iterator over the clips of a sample.

    Before it takes a clip, the stage sets `rng` to the random numbers of that clip.
    """

    def __init__(self, media: _Media, rng: Rng, make: Callable[[Clip], Any] | None) -> None:
        self._media, self._rng, self._make = media, rng, make
        self._remaining = self._count = media.count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._remaining:
            raise StopIteration
        index = self._count - self._remaining
        self._remaining -= 1
        clip = self._media.clip(self._media.clip_start_s(index, self._rng))
        return clip if self._make is None else self._make(clip)

    def pass_over(self, parts: int) -> int:
        """Skip at most `parts` clips without decoding; return the number skipped."""
        skipped = min(parts, self._remaining)
        self._remaining -= skipped
        return skipped


class _Media:
    """Video, audio or both, from which clips are taken."""

    def __init__(self, clips: Clips, video: Video | None, audio: Audio | None, rate: int | None) -> None:
        medium = audio if video is None else video  # its duration limits the clips
        if medium is None:
            raise ValueError("Clips: neither video nor audio. Pass one or both")
        if video is not None and clips.fps is None:
            raise ValueError("Clips: clips of a video need fps=, the frames to take per second")
        self._clips, self._video, self._audio = clips, video, audio
        self._rate = rate or (audio.rate if audio is not None else 0)
        self._clip_samples = round(clips.length_s * self._rate)
        if audio is not None and self._clip_samples < 1:
            raise ValueError(f"Clips: {clips.length_s} s at {self._rate} Hz is less than one sample")
        self._duration_s = medium.duration_s
        if not 0 < self._duration_s < math.inf:
            raise MediaError(f"{medium.name}: no clip fits in its {self._duration_s} s")
        self._latest_start_s = max(0.0, self._duration_s - clips.length_s)

    @property
    def count(self) -> int:
        """Number of clips."""
        clips = self._clips
        if self._duration_s < clips.length_s:
            return 1
        if clips.stride_s is None:
            return clips.count or 1
        return int(self._latest_start_s / clips.stride_s + _STRIDE_ERROR) + 1

    def clip_start_s(self, index: int, rng: Rng) -> float:
        """Return where the clip of this index starts, in seconds.

        Without `stride_s`, the start is drawn by `rng`.
        """
        stride_s = self._clips.stride_s
        start_s = (index + rng.random()) / self.count * self._latest_start_s if stride_s is None else index * stride_s
        if self._video is None:
            return start_s
        self._video.restart_at(start_s)
        return self._video.keyframe_at(start_s) if self._clips.align == "keyframe" else start_s

    def clip(self, start_s: float) -> Clip:
        """Decode the clip that starts at this time, in seconds."""
        times = frames = audio = None
        if self._video is not None:
            assert self._clips.fps is not None
            count = round(self._clips.length_s * self._clips.fps)
            times = np.minimum(start_s + np.arange(count) / self._clips.fps, self._duration_s)
            frames = self._video.frames(times.tolist(), size=self._clips.size)
        if self._audio is not None:
            audio = self._audio.samples(start_s, start_s + self._clip_samples / self._rate, rate=self._rate)
        return Clip(start_s, times, frames, audio)
