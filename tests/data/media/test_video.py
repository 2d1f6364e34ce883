"""Frames by time and index against a full decode, for each container; damage, ranges, rotation, hostile files."""

from __future__ import annotations

import io
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from savable_pipeline.data.media import container
from savable_pipeline.data.media.media_info import media_fault, media_info
from savable_pipeline.data.media.video import Video
from savable_pipeline.errors import MediaError
from tests.support.draws import scaled_range
from tests.support.media_files import audio_bytes, frame_number, numbered_frame, video_bytes

KINDS = {
    "mp4, frames that refer to later ones": {},
    "mp4, its header at the front": {"options": {"movflags": "faststart"}},
    "mp4 in fragments": {"options": {"movflags": "frag_keyframe+empty_moov"}},
    "mp4 with sound": {"audio": "aac"},
    "one keyframe": {"gop": 1000},
    "HEVC": {"codec": "libx265"},
    "Matroska": {"container": "matroska"},
    "WebM": {"container": "webm", "codec": "libvpx-vp9", "b_frames": 0, "audio": "libopus"},
    "AVI": {"container": "avi", "codec": "mpeg4"},
    "transport stream": {"container": "mpegts"},
    "program stream": {"container": "mpeg", "codec": "mpeg2video", "fps": 25},
    "29.97 frames a second": {"fps": Fraction(30000, 1001)},
    "frames that last differently": {"times": [n * 80 + n % 3 * 25 + (500 if n > 30 else 0) for n in range(40)]},
}


def video(data: bytes, **settings: float) -> Video:
    return Video(io.BytesIO(data), "the part", **settings)


def times_of(data: bytes) -> list[float]:
    """When each frame begins, by decoding all; in AVI, 12 a second."""
    with av.open(io.BytesIO(data)) as made:
        if made.format.name == "avi":
            return [n / 12 for n in range(40)]
        begin = (made.start_time or 0) / 1e6
        return [float(frame.pts * frame.time_base) - begin for frame in made.decode(video=0)]


def numbers(frames: np.ndarray) -> list[int]:
    return [frame_number(frame) for frame in frames]


@pytest.mark.parametrize("kind", KINDS)
def test_frame_by_time_or_index_equals_a_full_decode(kind: str) -> None:
    data = video_bytes(40, **KINDS[kind])  # type: ignore[arg-type]
    with av.open(io.BytesIO(data)) as made:
        full = [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in made.decode(video=0)]
    begins, random_order = times_of(data), random.Random(kind)
    assert numbers(np.array(full)) == list(range(40))
    with video(data) as found:
        assert found.size == (64, 48) and found.fps > 0 and found.codec and found.frame_count in (None, 40)
        assert found.duration_s == pytest.approx(begins[-1] + 1 / 12, abs=0.12)
        for _ in scaled_range(5):
            chosen = [random_order.randrange(40) for _ in range(random_order.choice([1, 1, 3]))]
            if random_order.random() < 0.5:
                frames = found.frames_by_index(chosen)
            else:
                ends = [*begins[1:], begins[-1] + 0.05]
                frames = found.frames([begins[n] + (ends[n] - begins[n]) * random_order.random() * 0.9 for n in chosen])
            assert numbers(frames) == chosen
            assert all((frame == full[n]).all() for frame, n in zip(frames, chosen, strict=True))


def test_a_range_of_a_file_starts_at_zero() -> None:
    data = video_bytes(40, fps=10)
    with video(data, begin_s=1.5, end_s=2.5) as found:
        assert found.duration_s == 1.0
        assert numbers(found.frames([0.0, 0.05, 0.1, 0.95])) == [15, 15, 16, 24]
        assert numbers(found.frames([1.0])) == [24]  # not the first frame of what follows
        assert numbers(found.frames_by_index(range(10))) == list(range(15, 25))
        with pytest.raises(IndexError, match="there are 10"):
            found.frames_by_index([10])
        with pytest.raises(ValueError, match=r"no frame at 1\.2 s"):
            found.frames([1.2])


