"""Decoding of the parts of a sample by extension.

Nothing is unpickled, and no part allocates more than its own size.

An image may be decoded in part, only as large as needed, with its alpha over a background. A JPEG is decoded at 1/2,
1/4 or 1/8 of its size, by its DCT:

    full image     1001 × 701, of which the box (0, 0, 1001, 701) is needed in at least 400 × 300 pixels
    decoded        501 × 351, at half its size, in which the full image is the box (0, 0, 500.5, 350.5)

Sizes and boxes are those of the image as displayed: turned by its EXIF orientation. If it is mirrored from left to
right, the full image is the box (0.5, 0, 501, 350.5). With the extra `fast`, simplejpeg decodes a whole JPEG faster,
with the same pixels as Pillow.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from savable_pipeline.core.json_values import decoded_json
from savable_pipeline.data.shards.metadata import FieldMap
from savable_pipeline.data.shards.orientation import (
    INVERSE,
    UPRIGHT,
    orientation_of,
    stored_box,
    turned,
    turned_pixels,
    turned_size,
    with_orientation,
)
from savable_pipeline.data.shards.part_types import (
    DEEP_MODES,
    IMAGE_PARTS,
    JSON_PARTS,
    SUBTITLE_PARTS,
    TEXT_PARTS,
    eight_bits,
    is_deep,
    open_image,
    part_type,
)
from savable_pipeline.data.stores.decompressed import MORE, UNPACKED_BYTES, DamagedError, decompressed

if TYPE_CHECKING:
    from PIL import Image

Colour: TypeAlias = str | tuple[int, int, int]
"""A name or `#rrggbb`, as Pillow knows them, or red, green and blue of 0 to 255."""
PixelSize: TypeAlias = tuple[float, float]
"""Width and height, in pixels."""
Box: TypeAlias = tuple[float, float, float, float]
"""Left, upper, right and lower, in pixels of the full image."""

_MODES = ("RGB", "L")  # not CMYK, for which Pillow and libjpeg-turbo have different colors
_DIVISORS = (8, 4, 2)  # divisors of a JPEG's size to which Pillow's `draft` can decode
ALPHA, DEEP, TURNED = "alpha", "deep", "turned"  # warnings: with alpha, over 8 bits, to be rotated by EXIF


def decompress_part(extension: str, data: bytes, max_bytes: int) -> bytes:
    """Decompress a part whose extension ends in `gz`, such as "txt.gz".

    Other parts are returned unchanged.

    Raises ValueError for damage, and for more than `max_bytes` decompressed bytes.
    """
    # the first checks are fast, because this runs for each decoded part
    if extension == "json" or extension[-2:].lower() != "gz" or part_type(extension) != "gz":
        return data
    try:
        return decompressed(data, "gz", max_bytes)
    except DamagedError as error:
        raise ValueError(f"the part {extension} cannot be decompressed: {error}") from error


def decode_part(extension: str, data: bytes, max_bytes: int = UNPACKED_BYTES, *, exif: bool = True) -> Any:
    """Decode a part by the last component of its extension.

    The part "seg.png" is an image, for example. An image is uint8 (height, width, 3), or gray (height, width) if it has
    more bits. With `exif`, it is rotated. Compressed data may decompress to `max_bytes`. Errors of decoders are raised.
    """
    kind = part_type(extension)
    if kind in JSON_PARTS:
        return decoded_json(data)
    if kind in TEXT_PARTS or kind in SUBTITLE_PARTS:
        return data.decode("utf-8-sig")
    if kind in IMAGE_PARTS:
        opened, orientation = with_orientation(open_image(data, extension), exif=exif)
        if (pixels := jpeg_pixels(opened, data)) is None:
            return np.array(convert_image(turned(opened, orientation), None, "white"))
        return turned_pixels(pixels, orientation)
    if kind == "npy":
        return npy_array(data)
    return _npz_arrays(data, max_bytes) if kind == "npz" else data


def npy_array(data: bytes | memoryview) -> NDArray[Any]:
    """Return the array of an `npy` file.

    Raises ValueError if it has Python objects, or fewer bytes than its header says.
    """
    file = io.BytesIO(data)
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version[0]}.{version[1]}, but only 1.0 and 2.0 are supported. Save it again")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("npy file of Python objects, which are never unpickled. Save it as numbers or strings")
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"npy file with {len(data) - file.tell()} bytes for shape {shape} of {dtype}. Save it again")
    flat = np.frombuffer(data, dtype, count, file.tell()) if count else np.empty(0, dtype)
    return (flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)).copy(order="K")


def _npz_arrays(data: bytes, max_bytes: int) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of an `npz` file, by name.

    Raises ValueError if they decompress to more than `max_bytes`.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [each for each in archive.infolist() if each.filename.endswith(".npy")]
        stored = [each for each in entries if each.compress_type == zipfile.ZIP_STORED]
        deflated = [each for each in entries if each.compress_type == zipfile.ZIP_DEFLATED]
        if len(stored) + len(deflated) < len(entries) or sum(each.file_size for each in stored) > len(data):
            raise ValueError("npz file with overlapping arrays or unknown compression. Save it by np.savez")
        if (total := sum(each.file_size for each in deflated)) > max_bytes:
            raise ValueError(f"npz file of {total:,} bytes of compressed arrays, more than {max_bytes:,}. {MORE}")
        return {each.filename.removesuffix(".npy"): npy_array(_read_entry(archive, each)) for each in entries}


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Decompress an entry, up to its declared size."""
    with archive.open(entry) as file:
        return file.read(entry.file_size)


