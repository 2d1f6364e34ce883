"""Folders with an index.json: MDS of Mosaic Streaming, and LitData.

    MDS, version 2    size uint32 of each column without a fixed size │ column │ column │ …
    LitData           size uint32 of each leaf │ leaf │ leaf │ …

`data_spec` says where each leaf of LitData is in the dicts and lists of an item.
Columns and leaves of pickles are rejected, because unpickling runs code from the data.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import msgspec
import numpy as np

from savable_pipeline.data.shards.byte_source import ByteSource, RecordError
from savable_pipeline.data.stores.record_files import (
    INSTEAD,
    Blob,
    ListedFile,
    RecordKind,
    Value,
    array_blob,
    bytes_blob,
    decode_index,
    first_number,
    format_of_kind,
    image_blob,
    numbered_blobs,
)
from savable_pipeline.data.stores.record_folder_store import RecordFolderStore

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# decodes the name, the setting and the bytes of a field
_Decode: TypeAlias = Callable[[str, str, ByteSource], Sequence[Value | Blob]]
_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_PACKED = {"gz": "gz", "bz2": "bz2", "zstd": "zst"}  # MDS's name of a compression: our name


class _FileInfo(msgspec.Struct):
    basename: str
    bytes: int
    hashes: dict[str, str] = {}  # hashes of the file's bytes, by algorithm


class _Shard(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    samples: int
    raw_data: _FileInfo
    zip_data: _FileInfo | None = None
    compression: str | None = None
    version: int = 2


class _Shards(msgspec.Struct):
    shards: list[_Shard]


class MdsColumns(msgspec.Struct, frozen=True):
    """`Schema` of an MDS shard."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    each: str = ""  # compression of single samples, which MDS does not have

    def fields(self, record: ByteSource) -> list[Value | Blob]:
        """Return the columns of a sample. Raises `RecordError`."""
        unsized = sum(not size for size in self.sizes)
        lengths, offset = iter(record.uint32s(0, unsized)), 4 * unsized
        found: list[Value | Blob] = []
        for name, encoding, fixed in zip(self.names, self.encodings, self.sizes, strict=True):
            size = fixed or next(lengths)
            found += _field(_COLUMN_DECODERS, name, encoding, record.part(offset, size))
            offset += size
        return found


def _listed_shards(index: bytes) -> list[tuple[ListedFile, ...]]:
    """Return the files in an index.json: each shard uncompressed, then its compressed form if any.

    Raises ValueError for unsupported settings.
    """
    shards = decode_index(index, _Shards, "MDS").shards
    return [_forms_of_shard(shard) for shard in shards]


def _forms_of_shard(shard: _Shard) -> tuple[ListedFile, ...]:
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
        raise ValueError(f"version {shard.version} of MDS, or damaged: names, encodings and sizes do not match")
    for name, encoding in zip(shard.column_names, shard.column_encodings, strict=True):
        if encoding == "pkl":
            raise ValueError(f"the column {name!r} has pickles, which could run code. {INSTEAD}")
        if encoding.partition(":")[0] not in _COLUMN_DECODERS:
            raise ValueError(f"the column {name!r} has the encoding {encoding!r}, which is not supported. {INSTEAD}")
    return MdsColumns(tuple(shard.column_names), tuple(shard.column_encodings), tuple(shard.column_sizes))


def _array(name: str, settings: str, data: ByteSource) -> list[Value | Blob]:
    """Decode an array whose type and shape are in the encoding, `ndarray:float32:2,3`, or before its values."""
    kind, _, dimensions = settings.partition(":")
    offset = 0
    if not kind:
        kind = _DTYPES[data.head(1)[0]]
        offset = 1
    if dimensions:
        shape = tuple(int(size) for size in dimensions.split(","))
    else:
        code = data.part(offset, 1).read()[0]
        count, width = code >> 2, 1 << code % 4
        shape_bytes = data.part(offset + 1, count * width).read()
        shape = tuple(np.frombuffer(shape_bytes, f"<u{width}").tolist())
        offset += 1 + count * width
    return [array_blob(name, np.dtype(kind), shape, data.rest(offset))]


