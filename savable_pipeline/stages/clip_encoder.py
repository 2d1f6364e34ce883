"""`ClipEncoder`: the encoder of `.clips`, whose items are the clips of a video, of a sound or of both."""

from __future__ import annotations

from typing import Any

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.media.clips import Clip, ClipIterator, Clips
from savable_pipeline.stages.task_encoder import TaskEncoder


class ClipEncoder(TaskEncoder):
    """Makes of each clip a dict of "frames", "times_s" and "audio", as far as it has them, and "start_s".

    Args:
        clips: Which clips to take.
        video: The name of the part; True: the first video; False: none.
        audio: The name of the part; True: the first sound; False: none.
        rate: Samples of the sound in a second, in Hz. None: its own.

    Raises:
        ValueError: Neither is taken.
    """

    global_rng = False

    def __init__(self, clips: Clips, *, video: str | bool, audio: str | bool, rate: int | None) -> None:
        if not (video or audio):
            raise ValueError(".clips takes clips of a video, of a sound or of both: video=, audio=")
        self.clips, self.video, self.audio, self.rate = clips, video, audio, rate

    def encode(self, sample: Sample, rng: Rng) -> ClipIterator:
        """Return an iterator over the clips of the sample."""
        video = sample.video(_name(self.video)) if self.video else None
        audio = sample.audio(_name(self.audio)) if self.audio else None
        return self.clips.of(video, rng, audio=audio, rate=self.rate, make=_fields)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the clips, and what they are taken of."""
        return {**self.clips.settings(), "video": self.video, "audio": self.audio, "rate": self.rate}


def _name(part: str | bool) -> str | None:
    return part if isinstance(part, str) else None


def _fields(clip: Clip) -> dict[str, Any]:
    fields = {"start_s": clip.start_s, "times_s": clip.times_s, "frames": clip.frames, "audio": clip.audio}
    return {name: value for name, value in fields.items() if value is not None}
