"""`Dataset`: the samples of a set of shards, counted through, and each part read by one positioned read."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from savable_pipeline.errors import ShardError
from savable_pipeline.indexing import INDEX_NAME, open_index
from savable_pipeline.keys import key
from savable_pipeline.sample import RefArray, Sample, matching
from savable_pipeline.shard_index import ShardEntry, ShardIndex
from savable_pipeline.shard_paths import Shards, find_shards
from savable_pipeline.tar import members, split_name

OPEN_SHARDS = 256  # handles kept open by one dataset in one process; the least recently opened is closed first


class Dataset:
    """An indexed set of shards, shared by the lanes of a process.

    Sample `i` of the dataset is the `i`-th when the shards are read one after the other, sorted by name.
    """

    def __init__(self, shards: Shards, *, source: str = "") -> None:
        self.root, names, self._index = self._find(shards)
        self.source = key("source", source)
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
                f"{self.root}: no sample in {len(names)} shards; a sample's files are named KEY.EXTENSION in the tar"
            )
        self._handles: OrderedDict[int, int] = OrderedDict()
        self.ahead = 0  # how many refs it wants to be told by `announce` before they are asked for

    def __del__(self) -> None:
        for fd in getattr(self, "_handles", {}).values():
            os.close(fd)

    def _find(self, shards: Shards) -> tuple[Path, list[str], ShardIndex]:
        """The root of the shards, their names relative to it, and an index that has them."""
        root, names = find_shards(shards)
        return root, names, open_index(root, names)

    def announce(self, refs: RefArray) -> None:
        """Hear what will be read soon."""

    def samples(self, refs: RefArray) -> list[Sample]:
        """The samples that these refs name, unread."""
        index = refs["index"].astype(np.int64)
        shards = np.searchsorted(self.firsts, index, side="right") - 1
        rows = self._rows[shards] + (index - self.firsts[shards])
        parts = zip(shards.tolist(), rows.tolist(), index.tolist(), refs["epoch"].tolist(), strict=True)
        return [Sample(self, shard, row, i, epoch) for shard, row, i, epoch in parts]

    def manifest(self) -> list[list[Any]]:
        """Name, samples and hash of each shard: what a saved state must agree on."""
        return [[entry.name, entry.samples, entry.digest] for entry in self.entries]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The bytes of one part of a sample. Raises KeyError, or `ShardError` if the shard no longer holds it."""
        if extension == self._first:  # found without a call, since calls cost half of what the read does
            offset, size = self._starts[row] + self._gap, self._sizes[row * self._members]
        else:
            layout = self._index.layout(row)
            member = layout.position.get(extension)
            if member is None:
                member = layout.position[matching(extension, layout.position)]
            offset, size = self._place(row, member, layout)
        fd = self._handles.get(shard)
        if fd is None:
            fd = self._open(shard)
        data = os.pread(fd, size, offset)
        return data if len(data) == size else self._read_on(fd, shard, offset, size, data)

    def key(self, shard: int, row: int) -> str:
        """The key of a sample, read from the header of its first member."""
        fd = self._handles[shard] if shard in self._handles else self._open(shard)
        path, offset = self.root / self.shard_name(shard), self.offset(row)
        first = next(members(str(path), fd, offset), None)
        parts = split_name(first.name) if first else None
        if parts is None:
            raise ShardError(f"{path}: no sample at byte {offset}, where there was one when it was indexed")
        return parts[0]

    def shard_name(self, shard: int) -> str:
        """The name of a shard relative to the root."""
        return self.entries[shard].name

    def offset(self, row: int) -> int:
        """The offset in bytes of a sample's first header in its shard."""
        return self._index.starts[row]

    def extensions(self, row: int) -> list[str]:
        """The extensions of a sample, in the order of the tar."""
        return list(self._index.layout(row).position)

    def _open(self, shard: int) -> int:
        entry = self.entries[shard]
        path = self.root / entry.name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}; it was there when the shards were indexed") from error
        size = os.fstat(fd).st_size
        if size != entry.size:
            os.close(fd)
            raise ShardError(
                f"{path}: {size} bytes, but {entry.size} when it was indexed; the shard was rewritten or cut short "
                "since: start again to index it, or put the old shard back"
            )
        if not self._index.ends_as_written(entry.name, fd):
            os.close(fd)
            raise ShardError(
                f"{path}: as large as when it was indexed, but its last sample lies elsewhere: the shard was rewritten "
                f"since; remove {self.root / INDEX_NAME} and start again to index it, or put the old shard back"
            )
        self._handles[shard] = fd
        while len(self._handles) > OPEN_SHARDS:
            os.close(self._handles.popitem(last=False)[1])
        return fd

    def _read_on(self, fd: int, shard: int, offset: int, size: int, data: bytes) -> bytes:
        """A read may return less than asked for (2 GB is the most Linux gives at once); go on until it is all there."""
        parts = [data]
        missing = size - len(data)
        while missing and (more := os.pread(fd, missing, offset + size - missing)):
            parts.append(more)
            missing -= len(more)
        if missing:
            path: Path = self.root / self.entries[shard].name
            raise ShardError(f"{path}: {missing} of {size} bytes at byte {offset} are missing; the shard was cut short")
        return b"".join(parts)
