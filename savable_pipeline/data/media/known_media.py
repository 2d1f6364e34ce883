"""`KnownMedia`: what is known of a dataset's media without opening them: by its own table, or else by Energon's.

Which of the two it is, and its digest, stand in a state: lengths by one are never mixed with lengths by the other. What
neither of them has is read from the headers of the part itself. The own table has the very values of the headers, so
that it may be added to a run, or removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from savable_pipeline.data.media.media_info import MediaInfo, media_info
from savable_pipeline.data.media.media_table import BROKEN, MediaTable, open_table
from savable_pipeline.data.shards.energon_metadata import META
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import MediaError

if TYPE_CHECKING:
    from savable_pipeline.data.media.energon_media import EnergonMedia

ENERGON_MEDIA = f"{META}/index.sqlite"


class KnownMedia:
    """The media of these shards of a store. Raises `ShardError` for a table that is not of them.

    `table` is the own one, `energon` what Energon wrote, where there is no own one.
    """

    def __init__(self, store: RecordStore, shards: ShardList, *, tables: bool = True) -> None:
        self._store, self._shards = store, shards
        self.table: MediaTable | None = None
        self.energon: EnergonMedia | None = None
        found = getattr(store, "found", None)
        if not tables or not isinstance(found, IndexedFiles):  # of a store of one's own
            return
        self.table = open_table(found.root, shards, found.form.name)
        if self.table is None and (found.root / ENERGON_MEDIA).is_file():
            from savable_pipeline.data.media.energon_media import open_energon_media  # here: most have none

            self.energon = open_energon_media(found.root / ENERGON_MEDIA)

    def untabled(self) -> KnownMedia:
        """The same without a table: headers are read."""
        return KnownMedia(self._store, self._shards, tables=False)

    def settings(self) -> dict[str, str]:
        """What a state must agree on: a hash of the values, by the field of the table that has them."""
        return {} if (found := self.table or self.energon) is None else {found.field: found.digest}

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        """What is known of a part, which messages call `name`. Raises `MediaError`, and the errors of reading it."""
        found = self.table or self.energon
        known = None if found is None else found.find(self._store, shard, row, part)
        if isinstance(known, MediaInfo):
            return known
        with self._store.open(shard, row, part) as file:
            read = media_info(file, name, part)
        if known == BROKEN:  # by another release of PyAV: a run may not see both
            raise MediaError(
                f"{name}: its headers could not be read when `savable index --media` was run: run it again"
            )
        return read
