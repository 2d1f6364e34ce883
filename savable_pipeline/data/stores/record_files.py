"""Files of records that an index.json names: MDS and LitData; what the index of the project says of one.

    count u32 │ offsets u32 (count + 1,) │ … │ record │ record │ …      records; each may be compressed by itself
    … │ Arrow IPC, a row a record │ its size u32 │ "LDARW01" 0

The last is LitData's. Either may be compressed as a whole. Numbers are little-endian.

Places of a file in the index: which of these it is, its compression, the bytes of its content and one (0: not known),
the bytes of its schema, the schema; then the offsets, or where the rows of Arrow are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64

from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource, RecordError
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import PlaceIndex, Places, ShardIndex, ShardTable
from savable_pipeline.data.shards.paths import LARGEST_INDEX, ShardKind
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.file_kinds import INDEX
from savable_pipeline.data.stores.record_fields import Blob, Value

INSTEAD = "iterate over it with its own library, and write its samples again in others, or with sp.ShardWriter"
RECORDS, ROWS, WHOLE = range(3)
PACKED = ("", "gz", "bz2", "zst")
_MOST_RECORDS = 1 << 32
_FRAMED, _ROWS = b"LDFZ01\0\0", b"LDARW01\0"  # of LitData: compressed by batch, and rows
_SEEN, _BLOCKS = 1 << 12, 8  # bytes that are compared at this many places of a file

T = TypeVar("T")


class Schema(Protocol):
    """The fields of the records of a file; made of JSON by msgspec. `each` is how each is compressed by itself."""

    @property
    def each(self) -> str: ...

    def fields(self, record: ByteSource, /) -> list[Value | Blob]:
        """The fields of a record. Raises `RecordError`."""


class ListedFile(msgspec.Struct, frozen=True):
    """A file as index.json names it; `packed` is how it is compressed as a whole, `schema` JSON."""

    name: str
    samples: int
    schema: bytes
    size: int | None = None  # bytes; None: not said
    packed: str = ""
    content: int | None = None  # bytes when decompressed, if that is said
    fault: str = ""  # why it cannot be read
    hashes: dict[str, str] = {}  # of its bytes, by algorithm


@dataclass(frozen=True, slots=True)
class RecordKind:
    """A kind of folders: what reads an index.json, which names each file with those that may lie in its place."""

    listed: Callable[[bytes], list[tuple[ListedFile, ...]]]
    schema: type[Schema]
    chunked: bool = False  # whether there are rows of Arrow

    def names(self, index: bytes) -> list[tuple[str, ...]]:
        """The names that each file may have: the first of them that is there is read. Raises ValueError."""
        return [tuple(each.name for each in several) for several in self.listed(index)]


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The places of a file by their meaning; `offsets` are uint64 (records + 1,), of rows in Arrow begin and end."""

    what: int
    packed: str
    content: int | None
    schema: bytes
    offsets: Places


def format_of_kind(name: str, suffixes: tuple[str, ...], kind: RecordKind, place: str) -> FileFormat:
    """The format of such folders; `place` is where another process finds it."""
    return FileFormat(
        name,
        ShardKind(suffixes, listing=INDEX, listed=kind.names),
        place,
        functools.partial(read_listed, kind),
        functools.partial(is_as_listed, kind),
        beside=("", INDEX),
    )


