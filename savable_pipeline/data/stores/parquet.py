"""The format of Parquet files, and the record store that reads them.

Footers are read in the calling thread, so that a fork is safe, and validated. Blob of a file in the index: the rows of
each row group, then the bytes that each decodes to.

    a new file ── its footer ──▶ a child process, which parses it first ── rows and bytes of its row groups ──▶ index

Some footers crash the process in which pyarrow parses them. A trainer must not crash, so the index has only files
whose footers the child parsed, and opening a file compares its footer with the indexed one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, Unpack

import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.core.wording import encodable, human_bytes
from savable_pipeline.data.shards.byte_source import ByteSource, SourceFile
from savable_pipeline.data.shards.index import Format, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.stores.grouped_store import COLUMNAR_SETTINGS, ColumnarStore, ColumnSettings, DecodedGroup
from savable_pipeline.data.stores.ranges import RangedTable, with_media
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.data.stores.table_store import NamingStore
from savable_pipeline.errors import SavableError

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_LARGEST_FOOTER = 1 << 29
_MOST_ROWS = 1 << 40
_SIGNATURE = 28  # bytes after a readable footer, in a file with encrypted columns
_NOT_ENCRYPTED = "Write the file without encryption"
_RATIO = 64  # a row group may always decode to this multiple of its bytes in the file
_DICTIONARY_HEAD = 32  # first bytes of a dictionary page, which contain its size
_IDLE_S = 10  # idle seconds after which the child process ends

_Groups: TypeAlias = tuple[list[int], list[int]]  # rows and bytes of each row group
_children: dict[int, ChildProcess] = {}  # by the ID of the process that started it
_child_lock = threading.Lock()  # a child answers one thread at a time


class ParquetFooterError(ValueError):
    """Error for a missing or invalid footer of a file."""


def read_parquet_table(file: ByteSource, name: str) -> ShardTable:
    """Return entry and row groups of a file. Damage is the fault of the entry."""
    try:
        footer = read_parquet_footer(file)
        rows, sizes = _groups_by_child(footer, file.size)
    except ParquetFooterError as error:
        return ShardTable(ShardEntry(name, file.size, 0, 0, encodable(f"{name}: {error}")), b"")
    entry = ShardEntry(name, file.size, sum(rows), xxh3_64_intdigest(footer))
    return ShardTable(entry, np.array([*rows, *sizes], dtype="<u8").tobytes())


def read_parquet_footer(file: ByteSource) -> bytes:
    """Return the bytes of a file's footer. Raises `ParquetFooterError`, OSError."""
    size = file.size
    tail = file.read_at(max(0, size - 8), 8)
    if tail[4:] == _ENCRYPTED:
        raise ParquetFooterError(f"an encrypted footer. {_NOT_ENCRYPTED}")
    if size < 12 or tail[4:] != _MAGIC:
        raise ParquetFooterError("no Parquet footer at its end: cut short, or not Parquet. Copy the file again")
    length = int.from_bytes(tail[:4], "little")
    if not 0 < length <= min(size - 12, _LARGEST_FOOTER):
        raise ParquetFooterError(f"damaged at its end: a footer of {length} bytes in {size}. Copy the file again")
    return file.read_at(size - 8 - length, length)


