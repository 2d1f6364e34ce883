"""Audio and video on a page: players of what fits, clips of the rest, pictures of both, faults of what is broken."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.media.container import Audio
from savable_pipeline.data.media.video import Video
from savable_pipeline.tools.preview import page as pages
from savable_pipeline.tools.preview import preview_dataset, preview_pipeline
from savable_pipeline.tools.preview.media_entries import format_time
from tests.conftest import write_tar
from tests.support.media_files import audio_bytes, frame_number, video_bytes
from tests.support.toy_lerobot import FPS, LENGTHS, write_lerobot
from tests.tools.preview.test_preview import EVIL, Page


def page_of(folder: Path, *members: tuple[str, bytes]) -> Page:
    write_tar(folder / "0.tar", list(members))
    page = Page(preview_dataset(folder))
    page.check_harmless()
    return page


def players_on(page: Page) -> list[tuple[str, bytes]]:
    """Return the types and bytes of the players of a page, in order."""
    sources = [attributes["src"] or "" for tag, attributes in page.elements if tag in ("audio", "video")]
    return [(source[5 : source.index(";")], base64.b64decode(source.partition(",")[2])) for source in sources]


def test_short_media_are_playable_with_frames_waveforms_and_facts(tmp_path: Path) -> None:
    film = video_bytes(36, fps=12, size=(64, 48), audio="aac")
    upright = video_bytes(12, fps=12, size=(64, 32), codec="libvpx", container="webm")
    sound, voice = audio_bytes(1.5, channels=2), audio_bytes(1.0, rate=48000, container="webm")
    page = page_of(tmp_path, ("a.mp4", film), ("b.WEBM", upright), ("c.flac", sound), ("d.webm", voice))
    types = ["video/mp4", "video/webm", "audio/flac", "audio/webm"]
    assert players_on(page) == [*zip(types, (film, upright, sound, voice), strict=True)]
    frames = [np.asarray(image.convert("RGB")).transpose(2, 0, 1) for image in page.images]
    assert [frame_number(frame) for frame in frames[:9]] == [2, 6, 10, 14, 18, 22, 26, 30, 34]
    assert [f"{number / 6 + 1 / 6:.3g} s" in page.text for number in range(0, 18, 2)] == [True] * 9, "their times"
    assert [frame.shape for frame in frames[9:18]] == [(3, 32, 64)] * 9
    assert len(frames) == 20 and sum(tag == "svg" for tag, _ in page.elements) == 3, "a film with sound has a waveform"
    assert (
        "3 s, 64 × 48, 12 fps, h264 · 3 s, 16,000 Hz, 1 channel, aac · " in page.text
        and "1.5 s, 16,000 Hz, 2 channels, flac · " in page.text
    )
    policy = next(attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes)
    assert policy == "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


def test_large_or_unplayable_media_are_cut_to_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "EXCERPT_BYTES", 100_000)
    film = video_bytes(60, fps=15, size=(128, 96), noise=50, audio="aac")
    old = video_bytes(30, fps=15, codec="mpeg4", container="avi")
    sound = audio_bytes(15, container="wav")
    assert min(len(film), len(sound)) > 100_000
    page = page_of(tmp_path, ("a.mp4", film), ("b.avi", old), ("c.wav", sound))
    found = players_on(page)
    assert [kind for kind, _ in found] == ["video/mp4", "video/mp4", "audio/mp4"]
    assert all(0 < len(data) <= 100_000 for _, data in found)
    assert [seconds in page.text for seconds in ("first 2 s", "first 2 s", "first 10 s")] == [True] * 3
    shown, heard = Video(io.BytesIO(found[0][1]), "clip"), Audio(io.BytesIO(found[0][1]), "clip")
    assert [frame_number(frame) for frame in shown.frames([0.02, 1.02, 1.9])] == [0, 15, 28]
    assert shown.duration_s == heard.duration_s == 2.0
    own, cut = Audio(io.BytesIO(sound), "own").samples(7, 8), Audio(io.BytesIO(found[2][1]), "clip").samples(7, 8)
    assert np.abs(own - cut).max() < 0.1


def test_page_limits_the_bytes_of_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = video_bytes(24, fps=12, size=(160, 120), noise=200)
    for most in (1_000_000, 60_000):
        monkeypatch.setattr("savable_pipeline.tools.preview.dataset_page.PAGE_BYTES", most)
        raw = preview_dataset(write(tmp_path / str(most), [(f"k{i}.mp4", film) for i in range(4)]))
        uris = re.findall(rb'src="(data:[^"]*)"', raw)
        assert sum(map(len, uris)) <= most and len(raw) < most + 60_000
        assert (b"no room for an excerpt" in raw) == (most == 60_000)


def write(folder: Path, members: list[tuple[str, bytes]]) -> Path:
    write_tar(folder / "0.tar", members)
    return folder


def test_without_pyav_browser_formats_are_playable_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film, sound, old = video_bytes(12), audio_bytes(1.0), video_bytes(12, container="matroska")
    monkeypatch.setitem(sys.modules, "av", None)
    page = page_of(tmp_path, ("a.mp4", film), ("b.flac", sound), ("c.mkv", old), ("d.txt", b"a text"))
    assert players_on(page) == [("video/mp4", film), ("audio/flac", sound)]
    assert page.text.count("pip install av") == 3 and "a text" in page.text
    assert not page.images and "beginning with" not in page.text


def test_a_range_of_a_longer_file_is_played_alone(tmp_path: Path) -> None:
    page = Page(preview_dataset(write_lerobot(tmp_path / "robot")))
    page.check_harmless()
    data = sp.open_dataset(tmp_path / "robot")
    found = [Video(io.BytesIO(clip), "clip") for _, clip in players_on(page)]
    assert [round(video.duration_s * FPS) for video in found] == list(LENGTHS)
    shown = [frame_number(frame) for video in found for frame in video.frames([0.0, 0.5])]
    assert shown == [int(sample.array("observation.state")[at][0]) for sample in data for at in (0, FPS // 2)]
    assert page.text.count('{"path":"videos/') == 4


def test_range_part_named_like_an_audio_file_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "long.wav").write_bytes(audio_bytes(4.0, container="wav"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"file": "long.wav", "from": 1.5, "to": 2.5}) + "\n")

    def pipeline(lane: sp.Lane) -> custom.Stage:
        ranges = {"said.wav": ("file", "from", "to")}
        return sp.Batcher(custom.JsonlReader(tmp_path, lane, ranges=ranges, epochs=1), size=1)

    ((kind, clip),) = players_on(Page(preview_pipeline(pipeline, "p").html))
    assert kind == "audio/mp4"
    heard, said = Audio(io.BytesIO(clip), "clip"), Audio(io.BytesIO((tmp_path / "long.wav").read_bytes()), "long")
    assert np.abs(heard.samples(0.2, 0.8) - said.samples(1.7, 2.3)).max() < 0.1


def test_damaged_and_hostile_media_are_errors_without_their_bytes(tmp_path: Path) -> None:
    film = video_bytes(100, fps=25, size=(160, 120), noise=100, options={"movflags": "faststart"})
    page = page_of(
        tmp_path,
        ("a.mp4", film[: len(film) // 2]),
        ("b.webm", f"<html>{EVIL}</html>".encode()),
        ("c.flac", b""),
        ("d.ogg", b"#EXTM3U\nfile:///etc/passwd\n"),
        (f"e.{EVIL.replace('.', '').replace('/', '')}.wav", audio_bytes(0.5, container="wav")),
        ("f.wav", audio_bytes(0.5, container="wav")),
    )
    assert [kind for kind, _ in players_on(page)] == ["audio/wav", "audio/wav"] and len(page.images) == 2
    faults = [attributes for tag, attributes in page.elements if tag == "p" and attributes.get("class") == "fault"]
    assert len(faults) == 4 and "4 s, 160 × 120, 25 fps, h264" in page.text, "what the header says is shown"
    assert page.text.count("of an unsupported format") >= 3


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.04 s"), (59.94, "59.9 s"), (123, "2:03"), (3723.4, "1:02:03")]
)
def test_times_are_formatted_like_in_players(seconds: float, words: str) -> None:
    assert format_time(seconds) == words
