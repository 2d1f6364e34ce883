"""Arrays of a batch as entries, and images as thumbnails.

No byte of an image is copied to the page. An image is decoded, and its pixels are encoded again as a small image.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from savable_pipeline.core.named_object import imported
from savable_pipeline.data.dataset.decoding import convert_image, has_alpha
from savable_pipeline.data.shards.orientation import turned, upright_size, with_orientation
from savable_pipeline.data.shards.part_types import IMAGE_FORMATS
from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.preview.page import CardEntry, Thumbnail

_MOST_IMAGES = 16  # images of a field that are shown
_MOST_CLIPS, _MOST_FRAMES = 4, 8  # clips of a field, and frames of each clip, that are shown
_IMAGE_NAMES = ("image", "img", "pixel", "frame", "video", "picture", "tile")
_CHANNELS = (1, 3, 4)
_LEAST_SIDE = 8  # pixels of what may be an image
_MOST_VALUES = 16  # most values that are shown one by one


def as_array(value: Any) -> NDArray[Any] | None:
    """Return an array or a dense tensor of numbers as an array, or None."""
    torch = imported("torch")  # if nothing has imported torch, no value is a tensor
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_complex():
            return None
        plain = value.detach().cpu()
        plain = plain.float() if plain.is_floating_point() and plain.dtype != torch.float64 else plain
        array: NDArray[Any] = plain.numpy()
        return array
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else None


def normalization_of(encoder: TaskEncoder | None) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation by which an encoder normalizes images.

    They are attributes of the encoder, of its `crop` or of its `vision`. If there are none, both are empty.
    """
    for owner in (encoder, getattr(encoder, "crop", None), getattr(encoder, "vision", None)):
        mean, std = getattr(owner, "mean", None), getattr(owner, "std", None)
        if isinstance(mean, tuple | list) and isinstance(std, tuple | list):
            return mean, std
    return (), ()


def array_entry(name: str, value: Any, array: NDArray[Any], encoder: TaskEncoder | None) -> CardEntry:
    """Return the entry of an array: thumbnails if it may be images, else numbers."""
    images = _as_images(name, array)
    if images is None:
        values = _format_values(array)
        return CardEntry(name, describe_array(value, array) + (f": {values}" if values else ""))
    note = describe_array(value, array)
    if array.ndim == 5 and len(images) > _MOST_IMAGES:
        return _clips_entry(name, note, images.reshape(*array.shape[:2], *images.shape[1:]), encoder)
    return images_entry(name, note, list(images[:_MOST_IMAGES]), len(images), encoder)


def _clips_entry(name: str, note: str, clips: NDArray[Any], encoder: TaskEncoder | None) -> CardEntry:
    """Return the entry of `clips`, (clips, frames, height, width, channels).

    It shows frames at equal distances of each of the first clips.
    """
    frames = np.linspace(0, clips.shape[1] - 1, min(_MOST_FRAMES, clips.shape[1])).round().astype(int).tolist()
    shown = [(clip, frame) for clip in range(min(_MOST_CLIPS, len(clips))) for frame in frames]
    entry = images_entry(name, note, [clips[each] for each in shown], clips.shape[0] * clips.shape[1], encoder)
    captions = [f"clip {clip}, frame {frame}" for clip, frame in shown]
    captioned = [replace(image, caption=caption) for image, caption in zip(entry.thumbnails, captions, strict=True)]
    return replace(entry, note=entry.note.replace(", the first ", ", "), thumbnails=captioned)


def images_entry(
    name: str, note: str, images: Sequence[NDArray[Any]], count: int, encoder: TaskEncoder | None
) -> CardEntry:
    """Return the entry of `count` images, of which `images` are shown.

    Each image is (height, width, channels).
    """
    mean, std = normalization_of(encoder)
    thumbnails: list[Thumbnail] = []
    conversion = ""
    for image in images:
        pixels, conversion = as_pixels(image, mean, std)
        thumbnails.append(thumbnail_of_pixels(pixels))
    note += f", shown {conversion}" if conversion else ""
    note += f", the first {len(thumbnails)} of {count:,}" if len(thumbnails) < count else ""
    return CardEntry(name, note, thumbnails=thumbnails)


def tiles_entry(name: str, fields: Mapping[str, Any], encoder: TaskEncoder | None) -> CardEntry | None:
    """Return the entry of the fields `patches` and `grids` as image tiles.

    Returns None if their shapes are not those of tiles.

    `patches` is (n, channels, side, side). `grids` has the numbers of rows and columns of patches of each tile.
    """
    patches, grids = as_array(fields.get("patches")), as_array(fields.get("grids"))
    if patches is None or grids is None or patches.ndim != 4 or grids.ndim != 2 or grids.shape[1] != 2:
        return None
    sizes = grids.prod(axis=1)
    if patches.shape[1] not in _CHANNELS or (grids < 1).any() or int(sizes.sum()) != len(patches):
        return None
    ends = np.cumsum(sizes)
    tiles = [
        _join_tile(patches[end - size : end], int(rows), int(columns))
        for (rows, columns), size, end in zip(grids[:_MOST_IMAGES], sizes, ends, strict=False)
    ]
    return images_entry(name, f"{describe_array(fields['patches'], patches)}, as tiles", tiles, len(grids), encoder)


