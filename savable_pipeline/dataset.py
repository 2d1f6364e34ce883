"""`Dataset`: the samples of a set of shards, counted through, and each part read by one positioned read."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.announce import announce
from savable_pipeline.batch_memory import empty_bytes
from savable_pipeline.errors import CheckpointMismatchError, ShardError
from savable_pipeline.indexing import INDEX_NAME, find_index, open_index
from savable_pipeline.keys import key
from savable_pipeline.nv_meta import FieldMap, listed, read_counts, read_field_map, read_split
from savable_pipeline.on_error import OnError, Quarantine
from savable_pipeline.sample import TAG_SHIFT, RefArray, Sample, matching
from savable_pipeline.selection import Rows, Selection, Subset
from savable_pipeline.shard_index import Layout, ShardEntry, ShardIndex
from savable_pipeline.shard_paths import Shards, find_shards
from savable_pipeline.tar import members, split_name

log = logging.getLogger(__name__)

_UNTAGGED = np.uint64((1 << TAG_SHIFT) - 1)
OPEN_SHARDS = 256  # handles kept open by one dataset in one process; the least recently opened is closed first


class Dataset:
    """An indexed set of shards, shared by the lanes of a process.

    Sample `i` of the dataset is the `i`-th when the shards are read one after the other, sorted by name. Unless
    `on_error` is "raise", damaged shards are taken as far as they go; what is skipped is written to `quarantine`.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        source: str = "",
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
    ) -> None:
        self.on_error = on_error
        self.root, names, self._index = self._find(shards)
        self.source = key("source", source)
        self.quarantine = None if quarantine is None else Quarantine(quarantine)
        self._place, self._starts, self._sizes = self._index.place, self._index.starts, self._index.sizes
        self._first: str | None = None  # the first part of every sample, if all have the same parts
        if len(self._index.layouts) == 1:
            layout = self._index.layouts[0]
            self._first, self._gap, self._members = next(iter(layout.position)), layout.gaps[0], len(layout.gaps)
        tables = self._index.tables()
        self.entries: list[ShardEntry] = [tables[name][0] for name in names]
        self._rows = np.array([tables[name][1] for name in names], dtype=np.int64)
        self.firsts = np.cumsum([0, *(entry.samples for entry in self.entries)])  # int64 (shards + 1,)
        self.count = int(self.firsts[-1])
        if not self.count:
            raise ShardError(
                f"{self.address}: no sample in {len(names)} shards; a sample's files are named KEY.EXTENSION in the tar"
            )
        self._handles: OrderedDict[int, int] = OrderedDict()
        self._entry_sizes = np.array([entry.size for entry in self.entries], dtype=np.int64)
        self._bytes = int(self._entry_sizes.sum())
        self._whole: set[int] = set()  # shards whose rows in the index were checked
        self._field_map: FieldMap | None = None
        self.ahead = 0  # how many refs it wants to be told by `announce` before they are asked for

    def __del__(self) -> None:
        for fd in getattr(self, "_handles", {}).values():
            os.close(fd)

    def _find(self, shards: Shards) -> tuple[Path, list[str], ShardIndex]:
        """The root of the shards, their names relative to it, and an index that has them."""
        tolerant = self.on_error != "raise"
        root, found = find_shards(shards, missing_too=tolerant)
        folder = isinstance(shards, str | os.PathLike) and Path(shards).is_dir()
        names = _with_lost(root, found, tolerant) if folder else found
        return root, names, open_index(root, names, tolerant=tolerant)

    @property
    def address(self) -> str:
        """Where the shards lie, for errors."""
        return str(self.root)

    @property
    def index_path(self) -> Path:
        """Where the index lies, unless it is in the user's cache."""
        return self.root / INDEX_NAME

    def announce(self, refs: RefArray) -> None:
        """Hear what will be read soon: the kernel is told."""
        announce(self, (refs["index"] & _UNTAGGED).astype(np.int64))

    def samples(self, refs: RefArray) -> list[Sample]:
        """The samples that these refs name, unread. Raises `CheckpointMismatchError` for one that is not there."""
        shards, rows = self._locate(refs)
        parts = zip(shards.tolist(), rows.tolist(), refs["index"].tolist(), refs["epoch"].tolist(), strict=True)
        return [Sample(self, shard, row, i, epoch) for shard, row, i, epoch in parts]

    def _locate(self, refs: RefArray) -> tuple[Rows, Rows]:
        """The shard of each sample that these refs name, and its row in the index."""
        index = (refs["index"] & _UNTAGGED).astype(np.int64)
        if len(index) and index.max() >= self.count:
            raise CheckpointMismatchError(
                f"{self.address}: a ref names sample {int(index.max())}, but there are {self.count}; does the "
                "state belong to this dataset?"
            )
        shards = np.searchsorted(self.firsts, index, side="right") - 1
        return shards, self._rows[shards] + (index - self.firsts[shards])

    def manifest(self) -> list[list[Any]]:
        """Name, samples and hash of each shard: what a saved state must agree on."""
        return [[entry.name, entry.samples, entry.digest] for entry in self.entries]

    @property
    def faults(self) -> list[tuple[str, str]]:
        """Name and fault of each shard that could not be indexed to its end."""
        return [(entry.name, entry.fault) for entry in self.entries if entry.fault]

    @property
    def field_map(self) -> FieldMap:
        """What `dataset.yaml` calls the parts."""
        if self._field_map is None:
            self._field_map = read_field_map(self.root)
        return self._field_map

    def select(self, split: str | None, subset: Subset | None) -> Selection | None:
        """What a split and a subset leave; None if that is all. Raises `ShardError`."""
        if split is None and subset is None:
            return None
        names = [entry.name for entry in self.entries]
        if split is None:
            return Selection(names, self.firsts, subset=subset)
        parts = read_split(self.root, split, names)
        excluded = self._rows_of(parts.excluded)
        if parts.unknown:
            log.warning("%s: `exclude` names what is not there: %s", self.address, listed(parts.unknown))
        return Selection(names, self.firsts, shards=parts.shards, excluded=excluded, subset=subset)

    def _rows_of(self, keys: Mapping[str, set[str]]) -> dict[str, Rows]:
        """The rows of the samples with these keys, by shard, counted from the first of the shard."""
        found: dict[str, Rows] = {}
        for shard, entry in enumerate(self.entries):
            wanted = keys.get(entry.name)
            if wanted:
                first = int(self._rows[shard])
                keys_here = [self.key(shard, first + row) for row in range(entry.samples)]
                found[entry.name] = np.array(
                    [row for row, here in enumerate(keys_here) if here in wanted], dtype=np.int64
                )
                if lost := wanted.difference(keys_here):
                    log.warning("%s: `exclude` names what is not in %s: %s", self.address, entry.name, listed(lost))
        return found

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The bytes of one part of a sample. Raises KeyError, or `ShardError` if the shard no longer holds it."""
        fd = self._handles.get(shard)
        if fd is None:
            fd = self._open(shard)  # and check the shard's part of the index
        if extension == self._first:  # found without a call, since calls cost half of what the read does
            offset, size = self._starts[row] + self._gap, self._sizes[row * self._members]
        else:
            layout = self._layout(row)
            member = layout.position.get(extension)
            if member is None:
                member = layout.position[matching(extension, layout.position)]
            offset, size = self._place(row, member, layout)
        try:
            data = os.pread(fd, size, offset)
        except OSError as error:
            raise self._unreadable(shard, error) from error
        return data if len(data) == size else self._read_on(fd, shard, offset, size, data)

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        """The bytes of one part, uint8 (bytes,), read to where batches are made. Raises what `read` raises."""
        layout = self._layout(row)
        offset, size = self._place(row, layout.position[matching(extension, layout.position)], layout)
        array, done = empty_bytes(size), -1
        if hasattr(os, "preadv"):
            with contextlib.suppress(OSError):
                done = os.preadv(self.descriptor(shard), [array], offset)  # type: ignore[list-item]
        if done != size:
            array[:] = np.frombuffer(self.read(shard, row, extension), np.uint8)
        return array

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        """The first bytes of a part, at most `limit`, and how many it has. Raises KeyError, or `ShardError`."""
        fd = self.descriptor(shard)
        layout = self._layout(row)
        offset, size = self._place(row, layout.position[matching(extension, layout.position)], layout)
        wanted = min(size, limit)
        try:
            data = os.pread(fd, wanted, offset)
        except OSError as error:
            raise self._unreadable(shard, error) from error
        return data if len(data) == wanted else self._read_on(fd, shard, offset, wanted, data), size

    def part_sizes(self) -> dict[str, Rows]:
        """The sizes in bytes of each part, by extension, as the index has them, where it is whole."""
        whole = [i for i, entry in enumerate(self.entries) if entry.samples and self._index.is_whole(entry.name)]
        rows = [np.arange(self._rows[i], self._rows[i] + self.entries[i].samples) for i in whole]
        return self._index.part_sizes(np.concatenate(rows)) if rows else {}

    def key(self, shard: int, row: int) -> str:
        """The key of a sample, read from the header of its first member."""
        return key_at(str(self.root / self.shard_name(shard)), self.descriptor(shard), self.offset(row))

    @property
    def mean_bytes(self) -> float:
        """Bytes of a sample in the mean, with its headers."""
        return self._bytes / self.count

    def extents(self, first: Rows, last: Rows, shards: Rows) -> tuple[Rows, Rows]:
        """Where the runs of samples from `first` to `last`, each in one of `shards`, begin and end, in bytes."""
        starts = np.asarray(self._starts)
        rows = self._rows[shards] - self.firsts[shards]
        is_last = last + 1 == self.firsts[shards + 1]
        sizes = self._entry_sizes[shards]
        ends = np.where(is_last, sizes, starts[np.minimum(rows + last + 1, len(starts) - 1)])
        return starts[rows + first].astype(np.int64), ends.astype(np.int64)

    def descriptor(self, shard: int) -> int:
        """An open file of the shard, to be used at once. Raises `ShardError`."""
        fd = self._handles.get(shard)
        return self._open(shard) if fd is None else fd

    def shard_name(self, shard: int) -> str:
        """The name of a shard relative to the root."""
        return self.entries[shard].name

    def first_row(self, shard: int) -> int:
        """The row of the shard's first sample in the index."""
        return int(self._rows[shard])

    def offset(self, row: int) -> int:
        """The offset in bytes of a sample's first header in its shard."""
        return self._index.starts[row]

    def extensions(self, row: int) -> list[str]:
        """The extensions of a sample, in the order of the tar."""
        return list(self._layout(row).position)

    def sizes(self, row: int) -> dict[str, int]:
        """The size in bytes of each part of a sample, by extension."""
        layout = self._layout(row)
        return {extension: self._place(row, member, layout)[1] for extension, member in layout.position.items()}

    def _layout(self, row: int) -> Layout:
        try:
            return self._index.layout(row)
        except IndexError:
            raise self._damaged_index("a shard") from None

    def _damaged_index(self, what: str) -> ShardError:
        return ShardError(
            f"{self.address}: the index of {what} is damaged; remove {self.index_path} and start again",
            reason="damaged index",
        )

    def _open(self, shard: int) -> int:
        entry = self.entries[shard]
        path = self.root / entry.name
        try:
            fd = _opened(path)
        except OSError as error:
            raise ShardError(
                f"{path}: {error.strerror}; it was there when the shards were indexed",
                reason="missing shard" if isinstance(error, FileNotFoundError) else "unreadable shard",
            ) from error
        try:
            self._check(shard, fd, path)
        except BaseException:
            os.close(fd)
            raise
        self._handles[shard] = fd
        while len(self._handles) > OPEN_SHARDS:
            os.close(self._handles.popitem(last=False)[1])
        return fd

    def _check(self, shard: int, fd: int, path: Path) -> None:
        """Raise `ShardError` unless this is the shard that was indexed, as far as can be told without reading it."""
        entry = self.entries[shard]
        size = os.fstat(fd).st_size
        if size != entry.size:
            raise ShardError(
                f"{path}: {size} bytes, but {entry.size} when it was indexed; the shard was rewritten or cut short "
                "since: start again or run `savable index` to index it, or put the old shard back",
                reason="changed shard",
            )
        if shard in self._whole:
            return
        if not self._index.is_whole(entry.name):
            raise self._damaged_index(entry.name)
        if not self._index.ends_as_written(entry.name, fd):
            raise ShardError(
                f"{path}: as large as when it was indexed, but its last sample lies elsewhere: the shard was rewritten "
                f"since; remove {self.index_path} and start again to index it, or put the old shard back",
                reason="changed shard",
            )
        self._whole.add(shard)

    def _unreadable(self, shard: int, error: OSError) -> ShardError:
        path = self.root / self.shard_name(shard)
        return ShardError(f"{path}: {error.strerror}; look after the disk or the network", reason="unreadable shard")

    def _read_on(self, fd: int, shard: int, offset: int, size: int, data: bytes) -> bytes:
        """A read may return less than asked for (2 GB is the most Linux gives at once); go on until it is all there."""
        parts = [data]
        missing = size - len(data)
        try:
            while missing and (more := os.pread(fd, missing, offset + size - missing)):
                parts.append(more)
                missing -= len(more)
        except OSError as error:
            raise self._unreadable(shard, error) from error
        if missing:
            path: Path = self.root / self.entries[shard].name
            raise ShardError(
                f"{path}: {missing} of {size} bytes at byte {offset} are missing; the shard was cut short",
                reason="changed shard",
            )
        return b"".join(parts)


def _opened(path: Path) -> int:
    """A file to read. That it was read is not noted in it, where that is allowed: it would cost a tenth of a read."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only its owner may ask for that
        return os.open(path, flags)


def key_at(path: str, fd: int, offset: int) -> str:
    """The key of the sample whose first header is at `offset` of an open shard. Raises `ShardError` without one."""
    first = next(members(path, fd, offset), None)
    parts = split_name(first.name) if first else None
    if parts is None:
        raise ShardError(f"{path}: no sample at byte {offset}, where there was one when it was indexed")
    return parts[0]


def _with_lost(root: Path, found: list[str], tolerant: bool) -> list[str]:
    """The shards of a folder, with those that are not there but should be.

    Energon's list knows them, and the index does, if a run is to go on without what was lost since it was made.
    """
    known = {*(read_counts(root) or ()), *(find_index(root) if tolerant else ())}
    return sorted({*found, *known})
