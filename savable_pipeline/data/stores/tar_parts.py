"""`TarParts`: reads parts of samples from open tars, each with one positioned read at the offset in the index."""

from __future__ import annotations

import contextlib
import os

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.shards.tar import members, split_name
from savable_pipeline.data.stores.indexed_shards import IndexedShards
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.errors import ShardError


class TarParts:
    """Reads from `files` as the index says. Does not ask whether the bytes are there: see `ShardFiles.guard`."""

    def __init__(self, shards: IndexedShards, files: ShardFiles) -> None:
        index = shards.index
        self._files = files
        self._place, self._starts, self._sizes = shards.place, index.starts, index.sizes
        self._first: str | None = None  # the first extension of every sample, if all samples have the same parts
        if len(index.layouts) == 1:
            layout = index.layouts[0]
            self._first, self._gap, self._members = next(iter(layout.position)), layout.gaps[0], len(layout.gaps)

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The bytes of one part of a sample. Raises KeyError, or `ShardError` if the shard no longer holds it."""
        descriptor = self._files[shard]
        if extension == self._first:  # located without a call: calls cost half as much as the read
            offset, size = self._starts[row] + self._gap, self._sizes[row * self._members]
        else:
            offset, size = self._place(row, extension)
        try:
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            raise self._unreadable(shard, error) from error
        return data if len(data) == size else self._read_rest(shard, offset, size, data)

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        """The bytes of one part, uint8 (bytes,), read to where batches are made. Raises the errors of `read`."""
        offset, size = self._place(row, extension)
        array, done = empty_bytes(size), -1
        if hasattr(os, "preadv"):
            with contextlib.suppress(OSError):
                done = os.preadv(self._files[shard], [array], offset)  # type: ignore[list-item]
        if done != size:
            array[:] = np.frombuffer(self.read(shard, row, extension), np.uint8)
        return array

    def span(self, shard: int, row: int, place: tuple[int, int]) -> bytes:
        """The bytes at `place`, (offset, size), of a shard. Raises `ShardError`."""
        offset, size = place
        try:
            data = os.pread(self._files[shard], size, offset)
        except OSError as error:
            raise self._unreadable(shard, error) from error
        return data if len(data) == size else self._read_rest(shard, offset, size, data)

    def key(self, shard: int, row: int, path: str) -> str:
        """The key of a sample, from the header of its first member; `path` is for errors. Raises `ShardError`."""
        return key_at(path, self._files[shard], self._starts[row])

    def _unreadable(self, shard: int, error: OSError) -> ShardError:
        path = self._files.path(shard)
        return ShardError(f"{path}: {error.strerror}; look after the disk or the network", reason="unreadable shard")

    def _read_rest(self, shard: int, offset: int, size: int, data: bytes) -> bytes:
        """The whole of a part of which a read gave only the first bytes, `data`: Linux gives 2 GB at most at once."""
        parts, missing = [data], size - len(data)
        try:
            while missing and (more := os.pread(self._files[shard], missing, offset + size - missing)):
                parts.append(more)
                missing -= len(more)
        except OSError as error:
            raise self._unreadable(shard, error) from error
        if missing:
            raise ShardError(
                f"{self._files.path(shard)}: {missing} of {size} bytes at byte {offset} are missing; the shard was cut "
                "short",
                reason="changed shard",
            )
        return b"".join(parts)


def key_at(path: str, descriptor: int, offset: int) -> str:
    """The key of the sample whose first header is at `offset` of an open shard. Raises `ShardError` without one."""
    first = next(members(path, descriptor, offset), None)
    parts = split_name(first.name) if first else None
    if parts is None:
        raise ShardError(f"{path}: no sample at byte {offset}, where there was one when it was indexed")
    return parts[0]
