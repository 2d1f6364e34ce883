"""Video or audio as an entry: facts, a player of an excerpt, and images.

    part that browsers play, if it is small ─ its bytes unchanged ────────┐
    any other part ─ its first seconds, encoded again ────────────────────┴─ Player
    video ─ 9 frames, each with its time ── Thumbnail
    audio ─ its first 30 s (sound_entries) ─ Sound

Only a player uses the bytes, as base64 in a data URI. Parts that PyAV cannot decode are not in the page. A clip is MP4
with H.264 and AAC, which every browser plays.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.wording import counted
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.media.container import Audio, media_errors, pyav
from savable_pipeline.data.media.video import Video
from savable_pipeline.data.shards.byte_source import RangeFile
from savable_pipeline.data.shards.part_types import part_type
from savable_pipeline.errors import MediaError
from savable_pipeline.tools.preview.image_entries import thumbnail_of_pixels
from savable_pipeline.tools.preview.page import Budget, CardEntry, Player, Sound, Thumbnail, first_line
from savable_pipeline.tools.preview.sound_entries import embed_spectrogram, spectrogram_pixels, waveform

# The containers that browsers play, and the codecs in them.
_MIME_TYPES = {"mp4": "video/mp4", "m4v": "video/mp4", "webm": "video/webm", "mp3": "audio/mpeg", "wav": "audio/wav"}
_MIME_TYPES |= {"m4a": "audio/mp4", "flac": "audio/flac", "ogg": "audio/ogg", "oga": "audio/ogg", "opus": "audio/ogg"}
_CODECS = {"h264", "vp8", "vp9", "av1", "aac", "mp3", "opus", "vorbis", "flac"}
_CODECS |= {"pcm_s16le", "pcm_u8", "pcm_s24le", "pcm_f32le"}
_MOST_FRAMES = 9  # thumbnails of a video
_FRAME_SIDE = 160  # pixels
# A longer video is shown by its keyframes, because decoding all frames before a time would be slow.
_LONG_VIDEO_S = 30.0
_SOUND_S = 30.0  # seconds of audio in a waveform, at most
_SOUND_HZ = 16_000  # its rate, at most


def is_media_range(sample: Sample, part: str, head: bytes) -> bool:
    """Return whether a part is a range of a longer file, which the part's bytes name."""
    if not head.startswith(b'{"path":'):
        return False
    with sample.open(part) as file:
        return isinstance(file, RangeFile)


def media_entry(sample: Sample, part: str, note: str, budget: Budget) -> CardEntry:
    """Return the entry of audio or video.

    The entry has an error if the part cannot be decoded to the end.

    Raises `MediaError` if its header cannot be read, and `SavableError` if the part cannot be read.
    """
    try:
        info = sample.media(part)
        with ExitStack() as stack:
            video = stack.enter_context(sample.video(part)) if info.width else None
            audio = stack.enter_context(sample.audio(part)) if info.channels else None
            if video is None and audio is None:
                raise MediaError(f"part {part!r}: its header says neither the size of a picture nor how it sounds")
            facts = " · ".join(filter(None, [_video_facts(video), _audio_facts(audio), note]))
            entry = CardEntry(part, facts)
            try:
                return _with_media(entry, sample, video, audio, budget)
            except MediaError as error:
                return replace(entry, fault=first_line(error))
    except ImportError as error:
        kind = "video" if _mime_type(part).startswith("video") else "audio"
        player = _whole_player(sample, part, kind, budget) or Player(kind, "")
        return CardEntry(part, note, player=replace(player, note=first_line(error)))


def _with_media(
    entry: CardEntry, sample: Sample, video: Video | None, audio: Audio | None, budget: Budget
) -> CardEntry:
    """Add frames, spectrogram and player to an entry. Decoding comes first, so damaged parts get no player."""
    half = budget.free // 2  # the rest is for the player
    image_budget = Budget(half)
    if video is not None:
        entry = replace(entry, thumbnails=_frame_thumbnails(video, image_budget))
    if audio is not None:
        entry = replace(entry, sounds=[_sound_of(audio, image_budget, coloured=video is None)])
    budget.free -= half - image_budget.free
    kind = "audio" if video is None else "video"
    plays = all(stream is None or _codec(stream) in _CODECS for stream in (video, audio))
    player = _whole_player(sample, entry.name, kind, budget) if plays else None
    return replace(entry, player=player or _clip_player(video, audio, kind, budget))


def _mime_type(part: str) -> str:
    """Return the MIME type of a part that browsers may play, or ""."""
    return _MIME_TYPES.get(part_type(part), "")


