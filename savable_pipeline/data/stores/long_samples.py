"""`LongSamples`: samples of tars behind a URL that are longer than 8 MiB, such as films, of which only blocks are read.

    CACHE/DATASET/VERSION/N.tar           other samples of shard N, each here as a whole or not
    CACHE/DATASET/VERSION/long/N.bytes    blocks of the same shard, at the same version of the server's

A read brings the blocks that it touches; where it goes on behind what is here, as much at once as that is, 1 MiB at
most. Nothing of a long sample is announced until a long part was read as a whole: from then on whole samples are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.data.remote.cache_layout import LONG_FOLDER
from savable_pipeline.data.remote.lookup import locked_folder
from savable_pipeline.data.remote.pace import PIECE
from savable_pipeline.data.remote.remote_files import held
from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.downloaded_files import DownloadedFiles
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.errors import ShardError

LONG = PIECE  # bytes of a sample, with its headers, beyond which it is long
_ROWS_KEPT = 1 << 12  # that are known to be there

Locate = Callable[[int, str], tuple[int, int]]  # of a row, and a part's name → offset and size in the shard


class LongSamples:
    """Reads parts of long samples of `found`, which `files` has at `files.place`; rows are those of the index."""

    def __init__(self, files: DownloadedFiles, found: IndexedFiles, locate: Locate) -> None:
        assert isinstance(found.index, TarIndex), found.index
        self._files, self._found, self._index, self._locate = files, found, found.index, locate
        self._cached = files.place.cached
        self._there: set[int] = set()  # rows that were seen to lie where the index says
        self.read_whole = False  # whether a part that is long itself was

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `TarParts.read`; also raises `RemoteError`."""
        offset, size = self._locate(row, extension)
        self._note(size)
        return self.span(shard, row, (offset, size))

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        """See `TarParts.array`; also raises `RemoteError`."""
        offset, size = self._locate(row, extension)
        self._note(size)
        self._look(shard, row)
        array = empty_bytes(size)
        self._blocks.read_into(array, shard, offset)
        return array

    def span(self, shard: int, row: int, place: tuple[int, int]) -> bytes:
        """The bytes at `place`, (offset, size), of a shard. Raises `ShardError`, `RemoteError`."""
        self._look(shard, row)
        return self._blocks.read_on(shard, *place, self._cached.extent(row, row + 1)[1])

    def at_hand(self, shard: int, row: int, place: tuple[int, int]) -> bytes | None:
        """The bytes at `place` if they are here, else None."""
        return self.span(shard, row, place) if self._blocks.has(shard, *place) else None

    def prefetch(self, rows: Rows) -> None:
        """Has these samples downloaded if one was read as a whole."""
        for row in rows.tolist() if self.read_whole else ():
            extent = np.array(self._cached.extent(row, row + 1))
            shard = int(np.searchsorted(self._found.numbers, self._cached.shard_of(row)))
            self._blocks.prefetch_bytes(shard, extent[:1], extent[1:])

    def _note(self, size: int) -> None:
        self.read_whole = self.read_whole or size > LONG

    @cached_property
    def _blocks(self) -> CachedBlocks:
        place = self._files.place
        folder = self._cached.folder / LONG_FOLDER
        with locked_folder(self._cached.dataset):
            folder.mkdir(exist_ok=True)
            place = replace(place, cached=held(folder))
        return CachedBlocks(place, _OfTars(self._found))

    def _look(self, shard: int, row: int) -> None:
        """Raises `ShardError` unless the first header of a sample says what the index does."""
        if row in self._there:
            return
        blocks, index, begin = self._blocks, self._index, self._index.starts[row]
        name, head = self._found.entries.names[shard], index.layout(row).gaps[0]
        if not blocks.guarded(shard, begin, head, lambda: index.lies_there(name, blocks[shard], row, 1)):
            self._cached.note_changed(int(self._found.numbers[shard]))
            raise ShardError(
                f"{blocks.name(shard)}: its samples lie elsewhere than when it was indexed; the shard was rewritten "
                "since: start again to index it, or put the old shard back",
                reason="changed shard",
            )
        if len(self._there) >= _ROWS_KEPT:
            self._there.clear()
        self._there.add(row)


class _OfTars:
    """What an index says of tars whose samples are looked at one by one."""

    def __init__(self, found: IndexedFiles) -> None:
        self.numbers, self.check_rows = found.numbers, found.check_rows

    def is_as_indexed(self, shard: int, file: FileBytes, /) -> bool:
        return True
