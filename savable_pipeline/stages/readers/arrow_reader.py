"""`ArrowReader`: reads samples from Arrow IPC files and streams; a row is a sample."""

from __future__ import annotations

from savable_pipeline.stages.readers.columnar_reader import ColumnarReader


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

    kind = "arrow"
