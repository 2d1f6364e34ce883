"""The sequence of ranks that lanes share: every step once a block, ranks within their step, the same for ever."""

from __future__ import annotations

from xxhash import xxh3_64_hexdigest

from savable_pipeline.core.shared_ranks import RANKS, SharedRanks


def test_each_block_has_every_step_once_in_an_order_of_its_own() -> None:
    ranks = SharedRanks(key=1, steps=8)
    steps = [ranks.step(n) for n in range(24)]
    blocks = [steps[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(block) == list(range(8)) for block in blocks)
    assert blocks[0] != blocks[1] != blocks[2]


def test_a_rank_lies_in_its_step_and_anywhere_in_it() -> None:
    ranks = SharedRanks(key=1, steps=4)
    found = [ranks.rank(n) for n in range(4000)]
    assert [rank * 4 // RANKS for rank in found] == [ranks.step(n) for n in range(4000)]
    sixteenths = [found[n] * 64 // RANKS % 16 for n in range(4000)]
    assert all(150 < sixteenths.count(each) < 350 for each in range(16))


def test_ranks_are_those_of_every_release() -> None:
    ranks = SharedRanks(key=7, steps=32)
    found = [ranks.rank(n) for n in (*range(100), 5, 10**9)]
    assert found[100] == found[5]
    assert xxh3_64_hexdigest(repr(found).encode()) == "d7e0521f97ba9eee"
