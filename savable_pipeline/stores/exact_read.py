"""Reads exactly the bytes of a shard that are asked for, or says what is missing."""

from __future__ import annotations

import os

from savable_pipeline.errors import ShardError
from savable_pipeline.stores.shard_files import ShardFiles


def read_exactly(files: ShardFiles, shard: int, offset: int, size: int) -> bytes:
    """`size` bytes of a shard from `offset` on. Raises `ShardError` if the shard cannot be read or is too short."""
    descriptor = files[shard]
    try:
        data = os.pread(descriptor, size, offset)
    except OSError as error:
        raise _unreadable(files, shard, error) from error
    return data if len(data) == size else data + _rest(files, shard, offset + len(data), size - len(data))


def _rest(files: ShardFiles, shard: int, offset: int, missing: int) -> bytes:
    """What a read has left: Linux gives 2 GB at most at once."""
    parts = []
    try:
        while missing and (more := os.pread(files[shard], missing, offset)):
            parts.append(more)
            offset, missing = offset + len(more), missing - len(more)
    except OSError as error:
        raise _unreadable(files, shard, error) from error
    if missing:
        raise ShardError(
            f"{files.path(shard)}: {missing} bytes at byte {offset} are missing; the file was cut short: put the whole "
            "one back",
            reason="changed shard",
        )
    return b"".join(parts)


def _unreadable(files: ShardFiles, shard: int, error: OSError) -> ShardError:
    message = f"{files.path(shard)}: {error.strerror}; look after the disk or the network"
    return ShardError(message, reason="unreadable shard")
