"""Reading LitData: index.json names the chunks, and the format of each leaf of an item; each item is

    size uint32, of each leaf │ leaf │ leaf │ …

`data_spec` says which leaf has which place in the dicts and lists of an item. Formats of pickles are refused:
unpickling runs what the data name. How the items lie in a chunk: `litdata_chunks`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.tools.convert.fields import Blob, Value, array, pixels, raw, scalar, several
from savable_pipeline.tools.convert.litdata_chunks import items_of
from savable_pipeline.tools.convert.litdata_json import loads
from savable_pipeline.tools.convert.model import Input, Options
from savable_pipeline.tools.convert.record_folder import INDEX, RecordFolder, in_turn
from savable_pipeline.tools.convert.records import read_numbered
from savable_pipeline.tools.convert.stretches import RecordError, RecordFile, Stretch

_NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")  # by their codes
_TORCH = {
    0: "f4",
    1: "f4",
    2: "f8",
    3: "f8",
    4: "c8",
    5: "c8",
    6: "c16",
    7: "c16",
    8: "f2",
    9: "f2",
    11: "u1",
    12: "i1",
    13: "i2",
    14: "i2",
    15: "i4",
    16: "i4",
    17: "i8",
    18: "i8",
    19: "?",
    20: "u2",
}
_LEVELS = (None, "chunk", "batch", "sample")
_INSTEAD = "write it again without, or iterate over it with LitData and write its samples with sp.ShardWriter"
_LEAF = None


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


class _Index(msgspec.Struct):
    chunks: list[_Chunk]
    config: _Config


@dataclass(frozen=True, slots=True)
class Tree:
    """The `Schema` of LitData: the formats of the leaves, and the tree that they hang in, as nested pairs."""

    formats: tuple[str, ...]
    spec: Any  # "dict" with names, "list" with none, or _LEAF; then its children

    def fields(self, record: Stretch) -> list[Value | Blob]:
        """The fields of an item. Raises `RecordError`."""
        sizes = record.uint32s(0, len(self.formats))
        offset = 4 * len(sizes)
        leaves: list[list[Value | Blob]] = []
        for name, kind, size in zip(self.names(), self.formats, sizes, strict=True):
            leaves.append(_leaf(name, kind, record.part(offset, size)))
            offset += size
        blobs = [field for leaf in leaves for field in leaf if isinstance(field, Blob)]
        values = _assembled(self.spec, iter(leaves))
        return [*blobs, *(Value(name, value) for name, value in _items(self.spec, values))]

    def names(self) -> list[str]:
        """The name of each leaf: those on the way to it, joined by underscores."""
        return ["_".join(path) or "item" for path in _paths(self.spec)]


_NOTHING = object()  # in the place of a leaf that is a part of its own


def _assembled(spec: Any, leaves: Iterator[list[Value | Blob]]) -> Any:
    """The values of an item in their dicts and lists, without the leaves that are parts of their own."""
    if spec is _LEAF:
        fields = next(leaves)
        return fields[0].value if fields and isinstance(fields[0], Value) else _NOTHING
    names, children = spec
    found = [_assembled(child, leaves) for child in children]
    if names is None and _NOTHING not in found:
        return found
    named = dict(zip(names or map(str, range(len(found))), found, strict=False))
    kept = {name: value for name, value in named.items() if value is not _NOTHING}
    return kept or _NOTHING


def _items(spec: Any, values: Any) -> list[tuple[str, Any]]:
    """The values of an item by name: those of a tuple by number, one by itself as `item`."""
    if values is _NOTHING:
        return []
    if isinstance(values, dict):
        return list(values.items())
    return [("item", values)] if spec is _LEAF else [(str(i), value) for i, value in enumerate(values)]


def _paths(spec: Any, here: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if spec is _LEAF:
        yield here
        return
    names, children = spec
    for i, child in enumerate(children):
        yield from _paths(child, (*here, str(names[i] if names else i)))


def read_litdata(folder: RecordFolder, raw_index: bytes, options: Options) -> Input:
    """The samples of a folder of LitData with this index. Raises ValueError for what cannot be read of it, OSError."""
    path = f"{folder.root}/{INDEX}"
    try:
        index = msgspec.json.decode(raw_index, type=_Index)
        spec = _spec(json.loads(index.config.data_spec or "null"))
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"{path}: not an index of LitData that can be read: {error}") from error
    _check_config(path, index.config)
    tree = Tree(tuple(index.config.data_format), spec)
    if len(tree.names()) != len(tree.formats):
        raise ValueError(f"{path}: {len(tree.formats)} formats for {len(tree.names())} leaves; the index is damaged")
    folder.look_for(name for chunk in index.chunks for name in (chunk.filename, _plain(chunk, index.config)))
    files = [_file(folder, chunk, index.config) for chunk in index.chunks]
    counts = [chunk.chunk_size for chunk in index.chunks]
    stable = msgspec.json.encode((index.chunks, index.config))  # without the time of writing
    level = index.config.compression_level or ""
    return read_numbered(folder.root, stable, items_of(in_turn(files), counts, tree, level), options)


def _spec(loaded: Any) -> Any:
    """The tree of torch's `treespec_dumps`: a version, and nodes of type, context and children."""
    if loaded is None:
        return _LEAF
    version, node = loaded
    if version != 1:
        raise ValueError(f"version {version} of data_spec")
    return _node(node)


