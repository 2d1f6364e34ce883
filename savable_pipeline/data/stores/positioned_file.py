"""`PositionedFile`: an open shard as a file that other libraries read, without a descriptor or a thread of its own.

It does not keep `files` alive: whoever reads it is C++, and a circle of references through that is never collected.

    files ──▶ store ──▶ pq.ParquetFile ── C++ ──▶ PositionedFile ╌╌ weak ╌╌▶ files
"""

from __future__ import annotations

import io
import os
import weakref

from savable_pipeline.data.stores.shard_files import ShardFiles


class PositionedFile(io.RawIOBase):
    """A shard of `files`, `size` bytes long: each read is positioned, from a descriptor that was checked.

    To be used only as long as `files` are there.
    """

    def __init__(self, files: ShardFiles, shard: int, size: int) -> None:
        super().__init__()
        self._files, self._shard, self._size = weakref.ref(files), shard, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes from here on. Raises `ShardError`, also where the file ends before `size` says."""
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        files = self._files()
        assert files is not None, "the store keeps them"
        data = files.read(self._shard, self._position, wanted)
        self._position += wanted
        return data
