"""`GroupedStore` and `ColumnarStore`: bases of stores with groups of rows.

    file ─ groups of rows ─ each decoded once, into `DecodedBlocks` ─ rows

All lanes and stores of a process share one limit for the bytes of decoded groups:

    blocks     whole row groups; the one with the fewest announced rows is evicted first
    retained   announced rows of evicted groups, which a shuffle buffer will still yield

Without retained rows, a group would be decoded again for each row that stays in a buffer for long. `AwaitedRows` are
the announced rows of each group that were not read yet.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.core.wording import human_bytes, listed
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.record_store import FileStore
from savable_pipeline.errors import ShardError

if TYPE_CHECKING:  # pyarrow is not needed to read tars
    from savable_pipeline.data.stores.arrow_columns import NamedFile, Unread

_MOST_AWAITED = 4_000_000  # with more announced rows, all are forgotten, because their reads were skipped
RowGroup: TypeAlias = tuple[int, int]  # a shard, and the number of a row group in it
log = logging.getLogger(__name__)

T = TypeVar("T")
COLUMNAR_SETTINGS = ("columns", "key", "blocks", "partial", "ranges", "unpacked_bytes")
NO_BYTES = "path without bytes"  # the reason that counters and reports show for such rows
_NO_COLUMN = "missing column"
DECODED_BYTES = 1 << 30
_MOST_DECODED = 4 << 30  # a group that decodes to more bytes is rejected, unless the cache is larger


class AwaitedRows:
    """Announced rows by group. The length is the number of all rows.

    A group without announced rows takes no memory.
    """

    def __init__(self) -> None:
        self._rows: dict[RowGroup, set[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def announce(self, shard: int, rows: Rows, ends: list[int]) -> None:
        """Announce that these rows of a shard, whose groups end at `ends`, will be read."""
        if self._count + len(rows) > _MOST_AWAITED:
            self._rows.clear()
            self._count = 0
        groups = np.searchsorted(ends, rows, side="right")
        for group in np.unique(groups).tolist():
            awaited = self._rows.setdefault((shard, group), set())
            count = len(awaited)
            awaited.update(rows[groups == group].tolist())
            self._count += len(awaited) - count

    def done(self, group: RowGroup, row: int) -> None:
        """Record that an announced row was read.

        This is called for each part that is read, so it calls no other function of ours.
        """
        if (awaited := self._rows.get(group)) is not None and row in awaited:
            awaited.remove(row)
            self._count -= 1
            if not awaited:
                del self._rows[group]

    def count(self, group: RowGroup) -> int:
        """Return the number of announced rows of a group."""
        return len(self._rows.get(group, ()))

    def pop(self, group: RowGroup) -> list[int]:
        """Remove and return the announced rows of a group."""
        rows = sorted(self._rows.pop(group, ()))
        self._count -= len(rows)
        return rows

    def __repr__(self) -> str:
        return f"AwaitedRows({self._count} rows of {len(self._rows)} groups)"


class AwaitedOfGroup:
    """Announced rows of one group that were not read yet.

    The decoded group is `rows`, and `first` is the number of its first row in the shard.
    """

    def __init__(self, awaited: AwaitedRows, group: RowGroup, first: int) -> None:
        self._awaited, self._group, self._first = awaited, group, first
        self.rows: Any = None

    def __len__(self) -> int:
        return self._awaited.count(self._group)

    def pop_retained(self) -> Iterator[tuple[int, Any, int]]:
        """Remove these rows, and yield (row, copy, size in bytes) for each undamaged one.

        Damaged rows raise an error when they are read.
        """
        for row in self._awaited.pop(self._group):
            with contextlib.suppress(ValueError):
                retained = self.rows.retain(row - self._first)
                yield row, retained, retained.size


class DecodedBlocks(Generic[T]):
    """Cache of at most `limit` bytes of decoded blocks and retained rows.

    Retained rows take at most half of it.

    A block beyond the limit is cached alone. `decoded` is the number of blocks that were decoded since the start.

    >>> from savable_pipeline.data.stores.grouped_store import DecodedBlocks
    >>> blocks = DecodedBlocks(limit=100)
    >>> [blocks.get(key, lambda: ("block", 60)) for key in "aba"]
    ['block', 'block', 'block']
    >>> blocks.decoded
    3
    """

    def __init__(self, limit: int = DECODED_BYTES) -> None:
        if limit < 1:
            raise ValueError(f"cache_bytes must be at least 1, not {limit}")
        self.limit = limit
        self.decoded = 0
        # by key: a block, its size in bytes, and its awaited rows
        self._blocks: OrderedDict[Hashable, tuple[T, int, AwaitedOfGroup | None]] = OrderedDict()
        # by block, then by row: a copy of the row, and its size
        self._retained: OrderedDict[Hashable, dict[int, tuple[Any, int]]] = OrderedDict()
        self._last_retained: tuple[Hashable, int] = None, 0  # key and row of the last request of a retained row
        self._block_bytes = self._retained_bytes = 0
        self._warned = False

    @property
    def bytes(self) -> int:
        """Return the bytes of all blocks and retained rows."""
        return self._block_bytes + self._retained_bytes

    def get(self, key: Hashable, decode: Callable[[], tuple[T, int]], awaited: AwaitedOfGroup | None = None) -> T:
        """Return the block `key`, decoding it if it is not cached.

        `decode` returns the block and its size in bytes.

        When the block is evicted, those of its rows that are `awaited` are retained.
        """
        found = self.cached(key)
        return self._add(key, *decode(), awaited) if found is None else found

    def cached(self, key: Hashable) -> T | None:
        """Return the cached block `key`, or None."""
        if (found := self._blocks.get(key)) is None:
            return None
        self._blocks.move_to_end(key)
        return found[0]

    def retained(self, key: Hashable, row: int) -> Any:
        """Return a retained row of the block `key`, or None.

        The row stays retained until another one is requested.
        """
        rows = self._retained.get(key)
        found = None if rows is None else rows.get(row)
        if found is None:
            return None
        if self._last_retained != (key, row):
            self._drop(*self._last_retained)
            self._last_retained = key, row
        return found[0]

    def _add(self, key: Hashable, block: T, size: int, awaited: AwaitedOfGroup | None) -> T:
        self.decoded += 1
        self._retained_bytes -= sum(each for _, each in self._retained.pop(key, {}).values())
        while self._blocks and self.bytes + size > self.limit:
            self._evict_block()
        self._blocks[key] = block, size, awaited
        self._block_bytes += size
        return block

    def _evict_block(self) -> None:
        """Evict the block with the fewest awaited rows. Of several, evict the least recently used one."""
        key = min(self._blocks, key=lambda key: len(self._blocks[key][2] or ()))  # [2]: the awaited rows
        _, size, awaited = self._blocks.pop(key)
        self._block_bytes -= size
        if awaited:
            self._retained[key] = {row: (value, each) for row, value, each in awaited.pop_retained()}
            self._retained_bytes += sum(each for _, each in self._retained[key].values())
        while self._retained_bytes > self.limit // 2:
            oldest = next(iter(self._retained))
            self._drop(oldest, next(iter(self._retained[oldest])))
            self._log_dropped_once()

    def _drop(self, key: Hashable, row: int) -> None:
        """Drop a retained row of the block `key`, if it is still there."""
        if (rows := self._retained.get(key)) is not None:
            _, size = rows.pop(row, (None, 0))
            self._retained_bytes -= size
            if not rows:
                del self._retained[key]

    def _log_dropped_once(self) -> None:
        if not self._warned:
            self._warned = True
            log.info(
                "rows of more than %s are in shuffle buffers, or were never read: row groups may be decoded again for "
                "them. Pass a larger cache_bytes, or smaller buffers",
                human_bytes(self.limit // 2),
            )

    def __repr__(self) -> str:
        return f"DecodedBlocks({len(self._blocks)}, {human_bytes(self.bytes)} of {human_bytes(self.limit)})"


class GroupedStore(FileStore):
    """Base of stores that decode groups of rows.

    Announced rows of evicted groups are retained.
    """

    def __init__(self, found: IndexedFiles, blocks: DecodedBlocks[Any] | None) -> None:
        super().__init__(found)
        self.blocks: DecodedBlocks[Any] = DecodedBlocks(DECODED_BYTES) if blocks is None else blocks
        self._owner = object()  # part of the cache's keys; unlike a number, it is never reused by another store
        self.awaited = AwaitedRows()
        # the last row found: shard, row, its group's rows, and its position in them
        self._last_found: tuple[int, int, Any, int] = -1, 0, None, 0
        self._broken: dict[tuple[int, int], str] = {}  # errors of damaged groups

    @abstractmethod
    def group_ends(self, shard: int) -> list[int]:
        """Return for each group of a file the number of the row after its last row."""

    @abstractmethod
    def decoded(self, shard: int, group: int, expected: int) -> tuple[Any, int]:
        """Return the decoded rows of a group, and their size in memory in bytes.

        There must be `expected` rows. Raises `ShardError`.
        """

    def next_readable(self, shard: int, row: int, reason: str) -> int:
        """See `StoreFacts.next_readable`: skips the rest of a damaged group."""
        ends = self.group_ends(shard) if reason == "damaged shard" else []
        return ends[bisect_right(ends, row)] if ends else row + 1

    @property
    def most_decoded(self) -> int:
        """Return the most bytes that a group may decode to."""
        return max(self.blocks.limit, _MOST_DECODED)

    def find(self, shard: int, row: int) -> tuple[Any, int]:
        """Return the decoded group with a row, and the row's position in it."""
        last = self._last_found  # shard, row, rows, position
        if last[1] == row and last[0] == shard:
            return last[2], last[3]
        ends = self.group_ends(shard)
        group = bisect_right(ends, row)
        first = ends[group - 1] if group else 0
        key, row_group = (self._owner, shard, group), (shard, group)
        rows, position = self.blocks.cached(key), row - first
        if rows is None and (rows := self.blocks.retained(key, row)) is not None:
            self.awaited.done(row_group, row)
            return rows, 0
        if rows is None:
            awaited = AwaitedOfGroup(self.awaited, row_group, first)
            expected = ends[group] - first
            rows = awaited.rows = self.blocks.get(key, lambda: self._decoded(shard, group, expected), awaited)
        self.awaited.done(row_group, row)
        self._last_found = shard, row, rows, position
        return rows, position

    def prefetch(self, indices: Rows) -> None:
        """Record that these rows will be read, to retain them if their group is evicted."""
        super().prefetch(indices)
        if self.row_groups(0) is None:
            return
        shards = self.found.shards_of(indices)
        for shard in np.unique(shards).tolist():
            rows = indices[shards == shard] - self.firsts[shard]
            self.awaited.announce(shard, rows, self.group_ends(shard))

    def _decoded(self, shard: int, group: int, expected: int) -> tuple[Any, int]:
        if (shard, group) in self._broken:  # decoding a damaged group again for each row would take hours
            raise ShardError(self._broken[shard, group])
        try:
            return self.decoded(shard, group, expected)
        except ShardError as error:
            if error.reason == "damaged shard":
                self._broken[shard, group] = str(error)
            raise


