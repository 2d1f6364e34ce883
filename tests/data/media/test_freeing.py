"""Decoders are freed with the object that has them, at once: the next collection of garbage may be far."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator

import pytest

import savable_pipeline as sp
from savable_pipeline.core import batch_memory
from savable_pipeline.data.media.container import Audio
from savable_pipeline.data.media.video import Video
from tests.support.media_files import video_bytes

MP4 = video_bytes(24, audio="aac")


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def decoders() -> int:
    return sum(type(each).__name__ in ("InputContainer", "VideoCodecContext") for each in gc.get_objects())


@pytest.mark.parametrize("closed", [False, True])
def test_released_videos_and_audio_leave_no_decoder(closed: bool) -> None:
    before = decoders()
    for _ in range(3):
        video, audio = Video(io.BytesIO(MP4), "v.mp4"), Audio(io.BytesIO(MP4), "v.mp4")
        video.frames([1.5, 0.0])
        audio.samples(0.5, 1.0)
        if closed:
            video.close()
            audio.close()
    assert decoders() > before
    del video, audio
    assert decoders() == before


def test_clip_iterator_released_midway_leaves_no_decoder() -> None:
    before = decoders()
    clips = sp.Clips(length_s=0.5, fps=4, count=3).of(Video(io.BytesIO(MP4), "v.mp4"), sp.Rng(0))
    next(clips)
    assert decoders() > before
    del clips
    assert decoders() == before


def test_buffered_frames_do_not_use_batch_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    class Memory:
        def allocate(self, size: int) -> None:
            taken.append(size)

    monkeypatch.setattr(batch_memory, "_memory", Memory())
    clips = sp.Clips(length_s=0.5, fps=4)
    clips.one(Video(io.BytesIO(MP4), "v.mp4"), sp.Rng(0), audio=Audio(io.BytesIO(MP4), "v.mp4"))
    assert not taken
