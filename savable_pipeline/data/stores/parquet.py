"""The format of Parquet files, and the record store that reads them.

What their footers say is read without a thread, so that a fork is safe, and looked at: can it be true? Blob of a file
in the index: for each row group its rows, then for each the bytes that it decodes to.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.wording import encodable, human_bytes
from savable_pipeline.data.shards.byte_source import ByteSource, SourceFile
from savable_pipeline.data.shards.index import FileFormat, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.stores.columnar_store import ColumnarStore, ColumnSettings, DecodedGroup
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.data.stores.source import PARQUET_FILES
from savable_pipeline.errors import SavableError

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_LARGEST_FOOTER = 1 << 29
_MOST_ROWS = 1 << 40


class ParquetFooterError(ValueError):
    """The footer of a file is missing, or cannot be true."""


def read_table(file: ByteSource, name: str) -> ShardTable:
    """Entry and row groups of a file; damage is the entry's fault."""
    try:
        footer = read_footer(file)
        rows, sizes = _groups(footer, file.size)
    except ParquetFooterError as error:
        return PARQUET.unreadable(name, file.size, str(error))
    entry = ShardEntry(name, file.size, sum(rows), xxh3_64_intdigest(footer))
    return ShardTable(entry, np.array([*rows, *sizes], dtype="<u8").tobytes())


def read_footer(file: ByteSource) -> bytes:
    """The bytes of a file's footer. Raises `ParquetFooterError`, OSError."""
    size = file.size
    tail = file.read_at(max(0, size - 8), 8)
    if tail[4:] == _ENCRYPTED:
        raise ParquetFooterError("an encrypted footer; write the file without encryption")
    if size < 12 or tail[4:] != _MAGIC:
        raise ParquetFooterError(
            "no Parquet footer at its end: the file was cut short, or is no Parquet; copy it again"
        )
    length = int.from_bytes(tail[:4], "little")
    if not 0 < length <= min(size - 12, _LARGEST_FOOTER):
        raise ParquetFooterError(
            f"a footer of {length} bytes in a file of {size}: the end is damaged; copy the file again"
        )
    return file.read_at(size - 8 - length, length)


def is_as_indexed(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Whether a file has the footer that it had."""
    try:
        return xxh3_64_intdigest(read_footer(file)) == int(index.shards.digests[number])
    except (ParquetFooterError, OSError):
        return False


def parsed_footer(footer: bytes) -> Any:
    """A footer as pyarrow's `FileMetaData`; the rest of the file is not read. Raises pyarrow's errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_metadata(pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC))


def column_bytes(group: Any, wanted: list[str] | None) -> list[tuple[int, int]]:
    """The first byte, and the one after the last, of each column of a row group; of the `wanted` ones (None: all)."""
    columns = [group.column(i) for i in range(group.num_columns)]
    names = None if wanted is None else set(wanted)
    return [_bytes_of(one) for one in columns if names is None or _is_of(one.path_in_schema, names)]


def _is_of(path: str, names: set[str]) -> bool:
    """Whether a leaf is one of these columns, or below one; there may be dots in their names."""
    return path in names or any(path[:end] in names for end, sign in enumerate(path) if sign == ".")


def _bytes_of(column: Any) -> tuple[int, int]:
    begin = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    return begin, begin + column.total_compressed_size


def _groups(footer: bytes, size: int) -> tuple[list[int], list[int]]:
    """Rows and bytes of each row group. Raises `ParquetFooterError` where they cannot be right."""
    import pyarrow as pa  # here, so that who reads tars need not have it

    try:
        metadata = parsed_footer(footer)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = [group.num_rows for group in groups]
        sizes = [group.total_byte_size for group in groups]
        fault = next((fault for group in groups if (fault := _column_fault(group, size))), "")
    except (pa.ArrowException, OSError, ValueError) as error:
        line = encodable(str(error).partition("\n")[0])
        raise ParquetFooterError(f"a damaged footer: {line}; copy the file again") from error
    if min([*rows, *sizes], default=0) < 0 or sum(rows) != metadata.num_rows or sum(rows) > _MOST_ROWS:
        fault = f"row groups of {sum(rows)} rows, but {metadata.num_rows} in the file"
    if fault:
        raise ParquetFooterError(f"a footer that cannot be right: {fault}; copy the file again")
    return rows, sizes


