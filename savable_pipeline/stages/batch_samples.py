"""`BatchSamples`: the refs of all items in a batch, as arrays that travel with it.

A batch of items    ref (7, (12, 0, 0), (15, 0, 0))            refs [[12, 0, 0], [15, 0, 0]]            rows None
A batch of packs    ref (7, (3, (12, 0, 0), (15, 0, 0)),       refs [[12, 0, 0], [15, 0, 0], [9, 0, 1]]  rows [0, 0, 1]
                            (4, (9, 0, 1)))
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.stages.item_ref import ItemRef, sample_refs

Integers = NDArray[np.int64]


class BatchSamples(msgspec.Struct, frozen=True):
    """Items of a batch in order.

    A cut item is listed once for each of its pieces.

    `refs`, int64 (items, 3): index with the tag of its source, epoch, part. `rows`, int64 (items,): the row of each in
    the batch; None if each makes one row.
    """

    refs: Integers
    rows: Integers | None = None

    @classmethod
    def of(cls, ref: ItemRef | BatchSamples) -> BatchSamples:
        """List the items in the ref of a batch.

        It is empty if a user's own stage writes refs in another form.
        """
        if isinstance(ref, BatchSamples):
            return ref
        if ref and isinstance(ref[0], tuple):  # a user's own batch has no number
            return cls._from_nested(ref)
        try:  # the usual case is a batch of single items; numpy would take four times as long
            flat = struct.pack(f"<{3 * len(ref[1:])}q", *chain.from_iterable(ref[1:]))
        except (TypeError, struct.error):  # packs, pieces, or a ref of a user's own stage
            return cls._from_nested(ref)
        return cls(np.frombuffer(flat, "<i8").reshape(-1, 3))

    @classmethod
    def _from_nested(cls, ref: ItemRef) -> BatchSamples:
        """List the items of packs and pieces, and of refs of a user's own stage."""
        # padding rows have no sample
        rows = [[sample for sample in sample_refs(row) if len(sample) == 3] for row in _rows(ref)]
        try:
            refs = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64).reshape(-1, 3)
        except OverflowError:
            return cls(np.empty((0, 3), np.int64))
        if not len(refs) or all(len(row) == 1 for row in rows):
            return cls(refs)
        return cls(refs, np.repeat(np.arange(len(rows)), [len(row) for row in rows]))

    def in_rows(self, numbers: Sequence[int]) -> BatchSamples:
        """Return the same items, with these numbers of the batch's rows."""
        if list(numbers) == list(range(len(numbers))):
            return self
        rows = np.array(numbers, np.int64)
        return BatchSamples(self.refs, rows if self.rows is None else rows[self.rows])

    def by_row(self) -> list[list[ItemRef]]:
        """Return the refs of the items of each row."""
        rows = np.arange(len(self.refs)) if self.rows is None else self.rows
        refs_by_row: list[list[ItemRef]] = [[] for _ in range(int(rows.max(initial=-1)) + 1)]
        for row, ref in zip(rows.tolist(), self.refs.tolist(), strict=True):
            refs_by_row[row].append(tuple(ref))
        return refs_by_row


def _rows(ref: ItemRef) -> list[ItemRef]:
    """Return the refs of the items or packs in a batch. A user's batch that is one item is returned in a list."""
    return [part for part in ref if isinstance(part, tuple)] or ([ref] if len(ref) == 3 else [])
