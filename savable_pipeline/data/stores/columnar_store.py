"""`ColumnarStore`: base of Parquet and Arrow: a row is a sample, a column a part.

row groups, or record batches ─ each decoded once (`GroupedStore`) ─ columns of a row as bytes
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.grouped_store import DecodedBlocks, GroupedStore
from savable_pipeline.errors import ShardError

if TYPE_CHECKING:  # pyarrow is not needed to read tars
    from savable_pipeline.data.stores.arrow_columns import NamedFile, Unread

T = TypeVar("T")
COLUMNAR_SETTINGS = ("columns", "key", "blocks", "partial", "ranges", "unpacked_bytes")
NO_BYTES = "path without bytes"  # the reason that counters and reports show for such rows
_NO_COLUMN = "missing column"


class DecodedGroup(NamedTuple):
    """Record batches of a group, their bytes in memory, and a reader for the rest."""

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
        """Return the rows of a group. Raises `ShardError`."""

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
        last = self._last
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
        """Return the columns of a row that have a null, so are not parts.

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
        """Return the columns of images that may contain one of these parts.

        The result is empty if each part is the name of another column.
        """
        from savable_pipeline.data.stores.arrow_columns import holds_media

        schema = self.schema(next(iter(np.flatnonzero(self.entries.samples).tolist())))
        media = [field.name for field in schema if holds_media(field)]
        plain = {name.lower() for name in schema.names if name not in media}
        return media if not plain.issuperset(parts) else []

    def check_columns(self, shard: int, known: list[str]) -> None:
        """Raise `ShardError` for missing columns, and for one that a file has twice.

        `known` are the columns of the file.
        """
        wanted = self.wanted or [name for name in [self.key_column] if name is not None]
        absent = [name for name in (*wanted, *self.needed) if name not in known]
        if absent:
            fault = f"no column {listed(absent)}; it has {listed(known)}. Pass columns= that all files have"
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
