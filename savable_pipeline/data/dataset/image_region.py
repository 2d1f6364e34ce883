"""A region of an image, decoded no larger than is needed: a JPEG at 1/2, 1/4 or 1/8 of its size, by its DCT.

full image     1001 × 701, of which the box (0, 0, 1001, 701) is wanted, at least 400 × 300
decoded        501 × 351 by a half, where the full image takes the box (0, 0, 500.5, 350.5)

Sizes and boxes are of the image as it is shown: turned by its EXIF orientation. Of one mirrored from left to right, the
full image takes the box (0.5, 0, 501, 350.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from savable_pipeline.data.dataset.transparency import Colour, converted
from savable_pipeline.data.shards.orientation import BACK, stored_box, to_be_turned, turned, turned_size

if TYPE_CHECKING:
    from PIL import Image

Size: TypeAlias = tuple[float, float]
"""Width and height, in pixels."""

Box: TypeAlias = tuple[float, float, float, float]
"""Left, upper, right and lower, in pixels of the full image."""

_SCALES = (8, 4, 2)  # the parts of a JPEG's size that Pillow's `draft` decodes


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
