"""The index of a folder of shards of any format: columns that are mapped, so that a million shards are no objects.

    "SAVIDX04" │ xxh3_64 of the header and the shards │ header length u64 │ header: MessagePack │ padding
    │ shards: ends │ sizes │ samples │ digests │ checks │ [counts] │ names │ padding
    │ rows

    ends … checks   uint64 (shards,)   see `ShardList`, and a checksum of each shard's rows; the names are in order
    counts          uint64 (shards,)   rows of each shard, where they are not its samples
    rows            what the format says of each shard: `PlaceIndex`; of tars see tar_format.py

A shard's rows are consecutive, in the order of the shards. All arrays are little-endian. A shard's rows are checked
when the shard is opened: to open an index takes no time for its samples, and hardly any for its shards, whose numbers
and names are used where they lie.

    FileFormat      what must be known of a kind of files to index them, and to notice changes
    ShardIndex      an index that is open
    IndexedFiles    some files of one, with their samples counted through all of them
"""

from __future__ import annotations

import bisect
import functools
import importlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.files import is_out_of_handles, with_handles
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource, opened
from savable_pipeline.data.shards.metadata import INDEX_NAME, META
from savable_pipeline.data.shards.paths import ShardKind
from savable_pipeline.data.shards.shard_list import Count, Rows, ShardEntry, ShardList, ShardNames
from savable_pipeline.errors import ShardError

LayoutParts: TypeAlias = tuple[tuple[str, Count], ...]  # (extension, header blocks before its payload), ...
Places: TypeAlias = NDArray[np.uint64]  # what a format wants to know of a file: (any,)
Read: TypeAlias = Callable[[int, int], bytes]  # the bytes of a copy of an index from one offset to before another

MAGIC = b"SAVIDX04"
TAR = "tar"
_FIRST = 24  # bytes, that tell how long the header is
_ALIGN = 64
_NUMBER = 8  # bytes of each number of a shard


class Links(msgspec.Struct, frozen=True, array_like=True):
    """The links of a shard that would be parts of samples if they were files: how many, and the first one's name."""

    count: Count
    first: str = ""


class Header(msgspec.Struct, array_like=True):
    """What an index says of itself; its arrays follow. `layouts` to `links` are of tars."""

    shards: Count
    names: Count  # bytes
    faults: dict[int, str]  # by number of the shard
    layouts: list[LayoutParts]
    members: Count  # of every sample; 0: see `firsts`
    size_bytes: int  # 4 or 8: of an element of `sizes`
    sizes: Count  # the length of `sizes`
    links: dict[int, Links] = {}  # by number of the shard; of one without any there is none
    kind: str = TAR  # the name of the format

    @property
    def numbers(self) -> int:
        """How many numbers there are of each shard."""
        return 5 if self.kind == TAR else 6


class ShardTable(msgspec.Struct):
    """The rows of one shard, from a scan, to be joined with those of others; the arrays are little-endian bytes.

    Of a file that is no tar, `starts` are its places; all that follows is of tars.
    """

    entry: ShardEntry
    starts: bytes  # uint64 (samples,)
    end: int = 0  # the offset after the last member
    layouts: list[LayoutParts] = []
    layout_of: bytes = b""  # uint32 (samples,)
    sizes: bytes = b""  # uint64 (members,)
    links: Links = Links(0)
    torn: str = ""  # what to say of samples whose files do not lie side by side


