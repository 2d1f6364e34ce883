"""The readers of files that hold columns, some of which are chosen: Parquet and Arrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.opening import dataset_of
from savable_pipeline.data.shards.paths import Shards, Unlistable, as_names
from savable_pipeline.data.stores.arrow_store import ArrowStore
from savable_pipeline.data.stores.columnar_store import ColumnarStore
from savable_pipeline.data.stores.decoded_blocks import DECODED_BYTES, DecodedBlocks
from savable_pipeline.data.stores.parquet_store import ParquetStore
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings
from savable_pipeline.stages.setting_rules import SettingRule


class ColumnarReader(RecordReader):
    """Gives the rows of a lane's share of files as samples; a subclass says in `store` which kind of files."""

    store: ClassVar[Callable[..., ColumnarStore]]
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
        cache_bytes: int = DECODED_BYTES,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        self.files, self.columns, self.key = as_names(files), None if columns is None else tuple(columns), key
        blocks: DecodedBlocks[Any] = lane.shared(("decoded", cache_bytes), lambda: DecodedBlocks(cache_bytes))
        opening = partial(dataset_of, partial(self._opened, blocks))
        options = (self.columns, key, cache_bytes)
        super().__init__(ReaderData(type(self).__name__, self.files, opening, options), lane, **settings)

    def _opened(self, blocks: DecodedBlocks[Any], tolerant: bool, unlistable: Unlistable) -> ColumnarStore:
        chosen: dict[str, Any] = {"columns": self.columns, "key": self.key, "blocks": blocks}
        return self.store(self.files, **chosen, tolerant=tolerant, unlistable=unlistable)

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


class ParquetReader(ColumnarReader):
    """Gives the rows of a lane's share of Parquet files as samples, as `sp.TarShardReader` does those of tars.

    `files` is a folder (with its subfolders), a glob, a brace pattern, one file, or a list of these. Each of `columns`
    (None: all) is a part of the sample, called as the column: texts and bytes as they are, numbers, lists and other
    values as JSON. A column of structs of `bytes` and `path`, as HF `datasets` writes images and audio, is a part named
    by the path's extension, `jpg`; of several such columns each is `COLUMN.jpg`; its own name reads it too. A list of
    such structs is a part for each, `0.jpg`, `1.jpg`, …. A null is no part; a path without bytes is an error, since no
    file is opened that a row names: `savable convert --files` writes it into shards. Folders such as `lang=en/` (Hive
    partitions) add parts. `key` names the column with a sample's key; without it the key is `FILE:ROW`.

    Row groups are decoded whole. At most `cache_bytes` bytes of them are kept, for all lanes and Parquet readers of a
    process together that have the same `cache_bytes`. `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
    `on_error`, `quarantine` and `exclude` are those of `TarShardReader`. Needs pyarrow:
    `pip install "savable_pipeline[parquet]"`.

    Files may lie behind URLs (s3, gs, az, http, https): only the columns that are asked for are fetched, into the cache
    that `SAVABLE_CACHE` and `SAVABLE_CACHE_BYTES` name, which is that of `TarShardReader`. A folder of a web server
    cannot be listed: name its files, or have their index beside them.

    Raises ValueError for wrong settings or a column that is not there, `ShardError` for damaged files, rows
    without the bytes of what they name, and addresses of the hub (the error names the command that downloads),
    `RemoteError` if a server cannot be reached.

    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> pq.write_table(pa.table({"id": range(100), "txt": [f"text {i}" for i in range(100)]}), "rows.parquet")
    >>> sample = next(sp.ParquetReader("rows.parquet", sp.Lane(), shuffle=False))
    >>> sample.key, list(sample), sample.json("id"), sample.text()
    ('rows.parquet:0', ['id', 'txt'], 0, 'text 0')
    """

    store = ParquetStore


class ArrowReader(ColumnarReader):
    """Gives the rows of a lane's share of Arrow files as samples, as `sp.TarShardReader` does those of tars.

    `files` is a folder that HF `datasets` wrote (`save_to_disk`, or one split in its cache), any folder of Arrow files
    with its subfolders, a glob, a brace pattern, one file, or a list of these: IPC files and streams. Only
    the parts that are asked for are read: workers map the files into their memory, any other process reads each value.
    `columns`, `key` and the parts of a sample are those of `sp.ParquetReader`; so is `cache_bytes`, for what is held of
    record batches: all where they are compressed, else no more than columns of numbers and where values lie.

    `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`, `on_error`, `quarantine` and `exclude` are those of
    `TarShardReader`. Needs pyarrow: `pip install "savable_pipeline[parquet]"`.

    Files may lie behind URLs, as those of `sp.ParquetReader`; of record batches that are compressed all is fetched.

    Raises ValueError for wrong settings or a column that is not there; `ShardError` for damaged files, for a folder of
    several splits, and for dictionary-encoded columns; `RemoteError` if a server cannot be reached.

    >>> import pyarrow as pa
    >>> table = pa.table({"id": range(100), "txt": [f"text {i}" for i in range(100)]})
    >>> with pa.ipc.new_stream("rows.arrow", table.schema) as stream:
    ...     stream.write_table(table, max_chunksize=40)
    >>> sample = next(sp.ArrowReader("rows.arrow", sp.Lane(), shuffle=False))
    >>> sample.key, list(sample), sample.json("id"), sample.text()
    ('rows.arrow:0', ['id', 'txt'], 0, 'text 0')
    """

    store = ArrowStore
