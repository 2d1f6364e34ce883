"""`ParquetStore`: the record store of Parquet files."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Unpack

import numpy as np

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.columnar_store import ColumnarStore, ColumnSettings, Decoded
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.parquet_file import column_bytes, parsed_footer, read_footer
from savable_pipeline.data.stores.positioned_file import PositionedFile
from savable_pipeline.errors import SavableError

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
        places = self.places(shard)
        rows: list[int] = places[: len(places) // 2].tolist()
        return rows

    def group_bytes(self, shard: int) -> list[int]:
        """The bytes that each row group of a file decodes to, as its footer says."""
        places = self.places(shard)
        sizes: list[int] = places[len(places) // 2 :].tolist()
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

    def decode(self, shard: int, group: int) -> Decoded:
        """See `ColumnarStore.decode`. In this thread: pyarrow starts none, so that processes may be forked."""
        import pyarrow as pa

        batches, size = [], 0
        try:
            file = self._file(shard)
            self.check_columns(shard, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=self.wanted, use_threads=False):
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
        return Decoded(batches, size)

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """The columns that are decoded of the row groups with these rows."""
        places = self._column_bytes.get(shard)
        if places is None:
            metadata = self._file(shard).metadata
            groups = range(metadata.num_row_groups)
            places = [
                np.array(column_bytes(metadata.row_group(i), self.wanted), np.int64).reshape(-1, 2) for i in groups
            ]
            self._column_bytes[shard] = places
        found = np.unique(np.searchsorted(self.group_ends(shard), rows, side="right"))
        begins, ends = np.concatenate([places[group] for group in found]).T
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
            raw = PositionedFile(self.files, shard, int(self.entries.sizes[shard]))
            footer = parsed_footer(read_footer(self.file(shard)))
            found = pq.ParquetFile(raw, metadata=footer, pre_buffer=False, page_checksum_verification=True)
        self._open[shard] = found
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return found
