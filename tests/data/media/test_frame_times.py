"""Which frame is on display at a time: clocks that round, AVI without times, variable rates, edit lists, late starts.

A frame of a numbered video is what `ffmpeg -i FILE -ss TIME -frames:v 1 frame.png` shows, for each time k / rate,
except in AVI with frames that refer to later ones, whose times FFmpeg guesses.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest

from savable_pipeline.data.media.media_info import media_fault, media_info
from savable_pipeline.data.media.video import Video
from savable_pipeline.errors import MediaError
from tests.support.media_files import cut_without_decoding, frame_number, video_bytes

FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
UNEVEN = [n * 80 + n % 3 * 25 + (500 if n > 30 else 0) for n in range(40)]  # in 1/1000 s
VP9 = {"codec": "libvpx-vp9", "b_frames": 0}


def numbers_at(data: bytes, times_s: list[float]) -> list[int]:
    with Video(io.BytesIO(data), "the part") as video:
        return [frame_number(frame) for frame in video.frames(times_s)]


def shown_times(data: bytes) -> tuple[list[Fraction], Fraction]:
    """When each frame is shown, in seconds from the begin, by a full decode with PyAV; and a tick of the clock."""
    with av.open(io.BytesIO(data)) as made:
        times = [frame.pts * Fraction(made.streams.video[0].time_base) for frame in made.decode(video=0)]
        return [time - times[0] for time in times], Fraction(made.streams.video[0].time_base)


@pytest.mark.parametrize(
    ("rate", "film"),
    [
        (30, {"container": "avi", "b_frames": 0}),
        (30, {"container": "avi"}),
        (NTSC, {"container": "avi", "codec": "mpeg4", "b_frames": 0}),
        (30, {"container": "avi", "codec": "mpeg4"}),
        (FILM, {"container": "matroska"}),
        (NTSC, {"container": "webm", **VP9}),
        (Fraction(60000, 1001), {"container": "webm", **VP9}),
        (NTSC, {"container": "flv"}),
        (NTSC, {"container": "mpegts"}),
        (NTSC, {}),
    ],
)
def test_frame_k_of_a_video_is_shown_at_k_divided_by_its_rate(rate: Fraction | int, film: dict[str, Any]) -> None:
    data = video_bytes(200, fps=rate, **film)
    assert numbers_at(data, [float(k / rate) for k in range(200)]) == list(range(200))
    assert numbers_at(data, np.float32([k / rate for k in range(200)]).tolist()) == list(range(200))
    for k in (137, 12, 60):
        assert numbers_at(data, [float(k / rate)]) == [k]
    assert numbers_at(data, [float((k + Fraction(3, 5)) / rate) for k in range(200)]) == list(range(200))
    assert media_fault(io.BytesIO(data))[0] == ""


CLOCKS: dict[str, Callable[[], bytes]] = {
    "uneven": lambda: video_bytes(40, times=UNEVEN),
    "uneven, from 0.7 s on": lambda: video_bytes(40, times=[700 + time for time in UNEVEN], container="matroska"),
    "from 0.7 s on, no edit list": lambda: video_bytes(
        40, times=[700 + time for time in UNEVEN], options={"use_editlist": "0"}
    ),
    "transport stream": lambda: video_bytes(40, times=UNEVEN, container="mpegts"),
    # ffmpeg -ss 1.3 -i FILE -c copy OUT.mp4
    "edit list": lambda: cut_without_decoding(video_bytes(40, fps=10), 1.3),
    "uneven, edit list": lambda: cut_without_decoding(video_bytes(40, times=UNEVEN), 1.33),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_frame_is_shown_from_half_a_tick_before_its_time(clock: str) -> None:
    data = CLOCKS[clock]()
    times, tick = shown_times(data)
    with av.open(io.BytesIO(data)) as made:
        numbers = [frame_number(frame.to_ndarray(format="rgb24").transpose(2, 0, 1)) for frame in made.decode(video=0)]
    assert numbers == list(range(numbers[0], 40))
    assert numbers_at(data, [float(time) for time in times]) == numbers
    assert numbers_at(data, [max(0.0, float(time - tick * Fraction("0.45"))) for time in times]) == numbers
    before = [float(time - tick * Fraction("0.55")) for time in times[1:]]
    assert numbers_at(data, before) == numbers[:-1]
    assert [numbers_at(data, [time])[0] for time in before[::7]] == numbers[:-1:7]


UNKNOWN = ("fragments", "transport stream", "uneven, from 0.7 s on")


def with_edit_of(data: bytes, seconds: float) -> bytes:
    """Return an MP4 of one edit, whose edit list ends after some seconds; the clock of the file has ticks of 1 ms."""
    edit = data.index(b"elst") + 12
    return data[:edit] + round(seconds * 1000).to_bytes(4, "big") + data[edit + 4 :]


COUNTED: dict[str, Callable[[], bytes]] = CLOCKS | {
    "edit list that hides first frames": lambda: cut_without_decoding(video_bytes(40, fps=10, b_frames=2), 1.3),
    "edit list that hides last frames": lambda: with_edit_of(video_bytes(40, fps=10), 1.5),
    "AVI with empty chunks": lambda: video_bytes(30, container="avi", b_frames=0, times=[n * 100 for n in range(30)]),
    "fragments": lambda: video_bytes(40, options={"movflags": "frag_keyframe+empty_moov"}),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_number_of_frames_is_that_of_decoding_or_unknown(kind: str) -> None:
    data = COUNTED[kind]()
    with av.open(io.BytesIO(data)) as made:
        decoded = sum(1 for _ in made.decode(video=0))
    with Video(io.BytesIO(data), "the part") as video:
        assert video.frame_count == (None if kind in UNKNOWN else decoded)
        assert media_info(io.BytesIO(data), "the part", "mp4").frames == video.frame_count


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_empty_chunks_of_avi_are_counted(codec: str) -> None:
    times = [n * 100 + (500 if n > 10 else 0) + (300 if n > 20 else 0) for n in range(30)]
    data = video_bytes(30, codec=codec, container="avi", b_frames=0, times=times)
    assert data.count(b"00dc\0\0\0\0") > 700  # 8 of 10 in a second of 1,000 chunks
    with av.open(io.BytesIO(data)) as made:  # the number of the chunk: no clock
        chunks = [packet.dts for packet in made.demux(made.streams.video[0]) if packet.size]
    assert chunks[:2] == [0, 100] and len(chunks) == 30
    assert numbers_at(data, [chunk / 1000 for chunk in chunks]) == list(range(30))
    assert numbers_at(data, [chunk / 1000 - 0.002 for chunk in chunks[1:]]) == list(range(29))
    with Video(io.BytesIO(data), "the part") as video:
        assert [frame_number(frame) for frame in video.frames_by_index([29, 11, 0])] == [29, 11, 0]


@pytest.mark.parametrize(
    "film",
    [{"container": "avi"}, {"container": "avi", "b_frames": 0}, {"options": {"video_track_timescale": "10"}}],
    ids=["AVI, frames that refer to later ones", "AVI", "MP4 with a tick for each frame"],
)
def test_a_clock_that_counts_frames_shows_each_until_the_next(film: dict[str, Any]) -> None:
    data = video_bytes(40, fps=10, **film)
    assert numbers_at(data, [1.2, 1.26, 1.29, 1.3]) == [12, 12, 12, 13]
    with Video(io.BytesIO(data), "the part", begin_s=1.5, end_s=2.5) as video:
        assert [frame_number(frame) for frame in video.frames_by_index(range(10))] == list(range(15, 25))
        with pytest.raises(IndexError, match="there are 10"):
            video.frames_by_index([10])


def test_raw_video_is_rejected_because_it_has_no_times() -> None:
    data = video_bytes(20, fps=10, container="h264")
    with (
        Video(io.BytesIO(data), "the part") as video,
        pytest.raises(MediaError, match=r"the part: its video \(raw h264\) has no times"),
    ):
        video.frames([0.1])
