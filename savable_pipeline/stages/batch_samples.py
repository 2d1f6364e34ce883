"""`BatchSamples`: the refs of all items in a batch, which travel as arrays.

A batch of items    ref (7, (12, 0, 0), (15, 0, 0))            refs [[12, 0, 0], [15, 0, 0]]            rows None
A batch of packs    ref (7, (3, (12, 0, 0), (15, 0, 0)),       refs [[12, 0, 0], [15, 0, 0], [9, 0, 1]]  rows [0, 0, 1]
                            (4, (9, 0, 1)))
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.stages.item_ref import ItemRef, sample_refs

Integers = NDArray[np.int64]
Arrays: TypeAlias = tuple[Integers, Integers | None]


class BatchSamples:
    """Items of a batch in order, as arrays once they are needed or pickled.

    `ref` is the ref of the batch, or () from another process. `arrays` are the refs, int64 (items, 3) with index and
    tag, epoch and part, and the row of each item in the batch, int64 (items,), or None if each makes one row. A cut
    item is listed once for each of its pieces. The arrays are empty if a user's own stage has refs in another form.
    Reading the arrays from a pickle takes 4 µs for 256 items, and nested tuples 38 µs.
    """

    def __init__(self, ref: ItemRef = (), arrays: Arrays | None = None) -> None:
        self.ref = ref
        if arrays is not None:
            self.arrays = arrays

    @cached_property
    def arrays(self) -> Arrays:
        """Return the refs and rows of the items."""
        ref, rows = self.ref, None
        # usually a batch has single items, or packs of single items; numpy would take four times as long
        if not ref or not isinstance(ref[0], tuple):  # the batch of a user's own stage has no number
            with suppress(TypeError, struct.error):  # for packs, pieces, or a ref of a user's own stage
                return _packed(ref[1:]), None
            # for pieces, packs of packs, or a ref of a user's own stage
            with suppress(TypeError, IndexError, struct.error):
                if {type(pack[0]) for pack in ref[1:]} == {int}:
                    items, counts = [item for pack in ref[1:] for item in pack[1:]], [len(pack) - 1 for pack in ref[1:]]
                    one_each = not items or counts.count(1) == len(counts)
                    return _packed(items), None if one_each else np.repeat(np.arange(len(counts)), counts)
        parts = [part for part in ref if isinstance(part, tuple)] or ([ref] if len(ref) == 3 else [])
        # padding rows have no sample
        by_row = [[sample for sample in sample_refs(row) if len(sample) == 3] for row in parts]
        try:
            refs = np.fromiter(chain.from_iterable(chain.from_iterable(by_row)), np.int64).reshape(-1, 3)
        except OverflowError:
            return np.empty((0, 3), np.int64), None
        if len(refs) and any(len(row) != 1 for row in by_row):
            rows = np.repeat(np.arange(len(by_row)), [len(row) for row in by_row])
        return refs, rows

    @property
    def refs(self) -> Integers:
        """Return the refs of the items."""
        return self.arrays[0]

    @property
    def rows(self) -> Integers | None:
        """Return the row of each item, or None if each makes one row."""
        return self.arrays[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchSamples, ((), self.arrays)

    def by_row(self) -> list[list[ItemRef]]:
        """Return the refs of the items of each row."""
        refs, rows = self.arrays
        row_numbers = range(len(refs)) if rows is None else rows.tolist()
        refs_by_row: list[list[ItemRef]] = [[] for _ in range(max(row_numbers, default=-1) + 1)]
        for row, ref in zip(row_numbers, refs.tolist(), strict=True):
            refs_by_row[row].append(tuple(ref))
        return refs_by_row


def _packed(refs: Sequence[ItemRef]) -> Integers:
    """Return the refs of items as an array. Raises TypeError or `struct.error` if they are others."""
    flat = struct.pack(f"<{3 * len(refs)}q", *chain.from_iterable(refs))
    return np.frombuffer(flat, "<i8").reshape(-1, 3)
