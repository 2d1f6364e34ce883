"""`RecordFile`: a file of lines that a conversion reads again, as it was when it was planned."""

from __future__ import annotations

import functools
import io
import os
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.errors import SavableError


def changed(path: Path | str, found: str) -> SavableError:
    """The error for a file that is not what the plan was made from."""
    return SavableError(
        f"{path}: {found}: it changed while it was converted; leave the input as it is while converting, and convert "
        "into another folder"
    )


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file as it was when the conversion was planned."""

    path: str
    size: int
    modified_ns: int

    @classmethod
    def at(cls, path: Path) -> RecordFile:
        """The file as it is now. Raises OSError."""
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on. Raises `SavableError` if it is not what it was."""
        file = _open(self.path)
        stat = os.fstat(file.fileno())  # each time: it may be overwritten while it is open
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.modified_ns):
            raise changed(self.path, f"{self.size} bytes when planned, {stat.st_size} now, written since")
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise changed(self.path, f"expected {size} bytes at {offset}, found {len(data)}")
        return data


@functools.lru_cache(maxsize=2)
def _open(path: str) -> io.FileIO:
    return io.FileIO(path)


def close_files() -> None:
    """Close the files that this process read last."""
    _open.cache_clear()
