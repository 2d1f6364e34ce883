"""`Vision.image`: an image is decoded no larger than its tiles need it; as many tiles, of the same sizes."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from task_encoders.parts.image_tiles import Buckets, ImageTiles, NativeSize, SplitTiles, Tiles
from task_encoders.parts.sample_parts import ScaledImage
from task_encoders.parts.vision import Vision
from tests.support.toy_samples import sample

TILES = [
    NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=400),
    Buckets(patch=2, merge=2, max_pixels=400, min_side=8, max_side=48),
    Tiles(patch=2, merge=2, side=8, max_tiles=4),
    SplitTiles(patch=2, merge=2, side=8, long_side=24),
]
SIZES = [(16, 16), (37, 23), (41, 160), (67, 66), (129, 200), (201, 141), (300, 31), (17, 400)]


def jpeg(width: int, height: int) -> bytes:
    """Return a smooth image as a JPEG."""
    draw, file = np.random.default_rng(0), io.BytesIO()
    coarse = draw.integers(0, 256, (height // 30 + 2, width // 30 + 2, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: type(tiles).__name__)
def test_tiles_of_a_scaled_image_have_equal_number_size_and_contents(tiles: ImageTiles, size: tuple[int, int]) -> None:
    given = sample(jpg=jpeg(*size))
    image = Vision(tiles, token=1).image(given, "jpg")
    patches, grids = tiles.cut(image)
    exact_patches, exact_grids = tiles.cut(Vision(tiles, token=1, decode="exact").image(given, "jpg"))
    assert (image.width, image.height) == size
    assert torch.equal(grids, exact_grids)
    if isinstance(image, ScaledImage):
        assert image.pixels.width < size[0]
        assert (patches.float() - exact_patches.float()).abs().mean() < 3
    else:
        assert torch.equal(patches, exact_patches)


def test_image_is_decoded_smaller_exactly_if_half_its_size_suffices() -> None:
    vision = Vision(NativeSize(patch=14, merge=2, max_pixels=112 * 112), token=1)
    decoded = [vision.image(sample(jpg=jpeg(side, side)), "jpg") for side in (223, 224, 447, 448)]
    assert [each.pixels.size if isinstance(each, ScaledImage) else each.size for each in decoded] == [
        (223, 223),
        (112, 112),
        (224, 224),
        (112, 112),
    ]


def test_box_of_the_full_image_maps_to_its_pixels_also_for_odd_sides() -> None:
    given = sample(jpg=jpeg(1001, 701))
    pixels = given.image(at_least=(400, 300))
    image = ScaledImage(1001, 701, pixels)
    assert pixels.size == (501, 351)
    resized = image.resize((20, 10), Image.Resampling.BICUBIC, box=(100, 50, 1001, 701))
    expected = pixels.resize((20, 10), Image.Resampling.BICUBIC, box=(50, 25, 500.5, 350.5))
    assert resized.tobytes() == expected.tobytes()
    whole = image.resize((20, 10), Image.Resampling.BICUBIC)
    assert whole.tobytes() == pixels.resize((20, 10), Image.Resampling.BICUBIC, box=(0, 0, 500.5, 350.5)).tobytes()


class Halves(ImageTiles):
    """A user's tiles that do not support images decoded smaller."""

    def tiles(self, image: Image.Image) -> list[Image.Image]:
        left, right = image.crop((0, 0, 28, 28)), image.crop((28, 0, 56, 28))
        return [left, right]


def test_users_tiles_get_the_full_image() -> None:
    image = Vision(Halves(), token=1).image(sample(jpg=jpeg(500, 400)), "jpg")
    assert isinstance(image, Image.Image) and image.size == (500, 400)
    assert Halves().cut(image)[1].tolist() == [[2, 2], [2, 2]]


@dataclass(frozen=True)
class Gray(NativeSize):
    """A user's tiles that add Pillow's methods to those of `NativeSize`."""

    def tiles(self, image: Image.Image | ScaledImage) -> list[Image.Image]:
        assert isinstance(image, Image.Image)
        return super().tiles(image.convert("L").convert("RGB"))


def test_tiles_subclass_without_scaling_gets_the_full_image() -> None:
    small = Gray(max_pixels=56 * 56)
    image = Vision(small, token=1).image(sample(jpg=jpeg(500, 400)), "jpg")
    assert isinstance(image, Image.Image) and image.size == (500, 400)
    assert small.cut(image)[1].tolist() == NativeSize(max_pixels=56 * 56).cut(image)[1].tolist()


def test_image_rejected_by_tiles_is_still_decoded() -> None:
    """The error is that of the tiles, when they are cut."""
    image = Vision(NativeSize(), token=1).image(sample(jpg=jpeg(2010, 10)), "jpg")
    with pytest.raises(ValueError, match="one side is over 200 times"):
        NativeSize().cut(image)


def test_a_wrong_decoding_is_rejected() -> None:
    with pytest.raises(ValueError, match="decode must be 'scaled' or 'exact', not 'fast'"):
        Vision(NativeSize(), token=1, decode="fast")  # type: ignore[arg-type]
