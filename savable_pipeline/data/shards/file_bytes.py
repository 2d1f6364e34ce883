"""`FileBytes`: the bytes of one file, wherever it lies, as formats read it: to index it, and to notice changes.

`FileVersion`: what the system says of a file on a disk, which is another after each change.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from savable_pipeline.core.files import regular_file
from savable_pipeline.core.open_files import with_handles


class FileVersion(NamedTuple):
    """What tells a file from what it was before, without reading it."""

    inode: int
    size: int
    written_ns: int
    changed_ns: int  # of the inode; it cannot be put back
    rights: tuple[int, int, int, int]  # mode, owner, group, number of links: they explain another `changed_ns`

    @classmethod
    def of(cls, stat: os.stat_result) -> FileVersion:
        """The version that has this status."""
        rights = stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, rights)

    @property
    def newest_ns(self) -> int:
        """When the file was written or put there, whichever came last."""
        return max(self.written_ns, self.changed_ns)


class FileBytes(Protocol):
    """A file: the last part of its name, and its size in bytes."""

    name: str
    size: int

    def read(self, offset: int, size: int, /) -> bytes:
        """`size` bytes from `offset` on; fewer where the file ends. Raises OSError, `ShardError`, `RemoteError`."""

    def expect(self, places: list[tuple[int, int]], /) -> None:
        """Announces reads of these offsets and sizes."""

    def beside(self, suffix: str, name: str = "", /) -> Path | None:
        """A local file with what lies beside it under its name with this suffix; None if nothing does.

        Given the file's `name` below its folder: what is called `suffix` in that folder.
        """

    def fileno(self) -> int:
        """The descriptor of a file on a disk. Raises OSError for one behind a URL."""


class LocalBytes:
    """A file on a disk that is open."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self.name, self.size = path.name, os.fstat(descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """See `FileBytes.read`."""
        return os.pread(self._descriptor, size, offset)

    def expect(self, places: list[tuple[int, int]]) -> None:
        """Nothing: the disk is near."""

    def beside(self, suffix: str, name: str = "") -> Path | None:
        """See `FileBytes.beside`."""
        path = self._path.parents[name.count("/")] / suffix if name else self._path.with_suffix(suffix)
        return path if path.exists() else None

    def fileno(self) -> int:
        """See `FileBytes.fileno`."""
        return self._descriptor


@contextlib.contextmanager
def opened(path: Path) -> Iterator[LocalBytes]:
    """A file on a disk, open meanwhile. Raises OSError."""
    descriptor = with_handles(lambda: regular_file(path, os.O_RDONLY))
    try:
        yield LocalBytes(path, descriptor)
    finally:
        os.close(descriptor)
