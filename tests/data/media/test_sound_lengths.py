"""How long a sound is: as many samples as FFmpeg decodes, whatever is skipped at its start and its end.

The oracle is FFmpeg, here inside PyAV: `ffmpeg -i FILE -f f32le -` writes as many samples, and the same ones.
"""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest

from savable_pipeline.data.media.container import Audio
from savable_pipeline.data.media.media_info import media_fault, media_info
from savable_pipeline.data.media.video import Video
from tests.support.media_files import audio_bytes, frame_number, tone, video_bytes

SECONDS = 1.2345  # no number of packets of any codec


def decoded(data: bytes) -> tuple[np.ndarray, float]:
    """All samples, float32 (samples,), and the time at which the first is heard, from the begin of the container."""
    with av.open(io.BytesIO(data)) as made:
        resampler, first, blocks = av.AudioResampler("fltp", "mono"), None, []
        for frame in made.decode(audio=0):
            first = frame.pts * frame.time_base if first is None else first
            blocks += [each.to_ndarray()[0] for each in resampler.resample(frame)]
        return np.concatenate(blocks), float(first or 0) - (made.start_time or 0) / 1e6


KINDS: dict[str, dict[str, Any]] = {
    "Opus in Ogg": {"container": "ogg", "rate": 48000},
    "Opus in WebM": {"container": "webm", "rate": 48000},
    "MP3, by LAME": {"container": "mp3", "rate": 44100},
    "FLAC in Matroska": {"container": "matroska", "codec": "flac", "rate": 44100},
    "AAC in a transport stream": {"container": "mpegts", "codec": "aac", "rate": 44100},
    "PCM in QuickTime": {"container": "mov", "codec": "pcm_s16le", "rate": 44100},
}


@pytest.mark.parametrize("begin_s", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_audio_ends_with_the_last_sample_ffmpeg_decodes(kind: str, begin_s: float) -> None:
    data = audio_bytes(SECONDS, begin_s=begin_s, **KINDS[kind])
    expected, first_s = decoded(data)
    with Audio(io.BytesIO(data), "the part") as sound:
        found = sound.samples()[0]
        front = round(first_s * sound.rate)  # before the first sample; in Ogg and Matroska 0
        assert len(found) == front + len(expected)
        assert np.array_equal(found[front:], expected)
        assert sound.duration_s == pytest.approx(len(expected) / sound.rate, abs=0.03)
        half = sound.samples(rate=sound.rate // 2)
        assert half.shape[1] == pytest.approx(len(found) / 2, abs=1)
        later = sound.samples(0.5)[0]
        assert abs(len(later) - (len(found) - sound.rate // 2)) <= sound.rate / 1000
    assert media_fault(io.BytesIO(data))[0] == ""


@pytest.mark.parametrize("kind", ["Opus in Ogg", "MP3, by LAME", "FLAC in Matroska", "PCM in QuickTime"])
def test_length_excludes_codec_padding(kind: str) -> None:
    data, rate = audio_bytes(SECONDS, **KINDS[kind]), KINDS[kind]["rate"]
    original = tone(SECONDS, rate, 1)[0]
    with Audio(io.BytesIO(data), "the part") as sound:
        found = sound.samples()[0]
        assert len(found) == len(original) and np.abs(found - original).mean() < 0.02
    said = media_info(io.BytesIO(data), "the part", "bin").duration_s
    assert said == pytest.approx(SECONDS, abs=0.001)


@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts"])
def test_video_that_does_not_start_at_0_has_its_true_length(container: str) -> None:
    data = video_bytes(20, container=container, b_frames=0, times=[700 + 100 * number for number in range(20)])
    with Video(io.BytesIO(data), "the part") as video:
        assert video.duration_s in (
            pytest.approx(2.0, abs=0.11),
            pytest.approx(2.7, abs=0.1),
        )  # MP4 says when it starts
        last = video.duration_s - 0.05
        assert frame_number(video.frames([last])[0]) == 19
    assert media_fault(io.BytesIO(data))[0] == ""