class DecodedGroup(NamedTuple):
    """Record batches of a group, their bytes in memory, and the unread values."""

    batches: list[Any]
    bytes: int
    unread: Unread | None = None


class ColumnSettings(TypedDict, total=False):
    """The settings of a `ColumnarStore`."""

    columns: tuple[str, ...] | None
    key: str | None
    blocks: DecodedBlocks[Any] | None
    partial: bool
    needed: tuple[str, ...]
    unpacked_bytes: int


class ColumnarStore(GroupedStore):
    """Base of stores of columnar files, with `columns` as parts (None: all).

    The values of partitions (`year=2024/`) are parts too.

    `key` names the column with the keys of rows, which may not be null. Without it, a key is `FILE:ROW`. A row that
    names a file without its bytes is an error. With `partial`, this part is missing from the sample instead, and
    `named_files` describes such rows. `needed` are further columns that must exist. A decompressed row group may have
    `unpacked_bytes`, or a multiple of its size in the file. Raises ValueError for a column that the first file lacks.
    """

    all_used = False  # only requested columns are read

    def __init__(self, found: IndexedFiles, **settings: Unpack[ColumnSettings]) -> None:
        super().__init__(found, settings.get("blocks"))
        self.columns, self.key_column = settings.get("columns"), settings.get("key")
        self.partial = settings.get("partial", False)
        self.needed = settings.get("needed", ())
        self.unpacked_bytes = settings.get("unpacked_bytes", UNPACKED_BYTES)
        if self.columns is not None or self.key_column is not None or self.needed:
            self._check_columns_of_first_file()

    @abstractmethod
    def decode(self, shard: int, group: int) -> DecodedGroup:
        """Return the record batches of a group. Raises `ShardError`."""

    @property
    def fix(self) -> str:
        """Return what to do about rows that name files without their bytes."""
        source = self.where(0) if len(self.entries) == 1 else self.address
        return (
            f"no file is opened that a row names: `savable convert {source} DST --files-from FOLDER` writes their "
            "bytes into shards; or leave the column out (columns=, --only)"
        )

    @abstractmethod
    def schema(self, shard: int) -> Any:
        """Return the columns of a file as an Arrow schema. Raises `ShardError`."""

    @property
    def wanted(self) -> list[str] | None:
        """Return the columns to decode, or None for all."""
        if self.columns is None:
            return None
        return list(dict.fromkeys([*self.columns, *([] if self.key_column is None else [self.key_column])]))

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`."""
        last = self._last_found  # shard, row, rows, position
        rows, position = last[2:] if last[1] == row and last[0] == shard else self.find(shard, row)
        try:
            found: bytes = rows.read(position, extension)
        except ValueError as error:
            raise self._broken_row(shard, row, error) from error
        return found

    def array(self, shard: int, row: int, extension: str) -> NDArray[Any]:
        """See `RecordStore.array`. Numbers and nested lists of numbers are as stored.

        Raises TypeError for a part that is not numbers, text or bytes.
        """
        found = self._call_with_group(shard, row, lambda rows, position: rows.numbers(position, extension))
        if isinstance(found, TypeError):
            raise found
        if found is None:
            return super().array(shard, row, extension)
        array: NDArray[Any] = empty_bytes(found.nbytes).view(found.dtype).reshape(found.shape)
        array[...] = found
        return array

    def extensions(self, shard: int, row: int) -> list[str]:
        """See `RecordStore.extensions`."""
        return self._call_with_group(shard, row, lambda rows, position: rows.extensions(position))

    def nulls(self, shard: int, row: int) -> list[str]:
        """Return the columns in which a row has a null, or a list with one.

        Raises `ShardError`.
        """
        return self._call_with_group(shard, row, lambda rows, position: rows.nulls(position))

    def lacking(self, shard: int, row: int) -> tuple[list[str], set[str]]:
        """See `StoreFacts.lacking`."""
        return self.nulls(shard, row), {file.column for file in self.named_files(shard, row)}

    def next_readable(self, shard: int, row: int, reason: str) -> int:
        """See `StoreFacts.next_readable`: the first row of the next group."""
        return super().next_readable(shard, row, "damaged shard")

    def named_files(self, shard: int, row: int) -> list[NamedFile]:
        """Return the files that a row names without their bytes. Raises `ShardError`."""
        return self._call_with_group(shard, row, lambda rows, position: rows.named_files(position))

    def value(self, shard: int, row: int, name: str) -> bytes | None:
        """See `FileStore.value`, for a column that is read."""
        found: bytes | None = self._call_with_group(shard, row, lambda rows, position: rows.value(position, name))
        return found

    def _call_with_group(self, shard: int, row: int, call: Callable[[Any, int], T]) -> T:
        """Call `call` with the decoded group of a row and the row's position in it. Raises `ShardError`."""
        rows, position = self.find(shard, row)
        try:
            return call(rows, position)
        except ValueError as error:
            raise self._broken_row(shard, row, error) from error

    def media_named(self, parts: Collection[str]) -> list[str]:
        """Return the columns of media that may have one of these parts.

        The result is empty if each part is the name of another column.
        """
        from savable_pipeline.data.stores.arrow_columns import holds_media

        schema = self.schema(next(iter(np.flatnonzero(self.entries.samples).tolist())))
        media = [field.name for field in schema if holds_media(field)]
        plain = {name.lower() for name in schema.names if name not in media}
        return media if not plain.issuperset(parts) else []

    def check_columns(self, shard: int, known: list[str]) -> None:
        """Raise `ShardError` for missing columns, and for a column that a file has twice.

        `known` are the columns of the file.
        """
        wanted = self.wanted or [name for name in [self.key_column] if name is not None]
        missing = [name for name in (*wanted, *self.needed) if name not in known]
        if missing:
            fault = f"no column {listed(missing)}; it has {listed(known)}. Pass columns= that all files have"
            raise ShardError(f"{self.where(shard)}: {fault}", reason=_NO_COLUMN)
        counts = Counter(known)
        twice = next((name for name in (known if self.wanted is None else self.wanted) if counts[name] > 1), None)
        if twice is not None:  # the user could mean either column
            raise ShardError(
                f"{self.where(shard)}: {counts[twice]} columns are named {twice!r}. Rename them, or choose by columns=",
                reason="columns of one name",
            )

    def _broken_row(self, shard: int, row: int, error: ValueError) -> ShardError:
        from savable_pipeline.data.stores.arrow_columns import NoBytesError

        if isinstance(error, NoBytesError):
            return ShardError(f"{self.where(shard)}: row {row}: {error}; {self.fix}", reason=NO_BYTES)
        return self.damaged(shard, f"row {row}", str(error))

    def _check_columns_of_first_file(self) -> None:
        shard = next(iter(np.flatnonzero(self.entries.samples).tolist()), None)
        try:
            known = None if shard is None else self.schema(shard).names
        except ShardError:  # the error is raised, or skipped by policy, when a sample of the file is read
            return
        if shard is not None and known is not None:
            try:
                self.check_columns(shard, known)
            except ShardError as error:
                if error.reason == _NO_COLUMN:
                    raise ValueError(str(error)) from None
                raise

    def decoded(self, shard: int, group: int, expected: int) -> tuple[Any, int]:
        """See `GroupedStore.decoded`."""
        from savable_pipeline.data.stores.arrow_columns import ArrowRows, partition_values

        batches, size, unread = self.decode(shard, group)
        hidden = self.key_column if self.columns is not None and self.key_column not in self.columns else None
        try:
            constants = partition_values(self.entries.names[shard])
            rows = ArrowRows(batches, constants=constants, hidden=hidden, partial=self.partial, unread=unread)
        except ValueError as error:
            raise self.damaged(shard, f"row group {group}", str(error)) from error
        except KeyError as error:  # pyarrow has no class for arrays of some types
            raise ShardError(
                f"{self.where(shard)}: pyarrow does not read a column's type, such as interval[months]. Pass columns=",
                reason="unreadable column",
            ) from error
        if len(rows) != expected:
            raise self.damaged(shard, f"row group {group}", f"{len(rows)} rows, where the file says {expected}")
        return rows, size