def _field(kinds: Mapping[str, _Decode], name: str, kind: str, data: ByteSource) -> Sequence[Value | Blob]:
    """Decode the bytes of a field of this kind by `kinds`. They may become several fields. Raises `RecordError`."""
    base_kind, _, setting = kind.partition(":")
    try:
        return kinds[base_kind](name, setting, data)
    except RecordError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, InvalidOperation) as error:
        raise RecordError(f"damaged record: {name} is not {kind}: {error}") from error


def _value_decoders(kinds: Mapping[str, Callable[[bytes], Any]]) -> dict[str, _Decode]:
    """Return decoders of fields whose bytes these functions parse to a value, by kind."""

    def decode(parse: Callable[[bytes], Any]) -> _Decode:
        return lambda name, _, data: [Value(name, parse(data.read()))]

    return {kind: decode(parse) for kind, parse in kinds.items()}


_jpeg = functools.partial(lambda name, data: bytes_blob(name, "jpg", data))
_png = functools.partial(lambda name, data: bytes_blob(name, "png", data))
_COLUMN_DECODERS: dict[str, _Decode] = {  # of MDS, by encoding
    "bytes": lambda name, _, data: [bytes_blob(name, "", data)],
    "jpeg": lambda name, _, data: [_jpeg(name, data)],
    "png": lambda name, _, data: [_png(name, data)],
    "pil": lambda name, _, data: [image_blob(name, data)],
    "jpeg_array": lambda name, _, data: numbered_blobs(name, data, _jpeg, begin=0),
    "jpegarray": lambda name, _, data: numbered_blobs(name, data, _jpeg, begin=0),
    "list[jpeg]": lambda name, _, data: numbered_blobs(name, data, _jpeg, begin=4),
    "list[png]": lambda name, _, data: numbered_blobs(name, data, _png, begin=4),
    "list[pil]": lambda name, _, data: numbered_blobs(name, data, image_blob, begin=4),
    "ndarray": _array,
    **_value_decoders({"str": bytes.decode, "json": json.loads, "int": functools.partial(first_number, "<i8")}),
    **_value_decoders({"str_int": lambda data: int(data.decode()), "str_float": lambda data: float(data.decode())}),
    # a string, because JSON has no exact decimals
    **_value_decoders({"str_decimal": lambda data: str(Decimal(data.decode()))}),
    **_value_decoders({kind: functools.partial(first_number, kind) for kind in _SCALARS}),
}


_MDS = RecordKind(_listed_shards, MdsColumns)
MDS = format_of_kind("mds", (".mds", *(f".mds.{kind}" for kind in _PACKED)), _MDS, RecordFolderStore)


_NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")  # by LitData's codes
_NAMES = "f4 f4 f8 f8 c8 c8 c16 c16 f2 f2 - u1 i1 i2 i2 i4 i4 i8 i8 ? u2"  # "-" for types that NumPy lacks
_TORCH = _NAMES.split()  # by LitData's codes
_LEVELS = (None, "chunk", "sample")  # supported levels of compression in LitData
_LEAF = None  # the tree of one value: of a leaf, or of an item that is one
_BINARY = 0x20  # the greatest first byte of binary JSON; JSON as text starts with a printable character


class _Chunk(msgspec.Struct):
    filename: str
    chunk_size: int


class _Config(msgspec.Struct):
    data_format: list[str]
    data_spec: str | None = None
    compression: str | None = None
    compression_level: str | None = None
    encryption: Any = None
    item_loader: str | None = None


class _Chunks(msgspec.Struct):
    chunks: list[_Chunk]
    config: _Config


