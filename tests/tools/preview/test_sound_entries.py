"""Clips and sounds in a batch are pictures of each of the first of them; other arrays are numbers as before."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.tools.preview import preview_pipeline
from savable_pipeline.tools.preview.image_entries import array_entry
from savable_pipeline.tools.preview.page import Budget
from savable_pipeline.tools.preview.sound_entries import sound_entry
from tests.conftest import MakeShards
from tests.tools.preview.test_preview import Page


def test_frames_are_shown_of_each_clip_with_their_numbers() -> None:
    clips = np.arange(6 * 15, dtype=np.uint8).reshape(6, 15, 1, 1, 1).repeat(3, 2).repeat(8, 3).repeat(8, 4)
    entry = array_entry("frames", clips, clips, None)
    seen = [Image.open(io.BytesIO(base64.b64decode(each.uri.partition(",")[2]))) for each in entry.thumbnails]
    frames = [0, 2, 4, 6, 8, 10, 12, 14]
    assert [image.getpixel((3, 3)) for image in seen] == [
        (15 * clip + frame,) * 3 for clip in range(4) for frame in frames
    ]
    assert entry.thumbnails[9].caption == "clip 1, frame 2" and entry.note.endswith("32 of 90")


def test_audio_and_its_features_are_images_on_a_pipelines_page(make_shards: MakeShards) -> None:
    root = make_shards([4])

    class Noise(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            return {"audio": torch.rand(2, 1600), "features": torch.rand(80, 300), "audio_lengths": torch.rand(3)}

        def batch(self, items: list[Any], rng: sp.Rng) -> Any:
            return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    items = preview_pipeline(lambda lane: sp.Batcher(sp.Encode(sp.TarShardReader(root, lane), Noise()), size=2), "p")
    page = Page(items.html)
    page.check_harmless()
    assert sum(tag == "svg" for tag, _ in page.elements) == 2 * 3, "a waveform of each of two sounds, three batches"
    sizes = [image.size for image in page.images]
    assert len(sizes) == 3 * (2 + 2) and sizes.count((300, 80)) == 6 and "float32 (2, 2, 1600)" in page.text


@pytest.mark.parametrize(
    ("name", "shape", "pictures"),
    [("x.audio", (2, 1600), 2), ("wave", (1600,), 1), ("audio_mels", (300, 128), 1), ("features", (9, 80, 50), 4)],
)
def test_each_audio_is_shown_separately_within_the_limit(name: str, shape: tuple[int, ...], pictures: int) -> None:
    array = np.random.default_rng(0).random(shape, np.float32)
    entry = sound_entry(name, array, array, Budget(1_000_000))
    assert entry is not None and len(entry.sounds) == pictures
    assert sound_entry(name, array, array.astype(np.int64), Budget(1_000_000)) is None
    full = sound_entry(name, array, array, Budget(10))
    assert full is not None and not any(sound.spectrogram for sound in full.sounds)


@pytest.mark.parametrize(
    ("name", "shape"), [("features", (2, 196, 768)), ("audio", (100,)), ("speech", (2, 50, 1600)), ("x", (2, 1600))]
)
def test_arrays_that_are_not_audio_are_shown_as_numbers(name: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    assert sound_entry(name, array, array, Budget(1_000_000)) is None
