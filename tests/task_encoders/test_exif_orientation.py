"""Encoders see a photo as EXIF turns it, count its tokens so, and say in a state that they do."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from savable_pipeline.core.rng import Rng
from task_encoders import (
    Buckets,
    ChatEncoder,
    NativeSize,
    SquareCrop,
    Tiles,
    VideoTokens,
    Vision,
)
from task_encoders.parts.sample_parts import ScaledImage
from tests.support.toy_samples import item, png, sample

TILES = [NativeSize(), Tiles(side=112, max_tiles=6), Buckets(max_pixels=112 * 112, min_side=56)]
PHOTO = np.random.default_rng(0).integers(0, 256, (13, 19, 3), dtype=np.uint8)


def photo(orientation: int, kind: str = "PNG", size: tuple[int, int] = (190, 130)) -> bytes:
    """Return a photo with an EXIF orientation."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(PHOTO).resize(size, Image.Resampling.BICUBIC).save(file, kind, exif=exif)
    return file.getvalue()


def rotated(data: bytes) -> bytes:
    """Return the same photo with rotated pixels and no orientation."""
    with Image.open(io.BytesIO(data)) as image:
        return png(np.asarray(ImageOps.exif_transpose(image)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_crops_and_tiles_apply_the_exif_orientation(orientation: int) -> None:
    data = photo(orientation)
    for augment in (True, False):
        crop = SquareCrop(32, augment)
        found, wanted = (crop.image(sample(png=one), Rng(7)) for one in (data, rotated(data)))
        assert found is not None and wanted is not None and torch.equal(found, wanted)
    for tiles in TILES:
        both = [tiles.cut(Vision(tiles, 300).image(sample(png=one), "png")) for one in (data, rotated(data))]
        assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photo_decoded_at_a_quarter_is_rotated_within_a_pixel(
    orientation: int,
) -> None:
    jpeg = photo(orientation, "JPEG", (381, 261))
    tiles = NativeSize(patch=2, merge=2, max_pixels=40 * 40, min_pixels=1)
    assert isinstance(Vision(tiles, 300).image(sample(jpg=jpeg), "jpg"), ScaledImage)
    parts = {"jpg": jpeg, "png": rotated(jpeg)}
    one, other = (tiles.cut(Vision(tiles, 300).image(sample(parts), kind))[0].float() for kind in parts)
    assert (one - other).abs().mean() < 3
    one, other = (SquareCrop(32).image(sample({kind: part}), Rng(7)).float() for kind, part in parts.items())  # type: ignore[union-attr]
    assert (one - other).abs().mean() < 6


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: type(tiles).__name__)
def test_length_from_headers_equals_the_items(tiles: Any) -> None:
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a"}]
    encoder, stored = (
        ChatEncoder(vision=Vision(tiles, 300, exif=exif), video=VideoTokens(301, text="<video>"))
        for exif in (True, False)
    )
    unturned = []
    for orientation in (1, 3, 6, 7):
        given = sample(png=photo(orientation, size=(300, 90)), json={"conversations": turns})
        assert encoder.length_of(given) == encoder.length(item(encoder, given))
        assert stored.length_of(given) is None  # headers say the size that is shown
        unturned.append(item(stored, given)["grids"].tolist())
    assert unturned == unturned[:1] * 4


def test_photo_in_the_text_is_rotated() -> None:
    url = "data:image/png;base64," + base64.b64encode(photo(6)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}
    grids = [
        item(ChatEncoder(vision=Vision(NativeSize(), 300, exif=exif)), sample(json=record))["grids"].tolist()
        for exif in (True, False)
    ]
    assert grids == [[[14, 10]], [[10, 14]]]
