"""`BatchSamples`: what a batch was made of, from its ref."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import ItemRef

PACKS = (7, (3, (12, 0, 0), (15, 0, 0)), (4, (9, 0, 1)))
PIECES = (7, ((12, 1, 0), 0, 16), ((12, 1, 0), 16, 20))


@pytest.mark.parametrize(
    ("ref", "refs", "rows"),
    [
        ((7, (12, 0, 0), (15, 0, 0)), [[12, 0, 0], [15, 0, 0]], None),
        (PACKS, [[12, 0, 0], [15, 0, 0], [9, 0, 1]], [0, 0, 1]),
        (PIECES, [[12, 1, 0], [12, 1, 0]], None),
        ((7, (3, *PIECES[1:])), [[12, 1, 0], [12, 1, 0]], [0, 0]),
        ((7, (3, (1, 0, 0)), (4, (2, 0, 0))), [[1, 0, 0], [2, 0, 0]], None),
        ((7, ((1, 0, 0), (2, 0, 0))), [[1, 0, 0], [2, 0, 0]], [0, 0]),  # a user's pair, not item 2 in pack (1, 0, 0)
        ((7, (3, (4, (1, 0, 0), (2, 0, 0)))), [[1, 0, 0], [2, 0, 0]], [0, 0]),  # a pack of packs
        ((7, (3,)), [], None),
        ((7, ((1, 0, 0),)), [[1, 0, 0]], None),  # the refs of a user's own stage
        ((7, (3, (1, 0, 0)), ((2, 0, 0),)), [[1, 0, 0], [2, 0, 0]], None),
        ((7, ()), [], None),
        ((7,), [], None),
        ((), [], None),
        ((5, 0, 0), [[5, 0, 0]], None),  # a user's own stage gives items as batches
        (((1, 0, 0), (2, 0, 0)), [[1, 0, 0], [2, 0, 0]], None),  # a user's own batches
        ((7, (1 << 63, 0, 0)), [], None),  # what is no index of ours
        ((7, (1, 0)), [], None),
    ],
)
def test_a_batch_lists_its_refs_in_order_with_their_rows(ref: ItemRef, refs: list[Any], rows: Any) -> None:
    found = BatchSamples(ref)
    assert found.refs.tolist() == refs and found.refs.shape == (len(refs), 3)
    assert (found.rows if found.rows is None else found.rows.tolist()) == rows
    read = pickle.loads(pickle.dumps(found))
    assert read.refs.tolist() == refs and (read.rows is None) == (rows is None)


def test_by_row_returns_the_original_refs() -> None:
    assert BatchSamples(PACKS).by_row() == [[(12, 0, 0), (15, 0, 0)], [(9, 0, 1)]]
    assert BatchSamples((7, (12, 0, 0))).by_row() == [[(12, 0, 0)]]
    assert BatchSamples().by_row() == []


def test_arrays_of_a_large_batch_pickle_small() -> None:
    samples = BatchSamples((7, *[(1 << 40 | i, 0, 0) for i in range(256)]))
    assert len(pickle.dumps(samples, protocol=5)) < 256 * 24 + 300