def as_listed(index: bytes, form: type[T], name: str) -> T:
    """A decoded index.json. Raises ValueError."""
    try:
        return msgspec.json.decode(index, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an index of {name} that can be read: {error}") from error


def read_listed(kind: RecordKind, file: ByteSource, name: str) -> ShardTable:
    """Entry and places of a file; damage, and what index.json says otherwise, is the entry's fault."""
    try:
        said = _said(kind, file, name)
        if said is None or said.fault:
            raise ValueError(f"not named by an {INDEX}; copy the whole folder" if said is None else said.fault)
        return _table(kind, file, said)
    except ValueError as error:
        return ShardTable(ShardEntry(name, file.size, 0, 0, encodable(f"{name}: {error}")), b"")


def is_as_listed(kind: RecordKind, file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Whether a file, and what index.json says of it if that is here, are as they were indexed. Raises OSError."""
    assert isinstance(index, PlaceIndex), index
    if number in index.shards.faults:  # nothing is known of it, and nothing read
        return True
    entry = index.shards[number]
    layout = layout_of(index.places(number), entry.samples)
    known = ListedFile(entry.name, entry.samples, layout.schema, entry.size, layout.packed, layout.content)
    try:
        return _table(kind, file, _said(kind, file, entry.name) or known).entry.digest == entry.digest
    except ValueError:
        return False


def _said(kind: RecordKind, file: ByteSource, name: str) -> ListedFile | None:
    """What index.json says of a file; None if that is not here, or does not name it. Raises ValueError."""
    index = file.beside(INDEX, name)
    if index is None:
        return None
    stat = index.stat()
    return _listed(kind.listed, index, stat.st_size, stat.st_mtime_ns).get(name)


@functools.lru_cache(maxsize=1)
def _listed(listed: Callable[[bytes], Any], index: Path, size: int, written_ns: int) -> dict[str, ListedFile]:
    if size > LARGEST_INDEX:
        raise ValueError(f"{INDEX} has {size} bytes; at most {LARGEST_INDEX} are read")
    return {each.name: each for several in listed(index.read_bytes()) for each in several}


def _table(kind: RecordKind, file: ByteSource, said: ListedFile) -> ShardTable:
    """Entry and places of a file of which this is said. Raises ValueError."""
    if said.size not in (None, file.size):
        raise ValueError(f"{file.size} bytes, but {said.size} by {INDEX}; copy it again")
    if not 0 <= said.samples < _MOST_RECORDS:
        raise ValueError(f"{said.samples} records by {INDEX}; copy it again")
    what, more = (WHOLE, np.zeros(0, "<u8")) if said.packed else layout_in(file, said.samples, kind.chunked)
    known = 0 if said.content is None else said.content + 1
    schema = np.frombuffer(said.schema + bytes(-len(said.schema) % 8), "<u8")
    head = np.array([what, PACKED.index(said.packed), known, len(said.schema)], "<u8")
    places = np.concatenate([head, schema, more]).tobytes()
    digest = xxh3_64(places)
    seen = [(max(0, file.size - _SEEN) * block // _BLOCKS, _SEEN) for block in range(_BLOCKS + 1)]
    file.expect(seen)
    for offset, length in seen:
        digest.update(file.read_at(offset, length))
    return ShardTable(ShardEntry(said.name, file.size, said.samples, digest.intdigest()), places)


def layout_of(places: Places, samples: int) -> RecordLayout:
    """What the index says of a file."""
    what, packed, known, length = places[:4].tolist()
    begin = 4 + -(-length // 8)
    end = begin + {RECORDS: samples + 1, ROWS: 2, WHOLE: 0}[what]
    schema = places[4:begin].tobytes()[:length]
    return RecordLayout(what, PACKED[packed], known - 1 if known else None, schema, places[begin:end])


def layout_in(content: ByteSource, samples: int, chunked: bool) -> tuple[int, Places]:
    """What is in a file that is not compressed as a whole, and its offsets. Raises ValueError."""
    try:
        if chunked and content.read_at(max(0, content.size - len(_ROWS)), len(_ROWS)) == _ROWS:
            end = content.size - len(_ROWS) - 4
            size = content.uint32s(end, 1)[0]
            content.part(end - size, size)
            return ROWS, np.array([end - size, end], "<u8")
        if chunked and content.head(len(_FRAMED)) == _FRAMED:
            raise ValueError(f"compression by batch is not read: {INSTEAD}")
        if (there := content.uint32s(0, 1)[0]) != samples:
            raise ValueError(f"holds {there} records, but {samples} by the index; copy it again")
        return RECORDS, np.frombuffer(content.part(4, 4 * (samples + 1)).read(), "<u4").astype("<u8")
    except RecordError as error:
        raise ValueError("too short to hold records; copy it again") from error
