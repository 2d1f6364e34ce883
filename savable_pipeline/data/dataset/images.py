"""Images: a region of one, decoded no larger than is needed; alpha over a background; what pixels do not show.

A JPEG is decoded at 1/2, 1/4 or 1/8 of its size, by its DCT:

    full image     1001 × 701, of which the box (0, 0, 1001, 701) is wanted, at least 400 × 300
    decoded        501 × 351 by a half, where the full image takes the box (0, 0, 500.5, 350.5)

Sizes and boxes are of the image as it is shown: turned by its EXIF orientation. Of one mirrored from left to right, the
full image takes the box (0.5, 0, 501, 350.5). A whole JPEG is decoded by simplejpeg where the extra `fast` brought it:
the pixels of Pillow, sooner.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.shards.orientation import (
    BACK,
    UPRIGHT,
    orientation_of,
    stored_box,
    to_be_turned,
    turned,
    turned_size,
)
from savable_pipeline.data.shards.part_types import open_image

if TYPE_CHECKING:
    from PIL import Image


Colour: TypeAlias = str | tuple[int, int, int]
"""A name or `#rrggbb`, as Pillow knows them, or red, green and blue of 0 to 255."""
_MODES = ("RGB", "L")  # of CMYK, Pillow and libjpeg-turbo mean different colours
Size: TypeAlias = tuple[float, float]
"""Width and height, in pixels."""

Box: TypeAlias = tuple[float, float, float, float]
"""Left, upper, right and lower, in pixels of the full image."""

_SCALES = (8, 4, 2)  # the parts of a JPEG's size that Pillow's `draft` decodes
ALPHA, DEEP, TURNED = "alpha", "deep", "turned"


def has_alpha(image: Image.Image) -> bool:
    """Whether pixels of an image may be clear: by an alpha channel, a clear colour, or a palette with either."""
    palette = image.palette
    return (
        image.mode.endswith(("A", "a"))
        or "transparency" in image.info
        or (image.mode == "P" and palette is not None and palette.mode.endswith("A"))
    )


def converted(image: Image.Image, mode: str, background: Colour) -> Image.Image:
    """The image in this mode, decoded; one with alpha is laid over the background, unless the mode has alpha itself."""
    if mode.endswith(("A", "a")) or not has_alpha(image):
        if image.mode != mode:
            return image.convert(mode)
        image.load()  # `convert` would copy it: a tenth of a JPEG's time, at 12 megapixels a third
        return image
    from PIL import Image  # imported here: it takes time and memory

    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert(mode)


def jpeg_pixels(image: Image.Image, data: bytes) -> NDArray[np.uint8] | None:
    """The pixels of a plain JPEG, uint8 (height, width, 3); None if Pillow is to decode it.

    `image` is what Pillow makes of the header of `data`. What is damaged in the least is left to Pillow, so that
    results and errors do not depend on what is installed.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or image.format != "JPEG" or image.mode not in _MODES:
        return None
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=True)
    except ValueError:
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


@cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def image_region(
    image: Image.Image,
    mode: str,
    background: Colour,
    *,
    at_least: Size | Callable[[int, int], Size] | None,
    box: Box | Callable[[int, int], Box] | None,
    exif: bool,
) -> Image.Image:
    """The smallest image of whole pixels that covers the box, of an image not decoded yet; `info["box"]` is its place.

    It has at least `at_least` pixels over the box, unless the full image has fewer. Sizes and boxes are of the full
    image, as its header says; with `exif`, of that image turned. Raises ValueError for a box that is empty or reaches
    beyond the image.
    """
    image, orientation = to_be_turned(image, exif=exif)
    width, height = turned_size(image.size, orientation)
    given = (0, 0, width, height) if box is None else box(width, height) if callable(box) else box
    left, upper, right, lower = _numbers("box", given, 4)
    if not (0 <= left < right <= width and 0 <= upper < lower <= height):
        raise ValueError(f"box={given} is empty or reaches beyond the image of {width} × {height} pixels")
    left, upper, right, lower = stored_box((left, upper, right, lower), (width, height), orientation)
    if at_least is not None:
        wide, high = _numbers("at_least", at_least(width, height) if callable(at_least) else at_least, 2)
        if not min(wide, high) > 0:
            raise ValueError(f"at_least={(wide, high)}: a width and a height above 0, in pixels")
        needed = turned_size((wide, high), orientation)
        across, down = _drafted(image, _scale((right - left, lower - upper), needed))
        left, upper, right, lower = left * across, upper * down, right * across, lower * down
    first, top = math.floor(left), math.floor(upper)
    covering = (first, top, min(math.ceil(right), image.width), min(math.ceil(lower), image.height))
    region = image if covering == (0, 0, *image.size) else image.crop(covering)
    inner = (left - first, upper - top, right - first, lower - top)
    found = converted(turned(region, orientation), mode, background)
    found.info["box"] = stored_box(inner, region.size, BACK[orientation])
    return found


def _numbers(name: str, given: Any, count: int) -> list[float]:
    """These numbers. Raises ValueError unless they are as many."""
    try:
        numbers = [float(number) for number in given]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name}={given!r}: {count} numbers, in pixels")
    return numbers


def _scale(size: Size, needed: Size) -> int:
    """The strongest scale at which a region of this size has the needed pixels still."""
    return next((scale for scale in _SCALES if size[0] >= scale * needed[0] and size[1] >= scale * needed[1]), 1)


def _drafted(image: Image.Image, scale: int) -> tuple[float, float]:
    """Have an image decoded at this part of its size, if its format can; pixels decoded for one of the full image."""
    if scale == 1:
        return 1.0, 1.0
    width, height = image.size
    drafted = image.draft(image.mode, (width // scale, height // scale))
    return (drafted[1][2] / width, drafted[1][3] / height) if drafted else (1.0, 1.0)


def image_doubts(data: bytes) -> list[str]:
    """`ALPHA`, `DEEP` or `TURNED` of the image in a file, which can be decoded; nothing is decoded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata and large images, which load all the same
        with open_image(data) as image:
            return [*_doubts(image)]


def _doubts(image: Image.Image) -> Iterator[str]:
    if has_alpha(image):
        yield ALPHA
    if image.mode.startswith(("I", "F")):
        yield DEEP
    if orientation_of(image) != UPRIGHT:
        yield TURNED
