"""Words, permutations and bijections: the arithmetic of every order, pinned by numbers written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from savable_pipeline.core import keyed_random as keys
from savable_pipeline.core.keyed_random import (
    RANKS,
    Bijection,
    SharedRanks,
    below,
    derive_key,
    permutation,
    word,
    words,
)

KEYS = st.integers(0, 2**64 - 1)


def test_words_are_those_of_the_published_splitmix64() -> None:
    assert [word(0, n) for n in range(4)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
    ]
    assert [word(1234567, n) for n in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(KEYS, st.integers(0, 2**40), st.integers(0, 50))
def test_words_from_any_offset_equal_single_words(key: int, start: int, count: int) -> None:
    assert words(key, start, count).tolist() == [word(key, start + i) for i in range(count)]


def test_key_depends_on_value_type_and_position_of_every_part() -> None:
    different = [(), (0,), ("0",), (0, 0), ("00",), ("0", "0"), (1, "a"), ("a", 1), (-1,), (2**64,), ("ä",)]
    assert len({derive_key(*parts) for parts in different}) == len(different)


def test_keys_equal_the_golden_values() -> None:
    assert derive_key() == 0x2D06800538D394C2
    assert derive_key(7, "lane", 3, "shuffle", 1) == 0xFF95C62DB31276A9


@given(KEYS, st.integers(1, 2**31 - 1))
def test_below_covers_its_whole_range_and_nothing_else(key: int, limit: int) -> None:
    drawn = below(words(key, 0, 20), limit)
    assert drawn.min() >= 0 and drawn.max() < limit
    assert below(np.array([0, 2**64 - 1], np.uint64), limit).tolist() == [0, limit - 1]


@given(KEYS, st.integers(0, 300))
def test_a_permutation_has_every_number_once(key: int, n: int) -> None:
    assert sorted(permutation(key, n).tolist()) == list(range(n))


def test_permutations_equal_the_golden_values() -> None:
    assert permutation(7, 10).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]


@pytest.mark.parametrize(
    "n", [0, 1, 2, keys._FAST_SORT_WORDS - 1, keys._FAST_SORT_WORDS, keys._FAST_SORT_WORDS + 1, 100_003]
)
@pytest.mark.parametrize("alike", [0, 1, 30, 48, 64])
def test_words_are_sorted_stably(n: int, alike: int) -> None:
    """Also words that are equal in their highest or lowest bits, or at all."""
    drawn = words(3, 0, n)
    for left in (drawn >> np.uint64(alike), drawn << np.uint64(alike)) if alike < 64 else (drawn * np.uint64(0),):
        assert np.array_equal(keys.sorted_order(left), np.argsort(left, kind="stable"))


LIMIT = keys._TABLE_LIMIT


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 4, 5, 100, LIMIT - 1, LIMIT, LIMIT + 1, 2**17 - 1, 2**17, 2**17 + 1, 300_007]
)
def test_a_bijection_has_every_number_once(n: int) -> None:
    images = Bijection(11, n)(np.arange(n))
    assert np.array_equal(np.sort(images), np.arange(n))
    if n > 100:
        assert not np.array_equal(images, np.arange(n))


@settings(max_examples=50)
@given(KEYS, st.integers(1, 3000))
def test_a_computed_bijection_has_every_number_once_too(key: int, n: int) -> None:
    bijection = Bijection(key, n)
    bijection._table = None
    assert sorted(bijection(np.arange(n)).tolist()) == list(range(n))


@given(KEYS, st.integers(LIMIT + 1, 2**62), st.data())
def test_any_part_of_a_large_bijection_is_computed_alone(key: int, n: int, data: st.DataObject) -> None:
    bijection = Bijection(key, n)
    asked = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    images = bijection(np.array(asked)).tolist()
    assert all(0 <= image < n for image in images)
    assert len(set(images)) == len(asked)
    assert images == [int(bijection(np.array([position]))[0]) for position in asked]


def test_bijections_equal_the_golden_values() -> None:
    assert Bijection(7, 8)(np.arange(8)).tolist() == [1, 5, 7, 0, 4, 6, 3, 2]
    assert Bijection(7, LIMIT + 1)(np.arange(4)).tolist() == [28067, 29448, 147, 38684]
    assert Bijection(7, 10**12)(np.arange(4)).tolist() == [427787012711, 554008358103, 457917073792, 959707039780]


def test_positions_of_a_large_bijection_spread_evenly() -> None:
    images = Bijection(5, 2**20)(np.arange(64_000))
    counts = np.bincount(images >> 14, minlength=64)  # 64 bins, 1,000 expected in each
    assert ((counts - 1000) ** 2 / 1000).sum() < 110  # chi-square of 63 degrees of freedom: 103 at p = 0.001


def test_each_block_has_every_step_once_in_an_order_of_its_own() -> None:
    ranks = SharedRanks(key=1, steps=8)
    steps = [ranks.step(n) for n in range(24)]
    blocks = [steps[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(block) == list(range(8)) for block in blocks)
    assert blocks[0] != blocks[1] != blocks[2]


def test_rank_is_uniform_within_its_step() -> None:
    ranks = SharedRanks(key=1, steps=4)
    found = [ranks.rank(n) for n in range(4000)]
    assert [rank * 4 // RANKS for rank in found] == [ranks.step(n) for n in range(4000)]
    sixteenths = [found[n] * 64 // RANKS % 16 for n in range(4000)]
    assert all(150 < sixteenths.count(each) < 350 for each in range(16))


def test_ranks_equal_the_golden_values() -> None:
    ranks = SharedRanks(key=7, steps=32)
    found = [ranks.rank(n) for n in (*range(100), 5, 10**9)]
    assert found[100] == found[5]
    assert xxh3_64_hexdigest(repr(found).encode()) == "d7e0521f97ba9eee"