class Tree(msgspec.Struct, frozen=True):
    """`Schema` of LitData: formats of the leaves, and their tree as nested pairs."""

    formats: tuple[str, ...]
    spec: Any  # pairs of the dict's names (None for a list) and the children; or _LEAF
    each: str = ""  # compression of single items

    def fields(self, record: ByteSource) -> list[Value | Blob]:
        """Return the fields of an item. Raises `RecordError`."""
        sizes = record.uint32s(0, len(self.formats))
        offset = 4 * len(sizes)
        leaves: list[Sequence[Value | Blob]] = []
        for name, kind, size in zip(self.names(), self.formats, sizes, strict=True):
            leaves.append(_field(_LEAF_DECODERS, name, kind, record.part(offset, size)))
            offset += size
        blobs = [field for leaf in leaves for field in leaf if isinstance(field, Blob)]
        values = _assembled(self.spec, iter(leaves))
        return [*blobs, *(Value(name, value) for name, value in _items(self.spec, values))]

    def names(self) -> list[str]:
        """Return the name of each leaf: the keys of its path, joined by underscores."""
        return ["_".join(path) or "item" for path in _paths(self.spec)]


_NOTHING = object()  # placeholder for a leaf that is a part of its own


def _assembled(spec: Any, leaves: Iterator[Sequence[Value | Blob]]) -> Any:
    """Return the values of an item as dicts and lists, without leaves that are parts of their own."""
    if spec is _LEAF:
        fields = next(leaves)
        return fields[0].value if fields and isinstance(fields[0], Value) else _NOTHING
    names, children = spec
    found = [_assembled(child, leaves) for child in children]
    if names is None and _NOTHING not in found:
        return found
    named = dict(zip(names or map(str, range(len(found))), found, strict=False))
    rest = {name: value for name, value in named.items() if value is not _NOTHING}
    return rest or _NOTHING


def _items(spec: Any, values: Any) -> list[tuple[str, Any]]:
    """Return (name, value) of an item's values. The name is a number in a list, and `item` for a single value."""
    if values is _NOTHING:
        return []
    if isinstance(values, dict):
        return list(values.items())
    return [("item", values)] if spec is _LEAF else [(str(i), value) for i, value in enumerate(values)]