def field_value(sample: Any, fields: FieldMap, name: str) -> Any:
    """Return the field `name` of `dataset.yaml`.

    It is the bytes of a part, or a value inside its JSON. Raises KeyError if the field or its parts are missing.
    """
    if (options := fields.get(name)) is None:
        raise KeyError(f"no field {name!r}; the dataset has {', '.join(fields) or 'no field_map'}")
    for part, *json_path in options:
        if part in sample:
            value: Any = decoded_json(sample[part]) if json_path else sample[part]
            for name_or_index in json_path:
                value = value[int(name_or_index)] if isinstance(value, list) else value[name_or_index]
            return value
    raise KeyError(f"field {name!r} is in {[part for part, *_ in options]}, but the sample has {list(sample)}")


def has_alpha(image: Image.Image) -> bool:
    """Return whether pixels of an image may be transparent.

    That needs an alpha channel, a transparent color, or a palette with either.
    """
    palette = image.palette
    return (
        image.mode.endswith(("A", "a"))
        or "transparency" in image.info
        or (image.mode == "P" and palette is not None and palette.mode.endswith("A"))
    )


def convert_image(image: Image.Image, mode: str | None, background: Colour, bits: int | None = None) -> Image.Image:
    """Decode an image and convert it to a mode of Pillow.

    An image with alpha is composited on the background, unless the mode has alpha itself. `mode` None means RGB, except
    that a gray image of more than 8 bits keeps them, unless `bits` is 8. Raises the errors of `eight_bits`.
    """
    if is_deep(image) and mode not in DEEP_MODES:
        if mode is None and bits is None and image.mode in DEEP_MODES:
            image.load()
            return image.convert("I").convert("I;16") if image.mode == "I;16B" else image
        image = eight_bits(image, bits)
    mode = mode or "RGB"
    if mode.endswith(("A", "a")) or not has_alpha(image):
        if image.mode != mode:
            return image.convert(mode)
        image.load()  # `convert` would copy the image, which takes a tenth to a third of a JPEG's time
        return image
    from PIL import Image  # imported here, because the import takes time and memory

    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert(mode)


