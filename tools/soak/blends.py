"""How far the shares of a Blend are off, at worst, over random weights and numbers of lanes.

    python tools/soak/blends.py --cases 500

Prints the cases in which a lane, the sum over lanes at multiples of the stride, and a single round were furthest off.
"""

from __future__ import annotations

import random
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.stages.blending.blend_counts import LaneCounts
from savable_pipeline.stages.blending.blend_turns import LaneTurns


def random_weights(draw: random.Random) -> list[int]:
    """Of 2 to 12 sources: alike, over several decades, or some large ones among many small ones."""
    sources = draw.randint(2, 12)
    match draw.randrange(4):
        case 0:
            return [draw.randint(1, 10) for _ in range(sources)]
        case 1:
            return [draw.randint(1, 2000) for _ in range(sources)]
        case 2:
            return [int(10**9 * 2 ** (-12 * draw.random())) for _ in range(sources)]
        case _:
            largest = 3 ** draw.randint(1, 4)
            return [
                draw.choice([500, 900, 901]) if draw.random() < 0.3 else draw.randint(1, largest)
                for _ in range(sources)
            ]


def taken(weights: list[int], lanes: int, stride: int, steps: int) -> NDArray[np.int64]:
    """What each lane has taken of each source after each step: (steps + 1, lanes, sources)."""
    counts = LaneCounts(weights, lanes, stride=stride)
    turns = [LaneTurns(weights, counts, place, derive_key("lane", place)) for place in range(lanes)]
    found = np.zeros((steps + 1, lanes, len(weights)), np.int64)
    for begin in range(0, steps, stride):
        for place, lane in enumerate(turns):
            chosen = lane.plan(stride)
            lane.take(chosen)
            found[begin + 1 + np.arange(stride), place, chosen] = 1
    return found.cumsum(axis=0)


def main(
    cases: Annotated[int, typer.Option(help="How many.")] = 100,
    steps: Annotated[int, typer.Option(help="Samples of a lane.")] = 2_048,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
) -> None:
    """Search, and print the worst."""
    draw = random.Random(seed)
    worst: dict[str, list[tuple[float, str]]] = {"lane": [], "sum over lanes": [], "round": []}
    for _ in range(cases):
        weights, lanes, stride = random_weights(draw), draw.randint(1, 128), draw.choice([1, 4, 8, 8, 8, 16, 32])
        found = taken(weights, lanes, stride, steps // stride * stride)
        total = sum(weights)
        due = np.arange(len(found))[:, None] * np.array(weights)
        sums = (found.sum(axis=1) * total - due * lanes)[::stride]
        case = f"{weights}, {lanes} lanes, stride {stride}"
        for name, off in [
            ("lane", found * total - due[:, None]),
            ("sum over lanes", sums),
            ("round", np.diff(sums, axis=0)),
        ]:
            worst[name].append((float(np.abs(off).max() / total), case))
    for name, offs in worst.items():
        offs.sort(reverse=True)
        over = sum(off > 1.5 for off, _ in offs)
        print(f"{name}: median {offs[cases // 2][0]:.2f}, {over} of {cases} over 1.5; worst")
        for off, case in offs[:4]:
            print(f"    {off:.2f}  {case}")


if __name__ == "__main__":
    typer.run(main)
