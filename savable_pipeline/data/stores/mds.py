"""MDS, the shards of Mosaic Streaming: index.json names them and their columns; each sample is

    size uint32, of each column without a size of its own │ column │ column │ …

(version 2 of the format, from its facts). MdsColumns of pickles are refused: unpickling runs what the data name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.data.shards.byte_source import ByteSource, RecordError
from savable_pipeline.data.stores.record_files import (
    INSTEAD,
    Blob,
    ListedFile,
    RecordKind,
    Value,
    array,
    as_listed,
    format_of_kind,
    pixels,
    raw,
    scalar,
    several,
)

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_PACKED = {"gz": "gz", "bz2": "bz2", "zstd": "zst"}  # its compressions, as called here


class _FileInfo(msgspec.Struct):
    basename: str
    bytes: int
    hashes: dict[str, str] = {}  # of the file's bytes, by algorithm


class _Shard(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    samples: int
    raw_data: _FileInfo
    zip_data: _FileInfo | None = None
    compression: str | None = None
    version: int = 2


class _Index(msgspec.Struct):
    shards: list[_Shard]


class MdsColumns(msgspec.Struct, frozen=True):
    """The `Schema` of an MDS shard."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    each: str = ""  # how each sample is compressed by itself: never

    def fields(self, record: ByteSource) -> list[Value | Blob]:
        """The columns of a sample. Raises `RecordError`."""
        told = sum(not size for size in self.sizes)
        lengths, offset = iter(record.uint32s(0, told)), 4 * told
        found: list[Value | Blob] = []
        for name, encoding, fixed in zip(self.names, self.encodings, self.sizes, strict=True):
            size = fixed or next(lengths)
            found += _column(name, encoding, record.part(offset, size))
            offset += size
        return found


def listed(index: bytes) -> list[tuple[ListedFile, ...]]:
    """The files that an index.json names, each as it is, else compressed. Raises ValueError for what is not read."""
    shards = as_listed(index, _Index, "MDS").shards
    return [_alternatives(shard) for shard in shards]


def _alternatives(shard: _Shard) -> tuple[ListedFile, ...]:
    schema = msgspec.json.encode(_columns(shard))
    raw, zipped = shard.raw_data, shard.zip_data
    plain = ListedFile(raw.basename, shard.samples, schema, raw.bytes, hashes=raw.hashes)
    if zipped is None:
        return (plain,)
    kind = (shard.compression or "").partition(":")[0]
    packed = ListedFile(
        zipped.basename,
        shard.samples,
        schema,
        zipped.bytes,
        packed=_PACKED.get(kind, ""),
        content=raw.bytes,
        hashes=zipped.hashes,
        fault=""
        if kind in _PACKED
        else f"compressed with {kind!r}, which is not read, where {', '.join(_PACKED)} are: write it again with "
        f'compression="zstd", or decompress it to {plain.name} and keep both names in index.json',
    )
    return plain, packed


def _columns(shard: _Shard) -> MdsColumns:
    if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes) or shard.version != 2:
        raise ValueError(f"version {shard.version} of MDS, or damaged: names, encodings and sizes do not fit")
    for name, encoding in zip(shard.column_names, shard.column_encodings, strict=True):
        if encoding == "pkl":
            raise ValueError(f"the column {name!r} holds pickles, and unpickling runs what they name: {INSTEAD}")
        if encoding.partition(":")[0] not in _KNOWN:
            raise ValueError(f"the column {name!r} has the encoding {encoding!r}, which is not read: {INSTEAD}")
    return MdsColumns(tuple(shard.column_names), tuple(shard.column_encodings), tuple(shard.column_sizes))


def _column(name: str, encoding: str, data: ByteSource) -> list[Value | Blob]:
    kind, _, settings = encoding.partition(":")
    if kind in _MEDIA:
        return list(_MEDIA[kind](name, data))
    if kind == "ndarray":
        return [_array(name, settings, data)]
    try:
        return [Value(name, _VALUES[kind](data.read()))]
    except (ValueError, IndexError, RecursionError, InvalidOperation) as error:
        raise RecordError(f"damaged record: {name} is no {encoding}: {error}") from error


def _array(name: str, settings: str, data: ByteSource) -> Blob:
    """An array whose type and shape are in the encoding, `ndarray:float32:2,3`, or before its values."""
    kind, _, dimensions = settings.partition(":")
    offset = 0
    try:
        if not kind:
            kind = _CODES[data.head(1)[0]]
            offset = 1
        if dimensions:
            shape = tuple(int(size) for size in dimensions.split(","))
        else:
            code = data.part(offset, 1).read()[0]
            count, width = code >> 2, 1 << code % 4
            shape_bytes = data.part(offset + 1, count * width).read()
            shape = tuple(np.frombuffer(shape_bytes, f"<u{width}").tolist())
            offset += 1 + count * width
        return array(name, np.dtype(kind), shape, data.rest(offset))
    except RecordError:
        raise
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise RecordError(f"damaged record: {name} is no array: {error}") from error


_VALUES: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "json": json.loads,
    "int": functools.partial(scalar, "<i8"),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: str(Decimal(data.decode())),  # a text: JSON has no decimals of any precision
    **{kind: functools.partial(scalar, kind) for kind in _SCALARS},
}
_jpeg = functools.partial(lambda name, data: raw(name, "jpg", data))
_png = functools.partial(lambda name, data: raw(name, "png", data))
_MEDIA: dict[str, Callable[[str, ByteSource], list[Blob]]] = {
    "bytes": lambda name, data: [raw(name, "", data)],
    "jpeg": lambda name, data: [_jpeg(name, data)],
    "png": lambda name, data: [_png(name, data)],
    "pil": lambda name, data: [pixels(name, data)],
    "jpeg_array": lambda name, data: several(name, data, _jpeg, begin=0),
    "jpegarray": lambda name, data: several(name, data, _jpeg, begin=0),
    "list[jpeg]": lambda name, data: several(name, data, _jpeg, begin=4),
    "list[png]": lambda name, data: several(name, data, _png, begin=4),
    "list[pil]": lambda name, data: several(name, data, pixels, begin=4),
}
_KNOWN = {*_VALUES, *_MEDIA, "ndarray"}


RECORDS_OF_MDS = RecordKind(listed, MdsColumns)
MDS = format_of_kind("mds", (".mds", *(f".mds.{kind}" for kind in _PACKED)), RECORDS_OF_MDS, f"{__name__}:MDS")