def _node(node: dict[str, Any]) -> Any:
    kind = node["type"]
    if kind is None:
        return _LEAF
    children = [_node(child) for child in node["children_spec"]]
    if kind in ("builtins.dict", "collections.OrderedDict"):
        return [str(name) for name in json.loads(node["context"])], children
    if kind in ("builtins.list", "builtins.tuple"):
        return None, children
    raise ValueError(f"items of the type {kind}")


def _check_config(path: str, config: _Config) -> None:
    refused = {
        "encryption": config.encryption is not None,
        f"the item loader {config.item_loader}": config.item_loader not in (None, "PyTreeLoader"),
        f"the compression {config.compression}": (config.compression or "zstd").partition(":")[0] != "zstd",
        f"compression by {config.compression_level}": config.compression_level not in _LEVELS,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"{path}: {what} is not read: {_INSTEAD}")
    for kind in config.data_format:
        plain = kind.partition(":")[0]
        if plain in ("pickle", "graph"):
            raise ValueError(
                f"{path}: the format {plain} holds pickles, and unpickling runs what they name: {_INSTEAD}"
            )
        if plain not in _KNOWN:
            raise ValueError(f"{path}: the format {kind!r} is not read: {_INSTEAD}")


def _plain(chunk: _Chunk, config: _Config) -> str:
    """The name under which LitData's own reader leaves a chunk that it decompressed."""
    below, slash, name = chunk.filename.rpartition("/")
    return f"{below}{slash}{name.replace(f'.{config.compression}.', '.')}"


def _file(folder: RecordFolder, chunk: _Chunk, config: _Config) -> RecordFile:
    """The file of a chunk, as it is written or else decompressed."""
    path, plain = f"{folder.root}/{chunk.filename}", _plain(chunk, config)
    if not is_inside(chunk.filename):
        raise ValueError(f"{path}: named by index.json, and not in its folder")
    if folder.size(chunk.filename) is not None:
        return folder.file(chunk.filename, "zst" if chunk.filename != plain else "")
    if folder.size(plain) is not None:
        return folder.file(plain)
    raise ValueError(f"{path}: named by index.json, and not there; copy the whole folder")


def _leaf(name: str, kind: str, data: Stretch) -> list[Value | Blob]:
    plain, _, setting = kind.partition(":")
    try:
        if plain in _VALUES:
            return [Value(name, _VALUES[plain](data.read()))]
        if plain == "jpeg_array":
            return list(several(name, data, lambda field, image: raw(field, "jpg", image), begin=0))
        return [_BLOBS[plain](name, setting, data)]
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise RecordError(f"damaged record: {name} is no {kind}: {error}") from error


def _with_header(torch: bool, name: str, _: str, data: Stretch) -> Blob:
    """An array behind the code of its type, its dimensions and its shape: big-endian for torch, else little-endian."""
    order = ">u4" if torch else "<u4"
    code, dimensions = np.frombuffer(data.part(0, 8).read(), order).tolist()
    shape = np.frombuffer(data.part(8, 4 * dimensions).read(), order).tolist()
    return array(name, _dtype(torch, code), tuple(shape), data.rest(8 + 4 * dimensions))


def _without_header(torch: bool, name: str, setting: str, data: Stretch) -> Blob:
    dtype = _dtype(torch, int(setting))
    return array(name, dtype, (data.size // dtype.itemsize,), data)


def _dtype(torch: bool, code: int) -> np.dtype[Any]:
    return np.dtype(_TORCH[code] if torch else _NUMPY[code])


def _file_of(default: str, name: str, setting: str, data: Stretch) -> Blob:
    return raw(name, setting or default, data)


_VALUES: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bool": lambda data: data[0] != 0,
    "int": functools.partial(scalar, "<i8"),
    "float": functools.partial(scalar, "<f8"),
    "json": loads,
}
_BLOBS: dict[str, Callable[[str, str, Stretch], Blob]] = {
    "bytes": functools.partial(_file_of, ""),
    "file": functools.partial(_file_of, ""),
    "image": functools.partial(_file_of, "jpg"),
    "jpeg": functools.partial(_file_of, "jpg"),
    "video": functools.partial(_file_of, "mp4"),
    "audio": functools.partial(_file_of, "wav"),
    "pdf": functools.partial(_file_of, "pdf"),
    "tifffile": functools.partial(_file_of, "tif"),
    "tiff": functools.partial(_file_of, "tif"),
    "pil": lambda name, _, data: pixels(name, data),
    "numpy": functools.partial(_with_header, False),
    "tensor": functools.partial(_with_header, True),
    "no_header_numpy": functools.partial(_without_header, False),
    "no_header_tensor": functools.partial(_without_header, True),
}
_KNOWN = {*_VALUES, *_BLOBS, "jpeg_array"}
