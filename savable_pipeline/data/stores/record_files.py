"""Files of records that an index.json lists: MDS and LitData.

    count u32 │ offsets u32 (count + 1,) │ … │ record │ record │ …      records; each may be compressed by itself
    … │ Arrow IPC, a row per record │ its size u32 │ "LDARW01" 0

The second layout is LitData's. Files of either may be compressed as a whole. Numbers are little-endian.

Blob of a file in the index: its unit, its compression, the bytes of its content plus one (0: unknown), the bytes of its
schema, the schema; then the offsets, or where the rows of Arrow are. See `RecordLayout`.

The fields of a record are parts of a sample: values become the part `json`, everything else a part of its own.

    {"image": JPEG, "caption": "a cat", "vector": array}      →      jpg, npy, json: {"caption": "a cat"}

If two fields would be parts with one name, the second is prefixed with its field's name: `jpg`, `second.jpg`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from savable_pipeline.core.file_heads import media_of
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource, RecordError
from savable_pipeline.data.shards.index import BlobIndex, FileBlob, Format, ShardIndex, ShardTable, marker_object
from savable_pipeline.data.shards.paths import LARGEST_INDEX
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.arrow_file import batches_of, decoded_bytes, read_arrow_table, read_message
from savable_pipeline.data.stores.decompressed import MORE
from savable_pipeline.data.stores.record_store import hash_some

INDEX = "index.json"
_MEDIA = frozenset(("jpg", "png", "gif", "flac", "ogg", "mp3", "pdf", "npy", "mkv", "webp", "wav", "avi", "mp4"))
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_NPY_HEADER = 256  # most bytes of the header, unless an array has many dimensions
_HEAD = 16  # first bytes of a part, by which its type is detected
INSTEAD = "Read it with its own library, and write its samples with sp.ShardWriter"
RECORDS, ROWS, WHOLE = range(3)  # units: records with offsets, rows of Arrow, or a file compressed as a whole
PACKED = ("", "gz", "bz2", "zst")  # compressions of a whole file, by their number in an index blob
_MOST_RECORDS = 1 << 32
_FRAMED, _ROWS = b"LDFZ01\0\0", b"LDARW01\0"  # first bytes of LitData's files: compressed by batch, and rows
_SAMPLED_BYTES, _BLOCKS = 1 << 12, 8  # bytes to compare at each of this many positions of a file

T = TypeVar("T")
_ARROW = b"ARROW1"  # first bytes of an Arrow file; a stream has no such bytes
_NOTHING = object()  # placeholder for bytes, which are parts of their own


@dataclass(frozen=True, slots=True)
class Value:
    """Field that JSON can represent."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Blob:
    """Field that is a part of its own."""

    name: str
    extension: str
    size: int  # bytes of the part, at most
    load: Callable[[], bytes]


def bytes_blob(name: str, extension: str, data: ByteSource) -> Blob:
    """Return a part with these bytes.

    The extension "" is replaced by the detected one, or by `bin`.
    """
    return Blob(name, extension or media_of(data.head(_HEAD), _MEDIA), data.size, data.read)


def array_blob(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], data: ByteSource) -> Blob:
    """Return a part with an array as `npy`.

    Raises `RecordError` if the bytes do not fill the shape.
    """
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != data.size:
        raise RecordError(f"damaged record: {name}: {data.size} bytes for {dtype} of shape {shape}")
    return Blob(name, "npy", data.size + _NPY_HEADER, lambda: npy(np.frombuffer(data.read(), dtype).reshape(shape)))


def first_number(kind: str, data: bytes) -> Any:
    """Return the number of the dtype `kind` at the start of bytes.

    Raises ValueError and IndexError if there are too few bytes.
    """
    return np.frombuffer(data, kind)[0].item()


