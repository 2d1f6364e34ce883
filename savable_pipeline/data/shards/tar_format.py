"""Tars: their index rows, and the scan of their headers up to the first damage.

    starts   uint64 (samples,)      offset of the sample's first header in its shard
    layouts  uint32 (samples,)      the sample's number in the header's table of layouts: extensions in order, and
                                    512-byte header blocks before each payload. Absent if always 0
    firsts   uint64 (samples,)      index in `sizes` of the sample's first member. Absent if all samples have equally
                                    many members
    sizes    uint32/64 (members,)   size of each member's payload in bytes

A row is a sample. Members that are links are counted here, and tar_store.py resolves them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.core.files import NETWORK_ERRORS, replace_file
from savable_pipeline.core.wording import counted, encodable
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import (
    TAR,
    BlobIndex,
    BlobWriter,
    Header,
    ReadBytes,
    ShardIndex,
    ShardTable,
    array_at,
    blocks_of,
    check_of,
    kind_of,
    write_aligned,
)
from savable_pipeline.data.shards.number_spool import NumberSpool, spooled
from savable_pipeline.data.shards.shard_list import Count, ShardEntry, check_utf8
from savable_pipeline.data.shards.tar import BLOCK, Member, SampleInTar, members, sample_members, samples
from savable_pipeline.errors import ShardError

LayoutParts: TypeAlias = tuple[tuple[str, Count], ...]  # (extension, header blocks before its payload), ...
log = logging.getLogger(__name__)

_USUAL_END = 10_240 + 2 * BLOCK  # usual maximum of zero bytes at the end; GNU tar's records may be larger
_OFFSET = 8  # bytes of an offset in X.tar.idx
_AT_ONCE = 1024  # number of samples whose numbers are written together
_RECORD_SIZES = (1 << 14, 1 << 15, 1 << 16)  # other usual sizes of GNU tar's records, to which it pads the end


class Links(msgspec.Struct, frozen=True, array_like=True):
    """Number of links of a shard that would be parts of samples if they were files.

    `first` is the name of the first one.
    """

    count: Count
    first: str = ""


class TarColumns(msgspec.Struct, array_like=True):
    """Index rows of a tar. The arrays are little-endian bytes."""

    starts: memoryview  # uint64 (samples,)
    end: int = 0  # the offset after the last member
    layouts: list[LayoutParts] = []
    layout_of: memoryview = memoryview(b"")  # uint32 (samples,)
    sizes: memoryview = memoryview(b"")  # uint64 (members,)
    links: Links = Links(0)

    @classmethod
    def of(cls, table: ShardTable) -> TarColumns:
        """Decode the columns of a table."""
        return msgspec.msgpack.decode(table.rows, type=cls)

    def table(self, entry: ShardEntry, note: str = "") -> ShardTable:
        """Return the table of a shard with these rows, mapped if they are long."""
        fields = [getattr(self, name) for name in self.__struct_fields__]
        return ShardTable(entry, spooled(itertools.chain([bytes([0x90 + len(fields)])], *map(_packed, fields))), note)


def _packed(field: Any) -> list[bytes | memoryview]:
    """Return the pieces of a field as MessagePack. Bytes of any length follow 0xC6 and their length."""
    if isinstance(field, memoryview):
        return [b"\xc6" + field.nbytes.to_bytes(4, "big"), field]
    return [msgspec.msgpack.encode(field)]


class TarIndexHeader(msgspec.Struct, array_like=True):
    """Header of the index about all tars."""

    layouts: list[LayoutParts]
    members: Count  # members of every sample; 0 if they differ, see `firsts`
    size_bytes: int  # bytes of an element of `sizes`, 4 or 8
    sizes: Count  # length of `sizes`
    links: dict[int, Links] = {}  # by number of the shard, if it has links


class TarWriter(BlobWriter):
    """Writer of the rows of a `TarIndex`."""

    def __init__(self, new_file: Callable[[], IO[bytes]]) -> None:
        self._starts, self._layout_of, self._sizes = new_file(), new_file(), new_file()
        self._layouts: dict[LayoutParts, int] = {}
        self._links: dict[int, Links] = {}
        self._shards = self._parts = 0
        self._has_large = False  # whether a part has 4 GiB or more

    def add(self, rows: bytes) -> tuple[int, int]:
        """See `BlobWriter.add`."""
        columns = msgspec.msgpack.decode(rows, type=TarColumns)
        new_numbers = [self._layouts.setdefault(layout, len(self._layouts)) for layout in columns.layouts]
        starts, sizes = np.frombuffer(columns.starts, "<u8"), np.frombuffer(columns.sizes, "<u8")
        layout_of = np.frombuffer(columns.layout_of, "<u4")
        if new_numbers != [*range(len(new_numbers))]:  # without this test, a huge shard would be copied needlessly
            layout_of = np.array(new_numbers, "<u4")[layout_of]
        self._starts.write(starts.data)
        self._layout_of.write(layout_of.data)
        self._sizes.write(sizes.data)
        self._parts += len(sizes)
        self._has_large = self._has_large or (bool(len(sizes)) and int(sizes.max()) >= 1 << 32)
        if columns.links.count:
            self._links[self._shards] = columns.links
        self._shards += 1
        return len(starts), check_of(starts, layout_of, sizes)

    def format_data(self) -> bytes:
        """See `BlobWriter.format_data`."""
        return msgspec.msgpack.encode(
            TarIndexHeader(list(self._layouts), self._members, 8 if self._has_large else 4, self._parts, self._links)
        )

    def write(self, file: BinaryIO) -> None:
        """See `BlobWriter.write`."""
        write_aligned(file, blocks_of(self._starts, "<u8"))
        if len(self._layouts) > 1:
            write_aligned(file, blocks_of(self._layout_of, "<u4"))
        if not self._members:
            write_aligned(file, self._firsts())
        write_aligned(file, (each.astype(f"<u{8 if self._has_large else 4}") for each in blocks_of(self._sizes, "<u8")))

    @property
    def _members(self) -> int:
        """Return the number of members of every sample, or 0 if they differ."""
        lengths = {len(layout) for layout in self._layouts}
        return lengths.pop() if len(lengths) == 1 else 0

    def _firsts(self) -> Iterator[NDArray[Any]]:
        lengths = np.array([len(layout) for layout in self._layouts], dtype="<u8")
        first = 0
        for layout_of in blocks_of(self._layout_of, "<u4"):
            ends = first + np.cumsum(lengths[layout_of])
            yield np.concatenate([[first], ends[:-1]]).astype("<u8")
            first = int(ends[-1])


class Layout:
    """Extensions of a sample in order, and sizes of its headers.

    `member_of` has the number of the member with an extension, and `gaps` the bytes of headers before each payload.
    """

    __slots__ = ("gaps", "member_of")

    def __init__(self, parts: Iterable[tuple[str, int]]) -> None:
        pairs = list(parts)
        self.member_of = {extension: i for i, (extension, _) in enumerate(pairs)}
        self.gaps = [blocks * BLOCK for _, blocks in pairs]


def open_tar_index(path: Path) -> ShardIndex:
    """Open the index at `path`, of files of any format. Raises OSError, `ShardError`."""
    kind = kind_of(path)
    return TarIndex(path) if kind == TAR else BlobIndex(path, kind)


def _index_header(path: Path, header: Header) -> TarIndexHeader:
    """Decode the header about all tars. Raises `ShardError`."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        tar = msgspec.msgpack.decode(header.format_data, type=TarIndexHeader)
        if tar.size_bytes in (4, 8) and all(tar.layouts) and all(number < header.shards for number in tar.links):
            return tar
    raise ShardError(f"{path}: the index is damaged: its header does not fit itself")


