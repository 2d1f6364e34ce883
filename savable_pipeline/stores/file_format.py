"""`FileFormat`: what must be known of a kind of files, such as Parquet, to index them and to notice changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.shards.paths import ShardKind
from savable_pipeline.stores.place_index import FileTable


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of files that samples are read from in place.

    `scan` reads a file, by its path and its name, and never raises for damage: that is the entry's `fault`.
    `is_as_indexed` looks, by path and descriptor, whether a file of the right size still is the one that was scanned.
    `beside` names the file, if any, that says what lies in this one.
    """

    name: str  # of the index file: `.nv-meta/savable.NAME.index`
    kind: ShardKind
    scan: str  # "package.module:function" of (root, name)
    is_as_indexed: Callable[[Path, int, FileTable], bool]
    beside: Callable[[Path], Path | None] | None = None

    @property
    def index_name(self) -> str:
        """The path of the index below the folder of the files."""
        return f".nv-meta/savable.{self.name}.index"
