"""`ClassificationEncoder`: image and class, mixed in batches or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.classification import ClassificationEncoder
from task_encoders.parts.square_crop import SquareCrop
from tests.support.toy_samples import item, plain_png, png, sample

RNG = Rng(7)
SMALL = SquareCrop(8, augment=False, mean=(0.0,) * 3, std=(1.0,) * 3)


def encoder(**settings: Any) -> ClassificationEncoder:
    """Return an encoder of ten classes and small images, by default."""
    return ClassificationEncoder(**{"classes": 10, "crop": SMALL, **settings})


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


def batch_of_six(made_by: ClassificationEncoder, seed: int = 0) -> dict[str, Any]:
    """Return a batch of an image of each class from 0 to 5, mixed by torch's seed."""
    items = [item(made_by, sample(png=png(pixels), cls=str(number))) for number, pixels in enumerate(PIXELS)]
    torch.manual_seed(seed)
    batch: dict[str, Any] = made_by.batch(items, RNG)
    return batch


def test_a_batch_has_the_pixels_and_classes_of_its_images() -> None:
    batch = batch_of_six(encoder())
    assert batch["label"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (batch["image"].shape, batch["image"].dtype, batch["label"].dtype) == (
        (6, 3, 8, 8),
        torch.float32,
        torch.int64,
    )
    np.testing.assert_allclose(batch["image"], PIXELS.transpose(0, 3, 1, 2) / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "parts", "expected"),
    [
        ({}, {"cls": " 3\n"}, 3),
        ({"label": "json[label]"}, {"json": {"label": 3}}, 3),
        ({"label": "json[label]"}, {"json": {"label": "3"}}, 3),
        ({"classes": 2, "names": ("cat", "dog")}, {"cls": "dog\n"}, 1),
    ],
)
def test_a_class_is_a_number_or_a_name_in_a_part_or_a_field(settings: Any, parts: Any, expected: int) -> None:
    assert item(encoder(**settings), sample({"png": plain_png(8, 8), **parts}))["label"] == expected


@pytest.mark.parametrize(
    ("settings", "parts", "message"),
    [
        ({}, {"cls": "10"}, "cls: expected a class from 0 to 9, found '10'"),
        ({}, {"cls": "-1"}, "cls: expected a class from 0 to 9, found '-1'"),
        ({}, {"cls": ""}, "cls: expected a class from 0 to 9, found ''"),
        ({"label": "json[label]"}, {"json": {"label": True}}, r"json\[label\]: expected a class .* found True"),
        ({"label": "json[label]"}, {"json": {"label": 1.5}}, r"json\[label\]: expected a class .* found 1.5"),
        ({"classes": 2, "names": ("cat", "dog")}, {"cls": "cow"}, "cls: expected one of cat, dog, found 'cow'"),
    ],
)
def test_invalid_class_is_an_error_that_names_the_field(settings: Any, parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder(**settings).encode(sample({"png": plain_png(8, 8), **parts}), RNG)


@pytest.mark.parametrize(("parts", "reason"), [({"cls": "1"}, "no image"), ({"png": plain_png(8, 8)}, "no cls")])
def test_a_sample_without_image_or_class_is_skipped_by_its_reason(parts: Any, reason: str) -> None:
    made = encoder().encode(sample(parts), RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


@pytest.mark.parametrize("mix", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_labels_are_class_proportions_drawn_by_torchs_seed(mix: dict[str, float]) -> None:
    mixing = encoder(**mix)
    assert mixing.global_rng == ("torch",)
    first, again, other = (batch_of_six(mixing, seed) for seed in (1, 1, 2))
    assert torch.equal(first["image"], again["image"])
    assert torch.equal(first["label"], again["label"])
    assert not torch.equal(first["image"], other["image"])
    assert (first["label"].shape, first["label"].dtype) == ((6, 10), torch.float32)
    torch.testing.assert_close(first["label"].sum(1), torch.ones(6))
    assert bool(((first["label"] > 0).sum(1) == 2).all())  # of two images each


def test_single_image_is_not_mixed_but_has_soft_labels() -> None:
    made = encoder(mixup=0.5)
    batch = made.batch([item(made, sample(png=plain_png(8, 8), cls="2"))], RNG)
    assert batch["label"].tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["label"].dtype == torch.float32


def test_wrong_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="classes must be at least 1"):
        ClassificationEncoder(0)
    with pytest.raises(ValueError, match="names has 1 names for 2 classes"):
        ClassificationEncoder(2, names=("cat",))
