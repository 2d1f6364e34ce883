"""A state saved under one way of decoding or cropping is refused under another, which the refusal names."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
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


def classes(decode: Any, draws: Any = 2, augment: bool = True) -> sp.TaskEncoder:
    return ClassificationEncoder(2, crop=SquareCrop(16, augment, decode=decode, draws=draws))


def pairs(decode: Any, draws: Any = 2) -> sp.TaskEncoder:
    return ContrastiveEncoder(crop=SquareCrop(16, decode=decode, draws=draws))


def captions(decode: Any, draws: Any = 2) -> sp.TaskEncoder:
    return CaptioningEncoder(image_size=16, decode=decode, crop_draws=draws)


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


@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (classes, 'SquareCrop(decode="exact")'),
        (pairs, 'SquareCrop(decode="exact")'),
        (captions, 'decode="exact"'),
        (documents, 'Vision(decode="exact")'),
    ],
)
def test_a_state_of_one_decoding_is_refused_under_the_other(make: Any, exact: str, tmp_path: Path) -> None:
    shards = photos(tmp_path)
    earlier = refusal(shards, make("exact"), make("scaled"))
    assert f"  Encode.encoder.decode: saved {exact}, here 'scaled'\n" in earlier
    later = refusal(shards, make("scaled"), make("exact"))
    assert f"  Encode.encoder.decode: saved 'scaled', here {exact}\n" in later


@pytest.mark.parametrize(
    ("make", "draws"),
    [
        (classes, 'SquareCrop(decode="exact", draws=1)'),
        (pairs, 'SquareCrop(decode="exact", draws=1)'),
        (captions, 'decode="exact", crop_draws=1'),
    ],
)
def test_a_state_of_torchvisions_crops_is_refused_by_name_and_goes_on_with_these(
    make: Any, draws: str, tmp_path: Path
) -> None:
    shards = photos(tmp_path)
    told = refusal(shards, make("exact", 1), make("exact"))
    assert f"  Encode.encoder.crop_draws: saved {draws}, here 2\n" in told
    assert "Encode.encoder.decode" not in told
    with loader(shards, make("exact", 1)) as run, loader(shards, make("exact", 1)) as resumed:
        batches = iter(run)
        next(batches)
        resumed.load_state_dict(run.state_dict())
        assert torch.equal(next(batches)["image"], next(iter(resumed))["image"])


def test_a_state_of_central_crops_that_were_decoded_exactly_has_no_draws_to_differ(tmp_path: Path) -> None:
    shards = photos(tmp_path)
    with loader(shards, classes("exact", 1, augment=False)) as run:
        next(iter(run))
        loader(shards, classes("exact", 2, augment=False)).load_state_dict(run.state_dict())
