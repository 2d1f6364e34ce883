"""Samples of given parts, images of known pixels, and real ones: scikit-learn's digits and Python's own source."""

from __future__ import annotations

import functools
import io
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.sample_source import DetachedSample
from savable_pipeline.stages.task_encoder import Skip
from tests.support.shards import write_tar

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|endoftext|>"]


def sample(parts: dict[str, Any] | None = None, **more: Any) -> Sample:
    """Return a sample with these parts: bytes unchanged, text as UTF-8, and the rest as JSON."""
    given = {**(parts or {}), **more}
    return Sample(DetachedSample(1, "a", "0.tar", 0, {name: part(value) for name, value in given.items()}), 0, 0, 0, 0)


def part(value: Any) -> bytes:
    """Return the bytes of a part."""
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def png(pixels: Any) -> bytes:
    """Return an image file of uint8 (height, width, 3)."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file, "png")
    return file.getvalue()


def plain_png(width: int, height: int, shade: int = 0) -> bytes:
    """Return an image file of one grey."""
    return png(np.full((height, width, 3), shade))


def word_lengths(text: str) -> list[int]:
    """Return the lengths of the words, as tokens."""
    return [len(word) for word in text.split()]


def item(encoder: Any, given: Sample) -> dict[str, Any]:
    """Return the one item of a sample that is not skipped."""
    made = encoder.encode(given, Rng(7))
    assert not isinstance(made, Skip), made
    assert isinstance(made, dict)
    return made


def without_pixels(made: dict[str, Any]) -> dict[str, Any]:
    """Return everything except pixels, with tensors as lists."""
    kept = {name: value for name, value in made.items() if name not in ("image", "patches")}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in kept.items()}


@functools.cache
def digits() -> list[tuple[bytes, int]]:
    """Return the first 120 of scikit-learn's scanned digits: an image file of 8 × 8, and its digit."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    grey = (loaded.images[:120] * (255 / 16)).astype(np.uint8)
    pixels = np.repeat(grey[..., None], 3, axis=-1)
    return [(png(image), int(label)) for image, label in zip(pixels, loaded.target[:120], strict=True)]


@functools.cache
def python_sources() -> list[tuple[str, str]]:
    """Return name and text of the small modules at the top of Python's library, about 60."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [(path.stem, path.read_text()) for path in files if path.stat().st_size < 8_000]


@functools.cache
def trained_tokenizer(vocab_size: int = 600) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer trained on Python's source, with the special tokens `SPECIAL`: ids 0 to 3."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text for _, text in python_sources()[:20]], trainer)
    return made


def write_samples(folder: Path, samples: list[dict[str, Any]], per_shard: int = 40) -> Path:
    """Write shards of samples, each a dict of parts as in `sample`."""
    for first in range(0, len(samples), per_shard):
        numbered = enumerate(samples[first : first + per_shard], start=first)
        members = [(f"s{i:05d}.{name}", part(value)) for i, parts in numbered for name, value in parts.items()]
        write_tar(folder / f"{first // per_shard:03d}.tar", members)
    return folder
