"""A clip of a long video reads a little of its file, wherever that is, and gives the frames of the whole."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.stores.shard_files import ShardFiles
from tests.support.media_files import frame_number, video_bytes
from tests.support.shards import write_tar
from tests.support.toy_server import ToyServer, serving

FPS, FRAMES, TIMES = 10, 40, 60  # of a scene, and how often it comes in the video
CLIP = [step / 4 for step in range(8)]


def long_video() -> bytes:
    """One noisy scene again and again: as long as a film, and soon encoded."""
    scene = video_bytes(FRAMES, fps=FPS, size=(160, 120), noise=70, gop=10, b_frames=0)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made, av.open(io.BytesIO(scene)) as found:
        stream: Any = made.add_stream_from_template(found.streams.video[0])
        packets = [(bytes(packet), packet.is_keyframe) for packet in found.demux(video=0) if packet.size]
        for number in range(FRAMES * TIMES):
            raw, is_keyframe = packets[number % FRAMES]
            packet = av.Packet(raw)
            packet.stream, packet.time_base = stream, Fraction(1, FPS)
            packet.pts = packet.dts = number
            packet.is_keyframe = is_keyframe
            made.mux(packet)
    return file.getvalue()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, raw = tmp_path_factory.mktemp("film"), long_video()
    assert len(raw) > 9 << 20  # more than is downloaded as a whole
    (folder / "film.mp4").write_bytes(raw)
    write_tar(folder / "data/a.tar", [("k.json", b"{}"), ("k.mp4", raw)])
    open_any(folder / "data")  # makes the index
    return folder


@pytest.fixture
def server(film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_RETRY_S", "20")  # a busy machine is no fault
    with serving(film) as server:
        yield server


@pytest.fixture(scope="module")
def decoded(film: Path) -> list[Any]:
    """Every frame of a scene, by PyAV alone: uint8 (3, height, width) each."""
    with av.open(str(film / "film.mp4")) as container:
        frames = itertools.islice(container.decode(video=0), FRAMES)
        return [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in frames]


def sample_of(place: object) -> Sample:
    return open_any(str(place)).open_samples(np.array([(0, 0)], REF))[0]


def check_clip(sample: Sample, begin: float, decoded: list[Any]) -> None:
    with sample.video("mp4") as video:
        frames = video.frames([begin + step for step in CLIP])
    numbers = [int((begin + step) * FPS + 1e-6) for step in CLIP]
    assert [frame_number(frame) for frame in frames] == [number % FRAMES for number in numbers]
    assert all(np.array_equal(frame, decoded[number % FRAMES]) for frame, number in zip(frames, numbers, strict=True))


@pytest.mark.parametrize("begin", [0.0, 101.3, 237.0])
def test_clip_reads_little_of_a_local_shard(
    film: Path, decoded: list[Any], begin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, read = list[int](), ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda *given: (sizes.append(given[-1]), read(*given))[1])
    check_clip(sample_of(film / "data"), begin, decoded)
    assert 0 < sum(sizes) < (film / "film.mp4").stat().st_size / 20


@pytest.mark.parametrize("begin", [0.0, 237.0])
def test_clip_downloads_little_of_a_remote_shard(
    server: ToyServer, film: Path, decoded: list[Any], begin: float
) -> None:
    check_clip(sample_of(f"{server.url}/data"), begin, decoded)
    longest = max(stop - start for path, start, stop in server.ranges if path.endswith(".tar"))
    assert longest <= 1 << 20
    assert 0 < server.sent() < (film / "film.mp4").stat().st_size / 6  # three blocks or four, of 256 KiB


def open_descriptors() -> int:
    """Without connections: the server is in this process."""
    gc.collect()
    found = list[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(link.readlink()))
    return sum("socket" not in name for name in found)


@pytest.mark.parametrize("where", ["disk", "url"])
def test_unclosed_clips_leak_no_descriptor(server: ToyServer, film: Path, where: str, decoded: list[Any]) -> None:
    sample = sample_of(film / "data" if where == "disk" else f"{server.url}/data")
    seen = set()
    for number in range(4):
        sample.video("mp4").frames([number * 17.0])
        seen.add(open_descriptors())
    assert len(seen) == 1


def test_shard_truncated_while_a_video_is_open_is_a_shard_error(film: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes((film / "data/a.tar").read_bytes())
    with sample_of(tmp_path).video("mp4") as video:
        video.frames([1.0])
        os.truncate(tmp_path / "a.tar", 1 << 20)
        with pytest.raises(sp.ShardError, match="was cut short") as caught:
            video.frames([200.0])
        assert caught.value.reason == "changed shard"
