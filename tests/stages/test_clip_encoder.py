"""`.clips`: an item of each clip, batched as it is, and exact after a resume in the middle of a film."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.testing import assert_exact_resume
from tests.support.media_files import video_bytes
from tests.support.shards import write_tar


@pytest.fixture
def films(tmp_path: Path) -> sp.Pipeline:
    film = video_bytes(24, fps=12, size=(32, 24), gop=6, audio="aac")
    write_tar(tmp_path / "films/0.tar", [(f"film{number}.mp4", film) for number in range(6)])
    return sp.read(str(tmp_path / "films"), shuffle=False)


def test_a_film_gives_an_item_for_each_of_its_clips(films: sp.SamplePipeline) -> None:
    clips = sp.Clips(length_s=0.5, fps=6, stride_s=0.5)
    own = films.clips(clips, audio=True).take(4)
    [sample] = films.take(1)
    frames = [clip.frames for clip in clips.of(sample.video(), sp.Rng(0))]
    assert [item["start_s"] for item in own] == [0.0, 0.5, 1.0, 1.5]
    assert all(np.array_equal(item["frames"], expected) for item, expected in zip(own, frames, strict=True))
    assert own[0]["audio"].shape == (1, round(0.5 * sample.audio().rate))
    batch = films.clips(clips).batch(4).take(1)[0]
    assert batch["frames"].shape == (4, 3, 3, 24, 32) and "audio" not in batch
    with pytest.raises(ValueError, match="of a video, of a sound or of both"):
        films.clips(clips, video=False)


def test_clips_at_random_places_resume_exactly_in_the_middle_of_a_film(films: sp.SamplePipeline) -> None:
    chain = films.clips(sp.Clips(length_s=0.5, fps=6, count=3)).batch(2)
    assert assert_exact_resume(chain, lanes=2, steps=6, chains=1, after=1) > 6
