"""Small media files: videos whose frames show their number, which lossy codecs preserve, and tones as audio."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

_GRID = 4  # blocks per side, for the 16 bits of a frame's number


def numbered_frame(number: int, size: tuple[int, int], noise: int = 0) -> NDArray[np.uint8]:
    """Return a frame, uint8 (height, width, 3), of 4 × 4 blocks that are black or white by the bits of its number."""
    bits = (number >> np.arange(_GRID * _GRID) & 1).reshape(_GRID, _GRID).astype(np.uint8) * 160 + 20
    rows, columns = np.arange(size[1]) * _GRID // size[1], np.arange(size[0]) * _GRID // size[0]
    gray = bits[rows][:, columns]
    if noise:
        gray = gray + np.random.default_rng(number).integers(0, noise, gray.shape, np.uint8)
    return np.ascontiguousarray(np.broadcast_to(gray[..., None], (*gray.shape, 3)))


def frame_number(frame: NDArray[np.uint8]) -> int:
    """Return the number that a decoded frame, uint8 (3, height, width), shows, at any size."""
    height, width = frame.shape[1:]
    rows, columns = (
        (np.arange(_GRID) * 2 + 1) * height // (2 * _GRID),
        (np.arange(_GRID) * 2 + 1) * width // (2 * _GRID),
    )
    bits = frame[1][rows][:, columns].ravel() > 120
    return int((bits << np.arange(_GRID * _GRID)).sum())


def tone(seconds: float, rate: int, channels: int) -> NDArray[np.float32]:
    """Return a rising tone, float32 (channels, samples), that differs in each channel and at every moment."""
    times = np.arange(round(seconds * rate)) / rate
    each = [0.5 * np.sin(2 * np.pi * (220 * (channel + 1) * times + 40 * times**2)) for channel in range(channels)]
    return np.array(each, np.float32).reshape(channels, -1)


def video_bytes(
    frames: int = 24,
    *,
    fps: int | Fraction = 12,
    size: tuple[int, int] = (64, 48),
    codec: str = "libx264",
    container: str = "mp4",
    gop: int = 8,
    b_frames: int = 2,
    noise: int = 0,
    audio: str = "",
    rotation: int = 0,
    times: list[int] | None = None,
    numbers_from: int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """Return a video of numbered frames. `audio` is a codec for a tone; `times` of the frames are in 1/1000 s."""
    with tempfile.TemporaryDirectory() as folder:  # a named file, because the second pass moves the header to the front
        path = Path(folder) / "made"
        with av.open(str(path), "w", format=container, options=options or {}) as made:
            stream: Any = made.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            stream.codec_context.gop_size, stream.codec_context.max_b_frames = gop, b_frames
            stream.codec_context.thread_count = 1
            if rotation:
                stream.set_display_rotation(rotation)
            if times is not None:
                stream.codec_context.time_base = Fraction(1, 1000)
            sound: Any = (
                made.add_stream(audio, rate=48000 if audio == "libopus" else 16000, layout="mono") if audio else None
            )
            for number in range(frames):
                frame = av.VideoFrame.from_ndarray(numbered_frame(numbers_from + number, size, noise), "rgb24")
                frame.pts, frame.time_base = (
                    (number, 1 / Fraction(fps)) if times is None else (times[number], Fraction(1, 1000))
                )
                made.mux(stream.encode(frame))
            made.mux(stream.encode())
            if sound is not None:
                _encode_tone(made, sound, frames / float(fps), sound.codec_context.sample_rate, 1)
        return path.read_bytes()


def cut_without_decoding(data: bytes, begin_s: float) -> bytes:
    """Return a video as MP4 from a time on. Its edit list hides the frames from the last keyframe to that time."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="mp4") as made:
        stream = source.streams.video[0]
        copied, ticks = made.add_stream_from_template(stream), round(begin_s / stream.time_base)
        source.seek(ticks, stream=stream)
        for packet in source.demux(stream):
            if packet.dts is not None and packet.pts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - ticks, packet.dts - ticks, copied
                made.mux(packet)
    return file.getvalue()


def joined_without_decoding(videos: list[bytes]) -> bytes:
    """Concatenate videos as one MP4 with FFmpeg's concat demuxer, as LeRobot does for merged sets."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.mp4" for number in range(len(videos))]
        for path, video in zip(paths, videos, strict=True):
            path.write_bytes(video)
        listed, joined = Path(folder) / "listed", Path(folder) / "joined"
        listed.write_text("ffconcat version 1.0\n" + "".join(f"file '{path}'\n" for path in paths))
        with (
            av.open(str(listed), format="concat", options={"safe": "0"}) as source,
            av.open(str(joined), "w", format="mp4") as made,
        ):
            stream = source.streams.video[0]
            copied = made.add_stream_from_template(stream)
            copied.time_base = stream.time_base
            for packet in source.demux(stream):
                if packet.dts is not None:
                    packet.stream = copied
                    made.mux(packet)
        return joined.read_bytes()


def flac_bytes(
    samples: int, rate: int, *, block: int, channels: int = 1, container: str = "flac", gap: tuple[int, int] = (0, 0)
) -> bytes:
    """Return a tone as FLAC in blocks. `gap` is a block and the number of samples by which it and the rest are late."""
    file, layout = io.BytesIO(), "mono" if channels == 1 else "stereo"
    pcm = (tone(samples / rate, rate, channels) * 32767).astype(np.int16)
    with av.open(file, "w", format=container) as made:
        stream: Any = made.add_stream("flac", rate=rate, layout=layout, options={"frame_size": str(block)})
        for number, begin in enumerate(range(0, samples, block)):
            data = np.ascontiguousarray(pcm[:, begin : begin + block].T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(data, "s16", layout)
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = begin + (gap[1] if gap[1] and number >= gap[0] else 0)
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


def audio_bytes(
    seconds: float = 2.0,
    *,
    rate: int = 16000,
    channels: int = 1,
    container: str = "flac",
    codec: str = "",
    begin_s: float = 0.0,
) -> bytes:
    """Return a tone whose times start at `begin_s`. `codec` is by default the usual one of the container."""
    usual = {"flac": "flac", "wav": "pcm_s16le", "ogg": "libopus", "mp3": "libmp3lame", "mp4": "aac", "webm": "libopus"}
    file = io.BytesIO()
    with av.open(file, "w", format=container) as made:
        layout = "mono" if channels == 1 else "stereo"
        stream: Any = made.add_stream(codec or usual[container], rate=rate, layout=layout)
        _encode_tone(made, stream, seconds, rate, channels, begin_s)
    return file.getvalue()


def _encode_tone(made: Any, stream: Any, seconds: float, rate: int, channels: int, begin_s: float = 0.0) -> None:
    layout = stream.codec_context.layout.name
    formats = {one.name for one in stream.codec_context.codec.audio_formats or ()}
    format_name = next(name for name in ("s16", "s16p", "flt", "fltp") if name in formats)
    resampler = av.AudioResampler(format_name, layout, rate)
    pcm = (tone(seconds, rate, channels) * 32767).astype(np.int16)
    for begin in range(0, pcm.shape[1], 1024):
        block = np.ascontiguousarray(pcm[:, begin : begin + 1024].T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(block, "s16", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, begin + round(begin_s * rate), Fraction(1, rate)
        for converted in resampler.resample(frame):
            made.mux(stream.encode(converted))
    for converted in resampler.resample(None):
        made.mux(stream.encode(converted))
    made.mux(stream.encode())