class ShardIndex(ABC):
    """An open index: `shards`, and the rows of each. Raises OSError, `ShardError`.

    `shard_rows`, int64 (shards + 1,), is the first row of each shard, then the number of rows; `identity` tells this
    index from one of other shards. `kind` is the name of the format.
    """

    links: ClassVar[dict[int, Links]] = {}

    def __init__(self, path: Path, kind: str) -> None:
        self._map = with_handles(lambda: _mapped(path))
        self.view = memoryview(self._map)
        self.header, self.identity, self.shards, self.checks, counts, self.begin = _read_header(path, self.view)
        if self.header.kind != kind:
            raise ShardError(f"{path}: the index is damaged: it is of {self.header.kind} files, not of {kind} files")
        self.shard_rows = np.concatenate([[0], np.cumsum(counts)])

    def check_end(self, path: Path, end: int) -> None:
        """Raise `ShardError` unless the rows end where the file does."""
        if end != len(self.view):
            raise ShardError(f"{path}: {len(self.view)} bytes, but the header says {end}")

    def number(self, name: str) -> int:
        """The number of a shard. Raises KeyError without it."""
        found = bisect.bisect_left(self.shards.names, name)
        if found == len(self.shards) or self.shards.names[found] != name:
            raise KeyError(name)
        return found

    def numbers(self, names: Sequence[str]) -> Rows:
        """The numbers of these shards, int64 (names,). Raises KeyError without one of them."""
        if len(names) == len(self.shards) and ShardNames.of(names).text == self.shards.names.text:
            return np.arange(len(names))
        if len(names) < len(self.shards) // 16:  # bisecting them costs less than a table of all
            return np.fromiter(map(self.number, names), np.int64, len(names))
        known = {name: number for number, name in enumerate(self.shards.names)}
        return np.fromiter(map(known.__getitem__, names), np.int64, len(names))

    def rows_of(self, number: int) -> range:
        """The rows of a shard, by its number, as all below."""
        return range(int(self.shard_rows[number]), int(self.shard_rows[number + 1]))

    @abstractmethod
    def is_whole(self, number: int) -> bool:
        """Whether the rows of a shard match their checksum, and can be right."""

    @abstractmethod
    def rows_from(self, get: Read, shards: range) -> list[tuple[int, bytes]]:
        """The rows of some shards from a whole copy of this file: the offset of each array's part, and its bytes.

        `get` gives the copy's bytes from one offset to before another. Raises `ShardError` unless the rows match their
        checksums here.
        """

    @abstractmethod
    def table(self, number: int) -> ShardTable:
        """The rows of one shard, which must be whole, to be written into another index."""


