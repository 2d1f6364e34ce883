"""`RemoteFile`: one object behind a URL as a file that is read from its begin to its end, through the cache."""

from __future__ import annotations

import io

from savable_pipeline.data.remote.remote_files import place_of_object
from savable_pipeline.data.remote.scratch import job_session
from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.stores.cached_blocks import CachedBlocks, CachedBytes

_AHEAD = 64 << 20  # bytes that are announced ahead


def open_object(url: str) -> tuple[CachedBytes, str]:
    """An object of any kind, and its stamp, which changes when it is replaced. Raises `ShardError`, `RemoteError`."""
    place, found = place_of_object(url, job_session())
    return CachedBytes(CachedBlocks(place, all_used=True), 0), found


class RemoteFile(io.RawIOBase):
    """A file of `FileBytes`, of which what comes next is downloaded ahead. Raises `ShardError`, `RemoteError`."""

    def __init__(self, file: FileBytes) -> None:
        self._file, self._offset, self._announced = file, 0, 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, uint8 (bytes,), from where the last read ended; gives how many bytes came."""
        ahead = min(self._offset + _AHEAD, self._file.size)
        if ahead - self._announced > _AHEAD // 2 or (ahead == self._file.size > self._announced):
            self._file.expect([(self._announced, ahead - self._announced)])
            self._announced = ahead
        data = self._file.read(self._offset, min(len(buffer), self._file.size - self._offset))
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)