def image_blob(name: str, data: ByteSource) -> Blob:
    """Return a part with a Pillow image as PNG, or as TIFF for modes that PNG lacks.

    The data are its width, height, length of its mode, mode, and rows.
    """
    width, height, length = data.uint32s(0, 3)
    mode = data.part(12, min(length, 16)).read().decode("ascii", "replace")
    if (width + 7) // 8 * height > data.size:  # checked before Pillow allocates the rows
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
    from PIL import Image  # imported here, because the import takes time and memory

    file = io.BytesIO()
    try:
        Image.frombytes(mode, size, data.read()).save(file, "PNG" if extension == "png" else "TIFF")
    except (ValueError, OSError, SystemError, OverflowError, MemoryError) as error:
        raise RecordError(f"damaged record: {name}: {mode} of {size}: {error}") from error
    return file.getvalue()


def numbered_blobs(name: str, data: ByteSource, build: Callable[[str, ByteSource], Blob], *, begin: int) -> list[Blob]:
    """Return the elements of a list, built by `build`, as the parts 0.jpg, 1.jpg, …

    The data at `begin` are their count, then their sizes, then their bytes.
    """
    (count,) = data.uint32s(begin, 1)
    sizes = data.uint32s(begin + 4, count)
    offset = begin + 4 + 4 * count
    blobs = []
    for number, size in enumerate(sizes):
        blob = build(name, data.part(offset, size))
        blobs.append(Blob(name, f"{number}.{blob.extension}", blob.size, blob.load))
        offset += size
    return blobs


def as_json(values: Any) -> bytes:
    """Return JSON in UTF-8, with Python's `NaN` and `Infinity`.

    Raises `RecordError` for values that JSON cannot represent.
    """
    try:
        return json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, TypeError, UnicodeEncodeError) as error:
        raise RecordError(f"value that JSON cannot hold: {error}") from error


def parts_of(fields: list[Value | Blob]) -> dict[str, Blob]:
    """Return the parts of a record by extension, sorted. Raises `RecordError`."""
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
    """Return an array in the format of `numpy.save`."""
    file = io.BytesIO()
    np.lib.format.write_array(file, values, allow_pickle=False)
    return file.getvalue()


class Schema(Protocol):
    """Fields of the records of a file, decoded from JSON by msgspec.

    `each` is the compression of single records, or "".
    """

    @property
    def each(self) -> str: ...

    def fields(self, record: ByteSource, /) -> list[Value | Blob]:
        """Return the fields of a record. Raises `RecordError`."""


class ListedFile(msgspec.Struct, frozen=True):
    """File that index.json lists.

    `packed` is the compression of the whole file, or "". `schema` is a `Schema` as JSON.
    """

    name: str
    samples: int
    schema: bytes
    size: int | None = None  # in bytes, None if unknown
    packed: str = ""
    content: int | None = None  # decompressed size in bytes, None if unknown
    fault: str = ""  # why it cannot be read
    hashes: dict[str, str] = {}  # hashes of its bytes, by algorithm


