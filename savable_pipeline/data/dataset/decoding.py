"""Decodes the parts of a sample by their extension. Nothing is unpickled, and no more is allocated than is there."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from savable_pipeline.core.json_values import decoded_json
from savable_pipeline.data.dataset.images import converted, jpeg_pixels
from savable_pipeline.data.shards.metadata import FieldMap
from savable_pipeline.data.shards.orientation import to_be_turned, turned, turned_pixels
from savable_pipeline.data.shards.part_types import (
    IMAGE_PARTS,
    JSON_PARTS,
    SUBTITLE_PARTS,
    TEXT_PARTS,
    open_image,
    part_type,
)
from savable_pipeline.data.stores.decompressed import MORE, UNPACKED_BYTES, DamagedError, decompressed


def unpacked(extension: str, data: bytes, most: int) -> bytes:
    """The content of a part whose extension ends in `gz`, such as "txt.gz"; any other part as it is.

    Raises ValueError for damage, and for more than `most` bytes.
    """
    if extension[-2:].lower() != "gz" or part_type(extension) != "gz":  # of each part that is decoded: at once
        return data
    try:
        return decompressed(data, "gz", most)
    except DamagedError as error:
        raise ValueError(f"the part {extension} cannot be decompressed: {error}") from error


def decoded_part(extension: str, data: bytes, most: int = UNPACKED_BYTES, *, exif: bool = True) -> Any:
    """A part by the last word of its extension: of "seg.png" an image, turned with `exif`. Raises what they raise.

    What is compressed may become `most` bytes.
    """
    kind = part_type(extension)
    if kind in JSON_PARTS:
        return decoded_json(data)
    if kind in TEXT_PARTS or kind in SUBTITLE_PARTS:
        return data.decode()
    if kind in IMAGE_PARTS:
        opened, orientation = to_be_turned(open_image(data, extension), exif=exif)
        pixels = jpeg_pixels(opened, data)
        if pixels is None:
            return np.array(converted(turned(opened, orientation), "RGB", "white"))
        return turned_pixels(pixels, orientation)
    if kind == "npy":
        return _array(data)
    return _arrays(data, most) if kind == "npz" else data


def _array(data: bytes) -> NDArray[Any]:
    """The array of an `npy` file. Raises ValueError if it holds objects, or less than its header says."""
    file = io.BytesIO(data)
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an npy file of version {version[0]}.{version[1]}; 1.0 and 2.0 are read")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("an npy file of Python objects, which are never unpickled")
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"an npy file of {len(data) - file.tell()} bytes, where {shape} of {dtype} was announced")
    flat = np.frombuffer(data, dtype, count, file.tell()) if count else np.empty(0, dtype)
    return (flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)).copy(order="K")


def _arrays(data: bytes, most: int) -> Mapping[str, NDArray[Any]]:
    """The arrays of an `npz` file, by name. Raises ValueError if what is compressed in it becomes more than `most`."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        inside = [each for each in archive.infolist() if each.filename.endswith(".npy")]
        stored = [each for each in inside if each.compress_type == zipfile.ZIP_STORED]
        deflated = [each for each in inside if each.compress_type == zipfile.ZIP_DEFLATED]
        if len(stored) + len(deflated) < len(inside) or sum(each.file_size for each in stored) > len(data):
            raise ValueError("an npz file that NumPy does not write: of another compression, or of arrays that overlap")
        if (total := sum(each.file_size for each in deflated)) > most:
            raise ValueError(f"an npz file of {total:,} bytes of compressed arrays; at most {most:,} are read: {MORE}")
        return {each.filename.removesuffix(".npy"): _array(_inflated(archive, each)) for each in inside}


def _inflated(archive: zipfile.ZipFile, each: zipfile.ZipInfo) -> bytes:
    """An entry, never more than it announces."""
    with archive.open(each) as file:
        return file.read(each.file_size)


def field_value(sample: Any, fields: FieldMap, name: str) -> Any:
    """A field that `dataset.yaml` names: the bytes of a part, or a value inside its JSON. Raises KeyError."""
    options = fields.get(name)
    if options is None:
        raise KeyError(f"no field {name!r}; the dataset has {', '.join(fields) or 'none; it has no field_map'}")
    for part, *path in options:
        if part in sample:
            value: Any = decoded_json(sample[part]) if path else sample[part]
            for step in path:
                value = value[int(step)] if isinstance(value, list) else value[step]
            return value
    raise KeyError(f"the field {name!r} lies in {[part for part, *_ in options]}; the sample has {list(sample)}")