def test_range_beyond_its_video_is_an_error_not_a_repeated_frame() -> None:
    data = video_bytes(40, fps=10)
    with video(data, begin_s=3.0, end_s=4.1) as found:  # as much as rounded times may be late
        assert numbers(found.frames([0.0, 1.05])) == [30, 39]
    for begin_s, end_s in ((3.0, 5.0), (7.0, 8.0), (7.0, None)):
        with pytest.raises(MediaError, match=r"a range from .*, but the file ends at 4\.000 s"):
            video(data, begin_s=begin_s, end_s=end_s)  # type: ignore[arg-type]


def test_frames_are_resized_and_times_may_repeat() -> None:
    with video(video_bytes(12)) as found:
        frames = found.frames([0.5, 0.0, 0.5], size=(100, 80))
        assert frames.shape == (3, 3, 80, 100) and frames.dtype == np.uint8
        assert numbers(frames) == [6, 0, 6] and (frames[0] == frames[2]).all()
        for size in ((0, 10), (10, -1)):
            with pytest.raises(ValueError, match="at least 1 × 1"):
                found.frames([0.0], size=size)


def test_the_keyframe_at_a_time_is_the_last_one_before_it() -> None:
    with video(video_bytes(40, fps=10, gop=8, options={"movflags": "faststart"})) as found:
        keyframes = {found.keyframe_at(n / 10) for n in range(40)}
        assert keyframes == {0.0, 0.8, 1.6, 2.4, 3.2}
        assert numbers(found.frames([found.keyframe_at(2.3)])) == [16]


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_rotated_video_is_turned_upright(degrees: int) -> None:
    """As players turn it: by what the display matrix says, which counts against the clock."""
    with video(video_bytes(3, rotation=degrees)) as found:
        assert found.size == ((48, 64) if degrees % 180 else (64, 48))
        upright = numbered_frame(1, (64, 48)).transpose(2, 0, 1)
        turned = found.frames([1 / 12])[0]
        assert np.abs(np.rot90(upright, degrees // 90, (1, 2)).astype(int) - turned).mean() < 20
        assert found.frames([0], size=(30, 50)).shape == (1, 3, 50, 30)


def test_damaged_and_foreign_files_are_data_errors() -> None:
    data = video_bytes(40, noise=60)
    for wrong in (b"", b"no video at all" * 100, data[: len(data) // 2], audio_bytes(0.1)):
        with pytest.raises(MediaError, match="the part: "):
            video(wrong)
    for damaged in (data[:1000] + b"\xa5" * 9000 + data[10000:],):
        with pytest.raises(MediaError, match="the part: "), video(damaged) as found:
            found.frames_by_index(range(40))


def test_truncated_video_is_an_error_at_its_missing_frames() -> None:
    data = video_bytes(120, noise=60, options={"movflags": "faststart"})
    with video(data[: len(data) // 2]) as found:
        assert found.duration_s == 10.0 and numbers(found.frames([0.5])) == [6]
        with pytest.raises(MediaError, match="the part: "):
            found.frames([9.0])


@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:5,\n{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {}\n"])
def test_playlist_opens_no_other_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.mp4").write_bytes(video_bytes(3))
    for path in (tmp_path / "other.mp4", "other.mp4"):
        with pytest.raises(MediaError, match="cannot be opened"):
            video(text.format(path).encode())


def test_read_error_of_the_file_is_raised_unchanged() -> None:
    class Broken(io.BytesIO):
        fails = False

        def read(self, size: int | None = -1) -> bytes:
            if self.fails:
                raise OSError(5, "Input/output error")
            return super().read(size)

    file = Broken(video_bytes(50, noise=60, size=(160, 120), options={"movflags": "faststart"}))
    with Video(file, "the part") as found:
        file.fails = True
        with pytest.raises(OSError, match="Input/output") as raised:
            found.frames([4.0])
        assert raised.value.errno == 5 and not isinstance(raised.value, MediaError)


def test_unknown_codec_is_an_error_and_has_no_size() -> None:
    data = video_bytes(6, container="matroska").replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/XYZ")
    with pytest.raises(MediaError, match="no video that can be decoded"):
        video(data)
    info = media_info(io.BytesIO(data), "the part", "mkv")
    assert (info.width, info.height) == (None, None) and info.duration_s == 0.5


def test_decreasing_frame_times_are_an_error() -> None:
    data = b"".join(video_bytes(12, container="mpegts", b_frames=0) for _ in range(2))
    with (
        video(data) as found,
        pytest.raises(MediaError, match=r"the part: frame times go back from 0\.917 to"),
    ):
        found.frames([1.0])
    assert media_fault(io.BytesIO(data))[0].startswith("times that go back")


def test_frames_of_changing_size_are_an_error_unless_resized() -> None:
    parts = ((64, 48), range(0, 960, 80)), ((32, 24), range(960, 1920, 80))
    data = b"".join(
        video_bytes(12, container="mpegts", size=size, b_frames=0, times=list(times)) for size, times in parts
    )
    with (
        video(data) as found,
        pytest.raises(MediaError, match=r"32 × 24 pixels in a video of 64 × 48 pixels\. Pass size="),
    ):
        for number in range(13):
            found.frames([number / 12])
    with video(data) as found:
        assert found.frames([0.0, 1.0], size=(32, 24)).shape == (2, 3, 24, 32)


def test_frames_by_index_do_not_depend_on_asking_for_the_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A header may say less than there is."""
    monkeypatch.setattr(container, "header_duration", lambda *_: (Fraction(1), False))
    data = video_bytes(40)
    with video(data) as asked, video(data) as unasked:
        assert asked.duration_s == 1.0
        assert numbers(asked.frames_by_index([39])) == numbers(unasked.frames_by_index([39])) == [39]


def test_damaged_frame_raises_each_time() -> None:
    data = video_bytes(120, noise=60, gop=1000, options={"movflags": "faststart"})
    at = len(data) // 2
    with video(data[:at] + bytes(3000) + data[at + 3000 :]) as found:
        with pytest.raises(MediaError):
            for number in range(100):
                found.frames([number / 12])
        with pytest.raises(MediaError):
            found.frames([number / 12])


@pytest.mark.parametrize("size", [(322, 180), (72, 50), (18, 16)])
def test_all_columns_of_a_frame_are_written_whatever_its_width(size: tuple[int, int]) -> None:
    data = video_bytes(3, size=size, noise=40)
    with av.open(io.BytesIO(data)) as made:
        full = [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in made.decode(video=0)]
    with video(data) as found:
        assert np.array_equal(found.frames_by_index(range(3)), full)


@pytest.mark.parametrize("pixels", ["yuv420p10le", "yuv422p10le", "yuv420p12le", "yuv444p10le"])
@pytest.mark.parametrize("width", [48, 50])
def test_pixels_of_more_than_8_bits_equal_pyavs(pixels: str, width: int) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as made:
        stream: Any = made.add_stream("ffv1", rate=5)
        stream.width, stream.height, stream.pix_fmt = width, 32, pixels
        noise = np.random.default_rng(7).integers(0, 256, (32, width, 3), np.uint8)
        made.mux(stream.encode(av.VideoFrame.from_ndarray(noise, "rgb24").reformat(format=pixels)))
        made.mux(stream.encode())
    with av.open(io.BytesIO(file.getvalue())) as made:
        expected = next(made.decode(video=0)).to_ndarray(format="rgb24").transpose(2, 0, 1)
    with Video(io.BytesIO(file.getvalue()), "a.mkv") as video:
        assert np.array_equal(video.frames_by_index([0])[0], expected)
