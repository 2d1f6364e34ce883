"""Index of a folder of shards of any format, in columns instead of objects.

    "SAVIDX06" │ xxh3_64 of the header and the shards │ header length u64 │ header: MessagePack │ padding
    │ shards: ends │ sizes │ samples │ digests │ checks │ counts │ names │ padding
    │ rows

    ends … digests   uint64 (shards,)  see `ShardList`. The names are sorted
    checks, counts   uint64 (shards,)  a checksum of each shard's rows, and their number
    rows             the format's data about each shard: `BlobIndex`; for tars see tar_format.py

A shard's rows are consecutive, in the order of the shards. All arrays are little-endian. A shard's rows are checked
when the shard is opened. The numbers and names of shards are used without a copy, so opening an index takes hardly any
time, however many samples and shards it has.

    Format          how to recognize, index, check and open files of a kind
    ShardIndex      an open index
    IndexedFiles    some files of an index, with samples numbered through all of them
"""

from __future__ import annotations

import bisect
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.files import lacks_handles, with_handles, with_retries
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource, WholeFile, opened
from savable_pipeline.data.shards.metadata import INDEX_NAME, META
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.data.shards.shard_list import Count, Rows, ShardEntry, ShardList, ShardNames
from savable_pipeline.errors import ShardError

FileBlob: TypeAlias = NDArray[np.uint64]  # data of a format about a file: (any,)
ReadBytes: TypeAlias = Callable[[int, int], bytes]  # returns bytes `start` to `stop - 1` of an index

INDEX_MAGIC = b"SAVIDX06"
TAR = "tar"
_LFS = b"version https://git-lfs.github.com/spec/"
PARTS = "parts"  # name of a file beside an index in the cache that has only some of its rows: see `IndexParts`
_HEADER_START = 24  # offset of the header, whose length is in the 8 bytes before it
_ALIGN = 64
_BLOCK = 1 << 18  # bytes to copy at a time
PER_SHARD = 6  # numbers of each shard: ends … counts
_NUMBER = 8  # bytes of each of these numbers


class Header(msgspec.Struct, array_like=True):
    """Header of an index, before its arrays.

    `format_data` is the format's data about all files.
    """

    shards: Count
    names: Count  # in bytes
    faults: dict[int, str]  # by number of the shard
    kind: str  # name of the format
    format_data: bytes = b""


class ShardTable(msgspec.Struct):
    """Scanned content of one file, to be joined into an index.

    `rows` are in the format's encoding: a blob, or `TarColumns` for tars. `note` is a remark that is not a fault.
    """

    entry: ShardEntry
    rows: bytes  # or a view of a mapped file, if there are many
    note: str = ""


class BlobWriter:
    """Collects the rows of files in order, and writes them into a `BlobIndex`.

    Another index has a subclass. `new_file` returns a file without a name.
    """

    def __init__(self, new_file: Callable[[], IO[bytes]]) -> None:
        self._blob = new_file()

    def add(self, rows: bytes) -> tuple[int, int]:
        """Add the rows of the next file, and return their number and checksum."""
        self._blob.write(rows)
        return len(rows) // 8, check_of(np.frombuffer(rows, "<u8"))

    def format_data(self) -> bytes:
        """Return the format's data about all files. Blobs have none."""
        return b""

    def write(self, file: BinaryIO) -> None:
        """Write all rows, as arrays that each start at a multiple of 8 bytes."""
        write_aligned(file, blocks_of(self._blob, "<u8"))