def _paths(spec: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys on the path to each leaf of a tree below `path`."""
    if spec is _LEAF:
        yield path
        return
    names, children = spec
    for i, child in enumerate(children):
        yield from _paths(child, (*path, str(names[i] if names else i)))


def _listed_chunks(index: bytes) -> list[tuple[ListedFile, ...]]:
    """Return the files in an index.json: as written, then as decompressed by LitData.

    Raises ValueError for unsupported settings.
    """
    found = decode_index(index, _Chunks, "LitData")
    config = found.config
    try:
        spec = _parse_spec(json.loads(config.data_spec or "null"))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"not a readable index of LitData: {error}") from error
    _check_config(config)
    tree = Tree(tuple(config.data_format), spec, "zst" if config.compression_level == "sample" else "")
    if len(tree.names()) != len(tree.formats):
        raise ValueError(f"{len(tree.formats)} formats for {len(tree.names())} leaves; the index is damaged")
    schema = msgspec.json.encode(tree)
    return [_forms_of_chunk(chunk, config, schema) for chunk in found.chunks]


def _forms_of_chunk(chunk: _Chunk, config: _Config, schema: bytes) -> tuple[ListedFile, ...]:
    below, slash, name = chunk.filename.rpartition("/")
    plain = f"{below}{slash}{name.replace(f'.{config.compression}.', '.')}"
    unpacked = ListedFile(plain, chunk.chunk_size, schema)
    if plain == chunk.filename:
        return (unpacked,)
    return ListedFile(chunk.filename, chunk.chunk_size, schema, packed="zst"), unpacked


def _parse_spec(loaded: Any) -> Any:
    """Parse the tree of torch's `treespec_dumps`: a version, and nodes of type, context and children."""
    if loaded is None:
        return _LEAF
    version, node = loaded
    if version != 1:
        raise ValueError(f"version {version} of data_spec")
    return _parse_node(node)


def _parse_node(node: dict[str, Any]) -> Any:
    if (kind := node["type"]) is None:
        return _LEAF
    children = [_parse_node(child) for child in node["children_spec"]]
    if kind in ("builtins.dict", "collections.OrderedDict"):
        return [str(name) for name in json.loads(node["context"])], children
    if kind in ("builtins.list", "builtins.tuple"):
        return None, children
    raise ValueError(f"items of the type {kind}")


def _check_config(config: _Config) -> None:
    is_unsupported = {
        "encryption": config.encryption is not None,
        f"the item loader {config.item_loader}": config.item_loader not in (None, "PyTreeLoader"),
        f"the compression {config.compression}": (config.compression or "zstd").partition(":")[0] != "zstd",
        f"compression by {config.compression_level}": config.compression_level not in _LEVELS,
    }
    for setting, unsupported in is_unsupported.items():
        if unsupported:
            raise ValueError(f"{setting} is not supported. {INSTEAD}")
    for kind in config.data_format:
        plain = kind.partition(":")[0]
        if plain in ("pickle", "graph"):
            raise ValueError(f"the format {plain} has pickles, which could run code. {INSTEAD}")
        if plain not in _LEAF_DECODERS:
            raise ValueError(f"the format {kind!r} is not supported. {INSTEAD}")


def _json(data: bytes) -> Any:
    if data and data[0] <= _BINARY:
        raise RecordError(f"binary JSON: LitData's binary form of JSON is not supported. {INSTEAD}")
    return json.loads(data)


def _with_header(torch: bool, name: str, _: str, data: ByteSource) -> list[Value | Blob]:
    """Decode an array that follows its type code, number of dimensions and shape.

    These three are big-endian for torch and little-endian for NumPy.
    """
    order = ">u4" if torch else "<u4"
    code, dimensions = np.frombuffer(data.part(0, 8).read(), order).tolist()
    shape = np.frombuffer(data.part(8, 4 * dimensions).read(), order).tolist()
    return [array_blob(name, _dtype(torch, code), tuple(shape), data.rest(8 + 4 * dimensions))]


def _without_header(torch: bool, name: str, setting: str, data: ByteSource) -> list[Value | Blob]:
    dtype = _dtype(torch, int(setting))
    return [array_blob(name, dtype, (data.size // dtype.itemsize,), data)]


def _dtype(torch: bool, code: int) -> np.dtype[Any]:
    return np.dtype(_TORCH[code] if torch else _NUMPY[code])


def _file_blob(default: str, name: str, setting: str, data: ByteSource) -> list[Value | Blob]:
    return [bytes_blob(name, setting or default, data)]


_FILES = {"image": "jpg", "jpeg": "jpg", "video": "mp4", "audio": "wav", "pdf": "pdf", "tifffile": "tif", "tiff": "tif"}
_LEAF_DECODERS: dict[str, _Decode] = {  # of LitData, by format
    **{kind: functools.partial(_file_blob, _FILES.get(kind, "")) for kind in ("bytes", "file", *_FILES)},
    "pil": _COLUMN_DECODERS["pil"],
    "jpeg_array": _COLUMN_DECODERS["jpeg_array"],
    "numpy": functools.partial(_with_header, False),
    "tensor": functools.partial(_with_header, True),
    "no_header_numpy": functools.partial(_without_header, False),
    "no_header_tensor": functools.partial(_without_header, True),
    **_value_decoders({"str": bytes.decode, "text": bytes.decode, "bool": lambda data: data[0] != 0, "json": _json}),
    **_value_decoders({"int": functools.partial(first_number, "<i8"), "float": functools.partial(first_number, "<f8")}),
}


_LITDATA = RecordKind(_listed_chunks, Tree, chunked=True)
LITDATA = format_of_kind("litdata", (".bin",), _LITDATA, RecordFolderStore)
