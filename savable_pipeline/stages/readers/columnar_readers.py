"""The readers of files with columns, from which some are chosen: Parquet and Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.stores.grouped_store import DECODED_BYTES, DecodedBlocks
from savable_pipeline.data.stores.source import RangeColumns
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings, named_ranges
from savable_pipeline.stages.setting_rules import SettingRule


class ColumnarReader(RecordReader):
    """Yields the rows of a lane's share of files as samples; `kind` of a subclass is that of the files."""

    kind: ClassVar[str]
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {
        **RecordReader.setting_rules,
        "parts": SettingRule(
            fixed="bytes in a column 'image', images without paths, lists of images, or images of Arrow's view types, "
            "which were JSON or bytes, are parts of another name since: continue with the release that saved the state"
        ),
    }

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        ranges: RangeColumns | None = None,
        cache_bytes: int = DECODED_BYTES,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        self.files, self.columns, self.key = as_names(files), None if columns is None else tuple(columns), key
        self.ranges = named_ranges(ranges)
        blocks: DecodedBlocks[Any] = lane.shared(("decoded", cache_bytes), lambda: DecodedBlocks(cache_bytes))
        chosen: dict[str, Any] = {"columns": self.columns, "key": key, "blocks": blocks, **self.ranges}
        options = (self.columns, key, cache_bytes, *map(repr, self.ranges.values()))
        super().__init__(ReaderData.of_files(self.kind, self.files, lane, options, **chosen), lane, **settings)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, the columns, the key, and the ranges if there are any.

        `parts`, where a column holds images that once were JSON: the version of their form, on which a state must
        agree.
        """
        store = self.dataset.store
        from savable_pipeline.data.stores.columnar_store import ColumnarStore

        since = store.parts_since.values() if isinstance(store, ColumnarStore) else ()
        return {
            **super().settings(),
            "columns": self.columns,
            "key": self.key,
            **self.ranges,
            **({"parts": max(since)} if since else {}),
        }


class ParquetReader(ColumnarReader):
    """Yields the rows of a lane's share of Parquet files as samples, in the order of `sp.TarShardReader`.

    Each column is a part: texts and bytes unchanged, other values as JSON; a null is no part. A column of structs of
    `bytes` and `path`, as HF `datasets` writes images and audio, is a part named by the path's extension, `jpg`, or
    `COLUMN.jpg` if there are several; its own name reads it too. So are the bytes of images in a column `image`, by how
    they begin. A list of such structs makes the parts `0.jpg`, `1.jpg`, …. Folders such as `lang=en/` (Hive partitions)
    add parts. Row groups are decoded whole. Behind a URL only the chosen columns are fetched, into the cache of
    `sp.TarShardReader`. Needs pyarrow: `pip install "savable_pipeline[parquet]"`.

    Args:
        files: A folder (with its subfolders), a glob, a brace pattern, one file, a URL, or a list of these. A web
            server's folder cannot be listed: name its files, or put their index beside them. A folder of LeRobot
            (version 3): a sample is an episode, whose parts are its videos, and arrays of its frames' numbers.
        lane: The lane of the pipeline.
        columns: The columns to read. None: all.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        ranges: Parts that are ranges of long audio or video files beside the table: by the name of each the columns of
            path (from the table's folder on), begin and end in seconds; None, and null, for the file's own begin or
            end. `{"audio": ("path", "start", "end")}` gives `sample.audio("audio")`. The files must be among `files`.
        cache_bytes: The most bytes of decoded row groups, for all readers of a process with this value.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or there is no such column.
        ShardError: A file is damaged; a row names a file without its bytes (`savable convert --files` writes them into
            shards).
        RemoteError: A server cannot be reached.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> pq.write_table(pa.table({"id": range(100), "txt": [f"text {i}" for i in range(100)]}), "rows.parquet")
        >>> sample = next(custom.ParquetReader("rows.parquet", sp.Lane(), shuffle=False))
        >>> sample.key, list(sample), sample.json("id"), sample.text()
        ('rows.parquet:0', ['id', 'txt'], 0, 'text 0')
    """

    kind = "parquet"


class ArrowReader(ColumnarReader):
    """Yields the rows of a lane's share of Arrow files, IPC files and streams, in the order of `sp.TarShardReader`.

    Parts are those of `custom.ParquetReader`; only those asked for are read: workers map the files into memory, other
    processes read each value. Behind a URL, compressed record batches are fetched whole. Needs pyarrow: `pip install
    "savable_pipeline[parquet]"`.

    Args:
        files: A folder that HF `datasets` wrote (`save_to_disk`, or one split in its cache), any folder of Arrow files
            with its subfolders, a glob, a brace pattern, one file, a URL, or a list of these.
        lane: The lane of the pipeline.
        columns: The columns to read. None: all.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        ranges: As for `custom.ParquetReader`.
        cache_bytes: The most bytes held of record batches, for all readers of a process with this value: whole ones if
            compressed, else only columns of numbers and the places of values.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or there is no such column.
        ShardError: A file is damaged, a folder has several splits, or a column is dictionary-encoded.
        RemoteError: A server cannot be reached.

    Example:
        >>> import pyarrow as pa
        >>> table = pa.table({"id": range(100), "txt": [f"text {i}" for i in range(100)]})
        >>> with pa.ipc.new_stream("rows.arrow", table.schema) as stream:
        ...     stream.write_table(table, max_chunksize=40)
        >>> sample = next(custom.ArrowReader("rows.arrow", sp.Lane(), shuffle=False))
        >>> sample.key, list(sample), sample.json("id"), sample.text()
        ('rows.arrow:0', ['id', 'txt'], 0, 'text 0')
    """

    kind = "arrow"