@dataclass(frozen=True, slots=True)
class RecordKind:
    """Kind of folder with an index.json, and its reader.

    A listed file may have alternative names.
    """

    listed: Callable[[bytes], list[tuple[ListedFile, ...]]]
    schema: type[Schema]
    chunked: bool = False  # whether files may have rows of Arrow

    def names(self, heads: Mapping[str, bytes]) -> list[tuple[str, ...]]:
        """Return the names that each file may have. The first that exists is read.

        Raises ValueError.
        """
        if INDEX not in heads:
            raise ValueError(f"no {INDEX}. Name the one folder that has it")
        try:
            return [tuple(each.name for each in alternatives) for alternatives in self.listed(heads[INDEX])]
        except ValueError as error:
            raise ValueError(f"{INDEX}: {error}") from error


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Index blob of a file by field.

    `unit` is `RECORDS`, `ROWS` or `WHOLE`. `offsets` are uint64 (records + 1,). For rows of Arrow, they are the start
    and the end of the data.
    """

    unit: int
    compression: str  # of the whole file, see `PACKED`
    unpacked_size: int | None  # bytes of the decompressed file, None if unknown
    schema: bytes
    offsets: FileBlob


def index_format(heads: Mapping[str, bytes]) -> str:
    """Return the format in index.json, or "".

    Examples are mds, other formats of Mosaic Streaming, and litdata.
    """
    found = marker_object(heads, INDEX)
    if isinstance(found.get("chunks"), list) and isinstance(found.get("config"), dict):
        return "litdata"
    shards = found.get("shards")
    if isinstance(shards, list) and all(isinstance(shard, dict) and "format" in shard for shard in shards):
        return str(shards[0]["format"]) if shards else "mds"
    return ""


def _is_format(name: str, heads: Mapping[str, bytes]) -> bool:
    return index_format(heads) == name


def format_of_kind(name: str, suffixes: tuple[str, ...], kind: RecordKind, store: Any) -> Format:
    """Return the format of such folders, with index.json as the marker."""
    return Format(
        name,
        suffixes,
        functools.partial(read_listed, kind),
        functools.partial(store, kind=kind),
        ("key", "blocks", "unpacked_bytes", "validate_hash"),
        is_same=functools.partial(is_as_listed, kind),
        sidecar=("", INDEX),
        markers=(INDEX,),
        claims=functools.partial(_is_format, name),
        listed=kind.names,
    )


def decode_index(index: bytes, form: type[T], name: str) -> T:
    """Decode an index.json. Raises ValueError."""
    try:
        return msgspec.json.decode(index, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a readable index of {name}: {error}") from error


def read_listed(kind: RecordKind, file: ByteSource, name: str) -> ShardTable:
    """Return entry and index rows of a file.

    Damage, and differences from index.json, are noted in the entry.
    """
    try:
        listed = _listed_file(kind, file, name)
        if listed is None or listed.fault:
            raise ValueError(f"not named by an {INDEX}. Copy the whole folder" if listed is None else listed.fault)
        return _table(kind, file, listed)
    except ValueError as error:
        return ShardTable(ShardEntry(name, file.size, 0, 0, encodable(f"{name}: {error}")), b"")


def is_as_listed(kind: RecordKind, file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether a file, and its entry in index.json, are as indexed.

    Raises OSError.
    """
    assert isinstance(index, BlobIndex), index
    if number in index.shards.faults:  # a file with a fault has no indexed data to compare, and is not read
        return True
    entry = index.shards[number]
    layout = layout_of(index.blob(number), entry.samples)
    known = ListedFile(entry.name, entry.samples, layout.schema, entry.size, layout.compression, layout.unpacked_size)
    try:
        return _table(kind, file, _listed_file(kind, file, entry.name) or known).entry.digest == entry.digest
    except ValueError:
        return False


def _listed_file(kind: RecordKind, file: ByteSource, name: str) -> ListedFile | None:
    """Return the entry of a file in index.json, or None if there is none. Raises ValueError."""
    if (index := file.sidecar(INDEX, name)) is None:
        return None
    stat = index.stat()
    return _listed_files(kind.listed, index, stat.st_size, stat.st_mtime_ns).get(name)


@functools.lru_cache(maxsize=1)
def _listed_files(parse: Callable[[bytes], Any], index: Path, size: int, written_ns: int) -> dict[str, ListedFile]:
    if size > LARGEST_INDEX:
        raise ValueError(f"{INDEX} has {size} bytes, more than the limit of {LARGEST_INDEX}")
    return {each.name: each for alternatives in parse(index.read_bytes()) for each in alternatives}


