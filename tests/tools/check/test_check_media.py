"""`savable check` decodes audio and video; `savable index --media` and `savable info` tell what their headers say."""

from __future__ import annotations

import builtins
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from savable_pipeline.tools.check.dataset_check import CheckReport, check_dataset
from savable_pipeline.tools.cli.main import app
from tests.support.media_files import audio_bytes, video_bytes
from tests.support.shards import write_tar
from tests.support.toy_lerobot import LENGTHS, TOP, write_lerobot

SECOND = 8  # frames


@cache
def video(seconds: int = 3, **settings: Any) -> bytes:
    return video_bytes(seconds * SECOND, fps=SECOND, size=(32, 32), noise=60, **settings)


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def zeroed(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(2000) + data[len(data) // 2 + 2000 :]


def without_begin(data: bytes) -> bytes:
    """Drop the first packets of a transport stream. A packet has 188 bytes."""
    return data[len(data) // 188 // 5 * 188 :]


def twice(data: bytes) -> bytes:
    return data + data


WRONG = {
    "a.mp4": (lambda: b"no video", "unreadable media"),
    "b.mp4": (lambda: cut(video()), "unreadable media"),
    "c.mp4": (lambda: zeroed(video()), "unreadable media"),
    "d.webm": (lambda: cut(video(codec="libvpx", container="webm", b_frames=0)), "cut short"),
    "e.mpg": (lambda: without_begin(video(container="mpegts", b_frames=0, gop=1000)), "missing keyframe"),
    "f.flac": (lambda: cut(audio_bytes(3.0)), "unreadable media"),
    "g.mpg": (lambda: twice(video(codec="mpeg2video", container="mpegts", b_frames=0)), "times that go back"),
}
RIGHT = {
    "h.mp4": lambda: video(audio="aac"),
    "i.webm": lambda: audio_bytes(1.0, container="webm", rate=48000),
    "j.mp4": lambda: video_bytes(24, fps=2, gop=1000),  # with one keyframe
    "k.ogg": lambda: audio_bytes(1.0, container="ogg", rate=48000),
    "l.mp3": lambda: audio_bytes(1.0, container="mp3"),
}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    members = [(name, make()) for name, make in {**{name: make for name, (make, _) in WRONG.items()}, **RIGHT}.items()]
    write_tar(tmp_path / "0.tar", members)
    return tmp_path


def check_here(root: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> CheckReport:
    """Return what a check in this process finds."""

    def each_shard(task: Any, root: Path, names: list[str], processes: int) -> Any:
        return ((name, msgspec.msgpack.encode(task(root, name))) for name in names)

    with monkeypatch.context() as patched:
        patched.setattr("savable_pipeline.tools.check.dataset_check.each_shard", each_shard)
        return check_dataset(root, **settings)


def found(report: CheckReport) -> dict[str, str]:
    return {f"{problem.key}.{problem.part}": problem.reason for problem in report.problems}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_broken_audio_and_video_are_problems_and_long_videos_with_one_keyframe_a_warning(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_here(dataset, monkeypatch)
    assert found(report) == {name: reason for name, (_, reason) in WRONG.items()}
    assert any(re.search(r"^1 video has one keyframe only", warning) for warning in report.warnings)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_episodes_with_missing_video_frames_are_counted(
    lacking: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_here(write_lerobot(tmp_path, lacking=lacking), monkeypatch)
    expected = {f"2.{TOP}": "missing frames", f"3.{TOP}": "missing frames"} if lacking else {}
    assert found(report) == expected  # the last episode of each file
    details = [problem.detail for problem in report.problems]
    wanted = [f"the video has {n - lacking} of the {n} that the metadata lists" for n in (LENGTHS[2], LENGTHS[3])]
    assert details == (wanted if lacking else [])


def test_fraction_of_media_is_decoded(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(check_here(dataset, monkeypatch, decode=0.0)) == {}
    some, more = (found(check_here(dataset, monkeypatch, decode=share)) for share in (0.3, 0.8))
    assert some.keys() < more.keys() < WRONG.keys()
    with pytest.raises(ValueError, match="decode must be a fraction"):
        check_dataset(dataset, decode=1.5)


def test_without_pyav_everything_else_is_checked(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: exec("raise ImportError") if name == "av" else real(name, *rest)
    )
    report = check_here(dataset, monkeypatch)
    assert found(report) == {}
    assert any("12 audio and video parts were not decoded: pip install" in warning for warning in report.warnings)
    told = run("index", "--media", dataset)
    assert told.exit_code == 2 and "pip install av" in told.stderr


def test_commands_report_unreadable_media_and_show_the_rest(dataset: Path) -> None:
    indexed = run("index", "--media", dataset)
    assert indexed.exit_code == 1
    assert "savable.media.index" in indexed.stdout
    assert "part 'mp4' of sample 'a' of 0.tar: cannot be opened" in indexed.stdout
    media = json.loads(run("info", "--json", dataset).stdout)["media"]
    assert media["ogg"] == {
        "parts": 1,
        "hours": media["ogg"]["hours"],
        "broken": 0,
        "size": "",
        "fps": "",
        "rate": "48,000 Hz",
    }
    assert media["mp4"]["broken"] == 2 and media["mp4"]["hours"] == pytest.approx(18 / 3600, rel=0.05)
    assert "48,000 Hz" in run("info", dataset).stdout
    write_tar(dataset / "1.tar", [("m.mp4", b"")])
    assert "1.tar is not in it). Run `savable index --media`" in " ".join(run("info", dataset).stdout.split())
    assert run("index", "--media", "https://example.invalid/x").exit_code == 2
