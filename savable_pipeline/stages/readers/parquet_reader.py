"""`ParquetReader`: reads samples from Parquet files in place; a row is a sample."""

from __future__ import annotations

from savable_pipeline.stages.readers.columnar_reader import ColumnarReader


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

    kind = "parquet"
