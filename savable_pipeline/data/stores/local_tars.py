"""`LocalTars`: tar shards on a disk, of which the kernel is asked to read ahead what will be read."""

from __future__ import annotations

from pathlib import Path

from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.indexed_shards import IndexedShards
from savable_pipeline.data.stores.local_files import LocalFiles
from savable_pipeline.data.stores.readahead import readahead


class LocalTars(LocalFiles):
    """The tars below the folder `root`."""

    def __init__(self, root: Path, shards: IndexedShards) -> None:
        super().__init__(root, shards)
        self._tars = shards

    def prefetch(self, indices: Rows) -> None:
        """Asks the kernel to read these samples ahead."""
        readahead(self._tars, self, indices)
