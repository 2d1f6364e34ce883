"""Whether the bytes of a part are what its extension says."""

from __future__ import annotations

import io
import json
import warnings

from PIL import Image, UnidentifiedImageError

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff", "tif", "ppm", "pgm", "pbm")
TEXTS = ("txt", "text", "caption", "md")


def content_fault(extension: str, data: bytes, *, check_images: bool = True) -> str:
    """Why these bytes are not what the extension says, as `reason: detail`; empty if they may be."""
    suffix = extension.lower().rpartition(".")[2]
    if suffix == "json":
        return _json_fault(data)
    return _image_fault(data) if check_images and suffix in IMAGES else ""


def text_fault(extension: str, data: bytes) -> str:
    """Why these bytes are no text where the extension says so, as `reason: detail`; empty if they may be."""
    if extension.lower().rpartition(".")[2] not in TEXTS:
        return ""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"malformed text: {error}"
    return ""


def _json_fault(data: bytes) -> str:
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"malformed JSON: {error}"
    return ""


def _image_fault(data: bytes) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata and of large images: neither keeps one from loading
            with Image.open(io.BytesIO(data)) as image:
                image.load()
    except UnidentifiedImageError:
        return "unreadable image: no format that Pillow knows"
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they like about damaged data
        return f"unreadable image: {str(error) or type(error).__name__}"
    return ""
