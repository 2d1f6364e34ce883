"""`IndexedFiles`: some files of an index, with their samples counted through all of them, on a disk or behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import PlaceIndex, Places, ShardIndex, ShardTable
from savable_pipeline.data.shards.indexing import check_faults, open_files
from savable_pipeline.data.shards.paths import Shards, Unlistable, raise_it
from savable_pipeline.data.shards.shard_list import Rows, ShardList
from savable_pipeline.errors import ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.remote.remote_files import RemotePlace
    from savable_pipeline.data.remote.session import Session


class IndexedFiles:
    """The files `names` of an index of this format, None: all. `root` has their metadata.

    Those behind a URL are at `remote`. `tolerant`: the samples before a damage are taken. Sample `i` is the `i`-th when
    they are read one after the other.
    """

    def __init__(
        self,
        form: FileFormat,
        index: ShardIndex,
        index_path: Path,
        names: Sequence[str] | None,
        root: Path,
        remote: RemotePlace | None = None,
        *,
        tolerant: bool = False,
    ) -> None:
        self.form, self.index, self.index_path = form, index, index_path
        self.root, self.remote, self.tolerant = root, remote, tolerant
        self.address = str(root) if remote is None else remote.url
        numbers = None if names is None else index.numbers(names)
        if numbers is None or np.array_equal(numbers, np.arange(len(index.shards))):
            numbers = np.arange(len(index.shards))
            self.entries: ShardList = index.shards
        else:
            self.entries = index.shards.take(numbers)
        self.numbers = numbers  # in the index, int64 (shards,)
        self._whole: set[int] = set()  # files whose rows in the index match their checksums
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])  # int64 (shards + 1,)

    @property
    def mean_bytes(self) -> float:
        """The bytes of a sample, with what lies around it."""
        return int(self.entries.sizes.sum()) / max(int(self.firsts[-1]), 1)

    def shards_of(self, indices: Rows) -> Rows:
        """The shard of each of these samples."""
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def place(self, shard: int) -> str:
        """What messages call the file of a shard: its path or its URL."""
        return f"{self.address}/{self.entries.names[shard]}"

    def places(self, shard: int) -> Places:
        """What the index says of a file that is no tar: uint64 (any,). Raises `ShardError` if it is damaged."""
        if shard not in self._whole:
            self.check_rows(shard)
            self._whole.add(shard)
        return self._place_index.places(int(self.numbers[shard]))

    @cached_property
    def _place_index(self) -> PlaceIndex:
        assert isinstance(self.index, PlaceIndex), self.form
        return self.index

    def table(self, shard: int) -> ShardTable:
        """What the index says of a file, to be written into another. Raises `ShardError` if it is damaged."""
        self.check_rows(shard)
        return self.index.table(int(self.numbers[shard]))

    def check_rows(self, shard: int) -> None:
        """Raises `ShardError` unless what the index says of a file is as it was written."""
        if not self.index.is_whole(int(self.numbers[shard])):
            raise self.damaged(self.entries.names[shard])

    def is_as_indexed(self, shard: int, file: ByteSource) -> bool:
        """Whether a file of the right size is the one that was indexed."""
        return self.form.is_as_indexed(file, self.index, int(self.numbers[shard]))

    def damaged(self, shard: str) -> ShardError:
        """The error for a damaged index; `shard` names the file that it was needed for. One in the cache is removed."""
        cure = f"remove {self.index_path} and start again"
        if self.remote is not None:
            self.index_path.unlink(missing_ok=True)
            cure = "start again: it is downloaded, or made, again then"
        return ShardError(f"{self.address}: the index of {shard} is damaged; {cure}", reason="damaged index")


def open_indexed(
    files: Shards,
    form: FileFormat,
    session: Session | None,
    *,
    tolerant: bool = False,
    unlistable: Unlistable = raise_it,
) -> IndexedFiles:
    """The files that a user names, indexed; those behind a URL, which have a `session`, are read through its cache.

    Raises `ShardError`, also for damage unless `tolerant`, `RemoteError`.
    """
    if session is None:
        found = open_files(files, form, tolerant=tolerant, unlistable=unlistable)
        return IndexedFiles(form, found.index, found.path, found.names, found.root, tolerant=tolerant)
    from savable_pipeline.data.stores.remote_indexing import open_remote  # here: most files lie on a disk

    place, names = open_remote(files, form, session, tolerant=tolerant)
    check_faults(place.url, place.index, names, tolerant)
    return IndexedFiles(form, place.index, place.index_path, names, place.metadata, place, tolerant=tolerant)
