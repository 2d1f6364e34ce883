"""A pipeline of clips from small videos and audio files, shuffled, packed or batched, and its encoder."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.media_files import audio_bytes, frame_number, video_bytes
from tests.support.shards import write_tar


@functools.cache
def _files() -> list[dict[str, bytes]]:
    """Return a video with audio, one without, a truncated one, and an audio file."""
    small: Any = {"fps": 12, "size": (32, 24), "gop": 6}
    return [
        {"mp4": video_bytes(30, **small, audio="aac")},
        {"mkv": video_bytes(20, **small, container="matroska", b_frames=0)},
        {"flac": audio_bytes(1.5, rate=8000, channels=2)},
        {"mp4": video_bytes(24, **small)},
        {"mkv": video_bytes(36, **small, container="matroska")[:1800]},
    ]


def write_media_shards(folder: Path, sizes: list[int]) -> Path:
    """Write shards of `sizes[i]` numbered samples, in which the kinds of files alternate."""
    numbers = itertools.count()
    for shard, size in enumerate(sizes):
        members = []
        for number in itertools.islice(numbers, size):
            parts = {"json": json.dumps({"id": number}).encode(), **_files()[number % len(_files())]}
            members += [(f"s{number:04d}.{part}", data) for part, data in parts.items()]
        write_tar(folder / f"{shard}.tar", members)
    return folder


class ClipsEncoder(sp.TaskEncoder):
    """An encoder of several clips of most samples, one of every seventh, and none of every eleventh."""

    global_rng = False

    def __init__(self, **how: Any) -> None:
        self.clips = sp.Clips(length_s=0.5, fps=6, size=(16, 12), **how)
        self.single = sp.Clips(length_s=0.7, fps=3)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number % 11 == 10:
            return sp.Skip("every eleventh")
        video = None if "flac" in sample else sample.video()
        audio = sample.audio() if "flac" in sample or number % 5 == 0 else None

        def item(clip: Any) -> dict[str, Any]:
            return {"id": number, "start": clip.start_s, "clip": clip, "drawn": rng.random(), "length": 3 + number % 4}

        if number % 7 == 6:
            return item(self.single.one(video, rng, audio=audio))
        return self.clips.of(video, rng, audio=audio, rate=4000, make=item)

    def length(self, item: Any) -> int:
        return int(item["length"])

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items, "length": sum(map(self.length, items)), "drawn": rng.random()}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": items, "drawn": rng.random()}

    def settings(self) -> dict[str, Any]:
        return self.clips.settings()


def clips_pipeline(
    folder: str,
    lane: sp.Lane,
    *,
    positions: Literal["count", "stride"] = "count",
    align: Literal["exact", "keyframe"] = "exact",
    epochs: int | None = None,
    samples: int = 4,
    buffered: int | None = 5,
    max_buffer_bytes: int = 10_000,
    pack: bool = True,
    size: int = 2,
    encoder: sp.TaskEncoder | None = None,
) -> custom.Stage:
    """Return stages with buffers of `samples` and of `buffered` items, of which few fit into memory, then packs or
    items.
    """
    how: Any = {"count": 4} if positions == "count" else {"stride_s": 0.4}
    reader = sp.TarShardReader(folder, lane, epochs=epochs, block_size=2, window=2)
    shuffled = sp.ShuffleBuffer(reader, size=samples)
    items: Any = sp.Encode(shuffled, encoder or ClipsEncoder(**how, align=align), on_error="skip")
    if buffered is not None:
        items = sp.ShuffleBuffer(items, size=buffered, max_buffer_bytes=max_buffer_bytes)
    if pack:
        items = sp.OnlinePacker(items, max_length=12, open_packs=2, max_buffer_bytes=max_buffer_bytes)
    return sp.Batcher(items, size=size)


def clips_of(batch: Any) -> list[tuple[int, float, list[int]]]:
    """Return the sample number, start and frame numbers of each clip in a batch."""
    items = [item for one in batch["items"] for item in one.get("items", [one])]
    frames = [[] if item["clip"].frames is None else map(frame_number, item["clip"].frames) for item in items]
    return [(item["id"], item["start"], [*shown]) for item, shown in zip(items, frames, strict=True)]