def _table(kind: RecordKind, file: ByteSource, listed: ListedFile) -> ShardTable:
    """Return entry and index blob of a listed file. Raises ValueError."""
    if listed.size not in (None, file.size):
        raise ValueError(f"{file.size} bytes, but {listed.size} by {INDEX}. Copy it again")
    if not 0 <= listed.samples < _MOST_RECORDS:
        raise ValueError(f"{listed.samples} records by {INDEX}. Copy it again")
    unit, offsets = (WHOLE, np.zeros(0, "<u8")) if listed.packed else layout_in(file, listed.samples, kind.chunked)
    content = 0 if listed.content is None else listed.content + 1
    schema = np.frombuffer(listed.schema + bytes(-len(listed.schema) % 8), "<u8")
    head = np.array([unit, PACKED.index(listed.packed), content, len(listed.schema)], "<u8")
    blob = np.concatenate([head, schema, offsets]).tobytes()
    digest = hash_some(xxhash.xxh3_64(blob), file, _SAMPLED_BYTES, _BLOCKS)
    return ShardTable(ShardEntry(listed.name, file.size, listed.samples, digest), blob)


def layout_of(blob: FileBlob, samples: int) -> RecordLayout:
    """Decode the index blob of a file."""
    unit, packed, content, length = blob[:4].tolist()  # `content` is the unpacked size + 1, or 0 if it is unknown
    begin = 4 + -(-length // 8)
    end = begin + {RECORDS: samples + 1, ROWS: 2, WHOLE: 0}[unit]
    schema = blob[4:begin].tobytes()[:length]
    return RecordLayout(unit, PACKED[packed], content - 1 if content else None, schema, blob[begin:end])


def layout_in(content: ByteSource, samples: int, chunked: bool) -> tuple[int, FileBlob]:
    """Return the unit and the offsets of a decompressed file: see `RecordLayout`.

    Raises ValueError.
    """
    try:
        if chunked and content.read_at(max(0, content.size - len(_ROWS)), len(_ROWS)) == _ROWS:
            end = content.size - len(_ROWS) - 4
            size = content.uint32s(end, 1)[0]
            content.part(end - size, size)
            return ROWS, np.array([end - size, end], "<u8")
        if chunked and content.head(len(_FRAMED)) == _FRAMED:
            raise ValueError(f"compression by batch is not supported. {INSTEAD}")
        if (count := content.uint32s(0, 1)[0]) != samples:
            raise ValueError(f"{count} records, but {samples} by the index. Copy it again")
        return RECORDS, np.frombuffer(content.part(4, 4 * (samples + 1)).read(), "<u4").astype("<u8")
    except RecordError as error:
        raise ValueError("too short to hold records. Copy it again") from error


def known_hash(hashes: Iterable[str]) -> str | None:
    """Return the first of these algorithms that hashlib or xxhash has, or None."""
    known = {*hashlib.algorithms_available, *xxhash.algorithms_available}
    return next((name for name in hashes if name in known and not name.startswith("shake")), None)


def wrong_hash(hashes: Mapping[str, str], algorithm: str, pieces: Iterable[bytes]) -> str:
    """Return how the bytes of a file differ from these hashes, or ""."""
    if algorithm not in hashes:
        return f"index.json has no {algorithm} of it, but {', '.join(hashes) or 'no hash'}"
    hasher: Any = getattr(xxhash, algorithm)() if algorithm in xxhash.algorithms_available else hashlib.new(algorithm)
    for piece in pieces:
        hasher.update(piece)
    found, expected = hasher.hexdigest(), hashes[algorithm]
    return "" if found == expected.lower() else f"its {algorithm} is {found}, index.json says {expected}"


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Records in `data`, where `offsets` are uint64 (records + 1,)."""

    data: bytes
    offsets: FileBlob
    schema: Schema

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def fields(self, position: int) -> list[Value | Blob]:
        """Return the fields of a record. Raises `RecordError`."""
        return self.schema.fields(record_in(ByteSource.of(self.data), self.offsets, position))

    def retain(self, position: int) -> RecordBlock:
        """Copy a record to a block of its own, at position 0.

        The copy does not refer to the bytes of this block. Raises `RecordError`.
        """
        data = record_in(ByteSource.of(self.data), self.offsets, position).read()
        return RecordBlock(data, np.array([0, len(data)], np.uint64), self.schema)

    @property
    def size(self) -> int:
        """Return the bytes in memory."""
        return len(self.data) + self.offsets.nbytes


def record_in(content: ByteSource, offsets: FileBlob, position: int) -> ByteSource:
    """Return the record at a position. Raises `RecordError` if it exceeds the content."""
    first, end = int(offsets[position]), int(offsets[position + 1])
    return content.part(first, end - first)


@dataclass(frozen=True, slots=True)
class RecordTable:
    """Rows of Arrow: dicts of strings, numbers, bytes and lists.

    Bytes become parts, and everything else values.

    {"image": JPEG, "caption": "a cat", "size": [8, 8]}      →      jpg, json: {"caption": "a cat", "size": [8, 8]}
    """

    table: Any

    def __len__(self) -> int:
        rows: int = self.table.num_rows
        return rows

    def fields(self, position: int) -> list[Value | Blob]:
        """See `RecordBlock.fields`."""
        from savable_pipeline.data.stores.arrow_columns import plain_value  # imported here, because it imports pyarrow

        columns = zip(self.table.column_names, self.table.columns, strict=True)
        row = {name: plain_value(column[position]) for name, column in columns}
        blobs: list[Value | Blob] = []
        values = {name: _without_bytes(value, name, blobs) for name, value in row.items()}
        return [*blobs, *(Value(name, value) for name, value in values.items() if value is not _NOTHING)]

    def retain(self, position: int) -> RecordTable:
        """See `RecordBlock.retain`."""
        return RecordTable(self.table.take([position]))

    @property
    def size(self) -> int:
        """See `RecordBlock.size`."""
        size: int = self.table.nbytes
        return size


def table_of(data: bytes, expected: int, max_bytes: int) -> RecordTable:
    """Return the rows of an Arrow file or stream.

    Raises ValueError for damage, another number of rows than `expected`, and more than `max_bytes` bytes.
    """
    import pyarrow as pa  # imported here, because only Arrow chunks need it

    if (size := _decoded_bytes(data)) > max_bytes:
        raise ValueError(f"rows in Arrow of {size} bytes, more than {max_bytes}. {MORE}")
    try:
        source = pa.py_buffer(data)
        reader = pa.ipc.open_file(source) if data.startswith(_ARROW) else pa.ipc.open_stream(source)
        table = reader.read_all()
        table.validate(full=True)  # Validate before anything follows its offsets.
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ValueError(f"damaged rows in Arrow: {error}") from error
    if table.num_rows != expected:
        raise ValueError(f"{table.num_rows} records, but {expected} by the index")
    return RecordTable(table)


def _decoded_bytes(data: bytes) -> int:
    """Return the size in bytes to which compressed batches say that they decode."""
    file = ByteSource.of(data)
    found = read_arrow_table(file, "damaged rows in Arrow")
    if found.entry.fault:
        raise ValueError(found.entry.fault)
    batches, total = batches_of(np.frombuffer(found.rows, "<u8")), 0
    for begin, end in zip(batches.begins.tolist(), batches.ends.tolist(), strict=True):
        message = read_message(file, begin)
        total += decoded_bytes(memoryview(data)[begin:end], message) if message.is_compressed else 0
    return total


def _without_bytes(value: Any, name: str, blobs: list[Value | Blob]) -> Any:
    """Return a value without the bytes in it, or `_NOTHING`. The bytes are added to `blobs`, named by their paths."""
    if isinstance(value, bytes):
        blobs.append(bytes_blob(name, "", ByteSource.of(value)))
        return _NOTHING
    if not isinstance(value, dict | list):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {str(key): _without_bytes(item, f"{name}_{key}", blobs) for key, item in items}
    rest = {key: item for key, item in found.items() if item is not _NOTHING}
    if len(rest) == len(found):
        return rest if isinstance(value, dict) else list(rest.values())
    return rest or _NOTHING