class PlaceIndex(ShardIndex):
    """The index of files of which a format wants to know some numbers each, `places`, uint64: a row is one of them."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(path, kind)
        places, end = array_at(path, self.view, self.begin, "Q", int(self.shard_rows[-1]))
        self._places = np.frombuffer(places, "<u8")
        self.check_end(path, end)

    def places(self, number: int) -> Places:
        """The places of a file: uint64 (any,)."""
        return self._places[self.shard_rows[number] : self.shard_rows[number + 1]]

    def is_whole(self, number: int) -> bool:
        """See `ShardIndex.is_whole`."""
        return check_of(self.places(number)) == int(self.checks[number])

    def rows_from(self, get: Read, shards: range) -> list[tuple[int, bytes]]:
        """See `ShardIndex.rows_from`."""
        first, last = int(self.shard_rows[shards.start]), int(self.shard_rows[shards.stop])
        start = self.begin + 8 * first
        raw = get(start, start + 8 * (last - first)) if last > first else b""
        places = np.frombuffer(raw, "<u8")
        for shard in shards:
            rows = self.rows_of(shard)
            if check_of(places[rows.start - first : rows.stop - first]) != self.checks[shard]:
                raise ShardError(f"the rows of {self.shards.names[shard]} do not match their checksum")
        return [(start, raw)]

    def table(self, number: int) -> ShardTable:
        """See `ShardIndex.table`."""
        return ShardTable(self.shards[number], self.places(number).tobytes())


def check_of(*columns: NDArray[Any]) -> int:
    """A checksum of the rows of a shard: of its columns of uint64, the second uint32, however they are written."""
    digest = xxh3_64()
    for array, kind in zip(columns, ("<u8", "<u4", "<u8"), strict=False):
        digest.update(np.ascontiguousarray(array, dtype=kind).data)
    return digest.intdigest()


def head_bytes(path: str, begin: bytes) -> int:
    """The bytes of an index before its rows; where its first ones, `begin`, do not tell: how many of them would.

    Raises `ShardError`.
    """
    length = int.from_bytes(begin[16:_FIRST], "little")
    if begin[:8] != MAGIC:
        raise ShardError(f"{path}: not an index of this version, or damaged")
    if len(begin) < _FIRST + length:
        return _FIRST + length
    return _head(path, memoryview(begin), length)[2]


def kind_of(path: Path) -> str:
    """The name of the format of the files of an index. Raises OSError, `ShardError`."""
    with path.open("rb") as file:
        begin = file.read(_FIRST)
        begin += file.read(min(int.from_bytes(begin[16:], "little"), path.stat().st_size))
    length = len(begin) - _FIRST
    if begin[:8] != MAGIC or length <= 0:
        raise ShardError(f"{path}: not an index of this version, or damaged")
    return _head(path, memoryview(begin), length)[0].kind


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(path: Path, view: memoryview) -> tuple[Header, bytes, ShardList, NDArray[np.uint64], Rows, int]:
    """The header, its checksum, the shards, the checksums of their rows, how many these are, and where they begin."""
    length = int.from_bytes(view[16:_FIRST], "little")
    if bytes(view[:8]) != MAGIC or _FIRST + length > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    header, columns, end = _head(path, view, length)
    names = columns + header.shards * header.numbers * _NUMBER
    if end > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    identity = bytes(view[8:16])
    if xxh3_64_intdigest(view[16:end]) != int.from_bytes(identity, "little"):
        raise ShardError(f"{path}: the index is damaged: its checksum does not match")
    numbers = np.frombuffer(view, "<u8", header.shards * header.numbers, offset=columns)
    numbers = numbers.reshape(header.numbers, header.shards)
    ends, sizes, samples = numbers[:3].view("<i8")
    counts = samples if header.kind == TAR else numbers[5].view("<i8")
    shards = ShardList(ShardNames(view[names : names + header.names], ends), sizes, samples, numbers[3], header.faults)
    fits = (
        header.size_bytes in (4, 8)
        and all(header.layouts)
        and all(n < header.shards for n in [*header.faults, *header.links])
        and (header.kind == TAR or not header.layouts)
    )
    low = min(sizes.min(), samples.min(), counts.min()) if header.shards else 0
    if not fits or not shards.names.is_whole() or low < 0:
        raise ShardError(f"{path}: the index is damaged: its header does not fit itself")
    outside = shards.names.first_outside()
    if outside is not None:
        raise ShardError(f"{path}: the index is damaged: it names {outside!r}, which lies outside of the dataset")
    return header, identity, shards, numbers[4], counts, end


def _head(path: Path | str, view: memoryview, length: int) -> tuple[Header, int, int]:
    """The header, of `length` bytes; where the numbers of the shards begin, and the rows."""
    try:
        header = msgspec.msgpack.decode(view[_FIRST : _FIRST + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardError(f"{path}: the index is damaged: {error}") from error
    columns = aligned(_FIRST + length)
    return header, columns, aligned(columns + header.shards * header.numbers * _NUMBER + header.names)


def aligned(offset: int) -> int:
    """Where what follows this offset begins."""
    return offset + -offset % _ALIGN


def array_at(path: Path, view: memoryview, offset: int, kind: str, count: int) -> tuple[memoryview[int], int]:
    """So many numbers of the kind Q or I from an offset of an index on, and where what follows begins."""
    end = offset + count * (8 if kind == "Q" else 4)
    if end > len(view):
        raise ShardError(f"{path}: the index is cut short: {len(view)} bytes where {end} are needed")
    return view[offset:end].cast(kind), end + -end % 8  # type: ignore[call-overload]


def _nothing(path: Path, table: ShardTable) -> None:
    """Leave nothing beside a file."""


def _no_fault(path: Path, table: ShardTable) -> str:
    """Find nothing wrong beside a file."""
    return ""


def found_at(place: str) -> Any:
    """What lies at "package.module:NAME.name"."""
    module, _, name = place.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def index_name(kind: str) -> str:
    """The path of the index of files of a kind below their folder."""
    return INDEX_NAME if kind == TAR else f"{META}/savable.{kind}.index"


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of files that samples are read from in place.

    `read` finds out what the index says of a file, by its bytes and its name; damage is the entry's fault, not an
    error. `is_as_indexed` looks whether a file of the right size still is the one that has this number in an index.
    """

    name: str
    kind: ShardKind
    place: str  # "package.module:NAME" of this object: another process finds it so
    read: Callable[[ByteSource, str], ShardTable]
    is_as_indexed: Callable[[ByteSource, ShardIndex, int], bool]
    open_index: Callable[[Path, str], ShardIndex] = PlaceIndex
    all_used: bool = True  # whether every byte of a file is read in an epoch
    whole: bool = False  # behind a URL, whether a file is downloaded to index it, and not asked for at each start
    no_places: int = 0  # of a file that cannot be read: how many zeros
    no_digest: int = 0  # of such a file
    beside: tuple[str, str] = ("", "")  # files with the first suffix may have one beside them, with the second
    splits: str = ""  # the name of what lies in a folder of several splits
    for_others: str = ""  # behind the name of a file: that of what other programs read beside it
    leave_beside: Callable[[Path, ShardTable], None] = _nothing  # makes it
    fault_beside: Callable[[Path, ShardTable], str] = _no_fault  # why it is wrong

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return found_at, (self.place,)

    @property
    def index_name(self) -> str:
        """The path of the index below the folder of the files."""
        return index_name(self.name)

    def names_beside(self, name: str) -> list[str]:
        """What may lie beside a file."""
        own, other = self.beside
        companion = [self.companion(name)] if other and name.endswith(own) else []
        return [*companion, *([name + self.for_others] if self.for_others else [])]

    def companion(self, name: str) -> str:
        """The name of what lies beside a file; where it belongs to all files, it lies in their folder."""
        own, other = self.beside
        return name.removesuffix(own) + other if own else other

    def index_at(self, path: Path) -> ShardIndex:
        """The index of files of this format at `path`. Raises OSError, `ShardError`, ValueError."""
        return self.open_index(path, self.name)

    def scan(self, root: Path, name: str) -> ShardTable:
        """What the index says of a file on a disk. Raises OSError where the process may open no more files."""
        size = 0
        try:
            with opened(root / name) as file:
                size = file.size
                return self.read(file, name)
        except OSError as error:
            if is_out_of_handles(error):
                raise
            return self.unreadable(name, size, error.strerror or str(error))

    def unreadable(self, name: str, size: int, fault: str) -> ShardTable:
        """The table of a file of which nothing can be read."""
        entry = ShardEntry(name, size, 0, self.no_digest, encodable(f"{name}: {fault}"))
        return ShardTable(entry, bytes(8 * self.no_places))