class ShardIndex(ABC):
    """An open index: `shards`, and the rows of each. Raises OSError, `ShardError`.

    `shard_rows`, int64 (shards + 1,), is the first row of each shard, then the number of rows. `identity` is the
    checksum of header and shards. `kind` is the name of the format, and a `writer` writes the rows.
    """

    writer: ClassVar[type[BlobWriter]] = BlobWriter

    def __init__(self, path: Path, kind: str) -> None:
        # Rows that a downloading process adds to a partly cached index must appear here, so it is mapped.
        is_partly_cached = path.with_name(PARTS).exists()
        self.file = with_handles(lambda: WholeFile(path, mapped=is_partly_cached))
        self.view = self.file.view
        self.header, self.identity, self.shards, self.checks, counts, self.rows_start = _read_header(path, self.view)
        if self.header.kind != kind:
            raise ShardError(f"{path}: the index is damaged: it is of {self.header.kind} files, not of {kind} files")
        self.shard_rows = np.concatenate([[0], np.cumsum(counts)])

    def check_end(self, path: Path, end: int) -> None:
        """Raise `ShardError` unless the rows end at the end of the file."""
        if end != len(self.view):
            raise ShardError(f"{path}: {len(self.view)} bytes, but the header says {end}")

    def number(self, name: str) -> int:
        """Return the number of a shard. Raises KeyError if it is missing."""
        found = bisect.bisect_left(self.shards.names, name)
        if found == len(self.shards) or self.shards.names[found] != name:
            raise KeyError(name)
        return found

    def numbers(self, names: Sequence[str]) -> Rows:
        """Return the numbers of these shards, int64 (names,).

        Raises KeyError if one is missing.
        """
        if len(names) == len(self.shards) and ShardNames.of(names).text == self.shards.names.text:
            return np.arange(len(names))
        if len(names) < len(self.shards) // 16:  # bisecting costs less than a table of all names
            return np.fromiter(map(self.number, names), np.int64, len(names))
        known = {name: number for number, name in enumerate(self.shards.names)}
        return np.fromiter(map(known.__getitem__, names), np.int64, len(names))

    def rows_of(self, number: int) -> range:
        """Return the rows of the shard with this number."""
        return range(int(self.shard_rows[number]), int(self.shard_rows[number + 1]))

    @abstractmethod
    def is_whole(self, number: int) -> bool:
        """Return whether the rows of a shard match their checksum and are valid."""

    @abstractmethod
    def rows_from(self, get: ReadBytes, shards: range) -> list[tuple[int, bytes]]:
        """Return for each array the range of these shards, as (offset, bytes).

        The ranges are read from a copy of this file, of which `get(start, stop)` returns bytes. Raises `ShardError`
        unless the rows match the checksums of this file.
        """

    @abstractmethod
    def table(self, number: int) -> ShardTable:
        """Return the rows of one shard, to write them into another index.

        They must be valid.
        """


