"""The order of a run, pinned: a release that changes one of these numbers breaks every saved state.

If one of them fails, the change is wrong, whatever else it does. Only a new state version may come with new numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline.data.dataset.ref import tag_of, untagged
from tests.support.toy_dataset import readers, take_refs

SIZES = [50 + 7 * i % 31 for i in range(70)]  # 70 shards of 50 to 80 samples: two windows of 35
ONE_LARGE = [2**16 * 3]  # with block_size=1 a window of more blocks than are kept as a table

GOLDEN: list[tuple[str, list[int], dict[str, Any], int, str, str]] = [
    ("shuffled", SIZES, {"window": 32}, 3, "b86553337b880ac2", "685076858fba7f01"),
    ("one window", SIZES, {"window": None}, 3, "9026854c170eb546", "00ec93e72206aa4d"),
    ("fully shuffled", SIZES, {"block_size": 1, "window": None}, 3, "82e05d8c839163e8", "15568137479d8211"),
    (
        "many lanes",
        SIZES,
        {"block_size": 4, "window": 32},
        96,
        "4e4336ea51923984",
        "83bbc6c5d67c0d07",
    ),  # 47 samples a lane
    ("file order", SIZES, {"shuffle": False}, 3, "1c8fc9d19dc50475", "d47c7a2e780620bf"),
    ("finite", SIZES, {"epochs": 1}, 3, "9026854c170eb546", "00ec93e72206aa4d"),
    ("beyond a table", ONE_LARGE, {"block_size": 1}, 3, "53001661195aaacc", "ba60d7d83c28687b"),
]


def digest(refs: list[tuple[int, int]]) -> str:
    """Of (index, epoch) pairs, 16 bytes each."""
    return xxh3_64_hexdigest(np.array(refs, dtype="<u8").tobytes())


@pytest.mark.parametrize(("name", "sizes", "how", "lanes", "alone", "buffered"), GOLDEN)
def test_first_thousand_refs_equal_the_golden_order(
    name: str, sizes: list[int], how: dict[str, Any], lanes: int, alone: str, buffered: str
) -> None:
    make = readers(sizes, lanes=lanes, seed=7, **how)
    assert digest(take_refs(make(1), 1000)) == alone
    assert digest(take_refs(sp.ShuffleBuffer(make(1), size=100), 1000)) == buffered


def test_first_refs_of_a_small_run_equal_the_golden_order() -> None:
    assert take_refs(readers([4, 3, 5], lanes=2, seed=7, block_size=2)(1), 12) == [
        (10, 0),
        (11, 0),
        (4, 0),
        (5, 0),
        (6, 0),
        (7, 0),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (0, 1),
        (1, 1),
    ]


def test_first_refs_of_a_blend_equal_the_golden_order() -> None:
    web = readers([60, 70], lanes=3, seed=7)(1)
    blend = sp.Blend({"web": web, "books": sp.TarShardReader("numbers", web.lane)}, weights={"web": 0.7, "books": 0.3})
    refs = take_refs(blend, 1000)
    assert [(tag_of(index), untagged(index), epoch) for index, epoch in refs[:6]] == [
        (28653, 59, 0),
        (31919, 123, 0),
        (31919, 124, 0),
        (28653, 60, 0),
        (28653, 61, 0),
        (28653, 62, 0),
    ]
    assert digest(refs) == "369f77fed4047ba2"