class IndexedFiles:
    """The files `names` of an index of this format, None: all. `root` has their metadata.

    Those behind a URL are at `remote`, a `RemotePlace`. `tolerant`: the samples before a damage are taken. Sample `i`
    is the `i`-th when they are read one after the other.
    """

    def __init__(
        self,
        form: FileFormat,
        index: ShardIndex,
        index_path: Path,
        names: Sequence[str] | None,
        root: Path,
        remote: Any = None,
        *,
        tolerant: bool = False,
    ) -> None:
        self.form, self.index, self.index_path = form, index, index_path
        self.root, self.remote, self.tolerant = root, remote, tolerant
        self.address = str(root) if remote is None else remote.url
        numbers = None if names is None else index.numbers(names)
        if numbers is None or np.array_equal(numbers, np.arange(len(index.shards))):
            numbers = np.arange(len(index.shards))
            self.entries: ShardList = index.shards
        else:
            self.entries = index.shards.take(numbers)
        self.numbers = numbers  # in the index, int64 (shards,)
        self._whole: set[int] = set()  # files whose rows in the index match their checksums
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])  # int64 (shards + 1,)

    @property
    def mean_bytes(self) -> float:
        """The bytes of a sample, with what lies around it."""
        return int(self.entries.sizes.sum()) / max(int(self.firsts[-1]), 1)

    def shards_of(self, indices: Rows) -> Rows:
        """The shard of each of these samples."""
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def place(self, shard: int) -> str:
        """What messages call the file of a shard: its path or its URL."""
        return f"{self.address}/{self.entries.names[shard]}"

    def places(self, shard: int) -> Places:
        """What the index says of a file that is no tar: uint64 (any,). Raises `ShardError` if it is damaged."""
        if shard not in self._whole:
            self.check_rows(shard)
            self._whole.add(shard)
        return self._place_index.places(int(self.numbers[shard]))

    @cached_property
    def _place_index(self) -> PlaceIndex:
        assert isinstance(self.index, PlaceIndex), self.form
        return self.index

    def table(self, shard: int) -> ShardTable:
        """What the index says of a file, to be written into another. Raises `ShardError` if it is damaged."""
        self.check_rows(shard)
        return self.index.table(int(self.numbers[shard]))

    def check_rows(self, shard: int) -> None:
        """Raises `ShardError` unless what the index says of a file is as it was written."""
        if not self.index.is_whole(int(self.numbers[shard])):
            raise self.damaged(self.entries.names[shard])

    def is_as_indexed(self, shard: int, file: ByteSource) -> bool:
        """Whether a file of the right size is the one that was indexed."""
        return self.form.is_as_indexed(file, self.index, int(self.numbers[shard]))

    def damaged(self, shard: str) -> ShardError:
        """The error for a damaged index; `shard` names the file that it was needed for. One in the cache is removed."""
        cure = f"remove {self.index_path} and start again"
        if self.remote is not None:
            self.index_path.unlink(missing_ok=True)
            cure = "start again: it is downloaded, or made, again then"
        return ShardError(f"{self.address}: the index of {shard} is damaged; {cure}", reason="damaged index")
