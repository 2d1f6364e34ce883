"""`DecodedBlocks`: the row groups that a process holds decoded, bounded in bytes, for all lanes and stores together.

    blocks   row groups, whole                  the one is given up first of which the fewest rows are still to be read
    kept     rows of groups that were given up, but that a shuffle buffer is still to give

Without the kept rows, a group would be decoded again for each of its rows that stays in a buffer for long.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from savable_pipeline.core.wording import human_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")
DECODED_BYTES = 1 << 30


class Awaited(Protocol):
    """The rows of a block that are still to be read."""

    def __len__(self) -> int: ...
    def take(self) -> Iterable[tuple[int, Any, int]]:
        """Number, row and bytes of each, when the block is given up."""


class DecodedBlocks(Generic[T]):
    """At most `limit` bytes of decoded blocks and kept rows, and of the latter at most half of it.

    A single block beyond the limit is kept alone. `decoded` counts how many were decoded since the start.

    >>> from savable_pipeline.data.stores.decoded_blocks import DecodedBlocks
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
        self._blocks: OrderedDict[Hashable, tuple[T, int, Awaited | None]] = OrderedDict()
        self._kept: OrderedDict[Hashable, dict[int, tuple[Any, int]]] = OrderedDict()  # by block, then by row
        self._read: tuple[Hashable, int] = None, 0  # the kept row that was asked for last
        self._block_bytes = self._kept_bytes = 0
        self._told = False

    @property
    def bytes(self) -> int:
        """The bytes of all blocks and kept rows."""
        return self._block_bytes + self._kept_bytes

    def get(self, key: Hashable, decode: Callable[[], tuple[T, int]], awaited: Awaited | None = None) -> T:
        """The block called `key`; if it is not there, what `decode` gives, with its size in bytes.

        When the block is given up, those of its rows that are `awaited` are kept.
        """
        found = self.held(key)
        return self._add(key, *decode(), awaited) if found is None else found

    def held(self, key: Hashable) -> T | None:
        """The block called `key`; None if it is not there."""
        found = self._blocks.get(key)
        if found is None:
            return None
        self._blocks.move_to_end(key)
        return found[0]

    def kept(self, key: Hashable, row: int) -> Any:
        """A kept row of the block `key`; None if there is none. It is kept until another one is asked for."""
        rows = self._kept.get(key)
        found = None if rows is None else rows.get(row)
        if found is None:
            return None
        if self._read != (key, row):
            self._drop(*self._read)
            self._read = key, row
        return found[0]

    def _add(self, key: Hashable, block: T, size: int, awaited: Awaited | None) -> T:
        self.decoded += 1
        self._kept_bytes -= sum(each for _, each in self._kept.pop(key, {}).values())
        while self._blocks and self.bytes + size > self.limit:
            self._give_up()
        self._blocks[key] = block, size, awaited
        self._block_bytes += size
        return block

    def _give_up(self) -> None:
        """Gives up the block of which the fewest rows are awaited; of several, the one used longest ago."""
        key = min(self._blocks, key=lambda key: len(self._blocks[key][2] or ()))
        _, size, awaited = self._blocks.pop(key)
        self._block_bytes -= size
        if awaited:
            self._kept[key] = {row: (kept, each) for row, kept, each in awaited.take()}
            self._kept_bytes += sum(each for _, each in self._kept[key].values())
        while self._kept_bytes > self.limit // 2:
            oldest = next(iter(self._kept))
            self._drop(oldest, next(iter(self._kept[oldest])))
            self._tell()

    def _drop(self, key: Hashable, row: int) -> None:
        rows = self._kept.get(key)
        if rows is not None:
            self._kept_bytes -= rows.pop(row, (None, 0))[1]
            if not rows:
                del self._kept[key]

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.info(
                "rows of more than %s are in shuffle buffers, or were never read: row groups may be decoded again for "
                "them; give more cache_bytes, or smaller buffers",
                human_bytes(self.limit // 2),
            )

    def __repr__(self) -> str:
        return f"DecodedBlocks({len(self._blocks)}, {human_bytes(self.bytes)} of {human_bytes(self.limit)})"
