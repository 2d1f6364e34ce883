"""Samples by time against a full decode, for each container; resampling, ranges, damage."""

from __future__ import annotations

import io
import math
import random
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest

from savable_pipeline.data.media.container import Audio, resample
from savable_pipeline.data.media.media_info import media_fault, media_info
from savable_pipeline.data.shards.byte_source import ByteSource, RangeFile
from savable_pipeline.errors import MediaError
from tests.support.draws import scaled_range
from tests.support.media_files import audio_bytes, flac_bytes, tone, video_bytes

KINDS = {
    "flac": ({"container": "flac"}, 16000, 0.0),
    "flac of 44.1 kHz, stereo": ({"container": "flac", "rate": 44100, "channels": 2}, 44100, 0.0),
    "wav": ({"container": "wav", "channels": 2}, 16000, 0.0),
    "opus in ogg": ({"container": "ogg", "rate": 48000}, 48000, 2e-2),
    "opus in WebM": ({"container": "webm", "rate": 48000}, 48000, 2e-2),
    "mp3": ({"container": "mp3"}, 16000, 1e-6),
    "aac in mp4": ({"container": "mp4", "channels": 2}, 16000, 1e-3),
    "flac in Matroska": ({"container": "matroska", "codec": "flac", "rate": 44100}, 44100, 0.0),
}
COARSE = ("opus in WebM", "flac in Matroska")  # whose clocks have milliseconds


