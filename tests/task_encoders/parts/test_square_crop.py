"""`SquareCrop`: against torchvision's transforms, pixel by pixel, which only the crops of earlier states use.

torchvision is imported where it is used: that takes seconds.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import savable_pipeline as sp
from task_encoders.parts.sample_parts import Decode
from task_encoders.parts.square_crop import SquareCrop, random_box
from tests.support.toy_samples import png, sample

DECODES: tuple[Decode, ...] = ("scaled", "exact")
DRAW = np.random.default_rng(0)


def noise(width: int, height: int) -> Image.Image:
    """Return an image of random pixels."""
    return Image.fromarray(DRAW.integers(0, 256, (height, width, 3), dtype=np.uint8))


def jpeg(width: int, height: int) -> bytes:
    """Return a JPEG like a photograph."""
    file = io.BytesIO()
    noise(width // 20 + 2, height // 20 + 2).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def drawn_crop(crop: SquareCrop, seed: int = 0, **parts: bytes) -> torch.Tensor:
    """Return the crop that is drawn with this key."""
    found = crop.image(sample(parts), sp.Rng(seed))
    assert found is not None and found.is_contiguous()
    return found


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("size", [1, 8, 33])
@pytest.mark.parametrize(
    "full", [(1, 1), (8, 8), (9, 8), (33, 70), (70, 33), (71, 99), (100, 7), (5, 300), (33, 34), (34, 33), (67, 66)]
)
def test_central_crop_equals_torchvisions_pixels(full: tuple[int, int], size: int, decode: Decode) -> None:
    from torchvision.transforms import v2

    drawn = noise(*full)
    expected = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])(drawn)
    assert torch.equal(drawn_crop(SquareCrop(size, augment=False, decode=decode), png=png(drawn)), expected)


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("full", [(1, 1), (40, 30), (31, 47), (90, 5), (6, 77), (200, 150)])
def test_random_crop_equals_torchvisions_pixels_in_its_box(full: tuple[int, int], decode: Decode) -> None:
    from torchvision.transforms.v2 import functional

    drawn = noise(*full)
    mirrored = []
    for seed in range(12):
        rng = sp.Rng(seed)
        left, upper, right, lower = random_box(full, (0.08, 1.0), rng)
        mirrored.append(rng.random() < 0.5)
        cut = functional.resized_crop(drawn, upper, left, lower - upper, right - left, [17, 17])
        expected = functional.pil_to_tensor(functional.horizontal_flip(cut) if mirrored[-1] else cut)
        assert torch.equal(drawn_crop(SquareCrop(17, scale=(0.08, 1.0), decode=decode), seed, png=png(drawn)), expected)
    assert {*mirrored} == {True, False}


def test_boxes_are_anywhere_in_the_image_with_requested_scale_and_aspect() -> None:
    boxes = np.array([random_box((400, 300), (0.2, 0.6), sp.Rng(seed)) for seed in range(3000)])
    left, upper, right, lower = boxes.T
    assert left.min() == 0 and upper.min() == 0 and right.max() == 400 and lower.max() == 300
    share = (right - left) * (lower - upper) / 120_000
    aspect = (right - left) / (lower - upper)
    assert 0.19 < share.min() < 0.21 and 0.58 < share.max() < 0.61
    assert share.mean() == pytest.approx(0.4, abs=0.02)  # uniform
    assert 0.74 < aspect.min() < 0.77 and 1.31 < aspect.max() < 1.35
    assert np.log(aspect).mean() == pytest.approx(0, abs=0.02)  # log-uniform
    assert np.log(aspect).std() == pytest.approx(math.log(16 / 9) / math.sqrt(12), abs=0.02)
    free = left[right - left < 400] / (400 - (right - left)[right - left < 400])
    assert free.mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("full", [(1000, 10), (10, 1000), (401, 300), (300, 401), (1, 1), (1, 2)])
def test_without_a_fitting_box_the_crop_is_torchvisions_central_one(full: tuple[int, int]) -> None:
    from torchvision.transforms import v2

    transform = v2.RandomResizedCrop(8, scale=(2.0, 2.0))
    made = transform.make_params([Image.new("RGB", full)])
    expected = (made["left"], made["top"], made["left"] + made["width"], made["top"] + made["height"])
    assert random_box(full, (2.0, 2.0), sp.Rng(0)) == expected


@pytest.mark.parametrize(
    ("full", "augment", "scaled"),
    [
        ((500, 375), True, False),
        ((500, 375), False, False),
        ((447, 900), False, False),
        ((448, 900), False, True),
        ((900, 448), False, True),
        ((1400, 1100), True, True),
    ],
)
def test_jpeg_is_decoded_smaller_only_if_the_crop_has_fewer_pixels(
    full: tuple[int, int], augment: bool, scaled: bool
) -> None:
    file = jpeg(*full)
    smaller, exact = (drawn_crop(SquareCrop(augment=augment, decode=decode), 3, jpg=file) for decode in DECODES)
    assert torch.equal(smaller, exact) != scaled
    assert (smaller.float() - exact.float()).abs().mean() < 2


def test_numbers_are_drawn_from_the_rng_of_the_call_alone() -> None:
    crop, file = SquareCrop(16), png(noise(60, 40))
    before = torch.get_rng_state()
    crops = [drawn_crop(crop, seed, png=file) for seed in range(4)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert all(torch.equal(drawn_crop(crop, seed, png=file), old) for seed, old in enumerate(crops))
    assert len({found.numpy().tobytes() for found in crops}) == 4


def test_a_sample_without_an_image_has_no_crop() -> None:
    assert SquareCrop().image(sample(txt="none"), sp.Rng(0)) is None


def test_settings_are_every_argument() -> None:
    assert SquareCrop(augment=False, exif=False).settings() == {
        "image_size": 224,
        "crop_scale": [0.5, 1.0],
        "augment": False,
        "flip": 0.5,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "decode": "scaled",
        "exif": False,
        "bits": None,
    }


@pytest.mark.parametrize("augment", [False, True])
def test_image_of_16_bits_is_rejected_without_bits_8(augment: bool) -> None:
    values, file = np.full((9, 9), 0x1234, np.uint16), io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    depth = sample(png=file.getvalue())
    with pytest.raises(ValueError, match="Pass bits=8 for v >> 8"):
        SquareCrop(4, augment=augment).image(depth, sp.Rng(0))
    cropped = SquareCrop(4, augment=augment, bits=8).image(depth, sp.Rng(0))
    assert cropped is not None and cropped.unique().tolist() == [0x12]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "at least 1 pixel, not 0"),
        ({"decode": "half"}, "decode must be 'scaled' or 'exact', not 'half'"),
        ({"scale": (0.0, 1.0)}, "0 < least"),
        ({"scale": (0.8, 0.5)}, "0 < least"),
        ({"scale": (5, 6)}, "0 < least"),
        ({"flip": 2}, "and 0 ≤ flip="),
    ],
)
def test_wrong_settings_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SquareCrop(**settings)
