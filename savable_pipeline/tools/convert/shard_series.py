"""Consecutive shards of limited bytes and samples.

    add ─ ShardFile ─ full ─▶ finished(table)      each shard is closed before the next one starts

A shard has the same bytes as one of webdataset. Members are regular files of mode 0644 without time and owner, sorted
by extension. The tar ends with two blocks of zeros, padded to a whole record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from savable_pipeline.core.file_locks import LOCK_ADVICE, requiring_locks
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.tar import BLOCK, Member, SampleInTar, padded
from savable_pipeline.data.shards.tar_format import ShardRows
from savable_pipeline.errors import SavableError

if TYPE_CHECKING:
    from savable_pipeline.tools.convert.part_data import PartData

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RECORD = 20 * BLOCK  # bytes; the size of a tar is a multiple
_BUFFER_BYTES = 1 << 20
END = 2 * BLOCK  # least bytes of zeros at the end
_LONGEST_PLAIN_NAME = 100  # a longer name, or one outside ASCII, takes two more header blocks
_LARGEST_PLAIN = 8**11 - 1  # bytes of a member; a larger size takes two more header blocks
_EMPTY = tarfile.TarInfo().tobuf(tarfile.PAX_FORMAT)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)  # bytes of these fields in a header


def sample_bytes(key: str, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a sample in a tar, by the sizes of its parts."""
    headers = [BLOCK if _is_plain(f"{key}.{extension}", size) else 3 * BLOCK for extension, size in sizes.items()]
    return sum(headers) + sum(map(padded, sizes.values()))


def room_in(shard_bytes: int) -> int:
    """Return the bytes for samples in a shard of at most `shard_bytes`."""
    return shard_bytes // RECORD * RECORD - END


def member_headers(name: str, size: int) -> bytes:
    """Return the headers of a member: one block, or three for long names and sizes."""
    if not _is_plain(name, size):
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.PAX_FORMAT)
    header = bytearray(_EMPTY)
    header[: len(name)] = name.encode()
    header[_SIZE] = b"%011o" % size
    header[_CHECKSUM] = b" " * 8
    header[_CHECKSUM] = b"%06o\0 " % sum(header)
    return bytes(header)


def _is_plain(name: str, size: int) -> bool:
    """Return whether a member of this name and size has one header block."""
    return len(name) <= _LONGEST_PLAIN_NAME and name.isascii() and size <= _LARGEST_PLAIN


class ShardFile:
    """Shard that is written to `path`. The index calls it `name`."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.samples = 0
        self.size = 0  # bytes so far
        self._rows = ShardRows(name)
        self.last_key = ""
        self._file = path.open("wb", buffering=_BUFFER_BYTES)

    def add(self, key: str, parts: Mapping[str, PartData]) -> None:
        """Append a sample with at least one part.

        Readers would merge it with the sample before if both had one key, so its key must differ. Raises OSError.
        """
        assert parts and key != self.last_key, key
        self.last_key = key
        extent = SampleInTar(key)
        for extension in sorted(parts):
            data = parts[extension]
            name = f"{key}.{extension}"
            headers = member_headers(name, len(data))
            payload = (data,) if isinstance(data, bytes) else data.chunks()
            self._file.writelines(itertools.chain((headers,), payload, (bytes(-len(data) % BLOCK),)))
            extent.members.append(Member(name, self.size, self.size + len(headers), len(data), True))
            extent.extensions.append(extension)
            self.size += len(headers) + padded(len(data))
        self._rows.add(extent)
        self.samples += 1

    def finish(self) -> ShardTable:
        """End the tar, flush it to the disk, and return its table for the index."""
        zeros = END + -(self.size + END) % RECORD
        self._file.write(bytes(zeros))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.size += zeros
        self.close()
        return self._rows.table(self.size, "")

    def close(self) -> None:
        """Close the file, complete or not, without an error of a full disk."""
        with contextlib.suppress(OSError):
            self._file.close()


class ShardSeries:
    """Writes shards into `folder`, one after another.

    They have at most `max_bytes` and `max_samples`. `name` returns the name of a shard by its number, counted from
    `first`. `finished` is called with the table of each finished shard.
    """

    def __init__(
        self,
        folder: Path,
        name: Callable[[int], str],
        max_bytes: int,
        max_samples: int | None,
        finished: Callable[[ShardTable], None],
        first: int = 0,
    ) -> None:
        self._folder, self._name, self._finished = folder, name, finished
        self._room, self._max_samples, self._number = room_in(max_bytes), max_samples, first
        self._shard: ShardFile | None = None

    @property
    def last_key(self) -> str:
        """Return the key of the last sample in the open shard, or "".

        The next sample must have another key.
        """
        return "" if self._shard is None else self._shard.last_key

    def add(self, key: str, parts: Mapping[str, PartData]) -> None:
        """Append a sample to the open shard, or to the next one if it does not fit."""
        size = sample_bytes(key, {extension: len(data) for extension, data in parts.items()})
        if (shard := self._shard) and (shard.size + size > self._room or shard.samples == self._max_samples):
            self.finish()
        if self._shard is None:
            name = self._name(self._number)
            self._shard = ShardFile(self._folder / name, name)
            self._number += 1
        self._shard.add(key, parts)

    def finish(self) -> None:
        """End the open shard, if there is one."""
        if self._shard is not None:
            table = self._shard.finish()
            self._finished(table)
            self._shard = None

    def close(self) -> None:
        """Remove the unfinished shard."""
        if self._shard is not None:
            self._shard.close()
            self._shard.path.unlink(missing_ok=True)
            self._shard = None


@contextlib.contextmanager
def room_on(folder: Path) -> Iterator[None]:
    """Raise `SavableError` for an OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise SavableError(
            f"{folder}: {error.strerror}: disk or quota is full. Free space and start again to continue"
        ) from error


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Lock a file or a folder, once it is free.

    With `busy` as its text, raise `SavableError` if it is not free.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            with requiring_locks(path, LOCK_ADVICE):
                fcntl.flock(fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise SavableError(busy) from error
        yield
    finally:
        os.close(fd)