def audio(data: bytes, **settings: float) -> Audio:
    return Audio(io.BytesIO(data), "the part", **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_range_equals_that_of_a_full_decode(kind: str) -> None:
    """To the bit where nothing is lost in coding; else a decoder begun before the range comes as near as this."""
    settings, rate, tolerance = KINDS[kind]
    data, order = audio_bytes(6.0, **settings), random.Random(kind)  # type: ignore[arg-type]
    with audio(data) as found:
        assert (found.rate, found.channels) == (rate, settings.get("channels", 1))
        assert found.duration_s == pytest.approx(6.0, abs=0.1)
        whole = found.samples(0.0, 6.0)
        assert whole.shape == (found.channels, 6 * rate) and whole.dtype == np.float32
        assert np.abs(whole - tone(6.0, rate, found.channels)).mean() < 0.05
        for _ in scaled_range(3):
            start = order.randrange(rate // 9, 5 * rate) / rate
            part = found.samples(start, start + 0.5)
            first = round(start * rate)
            assert part.shape == (found.channels, rate // 2)
            shifts = range(-rate // 1000, rate // 1000 + 1) if kind in COARSE else (0,)
            near = [
                np.abs(part[:, 99:-99] - whole[:, first + n : first + n + rate // 2][:, 99:-99]).max() for n in shifts
            ]
            assert min(near) <= tolerance


@pytest.mark.parametrize("kind", [*KINDS, "aac in Matroska"])
def test_range_does_not_depend_on_earlier_reads(kind: str) -> None:
    settings, rate, _ = KINDS.get(kind, ({"container": "matroska", "codec": "aac", "rate": 44100}, 44100, 0))
    data, order = audio_bytes(8.0, **settings), random.Random(kind)  # type: ignore[arg-type]
    with audio(data) as found:
        for _ in scaled_range(4):
            start = order.randrange(7 * rate) / rate
            with audio(data) as alone:
                assert np.array_equal(found.samples(start, start + 0.5), alone.samples(start, start + 0.5))


def decoded(data: bytes, length: int) -> Any:
    """All samples as PyAV itself decodes them, each at its time: float32 (channels, length)."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        origin = stream.start_time or 0
        whole = np.zeros((stream.codec_context.channels, length), np.float32)
        for frame in container.decode(stream):
            block = frame.to_ndarray().reshape(-1, len(whole)).T
            begin = round((frame.pts - origin) * stream.time_base * frame.sample_rate)
            whole[:, begin : begin + block.shape[1]] = block / np.float32(32768)
    return whole


@pytest.mark.parametrize(
    ("rate", "block", "channels"), [(8000, 4096, 1), (16000, 192, 2), (22050, 16384, 1), (44100, 4096, 2)]
)
def test_any_range_of_flac_equals_a_full_decode(rate: int, block: int, channels: int) -> None:
    """Begun a quarter of a second before, where a block of 4,096 samples at 8 kHz takes half of one."""
    order = random.Random(rate + block)
    samples = order.randrange(3 * rate, 5 * rate)
    data = flac_bytes(samples, rate, block=block, channels=channels)
    whole = decoded(data, samples)
    with audio(data) as found:
        for number in scaled_range(10):
            first = order.randrange(samples - samples // 8 if number % 2 else 0, samples - 8)
            stop = order.randrange(first + 4, samples)
            part = found.samples(first / rate, stop / rate)
            assert np.array_equal(part, whole[:, first:stop]), (samples, first, stop)


@pytest.mark.parametrize("gap", [100, 700, 20_000])
def test_a_gap_in_the_times_of_flac_in_mp4_is_silence(gap: int) -> None:
    rate, block, order = 16000, 1152, random.Random(gap)
    data = flac_bytes(40_000, rate, block=block, container="mp4", gap=(12, gap))
    begin, samples = 12 * block, 40_000 + gap
    whole = decoded(data, samples)
    assert not whole[:, begin : begin + gap].any() and whole[:, begin - 5 : begin].any()
    with audio(data) as found:
        assert found.duration_s == samples / rate
        for first in (0, begin - 100, begin, begin + gap, *(order.randrange(samples - 50) for _ in scaled_range(4))):
            part = found.samples(first / rate, min(first + 9000, samples) / rate)
            assert np.array_equal(part, whole[:, first : first + 9000]), first


def test_a_range_beyond_the_end_is_filled_with_zeros() -> None:
    with audio(audio_bytes(1.0)) as found:
        samples = found.samples(0.75, 1.5)
        assert samples.shape == (1, 12000) and samples[:, :4000].any() and not samples[:, 4000:].any()
        assert found.samples(2.0, 2.5).shape == (1, 8000) and found.samples(0.5, 0.5).shape == (1, 0)


@pytest.mark.parametrize("rate", [8000, 22050, 24000, 48000])
def test_resampled_samples_follow_the_tone_wherever_the_range_starts(rate: int) -> None:
    with audio(audio_bytes(4.0, rate=16000)) as found:
        for start in (0.0, 1.0, 2.48):
            samples = found.samples(start, start + 1.0, rate=rate)
            assert samples.shape == (1, rate)
            expected = tone(4.0, rate, 1)[:, round(start * rate) :][:, :rate]
            assert np.abs(samples - expected)[:, 100:].max() < 2e-3


def adpcm_bytes(codec: str, samples: int = 44100) -> bytes:
    """A tone in a WAV of ADPCM, of which FFmpeg reads several blocks as one packet."""
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as made:
        stream: Any = made.add_stream(codec, rate=44100, layout="mono")
        stream.codec_context.open()
        block, formats = stream.codec_context.frame_size, stream.codec_context.codec.audio_formats
        pcm = (tone(samples / 44100, 44100, 1) * 32767).astype(np.int16)
        for begin in range(0, samples, block):
            frame = av.AudioFrame.from_ndarray(pcm[:, begin : begin + block], formats[0].name, "mono")
            frame.sample_rate, frame.pts, frame.time_base = 44100, begin, Fraction(1, 44100)
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("codec", ["adpcm_ms", "adpcm_ima_wav"])
def test_adpcm_equals_pyavs_frames_one_after_the_other(codec: str) -> None:
    data = adpcm_bytes(codec)
    with av.open(io.BytesIO(data)) as made:
        frames = [frame for packet in made.demux(audio=0) for frame in packet.decode()]
    assert any(frame.pts is None for frame in frames)
    expected = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]) / np.float32(32768)
    assert not media_fault(io.BytesIO(data))[0]
    with audio(data) as found:
        assert np.array_equal(found.samples()[0][: len(expected)], expected.astype(np.float32))
        assert np.array_equal(found.samples(0.5, 0.6)[0], expected[22050:26460].astype(np.float32))


def test_mono_is_the_mean_of_the_channels() -> None:
    with audio(audio_bytes(1.0, channels=2)) as found:
        both = found.samples()
        assert np.array_equal(found.samples(mono=True), both.mean(0, keepdims=True)) and both.shape == (2, 16000)


def noise_and_silence(container: str, codec: str, options: dict[str, str]) -> bytes:
    """A second of noise, 8 of silence and one of noise, where silence takes fewer bits."""
    noise, file = np.random.default_rng(7).uniform(-0.5, 0.5, (1, 44100)).astype(np.float32), io.BytesIO()
    sound = np.concatenate([noise, np.zeros((1, 8 * 44100), np.float32), noise], 1)
    with av.open(file, "w", format=container, options=options) as made:
        stream: Any = made.add_stream(codec, rate=44100, layout="mono", options={"flags": "+qscale"})
        stream.codec_context.global_quality = 4 * 118
        for begin in range(0, sound.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound[:, begin : begin + 1024]), "fltp", "mono")
            frame.sample_rate, frame.pts = 44100, begin
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "options", "known"),
    [
        ("adts", "aac", {}, False),
        ("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}, False),
        ("mp3", "libmp3lame", {}, True),
    ],
)
def test_length_is_not_guessed_from_the_initial_bit_rate(
    container: str, codec: str, options: dict[str, str], known: bool
) -> None:
    data = noise_and_silence(container, codec, options)
    said = media_info(io.BytesIO(data), "the part", container).duration_s
    assert (said is not None) == known
    with audio(data) as found:
        assert found.duration_s == (said or pytest.approx(10.0, abs=0.1))
        assert np.abs(found.samples()[:, 9 * 44100 + 4000 :]).mean() > 0.1


def test_truncated_mp3_with_a_length_header_is_an_error() -> None:
    data = noise_and_silence("mp3", "libmp3lame", {})
    with (
        pytest.raises(MediaError, match=r"its audio ends at .* \(it was cut short\)"),
        audio(data[: len(data) // 2]) as found,
    ):
        found.samples()


@pytest.mark.parametrize("layout", ["7.1", "hexadecagonal"])
def test_all_channels_are_resampled_equally(layout: str) -> None:
    channels = {"7.1": 8, "hexadecagonal": 16}[layout]
    pcm = (tone(1.0, 16000, channels) * 32767).astype(np.int16)
    file = io.BytesIO()
    with av.open(file, "w", format="wv") as made:  # whose decoder gives each channel by itself
        stream: Any = made.add_stream("wavpack", rate=16000, layout=layout)
        stream.codec_context.format = "s16p"
        to_planes = av.AudioResampler("s16p", layout, 16000)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm.T).reshape(1, -1), "s16", layout)
        frame.sample_rate = 16000
        for planes in to_planes.resample(frame):
            made.mux(stream.encode(planes))
        made.mux(stream.encode())
    with audio(file.getvalue()) as found:
        assert found.channels == channels
        assert np.allclose(found.samples(), pcm / 32768, atol=1e-4)
        fewer = resample(found.samples()[:1], 16000, 8000, "")
        assert np.array_equal(found.samples(rate=8000)[:1, 100:-100], fewer[:, 100:-100])


def test_a_range_of_a_file_starts_at_zero_and_ends_where_it_ends() -> None:
    data = audio_bytes(4.0)
    with audio(data) as whole, audio(data, begin_s=1.0, end_s=2.5) as found:
        assert found.duration_s == 1.5
        assert np.array_equal(found.samples(), whole.samples(1.0, 2.5))
        assert np.array_equal(found.samples(0.5, 2.0)[:, :16000], whole.samples(1.5, 2.5))
        assert not found.samples(0.5, 2.0)[:, 16000:].any()


@pytest.mark.parametrize("container", ["wav", "mp3", "webm", "adts"])
def test_range_beyond_its_file_is_an_error_not_silence(container: str) -> None:
    data = audio_bytes(2.0, rate=48000, container=container, codec={"adts": "aac"}.get(container, ""))
    for begin_s, end_s in ((3.0, 4.0), (1.0, 2.5), (5.0, None)):
        with pytest.raises(MediaError, match=r"the part: .* end"), audio(data, begin_s=begin_s, end_s=end_s) as found:  # type: ignore[arg-type]
            found.samples()
        if container != "adts":
            with pytest.raises(MediaError, match=r"the part: .* end"):
                media_info(RangeFile(ByteSource.of(data), begin_s, end_s), "the part", container)


def test_audio_of_a_video_uses_its_clock() -> None:
    data = video_bytes(40, fps=10, audio="aac")
    with audio(data) as found:
        samples = found.samples(1.0, 2.0)
        assert np.abs(samples - tone(4.0, 16000, 1)[:, 16000:32000]).mean() < 0.02


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_samples_are_an_error(wrong: float) -> None:
    data = bytearray(audio_bytes(1.0, container="wav", codec="pcm_f32le"))
    with audio(bytes(data)) as found:
        assert np.isfinite(found.samples()).all()
    data[40_000:40_004] = np.float32(wrong).tobytes()
    with (
        pytest.raises(MediaError, match=r"the part: NaN or infinite audio at 0\.\d+ s"),
        audio(bytes(data)) as found,
    ):
        found.samples()


def test_damaged_and_foreign_files_are_data_errors() -> None:
    data = audio_bytes(2.0)
    for wrong in (b"", b"no sound", video_bytes(3)):
        with pytest.raises(MediaError, match="the part: "):
            audio(wrong)
    with pytest.raises(MediaError, match="the part: "), audio(data[:9000] + bytes(8000) + data[17000:]) as found:
        found.samples()
    with pytest.raises(MediaError, match="cut short"), audio(data[: len(data) // 2]) as found:
        found.samples()
    with audio(data) as found:
        for start, stop in ((-1.0, 1.0), (1.0, 0.5)):
            with pytest.raises(ValueError, match="invalid range from"):
                found.samples(start, stop)
        with pytest.raises(ValueError, match="rate must be above 0 Hz"):
            found.samples(rate=0)


@pytest.mark.parametrize("rate", [(1 << 22) + 1, (1 << 31) - 1])
def test_impossible_sample_rate_in_a_header_is_an_error(rate: int) -> None:
    data = bytearray(audio_bytes(0.1, container="wav"))
    data[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(MediaError, match=f"unsupported audio: 1 channels at {rate} Hz"):
        Audio(io.BytesIO(data), "a.wav")


@pytest.mark.parametrize(("container", "codec"), [("ogg", "libopus"), ("ogg", "flac"), ("flac", "flac")])
def test_flipped_bit_never_changes_the_length_silently(container: str, codec: str) -> None:
    data, order = audio_bytes(1.0, container=container, codec=codec), random.Random(codec)
    right = Audio(io.BytesIO(data), "a").samples()
    faults, flips = 0, scaled_range(20)
    for _ in flips:
        damaged, place = bytearray(data), order.randrange(len(data))
        damaged[place] ^= 1 << order.randrange(8)
        try:
            found = Audio(io.BytesIO(damaged), "a").samples()
        except MediaError:
            faults += 1
            assert media_fault(io.BytesIO(damaged))[0], place
        else:
            assert np.array_equal(found, right), place
    assert faults > len(flips) // 2  # the others flip what is no sound, but room for tags


def test_tags_after_the_pages_of_an_ogg_are_not_damage() -> None:
    data = audio_bytes(0.5, container="ogg")
    assert np.array_equal(
        Audio(io.BytesIO(data + b"TAG" + bytes(125)), "a").samples(), Audio(io.BytesIO(data), "a").samples()
    )


def windows_media() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="asf") as container:
        stream: Any = container.add_stream("wmav2", rate=44100, layout="stereo", bit_rate=128000)
        for begin in range(0, 44100, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
            frame.rate, frame.pts = 44100, begin
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: b"NIST_1A\n   1024\nchannel_count -i 1\nend_head\n".ljust(1024) + bytes(4000), "NIST SPHERE"),
        (lambda: b"DSD " + (28).to_bytes(8, "little") + bytes(5000), "DSF"),
        (windows_media, "Windows Media audio"),
    ],
)
def test_unsupported_format_is_reported_as_such(make: Any, kind: str) -> None:
    with pytest.raises(MediaError, match=f"the part: {kind} is not supported. Convert it") as error:
        audio(make())
    assert "damaged" not in str(error.value)
