"""Images that the benchmarks decode: with the spectrum of photographs, real ones, and digits to be found in scenes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from PIL import Image
from sklearn.datasets import load_digits

import savable_pipeline as sp
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.sample_source import DetachedSample


def sample_of(jpeg: bytes) -> sp.Sample:
    """A sample with this image alone, in memory."""
    return Sample(DetachedSample(1, "a", "0.tar", 0, {"jpg": jpeg}), 0, 0, 0, 0)


def jpeg_of(image: Image.Image, quality: int = 90, subsampling: str = "4:2:0") -> bytes:
    """A JPEG as cameras write them."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=subsampling)
    return file.getvalue()


def scene(width: int, height: int, seed: int) -> Image.Image:
    """Noise of the same strength in each octave of frequencies, as photographs have it, and a sensor's noise."""
    draw = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        grid = draw.normal(0, 14, (max(2, height >> octave), max(2, width >> octave), 2)).astype(np.float32)
        grey, tint = (_enlarged(grid[..., channel], width, height) for channel in range(2))
        pixels += grey[..., None] + 0.3 * tint[..., None] * np.array([1, 0, -1], np.float32)
    noise = draw.standard_normal((height, width, 1), np.float32) * 2
    return Image.fromarray(np.clip(pixels + noise + 118, 0, 255).astype(np.uint8))


def _enlarged(grid: Any, width: int, height: int) -> Any:
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC))


def photographs() -> dict[str, bytes]:
    """The two that scikit-learn brings, 640 × 427 pixels."""
    folder = Path(sklearn.__file__).parent / "datasets" / "images"
    return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.jpg"))}


def digits_in_scenes(width: int, height: int) -> list[tuple[bytes, int]]:
    """Scikit-learn's 1,797 scanned digits, each faint somewhere in a scene of its own, and which digit it is."""
    loaded, made = load_digits(), []
    backgrounds = [np.asarray(scene(width, height, seed), np.float32) for seed in range(16)]
    for number, (grey, label) in enumerate(zip(loaded.images, loaded.target, strict=True)):
        draw = np.random.default_rng(number)
        side = int(draw.integers(height // 2, height * 3 // 4))
        left, upper = int(draw.integers(width - side)), int(draw.integers(height - side))
        pixels = np.roll(backgrounds[number % 16], tuple(draw.integers(0, 300, 2)), (0, 1))
        pixels[upper : upper + side, left : left + side] += 5 * _enlarged(np.float32(grey), side, side)[..., None]
        made.append((jpeg_of(Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))), int(label)))
    return made
