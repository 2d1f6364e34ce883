"""What the header of an image says that its decoded pixels do not show: alpha, more than 8 bits, a turn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from savable_pipeline.data.dataset.transparency import has_alpha
from savable_pipeline.data.shards.orientation import UPRIGHT, orientation_of
from savable_pipeline.data.shards.part_types import open_image

if TYPE_CHECKING:
    from PIL import Image

ALPHA, DEEP, TURNED = "alpha", "deep", "turned"


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
