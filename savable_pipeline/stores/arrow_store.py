"""`ArrowStore`: the record store of Arrow IPC files and streams, memory-mapped.

What lies uncompressed in a file is viewed, not read: only the bytes of the parts that are asked for are touched.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from typing import Any

import numpy as np

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.errors import SavableError
from savable_pipeline.shards.paths import Shards, Unlistable, raise_it
from savable_pipeline.stores.arrow_file import ARROW, Batches, MessageError, batches_of, decoded_bytes, read_message
from savable_pipeline.stores.columnar_store import ColumnarStore
from savable_pipeline.stores.decoded_blocks import DecodedBlocks
from savable_pipeline.stores.file_indexing import IndexedFiles, open_files
from savable_pipeline.stores.saved_dataset import data_files

_MAPPED = 256  # files
_VIEW = 1 << 14  # bytes that a batch which is only viewed counts in the cache


class _File:
    """An open file: its map, its schema, its batches, and the row after the last of each."""

    def __init__(self, view: memoryview, schema: Any, batches: Batches) -> None:
        self.view, self.schema, self.batches = view, schema, batches
        self.ends: list[int] = np.cumsum(batches.rows.astype(np.int64)).tolist()


class ArrowStore(ColumnarStore):
    """The rows of Arrow files, among them folders of `Dataset.save_to_disk` and HF's cache.

    A folder with its subfolders, a glob, a brace pattern, one file, or a list of these; the other settings are those
    of `ColumnarStore`. Raises `ShardError`, and ValueError for a column that is not there.
    """

    def __init__(
        self,
        files: Shards | IndexedFiles,
        *,
        columns: tuple[str, ...] | None = None,
        key: str | None = None,
        blocks: DecodedBlocks[Any] | None = None,
        tolerant: bool = False,
        unlistable: Unlistable = raise_it,
    ) -> None:
        self._open: OrderedDict[int, _File] = OrderedDict()
        found = open_files(data_files(files), ARROW, tolerant=tolerant, unlistable=unlistable)
        super().__init__(found, ARROW, columns, key, blocks)

    def group_ends(self, shard: int) -> list[int]:
        """See `ColumnarStore.group_ends`."""
        return self._file(shard).ends

    def column_names(self, shard: int) -> list[str]:
        """See `ColumnarStore.column_names`."""
        names: list[str] = self._file(shard).schema.names
        return names

    def decode(self, shard: int, group: int) -> tuple[list[Any], int]:
        """See `ColumnarStore.decode`."""
        import pyarrow as pa

        file = self._file(shard)
        begin, end = int(file.batches.offsets[group]), int(file.batches.offsets[group + 1])
        try:
            self.check_columns(shard, file.schema.names)
            message = read_message(self.files[shard], begin, self.entries[shard].size)
            if message.digest != file.batches.digests[group]:
                raise ValueError("another record batch than was indexed")
            size = decoded_bytes(file.view[begin:end], message) if message.compressed else _VIEW
            if size > self.most_decoded:
                raise ValueError(f"it decodes to {human_bytes(size)}: write smaller batches, or give more cache_bytes")
            read = pa.ipc.read_message(pa.BufferReader(pa.py_buffer(file.view[begin:end])))
            batch = pa.ipc.read_record_batch(read, file.schema)
            wanted = self.wanted
            batch = batch if wanted is None else batch.select(wanted)
        except SavableError:
            raise
        except (pa.ArrowException, MessageError, OSError, ValueError, KeyError, MemoryError) as error:
            text = " ".join(str(error).split()) or "no memory"
            raise self.damaged(shard, f"record batch {group} at byte {begin}", text) from error
        return [batch], size

    def _file(self, shard: int) -> _File:
        found = self._open.get(shard)
        if found is None:
            found = self._open[shard] = self._mapped(shard)
            while len(self._open) > _MAPPED:
                self._open.popitem(last=False)
        return found

    def _mapped(self, shard: int) -> _File:
        import pyarrow as pa

        batches = batches_of(self.places(shard))
        descriptor, size = self.files[shard], self.entries[shard].size
        self.files.watch_view(shard, self.path(shard))
        try:
            view = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
            message = read_message(descriptor, batches.schema, size)
            raw = pa.py_buffer(view[message.offset : message.end])
            schema = pa.ipc.read_schema(pa.ipc.read_message(pa.BufferReader(raw)))
        except (pa.ArrowException, MessageError, OSError) as error:
            raise self.damaged(shard, f"schema at byte {batches.schema}", " ".join(str(error).split())) from error
        return _File(view, schema, batches)