class BlobIndex(ShardIndex):
    """Index of files with a `blob` of uint64 each. A row is one number."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(path, kind)
        blob, end = array_at(path, self.view, self.rows_start, "Q", int(self.shard_rows[-1]))
        self._blob = np.frombuffer(blob, "<u8")
        self.check_end(path, end)

    def blob(self, number: int) -> FileBlob:
        """Return the blob of a file: uint64 (any,)."""
        return self._blob[self.shard_rows[number] : self.shard_rows[number + 1]]

    def is_whole(self, number: int) -> bool:
        """See `ShardIndex.is_whole`."""
        return check_of(self.blob(number)) == int(self.checks[number])

    def rows_from(self, get: ReadBytes, shards: range) -> list[tuple[int, bytes]]:
        """See `ShardIndex.rows_from`."""
        first, last = int(self.shard_rows[shards.start]), int(self.shard_rows[shards.stop])
        start = self.rows_start + 8 * first
        raw = get(start, start + 8 * (last - first)) if last > first else b""
        blob = np.frombuffer(raw, "<u8")
        for shard in shards:
            rows = self.rows_of(shard)
            if check_of(blob[rows.start - first : rows.stop - first]) != self.checks[shard]:
                raise ShardError(f"the rows of {self.shards.names[shard]} do not match their checksum")
        return [(start, raw)]

    def table(self, number: int) -> ShardTable:
        """See `ShardIndex.table`."""
        return ShardTable(self.shards[number], cast("bytes", self.blob(number).view(np.uint8).data))


def check_of(*columns: NDArray[Any]) -> int:
    """Return a checksum of the rows of a shard, independent of their encoding.

    The rows are passed as columns of uint64, except the second, which is of uint32.
    """
    digest = xxh3_64()
    for array, kind in zip(columns, ("<u8", "<u4", "<u8"), strict=False):
        digest.update(np.ascontiguousarray(array, dtype=kind).data)
    return digest.intdigest()


def head_bytes(path: str, begin: bytes) -> int:
    """Return the number of bytes of an index before its rows.

    If the first bytes, `begin`, are too few to tell, return how many are needed. Raises `ShardError`.
    """
    length = int.from_bytes(begin[16:_HEADER_START], "little")
    if begin[:8] != INDEX_MAGIC:
        raise ShardError(f"{path}: not an index of this version, or damaged")
    if len(begin) < _HEADER_START + length:
        return _HEADER_START + length
    _, _, rows_start = _head(path, memoryview(begin), length)
    return rows_start


def kind_of(path: Path) -> str:
    """Return the name of the format of an index. Raises OSError, `ShardError`."""
    with path.open("rb") as file:
        begin = file.read(_HEADER_START)
        begin += file.read(min(int.from_bytes(begin[16:], "little"), path.stat().st_size))
    head_bytes(str(path), begin)  # raises for another file
    header, _, _ = _head(path, memoryview(begin), len(begin) - _HEADER_START)
    return header.kind


def _read_header(path: Path, view: memoryview) -> tuple[Header, bytes, ShardList, NDArray[np.uint64], Rows, int]:
    """Return the header, its checksum, the shards, the checksums and counts of their rows, and where rows start."""
    length = int.from_bytes(view[16:_HEADER_START], "little")
    if bytes(view[:8]) != INDEX_MAGIC or _HEADER_START + length > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    header, columns_start, rows_start = _head(path, view, length)
    names_start = columns_start + header.shards * PER_SHARD * _NUMBER
    if rows_start > len(view):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    identity = bytes(view[8:16])
    if xxh3_64_intdigest(view[16:rows_start]) != int.from_bytes(identity, "little"):
        raise ShardError(f"{path}: the index is damaged: its checksum does not match")
    numbers = np.frombuffer(view, "<u8", header.shards * PER_SHARD, columns_start).reshape(PER_SHARD, header.shards)
    ends, sizes, samples = numbers[:3].view("<i8")
    digests, checks, counts = numbers[3], numbers[4], numbers[5].view("<i8")
    names = ShardNames(view[names_start : names_start + header.names], ends)
    shards = ShardList(names, sizes, samples, digests, header.faults)
    lowest = min(sizes.min(), samples.min(), counts.min()) if header.shards else 0
    fits = all(number < header.shards for number in header.faults) and shards.names.is_whole()
    if not fits or lowest < 0:
        raise ShardError(f"{path}: the index is damaged: its header does not fit itself")
    if (outside := shards.names.first_outside()) is not None:
        raise ShardError(f"{path}: the index is damaged: {outside!r} is outside the dataset")
    return header, identity, shards, checks, counts, rows_start


def _head(path: Path | str, view: memoryview, length: int) -> tuple[Header, int, int]:
    """Return the header of `length` bytes, and the offsets of the shards' numbers and of the rows."""
    try:
        header = msgspec.msgpack.decode(view[_HEADER_START : _HEADER_START + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardError(f"{path}: the index is damaged: {error}") from error
    columns_start = aligned(_HEADER_START + length)
    return header, columns_start, aligned(columns_start + header.shards * PER_SHARD * _NUMBER + header.names)


def aligned(offset: int) -> int:
    """Round an offset up to a multiple of 64."""
    return offset + -offset % _ALIGN


def blocks_of(file: IO[bytes], kind: str) -> Iterator[NDArray[Any]]:
    """Yield the numbers in a file in blocks."""
    file.seek(0)
    while block := file.read(_BLOCK):
        yield np.frombuffer(block, kind)


def write_aligned(file: BinaryIO, arrays: Iterable[NDArray[Any]]) -> None:
    """Write arrays in sequence, padded to a multiple of 8 bytes."""
    written = 0
    for each in arrays:
        file.write(each.data)
        written += each.nbytes
    file.write(bytes(-written % 8))


def array_at(path: Path, view: memoryview, offset: int, kind: str, count: int) -> tuple[memoryview[int], int]:
    """Return numbers at an offset of an index, and the offset of the next array.

    They are `count` uint64 of the kind Q, or uint32 of the kind I.
    """
    end = offset + count * (8 if kind == "Q" else 4)
    if end > len(view):
        raise ShardError(f"{path}: the index is cut short: {len(view)} bytes where {end} are needed")
    return view[offset:end].cast(kind), end + -end % 8  # type: ignore[call-overload]


def index_name(kind: str) -> str:
    """Return the path of the index for files of a kind, relative to their folder."""
    return INDEX_NAME if kind == TAR else f"{META}/savable.{kind}.index"


def marker_object(heads: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in the marker `name`, or {} if it has none."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(heads.get(name, b""))
        return found if isinstance(found, dict) else {}
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A kind of files that samples are read from in place.

    Variables of this type are called `form`. `stores.formats.FORMATS` has all of them. A format needs the first four
    fields. Each function must be at module level, or a `functools.partial` of one, so that a format can be pickled for
    other processes.
    """

    name: str
    suffixes: tuple[str, ...]
    """Suffixes of its files."""
    read: Callable[[ByteSource, str], ShardTable]
    """Scans a file by its bytes and its name. Damage is the entry's fault instead of an error."""
    store: Callable[..., Any]
    """Opens the `RecordStore` of `IndexedFiles`, with settings by name."""
    settings: tuple[str, ...] = ()
    """The names of the settings that `store` takes from users."""
    inspect: Mapping[str, Any] = field(default_factory=dict)
    """Settings for commands that inspect files without the user's settings."""
    is_same: Callable[[ByteSource, ShardIndex, int], bool] | None = None
    """Returns whether a file of the indexed size equals the one with this number. None: scan the file to compare it."""
    packed: tuple[str, ...] = ()
    """Suffixes of compressed files, which cannot be read in place."""
    markers: tuple[str, ...] = ()
    """Names of metadata files of other programs, relative to the folder."""
    claims: Callable[[Mapping[str, bytes]], bool] | None = None
    """Returns whether the existing markers, by name, claim this format."""
    listed: Callable[[Mapping[str, bytes]], list[tuple[str, ...]] | None] | None = None
    """Returns the names that each file may have, if the markers list them. Raises ValueError."""
    choose: tuple[str, Callable[[Sequence[str]], list[str]]] | None = None
    """A string in the name of a characteristic file, and a function that selects the files of this format."""
    by_setting: Mapping[str, Callable[[Format], Format]] = field(default_factory=dict)
    """By name of a setting that changes the index: a function that returns the format with this setting."""
    variant: str = ""
    """Distinguishes the index for these settings, such as `key_end=last`."""
    reader: str = ""
    """The name of the format whose reader also reads this one, if it has no reader of its own."""
    whole: bool = False
    """Whether remote files are downloaded whole to index them. Then starts do not ask for their stamps."""
    no_rows: bytes = b""
    """The rows in the index of a file that cannot be read."""
    sidecar: tuple[str, str] = ("", "")
    """The suffix of files that may have a sidecar, and the suffix that replaces it in the name of the sidecar."""
    index: ClassVar[type[ShardIndex]] = BlobIndex
    offsets_suffix: ClassVar[str] = ""
    """Suffix appended to a file's name for its file of offsets, which other programs read: see `write_offsets`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and self.index_kind == other.index_kind

    def __hash__(self) -> int:
        return hash(self.index_kind)

    @property
    def index_kind(self) -> str:
        """Return the name of the format in the index."""
        return f"{self.name}.{self.variant}" if self.variant else self.name

    @property
    def index_name(self) -> str:
        """Return the path of the index, relative to the folder of the files."""
        return index_name(self.index_kind)

    def files(self, names: Sequence[str], heads: Mapping[str, bytes]) -> list[str]:
        """Return the names that are files of this format, sorted.

        If a marker lists files, missing ones are included. Raises ValueError if it cannot be read.
        """
        listed = None if self.listed is None else self.listed(heads)
        if listed is None:
            return sorted(filter(self.has, names)) if self.choose is None else self.choose[1](names)
        existing, chosen = set(names), set[str]()
        for alternatives in listed:
            # the longest alternative is the compressed file, and others are its decompressed copies
            compressed = max(alternatives, key=len)
            name = next((name for name in alternatives if name in existing), compressed)
            if not is_inside(name) or name in chosen:
                fault = "named twice" if name in chosen else "outside the folder"
                raise ValueError(f"{name}: {fault} by {' or '.join(self.markers)}. Copy the folder again")
            chosen.add(name)
        return sorted(chosen)

    def for_settings(self, settings: dict[str, Any]) -> Format:
        """Return the format for these settings of the store."""
        setting = next((name for name in self.by_setting if settings.get(name) is not None), "")
        return self.by_setting[setting](self) if setting else self

    def has(self, name: str) -> bool:
        """Return whether a name has a suffix of this format, ignoring case."""
        return name.lower().endswith(self.suffixes)

    def packs(self, name: str) -> bool:
        """Return whether a name has a suffix of this format's compressed files.

        Case is ignored.
        """
        return bool(self.packed) and name.lower().endswith(self.packed)

    def sidecar_names(self, name: str) -> list[str]:
        """Return the names of the sidecars that a file may have."""
        own, other = self.sidecar
        companion = [self.companion(name)] if other and name.lower().endswith(own) else []
        return [*companion, *([name + self.offsets_suffix] if self.offsets_suffix else [])]

    def companion(self, name: str) -> str:
        """Return the name of a file's sidecar.

        A sidecar shared by several files is in their folder.
        """
        own, other = self.sidecar
        return name[: len(name) - len(own)] + other if own else other

    def index_at(self, path: Path) -> ShardIndex:
        """Open the index of files of this format at `path`.

        Raises OSError, `ShardError`, ValueError.
        """
        return self.index(path, self.index_kind)

    def scan(self, root: Path, name: str) -> ShardTable:
        """Scan a local file for the index.

        Raises OSError if no descriptor is left, and `RemoteError` for a network disk.
        """
        size = 0

        def read() -> ShardTable:
            nonlocal size
            with opened(root / name) as file:
                size = file.size
                if file.head(len(_LFS)) == _LFS:
                    return self.unreadable(name, size, "a pointer of Git LFS, not the file; `git lfs pull` fetches it")
                return self.read(file, name)

        try:
            return with_retries(root / name, read)
        except OSError as error:
            if lacks_handles(error):
                raise
            return self.unreadable(name, size, error.strerror or str(error))

    def matches_index(self, file: ByteSource, index: ShardIndex, number: int) -> bool:
        """Return whether a file is the one with this number in an index.

        It must have the indexed size. Raises OSError.
        """
        if self.is_same is not None:
            return self.is_same(file, index, number)
        return self.read(file, index.shards.names[number]).entry.digest == int(index.shards.digests[number])

    def unreadable(self, name: str, size: int, fault: str) -> ShardTable:
        """Return the table of a file that cannot be read."""
        return ShardTable(ShardEntry(name, size, 0, 0, encodable(f"{name}: {fault}")), self.no_rows)

    def write_offsets(self, path: Path, table: ShardTable) -> None:
        """Write the sidecar of an indexed file that other programs read."""

    def offsets_error(self, path: Path, table: ShardTable) -> str:
        """Return what is wrong with the sidecar that `write_offsets` writes, or ""."""
        return ""


class IndexedFiles:
    """Files `names` of an index of this format (None: all).

    `root` is the folder of their metadata. Remote files are at `remote`, a `RemoteFolder`. With `tolerant`, the samples
    before damage are used. Samples are numbered through all files.
    """

    def __init__(
        self,
        form: Format,
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
            self.entries = index.shards.select(numbers)
        self.numbers = numbers  # numbers in the index, int64 (shards,)
        self._whole: set[int] = set()  # files whose index rows match their checksums
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])  # int64 (shards + 1,)

    @property
    def mean_bytes(self) -> float:
        """Return the mean bytes of a sample, including headers and padding."""
        return int(self.entries.sizes.sum()) / max(int(self.firsts[-1]), 1)

    def shards_of(self, indices: Rows) -> Rows:
        """Return the number of the shard of each of these samples."""
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def where(self, shard: int) -> str:
        """Return the path or URL of a shard's file, for messages."""
        return f"{self.address}/{self.entries.names[shard]}"

    def blob(self, shard: int) -> FileBlob:
        """Return the index blob of a file that is not a tar: uint64 (any,).

        Raises `ShardError` if it is damaged.
        """
        if shard not in self._whole:
            self.check_rows(shard)
            self._whole.add(shard)
        assert isinstance(self.index, BlobIndex), self.form
        return self.index.blob(int(self.numbers[shard]))

    def table(self, shard: int) -> ShardTable:
        """Return the rows of a file, to write them into another index.

        Raises `ShardError` if they are damaged.
        """
        self.check_rows(shard)
        return self.index.table(int(self.numbers[shard]))

    def check_rows(self, shard: int) -> None:
        """Raise `ShardError` unless the index rows of a file match their checksum."""
        if not self.index.is_whole(int(self.numbers[shard])):
            raise self.damaged(self.entries.names[shard])

    def matches_index(self, shard: int, file: ByteSource) -> bool:
        """Return whether a file of the indexed size is the one that was indexed."""
        return self.form.matches_index(file, self.index, int(self.numbers[shard]))

    def damaged(self, shard: str) -> ShardError:
        """Return the error for a damaged index, and remove the index from the cache.

        `shard` names the file whose rows are damaged.
        """
        fix = f"Remove {self.index_path} and start again"
        if self.remote is not None:
            self.index_path.unlink(missing_ok=True)
            fix = "Start again to rebuild it"
        return ShardError(f"{self.address}: the index of {shard} is damaged. {fix}", reason="damaged index")
