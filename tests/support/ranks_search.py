"""One rank of a search over finite runs, started by torchrun: `-m tests.support.ranks_search FOLDER SEED COUNT`.

Each pipeline runs over its epochs once without a cut, and once cut at random steps, where a new loader continues with
the
state of all ranks. A rank must get the same batches both times.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import savable_pipeline as sp
from tests.support.shards import write_numbered_shards
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline

LANES = 6


def main(folder: Path, seed: int, count: int) -> None:
    dist.init_process_group("gloo")
    draw = random.Random(seed)  # equal on all ranks
    for number in range(count):
        shards = folder / str(number)
        sizes = [draw.randint(60, 200), 1, 3]
        if dist.get_rank() == 0:
            write_numbered_shards(shards, sizes)
        dist.barrier()
        check(partial(toy_pipeline, str(shards), epochs=1, **chosen(draw)), draw)
        if dist.get_rank() == 0:
            print("exact", flush=True)
    dist.destroy_process_group()


def chosen(draw: random.Random) -> dict[str, Any]:
    """Return settings of a toy pipeline that gives every lane a batch."""
    return {
        "shuffle": draw.random() < 0.5,
        "block_size": draw.randint(1, 4),
        "buffer": draw.choice([None, 1, 7, 200]),
        "blend": draw.choice([None, "samples", "items", "nested", "ending"]),
        "pack": draw.choice([None, "buckets", "sequential", "best_fit", "first_fit_decreasing"]),
        "max_length": draw.randint(4, 40),
        "too_long": draw.choice(["truncate", "split"]),
        "max_buffer_bytes": draw.choice([0, 1 << 30]),
        "size": draw.randint(1, 3),
        "skip": 0,
        "fan_out": draw.choice([0, 1, 5]),
        "own": draw.choice([(), ("samples",), ("items",), ("batches",)]),
    }


def check(pipeline: Any, draw: random.Random) -> None:
    """Raise AssertionError if a run that is cut and resumed differs from one that is not."""
    cuts = [draw.randint(0, 5) for _ in range(4)]
    workers = [draw.choice([0, 0, 1, 2]) for _ in cuts]
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES) as loader:
        expected = [next_hashes(loader, 10_000) for _ in range(2)]
    found: list[list[Any]] = [[]]
    state: Any = None
    while len(found) < 3:
        wanted, num_workers = (cuts.pop(0), workers.pop(0)) if cuts else (10_000, 0)
        with sp.SavableLoader(pipeline, seed=3, lanes=LANES, num_workers=num_workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            epoch = state["epoch"] if state is not None else 0
            found[-1] += next_hashes(loader, wanted)
            state = loader.global_state_dict()
            if state["epoch"] > epoch:
                found.append([])
    assert found[:2] == expected


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
