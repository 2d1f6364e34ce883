"""`ColumnarReader`: the base of readers whose files hold columns, of which some are chosen."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.data.dataset.kinds import open_store
from savable_pipeline.data.dataset.opening import dataset_of
from savable_pipeline.data.shards.paths import Shards, Unlistable, as_names
from savable_pipeline.data.shards.selection import Subset
from savable_pipeline.data.stores.columnar_store import ColumnarStore
from savable_pipeline.data.stores.decoded_blocks import DECODED_BYTES, DecodedBlocks
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderSettings
from savable_pipeline.stages.setting_rules import SettingRule


class ColumnarReader(RecordReader):
    """Gives the rows of a lane's share of files as samples; a subclass says in `kind` of which files."""

    kind: ClassVar[str]
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {
        **RecordReader.setting_rules,
        "parts": SettingRule(
            fixed="lists of images, or images of Arrow's view types, which were JSON, are parts since: go on with the "
            "release that saved the state"
        ),
    }

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        split: str | None = None,
        subset: Subset | None = None,
        epochs: int | float | None = None,
        shuffle: bool = True,
        block_size: int | None = None,
        window: int | None = 128,
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        exclude: str | os.PathLike[str] | None = None,
        cache_bytes: int = DECODED_BYTES,
    ) -> None:
        self.files = names = as_names(files)
        self.columns = None if columns is None else tuple(columns)
        self.key = key
        blocks: DecodedBlocks[Any] = lane.shared(("decoded", cache_bytes), lambda: DecodedBlocks(cache_bytes))

        def opened(tolerant: bool, unlistable: Unlistable) -> RecordStore:
            return open_store(self.kind, names, tolerant, unlistable, columns=self.columns, key=key, blocks=blocks)

        self._begin_reading(
            lane,
            ReaderSettings(split, subset, epochs, shuffle, block_size, window, on_error, exclude),
            (type(self).__name__, names, self.columns, key, on_error, quarantine, cache_bytes),
            lambda: dataset_of(opened, on_error=on_error, quarantine=quarantine),
        )

    def settings(self) -> dict[str, Any]:
        """Those of every reader; the columns and the key; `parts`, where a column holds images that were JSON once: the
        version of what they become, which a state must agree on."""
        store = self.dataset.store
        since = store.parts_since.values() if isinstance(store, ColumnarStore) else ()
        return {
            **super().settings(),
            "columns": self.columns,
            "key": self.key,
            **({"parts": max(since)} if since else {}),
        }
