"""Clips of a video and a sound: which stretches they are, both in step, and the frames that are on display then."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.data.media.clips import Clip, ClipIterator
from savable_pipeline.data.media.container import Audio
from savable_pipeline.data.media.video import Video
from savable_pipeline.errors import MediaError
from savable_pipeline.stages.item_buffer import size_of
from tests.support.draws import scaled_examples, scaled_range
from tests.support.media_files import audio_bytes, frame_number, video_bytes

FPS, FRAMES, RATE = 12, 120, 16_000  # 10 s
MP4 = video_bytes(FRAMES, fps=FPS, gop=24, audio="aac")


def video(data: bytes = MP4) -> Video:
    return Video(io.BytesIO(data), "v.mp4")


def sound(data: bytes = MP4) -> Audio:
    return Audio(io.BytesIO(data), "v.mp4")


def taken(clips: ClipIterator, rng: sp.Rng, first: int = 0) -> list[Clip]:
    """All clips, the random numbers set before each."""
    found = []
    while True:
        rng.rekey((7, 0, first + len(found)))
        clip = next(clips, None)
        if clip is None:
            return found
        found.append(clip)


class Lasting:
    """A video without frames, of which clips are cut all the same."""

    name = "toy"

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s

    def frames(self, times_s: list[float], *, size: Any = None) -> Any:
        assert all(0 <= time <= self.duration_s for time in times_s)
        return np.zeros((len(times_s), 3, 1, 1), np.uint8)

    def restart_at(self, time_s: float) -> None:
        pass

    def keyframe_at(self, time_s: float) -> float:
        return float(math.floor(time_s))


def starts(duration_s: float, length_s: float, **how: Any) -> list[float]:
    rng = sp.Rng(1)
    medium: Any = Lasting(duration_s)
    return [clip.start_s for clip in taken(sp.Clips(length_s=length_s, fps=20, **how).of(medium, rng), rng)]


def test_frames_and_audio_of_a_clip_match_its_times() -> None:
    rng = sp.Rng(3)
    whole = sound().samples()
    for clip in taken(sp.Clips(length_s=1.5, fps=8, count=5, size=(32, 24)).of(video(), rng, audio=sound()), rng):
        assert clip.times_s is not None and clip.frames is not None and clip.audio is not None
        assert clip.times_s.tolist() == [clip.start_s + n / 8 for n in range(12)]
        assert clip.frames.shape == (12, 3, 24, 32)
        assert [frame_number(frame) for frame in clip.frames] == [int(time * FPS + 1e-2) for time in clip.times_s]
        first = round(clip.start_s * RATE)
        np.testing.assert_allclose(clip.audio, whole[:, first : first + 24_000], atol=1e-5)


@scaled_examples(30)
@given(st.floats(2.0, 1e6), st.integers(1, 20))
def test_one_clip_starts_in_each_stratum_of_possible_starts(duration_s: float, count: int) -> None:
    room = duration_s - 2
    for part, start in enumerate(starts(duration_s, 2.0, count=count)):
        assert part * room / count <= start * (1 + 1e-12)
        assert start <= (part + 1) * room / count * (1 + 1e-12)


def test_random_starts_are_spread_over_each_stratum() -> None:
    rng = sp.Rng(0)
    medium: Any = Lasting(12.0)
    clips, found = sp.Clips(length_s=2, fps=2, count=2), []
    for key in range(400):
        rng.rekey((key, 0, 1))
        iterator = clips.of(medium, rng)
        iterator.pass_over(1)
        found.append(next(iterator).start_s)
    assert 5 <= min(found) < 5.1 < 7.3 < np.mean(found) < 7.7 < 9.9 < max(found) < 10


@pytest.mark.parametrize("how", [{"count": 4}, {"stride_s": 1.7}])
def test_a_clip_depends_on_no_clip_before_it(how: dict[str, Any]) -> None:
    rng = sp.Rng(3)
    clips = sp.Clips(length_s=1, fps=6, **how)
    expected = taken(clips.of(video(), rng, audio=sound(), rate=8000), rng)
    for part in range(1, len(expected) + 2):
        later = clips.of(video(), rng, audio=sound(), rate=8000)
        assert later.pass_over(part) == min(part, len(expected))
        for before, after in zip(expected[part:], taken(later, rng, part), strict=True):
            assert before.start_s == after.start_s
            assert np.array_equal(before.frames, after.frames)  # type: ignore[arg-type]
            assert np.array_equal(before.audio, after.audio)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [{}, {"container": "matroska"}, {"container": "mpegts"}, {"options": {"movflags": "frag_keyframe+empty_moov"}}],
)
def test_damage_raises_in_its_clip_also_without_earlier_clips(how: dict[str, Any]) -> None:
    whole, order, met = video_bytes(60, fps=10, gop=4, noise=40, **how), random.Random(7), 0
    clips, rng = sp.Clips(length_s=0.2, fps=10, stride_s=0.7), sp.Rng(0)

    def part_of(iterator: ClipIterator | str) -> bytes | str:
        if isinstance(iterator, str):
            return iterator
        try:
            clip = next(iterator, None)
            return "no more" if clip is None else clip.frames.tobytes()
        except MediaError as error:
            return str(error)

    def behind(data: bytes, parts: int) -> ClipIterator | str:
        try:
            iterator = clips.of(video(data), rng)
        except MediaError as error:  # where the length is in what is damaged
            return str(error)
        iterator.pass_over(parts)
        return iterator

    for _ in scaled_range(6):
        at = order.randrange(len(whole) // 4, len(whole) * 3 // 4)
        data = whole[:at] + order.randbytes(400) + whole[at + 400 :]
        after_others = behind(data, 0)
        for part in range(8):
            alone = behind(data, part)
            found = part_of(alone)
            met += isinstance(found, str)
            assert part_of(after_others) == found
            if isinstance(found, str):
                break  # the rest is skipped
    assert met


def test_skipped_clips_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    monkeypatch.setattr(Lasting, "frames", lambda self, times_s, size: decoded.append(times_s))
    medium: Any = Lasting(10)
    clips = sp.Clips(length_s=2, fps=1, stride_s=2).of(medium, sp.Rng(0))
    assert clips.pass_over(3) == 3
    assert not decoded
    assert [clip.start_s for clip in clips] == [6, 8]
    assert decoded == [[6, 7], [8, 9]]
    assert clips.pass_over(1) == 0


@pytest.mark.parametrize(
    ("duration_s", "length_s", "stride_s", "count"),
    [(10, 2, 2, 5), (9.99, 2, 2, 4), (0.3, 0.1, 0.1, 3), (2, 2, 5, 1), (7, 2, 0.5, 11), (1, 0.7, 0.1, 4)],
)
def test_strided_clips_continue_while_one_fits(duration_s: float, length_s: float, stride_s: float, count: int) -> None:
    assert starts(duration_s, length_s, stride_s=stride_s) == [part * stride_s for part in range(count)]


def test_a_clip_starts_at_the_last_keyframe() -> None:
    assert starts(7, 2, stride_s=1.5, align="keyframe") == [0, 1, 3, 4]
    clip = next(sp.Clips(length_s=1, fps=FPS, stride_s=3, align="keyframe").of(video(), sp.Rng(0)))
    assert frame_number(clip.frames[0]) == 0
    later = sp.Clips(length_s=1, fps=FPS, stride_s=3, align="keyframe").of(video(), sp.Rng(0))
    later.pass_over(1)
    assert frame_number(next(later).frames[0]) == 24  # at 2 s; 3 s are within a group of 24 frames


def test_short_medium_yields_one_clip_padded_with_its_last_frame_and_silence() -> None:
    rng = sp.Rng(0)
    for how in ({"count": 3}, {"stride_s": 1.0}, {}):
        (clip,) = taken(sp.Clips(length_s=12, fps=2, **how).of(video(), rng, audio=sound()), rng)  # type: ignore[arg-type]
        assert clip.start_s == 0
        assert clip.frames is not None and clip.audio is not None and clip.times_s is not None
        assert [frame_number(frame) for frame in clip.frames] == [*range(0, FRAMES, 6), *[FRAMES - 1] * 4]
        assert clip.times_s.max() == 10
        assert clip.audio.shape == (1, 12 * RATE)
        assert clip.audio[:, : 9 * RATE].any() and not clip.audio[:, 10 * RATE + 2048 :].any()


def test_audio_shorter_than_its_video_is_padded_with_zeros() -> None:
    short = Audio(io.BytesIO(audio_bytes(3.0, rate=RATE)), "a.flac")
    clips = list(sp.Clips(length_s=2, fps=1, stride_s=2).of(video(), sp.Rng(0), audio=short))
    kept = [int(np.abs(clip.audio).max(0).nonzero()[0].max(initial=-1)) + 1 for clip in clips]
    assert [clip.audio.shape for clip in clips] == [(1, 32_000)] * 5
    assert kept[0] > 31_990 and 15_990 < kept[1] <= 16_000 and kept[2:] == [0, 0, 0]


@pytest.mark.parametrize(("length_s", "rate"), [(0.1234, 11_025), (1 / 3, 16_000), (0.99999, None), (2, 44_100)])
def test_audio_alone_is_split_into_clips_of_equal_length(length_s: float, rate: int | None) -> None:
    rng = sp.Rng(5)
    found = taken(sp.Clips(length_s=length_s, count=6).of(None, rng, audio=sound(), rate=rate), rng)
    assert len(found) == 6
    for clip in found:
        assert clip.audio is not None and clip.audio.dtype == np.float32
        assert clip.audio.shape == (1, round(length_s * (rate or RATE)))
        assert clip.frames is None and clip.times_s is None


def test_items_are_built_from_clips() -> None:
    clips = sp.Clips(length_s=2, fps=1, stride_s=4)
    assert list(clips.of(video(), sp.Rng(0), make=lambda clip: clip.start_s)) == [0, 4, 8]


def test_one_returns_the_clip_that_count_1_yields() -> None:
    one = sp.Clips(length_s=2, fps=4).one(video(), sp.Rng(9), audio=sound())
    first = next(sp.Clips(length_s=2, fps=4, count=1).of(video(), sp.Rng(9), audio=sound()))
    assert one.start_s == first.start_s > 0
    assert np.array_equal(one.frames, first.frames)  # type: ignore[arg-type]
    for wrong in ({"count": 2}, {"stride_s": 1.0}):
        with pytest.raises(ValueError, match=r"Clips\.one returns one random clip\. Leave out"):
            sp.Clips(length_s=2, fps=4, **wrong).one(video(), sp.Rng(9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length_s": 0}, "length_s must be a number above 0, not 0"),
        ({"length_s": math.nan}, "length_s must be a number above 0, not nan"),
        ({"length_s": math.inf}, "length_s must be"),
        ({"length_s": None}, "length_s must be"),
        ({"fps": -1}, "fps must be a number above 0, not -1"),
        ({"fps": math.nan}, "fps must be"),
        ({"fps": 0.1}, r"2 s at 0\.1 frames a second is less than one frame"),
        ({"stride_s": 0}, "stride_s must be"),
        ({"count": 0}, "pass count= of at least 1, or stride_s, not 0 and None"),
        ({"count": 1.5}, r"pass count= .* not 1\.5 and None"),
        ({"count": 1, "stride_s": 1}, "pass count= .* not 1 and 1"),
        ({"align": "both"}, 'align must be "exact" or "keyframe", not'),
        ({"size": (0, 4)}, r"size must be a width and a height in pixels, not \(0, 4\)"),
        ({"size": 224}, "size must be a width"),
    ],
)
def test_wrong_settings_are_value_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Clips: {message}"):
        sp.Clips(**{"length_s": 2, "fps": 8, **wrong})


def test_medium_without_a_possible_clip_is_an_error() -> None:
    with pytest.raises(ValueError, match="neither video nor audio"):
        sp.Clips(length_s=1).one(None, sp.Rng(0))
    with pytest.raises(ValueError, match="clips of a video need fps="):
        sp.Clips(length_s=1).one(video(), sp.Rng(0))
    with pytest.raises(ValueError, match="at 3 Hz is less than one sample"):
        sp.Clips(length_s=0.1).one(None, sp.Rng(0), audio=sound(), rate=3)
    for duration_s in (0.0, math.nan, math.inf):
        medium: Any = Lasting(duration_s)
        with pytest.raises(MediaError, match=f"toy: no clip fits in its {duration_s} s"):
            sp.Clips(length_s=1, fps=1).one(medium, sp.Rng(0))


def test_settings_are_plain_and_a_clip_has_the_size_of_its_arrays() -> None:
    clips = sp.Clips(length_s=2, fps=8, count=2, size=(64, 48))
    assert clips.settings() == {
        "length_s": 2, "fps": 8, "count": 2, "stride_s": None, "align": "exact", "size": (64, 48),
    }  # fmt: skip
    clip = next(clips.of(video(), sp.Rng(0), audio=sound()))
    assert 0 < size_of(clip) - (16 * 3 * 64 * 48 + 4 * 2 * RATE) < 1000


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times of the frames that were decoded, in ticks."""
    times: list[int] = []
    frames = Video._frames

    def counted(self: Video) -> Any:
        for frame in frames(self):
            times.append(frame.pts)
            yield frame

    monkeypatch.setattr(Video, "_frames", counted)
    return times


def test_a_video_that_is_not_sought_is_decoded_once(decoded: list[int]) -> None:
    source = video(video_bytes(500, fps=25, container="mpeg", codec="mpeg2video", b_frames=0))
    source.frames([0.0, 5.0, 10.0, 15.0])
    assert len(decoded) < 400


@pytest.mark.parametrize("b_frames", [0, 2, 4])
def test_frames_of_a_clip_over_keyframes_are_decoded_once(b_frames: int, decoded: list[int]) -> None:
    source = video(video_bytes(240, fps=24, gop=24, b_frames=b_frames))
    for start in (12, 17, 23, 24, 35):
        decoded.clear()
        clip = source.frames([(start + 3 * n) / 24 for n in range(16)])
        assert [frame_number(frame) for frame in clip] == list(range(start, start + 48, 3))
        assert len(decoded) <= 2 * 24 + 48 + 8  # up to two groups before, where the first of them starts late
        assert len(decoded) - len(set(decoded)) <= 24
