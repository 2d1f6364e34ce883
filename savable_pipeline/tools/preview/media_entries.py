"""A video or a sound as an entry: its facts, a player of an excerpt, frames of it or its waveform and spectrogram.

    part, as a browser plays it, within the room ─ its bytes as they are ─┐
    part, any other ─ its first seconds, encoded anew (media_clips) ──────┴─ Player
    video ─ 9 frames, each with its time ── Thumbnail
    sound ─ its first 30 s (sound_pictures) ─ Sound

Bytes are passed to the page as base64, for a player alone: nothing else of a page could take them for anything. What
PyAV finds damaged is not passed on.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from savable_pipeline.core.wording import counted
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.media.audio import Audio
from savable_pipeline.data.media.video import Video
from savable_pipeline.data.shards.byte_source import RangeFile
from savable_pipeline.data.shards.part_types import part_type
from savable_pipeline.errors import MediaError
from savable_pipeline.tools.preview.image_entries import thumbnail_of_pixels
from savable_pipeline.tools.preview.media_clips import clip, clip_seconds
from savable_pipeline.tools.preview.page import CardEntry, Player, Sound, Thumbnail, first_line
from savable_pipeline.tools.preview.room import Room
from savable_pipeline.tools.preview.sound_pictures import picture_of, spectrogram_pixels, waveform

# Containers that browsers play, and the codecs in them.
_PLAYED = {"mp4": "video/mp4", "m4v": "video/mp4", "webm": "video/webm", "mp3": "audio/mpeg", "wav": "audio/wav"}
_PLAYED |= {"m4a": "audio/mp4", "flac": "audio/flac", "ogg": "audio/ogg", "oga": "audio/ogg", "opus": "audio/ogg"}
_CODECS = {"h264", "vp8", "vp9", "av1", "aac", "mp3", "opus", "vorbis", "flac"}
_CODECS |= {"pcm_s16le", "pcm_u8", "pcm_s24le", "pcm_f32le"}
_FRAMES = 9
_FRAME_SIDE = 160  # pixels
_SOUGHT_S = 30.0  # a longer video is shown by its keyframes, which are found without decoding what lies between
_HEARD_S = 30.0
_HEARD_HZ = 16_000


def is_range(sample: Sample, part: str, head: bytes) -> bool:
    """Whether a part that begins so is a range of a longer file, which its own bytes name."""
    if not head.startswith(b'{"path":'):
        return False
    with sample.open(part) as file:
        return isinstance(file, RangeFile)


def media_entry(sample: Sample, part: str, note: str, room: Room) -> CardEntry:
    """What is damaged is the fault of the entry. Raises `MediaError` where nothing is known, and `SavableError`."""
    try:
        info = sample.media(part)
        with ExitStack() as opened:
            video = opened.enter_context(sample.video(part)) if info.width else None
            audio = opened.enter_context(sample.audio(part)) if info.channels else None
            if video is None and audio is None:
                raise MediaError(f"part {part!r}: its header says neither the size of a picture nor how it sounds")
            facts = " · ".join(filter(None, [_seen(video), _heard(audio), note]))
            entry = CardEntry(part, facts)
            try:
                return _shown(entry, sample, video, audio, room)
            except MediaError as error:
                return replace(entry, fault=first_line(error))
    except ImportError as error:
        kind = "video" if _played(part).startswith("video") else "audio"
        player = _as_it_is(sample, part, kind, room) or Player(kind, "")
        return CardEntry(part, note, player=replace(player, note=first_line(error)))


def _shown(entry: CardEntry, sample: Sample, video: Video | None, audio: Audio | None, room: Room) -> CardEntry:
    """First what is decoded: the bytes of what is damaged go no further."""
    half = room.left // 2
    pictures = Room(half)
    if video is not None:
        entry = replace(entry, thumbnails=_sheet(video, pictures))
    if audio is not None:
        entry = replace(entry, sounds=[_sound(audio, pictures, coloured=video is None)])
    room.left -= half - pictures.left
    kind = "audio" if video is None else "video"
    plays = all(stream is None or _codec(stream) in _CODECS for stream in (video, audio))
    player = _as_it_is(sample, entry.name, kind, room) if plays else None
    return replace(entry, player=player or _clipped(video, audio, kind, room))


def _played(part: str) -> str:
    return _PLAYED.get(part_type(part), "")


def _as_it_is(sample: Sample, part: str, kind: str, room: Room) -> Player | None:
    """A player of the whole part; None where it is too large, or of a format that browsers do not play."""
    played = _played(part).partition("/")[2]
    if not played or room.excerpt <= 0:
        return None
    head, size = sample.head(part, room.excerpt)
    if len(head) < size or is_range(sample, part, head):
        return None
    return Player(kind, room.take(f"{kind}/{played}", head))


def _clipped(video: Video | None, audio: Audio | None, kind: str, room: Room) -> Player:
    seconds = clip_seconds(video, audio, room.excerpt)
    data = clip(video, audio, seconds, room.excerpt) if seconds > 0 else b""
    if not data:
        return Player(kind, "", "no room for an excerpt: let the page show fewer samples")
    return Player(kind, room.take(f"{kind}/mp4", data), f"its first {seconds:.3g} s, encoded anew")


def _seen(video: Video | None) -> str:
    if video is None:
        return ""
    width, height = video.size
    return f"{clock(video.duration_s)}, {width:,} × {height:,}, {video.fps:.4g} fps, {_codec(video)}"


def _heard(audio: Audio | None) -> str:
    if audio is None:
        return ""
    channels = counted(audio.channels, "channel")
    return f"{clock(audio.duration_s)}, {audio.rate:,} Hz, {channels}, {_codec(audio)}"


def _codec(stream: Video | Audio) -> str:
    """The name of a codec, from that of a decoder of it."""
    name: str = stream.codec
    return {"mp3float": "mp3", "libdav1d": "av1", "libopus": "opus"}.get(name, name)


def clock(seconds: float) -> str:
    """A time: "3.25 s", "2:03", "1:02:03"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _sheet(video: Video, room: Room) -> list[Thumbnail]:
    """Frames from all of the video, each with its time."""
    times = _times(video)
    scale = min(1.0, _FRAME_SIDE / max(video.size))
    size = max(1, round(video.size[0] * scale)), max(1, round(video.size[1] * scale))
    frames = zip(times, video.frames(times, size=size), strict=True)
    shown = [replace(thumbnail_of_pixels(frame.transpose(1, 2, 0)), caption=clock(time)) for time, frame in frames]
    return [thumbnail for thumbnail in shown if room.fits(thumbnail.uri)]


def _times(video: Video) -> list[float]:
    duration = video.duration_s
    count = int(min(_FRAMES, max(1, duration * video.fps)))
    even = [(number + 0.5) * duration / count for number in range(count)]
    if duration <= _SOUGHT_S:
        return even
    keys = [video.keyframe_at(time) for time in even]
    return keys if len(set(keys)) == len(keys) else even


def _sound(audio: Audio, room: Room, *, coloured: bool) -> Sound:
    """The waveform, and if `coloured` the spectrogram, of the begin of a sound."""
    seconds = min(audio.duration_s, _HEARD_S)
    rate = min(audio.rate, _HEARD_HZ)
    samples = audio.samples(0.0, seconds, rate=rate, mono=True)[0]
    note = f"0 to {clock(seconds)}"
    if not coloured:
        return Sound(waveform(samples), "", note)
    picture = picture_of(spectrogram_pixels(samples), room)
    return Sound(waveform(samples), picture, f"{note}; 0 to {rate / 2000:g} kHz")
