"""`FileReader` and the readers of each format, with the options of the format.

`reader_of` builds the reader of files of any format.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, Unpack, cast

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.grouped_store import DECODED_BYTES, DecodedBlocks
from savable_pipeline.data.stores.ranges import RangeColumns
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import Classes
from savable_pipeline.stages.readers.reader import ReaderData, ReaderSettings, RecordReader, source_at

_NOT_SAVED = {"cache", "cache_bytes", "files_from", "validate_hash"}  # options that do not change samples
READERS: dict[str, type[FileReader]] = {}  # reader by name of the format


class FileReader(RecordReader):
    """Samples of files of one format for one lane.

    `kind` is the name of the format. Its store takes the options that formats.py lists for it.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        """Register a subclass as the reader of the format `kind`.

        `inspect.signature` of the classes in this file shows each common setting instead of `**settings`.
        """
        super().__init_subclass__()
        if kind:
            cls.kind, READERS[kind] = kind, cls
        if "__init__" in vars(cls) and cls.__module__ == __name__:
            signature, inherited = inspect.signature(cls.__init__), inspect.signature(RecordReader.__init__).parameters
            common = [inherited[name] for name in ReaderSettings.__annotations__]
            parameters = [*list(signature.parameters.values())[:-1], *common]  # without `**settings`
            vars(cls)["__init__"].__signature__ = signature.replace(parameters=parameters)

    def __init__(self, files: Shards, lane: Lane, options: dict[str, Any], common: ReaderSettings) -> None:
        self.files = as_names(files)
        self.options = _normalized_options(type(self).__name__, self.kind, options)
        store_settings = format_named(self.kind).settings
        cache_bytes: Any = options.get("cache_bytes")
        settings = {name: value for name, value in self.options.items() if name in store_settings and value is not None}
        cache = options.get("cache"), cache_bytes
        if "blocks" in store_settings:  # rows are decoded in groups, and `cache_bytes` limits these groups
            settings["blocks"] = lane.shared(("decoded", cache_bytes), lambda: DecodedBlocks(cache_bytes))
            cache = (None, None)
        key = tuple((name, repr(value)) for name, value in self.options.items())
        super().__init__(ReaderData.of_files(self.kind, self.files, lane, key, cache, **settings), lane, **common)

    def settings(self) -> dict[str, Any]:
        """Return the settings of all readers, and the options that change samples."""
        saved = {name: value for name, value in self.options.items() if name not in _NOT_SAVED}
        if "file_fields" in saved:
            saved["file_fields"] = getattr(self.dataset.store, "fields", None)
        if "key_end" in saved:
            saved["key_end"] = saved["key_end"] or "first"
        if "classes" in saved:
            saved["classes"] = getattr(self.dataset.store, "classes", None) or False
        return {**super().settings(), **saved}


