"""`FileFormat`: what must be known of a kind of files, such as tars or Parquet, to index them and to notice changes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from savable_pipeline.core.open_files import is_out_of_handles
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource, opened
from savable_pipeline.data.shards.index_file import PlaceIndex, ShardIndex, ShardTable
from savable_pipeline.data.shards.index_place import index_name
from savable_pipeline.data.shards.paths import ShardKind
from savable_pipeline.data.shards.shard_list import ShardEntry


def _nothing(path: Path, table: ShardTable) -> None:
    """Leave nothing beside a file."""


def _no_fault(path: Path, table: ShardTable) -> str:
    """Find nothing wrong beside a file."""
    return ""


def found_at(place: str) -> Any:
    """What lies at "package.module:NAME.name"."""
    module, _, name = place.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of files that samples are read from in place.

    `read` finds out what the index says of a file, by its bytes and its name; damage is the entry's fault, not an
    error. `is_as_indexed` looks whether a file of the right size still is the one that has this number in an index.
    """

    name: str
    kind: ShardKind
    place: str  # "package.module:NAME" of this object: another process finds it so
    read: Callable[[ByteSource, str], ShardTable]
    is_as_indexed: Callable[[ByteSource, ShardIndex, int], bool]
    open_index: Callable[[Path, str], ShardIndex] = PlaceIndex
    all_used: bool = True  # whether every byte of a file is read in an epoch
    whole: bool = False  # behind a URL, whether a file is downloaded to index it, and not asked for at each start
    no_places: int = 0  # of a file that cannot be read: how many zeros
    no_digest: int = 0  # of such a file
    beside: tuple[str, str] = ("", "")  # files with the first suffix may have one beside them, with the second
    splits: str = ""  # the name of what lies in a folder of several splits
    for_others: str = ""  # behind the name of a file: that of what other programs read beside it
    leave_beside: Callable[[Path, ShardTable], None] = _nothing  # makes it
    fault_beside: Callable[[Path, ShardTable], str] = _no_fault  # why it is wrong

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return found_at, (self.place,)

    @property
    def index_name(self) -> str:
        """The path of the index below the folder of the files."""
        return index_name(self.name)

    def names_beside(self, name: str) -> list[str]:
        """What may lie beside a file."""
        own, other = self.beside
        companion = [self.companion(name)] if other and name.endswith(own) else []
        return [*companion, *([name + self.for_others] if self.for_others else [])]

    def companion(self, name: str) -> str:
        """The name of what lies beside a file; where it belongs to all files, it lies in their folder."""
        own, other = self.beside
        return name.removesuffix(own) + other if own else other

    def index_at(self, path: Path) -> ShardIndex:
        """The index of files of this format at `path`. Raises OSError, `ShardError`, ValueError."""
        return self.open_index(path, self.name)

    def scan(self, root: Path, name: str) -> ShardTable:
        """What the index says of a file on a disk. Raises OSError where the process may open no more files."""
        size = 0
        try:
            with opened(root / name) as file:
                size = file.size
                return self.read(file, name)
        except OSError as error:
            if is_out_of_handles(error):
                raise
            return self.unreadable(name, size, error.strerror or str(error))

    def unreadable(self, name: str, size: int, fault: str) -> ShardTable:
        """The table of a file of which nothing can be read."""
        entry = ShardEntry(name, size, 0, self.no_digest, encodable(f"{name}: {fault}"))
        return ShardTable(entry, bytes(8 * self.no_places))
