"""A state saved under one way of decoding is refused under another, which the refusal names."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders import (
    CaptioningEncoder,
    ClassificationEncoder,
    ContrastiveEncoder,
    InterleavedEncoder,
    NativeSize,
    SquareCrop,
    Vision,
)
from tests.support.toy_samples import write_samples


def photos(folder: Path) -> str:
    """Eight samples for every encoder; an image is 160 × 120 pixels."""
    samples = []
    for number in range(8):
        file = io.BytesIO()
        Image.linear_gradient("L").rotate(40 * number).convert("RGB").resize((160, 120)).save(file, "JPEG")
        samples.append({"jpg": file.getvalue(), "txt": "a", "cls": "1", "json": {"texts": [None], "images": ["jpg"]}})
    return str(write_samples(folder, samples))


def classes(decode: Any) -> sp.TaskEncoder:
    return ClassificationEncoder(2, crop=SquareCrop(16, decode=decode))


def pairs(decode: Any) -> sp.TaskEncoder:
    return ContrastiveEncoder(crop=SquareCrop(16, decode=decode))


def captions(decode: Any) -> sp.TaskEncoder:
    return CaptioningEncoder(image_size=16, decode=decode)


def documents(decode: Any) -> sp.TaskEncoder:
    return InterleavedEncoder(vision=Vision(NativeSize(max_pixels=28 * 28, min_pixels=1), token=300, decode=decode))


def pipeline(shards: str, encoder: sp.TaskEncoder, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), encoder), size=1)


def loader(shards: str, encoder: sp.TaskEncoder) -> sp.SavableLoader:
    return sp.SavableLoader(partial(pipeline, shards, encoder), seed=7, lanes=2)


def refusal(shards: str, before: sp.TaskEncoder, after: sp.TaskEncoder) -> str:
    """What is said to a run with one encoder of the state of a run with another."""
    with loader(shards, before) as saved, loader(shards, after) as here:
        next(iter(saved))
        with pytest.raises(sp.CheckpointMismatchError) as refused:
            here.load_state_dict(saved.state_dict())
    return str(refused.value)


@pytest.mark.parametrize("make", [classes, pairs, captions, documents])
def test_a_state_of_one_decoding_is_refused_under_the_other(make: Any, tmp_path: Path) -> None:
    shards = photos(tmp_path)
    for before, after in (("exact", "scaled"), ("scaled", "exact")):
        told = refusal(shards, make(before), make(after))
        assert f"  Encode.encoder.decode: saved '{before}', here '{after}'\n" in told