def _normalized_options(reader: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with sequences as tuples. Raises ValueError for values that the format does not accept."""
    checked = {**options}
    for name in ("columns", "file_fields", "classes"):
        if isinstance(checked.get(name), Iterable) and not isinstance(checked[name], str):
            checked[name] = tuple(checked[name])
    for part, columns in (checked.get("ranges") or {}).items():
        if isinstance(columns, str) or len(columns) != 3 or columns[0] is None:
            raise ValueError(f"ranges: {part!r} must be (path, begin, end), names of three columns, not {columns!r}")
    if checked.get("ranges") is not None:
        checked["ranges"] = {part: [*columns] for part, columns in checked["ranges"].items()}
    if kind == "jsonl" and checked["file_fields"] is None and checked["files_from"] is not None:
        raise ValueError(f"{reader}: files_from needs file_fields")
    if (end := checked.get("key_end")) not in ("first", "last", None):
        raise ValueError(f"{reader}: key_end must be 'first' or 'last', not {end!r}")
    if (algorithm := checked.get("validate_hash")) is not None:
        from savable_pipeline.data.stores.record_files import known_hash  # only this option needs it

        if known_hash([algorithm]) is None:
            raise ValueError(f"{reader}: validate_hash must be an algorithm of hashlib or xxhash, not {algorithm!r}")
    if kind == "tokens":
        from savable_pipeline.data.stores.token_store import check_token_settings  # only this format needs it

        check_token_settings(**checked)
    return checked


class TarShardReader(FileReader, kind="tar"):
    """Samples of tar shards for one lane.

    Parts of a sample are read on access.

    Args:
        shards: Folder (with subfolders), glob, brace pattern (`{000..099}.tar`), tar, URL (s3, gs, az, http, https,
            hf), or a list of these.
        lane: The lane of the pipeline.
        cache: Folder for remote shards, shared by a node. None: `SAVABLE_CACHE`, or the user's cache folder.
        cache_bytes: The limit of the cache. None: `SAVABLE_CACHE_BYTES`, or 256 GiB but at most 80 % of the free space.
        split: Name in `.nv-meta/split.yaml`, which also orders shards without `shuffle`. None: all samples.
        subset: Fraction of the samples (0.1), range of fractions (0.1, 0.3), or count. It is the same in every run;
            disjoint ranges have no common sample.
        epochs: Epochs of a pass; 2.5 ends in the middle of the third. None: endless.
        shuffle: Permute shards and blocks in each epoch. False: deal blocks in file order to the lanes in turn.
        block_size: Samples that stay together. None: 8, or in file order the `Batcher`'s batch if each sample is one
            row (no packing, no `Blend`); only then batches come in file order.
        window: The number of shards whose blocks are mixed; None: all. `block_size=1, window=None` shuffles fully.
        on_error: For missing, damaged, changed or unreadable shards: "raise", "skip" their unreadable samples, or a
            function of the `ShardError` that returns True to skip. Unless "raise", the index of a changed shard is
            kept until `savable index`.
        quarantine: File that gets a line of JSON for each sample skipped here or by `Encode`.
        exclude: File of samples to leave out. Each line is a key, or JSON with "shard" and "key". `Encode`, or a
            `Batcher` of samples, drops and counts them, so earlier stages get them, and the order of other samples
            does not change before packing. It must not change during a run; `allow={"exclude"}` loads a state with
            another one.
        unpacked_bytes: The most bytes to which a compressed part may expand; for MDS and LitData a shard, chunk or
            record. Default: 1 GiB.

    Raises:
        ValueError: A setting is wrong.
        ShardError: There are no samples, or no such split.
        RemoteError: A server cannot be reached.
        SavableError: An endless lane reads a great many samples without a batch.

    Example:
        >>> reader = sp.TarShardReader("shards/", sp.Lane(index=1, count=2), shuffle=False, epochs=1)
        >>> sample = next(reader)  # lane 1 gets the second block of 8 samples
        >>> sample.key, list(sample), sample.json()
        ('s000008', ['json', 'txt', 'png'], {'id': 8})
        >>> reader.ref, reader.fetch((399, 0, 0)).key  # (index, epoch, part)
        ((8, 0, 0), 's000399')
    """

    def __init__(
        self,
        shards: Shards,
        lane: Lane,
        *,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(shards, lane, {"cache": cache, "cache_bytes": cache_bytes}, settings)


class _TableReader(FileReader):
    """Base of readers of tables whose rows are decoded in groups, with the options that they have in common."""

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        columns: Sequence[str] | None = None,
        key: str | None = None,
        ranges: RangeColumns | None = None,  # by part: the columns of path, start and end
        cache_bytes: int = DECODED_BYTES,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(
            files, lane, {"columns": columns, "key": key, "ranges": ranges, "cache_bytes": cache_bytes}, settings
        )


class ParquetReader(_TableReader, kind="parquet"):
    """Rows of Parquet files for one lane, as samples.

    The order is that of `sp.TarShardReader`.

    Each column is a part: strings and bytes unchanged, other values as JSON. A null is not a part. A column of structs
    of `bytes` and `path`, as HF `datasets` writes images and audio, is a part named by the path's extension, `jpg`, or
    `COLUMN.jpg` if there are several. The column's name reads it too. Image bytes in a column `image` are named by the
    detected format. A list of such structs makes the parts `0.jpg`, `1.jpg`, …. Folders such as `lang=en/` (Hive
    partitions) add parts. Row groups are decoded whole. Of remote files, only the chosen columns are fetched, into the
    cache of `sp.TarShardReader`. Needs pyarrow: `pip install "savable_pipeline[parquet]"`.

    Args:
        files: A folder (with its subfolders), a glob, a brace pattern, one file, a URL, or a list of these. A web
            server's folder cannot be listed, so name its files, or put their index next to them. A folder of LeRobot
            (version 3): a sample is an episode, whose parts are its videos, and arrays of its frames' numbers.
        lane: The lane of the pipeline.
        columns: The columns to read. None: all.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        ranges: Parts that are ranges of long audio or video files next to the table. Each part's name is mapped to the
            names of three columns: path (relative to the table's folder), start and end in seconds. A column None, or a
            null, stands for the file's own start or end. With `{"audio": ("path", "start", "end")}`, a range is
            `sample.audio("audio")`. The files must be among `files`.
        cache_bytes: The most bytes of decoded row groups, for all readers of a process with this value.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or there is no such column.
        ShardError: A file is damaged; a row names a file without its bytes (`savable convert --files-from` writes
            them into shards).
        RemoteError: A server cannot be reached.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> pq.write_table(pa.table({"id": range(100), "txt": [f"text {i}" for i in range(100)]}), "rows.parquet")
        >>> sample = next(custom.ParquetReader("rows.parquet", sp.Lane(), shuffle=False))
        >>> sample.key, list(sample), sample.json("id"), sample.text()
        ('rows.parquet:0', ['id', 'txt'], 0, 'text 0')
    """


class ArrowReader(_TableReader, kind="arrow"):
    """Rows of Arrow IPC files and streams for one lane, as samples.

    The order is that of `sp.TarShardReader`.

    Parts are those of `custom.ParquetReader`. Only requested parts are read: workers map the files into memory, and
    other processes read each value. Of remote files, compressed record batches are fetched whole. Needs pyarrow: `pip
    install "savable_pipeline[parquet]"`.

    Args:
        files: A folder that HF `datasets` wrote (`save_to_disk`, or one split in its cache), any folder of Arrow files
            with its subfolders, a glob, a brace pattern, one file, a URL, or a list of these.
        lane: The lane of the pipeline.
        columns: The columns to read. None: all.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        ranges: As for `custom.ParquetReader`.
        cache_bytes: The most bytes of cached record batches, for all readers of a process with this value. Of
            uncompressed batches, only columns of numbers and offsets count.
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


class JsonlReader(FileReader, kind="jsonl"):
    r"""Lines of JSONL files for one lane, as samples.

    The order is that of `sp.TarShardReader`.

    The part `json` is the line. Each field of the object is a part too: a string unquoted, other values as JSON. A null
    is not a part. Blank lines are ignored. The offsets of lines are indexed on first use.

    Args:
        files: A folder (with its subfolders; `.jsonl` and `.ndjson`), a glob, a brace pattern, one file, a URL, or a
            list of these.
        lane: The lane of the pipeline.
        key: The field with a sample's key. None: the key is `FILE:ROW`.
        ranges: As for `custom.ParquetReader`, with fields instead of columns.
        file_fields: The fields that name files, as for `custom.JsonReader`. The parts are then `json` and these files.
            None: no fields.
        files_from: As for `custom.CsvReader`.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: A file is damaged, or compressed (the error names the command that unpacks it).
        RemoteError: A server cannot be reached.

    Example:
        >>> _ = Path("lines.jsonl").write_text('{"id": 0, "text": "a"}\n{"id": 1, "text": "b"}\n')
        >>> sample = next(custom.JsonlReader("lines.jsonl", sp.Lane(), shuffle=False))
        >>> sample.key, list(sample), sample.json(), sample.text()
        ('lines.jsonl:0', ['json', 'id', 'text'], {'id': 0, 'text': 'a'}, 'a')
    """

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        key: str | None = None,
        ranges: RangeColumns | None = None,
        file_fields: Sequence[str] | None = None,
        files_from: str | os.PathLike[str] | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(
            files, lane, {"key": key, "ranges": ranges, "file_fields": file_fields, "files_from": files_from}, settings
        )


class _RecordsReader(FileReader):
    """Base of readers of records that name files, with the options that they have in common."""

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        key: str | None = None,
        file_fields: Sequence[str] | None = None,
        files_from: str | os.PathLike[str] | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(files, lane, {"key": key, "file_fields": file_fields, "files_from": files_from}, settings)


class CsvReader(_RecordsReader, kind="csv"):
    r"""Rows of CSV and TSV files for one lane, as samples.

    The order is that of `sp.TarShardReader`.

    The part `json` is an object of the cells as strings, null for an empty cell, as `savable convert` writes it. Files
    that cells name are parts too, named by their suffix: `cats/1.jpg` in the column `image` is the part `jpg`. The
    first line names the columns. The offsets of rows are indexed on first use.

    Args:
        files: A folder of only tables (with its subfolders), a glob, a brace pattern, one file, a URL, or a list of
            these.
        lane: The lane of the pipeline.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        file_fields: The columns that name files, as "column" or "column=part"; none if empty. None: those where most
            cells are paths of files, and those with one of the names image, audio, video, file and file_name.
        files_from: The folder that these paths are relative to; nothing outside of it is read. None: that of the table.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or the first line is a row.
        ShardError: A file is damaged, or a file that a row names is missing, or newer than the index.
        RemoteError: A server cannot be reached.

    Example:
        >>> _ = Path("rows.csv").write_text("id,caption\n0,a cat\n1,\n")
        >>> samples = custom.CsvReader("rows.csv", sp.Lane(), shuffle=False, epochs=1)
        >>> [(sample.key, sample.json()) for sample in samples]
        [('rows.csv:0', {'id': '0', 'caption': 'a cat'}), ('rows.csv:1', {'id': '1', 'caption': None})]
    """


class JsonReader(_RecordsReader, kind="json"):
    """Objects of JSON files with one list, such as LLaVA's, as samples.

    The order is that of `sp.TarShardReader`.

    The part `json` is the object, byte for byte. Files that its fields name are parts too. Indexing, on first use,
    reads a whole file.

    Args:
        files: A glob, a brace pattern, one file, a URL, or a list of these.
        lane: The lane of the pipeline.
        key: The field with a sample's key. None: the key is `FILE:ROW`.
        file_fields: The fields that name files, as "field" or "field=part"; none if empty. None: those of the names
            image, audio, video, file and file_name.
        files_from: As for `custom.CsvReader`.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: A file is damaged, or a file that an object names is missing, or newer than the index.
        RemoteError: A server cannot be reached.

    Example:
        >>> _ = Path("list.json").write_text('[{"n": 0}, {"n": 1}]')
        >>> sample = next(custom.JsonReader("list.json", sp.Lane(), shuffle=False))
        >>> sample.key, sample.json()
        ('list.json:0', {'n': 0})
    """


class FolderReader(FileReader, kind="folder"):
    """Samples of a folder of files for one lane.

    The order is that of `sp.TarShardReader`.

    Files that share a path up to their first dot are a sample, with that path as its key: `cat/1.jpg` and `cat/1.txt`
    are `cat/1`, with the parts `jpg` and `txt`, as `savable convert` writes them. Names and sizes are indexed on first
    use. A file that changes later is an error. If files were added or removed, earlier states are rejected.

    Args:
        folder: The folder, with its subfolders.
        lane: The lane of the pipeline.
        key_end: The dot of a name that ends the key. None: the first, and an error if that seems to merge separate
            samples, or if only a few samples have two images, recordings or videos.
        classes: Whether each sample has a part `cls`, the number of its top folder in sorted order. Or the ordered
            names: a list, a file (JSON, or lines), or another folder, such as that of the training split.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: The folder cannot be read, or a file was changed since it was indexed.

    Example:
        >>> for name in ("cat/1.txt", "cat/2.txt", "dog/1.txt"):
        ...     Path("pets", name).parent.mkdir(parents=True, exist_ok=True)
        ...     _ = Path("pets", name).write_text("a pet")
        >>> samples = custom.FolderReader("pets", sp.Lane(), classes=True, shuffle=False, epochs=1)
        >>> [(sample.key, list(sample), sample["cls"]) for sample in samples]
        [('cat/1', ['cls', 'txt'], b'0'), ('cat/2', ['cls', 'txt'], b'0'), ('dog/1', ['cls', 'txt'], b'1')]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lane: Lane,
        *,
        key_end: Literal["first", "last"] | None = None,
        classes: Classes = False,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        classes = os.fspath(classes) if isinstance(classes, os.PathLike) else classes
        super().__init__(folder, lane, {"key_end": key_end, "classes": classes}, settings)


class TokenReader(FileReader, kind="tokens"):
    """Documents or windows of token files for one lane, as samples.

    The order is that of `sp.TarShardReader`.

    - `.bin` with Megatron's `.idx` next to it: a sample is a document;
    - `.npy`, of one dimension or of two (a sample is a row); never unpickled;
    - `.bin` alone, and `.npy` without a header, as OLMo-core writes them: flat, of the type `dtype`.

    A sample has one part: `sample.array("tokens")` is an array (tokens,) of the file's own type.

    Args:
        files: A folder (with its subfolders), a glob, a brace pattern, one file, a URL, or a list of these; an `.idx`
            is cached whole.
        lane: The lane of the pipeline.
        length: Tokens of a window, across documents. A remainder at the end of a file is dropped. None: no windows.
        stride: Tokens from the start of a window to the next: `length=2049, stride=2048` is for inputs and labels of
            2048. None: `length`.
        dtype: Type of the tokens in flat files, such as "uint16".
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: A file is damaged, or an `.idx` does not fit its `.bin`.
        RemoteError: A server cannot be reached.

    Example:
        >>> np.save("tokens.npy", np.arange(1000, dtype=np.uint16))
        >>> sample = next(custom.TokenReader("tokens.npy", sp.Lane(), length=5, stride=4, shuffle=False))
        >>> sample.array("tokens"), sample.location
        (array([0, 1, 2, 3, 4], dtype=uint16), 'token 0')
    """

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        length: int | None = None,
        stride: int | None = None,
        dtype: str | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(files, lane, {"length": length, "stride": stride, "dtype": dtype}, settings)


class MdsReader(FileReader, kind="mds"):
    """Samples of an MDS folder for one lane.

    The order is that of `sp.TarShardReader`.

    Mosaic Streaming writes such folders: shards, plain or in gz, bz2 or zstd, and the index.json that names
    them. The parts of a sample are those that `savable convert` writes: `json` with the columns of strings, numbers and
    JSON, and one for each image, array and bytes: `jpg`, `png`, `npy`, or the detected format. A second part with the
    same name is `COLUMN.jpg` instead. A column of pickles is rejected.

    Args:
        folder: The folder with the index.json, or its URL (s3, gs, az, http, https, hf). For several see `sp.Blend`.
        lane: The lane of the pipeline.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        cache_bytes: The most bytes of decompressed shards, for all readers of a process with this value. A compressed
            shard is decompressed whole, and is one row group: see `custom.ParquetReader`.
        validate_hash: An algorithm of hashes in index.json, as in Mosaic's readers: "sha1", "xxh64". Each shard is then
            read whole when it is first opened, and must have its hash in index.json. None: no check.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or a package that the compression needs is missing.
        ShardError: A file is damaged, missing or contradicts index.json, or a column cannot be read.
        RemoteError: A server cannot be reached.

    Example:
        >>> import json, struct
        >>> data = b"".join(struct.pack("<I", len(text)) + text for text in (b"a cat", b"a dog"))
        >>> Path("mds").mkdir()
        >>> _ = Path("mds/shard.00000.mds").write_bytes(struct.pack("<4I", 2, 16, 25, 34) + data)
        >>> columns = {"column_names": ["caption"], "column_encodings": ["str"], "column_sizes": [None]}
        >>> file = {"basename": "shard.00000.mds", "bytes": 34}
        >>> index = {"shards": [{**columns, "format": "mds", "samples": 2, "raw_data": file}]}
        >>> _ = Path("mds/index.json").write_text(json.dumps(index))
        >>> sample = next(custom.MdsReader("mds", sp.Lane(), shuffle=False))
        >>> sample.key, sample.json()
        ('shard.00000.mds:0', {'caption': 'a cat'})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lane: Lane,
        *,
        key: str | None = None,
        cache_bytes: int = DECODED_BYTES,
        validate_hash: str | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(
            folder, lane, {"key": key, "cache_bytes": cache_bytes, "validate_hash": validate_hash}, settings
        )


class LitDataReader(FileReader, kind="litdata"):
    """Items of a LitData folder for one lane, as samples.

    The order is that of `sp.TarShardReader`.

    LitData writes such folders: chunks, plain or with zstd by chunk, batch or sample, or with rows of Arrow, and the
    index.json that names them. The parts of a sample are those of `custom.MdsReader`, with the values of an item as
    `json`, in their dicts and lists. Pickles, encryption and other item loaders are rejected.

    Args:
        folder: The folder with the index.json, or its URL (s3, gs, az, http, https, hf). For several see `sp.Blend`.
        lane: The lane of the pipeline.
        key: The field with a sample's key. None: the key is `FILE:ROW`.
        cache_bytes: The most bytes of decompressed chunks and frames, for all readers of a process with this value. A
            compressed chunk or batch, or a chunk with rows of Arrow, is decompressed whole, and is one row group: see
            `custom.ParquetReader`.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or a package that the chunks need is missing.
        ShardError: A file is damaged, missing or contradicts index.json, or a format cannot be read.
        RemoteError: A server cannot be reached.

    Example:
        >>> import json, struct
        >>> data = b"".join(struct.pack("<I", len(text)) + text for text in (b"a cat", b"a dog"))
        >>> Path("litdata").mkdir()
        >>> _ = Path("litdata/chunk-0-0.bin").write_bytes(struct.pack("<4I", 2, 16, 25, 34) + data)
        >>> config = {"data_format": ["str"], "data_spec": None}
        >>> index = {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 2}], "config": config}
        >>> _ = Path("litdata/index.json").write_text(json.dumps(index))
        >>> sample = next(custom.LitDataReader("litdata", sp.Lane(), shuffle=False))
        >>> sample.key, sample.json()
        ('chunk-0-0.bin:0', {'item': 'a cat'})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lane: Lane,
        *,
        key: str | None = None,
        cache_bytes: int = DECODED_BYTES,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        super().__init__(folder, lane, {"key": key, "cache_bytes": cache_bytes}, settings)


class FormatReader(FileReader):
    """Samples of files of a format without a reader of its own, for one lane."""

    def __init__(self, files: Shards, lane: Lane, **settings: Unpack[ReaderSettings]) -> None:
        super().__init__(files, lane, options={}, common=settings)


Readable: TypeAlias = Shards | RecordStore | Callable[[], RecordStore]


def reader_of(path: Readable, lane: Lane, options: Mapping[str, Any]) -> RecordReader:
    """Return the reader of files of any format, or of a store.

    If `path` is a function, it builds a store, and is called once per process.

    Raises ValueError for an option that readers of such files do not have, and errors of the reader.
    """
    if callable(path):
        path = lane.shared(("store", path), path)
    if hasattr(path, "address"):  # a store
        return RecordReader(cast(RecordStore, path), lane, **_known_options("a store", RecordReader, options))
    names, cache = as_names(path), options.get("cache")
    # without `cache`, `cache_bytes` may be the limit of decoded rows instead of the cache
    cache_settings = cache, options.get("cache_bytes") if cache else None
    format_options = {*options}.difference(ReaderSettings.__annotations__, ("cache", "cache_bytes", "format"))
    source = source_at(names, options.get("format") or "", lane, cache_settings, sorted(format_options))
    kind = source.format.name
    reader: Any = READERS.get(source.format.reader or kind) or type("FormatReader", (FormatReader,), {"kind": kind})
    options = {**source.settings, **{name: value for name, value in options.items() if name != "format"}}
    # the reader reuses the list of files from which the format was recognized
    lane.shared(("source", names, reader.kind, cache_settings), lambda: source)
    return cast(RecordReader, reader(names, lane, **_known_options(f"{names}: {kind} files", reader, options)))


def _known_options(files: str, reader: type[RecordReader], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options. Raises ValueError if the reader does not have one of them; the message names `files`."""
    known = options_of(reader)
    unknown = [name for name in options if name not in known]
    if unknown:
        readers = dict.fromkeys(each.__name__ for each in READERS.values() if unknown[0] in options_of(each))
        raise ValueError(f"{unknown[0]}= does not apply to {files}, only to {listed([*readers])}. Remove it.")
    return options


def options_of(reader: type[RecordReader]) -> list[str]:
    """Return the names of the options of a reader."""
    return [name for name, each in inspect.signature(reader).parameters.items() if each.kind is each.KEYWORD_ONLY]
