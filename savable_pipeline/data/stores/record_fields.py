"""The fields of a record as parts of a sample: values become the part `json`, everything else a part of its own.

    {"image": JPEG, "caption": "a cat", "vector": array}      →      jpg, npy, json: {"caption": "a cat"}

Where two fields would be parts of one name, the second has its field's name before it: `jpg`, `second.jpg`.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from savable_pipeline.core.file_heads import media_of
from savable_pipeline.data.shards.byte_source import ByteSource, RecordError

_MEDIA = frozenset(("jpg", "png", "gif", "flac", "ogg", "mp3", "pdf", "npy", "mkv", "webp", "wav", "avi", "mp4"))
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_NPY_HEADER = 256  # bytes at most, but for arrays of many dimensions
_HEAD = 16


@dataclass(frozen=True, slots=True)
class Value:
    """A field that JSON can hold."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Blob:
    """A field that is a part of its own: its extension, the most bytes that it can have, and how to make them."""

    name: str
    extension: str
    size: int
    load: Callable[[], bytes]


def raw(name: str, extension: str, data: ByteSource) -> Blob:
    """Bytes as they are; with the extension "" they are told by how they begin, else `bin`."""
    return Blob(name, extension or media_of(data.head(_HEAD), _MEDIA), data.size, data.read)


def array(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: ByteSource) -> Blob:
    """An array as `npy`. Raises `RecordError` if the bytes do not fill the shape."""
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != data.size:
        raise RecordError(f"damaged record: {name}: {data.size} bytes for {dtype} of shape {shape}")
    return Blob(name, "npy", data.size + _NPY_HEADER, lambda: npy(np.frombuffer(data.read(), dtype).reshape(shape)))


def scalar(kind: str, data: bytes) -> Any:
    """The number that bytes of this dtype begin with. Raises ValueError and IndexError for too few."""
    return np.frombuffer(data, kind)[0].item()


def pixels(name: str, data: ByteSource) -> Blob:
    """A Pillow image (width, height, length of its mode, mode, rows) as PNG, or TIFF for modes that PNG lacks."""
    width, height, length = data.uint32s(0, 3)
    mode = data.part(12, min(length, 16)).read().decode("ascii", "replace")
    if (width + 7) // 8 * height > data.size:  # before Pillow allocates them
        raise RecordError(f"damaged record: {name}: {data.size} bytes for {width} × {height} pixels")
    extension = "png" if mode in _PNG_MODES else "tif"
    bound = 2 * data.size + height + 4096
    return Blob(
        name,
        extension,
        bound,
        functools.partial(_image, name, extension, mode, (width, height), data.rest(12 + length)),
    )


def _image(name: str, extension: str, mode: str, size: tuple[int, int], data: ByteSource) -> bytes:
    from PIL import Image  # imported here: it takes time and memory

    file = io.BytesIO()
    try:
        Image.frombytes(mode, size, data.read()).save(file, "PNG" if extension == "png" else "TIFF")
    except (ValueError, OSError, SystemError, OverflowError, MemoryError) as error:
        raise RecordError(f"damaged record: {name}: {mode} of {size}: {error}") from error
    return file.getvalue()


def several(name: str, data: ByteSource, make: Callable[[str, ByteSource], Blob], *, begin: int) -> list[Blob]:
    """A list of blobs: their number at `begin`, their sizes, then they: the parts 0.jpg, 1.jpg, …"""
    (count,) = data.uint32s(begin, 1)
    sizes = data.uint32s(begin + 4, count)
    offset = begin + 4 + 4 * count
    blobs = []
    for i, size in enumerate(sizes):
        blob = make(name, data.part(offset, size))
        blobs.append(Blob(name, f"{i}.{blob.extension}", blob.size, blob.load))
        offset += size
    return blobs


def as_json(values: Any) -> bytes:
    """JSON in UTF-8. Raises `RecordError` for what it cannot hold."""
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, UnicodeEncodeError) as error:
        raise RecordError(f"value that JSON cannot hold: {error}") from error


def parts_of(fields: list[Value | Blob]) -> dict[str, Blob]:
    """The parts of a record by extension, sorted. Raises `RecordError`."""
    values = {field.name: field.value for field in fields if isinstance(field, Value)}
    parts: dict[str, Blob] = {}
    if values:
        encoded = as_json(values)
        parts["json"] = Blob("", "json", len(encoded), lambda: encoded)
    for field in fields:
        if isinstance(field, Blob):
            extension = field.extension
            if extension in parts:
                extension = f"{_clean(field.name)}.{extension}"
            if extension in parts:
                raise RecordError(f"two parts with one extension: {extension}")
            parts[extension] = field
    return dict(sorted(parts.items()))


def _clean(name: str) -> str:
    return name.replace(".", "_").replace("/", "_").lstrip("_") or "field"


def npy(values: np.ndarray[Any, Any]) -> bytes:
    """An array in the format of `numpy.save`."""
    file = io.BytesIO()
    np.lib.format.write_array(file, values, allow_pickle=False)
    return file.getvalue()
