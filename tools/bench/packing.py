"""How full packs are and how fast items find their place, for each policy: `python tools/bench/packing.py`.

Lengths are lognormal (median 400, sigma 1); those beyond the limit of 4096 are left out. Items are integers and the
encoder does nothing, so that what is timed is the placing alone.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, get_args

import numpy as np

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.packing.packing_policies import Policy
from savable_pipeline.stages.stage import State
from savable_pipeline.stages.stage_info import StageInfo

LIMIT = 4096


class Lengths(custom.ItemStage):
    """Gives lengths as items."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._next = 0

    def take(self, n: int, *, deferred: bool = False) -> tuple[list[Any], list[custom.ItemRef]]:
        """One length."""
        if self._next == len(self._lengths):
            return [], []
        self._next += 1
        return [self._lengths[self._next - 1]], [(self._next - 1, 0, 0)]

    def save_state(self) -> State:
        """Where it stands."""
        return {"next": self._next}

    def describe(self) -> StageInfo:
        """A source of nothing else."""
        none = frozenset([0])
        return StageInfo(sp.Lane(), 0, population=len(self._lengths), endless=False, tags=none, origins=none)


class Null(sp.TaskEncoder):
    """An item is its length."""

    global_rng = False

    def length(self, item: int) -> int:
        """Itself."""
        return item

    def cut(self, item: int, start: int, stop: int) -> int:
        """The length of the part."""
        return stop - start

    def images(self, item: int) -> int:
        """One in ten items has one."""
        return item % 10 == 0

    def pack(self, items: list[int], rng: sp.Rng) -> int:
        """What they add up to."""
        return sum(items)


def measure(lengths: list[int], **settings: Any) -> tuple[float, float, float]:
    """Fill, items placed a second, and bytes of state a lane."""
    packer = sp.OnlinePacker(Lengths(lengths), max_length=LIMIT, encoder=Null(), **settings)
    begin = time.perf_counter()
    given, state = 0, 0
    for given, _ in enumerate(packer, start=1):
        if given == 500:
            state = len(repr(packer.save_state()))
    seconds = time.perf_counter() - begin
    counts = packer.counts
    assert given == counts["packs"]
    assert sum(lengths) == counts["tokens"] + counts["skipped_tokens"] + counts["truncated_tokens"]
    return counts["tokens"] / (counts["tokens"] + counts["room"]), len(lengths) / seconds, state


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.0, arguments.items)
    lengths = np.maximum(1, drawn.astype(int)).tolist()
    print(f"{'policy':22}{'open packs':>11}{'images':>8}{'fill':>9}{'items/s':>12}")
    for policy in get_args(Policy):
        for open_packs in (16, 64):
            for images in (None, 4):
                found = [
                    measure(lengths, policy=policy, open_packs=open_packs, max_images=images)
                    for _ in range(arguments.rounds)
                ]
                fill, rate = found[0][0], max(rate for _, rate, _ in found)
                print(f"{policy:22}{open_packs:11}{images or '-':>8}{fill:9.2%}{rate:12,.0f}", flush=True)


if __name__ == "__main__":
    main()
