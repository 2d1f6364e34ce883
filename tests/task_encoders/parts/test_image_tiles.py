"""Tiles of images of any shape, against the models' own code, which only its tests import; and their patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from task_encoders.parts.image_tiles import Buckets, ImageTiles, NativeSize, SplitTiles, Tiles

sides = st.integers(1, 3000)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 36, 3), dtype=np.uint8))


@settings(deadline=None)
@given(width=sides, height=sides)
def test_native_sizes_equal_qwen2_vls(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assume(max(width, height) <= 200 * min(width, height))
    expected = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=1280 * 784)
    assert NativeSize().size(width, height) == expected[::-1]


@settings(deadline=None)
@given(width=sides, height=sides, tiles=st.sampled_from([(1, 12), (2, 6), (1, 1), (3, 3)]))
def test_tile_grids_equal_internvls(width: int, height: int, tiles: tuple[int, int]) -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    few, many = tiles
    expected = get_optimal_tiled_canvas((height, width), (448, 448), few, many)
    assert Tiles(min_tiles=few, max_tiles=many).grid(width, height) == expected


@settings(deadline=None)
@given(width=st.integers(1, 90), height=st.integers(1, 90))
@example(width=13, height=29)  # of which rounding makes a box that starts 2e-15 above the image
@pytest.mark.parametrize(
    "tiles",
    [
        NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=400),
        Buckets(patch=2, merge=2, max_pixels=400, min_side=8, max_side=48),
        Tiles(patch=2, merge=2, side=8, max_tiles=4),
        SplitTiles(patch=2, merge=2, side=9, long_side=32),
    ],
)
def test_patches_and_tokens_follow_from_the_grids(tiles: ImageTiles, width: int, height: int) -> None:
    patches, grids = tiles.cut(Image.new("RGB", (width, height)))
    assert patches.shape == (int(grids.prod(1).sum()), 3, 2, 2)
    assert tiles.tokens(grids) == len(patches) // 4
    assert not (grids % 2).any()


def test_patches_are_the_pixels_row_by_row() -> None:
    tiles = NativeSize(patch=2, merge=2, min_pixels=1)
    patches, grids = tiles.cut(NOISE)  # as large as it was
    assert grids.tolist() == [[10, 18]]
    pixels = np.asarray(NOISE)
    assert np.array_equal(patches[18 * 3 + 5].numpy(), pixels[6:8, 10:12].transpose(2, 0, 1))


def test_tiles_are_in_row_order_followed_by_the_whole_image() -> None:
    shades = [[[10], [20]], [[30], [40]]]
    pixels = np.broadcast_to(np.kron(shades, np.ones((8, 8, 1))), (16, 16, 3)).astype(np.uint8)
    patches, grids = Tiles(patch=4, merge=1, side=8, min_tiles=4, max_tiles=4).cut(Image.fromarray(pixels))
    assert grids.tolist() == [[2, 2]] * 5
    of_tiles = patches.view(5, -1)
    assert of_tiles[:4].amin(1).tolist() == of_tiles[:4].amax(1).tolist() == [10, 20, 30, 40]
    assert of_tiles[4].float().mean() == pytest.approx(25, abs=1)


def test_buckets_have_similar_areas_and_an_image_uses_the_nearest_aspect() -> None:
    buckets = Buckets(patch=2, merge=2, max_pixels=256, min_side=8, max_side=32)
    narrow = [(8, 24), (8, 28), (8, 32), (12, 20)]
    assert buckets.shapes() == [*narrow, (16, 16), (20, 12), (24, 8), (28, 8), (32, 8)]
    (tile,) = buckets.tiles(Image.fromarray(np.asarray(NOISE)[:, :33]))
    assert tile.size == (20, 12)
    (exact,) = buckets.tiles(NOISE.crop((2, 4, 18, 20)))
    assert np.array_equal(np.asarray(exact), np.asarray(NOISE)[4:20, 2:18])
    wide = np.zeros((8, 48, 3), np.uint8)
    wide[:, 8:40] = 200  # what juts out on both sides is black
    (cropped,) = buckets.tiles(Image.fromarray(wide))
    assert np.asarray(cropped).min() == 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NativeSize(patch=0), "patch=0, merge=2: both must be at least 1"),
        (lambda: NativeSize(min_pixels=9, max_pixels=8), "found 9 and 8"),
        (lambda: Tiles(side=440), "440 pixels are 31 patches of 14, not a multiple of merge=2"),
        (lambda: SplitTiles(side=13), "13 pixels are 0 patches of 14"),
        (lambda: SplitTiles(side=448, long_side=5000), "long_side must be 1 to 4096 pixels, not 5000"),
        (lambda: Tiles(min_tiles=3, max_tiles=2), "min_tiles ≤ max_tiles, not 3 and 2"),
        (lambda: Buckets(min_side=900), "from 900 to 672 have at most"),
        (lambda: NativeSize().size(2010, 10), "2010 × 10 pixels: one side is over 200 times"),
    ],
)
def test_impossible_settings_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_distinguish_the_three_classes_and_all_arguments() -> None:
    assert NativeSize(max_pixels=10_000).settings() == {
        "tiles": "NativeSize",
        "patch": 14,
        "merge": 2,
        "min_pixels": 3136,
        "max_pixels": 10_000,
    }
    assert set(Tiles().settings()) == {"tiles", "patch", "merge", "side", "min_tiles", "max_tiles", "thumbnail"}
    assert SplitTiles(merge=4).settings() == {
        "tiles": "SplitTiles",
        "patch": 14,
        "merge": 4,
        "side": 512,
        "long_side": 2048,
    }
    assert set(Buckets().settings()) == {"tiles", "patch", "merge", "max_pixels", "min_side", "max_side"}
