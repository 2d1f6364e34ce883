"""Where two batches differ first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from savable_pipeline.stages.batch_difference import digest, find_difference, first_difference

BATCH = {"image": torch.zeros(2, 3, 4), "ids": np.arange(4), "names": ["a", "b"], "n": 1}


def with_a_five_at(*index: int) -> torch.Tensor:
    changed = torch.zeros(2, 3, 4)
    changed[index] = 5
    return changed


def test_equal_batches_have_no_difference_and_one_digest() -> None:
    again = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in BATCH.items()}
    assert find_difference(BATCH, again) is None and digest(BATCH) == digest(again)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n": 2}, "batch['n']: 1 expected, 2 found"),
        ({"n": 1.0}, "batch['n']: 1 expected, 1.0 found"),
        ({"names": ["a", "c"]}, "batch['names'][1]: 'b' expected, 'c' found"),
        ({"names": ["a"]}, "batch['names'].length: ('list', 2) expected, ('list', 1) found"),
        (
            {"ids": np.array([0, 1, 3, 2])},
            "batch['ids'], sample 2 (2 of 4 differ): np.int64(2) expected, np.int64(3) f",
        ),
        ({"ids": np.arange(4.0)}, "batch['ids']: numpy int64 (4,) expected, numpy float64 (4,) found"),
        (
            {"image": with_a_five_at(1, 2, 3)},
            "batch['image'], sample 1 (1 of 2 differ): tensor(0.) expected, tensor(5.) found at [2, 3], 1 of 12 values",
        ),
        ({"image": torch.zeros(2, 3)}, "batch['image']: torch.float32 (2, 3, 4) expected, torch.float32 (2, 3) found"),
    ],
)
def test_first_difference_is_reported_with_both_values(change: dict[str, Any], told: str) -> None:
    other = {**BATCH, **change}
    assert (first_difference(BATCH, other) or "").startswith(told)
    assert digest(BATCH) != digest(other)


def test_tensors_that_differ_only_in_signed_zero_or_nan_differ() -> None:
    assert find_difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert find_difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) is None


def test_order_of_a_set_is_not_a_difference() -> None:
    one, other = {"ids": {0, 8}, "names": frozenset([1, 9])}, {"ids": {8, 0}, "names": frozenset([9, 1])}
    assert list(one["ids"]) != list(other["ids"])
    assert digest(one) == digest(other)
    assert first_difference(one, other) is None
    assert digest(one) != digest({"ids": {0, 16}, "names": frozenset([1, 9])})
