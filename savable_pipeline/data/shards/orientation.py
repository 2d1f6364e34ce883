"""Orientation of an image by EXIF, known before the image is decoded.

Images are turned as by Pillow's `ImageOps.exif_transpose`.

orientation      1    2    3    4    5    6    7    8
stored as shown  ab   ba   dc   cd   ac   ca   db   bd      of  ab  as it is shown:
at the corners   cd   dc   ba   ab   bd   db   ca   ac          cd
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

UPRIGHT = 1
SWAPPED = (5, 6, 7, 8)  # x for y; then mirrored: from left to right, upside down
MIRRORED_X, MIRRORED_Y = (2, 3, 6, 7), (3, 4, 7, 8)
BACK = {orientation: orientation for orientation in range(1, 9)} | {6: 8, 8: 6}
"""The orientation that undoes another."""

_Side = TypeVar("_Side", bound=float)
_TAG = 0x0112
_WIDTH, _HEIGHT = 256, 257  # tags of TIFF
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")  # in which Pillow finds it
_TAIL = 1 << 14  # bytes at the end of a PNG in which EXIF is looked for


def orientation_of(image: Image.Image) -> int:
    """Return the orientation, 1 to 8, in the header of an image.

    It is 1 if there is none, or an unknown one.
    """
    if image.format == "PNG" and "exif" not in image.info and (late := _late_exif(image)):
        image.info["exif"] = b"Exif\0\0" + late
    if image.info.keys().isdisjoint(_METADATA) and image.format != "TIFF":  # most: not even asked
        return UPRIGHT
    from PIL.Image import Image as Base  # here: it takes time and memory

    try:
        found: Any = Base.getexif(image).get(_TAG)  # a PNG's own would decode the image to see what follows its pixels
    except Exception:  # whatever Pillow meets in odd metadata: the image loads all the same
        return UPRIGHT
    return int(found) if found in range(UPRIGHT, 9) else UPRIGHT


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of an image not decoded yet, as it is shown."""
    tags = getattr(image, "tag_v2", None)  # of TIFF: some releases of Pillow have swapped the size already
    return turned_size(image.size if tags is None else (tags[_WIDTH], tags[_HEIGHT]), orientation_of(image))


def turned_size(size: tuple[_Side, _Side], orientation: int) -> tuple[_Side, _Side]:
    """Return width and height of an image of this stored size, turned."""
    return (size[1], size[0]) if orientation in SWAPPED else size


def stored_box(
    box: tuple[float, float, float, float], shown: tuple[int, int], orientation: int
) -> tuple[float, float, float, float]:
    """Where a box of an image that is shown in this size is stored.

    With the orientation that undoes its own and the stored size, where a stored box is shown.
    """
    left, upper, right, lower = box
    if orientation in MIRRORED_X:
        left, right = shown[0] - right, shown[0] - left
    if orientation in MIRRORED_Y:
        upper, lower = shown[1] - lower, shown[1] - upper
    return (upper, left, lower, right) if orientation in SWAPPED else (left, upper, right, lower)


def to_be_turned(image: Image.Image, *, exif: bool) -> tuple[Image.Image, int]:
    """Return the image, and the orientation in which it must be shown.

    An image of TIFF is decoded, and turned already.

    Without `exif`, an image is to be shown as it is stored.
    """
    if not hasattr(image, "tag_v2"):
        return image, orientation_of(image) if exif else UPRIGHT
    orientation = UPRIGHT if exif else orientation_of(image)
    image.load()  # Pillow turns it, whoever asks
    if orientation != UPRIGHT:
        image = image.copy()
        image.getexif()[_TAG] = BACK[orientation]
        image = turned(image, orientation)
    return image, UPRIGHT


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image as it is shown, decoded or not, without its orientation."""
    if orientation == UPRIGHT:
        return image
    from PIL.ImageOps import exif_transpose

    return exif_transpose(image)


def turned_pixels(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The same of stored pixels, uint8 (height, width, 3)."""
    shown = pixels.swapaxes(0, 1) if orientation in SWAPPED else pixels
    right, down = -1 if orientation in MIRRORED_X else 1, -1 if orientation in MIRRORED_Y else 1
    return np.ascontiguousarray(shown[::down, ::right])


def _late_exif(image: Image.Image) -> bytes:
    """The EXIF that some programs write behind the pixels of a PNG; empty without."""
    file = cast(BinaryIO, getattr(image, "fp"))  # noqa: B009  of an image file
    begin = file.tell()
    try:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        tail = file.read(_TAIL)
    finally:
        file.seek(begin)
    at = tail.rfind(b"eXIf")
    if at < 4:  # most
        return b""
    end = at + 4 + int.from_bytes(tail[at - 4 : at], "big")
    whole = zlib.crc32(tail[at:end]) == int.from_bytes(tail[end : end + 4], "big")
    return tail[at + 4 : end] if whole else b""
