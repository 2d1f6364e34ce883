"""`KnownMedia`: what is known of a dataset's media without opening them: by its table.

The digest of the table stands in a state. What it has not is read from the headers of the part itself, whose very
values it has, so that it may be added to a run, or removed.
"""

from __future__ import annotations

from savable_pipeline.data.media.media_info import MediaInfo, media_info
from savable_pipeline.data.media.media_table import BROKEN, MediaTable, open_table
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import MediaError


class KnownMedia:
    """The media of these shards of a store. Raises `ShardError` for a table that is not of them."""

    def __init__(self, store: RecordStore, shards: ShardList, *, tables: bool = True) -> None:
        self._store, self._shards = store, shards
        self.table: MediaTable | None = None
        found = getattr(store, "found", None)
        if tables and isinstance(found, IndexedFiles):  # no store of one's own
            self.table = open_table(found.root, shards, found.form.name)

    def untabled(self) -> KnownMedia:
        """The same without a table: headers are read."""
        return KnownMedia(self._store, self._shards, tables=False)

    def settings(self) -> dict[str, str]:
        """What a state must agree on: a hash of the values."""
        return {} if self.table is None else {self.table.field: self.table.digest}

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        """What is known of a part, which messages call `name`. Raises `MediaError`, and the errors of reading it."""
        known = None if self.table is None else self.table.find(self._store, shard, row, part)
        if isinstance(known, MediaInfo):
            return known
        with self._store.open(shard, row, part) as file:
            read = media_info(file, name, part)
        if known == BROKEN:  # by another release of PyAV: a run may not see both
            raise MediaError(
                f"{name}: its headers could not be read when `savable index --media` was run: run it again"
            )
        return read
