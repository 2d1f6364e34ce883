"""`VideoTokens` (Qwen2.5-VL) and `VideoFrames` (InternVL): videos as tokens.

In this example of eight frames, `VideoTokens` joins two frames to a step, with 2 × 2 patches per token (`@`).
`VideoFrames` shows each frame as an image (`#`):

    VideoTokens   <|vision_start|> @@@@ @@@@ @@@@ @@@@ <|vision_end|>
    VideoFrames   Frame1: <img>####</img> ⏎ Frame2: <img>####</img> ⏎ … Frame8: <img>####</img>

Frames are chosen at a rate, between a least and a greatest number, and spread over the whole video. The video is
divided into equal intervals (`|`), and a frame is the one at the start or the middle of its interval (`*`). A video of
10 frames at 5 per second, of which 2 per second are chosen:

    frame    0 1 2 3 4 5 6 7 8 9
    start    *   |*  |  *  |*        4 frames: numbers 0, 2, 5, 7
    middle     * |   *|   *|  *      4 frames: numbers 1, 3, 6, 8
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from task_encoders.parts.image_tiles import ImageTiles, NativeSize, Tiles
from task_encoders.parts.medium import Grid, MediaHeader, Medium, MediumTokens, Unmeasured, element_rows
from task_encoders.parts.square_crop import MEAN, STD, normalized
from task_encoders.parts.vision import Vision


@dataclass(frozen=True)
class KnownVideo:
    """Facts about a video from its header.

    They have the names of an open video's attributes.
    """

    duration_s: float
    fps: float
    size: tuple[int, int]

    @classmethod
    def of(cls, info: MediaHeader) -> KnownVideo:
        """Read the facts. Raises `Unmeasured` if the header lacks one."""
        if info.duration_s is None or not info.fps or info.width is None or info.height is None:
            raise Unmeasured
        return cls(info.duration_s, info.fps, (info.width, info.height))


class FrameRule:
    """Rule for choosing frames: the base class of `VideoTokens` and `VideoFrames`."""

    fps: float
    min_frames: int
    max_frames: int

    def check_rule(self) -> None:
        """Raise ValueError if a setting is out of its range."""
        if not self.fps > 0 or not 1 <= self.min_frames <= self.max_frames:
            raise ValueError(
                f"{type(self).__name__}: fps={self.fps}, min_frames={self.min_frames}, max_frames={self.max_frames}: "
                "expected fps above 0 and 1 ≤ min_frames ≤ max_frames"
            )

    def times(self, video: Any, *, multiple: int = 1, at: Literal["start", "middle"] = "start") -> list[float]:
        """Return the times of the chosen frames, in seconds.

        The number of frames is a multiple of `multiple` if the video has enough. `at` chooses the start or the middle
        of each interval. Raises ValueError if the frame rate is unknown.
        """
        total = count_frames(video)
        max_frames = min(self.max_frames, total) // multiple * multiple
        by_rate = min(max(total / video.fps * self.fps, self.min_frames), max_frames)
        count = max(1, math.floor(by_rate / multiple) * multiple)
        shift = 0.0 if at == "start" else 0.5
        return [(number + shift) * total / count / video.fps for number in range(count)]


def count_frames(video: Any) -> int:
    """Count the frames of a video from its duration and frame rate.

    Raises ValueError if the frame rate is unknown.
    """
    if not video.fps > 0:
        raise ValueError("the video does not state its frames per second")
    frames: int = round(video.duration_s * video.fps)
    return max(1, frames)


@dataclass(frozen=True)
class VideoTokens(FrameRule, Medium):
    """Videos as steps of two frames, divided into patches, as in Qwen2.5-VL.

    Qwen2-VL and Qwen2.5-Omni do the same. All frames are resized to one size near that of the video, with sides that
    are multiples of `patch * merge`. If the number of frames is odd, the last one is repeated.

    Args:
        token: The id of each token of a video. Text must not contain it.
        text: The placeholder that a chat template writes for a video.
        before: The text before each video, such as a special token.
        after: The text after each video.
        fps: The number of frames to choose per second of video.
        min_frames: The least number of frames to choose, if the video has that many.
        max_frames: The greatest number of frames to choose.
        patch: The side of a patch, in pixels.
        merge: A model merges `merge` × `merge` patches into one token.
        step: The number of frames of a patch.
        min_pixels: A smaller frame is enlarged to this many pixels.
        max_pixels: A larger frame is shrunk to this many pixels.
        total_pixels: The most pixels of all steps together. No frame gets less than 1.05 times `min_pixels`.
        mean: The mean of red, green and blue in the training data, between 0 and 1 (default: ImageNet's).
        std: The standard deviation of red, green and blue.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        ```python
        from task_encoders import VideoTokens
        video = VideoTokens(151656, before="<|vision_start|>", after="<|vision_end|>")
        video.size(16, 1280, 720)     # (1008, 560)
        video.size(768, 1280, 720)    # (644, 336)
        ```
    """

    token: int
    text: str = "<video>"
    before: str = ""
    after: str = ""
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    patch: int = 14
    merge: int = 2
    step: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    total_pixels: int = 115_200 * 28 * 28
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD

    kind: ClassVar[str] = "video"

    def __post_init__(self) -> None:
        self.check_token()
        self.check_rule()
        if self.step < 1:
            raise ValueError(f"VideoTokens: step, the frames of a patch, must be at least 1, not {self.step}")
        self._frame_size(1)

    def size(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which the frames of a video are resized.

        Args:
            frames: The number of chosen frames.
            width: Width of the video, in pixels.
            height: Height of the video, in pixels.

        Raises:
            ValueError: One side is over 200 times as long as the other.
        """
        return self._frame_size(frames).size(width, height)

    def tokenize(self, content: Any) -> MediumTokens:
        """Build the tokens and patches of a video.

        Args:
            content: The video, as `sample.video()` opens it.

        Raises:
            ValueError: The frame rate is unknown, or one side is over 200 times as long as the other.
        """
        times, size, token_grid = self._plan(content)
        patches, patch_grid = self.cut(content.frames(times, size=size))
        fields = {
            "video_patches": patches,
            "video_grids": torch.tensor([patch_grid]),
            "video_seconds": torch.tensor([token_grid.interval_s], dtype=torch.float64),
        }
        return MediumTokens(self, token_grid.tokens, fields, (token_grid,))

    def measure(self, info: MediaHeader) -> MediumTokens:
        """Count the tokens from the duration and size of a video, without patches."""
        _, _, token_grid = self._plan(KnownVideo.of(info))
        return MediumTokens(self, token_grid.tokens, {}, (token_grid,))

    def cut(self, frames: NDArray[np.uint8]) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Cut frames into patches.

        Args:
            frames: uint8 (n, 3, height, width); both sides are multiples of `patch * merge`.

        Returns:
            The patches, uint8 (p, 3, step, patch, patch), in the order of steps, tokens, and rows within a token. And
            the numbers of steps, and of rows and columns of patches.
        """
        missing = -len(frames) % self.step
        padded = np.concatenate([frames, *[frames[-1:]] * missing]) if missing else frames
        steps, rows, columns = len(padded) // self.step, padded.shape[2] // self.patch, padded.shape[3] // self.patch
        # a side of `rows` or `columns` patches is split into tokens, patches of a token, and pixels of a patch
        height_split, width_split = ((side // self.merge, self.merge, self.patch) for side in (rows, columns))
        split = padded.reshape(steps, self.step, 3, *height_split, *width_split)
        patches = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3, self.step, self.patch, self.patch)
        return torch.from_numpy(patches), (steps, rows, columns)

    def empty(self) -> dict[str, torch.Tensor]:
        """Return the fields of an item without videos.

        They are `video_patches`, uint8 (0, 3, step, patch, patch); `video_grids`, int64 (0, 3); `video_seconds`,
        float64 (0,).
        """
        return {
            "video_patches": torch.empty(0, 3, self.step, self.patch, self.patch, dtype=torch.uint8),
            "video_grids": torch.empty(0, 3, dtype=torch.int64),
            "video_seconds": torch.empty(0, dtype=torch.float64),
        }

    def token_counts(self, item: dict[str, Any]) -> list[int]:
        """Count the tokens of each video of an item."""
        counts: list[int] = (item["video_grids"].prod(1) // self.merge**2).tolist()
        return counts

    def select(self, item: dict[str, Any], first: int, last: int) -> dict[str, torch.Tensor]:
        """Return the fields of the videos `first` to `last - 1` of an item."""
        own = {name: item[name][first:last] for name in ("video_grids", "video_seconds")}
        return {"video_patches": item["video_patches"][element_rows(item["video_grids"].prod(1), first, last)], **own}

    def batch(self, joint: dict[str, torch.Tensor], counts: torch.Tensor) -> dict[str, Any]:
        """Return the fields of a batch from those of its rows, `joint`.

        `counts`, int64 (B,), is the number of videos of each row. The fields are `video_patches`, float32 (P, 3, step,
        patch, patch), normalized; `video_grids`, int64 (videos, 3); `video_seconds`, float64 (videos,); and
        `video_counts`, int64 (B,).
        """
        patches = joint["video_patches"]
        rows_joined = normalized(patches.flatten(2, 3), self.mean, self.std)  # (P, 3, step * patch, patch)
        return {**joint, "video_patches": rows_joined.view(patches.shape), "video_counts": counts}

    def settings(self) -> dict[str, Any]:
        """Return the class and every argument, for `TaskEncoder.settings`."""
        return {"class": "VideoTokens", **asdict(self), "mean": list(self.mean), "std": list(self.std)}

    def _frame_size(self, frames: int) -> NativeSize:
        """Return the rule that computes the size of a frame if `frames` frames are chosen."""
        max_pixels = min(self.max_pixels, self.total_pixels * self.step // frames)
        return NativeSize(self.patch, self.merge, self.min_pixels, max(max_pixels, int(self.min_pixels * 1.05)))

    def _plan(self, video: Any) -> tuple[list[float], tuple[int, int], Grid]:
        """Return the times of the chosen frames in seconds, their size in pixels, and the grid of their tokens."""
        times = self.times(video, multiple=self.step)
        width, height = self.size(len(times), *video.size)
        unit = self.patch * self.merge
        interval_s = self.step / (len(times) / count_frames(video) * video.fps)
        return times, (width, height), Grid(-(-len(times) // self.step), height // unit, width // unit, interval_s)


@dataclass(frozen=True)
class VideoFrames(FrameRule):
    """Videos as images with a label before each frame, as in InternVL.

    The `Vision` of the encoder turns the frames into tokens. Frames are chosen from the middle of equal intervals.

    Args:
        fps: The number of frames to choose per second of video.
        min_frames: The least number of frames to choose, if the video has that many.
        max_frames: The greatest number of frames to choose.
        tiles: How a frame becomes patches, with the same `patch` and `merge` as the tiles of `Vision`.
        text: The placeholder that a chat template writes for a video.
        label: The text before each frame. `{number}` is the number of the frame, from 1.
        between: The text between two frames.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        ```python
        from task_encoders import ChatEncoder, Tiles, VideoFrames, Vision
        vision = Vision(Tiles(), 151667, before="<img>", after="</img>")
        encoder = ChatEncoder(vision=vision, video=VideoFrames(min_frames=8, max_frames=32))
        encoder.settings()["video"]["max_frames"]  # 32
        ```
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    tiles: ImageTiles = field(default_factory=lambda: Tiles(max_tiles=1))
    text: str = "<video>"
    label: str = "Frame{number}: "
    between: str = "\n"

    def __post_init__(self) -> None:
        self.check_rule()
        if not self.text:
            raise ValueError("VideoFrames: text= must not be empty. Pass the text that stands for a video")

    def pieces(self, frames: Iterable[MediumTokens], vision: Vision) -> Iterator[str | MediumTokens]:
        """Yield the texts and frames of a video in a sequence.

        Args:
            frames: The frames, from `tokenize` or `measure`.
            vision: How an image is turned into tokens.
        """
        for number, frame in enumerate(frames, 1):
            yield self.between * (number > 1) + self.label.replace("{number}", str(number))
            yield from vision.pieces(frame)

    def tokenize(self, video: Any, vision: Vision) -> Iterator[MediumTokens]:
        """Build the tokens and patches of each frame of a video.

        Args:
            video: The video, as `sample.video()` opens it.
            vision: How an image is turned into tokens.
        """
        frame_vision = replace(vision, tiles=self.tiles)
        for time in self.times(video, at="middle"):
            frame = video.frames([time])[0]
            yield frame_vision.tokenize(Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0))))

    def measure(self, info: MediaHeader, vision: Vision) -> list[MediumTokens]:
        """Return the tokens of each frame, without patches, from the header alone.

        Args:
            info: The video's header.
            vision: How an image is turned into tokens.
        """
        frame = replace(vision, tiles=self.tiles).measure(info)
        return [frame for _ in self.times(KnownVideo.of(info), at="middle")]

    def settings(self) -> dict[str, Any]:
        """Return the class and every argument, for `TaskEncoder.settings`."""
        own = {name: value for name, value in asdict(self).items() if name != "tiles"}
        tiles = {f"frame_{name}": value for name, value in self.tiles.settings().items()}
        return {"class": "VideoFrames", **own, **tiles}
