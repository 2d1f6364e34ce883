"""`JsonlReader`: reads samples from JSONL files in place; a line is a sample."""

from __future__ import annotations

import os
from typing import Any

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.data.dataset.kinds import open_store
from savable_pipeline.data.dataset.opening import dataset_of
from savable_pipeline.data.shards.paths import Shards, Unlistable, as_names
from savable_pipeline.data.shards.selection import Subset
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderSettings


class JsonlReader(RecordReader):
    """Gives the lines of a lane's share of JSONL files as samples, as `sp.TarShardReader` does those of tars.

    `files` is a folder (with its subfolders; `.jsonl` and `.ndjson`), a glob, a brace pattern, one file, or a list of
    these. The part `json` of a sample is its line, so that `sample.json()` is the object. The fields of the object are
    parts too, called as the field: a text as it is, so that `sample.text("caption")` decodes it and `sample.text()`
    finds `txt`, `text`, `caption` or `md`; anything else as JSON. Listed are the fields that are texts. `key` names the
    field with a sample's key; without it the key is `FILE:ROW`. Blank lines are no samples.

    Where the lines begin is indexed on first use. `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
    `on_error`, `quarantine` and `exclude` are those of `TarShardReader`.

    Files may lie behind URLs, as those of `sp.ParquetReader`.

    Raises ValueError for wrong settings; `ShardError` for damaged files, and for compressed files (the error names the
    command that unpacks); `RemoteError` if a server cannot be reached.

    >>> _ = Path("lines.jsonl").write_text('{"id": 0, "text": "a"}\\n{"id": 1, "text": "b"}\\n')
    >>> sample = next(sp.JsonlReader("lines.jsonl", sp.Lane(), shuffle=False))
    >>> sample.key, list(sample), sample.json(), sample.text()
    ('lines.jsonl:0', ['json', 'text'], {'id': 0, 'text': 'a'}, 'a')
    """

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
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
    ) -> None:
        self.files = names = as_names(files)
        self.key = key

        def opened(tolerant: bool, unlistable: Unlistable) -> RecordStore:
            return open_store("jsonl", names, tolerant, unlistable, key=key)

        self._begin_reading(
            lane,
            ReaderSettings(split, subset, epochs, shuffle, block_size, window, on_error, exclude),
            ("jsonl", names, key, on_error, quarantine),
            lambda: dataset_of(opened, on_error=on_error, quarantine=quarantine),
        )

    def settings(self) -> dict[str, Any]:
        """Those of every reader; the key."""
        return {**super().settings(), "key": self.key}
