"""`MediaInfo`: facts in the headers of a media file, and errors of a file."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

import msgspec

from savable_pipeline.data.media.container import (
    decoded_frames,
    displayed_frames,
    enable_checksums,
    first_stream,
    header_duration,
    is_reordered,
    media_errors,
    ogg_fault,
    open_container,
    origin_of,
    range_fault,
)
from savable_pipeline.data.media.video import display_size, frame_rate
from savable_pipeline.data.shards.byte_source import seconds_of
from savable_pipeline.data.shards.orientation import upright_size
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, open_image, part_type
from savable_pipeline.errors import MediaError

_SHORT_S = Fraction(1, 4)  # seconds that a stream may lack at its end, because codecs pad what they encode
_SHORT_FRACTION = Fraction(1, 100)  # the same for long streams, as a fraction of the duration
_CLIP_S = 10  # a video with a single keyframe that is at most this long decodes fast enough from its start


class MediaInfo(msgspec.Struct, frozen=True):
    """Facts about a part from its headers, without decoding; None if unknown.

    Attributes:
        duration_s: The length of the video, or else of the audio, in seconds.
        fps: Frames per second, on average.
        frames: The number of frames that are displayed, by the header.
        width: Pixels of a frame or image, as displayed.
        height: Pixels of a frame or image, as displayed.
        rate: Samples per second of the audio, in Hz.
        channels: The number of channels of the audio.

    Example:
        >>> sample = next(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
        >>> sample.media("png").width, sample.media("png").duration_s
        (8, None)
    """

    duration_s: float | None = None
    fps: float | None = None
    frames: int | None = None
    width: int | None = None
    height: int | None = None
    rate: int | None = None
    channels: int | None = None


def media_info(file: BinaryIO, name: str, part: str) -> MediaInfo:
    """Read the headers of an image, video or audio with the extension `part`.

    For a range of a file, the duration is the range's, and the number of frames is unknown.

    Raises `MediaError`, ImportError without PyAV, and the errors of reading the file.
    """
    if part_type(part) in IMAGE_PARTS:
        return _image_info(file, name, part)
    with open_container(file, name) as container:
        video, audio = first_stream(container, "video"), first_stream(container, "audio")
        if video is None and audio is None:
            raise MediaError(f"{name}: neither a video nor an audio stream in it")
        with media_errors(name, "its header cannot be read"):
            duration, _ = header_duration(container, video or audio, file, origin_of(container))
        begin_s, end_s = seconds_of(file)
        if fault := range_fault(container, video or audio, file, begin_s, end_s):
            raise MediaError(f"{name}: {fault}")
        is_range = end_s is not None or begin_s > 0
        if duration is not None or end_s is not None:
            duration = (duration if end_s is None else Fraction(end_s)) - Fraction(begin_s)  # type: ignore[operator]
        info: dict[str, Any] = {"duration_s": None if duration is None else float(duration)}
        if video is not None:
            rate, (width, height) = frame_rate(video), display_size(container, video, file)
            info |= {"fps": float(rate) if rate else None, "width": width or None, "height": height or None}
            info["frames"] = None if is_range else displayed_frames(container, video)
        if audio is not None and audio.codec_context is not None:
            info |= {"rate": audio.codec_context.sample_rate or None, "channels": audio.codec_context.channels or None}
    return MediaInfo(**info)


def _image_info(file: BinaryIO, name: str, part: str) -> MediaInfo:
    from PIL.Image import DecompressionBombError  # imported here, because it takes time and memory

    try:
        with open_image(file, part) as image:
            width, height = upright_size(image)
            return MediaInfo(width=width, height=height)
    except (OSError, ValueError, SyntaxError, DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise MediaError(f"{name}: {error}") from error


@dataclass(slots=True)
class _Progress:
    """Progress in decoding a stream. Times are in seconds from the container's start."""

    packets: int = 0
    keyframes: int = 0
    frames: int = 0
    last: Fraction | None = None  # the start of the last frame
    end: Fraction = Fraction(0)  # the latest end of a frame
    chunk_times: deque[int] | None = None  # see `decoded_frames`


def media_fault(file: BinaryIO) -> tuple[str, bool]:
    """Return what is wrong with a file, or "".

    The second value says whether it is a long video with a single keyframe.

    Raises ImportError without PyAV, and what reading `file` raises.
    """
    try:
        with open_container(file, "") as container:
            return _container_fault(container, file)
    except MediaError as error:
        return f"unreadable media: {str(error).removeprefix(': ')}", False


def _container_fault(container: Any, file: BinaryIO) -> tuple[str, bool]:
    """Decode all of a file, and return the values of `media_fault`."""
    found = {"video": first_stream(container, "video"), "audio": first_stream(container, "audio")}
    streams = {stream.index: (kind, stream) for kind, stream in found.items() if stream is not None}
    if not streams:
        return "unreadable media: neither video nor sound in it", False
    progress = {
        index: _Progress(chunk_times=deque() if is_reordered(container, stream) else None)
        for index, (_, stream) in streams.items()
    }
    origin = origin_of(container)
    ends = {index: header_duration(container, stream, file, origin) for index, (_, stream) in streams.items()}
    if container.format.name == "ogg" and (fault := ogg_fault(file)):
        return f"unreadable media: {fault}", False
    for _, stream in streams.values():
        enable_checksums(stream)
    with media_errors("", "it cannot be decoded"):
        for packet in container.demux([stream for _, stream in streams.values()]):
            kind, stream = streams[packet.stream.index]
            if fault := _packet_fault(container, packet, progress[stream.index], kind, origin):
                return fault, False
    for index, (kind, _) in streams.items():
        duration, is_own = ends[index]
        if not progress[index].frames:
            return f"unreadable media: not one frame of its {kind} can be decoded", False
        if duration is None or not is_own:
            continue
        if duration - progress[index].end > max(_SHORT_S, duration * _SHORT_FRACTION):
            times = f"{float(progress[index].end):.2f} s of {float(duration):.2f} s"
            return f"cut short: its {kind} ends after {times} that its header says", False
    videos = [progress[index] for index, (kind, _) in streams.items() if kind == "video"]
    return "", any(video.keyframes == 1 and video.end > _CLIP_S for video in videos)


def _packet_fault(container: Any, packet: Any, done: _Progress, kind: str, origin: Fraction) -> str:
    """Decode a packet, count it in `done`, and return what is wrong with it, or ""."""
    if packet.size:
        done.packets += 1
        done.keyframes += packet.is_keyframe
        if kind == "video" and done.packets == 1 and not packet.is_keyframe:
            return "missing keyframe: the video does not start with one, so its start cannot be decoded"
    for frame in decoded_frames(container, packet, done.chunk_times):
        # a frame of FLAC without a time is damaged, because intact ones have a time
        if frame.is_corrupt or (frame.pts is None and packet.stream.codec_context.name == "flac"):
            return f"unreadable media: a frame of its {kind} is damaged"
        if frame.pts is None:
            continue
        time = frame.pts * frame.time_base - origin
        if done.last is not None and time < done.last:
            return f"times that go back: its {kind} has {float(time):.3f} s after {float(done.last):.3f} s"
        length = (
            Fraction(frame.samples, frame.sample_rate) if kind == "audio" else (frame.duration or 0) * frame.time_base
        )
        done.frames, done.last, done.end = done.frames + 1, time, max(done.end, time + length)
    return ""
