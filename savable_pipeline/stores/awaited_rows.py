"""`AwaitedRows`: the rows of each row group that were announced, and are still to be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from savable_pipeline.shards.shard_list import Rows

_MOST = 4_000_000  # rows awaited, beyond which all are forgotten: they were passed over


class AwaitedRows:
    """Sets of rows by (shard, group)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], set[int]] = {}
        self._count = 0  # that were announced

    def announce(self, shard: int, rows: Rows, ends: list[int]) -> None:
        """These rows of a shard, whose groups end at `ends`, will be read."""
        self._count += len(rows)
        if self._count > _MOST:
            self._rows.clear()
            self._count = len(rows)
        groups = np.searchsorted(ends, rows, side="right")
        for group in np.unique(groups).tolist():
            self.of(shard, group).update(rows[groups == group].tolist())

    def of(self, shard: int, group: int) -> set[int]:
        """The rows awaited of a group: remove those that are read."""
        return self._rows.setdefault((shard, group), set())

    def count(self, shard: int, group: int) -> int:
        """The number of rows awaited of a group."""
        return len(self._rows.get((shard, group), ()))

    def take(self, shard: int, group: int) -> list[int]:
        """The rows awaited of a group, which are forgotten here."""
        rows = sorted(self._rows.pop((shard, group), ()))
        self._count = max(0, self._count - len(rows))
        return rows


class AwaitedOfGroup:
    """The rows awaited of a group that is decoded, `rows`, whose first one has the number `first`; see `Awaited`."""

    def __init__(self, awaited: AwaitedRows, shard: int, group: int, first: int) -> None:
        self._awaited, self._shard, self._group, self._first = awaited, shard, group, first
        self.rows: Any = None

    def __len__(self) -> int:
        return self._awaited.count(self._shard, self._group)

    def take(self) -> Iterator[tuple[int, Any, int]]:
        """Number, row and bytes of each; of damaged ones nothing: the error comes when they are read."""
        for row in self._awaited.take(self._shard, self._group):
            with contextlib.suppress(ValueError):
                kept = self.rows.kept(row - self._first)
                yield row, kept, kept.size
