"""The pixels of a whole JPEG by simplejpeg, where the extra `fast` brought it: those of Pillow, sooner."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

_MODES = ("RGB", "L")  # of CMYK, Pillow and libjpeg-turbo mean different colours


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