class TarIndex(ShardIndex):
    """Open index of tars: start, layout and member sizes of each sample.

    It also has `links` by shard. Raises OSError.
    """

    writer = TarWriter

    def __init__(self, path: Path, kind: str = TAR) -> None:
        super().__init__(path, kind)
        view, tar_header = self.view, _index_header(path, self.header)
        if not np.array_equal(np.diff(self.shard_rows), self.shards.samples):
            raise ShardError(f"{path}: the index is damaged: its numbers of samples contradict each other")
        self._layout_parts, self.links = tar_header.layouts, tar_header.links
        self.layouts = [Layout(parts) for parts in tar_header.layouts]
        self.members = tar_header.members
        count = int(self.shard_rows[-1])
        self.starts, layouts_at = array_at(path, view, self.rows_start, "Q", count)
        self.layout_of, firsts_at = array_at(path, view, layouts_at, "I", count if len(self.layouts) > 1 else 0)
        self.firsts, sizes_at = array_at(path, view, firsts_at, "Q", 0 if self.members else count)
        self.sizes, end = array_at(path, view, sizes_at, "Q" if tar_header.size_bytes == 8 else "I", tar_header.sizes)
        self.check_end(path, end)
        self._array_offsets = self.rows_start, layouts_at, firsts_at, sizes_at

    def layout(self, row: int) -> Layout:
        """Return the layout of the sample in `row`."""
        return self.layouts[self.layout_of[row]] if self.layout_of else self.layouts[0]

    def extent(self, row: int, member: int, layout: Layout) -> tuple[int, int]:
        """Return offset and size in bytes of a member of the sample in `row`."""
        first = row * self.members if self.members else self.firsts[row]
        offset = self.starts[row] + layout.gaps[0]
        if not member:
            return offset, self.sizes[first]
        for i in range(member):
            offset += (self.sizes[first + i] + BLOCK - 1) // BLOCK * BLOCK + layout.gaps[i + 1]
        return offset, self.sizes[first + member]

    def part_sizes(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return the sizes in bytes of the parts of these samples, by extension."""
        layouts = np.asarray(self.layout_of)[rows] if self.layout_of else np.zeros(len(rows), dtype=np.uint32)
        firsts = rows * self.members if self.members else np.asarray(self.firsts)[rows].astype(np.int64)
        sizes = np.asarray(self.sizes)
        found: dict[str, list[NDArray[np.int64]]] = {}
        for number, layout in enumerate(self.layouts):
            of_layout = firsts[layouts == number]
            for extension, member in layout.member_of.items() if len(of_layout) else ():
                found.setdefault(extension, []).append(sizes[of_layout + member].astype(np.int64))
        return {extension: np.concatenate(parts) for extension, parts in found.items()}

    def is_whole(self, number: int) -> bool:
        """See `ShardIndex.is_whole`. A part larger than its shard is invalid too."""
        rows = self.rows_of(number)
        if (sizes := self._sizes_of(slice(rows.start, rows.stop))) is None:
            return False
        starts = np.asarray(self.starts)[rows.start : rows.stop]
        if check_of(starts, self._layouts_of(rows), np.asarray(sizes)) != self.checks[number]:
            return False
        return not len(starts) or max(int(starts.max()), int(np.asarray(sizes).max())) <= self.shards.sizes[number]

    def _layouts_of(self, rows: range) -> NDArray[np.uint32]:
        if not self.layout_of:
            return np.broadcast_to(np.uint32(0), len(rows))
        return np.asarray(self.layout_of)[rows.start : rows.stop]

    def _sizes_of(self, rows: slice) -> memoryview[int] | None:
        """Return the sizes of the members of these samples, or None if `firsts` or `layouts` are damaged."""
        if self.members:
            used = np.unique(np.asarray(self.layout_of)[rows]).tolist() if self.layout_of else [0]
            fits = all(n < len(self.layouts) and len(self.layouts[n].gaps) == self.members for n in used)
            fits = fits and rows.stop * self.members <= len(self.sizes)
            return self.sizes[rows.start * self.members : rows.stop * self.members] if fits else None
        layout_of, firsts = np.asarray(self.layout_of)[rows], np.asarray(self.firsts)[rows].astype(np.int64)
        if not len(firsts):
            return self.sizes[:0]
        if int(layout_of.max()) >= len(self.layouts):
            return None
        lengths = np.array([len(layout.gaps) for layout in self.layouts])[layout_of]
        ends = firsts[0] + np.cumsum(lengths)
        fits = bool((firsts[1:] == ends[:-1]).all()) and ends[-1] <= len(self.sizes)
        return self.sizes[int(firsts[0]) : int(ends[-1])] if fits else None

    def rows_from(self, get: ReadBytes, shards: range) -> list[tuple[int, bytes]]:
        """See `ShardIndex.rows_from`."""
        found: list[tuple[int, bytes]] = []

        def fetch(array: int, kind: str, first: int, count: int) -> NDArray[Any]:
            width = np.dtype(kind).itemsize
            start = self._array_offsets[array] + first * width
            raw = get(start, start + count * width) if count else b""
            found.append((start, raw))
            return np.frombuffer(raw, kind)

        bounds = self.shard_rows[shards.start : shards.stop + 1]
        row, count = int(bounds[0]), int(bounds[-1] - bounds[0])
        starts = fetch(0, "<u8", row, count)
        layout_of = fetch(1, "<u4", row, count) if self.layout_of else np.zeros(count, "<u4")
        if count and int(layout_of.max()) >= len(self.layouts):
            raise ShardError("its rows have no layout")
        ends = np.cumsum([0, *np.array([len(layout.gaps) for layout in self.layouts])[layout_of]])
        first = row * self.members
        if not self.members and count:
            firsts = fetch(2, "<u8", row, count).astype(np.int64)
            first = int(firsts[0])
            if (firsts - first != ends[:-1]).any():
                raise ShardError("its rows do not follow each other")
        if not 0 <= first <= len(self.sizes) - int(ends[-1]):
            raise ShardError("its sizes lie behind its end")
        sizes = fetch(3, "<u8" if self.sizes.itemsize == 8 else "<u4", first, int(ends[-1]))
        for shard, (begin, end) in zip(shards, itertools.pairwise((bounds - row).tolist()), strict=True):
            check = check_of(starts[begin:end], layout_of[begin:end], sizes[ends[begin] : ends[end]])
            if check != self.checks[shard]:
                raise ShardError(f"the rows of {self.shards.names[shard]} do not match their checksum")
        return found

    def header_matches(self, name: str, fd: int, row: int, max_members: int | None = None) -> bool:
        """Return whether members of a sample have one key and match the index.

        The first `max_members` are compared (None: all).
        """
        keys = set()
        try:
            layout = self.layout(row)
            found = sample_members(members(name, fd, self.starts[row]))
            for number, extension in enumerate(itertools.islice(layout.member_of, max_members)):
                member, key, found_extension = next(found)
                if found_extension != extension or (member.payload, member.size) != self.extent(row, number, layout):
                    return False
                keys.add(key)
        except (ShardError, IndexError, OverflowError, StopIteration):
            return False
        return len(keys) == 1

    def table(self, number: int) -> ShardTable:
        """See `ShardIndex.table`."""
        rows = self.rows_of(number)
        starts, sizes = np.asarray(self.starts)[rows.start : rows.stop], self._sizes_of(slice(rows.start, rows.stop))
        assert sizes is not None, number
        used, layout_of = np.unique(self._layouts_of(rows), return_inverse=True)
        layouts, links = [self._layout_parts[number] for number in used], self.links.get(number, Links(0))
        columns = layout_of.astype("<u4").data, np.asarray(sizes).astype("<u8").data
        return TarColumns(starts.data, 0, layouts, *columns, links).table(self.shards[number])


def read_tar_table(file: ByteSource, name: str) -> ShardTable:
    """Scan a local tar.

    Damage becomes the `fault` of its entry, which still has the samples before it.
    """
    found, key_hashes = ShardRows(name), NumberSpool()
    fault, fd = "", file.fileno()
    try:
        for sample in samples(name, fd, found.links):
            found.add(sample)
            key_hashes.append(hash(sample.key) % (1 << 64))
        for member in members(name, fd, found.end):
            found.end = member.end
    except OSError as error:
        if error.errno in NETWORK_ERRORS:  # an error of the network, after which it is scanned again
            raise
        fault = f"{name}: {error.strerror}"
    except ShardError as error:
        fault = str(error)
    if not fault:
        _warn_if_suspicious(name, file.size, found)
    note = _torn_warning(name, fd, found, key_hashes)
    if note:
        log.warning("%s: %s", name, note)
    return found.table(file.size, fault, note)


def tar_matches_index(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether three samples of a tar are where the index says.

    They are the first, a middle and the last one. The rows of the index must be valid.
    """
    assert isinstance(index, TarIndex), index
    rows, name = index.rows_of(number), index.shards.names[number]
    checked = {rows[0], rows[len(rows) // 2], rows[-1]} if rows else set()
    return all(index.header_matches(name, file.fileno(), row) for row in checked)


def _warn_if_suspicious(path: str, size: int, found: ShardRows) -> None:
    """Warn if samples seem to be missing from a complete tar."""
    zeros = size - found.end
    if not found.samples or size - found.sample_bytes > max(size // 2, _USUAL_END):
        log.warning(
            "%s: its %d samples take %d of %d bytes. The rest is skipped: name files KEY.EXTENSION to read it",
            path,
            found.samples,
            found.sample_bytes,
            size,
        )
    elif zeros > _USUAL_END and not any(size % record == 0 and zeros < record + 2 * BLOCK for record in _RECORD_SIZES):
        log.warning(
            "%s: %d bytes of zeros at its end, where tars mostly have at most %d. Check that its end is not lost",
            path,
            zeros,
            _USUAL_END,
        )


def _torn_warning(name: str, fd: int, found: ShardRows, key_hashes: NumberSpool) -> str:
    """Return a warning of samples whose files are in two places, as of `tar cf x.tar *.jpg *.txt`, or "".

    Each place is read as a sample of its own. There is no warning if both have a file of the same extension, because
    two samples then happen to have one key.
    """
    torn, first_parts = list[int](), dict[int, set[str]]()  # rows, and extensions by hash of the key
    extension_sets = [{extension for extension, _ in layout} for layout in found.layouts]
    layout_of = found.layout_of.numbers()
    for row, key_hash in key_hashes.repeated():
        extensions = extension_sets[layout_of[row]]
        if not first_parts.setdefault(key_hash, extensions) & extensions:
            torn.append(row)
    if not torn:
        return ""
    _, key, _ = next(sample_members(members(name, fd, int(found.starts.numbers()[torn[0]]))))
    return encodable(
        f"the files of {counted(len(torn), 'sample')} do not lie side by side, such as those of {key!r}, so each is "
        "read as several samples, each with some of the parts; write the tar again in the order of names, as "
        "`tar --sort=name` does of a folder"
    )


class ShardRows:
    """Index rows of the samples found so far in a shard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = 0
        self.starts, self.layout_of, self.sizes = NumberSpool(), NumberSpool("<u4"), NumberSpool()
        self.layouts: dict[LayoutParts, int] = {}
        self.digest = xxh3_64()
        self.end = 0  # offset after the last member
        self.sample_bytes = 0  # including headers
        self.links: list[Member] = []  # links that would be parts of samples if they were files

    def add(self, sample: SampleInTar) -> None:
        """Add a sample, which must follow all earlier ones.

        Raises `ShardError` for a name that is not UTF-8.
        """
        layout = _layout(sample)
        for extension, _ in layout if layout not in self.layouts else ():
            check_utf8(self.name, extension)
        self.starts.buffer.append(sample.members[0].header)
        self.layout_of.buffer.append(self.layouts.setdefault(layout, len(self.layouts)))
        self.sizes.buffer.extend([member.size for member in sample.members])
        self.samples += 1
        if self.samples % _AT_ONCE == 0:
            for column in (self.starts, self.layout_of, self.sizes):
                column.write()
        self.end = sample.members[-1].end
        self.sample_bytes += self.end - sample.members[0].header
        for member in sample.members:
            self.digest.update(f"{member.name}\0{member.payload}\0{member.size}\0".encode("utf-8", "surrogateescape"))

    def table(self, size: int, fault: str, note: str = "") -> ShardTable:
        """Return the table of the shard, which has `size` bytes and this fault."""
        starts, layout_of, sizes = (each.numbers().data for each in (self.starts, self.layout_of, self.sizes))
        links = Links(len(self.links), encodable(self.links[0].name) if self.links else "")
        entry = ShardEntry(self.name, size, self.samples, self.digest.intdigest(), encodable(fault))
        return TarColumns(starts, self.end, list(self.layouts), layout_of, sizes, links).table(entry, note)


def _layout(sample: SampleInTar) -> LayoutParts:
    previous_ends = [sample.members[0].header, *(member.end for member in sample.members)]
    blocks = [(member.payload - end) // BLOCK for member, end in zip(sample.members, previous_ends, strict=False)]
    return tuple(zip(sample.extensions, blocks, strict=True))


def write_tar_idx(shard: Path, table: ShardTable) -> None:
    """Write `X.tar.idx`, unless the folder is read-only.

    It has the offsets of the samples and of the end, as little-endian uint64. A file with other offsets is replaced
    only if it is older than its shard.
    """
    offsets = tar_idx(table)
    path = shard.with_suffix(".tar.idx")
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_mtime_ns >= shard.stat().st_mtime_ns:
            if path.read_bytes() != offsets:
                log.warning("%s: not the offsets of the shard's samples. The file is left as it is", path)
            return
        replace_file(path, [offsets])


def tar_idx(table: ShardTable) -> bytes:
    """Return the valid content of `X.tar.idx`."""
    rows = TarColumns.of(table)
    return spooled([rows.starts, rows.end.to_bytes(_OFFSET, "little")])


def tar_idx_fault(shard: Path, table: ShardTable) -> str:
    """Return how the offsets in .tar.idx differ from those of the samples, or "".

    The result is also "" without such a file.
    """
    path = shard.with_suffix(".tar.idx")
    expected = tar_idx(table)
    try:
        if path.stat().st_size != len(expected):
            found = path.stat().st_size / _OFFSET - 1
            return f"{path.name} has offsets of {found:g} samples, the shard has {len(expected) // _OFFSET - 1}"
        found_offsets = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if found_offsets == expected:
        return ""
    first = int((np.frombuffer(found_offsets, "<u8") != np.frombuffer(expected, "<u8")).argmax())
    return f"{path.name} has another offset for sample {first} than the shard"
