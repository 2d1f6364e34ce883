"""`AwaitedRows`: the rows of each row group that were announced, and are still to be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from savable_pipeline.data.shards.shard_list import Rows

_MOST = 4_000_000  # rows awaited, beyond which those awaited before are forgotten: they were passed over
Group: TypeAlias = tuple[int, int]  # a shard, and the number of a row group in it


class AwaitedRows:
    """Sets of rows by their group; its length is the number of all rows. A group without rows takes no room."""

    def __init__(self) -> None:
        self._rows: dict[Group, set[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def announce(self, shard: int, rows: Rows, ends: list[int]) -> None:
        """These rows of a shard, whose groups end at `ends`, will be read."""
        if self._count + len(rows) > _MOST:
            self._rows.clear()
            self._count = 0
        groups = np.searchsorted(ends, rows, side="right")
        for group in np.unique(groups).tolist():
            awaited = self._rows.setdefault((shard, group), set())
            before = len(awaited)
            awaited.update(rows[groups == group].tolist())
            self._count += len(awaited) - before

    def done(self, group: Group, row: int) -> None:
        """This row of a group is read, and awaited no more. (Called for each part: without a detour.)"""
        awaited = self._rows.get(group)
        if awaited is not None and row in awaited:
            awaited.remove(row)
            self._count -= 1
            if not awaited:
                del self._rows[group]

    def count(self, group: Group) -> int:
        """The number of rows awaited of a group."""
        return len(self._rows.get(group, ()))

    def take(self, group: Group) -> list[int]:
        """The rows awaited of a group, which are forgotten here."""
        rows = sorted(self._rows.pop(group, ()))
        self._count -= len(rows)
        return rows

    def __repr__(self) -> str:
        return f"AwaitedRows({self._count} rows of {len(self._rows)} groups)"


class AwaitedOfGroup:
    """The rows awaited of a group that is decoded, `rows`, whose first one has the number `first`; see `Awaited`."""

    def __init__(self, awaited: AwaitedRows, group: Group, first: int) -> None:
        self._awaited, self._group, self._first = awaited, group, first
        self.rows: Any = None

    def __len__(self) -> int:
        return self._awaited.count(self._group)

    def take(self) -> Iterator[tuple[int, Any, int]]:
        """Number, row and bytes of each; of damaged ones nothing: the error comes when they are read."""
        for row in self._awaited.take(self._group):
            with contextlib.suppress(ValueError):
                kept = self.rows.kept(row - self._first)
                yield row, kept, kept.size