def _join_tile(patches: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """Join the patches of a tile to one image, (height, width, channels)."""
    channels, height, width = patches.shape[1:]
    arranged = patches.reshape(rows, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    return arranged.reshape(rows * height, columns * width, channels)


def describe_array(value: Any, array: NDArray[Any]) -> str:
    """Return data type, shape, and least and greatest value in words."""
    dtype = str(getattr(value, "dtype", array.dtype)).removeprefix("torch.")
    text = f"{dtype} ({', '.join(map(str, array.shape))}{',' if array.ndim == 1 else ''})"
    if not array.size:
        return f"{text}, empty"
    text += f", {array.min():.6g} to {array.max():.6g}" if array.dtype.kind != "b" else f", {int(array.sum()):,} true"
    not_finite = int((~np.isfinite(array)).sum()) if array.dtype.kind == "f" else 0
    return f"{text}, {not_finite:,} not finite" if not_finite else text


def _format_values(array: NDArray[Any]) -> str:
    """Return the first values of an array of one dimension or none as text, and "" for other arrays."""
    if array.ndim > 1 or not array.size:
        return ""
    more = " …" if array.size > _MOST_VALUES else ""
    return " ".join(f"{value:.6g}" for value in array.reshape(-1)[:_MOST_VALUES].tolist()) + more


def _as_images(name: str, array: NDArray[Any]) -> NDArray[Any] | None:
    """Return an array that may be images as (n, height, width, channels), else None.

    Images are uint8 or floats, with channels first or last, or without channels if `name` is that of an image.
    """
    has_image_name = any(word in name.lower() for word in _IMAGE_NAMES)
    if not array.size or not 3 <= array.ndim <= 5 or (array.dtype != np.uint8 and array.dtype.kind != "f"):
        return None
    if array.ndim > 3 or has_image_name or array.dtype == np.uint8:
        *leading, first, second, third = array.shape
        images = array.reshape(math.prod(leading), first, second, third)
        if first in _CHANNELS and min(second, third) >= _LEAST_SIDE:
            return np.moveaxis(images, 1, -1)
        if third in _CHANNELS and min(first, second) >= _LEAST_SIDE:
            return images
    return array[..., None] if has_image_name and array.ndim == 3 and min(array.shape[1:]) >= _LEAST_SIDE else None


Pixels = NDArray[np.uint8]  # (height, width, 3)

LARGEST_BYTES = 64 << 20  # largest encoded image that is decoded
MOST_PIXELS = 50_000_000
_THUMBNAIL_SIDE = 192  # pixels of the longer side, at most
_PNG_SIDE = 64  # pixels of the longer side, up to which a thumbnail is a PNG with every pixel


def thumbnail_of_file(data: bytes) -> tuple[Thumbnail, str]:
    """Return the thumbnail of an encoded image, and its size and format as text.

    Raises ValueError for an unreadable image.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual metadata and large images
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                width, height = upright_size(image)
                description = f"{width:,} × {height:,} {image.format} {image.mode}"
                description += ", with alpha, on white" if has_alpha(image) else ""
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"not decoded: {description}, more than {MOST_PIXELS:,} pixels")
                return thumbnail_of_pixels(_decode_upright(image)), description
    except UnidentifiedImageError:
        raise ValueError(f"unreadable image: not {', '.join(IMAGE_FORMATS)}") from None
    except Exception as error:  # Pillow's decoders raise many types of errors for damaged data
        text = str(error) or type(error).__name__
        raise ValueError(text if text.startswith("not decoded") else f"unreadable image: {text}") from error


def thumbnail_of_pixels(pixels: Pixels) -> Thumbnail:
    """Return the thumbnail of uint8 (height, width, 3)."""
    image = Image.fromarray(np.ascontiguousarray(pixels), "RGB")
    image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.BOX)
    kind, options = ("PNG", {}) if max(pixels.shape[:2]) <= _PNG_SIDE else ("JPEG", {"quality": 85})
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Thumbnail(
        f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}", image.width, image.height
    )


def stretched(values: NDArray[Any]) -> NDArray[np.float64]:
    """Scale numbers to 0 … 255, from the least to the greatest finite one."""
    finite = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf))
    return (finite - low) * (255 / (high - low) if high > low else 1.0)


def as_pixels(image: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> tuple[Pixels, str]:
    """Convert an image to pixels, and describe the conversion.

    The image is (height, width, channels).

    If `mean` and `std` have a number per channel, floats are un-normalized by them. Otherwise floats within 0 to 1 or
    -1 to 1 are scaled from that range, and others are stretched from their minimum to their maximum.
    """
    step = max(1, max(image.shape[:2]) // (2 * _THUMBNAIL_SIDE))
    image = image[::step, ::step]
    if image.dtype == np.uint8:
        values, conversion = image.astype(np.float64), ""
    elif len(mean) == len(std) == image.shape[2]:
        values = 255 * (np.nan_to_num(image) * np.array(std) + np.array(mean))
        conversion = "with the encoder's mean and std"
    elif image.min() >= 0 and image.max() <= 1:
        values, conversion = 255.0 * image, "0 to 1"
    elif image.min() >= -1 and image.max() <= 1:
        values, conversion = 127.5 * (image + 1.0), "-1 to 1"
    else:
        values, conversion = stretched(image), "stretched to their range"
    pixels = np.clip(values, 0, 255).astype(np.uint8)
    rgb = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
    return rgb, conversion


def _decode_upright(image: Image.Image) -> Pixels:
    """Decode an image as RGB, turned upright; images of more than 8 bits are stretched to grey."""
    if image.mode.startswith(("I", "F")):  # more than 8 bits per channel, which a conversion would clip
        grey = stretched(np.asarray(image)).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    image, orientation = with_orientation(image, exif=True)
    image.draft("RGB", (2 * _THUMBNAIL_SIDE, 2 * _THUMBNAIL_SIDE))  # a JPEG is decoded at a reduced size
    return np.asarray(convert_image(turned(image, orientation), "RGB", "white"))
