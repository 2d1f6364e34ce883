"""Short clips that every browser plays, of the begin of a video or a sound: MP4 with H.264 and AAC, by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.media.audio import Audio
from savable_pipeline.data.media.container import media_errors, pyav
from savable_pipeline.data.media.video import Video

_VIDEO_S, _AUDIO_S = 8.0, 30.0  # seconds of a clip, at most
_SHORTEST_S = 0.3
_VIDEO_BYTES, _AUDIO_BYTES = 40_000, 8_000  # a second that a clip needs to be of use; a video may have twice as many
_SIDE = 320  # pixels
_MOST_PIXELS = 500e6  # decoded for a clip
_LEAST_FPS, _MOST_FPS = 1.0, 25.0
_RATES = (48_000, 44_100, 32_000, 24_000, 16_000)  # Hz, of those that AAC has
_BLOCK = 1024  # samples of a frame of AAC


def clip_seconds(video: Video | None, audio: Audio | None, limit: int) -> float:
    """How long a clip of at most `limit` bytes is, which takes no more than some seconds to decode; 0: too short."""
    duration = _stream(video, audio).duration_s
    if video is None:
        seconds = min(duration, _AUDIO_S, 0.8 * limit / _AUDIO_BYTES)
    else:
        pixels_per_s = video.size[0] * video.size[1] * max(video.fps, _MOST_FPS)
        seconds = min(duration, _VIDEO_S, 0.8 * limit / _VIDEO_BYTES, _MOST_PIXELS / pixels_per_s)
    return seconds if seconds >= min(_SHORTEST_S, duration) else 0.0


def clip(video: Video | None, audio: Audio | None, seconds: float, limit: int) -> bytes:
    """The first seconds, encoded anew; empty where that takes more than `limit` bytes. Raises `MediaError`."""
    file = io.BytesIO()
    with (
        media_errors(_stream(video, audio).name, "its clip cannot be encoded"),
        pyav().open(file, "w", format="mp4") as made,
    ):
        sound = _sound_stream(made, audio) if audio is not None else None
        if video is not None:
            own = 0 if audio is None else _AUDIO_BYTES
            _write_frames(made, video, seconds, min(2 * _VIDEO_BYTES, int(0.8 * limit / seconds)) - own)
        if audio is not None:
            _write_samples(made, sound, audio, seconds)
    return file.getvalue() if len(file.getvalue()) <= limit else b""


def _stream(video: Video | None, audio: Audio | None) -> Video | Audio:
    stream = video or audio
    assert stream is not None, "nothing to encode"
    return stream


def _write_frames(made: Any, video: Video, seconds: float, bytes_per_s: int) -> None:
    fps = min(max(video.fps, _LEAST_FPS), _MOST_FPS)
    stream = made.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
    rate, above = 8 * bytes_per_s, 8 * bytes_per_s * seconds / 6  # the bits that the begin may take more
    stream.options = {"preset": "veryfast", "maxrate": f"{rate}", "bufsize": f"{above:.0f}", "crf": "26"}
    stream.width, stream.height = size = _even_size(*video.size)
    stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
    for number, frame in enumerate(_frames(video, max(1, round(seconds * fps)), fps, size)):
        picture = pyav().VideoFrame.from_ndarray(np.ascontiguousarray(frame.transpose(1, 2, 0)), "rgb24")
        picture.pts, picture.time_base = number, 1 / stream.codec_context.framerate
        made.mux(stream.encode(picture))
    made.mux(stream.encode())


def _frames(video: Video, count: int, fps: float, size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """One second of them at a time, since all of them are large."""
    times = [number / fps for number in range(count)]
    for begin in range(0, count, round(_MOST_FPS)):
        yield from video.frames(times[begin : begin + round(_MOST_FPS)], size=size)


def _even_size(width: int, height: int) -> tuple[int, int]:
    scale = min(1.0, _SIDE / max(width, height))
    return max(2, round(width * scale) // 2 * 2), max(2, round(height * scale) // 2 * 2)


def _sound_stream(made: Any, audio: Audio) -> Any:
    rate = next((rate for rate in _RATES if rate <= audio.rate), _RATES[-1])
    stream = made.add_stream("aac", rate=rate, layout="mono" if audio.channels != 2 else "stereo")
    stream.codec_context.bit_rate = 8 * _AUDIO_BYTES * 3 // 4
    return stream


def _write_samples(made: Any, stream: Any, audio: Audio, seconds: float) -> None:
    rate, layout = stream.codec_context.sample_rate, stream.codec_context.layout.name
    samples = audio.samples(0.0, seconds, rate=rate, mono=layout == "mono")
    for begin in range(0, samples.shape[1], _BLOCK):
        block = np.ascontiguousarray(samples[:, begin : begin + _BLOCK])
        frame = pyav().AudioFrame.from_ndarray(block, "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, begin, Fraction(1, rate)
        made.mux(stream.encode(frame))
    made.mux(stream.encode())
