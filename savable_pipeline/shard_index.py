"""The index of a folder of shards: where every member of every sample lies, in one memory-mapped file.

Made on first use by one process, under a lock, and kept in `.nv-meta/savable.index` beside the shards (in a cache
where the place is read-only). `X.tar.idx`, which Megatron-Energon reads, is written beside each shard too.

    "SAVIDX01" │ xxh3_64 of the rest │ header length u64 │ header: MessagePack │ padding │ starts │ layouts │ firsts
    │ sizes

    starts   uint64 (samples,)      offset of the sample's first header in its shard
    layouts  uint32 (samples,)      which extensions it has, in order, and how many 512-byte blocks of headers stand
                                    before each payload: a number in the header's table. Left out if it is always 0
    firsts   uint64 (samples,)      where its sizes start. Left out if all samples have as many members
    sizes    uint32/64 (members,)   size of each member's payload in bytes

Samples are in shard order; a shard's rows are consecutive. All arrays are little-endian.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.errors import ShardError
from savable_pipeline.tar import BLOCK, Extent, members, padded, samples

log = logging.getLogger(__name__)

INDEX_NAME = ".nv-meta/savable.index"
_MAGIC = b"SAVIDX01"
_ALIGN = 64


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """A shard as the index knows it: name relative to the root, bytes, samples, and a hash of names and places."""

    name: str
    size: int
    samples: int
    digest: int


class _Header(msgspec.Struct, array_like=True):
    shards: list[ShardEntry]
    layouts: list[list[tuple[str, int]]]  # per layout: (extension, header blocks before its payload), ...
    members: int  # of every sample; 0: see `firsts`
    size_bytes: int  # 4 or 8: what one of `sizes` takes


@dataclass(frozen=True, slots=True)
class ShardTable:
    """What a scan of one shard found, still to be joined with the others."""

    entry: ShardEntry
    starts: list[int]
    end: int
    layouts: list[tuple[tuple[str, int], ...]]
    sizes: list[int]


class Layout:
    """The extensions of a sample in order, and how to find the payload of each."""

    __slots__ = ("gaps", "position")

    def __init__(self, parts: Iterable[tuple[str, int]]) -> None:
        pairs = list(parts)
        self.position = {extension: i for i, (extension, _) in enumerate(pairs)}
        self.gaps = [blocks * BLOCK for _, blocks in pairs]


class ShardIndex:
    """An open index: `shards`, and per sample its start, layout and member sizes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)
        header, offset = _read_header(path, view)
        self.shards = header.shards
        self.layouts = [Layout(parts) for parts in header.layouts]
        self.members = header.members
        count = sum(entry.samples for entry in header.shards)
        self.starts, offset = _array(path, view, offset, "Q", count)
        self.layout_of, offset = _array(path, view, offset, "I", count if len(header.layouts) > 1 else 0)
        self.firsts, offset = _array(path, view, offset, "Q", 0 if header.members else count)
        rest = (len(view) - offset) // header.size_bytes
        self.sizes, _ = _array(path, view, offset, "I" if header.size_bytes == 4 else "Q", rest)

    def tables(self) -> dict[str, tuple[ShardEntry, int]]:
        """By name: the shard's entry and the row of its first sample."""
        rows = {}
        row = 0
        for entry in self.shards:
            rows[entry.name] = (entry, row)
            row += entry.samples
        return rows

    def layout(self, row: int) -> Layout:
        """The layout of the sample in `row`."""
        return self.layouts[self.layout_of[row]] if self.layout_of else self.layouts[0]

    def place(self, row: int, member: int, layout: Layout) -> tuple[int, int]:
        """Offset and size in bytes of member number `member` of the sample in `row`."""
        first = row * self.members if self.members else self.firsts[row]
        offset = self.starts[row] + layout.gaps[0]
        if not member:
            return offset, self.sizes[first]
        for i in range(member):
            offset += padded(self.sizes[first + i]) + layout.gaps[i + 1]
        return offset, self.sizes[first + member]

    def table(self, name: str) -> ShardTable:
        """The rows of one shard, to be written into another index."""
        entry, row = self.tables()[name]
        rows = range(row, row + entry.samples)
        layouts = [self.layout(r) for r in rows]
        parts = [tuple((e, gap // BLOCK) for e, gap in zip(o.position, o.gaps, strict=True)) for o in layouts]
        sizes = [self.place(r, i, o)[1] for r, o in zip(rows, layouts, strict=True) for i in range(len(o.gaps))]
        return ShardTable(entry, [self.starts[r] for r in rows], 0, parts, sizes)


def scan(root: Path, name: str) -> ShardTable:
    """Read every header of one shard. Raises `ShardError`."""
    path = root / name
    starts: list[int] = []
    layouts: list[tuple[tuple[str, int], ...]] = []
    sizes: list[int] = []
    digest = xxh3_64()
    end = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        for extent in samples(str(path), fd):
            starts.append(extent.members[0].header)
            layouts.append(_layout(extent))
            sizes.extend(member.size for member in extent.members)
            end = extent.members[-1].end
            for member in extent.members:
                digest.update(f"{member.name}\0{member.payload}\0{member.size}\0".encode("utf-8", "surrogateescape"))
        for member in members(str(path), fd, end):
            end = member.end
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    _check_utf8(path, [name, *(extension for layout in set(layouts) for extension, _ in layout)])
    return ShardTable(ShardEntry(name, size, len(starts), digest.intdigest()), starts, end, layouts, sizes)


def _check_utf8(path: Path, names: list[str]) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ShardError(f"{path!s}: the name {name!r} is no UTF-8; rename it and write the shard again") from None


def _layout(extent: Extent) -> tuple[tuple[str, int], ...]:
    ends = [extent.members[0].header, *(member.end for member in extent.members)]
    gaps = [(member.payload - end) // BLOCK for member, end in zip(extent.members, ends, strict=False)]
    return tuple(zip(extent.extensions, gaps, strict=True))


def open_index(root: Path, names: list[str]) -> ShardIndex:
    """The index of the shards `names` below `root`; what is missing or has another size is scanned first.

    Raises `ShardError` for a shard that cannot be read, and for a set of shards without a single sample.
    """
    sizes = {name: _file_size(root / name) for name in names}
    for path in _places(root):
        index = _fresh(path, sizes)
        if index is not None:
            return index
    with _locked(root) as path:
        index = _fresh(path, sizes)  # another process may have made it while we waited
        if index is not None:
            return index
        write_index(path, _tables(root, path, sizes))
        return ShardIndex(path)


def _fresh(path: Path, sizes: dict[str, int]) -> ShardIndex | None:
    """The index at `path` if it is there, whole, and knows each shard with its size."""
    try:
        index = ShardIndex(path)
    except (OSError, ValueError):
        return None
    except ShardError as error:
        log.warning("%s; making it again", error)
        return None
    known = {entry.name: entry.size for entry in index.shards}
    return index if all(known.get(name) == size for name, size in sizes.items()) else None


def _tables(root: Path, path: Path, sizes: dict[str, int]) -> list[ShardTable]:
    """One table a shard: kept from the index at `path` where still right, scanned where not."""
    kept: dict[str, ShardTable] = {}
    with contextlib.suppress(OSError, ValueError, ShardError):
        old = ShardIndex(path)
        for entry in old.shards:
            here = root / entry.name
            if entry.size == (sizes.get(entry.name) or (here.stat().st_size if here.exists() else -1)):
                kept[entry.name] = old.table(entry.name)
    missing = [name for name in sizes if name not in kept]
    log.info("indexing %d of %d shards in %s", len(missing), len(sizes), root)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for table in pool.map(lambda name: scan(root, name), missing):
            kept[table.entry.name] = table
            write_tar_idx(root / table.entry.name, table)
    return [kept[name] for name in sorted(kept)]


def write_tar_idx(shard: Path, table: ShardTable) -> None:
    """Write `X.tar.idx`: little-endian uint64 offsets of the samples, then the end. Left out in a read-only place."""
    offsets = np.array([*table.starts, table.end], dtype="<u8").tobytes()
    path = shard.with_suffix(".tar.idx")
    with contextlib.suppress(OSError):
        if not path.exists() or path.read_bytes() != offsets:
            _replace(path, [offsets])


def write_index(path: Path, tables: list[ShardTable]) -> None:
    """Write the index of these shards, aside first and then renamed."""
    numbers: dict[tuple[tuple[str, int], ...], int] = {}
    layout_of = [numbers.setdefault(layout, len(numbers)) for table in tables for layout in table.layouts]
    counts = {len(layout) for layout in numbers}
    sizes = np.array([size for table in tables for size in table.sizes], dtype=np.uint64)
    wide = bool(len(sizes)) and int(sizes.max()) >= 1 << 32
    members = counts.pop() if len(counts) == 1 else 0
    lengths = [len(layout) for table in tables for layout in table.layouts]
    header = _Header([table.entry for table in tables], [list(layout) for layout in numbers], members, 8 if wide else 4)
    encoded = msgspec.msgpack.encode(header)
    arrays = [
        np.array([start for table in tables for start in table.starts], dtype="<u8"),
        np.array(layout_of if len(numbers) > 1 else [], dtype="<u4"),
        np.array([] if members else np.cumsum([0, *lengths])[:-1], dtype="<u8"),
        sizes.astype("<u8" if wide else "<u4"),
    ]
    begin = len(encoded).to_bytes(8, "little") + encoded
    rest = [begin, bytes(-(16 + len(begin)) % _ALIGN), *(_aligned(array.tobytes()) for array in arrays)]
    digest = xxh3_64()
    for part in rest:
        digest.update(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, [_MAGIC, digest.intdigest().to_bytes(8, "little"), *rest])


def _aligned(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)


def _replace(path: Path, parts: list[bytes]) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("wb") as file:
        file.writelines(parts)
    aside.replace(path)


def _read_header(path: Path, view: memoryview) -> tuple[_Header, int]:
    if bytes(view[:8]) != _MAGIC or xxh3_64_intdigest(view[16:]) != int.from_bytes(view[8:16], "little"):
        raise ShardError(f"{path}: not an index of this version, or damaged")
    length = int.from_bytes(view[16:24], "little")
    return msgspec.msgpack.decode(view[24 : 24 + length], type=_Header), 24 + length + -(24 + length) % _ALIGN


def _array(path: Path, view: memoryview, offset: int, kind: str, count: int) -> tuple[memoryview[int], int]:
    end = offset + count * (8 if kind == "Q" else 4)
    if end > len(view):
        raise ShardError(f"{path}: the index is cut short: {len(view)} bytes where {end} are needed")
    return view[offset:end].cast(kind), end + -end % 8  # type: ignore[call-overload]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from error


def _places(root: Path) -> list[Path]:
    """Where the index may lie: beside the shards, or in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "savable_pipeline"
    return [
        root / INDEX_NAME,
        cache / f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]}.index",
    ]


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """Hold the lock of the first place that can be written; gives the index's path there."""
    for path in _places(root):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(path.name + ".lock").open("ab")
        except OSError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
        return
    raise ShardError(f"{root}: no place to write an index: neither {INDEX_NAME} there nor a cache can be written")
