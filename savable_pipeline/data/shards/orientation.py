"""Orientation of an image by EXIF, known before the image is decoded.

Images are turned as by Pillow's `ImageOps.exif_transpose`.

orientation      1    2    3    4    5    6    7    8
stored pixels    ab   ba   dc   cd   ac   ca   db   bd      of an image that is displayed as   ab
                 cd   dc   ba   ab   bd   db   ca   ac                                         cd
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

UPRIGHT = 1
SWAPPED = (5, 6, 7, 8)  # orientations that swap width and height
MIRRORED_X, MIRRORED_Y = (2, 3, 6, 7), (3, 4, 7, 8)
INVERSE = {orientation: orientation for orientation in range(1, 9)} | {6: 8, 8: 6}
"""By orientation, the one that undoes it."""

_Side = TypeVar("_Side", bound=float)
_TAG = 0x0112
_WIDTH, _HEIGHT = 256, 257  # tags of TIFF
# keys of `image.info` from which Pillow reads EXIF
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
_TAIL = 1 << 14  # last bytes of a PNG to search for EXIF


def orientation_of(image: Image.Image) -> int:
    """Return the orientation, 1 to 8, in the header of an image.

    It is 1 if the header has none, or an unknown one.
    """
    if image.format == "PNG" and "exif" not in image.info and (data := _exif_after_pixels(image)):
        image.info["exif"] = b"Exif\0\0" + data
    # true for most images, and saves the import below
    if image.info.keys().isdisjoint(_METADATA) and image.format != "TIFF":
        return UPRIGHT
    from PIL.Image import Image as Base  # imported here, because the import takes time and memory

    try:
        # the class's own `getexif`, because a PNG's would decode the image to read metadata after the pixels
        found: Any = Base.getexif(image).get(_TAG)
    except Exception:  # Pillow may raise anything for odd metadata, but still load the image
        return UPRIGHT
    return int(found) if found in range(UPRIGHT, 9) else UPRIGHT


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an undecoded image, as displayed."""
    tags = getattr(image, "tag_v2", None)  # for TIFF, some releases of Pillow have already swapped the size
    return turned_size(image.size if tags is None else (tags[_WIDTH], tags[_HEIGHT]), orientation_of(image))


def turned_size(size: tuple[_Side, _Side], orientation: int) -> tuple[_Side, _Side]:
    """Return the displayed width and height of an image of this stored size.

    It also returns the stored ones for the displayed size.
    """
    return (size[1], size[0]) if orientation in SWAPPED else size


def stored_box(
    box: tuple[float, float, float, float], shown: tuple[int, int], orientation: int
) -> tuple[float, float, float, float]:
    """Return where a box of the displayed image is in the stored image.

    `shown` is the size of the displayed image. With the inverse orientation and the stored size, return where a box of
    the stored image is displayed.
    """
    left, upper, right, lower = box
    if orientation in MIRRORED_X:
        left, right = shown[0] - right, shown[0] - left
    if orientation in MIRRORED_Y:
        upper, lower = shown[1] - lower, shown[1] - upper
    return (upper, left, lower, right) if orientation in SWAPPED else (left, upper, right, lower)


def with_orientation(image: Image.Image, *, exif: bool) -> tuple[Image.Image, int]:
    """Return the image, and the orientation by which it must still be turned.

    A TIFF image is returned decoded and turned. Without `exif`, the orientation is ignored and 1 is returned.
    """
    if not hasattr(image, "tag_v2"):
        return image, orientation_of(image) if exif else UPRIGHT
    orientation = UPRIGHT if exif else orientation_of(image)
    image.load()  # Pillow turns TIFF images when it loads them
    if orientation != UPRIGHT:
        image = image.copy()
        image.getexif()[_TAG] = INVERSE[orientation]
        image = turned(image, orientation)
    return image, UPRIGHT


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image as displayed, without its orientation tag."""
    if orientation == UPRIGHT:
        return image
    from PIL.ImageOps import exif_transpose

    return exif_transpose(image)


def turned_pixels(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return stored pixels, uint8 (height, width, 3), as displayed."""
    shown = pixels.swapaxes(0, 1) if orientation in SWAPPED else pixels
    step_x = -1 if orientation in MIRRORED_X else 1
    step_y = -1 if orientation in MIRRORED_Y else 1
    return np.ascontiguousarray(shown[::step_y, ::step_x])


def _exif_after_pixels(image: Image.Image) -> bytes:
    """Return the EXIF that some programs write after the pixels of a PNG, or b""."""
    file = cast(BinaryIO, getattr(image, "fp"))  # noqa: B009  of an image file
    position = file.tell()
    try:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        tail = file.read(_TAIL)
    finally:
        file.seek(position)
    start = tail.rfind(b"eXIf")  # a chunk is its length, its type, its data, and a checksum of type and data
    if start < 4:  # true for most images
        return b""
    end = start + 4 + int.from_bytes(tail[start - 4 : start], "big")
    is_intact = zlib.crc32(tail[start:end]) == int.from_bytes(tail[end : end + 4], "big")
    return tail[start + 4 : end] if is_intact else b""
