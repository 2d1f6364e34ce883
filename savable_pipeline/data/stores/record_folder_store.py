"""`RecordFolderStore`: the store of folders with an index.json: MDS and LitData.

no compression, or of single records    a record is read at its offset in the index
a compressed file, or rows of Arrow     the file is a group of rows, decoded once (`GroupedStore`)
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from savable_pipeline.data.shards.byte_source import ByteSource, RecordError
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.part_types import as_part, find_part
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.decompressed import NEEDED, UNPACKED_BYTES, DamagedError, decompressed, needed_package
from savable_pipeline.data.stores.grouped_store import DecodedBlocks, GroupedStore
from savable_pipeline.data.stores.record_files import (
    INDEX,
    PACKED,
    RECORDS,
    ROWS,
    WHOLE,
    Blob,
    RecordBlock,
    RecordKind,
    RecordLayout,
    RecordTable,
    Schema,
    Value,
    known_hash,
    layout_in,
    layout_of,
    parts_of,
    record_in,
    table_of,
    wrong_hash,
)
from savable_pipeline.errors import ShardError

_READ_WHOLE = 1 << 20  # a record of at most so many bytes is read at once, for all of its parts
_READ_WHOLE_FOR_VALUES = 1 << 14  # the same limit if only the values of the record are needed
_PIECE = 1 << 23  # bytes of a file to hash at a time
_LIKELY_RATIO = 3  # estimated compression ratio of a file whose decompressed size is unknown


class _Record(NamedTuple):
    """A record: where it is, its fields, and its parts by extension."""

    shard: int
    row: int
    fields: list[Value | Blob]
    parts: dict[str, Blob]


class RecordFolderStore(GroupedStore):
    """Records of a folder with an index.json.

    `key` names the field that is the key of a record, which each must have. By default it is `FILE:ROW`. Decompressed
    records are cached in `blocks`, at most `unpacked_bytes` for one file. The bytes of a file must have the hash of the
    algorithm `validate_hash` when it is opened. Raises `ShardError`, and ValueError for a missing package.
    """

    def __init__(
        self,
        found: IndexedFiles,
        *,
        kind: RecordKind,
        key: str | None = None,
        blocks: DecodedBlocks[Any] | None = None,
        unpacked_bytes: int = UNPACKED_BYTES,
        validate_hash: str | None = None,
    ) -> None:
        super().__init__(found, blocks)
        self.kind, self._algorithm = kind, validate_hash
        self._hash_faults: dict[int, str] = {}  # by file: how its hash differs from index.json, or ""
        self.key_column, self._unpacked_bytes = key, unpacked_bytes
        self._schemas: dict[bytes, Schema] = {}
        self._layouts: dict[int, RecordLayout] = {}
        self._last_record = _Record(-1, 0, [], {})  # the last one that was read
        self.files.fetch_rows(found.numbers)  # of all shards at once, because the rows are few
        kinds = {tuple(self.blob(shard)[:2].tolist()) for shard in np.flatnonzero(self.entries.samples).tolist()}
        self._has_groups = any(unit != RECORDS for unit, _ in kinds)
        self.decoded_bytes = self.blocks.limit if self._has_groups else 0
        for unit, packed in kinds:  # a damaged index raises later, when its file is read
            kind_of_data = "rows" if unit == ROWS else PACKED[packed] if packed < len(PACKED) else ""
            if kind_of_data in NEEDED:
                needed_package(kind_of_data)
        if not self.files.is_remote and self.entries and (found.root / INDEX).exists():
            self.files.watch_view(~0, found.root / INDEX)

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`."""
        parts = self._record(shard, row).parts
        if (blob := parts.get(extension)) is None:
            blob = parts[find_part(extension, parts)]
        try:
            return blob.load()
        except RecordError as error:
            raise self._broken_record(shard, row, error) from error

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return `json`, which has the values, and the parts for images, arrays and bytes."""
        return list(self._record(shard, row).parts)

    def value(self, shard: int, row: int, name: str) -> bytes | None:
        """See `FileStore.value`."""
        values = {field.name: field.value for field in self._record(shard, row).fields if isinstance(field, Value)}
        return as_part(values[name])

    def record(self, shard: int, row: int, whole_bytes: int = _READ_WHOLE_FOR_VALUES) -> list[Value | Blob]:
        """Return the fields of a record.

        A record of more than `whole_bytes` bytes is read in pieces. Raises `RecordError`, `ShardError`.
        """
        layout = self._layout(shard)
        if layout.unit != RECORDS:
            rows, position = self.find(shard, row)
            found: list[Value | Blob] = rows.fields(position)
            return found
        self.awaited.done((shard, 0), row)
        content = ByteSource(partial(self.files.read, shard), int(self.entries.sizes[shard]))
        record, schema = record_in(content, layout.offsets, row), self._schema(layout)
        if schema.each:  # the name of the compression of each record
            try:
                record = ByteSource.of(decompressed(record.read(), schema.each, self._unpacked_bytes))
            except DamagedError as error:
                raise RecordError(f"damaged record: {error}") from error
        elif record.size <= whole_bytes:
            record = ByteSource.of(record.read())
        return schema.fields(record)

    def listed_order(self) -> list[int]:
        """Return the shards in the order of index.json."""
        shard_of = {name: shard for shard, name in enumerate(self.entries.names)}
        index = self.files.sidecar(INDEX)
        listed = [] if index is None else self.kind.names({INDEX: index.read_bytes()})
        return [next(shard_of[name] for name in names if name in shard_of) for names in listed]

    def validate(self, shard: int, algorithm: str | None = None) -> None:
        """Read a whole file, and raise `ShardError` if its hash differs from index.json.

        Without an algorithm, one with a hash in index.json is used, if any.
        """
        if shard not in self._hash_faults:
            hashes = self._hashes.get(self.entries.names[shard], {})
            algorithm, size = algorithm or known_hash(hashes), int(self.entries.sizes[shard])
            pieces = (self.files.read(shard, begin, min(_PIECE, size - begin)) for begin in range(0, size, _PIECE))
            self._hash_faults[shard] = "" if algorithm is None else wrong_hash(hashes, algorithm, pieces)
        if self._hash_faults[shard]:
            raise ShardError(
                f'{self.where(shard)}: damaged: {self._hash_faults[shard]}. Copy it again, or pass on_error="skip"'
            )

    @cached_property
    def _hashes(self) -> dict[str, dict[str, str]]:
        index = self.files.sidecar(INDEX)
        listed = [] if index is None else self.kind.listed(index.read_bytes())
        return {file.name: file.hashes for alternatives in listed for file in alternatives}

    def row_groups(self, shard: int) -> tuple[list[int], int] | None:
        """See `RecordStore.row_groups`. A folder without compression has none."""
        entry = self.entries[shard]
        if not self._has_groups:
            return None
        if not entry.samples:
            return [], 0
        layout = self._layout(shard)
        size = layout.unpacked_size or entry.size * (_LIKELY_RATIO if layout.compression else 1)
        return self.group_ends(shard), size

    def group_ends(self, shard: int) -> list[int]:
        """See `GroupedStore.group_ends`."""
        return [int(self.entries.samples[shard])]

    def decoded(self, shard: int, group: int, expected: int) -> tuple[RecordBlock | RecordTable, int]:
        """See `GroupedStore.decoded`."""
        layout, read = self._layout(shard), partial(self.files.read, shard)
        begin, end = layout.offsets.tolist() if layout.unit == ROWS else (0, int(self.entries.sizes[shard]))
        raw, unit, offsets = read(begin, end - begin), layout.unit, layout.offsets
        try:
            if unit == WHOLE:
                raw = decompressed(raw, layout.compression, self._unpacked_bytes, layout.unpacked_size)
                unit, offsets = layout_in(ByteSource.of(raw), expected, self.kind.chunked)
                if unit == ROWS:
                    raw = raw[int(offsets[0]) : int(offsets[1])]
            rows: RecordBlock | RecordTable = (
                RecordBlock(raw, offsets, self._schema(layout))
                if unit == RECORDS
                else table_of(raw, expected, self._unpacked_bytes)
            )
        except ValueError as error:
            raise ShardError(
                f'{self.where(shard)}: damaged: {error}. Copy it again, or pass on_error="skip"'
            ) from error
        return rows, rows.size

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """Return byte ranges of the records, or of a file that is decompressed whole."""
        layout, size = self._layout(shard), int(self.entries.sizes[shard])
        if layout.unit == RECORDS:
            begins, ends = layout.offsets[rows], layout.offsets[rows + 1]
        else:
            begins, ends = np.zeros(1, np.uint64), np.full(1, size, np.uint64)
        return np.minimum(begins, size).astype(np.int64), np.minimum(ends, size).astype(np.int64)

    def _record(self, shard: int, row: int) -> _Record:
        """Return a record. Raises `ShardError`."""
        last = self._last_record
        if last.row == row and last.shard == shard:
            return last
        try:
            fields = self.record(shard, row, _READ_WHOLE)
            self._last_record = _Record(shard, row, fields, parts_of(fields))
        except RecordError as error:
            raise self._broken_record(shard, row, error) from error
        return self._last_record

    def _layout(self, shard: int) -> RecordLayout:
        if (layout := self._layouts.get(shard)) is None:
            self.found.check_rows(shard)
            if self._algorithm is not None:
                self.validate(shard, self._algorithm)
            layout = self._layouts[shard] = layout_of(self.blob(shard), int(self.entries.samples[shard]))
        return layout

    def _schema(self, layout: RecordLayout) -> Schema:
        if (schema := self._schemas.get(layout.schema)) is None:
            schema = self._schemas[layout.schema] = msgspec.json.decode(layout.schema, type=self.kind.schema)
        return schema

    def _broken_record(self, shard: int, row: int, error: RecordError) -> ShardError:
        reason, _, detail = str(error).partition(": ")
        return ShardError(
            f'{self.where(shard)}: row {row}: {reason}: {detail}. Write it again, or pass on_error="skip"',
            reason=reason,
        )
