"""Thumbnails: images of a dataset and tensors of a batch, as small images of which we encode every byte.

No byte of a dataset is copied to the page: an image is decoded, and only its pixels are encoded again.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from savable_pipeline.data.dataset.transparency import converted, has_alpha
from savable_pipeline.data.shards.part_types import IMAGE_FORMATS
from savable_pipeline.tools.preview.page_model import Thumbnail

Pixels = NDArray[np.uint8]  # (height, width, 3)

LARGEST_BYTES = 64 << 20  # of an encoded image that is looked at
LARGEST_PIXELS = 50_000_000
_SIDE = 192  # pixels, at most
_SMALL = 64  # up to here PNG keeps every pixel at little cost


def thumbnail_of_file(data: bytes) -> tuple[Thumbnail, str]:
    """The thumbnail of an encoded image, and its size and kind in words. Raises ValueError for an unreadable image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata and of large images
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                about = f"{image.width:,} × {image.height:,} {image.format} {image.mode}"
                about += ", with alpha, on white" if has_alpha(image) else ""
                if image.width * image.height > LARGEST_PIXELS:
                    raise ValueError(f"not decoded: {about}, more than {LARGEST_PIXELS:,} pixels")
                return thumbnail_of_pixels(_decoded(image)), about
    except UnidentifiedImageError:
        raise ValueError("unreadable image: no format that is shown") from None
    except Exception as error:  # Pillow's decoders raise whatever they like about damaged data
        text = str(error) or type(error).__name__
        raise ValueError(text if text.startswith("not decoded") else f"unreadable image: {text}") from error


def thumbnail_of_pixels(pixels: Pixels) -> Thumbnail:
    """The thumbnail of uint8 (height, width, 3), encoded anew."""
    image = Image.fromarray(np.ascontiguousarray(pixels), "RGB")
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
    kind, options = ("PNG", {}) if max(pixels.shape[:2]) <= _SMALL else ("JPEG", {"quality": 85})
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Thumbnail(
        f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}", image.width, image.height
    )


def stretched(values: NDArray[Any]) -> NDArray[np.float64]:
    """Any numbers as 0 to 255, from the least to the greatest finite one."""
    finite = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf))
    return (finite - low) * (255 / (high - low) if high > low else 1.0)


def as_pixels(image: NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> tuple[Pixels, str]:
    """An image (height, width, channels) of any numbers as pixels, and how it was taken, in words.

    Floats are un-normalized by `mean` and `std` where these are as many as it has channels; else they are taken as
    0 to 1 or -1 to 1 if they lie there, and stretched to their range if not.
    """
    step = max(1, max(image.shape[:2]) // (2 * _SIDE))
    image = image[::step, ::step]
    if image.dtype == np.uint8:
        values, how = image.astype(np.float64), ""
    elif len(mean) == len(std) == image.shape[2]:
        values, how = 255 * (np.nan_to_num(image) * np.array(std) + np.array(mean)), "with the encoder's mean and std"
    elif image.min() >= 0 and image.max() <= 1:
        values, how = 255.0 * image, "0 to 1"
    elif image.min() >= -1 and image.max() <= 1:
        values, how = 127.5 * (image + 1.0), "-1 to 1"
    else:
        values, how = stretched(image), "stretched to their range"
    pixels = np.clip(values, 0, 255).astype(np.uint8)
    return (np.repeat(pixels[:, :, :1], 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]), how


def _decoded(image: Image.Image) -> Pixels:
    if image.mode.startswith(("I", "F")):  # more than 8 bits a pixel: converting would cut them off
        grey = stretched(np.asarray(image)).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    image.draft("RGB", (2 * _SIDE, 2 * _SIDE))  # a JPEG is decoded at about the size that is wanted
    return np.asarray(converted(image, "RGB", "white"))