def jpeg_pixels(image: Image.Image, data: bytes) -> NDArray[np.uint8] | None:
    """Decode a JPEG with simplejpeg to uint8 (height, width, 3), or return None.

    None means that Pillow must decode it. `image` is what Pillow read from the header of `data`. Pillow decodes all
    damaged files, so results and errors do not depend on installed packages.
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
    mode: str | None,
    background: Colour,
    bits: int | None,
    *,
    at_least: PixelSize | Callable[[int, int], PixelSize] | None,
    box: Box | Callable[[int, int], Box] | None,
    exif: bool,
) -> Image.Image:
    """Decode the smallest image of whole pixels that covers the box.

    `info["box"]` of the result is the position of the box in it.

    The box has at least `at_least` pixels there, unless it has fewer in the full image. `box` and `at_least` refer to
    the full image as stored, or as rotated with `exif`. Raises ValueError for a box that is empty or reaches beyond the
    image.
    """
    image, orientation = with_orientation(image, exif=exif)
    width, height = turned_size(image.size, orientation)
    bounds = (0, 0, width, height) if box is None else box(width, height) if callable(box) else box
    left, upper, right, lower = _finite_floats("box", bounds, 4)
    if not (0 <= left < right <= width and 0 <= upper < lower <= height):
        raise ValueError(f"box={bounds} is empty or exceeds the image of {width} × {height} pixels")
    left, upper, right, lower = stored_box((left, upper, right, lower), (width, height), orientation)
    if at_least is not None:
        minimum = at_least(width, height) if callable(at_least) else at_least
        min_width, min_height = _finite_floats("at_least", minimum, 2)
        if not min(min_width, min_height) > 0:
            raise ValueError(f"at_least={(min_width, min_height)}: expected a width and a height above 0, in pixels")
        needed = turned_size((min_width, min_height), orientation)
        scale_x, scale_y = _apply_draft(image, _divisor((right - left, lower - upper), needed))
        left, upper, right, lower = left * scale_x, upper * scale_y, right * scale_x, lower * scale_y
    first_x, first_y = math.floor(left), math.floor(upper)
    covering = (first_x, first_y, min(math.ceil(right), image.width), min(math.ceil(lower), image.height))
    region = image if covering == (0, 0, *image.size) else image.crop(covering)
    box_in_region = (left - first_x, upper - first_y, right - first_x, lower - first_y)
    region_image = convert_image(turned(region, orientation), mode, background, bits)
    region_image.info["box"] = stored_box(box_in_region, region.size, INVERSE[orientation])
    return region_image


def _finite_floats(name: str, value: Any, count: int) -> list[float]:
    """Return the `count` numbers of a user's argument as floats. Raises ValueError, with its name, for other values."""
    try:
        floats = [float(number) for number in value]
    except (TypeError, ValueError):
        floats = []
    if len(floats) != count or not all(map(math.isfinite, floats)):
        raise ValueError(f"{name}={value!r}: expected {count} numbers, in pixels")
    return floats


def _divisor(size: PixelSize, needed: PixelSize) -> int:
    """Return the largest number by which a region's size can be divided, so that it has the needed pixels."""
    return next((n for n in _DIVISORS if size[0] >= n * needed[0] and size[1] >= n * needed[1]), 1)


def _apply_draft(image: Image.Image, divisor: int) -> tuple[float, float]:
    """Set an image to be decoded at 1/`divisor` of its size, if its format supports that.

    Returns the decoded pixels per pixel of the full image, horizontally and vertically.
    """
    if divisor == 1:
        return 1.0, 1.0
    width, height = image.size
    drafted = image.draft(image.mode, (width // divisor, height // divisor))
    drafted_width, drafted_height = drafted[1][2:] if drafted else (width, height)
    return drafted_width / width, drafted_height / height


def image_warnings(data: bytes) -> list[str]:
    """Return which of `ALPHA`, `DEEP` and `TURNED` apply to a valid image file.

    Nothing is decoded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about odd metadata and large images, which still load
        with open_image(data) as image:
            return [*_warnings_of(image)]


def _warnings_of(image: Image.Image) -> Iterator[str]:
    if has_alpha(image):
        yield ALPHA
    if is_deep(image):
        yield DEEP
    if orientation_of(image) != UPRIGHT:
        yield TURNED
