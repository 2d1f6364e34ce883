"""`LocalTars`: tar shards on a disk, of which the kernel is asked to read ahead what will be read."""

from __future__ import annotations

from pathlib import Path

from savable_pipeline.shards.shard_list import Rows
from savable_pipeline.stores.indexed_shards import IndexedShards
from savable_pipeline.stores.local_files import LocalFiles
from savable_pipeline.stores.readahead import readahead


class LocalTars(LocalFiles):
    """The tars below the folder `root`."""

    def __init__(self, root: Path, shards: IndexedShards) -> None:
        super().__init__(root, shards)
        self._tars = shards

    def prefetch(self, indices: Rows) -> None:
        """Asks the kernel to read these samples ahead."""
        readahead(self._tars, self, indices)
