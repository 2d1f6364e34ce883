"""`MediaInfo`: what the headers of a media file say; nothing is decoded."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, BinaryIO

import msgspec

from savable_pipeline.data.media.container import (
    first_stream,
    header_duration,
    media_errors,
    open_container,
    origin_of,
    range_fault,
)
from savable_pipeline.data.media.video import frame_rate, shown_size
from savable_pipeline.data.shards.byte_source import seconds_of
from savable_pipeline.data.shards.orientation import upright_size
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, open_image, part_type
from savable_pipeline.errors import MediaError


class MediaInfo(msgspec.Struct, frozen=True):
    """What is known of a part without decoding it; None where the headers do not say it.

    Attributes:
        duration_s: The length of the video, or without one of the sound, in seconds.
        fps: Frames in a second, on average.
        frames: The number of frames.
        width: Pixels of a frame, or of an image, as it is shown.
        height: The same.
        rate: Samples of the sound in a second, in Hz.
        channels: The number of its channels.

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
    """Read the headers of a file: an image by the name of its `part`, anything else as audio or video.

    Of a range of a file the duration is the range's, and the number of frames is not known.

    Raises `MediaError`, or ImportError without PyAV. Errors of reading the file pass.
    """
    if part_type(part) in IMAGE_PARTS:
        return _image_info(file, name, part)
    with open_container(file, name) as container:
        video, audio = first_stream(container, "video"), first_stream(container, "audio")
        if video is None and audio is None:
            raise MediaError(f"{name}: neither video nor sound in it")
        with media_errors(name, "its header cannot be read"):
            duration, _ = header_duration(container, video or audio, file, origin_of(container))
        begin_s, end_s = seconds_of(file)
        if fault := range_fault(container, video or audio, file, begin_s, end_s):
            raise MediaError(f"{name}: {fault}")
        ranged = end_s is not None or begin_s > 0
        if duration is not None or end_s is not None:
            duration = (duration if end_s is None else Fraction(end_s)) - Fraction(begin_s)  # type: ignore[operator]
        said: dict[str, Any] = {"duration_s": None if duration is None else float(duration)}
        if video is not None:
            rate, (width, height) = frame_rate(video), shown_size(container, video, file)
            said |= {"fps": float(rate) if rate else None, "frames": None if ranged else video.frames or None}
            said |= {"width": width or None, "height": height or None}
        if audio is not None and audio.codec_context is not None:
            said |= {"rate": audio.codec_context.sample_rate or None, "channels": audio.codec_context.channels or None}
    return MediaInfo(**said)


def _image_info(file: BinaryIO, name: str, part: str) -> MediaInfo:
    from PIL.Image import DecompressionBombError  # here: it takes time and memory

    try:
        with open_image(file, part) as image:
            width, height = upright_size(image)
            return MediaInfo(width=width, height=height)
    except (OSError, ValueError, SyntaxError, DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise MediaError(f"{name}: {error}") from error
