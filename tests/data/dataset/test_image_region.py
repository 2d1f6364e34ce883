"""`sample.image(at_least=, box=)`: a region of an image, decoded no larger than is needed."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from savable_pipeline.data.dataset.sample import Sample
from tests.support.toy_samples import sample

DRAW = np.random.default_rng(0)


def photo(width: int, height: int) -> Image.Image:
    """Smooth colours with a little noise, as photographs are."""
    coarse = DRAW.integers(0, 256, (height // 30 + 2, width // 30 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(smooth + DRAW.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8))


def file_of(image: Image.Image, kind: str = "JPEG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


PHOTO = file_of(photo(1001, 701))
WHOLE = (0, 0, 1001, 701)


def pixels(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image).astype(float)


@pytest.mark.parametrize(
    ("at_least", "size", "box"),
    [
        ((1, 1), (126, 88), (0, 0, 125.125, 87.625)),
        ((125, 87), (126, 88), (0, 0, 125.125, 87.625)),
        ((126, 87), (251, 176), (0, 0, 250.25, 175.25)),
        ((250, 176), (501, 351), (0, 0, 500.5, 350.5)),
        ((400, 300), (501, 351), (0, 0, 500.5, 350.5)),
        ((500.5, 350.5), (501, 351), (0, 0, 500.5, 350.5)),
        ((501, 300), (1001, 701), WHOLE),
        ((3000, 1), (1001, 701), WHOLE),
    ],
)
def test_smallest_sufficient_scale_is_used(at_least: Any, size: Any, box: Any) -> None:
    found = sample(jpg=PHOTO).image(at_least=at_least)
    assert (found.size, found.info["box"], found.mode) == (size, box, "RGB")


@pytest.mark.parametrize(
    ("box", "at_least", "scale"),
    [
        ((100, 60, 500, 360), (50, 37), 8),
        ((100, 60, 500, 360), (50, 38), 4),
        ((101, 61, 502.5, 363.25), (100, 75), 4),
        ((1, 1, 1001, 701), (401, 301), 2),
        ((999, 699, 1001, 701), (1, 1), 2),
        ((100, 60, 500, 360), (300, 200), 1),
        ((100, 60, 500, 360), None, 1),
        ((100.5, 60.25, 500, 360), None, 1),
    ],
)
def test_box_equals_a_crop_of_the_full_image(box: Any, at_least: Any, scale: int) -> None:
    found = sample(jpg=PHOTO).image(at_least=at_least, box=box)
    with Image.open(io.BytesIO(PHOTO)) as whole:
        whole.draft("RGB", (1001 // scale, 701 // scale))
        scaled = [side / scale for side in box]
        cut = [int(np.floor(side)) for side in scaled[:2]] + [int(np.ceil(side)) for side in scaled[2:]]
        assert np.array_equal(pixels(found), pixels(whole.crop(tuple(cut))))  # type: ignore[arg-type]
    assert found.info["box"] == tuple(side - cut[i % 2] for i, side in enumerate(scaled))


def test_resized_scaled_region_is_close_to_the_exact_one() -> None:
    part, box = sample(jpg=PHOTO), (37, 21, 837, 621)
    scaled, exact = part.image(at_least=(100, 75), box=box), part.image(box=box)
    assert scaled.size == (101, 76)
    shown = [
        pixels(each.resize((100, 75), Image.Resampling.BILINEAR, box=each.info["box"])) for each in (scaled, exact)
    ]
    assert np.abs(shown[0] - shown[1]).mean() < 2


def test_functions_get_the_size_in_the_header() -> None:
    given = []

    def half(width: int, height: int) -> tuple[float, float, float, float]:
        given.append((width, height))
        return (0, 0, width / 2, height)

    found = sample(jpg=PHOTO).image(at_least=lambda width, height: (width / 8, height / 4), box=half)
    assert given == [(1001, 701)]
    assert (found.size, found.info["box"]) == ((126, 176), (0, 0, 125.125, 175.25))


def test_unscaled_image_is_unchanged_bit_for_bit() -> None:
    part = sample(jpg=PHOTO)
    assert part.image(at_least=(1001, 351)).tobytes() == part.image().tobytes()
    box = (3, 5, 400, 401)
    assert part.image(at_least=(199, 190), box=box).tobytes() == part.image().crop(box).tobytes()
    assert "box" not in part.image().info


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_other_formats_are_decoded_in_full_and_cropped(kind: str) -> None:
    part = sample({kind.lower(): file_of(photo(90, 70), kind)})
    found = part.image(at_least=(2, 2), box=(10.5, 10, 50, 60))
    assert (found.size, found.info["box"]) == ((40, 50), (0.5, 0, 40, 50))
    assert found.tobytes() == part.image().crop((10, 10, 50, 60)).tobytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"progressive": True},
        {"subsampling": 0},
        {"exif": b"Exif\0\0MM\0*\0\0\0\b\0\1\1\x12\0\3\0\0\0\1\0\1\0\0\0\0\0\0"},
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_kind_of_jpeg_is_scaled(mode: str, settings: dict[str, Any]) -> None:
    part = sample(jpg=file_of(photo(161, 81).convert(mode), **settings))
    whole = part.image()
    assert whole.size == (161, 81)
    scaled = part.image(at_least=(40, 20))
    assert (scaled.size, scaled.info["box"], scaled.mode) == ((41, 21), (0, 0, 40.25, 20.25), "RGB")
    shown = whole.resize((40, 20), Image.Resampling.BILINEAR)
    found = scaled.resize((40, 20), Image.Resampling.BILINEAR, box=scaled.info["box"])
    assert np.abs(pixels(shown) - pixels(found)).mean() < 6
    assert part.image(mode="L", at_least=(40, 20)).mode == "L"


def test_jpeg_with_several_images_yields_the_first() -> None:
    first, second = photo(161, 81), photo(30, 30)
    part = sample(jpg=file_of(first, "MPO", save_all=True, append_images=[second]))
    assert part.image(at_least=(161, 81)).tobytes() == part.image().tobytes()
    assert part.image(at_least=(20, 10)).size == (21, 11)


def test_transparent_pixels_of_a_crop_show_the_background() -> None:
    drawn = photo(40, 30).convert("RGBA")
    drawn.putalpha(Image.linear_gradient("L").resize((40, 30)))
    part = sample(png=file_of(drawn, "PNG"))
    cut = part.image(box=(5, 6, 25, 29), background="lime")
    assert cut.tobytes() == part.image(background="lime").crop((5, 6, 25, 29)).tobytes()
    kept = part.image(mode="RGBA", box=(5, 6, 25, 29))
    assert kept.tobytes() == drawn.crop((5, 6, 25, 29)).tobytes()


def outcome(part: Sample, **needed: Any) -> str:
    """The kind of error; empty where there is none."""
    try:
        part.image(**needed)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("progressive", [False, True])
def test_a_damaged_image_is_an_error_at_every_scale(progressive: bool) -> None:
    whole = file_of(photo(160, 120), progressive=progressive)
    told = []
    for kept in (*range(0, len(whole), len(whole) // 30), len(whole) - 3, len(whole)):
        part = sample(jpg=whole[:kept])
        exact = outcome(part)
        assert {outcome(part, at_least=size, box=(0, 0, 160, 16)) for size in [(1, 1), (40, 4), (160, 16)]} == {exact}
        told.append(exact)
    assert told[0] == UnidentifiedImageError.__name__ and told[-5] == "OSError" and told[-1] == ""


def test_decompression_bomb_is_an_error_at_every_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("savable_pipeline.data.shards.part_types.LARGEST_PIXELS", 1001 * 700)
    with pytest.raises(Image.DecompressionBombError, match="image of 1,001 × 701 pixels, over"):
        sample(jpg=PHOTO).image(at_least=(1, 1))


@pytest.mark.parametrize("box", [(-1, 0, 5, 5), (0, 0, 1001.5, 5), (5, 5, 5, 6), (0, 9, 5, 8), (0, 0, 5, 702)])
def test_a_box_that_is_empty_or_reaches_beyond_the_image_is_rejected(box: Any) -> None:
    with pytest.raises(ValueError, match=r"box=\(.*\) is empty or exceeds the image of 1001 × 701 pixels"):
        sample(jpg=PHOTO).image(box=box)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"at_least": (0, 0)}, r"at_least=\(0.0, 0.0\): expected a width and a height above 0"),
        ({"at_least": (-5, 5)}, "above 0"),
        ({"at_least": 100}, "at_least=100: expected 2 numbers, in pixels"),
        ({"at_least": (1, 2, 3)}, "2 numbers"),
        ({"at_least": (float("nan"), 1)}, "2 numbers"),
        ({"at_least": lambda width, height: None}, "at_least=None: expected 2 numbers"),
        ({"box": ()}, r"box=\(\): expected 4 numbers"),
        ({"box": (0, 0)}, "4 numbers"),
        ({"box": "all"}, "box='all': expected 4 numbers"),
    ],
)
def test_invalid_sizes_and_boxes_are_rejected(how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(jpg=PHOTO).image(**how)


def test_a_box_may_be_an_array() -> None:
    assert sample(jpg=PHOTO).image(box=np.array([1, 2, 11, 22])).size == (10, 20)
