"""Writes a shard sample by sample, in the bytes of webdataset's writer, and gives the rows of its index.

Members are regular files of mode 0644 without time and owner, sorted by extension; the tar ends with two empty blocks
and is padded to a whole record.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.tar import BLOCK, Extent, Member, padded
from savable_pipeline.data.shards.tar_format import ShardRows

RECORD = 20 * BLOCK  # a tar is padded to whole ones
END = 2 * BLOCK  # bytes of zeros that end it at least
_LONGEST_PLAIN_NAME = 100  # a longer name takes two more blocks, as does one that is not ASCII
_LARGEST_PLAIN = 8**11 - 1  # bytes of a member; a larger size takes two more blocks
_EMPTY = tarfile.TarInfo().tobuf(tarfile.PAX_FORMAT)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)  # in a header


def header_bytes(name: str, size: int) -> int:
    """The bytes of a member's headers."""
    return BLOCK if _is_plain(name, size) else 3 * BLOCK


def sample_bytes(key: str, sizes: Mapping[str, int]) -> int:
    """The bytes of a sample in a tar, from the sizes of its parts by extension."""
    return sum(header_bytes(f"{key}.{extension}", size) + padded(size) for extension, size in sizes.items())


def room_in(shard_bytes: int) -> int:
    """The bytes for samples in a shard that grows no longer than `shard_bytes`."""
    return shard_bytes // RECORD * RECORD - END


def member_headers(name: str, size: int) -> bytes:
    """The headers of a member: one block, and two before it for a name or size that does not fit there."""
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
    return len(name) <= _LONGEST_PLAIN_NAME and name.isascii() and size <= _LARGEST_PLAIN


class Chunked(Protocol):
    """Bytes that come in pieces, so many together."""

    def __len__(self) -> int: ...
    def chunks(self) -> Iterable[bytes]: ...


class ShardFile:
    """A new shard at `path`, which the index will call `name`. A context manager: it closes the file, whole or not."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.samples = 0
        self.size = 0  # bytes so far
        self._rows = ShardRows(name)
        self.last_key = ""
        self._file = path.open("wb", buffering=1 << 20)

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, key: str, parts: Mapping[str, bytes | Chunked]) -> None:
        """Append a sample of one part or more, as bytes or in pieces. Raises OSError, for a disk that is full say.

        Its key must not be that of the sample before: the two would be one to readers.
        """
        assert parts and key != self.last_key, key
        self.last_key = key
        extent = Extent(key)
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
        """End the tar, and see that it is on the disk; gives its rows of the index."""
        zeros = END + -(self.size + END) % RECORD
        self._file.write(bytes(zeros))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.size += zeros
        self.close()
        return self._rows.table(self.size, "")

    def close(self) -> None:
        """Close the file as it is; what does not fit on the disk is lost, since the shard is not whole then."""
        with contextlib.suppress(OSError):
            self._file.close()
