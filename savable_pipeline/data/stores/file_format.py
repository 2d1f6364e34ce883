"""`FileFormat`: what must be known of a kind of files, such as Parquet, to index them and to notice changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.core.open_files import is_out_of_handles
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.paths import ShardKind
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.file_bytes import FileBytes, opened
from savable_pipeline.data.stores.place_index import FileTable


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of files that samples are read from in place.

    `read` finds out what the index says of a file, by its bytes and its name; damage is the entry's `fault`, not an
    error. `is_as_indexed` looks whether a file of the right size still is the one that was read so.
    """

    name: str  # of the index file: `.nv-meta/savable.NAME.index`
    kind: ShardKind
    scan: str  # "package.module:function" of (root, name), which calls `scan_file`
    read: Callable[[FileBytes, str], FileTable]
    is_as_indexed: Callable[[FileBytes, FileTable], bool]
    no_places: int = 0  # of a file that cannot be read: how many zeros
    beside: tuple[str, str] = ("", "")  # files with the first suffix may have one beside them, with the second
    splits: str = ""  # the name of what lies in a folder of several splits

    @property
    def index_name(self) -> str:
        """The path of the index below the folder of the files."""
        return f".nv-meta/savable.{self.name}.index"

    def unreadable(self, name: str, size: int, fault: str) -> FileTable:
        """The table of a file of which nothing can be read."""
        return FileTable(ShardEntry(name, size, 0, 0, encodable(f"{name}: {fault}")), bytes(8 * self.no_places))


def scan_file(root: Path, name: str, form: FileFormat) -> FileTable:
    """What the index says of a file on a disk. Raises OSError where the process may open no more files."""
    size = 0
    try:
        with opened(root / name) as file:
            size = file.size
            return form.read(file, name)
    except OSError as error:
        if is_out_of_handles(error):
            raise
        return form.unreadable(name, size, error.strerror or str(error))
