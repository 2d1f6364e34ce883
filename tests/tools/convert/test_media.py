"""Folders of sounds and films with what lies beside them: all of it becomes parts, byte for byte, and opens again."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.check.file_check import CheckSettings, check_file
from savable_pipeline.tools.convert import Options, part_data, run_conversion
from tests.support.media_files import audio_bytes, frame_number, video_bytes
from tests.support.toy_files import tar_files

SRT = "1\n00:00:00,000 --> 00:00:01,000\nGrüß Gott\n"
VTT = "WEBVTT\n\n00:00.000 --> 00:01.000\nhello\n"
MAKES: dict[str, Callable[[], bytes]] = {
    "mp4": lambda: video_bytes(12, audio="aac"),
    "MKV": lambda: video_bytes(12, container="matroska"),
    "webm": lambda: video_bytes(12, codec="libvpx", container="webm", b_frames=0),
    "wav": lambda: audio_bytes(0.5, container="wav"),
    "flac": lambda: audio_bytes(0.5),
    "ogg": lambda: audio_bytes(0.5, container="ogg", rate=48000),
    "opus": lambda: audio_bytes(0.5, container="ogg", rate=48000),
    "mp3": lambda: audio_bytes(0.5, container="mp3"),
    "m4a": lambda: audio_bytes(0.5, container="mp4"),
}


def samples_of(folder: Path) -> dict[str, Sample]:
    dataset = open_any(folder)
    found = dataset.open_samples(np.array([(number, 0) for number in range(dataset.count)], REF))
    return {sample.key: sample for sample in found}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def test_media_and_sidecar_files_become_parts_byte_for_byte(tmp_path: Path) -> None:
    files = {f"talks/{ending}.{ending}": make() for ending, make in MAKES.items()}
    files |= {f"talks/{ending}.srt": SRT.encode() for ending in MAKES}
    files |= {f"talks/{ending}.en.vtt": VTT.encode() for ending in MAKES}
    files |= {f"talks/{ending}.json": b'{"speaker": 3}' for ending in MAKES}
    report = run_conversion(write(tmp_path / "in", files), tmp_path / "out", Options())
    assert (report.rejected, report.samples) == ([], len(MAKES))
    assert tar_files(tmp_path / "out") == files
    for key, sample in samples_of(tmp_path / "out").items():
        ending = key.rpartition("/")[2]
        assert (sample.text("srt"), sample.text("en.vtt"), sample.json()) == (SRT, VTT, {"speaker": 3})
        assert {"srt": SRT, "en.vtt": VTT}.items() <= sample.decoded().items()
        with pytest.raises(KeyError, match="has none of txt"):  # subtitles have times among their words
            sample.text()
        if ending in ("mp4", "MKV", "webm"):
            assert frame_number(sample.video().frames([0.5])[0]) == 6
        else:
            assert sample.audio().samples(0.1, 0.2).any()


def test_damaged_media_are_rejected_with_their_sidecar_files(tmp_path: Path) -> None:
    film = MAKES["mp4"]()
    files = {
        "good.mp4": film,
        "cut.mp4": film[: len(film) // 2],
        "page.webm": b"<html>",
        "none.wav": b"",
        "code.ts": b"x",
    }
    files |= {f"{name.partition('.')[0]}.srt": b"" for name in files}  # of a silent video; empty texts are texts
    report = run_conversion(write(tmp_path / "in", files), tmp_path / "out", Options())
    assert {reject.file: reject.reason for reject in report.rejected} == {
        "cut.mp4": "unreadable media",
        "page.webm": "unreadable media",
        "none.wav": "empty file",
    }
    assert [*samples_of(tmp_path / "out")] == ["code", "good"]
    report = run_conversion(tmp_path / "in", tmp_path / "unchecked", Options(check_images=False))
    assert [reject.file for reject in report.rejected] == ["none.wav"]


def test_without_pyav_media_are_converted_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_data.importlib.util, "find_spec", lambda name: None)
    report = run_conversion(write(tmp_path / "in", {"page.mp4": b"<html>"}), tmp_path / "out", Options(), workers=1)
    assert (report.rejected, report.samples) == ([], 1)


def test_subtitles_that_are_not_utf8_are_reported_by_check(tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.flac": MAKES["flac"](), "a.srt": SRT.encode("latin-1")})
    run_conversion(tmp_path / "in", tmp_path / "out", Options())
    assert [problem.reason for problem in check_file(tmp_path / "out", "000000.tar", CheckSettings()).problems] == [
        "malformed text"
    ]


def long_wav(seed: int) -> bytes:
    wav = bytearray(audio_bytes(0.1, container="wav"))
    noise = random.Random(seed).randbytes(20 << 20)
    wav[4:8] = (len(wav) + len(noise) - 8).to_bytes(4, "little")
    at = wav.index(b"data")
    wav[at + 4 : at + 8] = (len(wav) + len(noise) - at - 8).to_bytes(4, "little")
    return bytes(wav) + noise


def test_a_long_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.wav": long_wav(1), "a.json": b"{}"})
    tracemalloc.start()
    run_conversion(tmp_path / "in", tmp_path / "out", Options(), workers=1)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert tar_files(tmp_path / "out")["a.wav"] == (tmp_path / "in/a.wav").read_bytes()


def test_changed_long_file_is_distinguished_from_a_touched_one(tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.wav": long_wav(1), "a.json": b"{}"})
    run_conversion(tmp_path / "in", tmp_path / "out", Options())
    write(tmp_path / "in", {"a.wav": long_wav(1)})  # the same bytes
    assert run_conversion(tmp_path / "in", tmp_path / "out", Options()).already
    write(tmp_path / "in", {"a.wav": long_wav(2)})
    with pytest.raises(SavableError, match=r"1 files changed at the same size.*\n.*a\.wav"):
        run_conversion(tmp_path / "in", tmp_path / "out", Options())


def test_manifest_of_videos_is_converted_with_its_videos(tmp_path: Path) -> None:
    film = MAKES["mp4"]()
    write(tmp_path / "in", {"films/a.mp4": film})
    (tmp_path / "in/list.jsonl").write_text(json.dumps({"video": "films/a.mp4", "caption": "numbers"}) + "\n")
    report = run_conversion(tmp_path / "in/list.jsonl", tmp_path / "out", Options())
    (sample,) = samples_of(tmp_path / "out").values()
    assert (report.rejected, sample["mp4"], sample.json()["caption"]) == ([], film, "numbers")