def _whole_player(sample: Sample, part: str, kind: str, budget: Budget) -> Player | None:
    """Return a player of the whole part, or None if it is too large or browsers do not play its format."""
    subtype = _mime_type(part).partition("/")[2]
    if not subtype or budget.excerpt <= 0:  # browsers do not play it, or no bytes are free
        return None
    head, size = sample.head(part, budget.excerpt)
    if len(head) < size or is_media_range(sample, part, head):  # too large, or a range of a longer file
        return None
    return Player(kind, budget.embed(f"{kind}/{subtype}", head))


def _clip_player(video: Video | None, audio: Audio | None, kind: str, budget: Budget) -> Player:
    """Return a player of the first seconds, as many as the budget allows."""
    seconds = clip_seconds(video, audio, budget.excerpt)
    data = encode_clip(video, audio, seconds, budget.excerpt) if seconds > 0 else b""
    if not data:
        return Player(kind, "", "no room for an excerpt: let the page show fewer samples")
    return Player(kind, budget.embed(f"{kind}/mp4", data), f"its first {seconds:.3g} s, encoded again")


def _video_facts(video: Video | None) -> str:
    """Describe a video in words."""
    if video is None:
        return ""
    width, height = video.size
    return f"{format_time(video.duration_s)}, {width:,} × {height:,}, {video.fps:.4g} fps, {_codec(video)}"


def _audio_facts(audio: Audio | None) -> str:
    """Describe audio in words."""
    if audio is None:
        return ""
    return f"{format_time(audio.duration_s)}, {audio.rate:,} Hz, {counted(audio.channels, 'channel')}, {_codec(audio)}"


def _codec(stream: Video | Audio) -> str:
    """Return the name of a codec. `stream.codec` may be the name of a decoder instead."""
    name: str = stream.codec
    return {"mp3float": "mp3", "libdav1d": "av1", "libopus": "opus"}.get(name, name)


