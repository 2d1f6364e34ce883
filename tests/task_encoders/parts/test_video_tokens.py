"""Which frames of a video are taken, and what they become: patches of two frames, or images with labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from task_encoders.parts.image_tiles import Tiles
from task_encoders.parts.medium import Grid, MediumTokens
from task_encoders.parts.video_tokens import VideoFrames, VideoTokens
from task_encoders.parts.vision import Vision
from tests.support.toy_media import ArrayVideo, plain_video

SMALL: dict[str, Any] = {"patch": 2, "merge": 1, "min_pixels": 16, "max_pixels": 64}


@pytest.mark.parametrize(
    ("frames", "fps", "settings", "taken"),
    [
        (10, 5, {}, [0, 2, 5, 7]),  # 2 a second
        (24, 4, {"fps": 1}, [0, 4, 8, 12, 16, 20]),
        (7, 2, {}, [0, 1, 2, 3, 4, 5]),  # an even number
        (40, 2, {"max_frames": 5}, [0, 10, 20, 30]),
        (8, 8, {}, [0, 2, 4, 6]),  # no fewer than 4
        (3, 30, {}, [0, 1]),
        (1, 30, {}, [0]),
    ],
)
def test_frames_are_sampled_in_pairs_at_the_start_of_each_interval(
    frames: int, fps: float, settings: dict[str, Any], taken: list[int]
) -> None:
    video = plain_video(frames, fps, (8, 4))
    seen = VideoTokens(300, **SMALL, **settings).tokenize(video)
    assert video.shown == taken
    assert seen.fields["video_grids"][0, 0] == -(-len(taken) // 2)


def test_unpaired_frame_is_used_twice() -> None:
    frames = np.array([1, 2, 3], np.uint8)[:, None, None, None].repeat(3, 1)
    patches, grid = VideoTokens(300, patch=1, merge=1).cut(frames)
    assert (patches[:, 0].flatten().tolist(), grid) == ([1, 2, 3, 3], (2, 1, 1))


def test_frames_may_be_sampled_in_the_middle_of_each_interval() -> None:
    video = plain_video(10, 5, (4, 4))
    vision = Vision(Tiles(patch=2, merge=2, side=4, max_tiles=1), 300)
    list(VideoFrames(tiles=vision.tiles).tokenize(video, vision))
    assert video.shown == [1, 3, 6, 8]


def test_patches_go_step_by_step_and_token_by_token() -> None:
    pixels = np.arange(2 * 4 * 8, dtype=np.uint8).reshape(2, 1, 4, 8).repeat(3, 1)  # each pixel its own shade
    patches, grid = VideoTokens(300, patch=1, merge=2).cut(pixels)
    assert grid == (1, 4, 8)
    assert patches.shape == (32, 3, 2, 1, 1)
    first = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # the upper row of tokens
    assert patches[:16, 0, 0, 0, 0].tolist() == first
    assert patches[:16, 2, 1, 0, 0].tolist() == [shade + 32 for shade in first]


def test_steps_have_their_time_and_tokens_their_positions() -> None:
    seen = VideoTokens(300, patch=2, merge=2, min_pixels=16, max_pixels=64, fps=2).tokenize(plain_video(12, 4, (16, 4)))
    assert seen.grids == (Grid(3, 1, 4, interval_s=1.0),)
    assert seen.tokens == 12
    assert seen.fields["video_grids"].tolist() == [[3, 2, 8]]
    assert seen.fields["video_seconds"].tolist() == [1.0]


def test_many_frames_share_the_pixel_budget_but_have_a_minimum() -> None:
    tokens = VideoTokens(300, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 16, total_pixels=28 * 28 * 100)
    sides = [tokens.size(frames, 1000, 1000) for frames in (2, 20, 40, 400)]
    assert sides == [(112, 112), (84, 84), (56, 56), (56, 56)]


def test_frames_are_labelled_images_for_models_without_video() -> None:
    vision = Vision(Tiles(patch=2, merge=2, side=8), 300, before="<", after=">")
    video = VideoFrames(fps=1, min_frames=1, tiles=Tiles(patch=2, merge=2, side=4, max_tiles=1))
    pieces = list(video.pieces(video.tokenize(plain_video(4, 2, (8, 4)), vision), vision))
    assert [piece for piece in pieces if isinstance(piece, str)] == ["Frame1: ", "<", ">", "\nFrame2: ", "<", ">"]
    seen = [piece for piece in pieces if isinstance(piece, MediumTokens)]
    assert [(one.medium.kind, one.tokens) for one in seen] == [("image", 1)] * 2
    assert [one.fields["patches"][0, 0, 0, 0].item() for one in seen] == [1, 3]


def test_a_video_without_a_rate_and_settings_out_of_range_are_rejected() -> None:
    video = ArrayVideo(np.zeros((4, 3, 4, 4), np.uint8), 1)
    video.fps = 0.0
    with pytest.raises(ValueError, match="does not state its frames per second"):
        VideoTokens(300).tokenize(video)
    for settings, message in (
        ({"fps": 0}, "VideoTokens: .*expected fps above 0"),
        ({"min_frames": 9, "max_frames": 8}, "fps=2.0, min_frames=9, max_frames=8"),
        ({"step": 0}, "step, the frames of a patch"),
        ({"text": ""}, "text= must not be empty"),
        ({"patch": 0}, "both must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            VideoTokens(300, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"VideoFrames: .*expected fps above 0"):
        VideoFrames(min_frames=0)


def test_a_batch_normalizes_each_channel_of_patches() -> None:
    tokens = VideoTokens(300, **SMALL, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    fields = tokens.tokenize(plain_video(1, 1, (4, 4))).fields
    batch = tokens.batch(fields, torch.tensor([1]))
    assert batch["video_patches"].shape == fields["video_patches"].shape
    assert batch["video_patches"].dtype == torch.float32
    assert batch["video_patches"][0, :, 1, 0, 0].tolist() == [0.0, -1.0, -0.5]
