"""Video and audio of samples: opened where they lie, closed with their readers, named in errors."""

from __future__ import annotations

import builtins
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.errors import MediaError
from tests.support.media_files import audio_bytes, frame_number, video_bytes
from tests.support.shards import write_tar


@pytest.fixture
def sample(tmp_path: Path) -> sp.Sample:
    parts = {"mp4": video_bytes(30, audio="aac"), "flac": audio_bytes(1.0), "bad.mp4": b"no video", "txt": b"a"}
    write_tar(tmp_path / "0.tar", [(f"s0.{name}", data) for name, data in parts.items()])
    return next(sp.TarShardReader(tmp_path, sp.Lane(), shuffle=False))


def test_video_and_sound_are_found_by_their_extensions(sample: sp.Sample) -> None:
    assert [frame_number(frame) for frame in sample.video().frames_by_index([7, 3])] == [7, 3]
    assert sample.audio().codec == "flac" and sample.audio("mp4").codec == "aac"
    assert np.abs(sample.audio().samples()).max() > 0.4


def test_a_part_that_is_no_media_is_named_with_its_sample_and_shard(sample: sp.Sample) -> None:
    with pytest.raises(MediaError, match=r"part 'bad.mp4' of sample 's0' of 0.tar: "):
        sample.video("bad.mp4")
    with pytest.raises(KeyError, match="absent"):
        sample.read_from(sp.Sample.__reduce__(sample)[1][0]).video("absent")  # a pickled one opens its parts too


def test_nothing_stays_open_of_many_clips(sample: sp.Sample) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for n in range(30):
        sample.video().frames([n % 20 / 10], size=(16, 16))
        sample.audio("mp4").samples(0.5, 1.0, rate=8000)
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1  # the shard itself


def test_without_pyav_the_message_says_what_to_install(sample: sp.Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "av":
            raise ImportError("No module named 'av'")
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for open_part in (sample.video, sample.audio):
        with pytest.raises(ImportError, match=r"pip install 'savable_pipeline\[media\]'"):
            open_part()
    assert sample.text() == "a"