def format_time(seconds: float) -> str:
    """Format a time: "3.25 s", "2:03", "1:02:03"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def _frame_thumbnails(video: Video, budget: Budget) -> list[Thumbnail]:
    """Return frames spread over the video, each with its time."""
    times = _thumbnail_times(video)
    scale = min(1.0, _FRAME_SIDE / max(video.size))
    size = max(1, round(video.size[0] * scale)), max(1, round(video.size[1] * scale))
    frames = zip(times, video.frames(times, size=size), strict=True)
    shown = [
        replace(thumbnail_of_pixels(frame.transpose(1, 2, 0)), caption=format_time(time)) for time, frame in frames
    ]
    return [thumbnail for thumbnail in shown if budget.reserve(thumbnail.uri)]


def _thumbnail_times(video: Video) -> list[float]:
    """Return the times of the frames to show: evenly spread, or of a long video the keyframes near those times."""
    duration = video.duration_s
    count = int(min(_MOST_FRAMES, max(1, duration * video.fps)))
    even = [(number + 0.5) * duration / count for number in range(count)]
    if duration <= _LONG_VIDEO_S:
        return even
    keyframes = [video.keyframe_at(time) for time in even]
    return keyframes if len(set(keyframes)) == len(keyframes) else even


def _sound_of(audio: Audio, budget: Budget, *, coloured: bool) -> Sound:
    """Return the waveform of the start of audio and, if `coloured`, its spectrogram."""
    seconds = min(audio.duration_s, _SOUND_S)
    rate = min(audio.rate, _SOUND_HZ)
    samples = audio.samples(0.0, seconds, rate=rate, mono=True)[0]
    note = f"0 to {format_time(seconds)}"
    if not coloured:
        return Sound(waveform(samples), "", note)
    picture = embed_spectrogram(spectrogram_pixels(samples), budget)
    return Sound(waveform(samples), picture, f"{note}; 0 to {rate / 2000:g} kHz")


_VIDEO_S, _AUDIO_S = 8.0, 30.0  # seconds of a clip, at most
_SHORTEST_S = 0.3  # seconds of a clip of a longer part, at least
_VIDEO_BYTES, _AUDIO_BYTES = 40_000, 8_000  # per second of a clip; a video may have twice as many
_CLIP_SIDE = 320  # pixels
_MOST_PIXELS = 500e6  # most pixels to decode for a clip
_LEAST_FPS, _CLIP_FPS = 1.0, 25.0  # frames per second of a clip, at least and at most
_AAC_RATES = (48_000, 44_100, 32_000, 24_000, 16_000)  # Hz, those of AAC that are used
_AAC_FRAME = 1024  # samples of an AAC frame


def clip_seconds(video: Video | None, audio: Audio | None, limit: int) -> float:
    """Return the length of a clip of at most `limit` bytes, in seconds.

    The clip is short enough to be decoded in seconds. Return 0 if it would be too short to be useful.
    """
    duration = _any_stream(video, audio).duration_s
    if video is None:
        seconds = min(duration, _AUDIO_S, 0.8 * limit / _AUDIO_BYTES)
    else:
        # all frames of a video are decoded, but at least those of the clip
        pixels_per_s = video.size[0] * video.size[1] * max(video.fps, _CLIP_FPS)
        seconds = min(duration, _VIDEO_S, 0.8 * limit / _VIDEO_BYTES, _MOST_PIXELS / pixels_per_s)
    return seconds if seconds >= min(_SHORTEST_S, duration) else 0.0


def encode_clip(video: Video | None, audio: Audio | None, seconds: float, limit: int) -> bytes:
    """Encode the first seconds as MP4.

    Returns b"" if they take more than `limit` bytes.

    Raises `MediaError` if they cannot be decoded or encoded.
    """
    file = io.BytesIO()
    with (
        media_errors(_any_stream(video, audio).name, "its clip cannot be encoded"),
        pyav().open(file, "w", format="mp4") as output,
    ):
        audio_stream = _add_audio_stream(output, audio) if audio is not None else None
        if video is not None:
            bytes_per_s = min(2 * _VIDEO_BYTES, int(0.8 * limit / seconds))
            _write_frames(output, video, seconds, bytes_per_s - (0 if audio is None else _AUDIO_BYTES))
        if audio is not None:
            _write_samples(output, audio_stream, audio, seconds)
    return file.getvalue() if len(file.getvalue()) <= limit else b""


def _any_stream(video: Video | None, audio: Audio | None) -> Video | Audio:
    """Return the video, or the audio if there is none."""
    stream = video or audio
    assert stream is not None, "nothing to encode"
    return stream


def _write_frames(output: Any, video: Video, seconds: float, bytes_per_s: int) -> None:
    """Encode the first seconds of a video as H.264."""
    fps = min(max(video.fps, _LEAST_FPS), _CLIP_FPS)
    stream = output.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
    # bits per second, and bits of the rate control's buffer
    bit_rate, buffer = 8 * bytes_per_s, 8 * bytes_per_s * seconds / 6
    stream.options = {"preset": "veryfast", "maxrate": f"{bit_rate}", "bufsize": f"{buffer:.0f}", "crf": "26"}
    stream.width, stream.height = size = _even_size(*video.size)
    stream.pix_fmt = "yuv420p"
    stream.codec_context.thread_count = 1
    for number, frame in enumerate(_decode_frames(video, max(1, round(seconds * fps)), fps, size)):
        video_frame = pyav().VideoFrame.from_ndarray(np.ascontiguousarray(frame.transpose(1, 2, 0)), "rgb24")
        video_frame.pts, video_frame.time_base = number, 1 / stream.codec_context.framerate
        output.mux(stream.encode(video_frame))
    output.mux(stream.encode())


def _decode_frames(video: Video, count: int, fps: float, size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """Yield `count` frames, decoded in groups of a second, because all of them together would need much memory."""
    times = [number / fps for number in range(count)]
    for begin in range(0, count, round(_CLIP_FPS)):
        yield from video.frames(times[begin : begin + round(_CLIP_FPS)], size=size)


def _even_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of a clip's frames, in even numbers of pixels, as H.264 needs them."""
    scale = min(1.0, _CLIP_SIDE / max(width, height))
    return max(2, round(width * scale) // 2 * 2), max(2, round(height * scale) // 2 * 2)


def _add_audio_stream(output: Any, audio: Audio) -> Any:
    """Add an AAC stream for audio to a file."""
    rate = next((rate for rate in _AAC_RATES if rate <= audio.rate), _AAC_RATES[-1])
    stream = output.add_stream("aac", rate=rate, layout="mono" if audio.channels != 2 else "stereo")
    stream.codec_context.bit_rate = 8 * _AUDIO_BYTES * 3 // 4
    return stream


def _write_samples(output: Any, stream: Any, audio: Audio, seconds: float) -> None:
    """Encode the first seconds of audio."""
    rate, layout = stream.codec_context.sample_rate, stream.codec_context.layout.name
    samples = audio.samples(0.0, seconds, rate=rate, mono=layout == "mono")
    for begin in range(0, samples.shape[1], _AAC_FRAME):
        block = np.ascontiguousarray(samples[:, begin : begin + _AAC_FRAME])
        frame = pyav().AudioFrame.from_ndarray(block, "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, begin, Fraction(1, rate)
        output.mux(stream.encode(frame))
    output.mux(stream.encode())