def parquet_matches_index(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether a file still has its indexed footer. Raises OSError."""
    try:
        return xxh3_64_intdigest(read_parquet_footer(file)) == int(index.shards.digests[number])
    except ParquetFooterError:
        return False


def parsed_footer(footer: bytes) -> Any:
    """Parse a footer as pyarrow's `FileMetaData`, without reading more of the file.

    Raises pyarrow's errors.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_metadata(pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC))


def column_bytes(group: Any, wanted: list[str] | None) -> list[tuple[int, int]]:
    """Return the byte range (begin, end) of each column of a row group.

    Only columns that are `wanted` are returned (None: all).
    """
    return [_bytes_of(column) for column in columns_of(group, wanted)]


def columns_of(group: Any, wanted: list[str] | None) -> list[Any]:
    """Return the columns of a row group, also those nested in others.

    Only columns that are `wanted` are returned, with those nested in them (None: all).
    """
    columns = [group.column(i) for i in range(group.num_columns)]
    names = None if wanted is None else set(wanted)
    return [column for column in columns if names is None or _is_within(column.path_in_schema, names)]


def _is_within(path: str, names: set[str]) -> bool:
    """Return whether a leaf column is one of these, or nested in one. Names may contain dots."""
    return path in names or any(path[:end] in names for end, sign in enumerate(path) if sign == ".")


def _bytes_of(column: Any) -> tuple[int, int]:
    begin = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    return begin, begin + column.total_compressed_size


def _groups_by_child(footer: bytes, size: int) -> _Groups:
    """Return the result of `_groups`, computed in a child process, or raise its error.

    Raises `ParquetFooterError` if the child crashes twice.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ImportError("Parquet files need pyarrow. Run `pip install pyarrow`")
    with _child_lock:
        for _ in range(2):
            child = _children.get(os.getpid())
            if child is None or child.process.poll() is not None:
                child = _children[os.getpid()] = ChildProcess(f"{__name__}:serve_groups")
            with contextlib.suppress(EOFError, OSError):
                child.connection.send((footer, size))
                answer: _Groups | str = child.connection.recv()
                if isinstance(answer, str):
                    raise ParquetFooterError(answer)
                return answer
            child.kill()
    raise ParquetFooterError("pyarrow crashed on the footer. Write the file again, by pyarrow alone")


def serve_groups(connection: Connection, footers: Iterator[tuple[bytes, int]]) -> None:
    """Parse footers, in the child process of `_groups_by_child`."""
    signal.alarm(_IDLE_S)
    for footer, size in footers:
        signal.alarm(0)
        try:
            connection.send(_groups(footer, size))
        except ParquetFooterError as error:
            connection.send(str(error))
        signal.alarm(_IDLE_S)


def _groups(footer: bytes, size: int) -> _Groups:
    """Return rows and bytes of each row group. Raises `ParquetFooterError` if they are invalid."""
    import pyarrow as pa  # imported here, because pyarrow is not needed to read tars

    try:
        metadata = parsed_footer(footer)
        if len(footer) - metadata.serialized_size == _SIGNATURE:  # pyarrow aborts when such a column is requested
            raise ParquetFooterError(f"encrypted columns. {_NOT_ENCRYPTED}")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = [group.num_rows for group in groups]
        sizes = [group.total_byte_size for group in groups]
        fault = next((fault for group in groups if (fault := _column_fault(group, size))), "")
        with contextlib.suppress(pa.ArrowException):  # a read of such a column raises this error again, with its name
            metadata.schema.to_arrow_schema()
    except ParquetFooterError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        line = encodable(str(error).partition("\n")[0])
        raise ParquetFooterError(f"a damaged footer: {line}. Copy the file again") from error
    if min([*rows, *sizes], default=0) < 0 or sum(rows) != metadata.num_rows or sum(rows) > _MOST_ROWS:
        fault = f"row groups of {sum(rows)} rows, but {metadata.num_rows} in the file"
    if fault:
        raise ParquetFooterError(f"a wrong footer: {fault}. Copy the file again")
    return rows, sizes


def _column_fault(group: Any, size: int) -> str:
    for begin, end in column_bytes(group, None):
        if not 0 <= begin <= end <= size:
            return f"a column at the bytes {begin} to {end} of {size}"
    return ""


_OPEN_FILES = 16  # number of files whose parsed footers stay in memory
_BATCH_ROWS = 8192  # most rows to decode at a time


class ParquetStore(ColumnarStore):
    """Rows of Parquet files as samples.

    Row groups are decoded whole and cached in `blocks`. The other settings are those of `ColumnarStore`. Raises
    `ShardError`, and ValueError for a missing column.
    """

    def __init__(self, found: IndexedFiles, **settings: Unpack[ColumnSettings]) -> None:
        self._ends: dict[int, list[int]] = {}
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._column_bytes: dict[int, list[Rows]] = {}  # int64 (columns, 2) for each row group of a shard
        super().__init__(found, **settings)
        self.decoded_bytes = self.blocks.limit

    def group_rows(self, shard: int) -> list[int]:
        """Return the number of rows of each row group of a file."""
        blob = self.blob(shard)
        rows: list[int] = blob[: len(blob) // 2].tolist()
        return rows

    def row_groups(self, shard: int) -> tuple[list[int], int]:
        """See `RecordStore.row_groups`."""
        blob = self.blob(shard)
        return self.group_rows(shard), int(blob[len(blob) // 2 :].sum())  # the decoded bytes, as the footer says

    def group_ends(self, shard: int) -> list[int]:
        """See `ColumnarStore.group_ends`."""
        if (ends := self._ends.get(shard)) is None:
            ends = self._ends[shard] = np.cumsum(self.group_rows(shard), dtype=np.int64).tolist()
        return ends

    def decode(self, shard: int, group: int) -> DecodedGroup:
        """See `ColumnarStore.decode`."""
        return DecodedGroup(*self.batches(shard, group, self.wanted))

    def batches(self, shard: int, group: int, columns: list[str] | None) -> tuple[list[Any], int]:
        """Return batches of columns (None: all) of a row group, and their bytes.

        The columns are decoded in the calling thread. pyarrow starts no other thread, so processes may be forked.
        Raises `ShardError`.
        """
        import pyarrow as pa

        batches: list[Any] = []
        try:
            file = self._file(shard)
            self.check_columns(shard, file.schema_arrow.names)
            rows, small_batches = self._small_batches(shard, group, file, columns)
            # Small batches are joined, because each batch costs the time of many rows.
            while joined := [*islice(small_batches, max(1, _BATCH_ROWS // rows))]:
                batches += joined if len(joined) == 1 else pa.Table.from_batches(joined).combine_chunks().to_batches()
        except SavableError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise self.damaged(shard, f"row group {group}", " ".join(str(error).split()) or "no memory") from error
        return batches, sum(batch.nbytes for batch in batches)

    def _small_batches(self, shard: int, group: int, file: Any, columns: list[str] | None) -> tuple[int, Iterator[Any]]:
        """Return the most rows of a batch of a row group, and the batches, decoded one by one.

        A batch has so few rows that one more batch hardly exceeds the limit of decoded bytes. Example: 8192 rows that
        repeat a dictionary's value of 1 MB decode to 8 GB, from a file of 300 bytes.
        """
        used = columns_of(file.metadata.row_group(group), columns)
        stored = sum(column.total_compressed_size for column in used)
        max_bytes = min(self.most_decoded, max(self.unpacked_bytes, _RATIO * stored))
        value_bytes = max((self._dictionary_bytes(shard, column) for column in used), default=0)
        # a batch gets half of the limit, because buffers are copied as they grow
        rows = max(1, min(_BATCH_ROWS, max_bytes // (2 * max(1, value_bytes))))

        def decoded() -> Iterator[Any]:
            found = file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
            size, declared = 0, sum(column.total_uncompressed_size for column in used)
            while max(size, declared) <= max_bytes and (batch := next(found, None)) is not None:
                size += batch.nbytes
                yield batch
            if max(size, declared) > max_bytes:
                setting = "cache_bytes" if max_bytes == self.most_decoded else "unpacked_bytes"
                advice = f"Write smaller row groups, or raise {setting}="
                raise ValueError(f"it decodes to more than {human_bytes(max_bytes)}. {advice}")

        return rows, decoded()

    def _dictionary_bytes(self, shard: int, column: Any) -> int:
        """Return the bytes of a column's dictionary, or 0 if there is none. Any number of rows may repeat its values.

        The page header is a Thrift struct that starts with its type and its decompressed size.
        """
        if not column.has_dictionary_page:
            return 0
        head = self.file(shard).read_at(column.dictionary_page_offset, _DICTIONARY_HEAD)
        found = re.match(rb"\x15[^\x80-\xff]\x15([\x80-\xff]{0,4}[^\x80-\xff])", head, re.DOTALL)
        return 0 if found is None else sum((byte & 127) << 7 * digit for digit, byte in enumerate(found[1])) // 2

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """Return the byte ranges of the wanted columns in the row groups of these rows.

        See `RecordStore.byte_ranges`. The ranges are of the compressed columns, as they are in the file.
        """
        if (ranges := self._column_bytes.get(shard)) is None:
            footer = self._file(shard).metadata
            groups = range(footer.num_row_groups)
            ranges = [np.array(column_bytes(footer.row_group(i), self.wanted), np.int64).reshape(-1, 2) for i in groups]
            self._column_bytes[shard] = ranges
        found = np.unique(np.searchsorted(self.group_ends(shard), rows, side="right"))
        begins, ends = np.concatenate([ranges[group] for group in found]).T
        return begins, ends

    def schema(self, shard: int) -> Any:
        """See `ColumnarStore.schema`."""
        import pyarrow as pa

        try:
            return self._file(shard).schema_arrow
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.damaged(shard, "the schema", " ".join(str(error).split())) from error

    def _file(self, shard: int) -> Any:
        """Return the opened file with its parsed footer."""
        import pyarrow.parquet as pq

        if (found := self._open.pop(shard, None)) is None:
            raw = SourceFile(ByteSource(_weak_reader(self.files, shard), int(self.entries.sizes[shard])))
            footer = parsed_footer(read_parquet_footer(self.file(shard)))
            found = pq.ParquetFile(raw, metadata=footer, pre_buffer=False, page_checksum_verification=True)
        self._open[shard] = found
        while len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return found


def _weak_reader(files: ShardFiles, shard: int) -> Callable[[int, int], bytes]:
    """Return a function of (offset, size) that reads a file, without a strong reference to `files`.

    A reference cycle through C++ would never be collected:

    files ──▶ store ──▶ pq.ParquetFile ── C++ ──▶ SourceFile ╌╌ weak ╌╌▶ files
    """
    weak = weakref.ref(files)

    def read(offset: int, size: int) -> bytes:
        referenced = weak()
        assert referenced is not None, "the store keeps its files"
        return referenced.read(shard, offset, size)

    return read


class RangedParquetStore(RangedTable, ParquetStore):
    """Rows of Parquet files with columns that name ranges of other files."""


class NamingParquetStore(NamingStore, ParquetStore):
    """Rows of Parquet files, as JSON, with the files that they name as parts."""

    def usual_fields(self) -> list[str]:
        """Return the columns that HF `datasets` uses for file names in `metadata.parquet`."""
        names = (name.rpartition("file_name") for name in self.schema(0).names)
        return [f"{stem}file_name={stem.rstrip('_')}" for stem, name, rest in names if name and not rest]

    def row_of(self, shard: int, row: int) -> tuple[dict[str, Any], bytes]:
        """See `NamingStore.row_of`."""
        ends = self.group_ends(shard)
        group = bisect_right(ends, row)

        def decoded() -> tuple[Any, int]:
            import pyarrow as pa

            batches, size = self.batches(shard, group, self.wanted)
            return pa.Table.from_batches(batches), size

        table = self.blocks.get((self._owner, shard, group, "table"), decoded)
        fields = table.slice(row - (ends[group - 1] if group else 0), 1).to_pylist()[0]
        return fields, json.dumps(fields, ensure_ascii=False, default=str).encode()


PARQUET = Format(
    "parquet",
    (".parquet", ".pq", ".parq"),
    read_parquet_table,
    ParquetStore,
    COLUMNAR_SETTINGS,
    {"partial": True},
    is_same=parquet_matches_index,
    by_setting={"ranges": partial(with_media, variant="ranges", store=RangedParquetStore)},
)
PARQUET_OF_FILES = dataclasses.replace(PARQUET, store=NamingParquetStore)
"""Parquet tables that name files, such as those of HF's image folders."""