def _column_fault(group: Any, size: int) -> str:
    for begin, end in column_bytes(group, None):
        if not 0 <= begin <= end <= size:
            return f"a column at the bytes {begin} to {end} of {size}"
    return ""


PARQUET = FileFormat(
    "parquet",
    PARQUET_FILES,
    "savable_pipeline.data.stores.parquet:PARQUET",
    read_table,
    is_as_indexed,
    all_used=False,  # columns that are not asked for are not read
)


_OPEN = 16  # files whose footers are kept parsed
_BATCH = 8192  # rows decoded at a time


class ParquetStore(ColumnarStore):
    """The rows of Parquet files: a folder with its subfolders, a glob, a brace pattern, one file, or a list of these.

    Row groups are decoded whole and kept in `blocks`; the other settings are those of `ColumnarStore`. Raises
    `ShardError`, and ValueError for a column that is not there.
    """

    def __init__(self, found: IndexedFiles, **settings: Unpack[ColumnSettings]) -> None:
        self._ends: dict[int, list[int]] = {}
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._column_bytes: dict[int, list[Rows]] = {}  # of each row group of a shard: int64 (columns, 2)
        super().__init__(found, **settings)
        self.decoded_bytes = self.blocks.limit

    def group_rows(self, shard: int) -> list[int]:
        """The rows of each row group of a file."""
        blob = self.blob(shard)
        rows: list[int] = blob[: len(blob) // 2].tolist()
        return rows

    def group_bytes(self, shard: int) -> list[int]:
        """The bytes that each row group of a file decodes to, as its footer says."""
        blob = self.blob(shard)
        sizes: list[int] = blob[len(blob) // 2 :].tolist()
        return sizes

    def row_groups(self, shard: int) -> tuple[list[int], int]:
        """See `RecordStore.row_groups`."""
        return self.group_rows(shard), sum(self.group_bytes(shard))

    def group_ends(self, shard: int) -> list[int]:
        """See `ColumnarStore.group_ends`."""
        ends = self._ends.get(shard)
        if ends is None:
            ends = self._ends[shard] = np.cumsum(self.group_rows(shard), dtype=np.int64).tolist()
        return ends

    def decode(self, shard: int, group: int) -> DecodedGroup:
        """See `ColumnarStore.decode`."""
        return DecodedGroup(*self.batches(shard, group, self.wanted))

    def batches(self, shard: int, group: int, columns: list[str] | None) -> tuple[list[Any], int]:
        """Some columns (None: all) of a row group, and their bytes in memory. Raises `ShardError`.

        In this thread: pyarrow starts none, so that processes may be forked.
        """
        import pyarrow as pa

        batches, size = [], 0
        try:
            file = self._file(shard)
            self.check_columns(shard, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=columns, use_threads=False):
                batches.append(batch)
                size += batch.nbytes
                if size > self.most_decoded:
                    raise ValueError(
                        f"it decodes to more than {human_bytes(self.most_decoded)}: write smaller row groups, or give "
                        "a larger cache_bytes"
                    )
        except SavableError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise self.damaged(shard, f"row group {group}", " ".join(str(error).split()) or "no memory") from error
        return batches, size

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """The columns that are decoded of the row groups with these rows."""
        ranges = self._column_bytes.get(shard)
        if ranges is None:
            metadata = self._file(shard).metadata
            groups = range(metadata.num_row_groups)
            ranges = [
                np.array(column_bytes(metadata.row_group(i), self.wanted), np.int64).reshape(-1, 2) for i in groups
            ]
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
        """The file, its footer parsed; of which no more is read than that."""
        import pyarrow.parquet as pq

        found = self._open.pop(shard, None)
        if found is None:
            raw = SourceFile(ByteSource(_weakly(self.files, shard), int(self.entries.sizes[shard])))
            footer = parsed_footer(read_footer(self.file(shard)))
            found = pq.ParquetFile(raw, metadata=footer, pre_buffer=False, page_checksum_verification=True)
        self._open[shard] = found
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return found


def _weakly(files: ShardFiles, shard: int) -> Callable[[int, int], bytes]:
    """What reads a file, and does not keep `files` alive: a circle of references through C++ is never collected.

    files ──▶ store ──▶ pq.ParquetFile ── C++ ──▶ SourceFile ╌╌ weak ╌╌▶ files
    """
    weak = weakref.ref(files)

    def read(offset: int, size: int) -> bytes:
        found = weak()
        assert found is not None, "the store keeps them"
        return found.read(shard, offset, size)

    return read
