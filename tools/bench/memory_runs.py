"""One process whose memory is measured: it makes what it is told, says so, and waits for the end of its input.

It imports torch first, as every trainer has, and the library that it runs; never two.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch  # noqa: F401  every trainer has it
from memory_peers import BATCH, LOADERS, Place, itself

READY = "ready"


def imported(place: Place) -> Iterator[Any]:
    """torch alone, which any trainer holds."""
    return itertools.repeat(None)


def empty_samples(place: Place) -> Iterator[Any]:
    """Samples that are only looked up in the index in a folder: order and index are all that costs."""
    from pipelines import FunctionEncoder, pipeline

    import savable_pipeline as sp

    run = partial(pipeline, str(place.folder), FunctionEncoder(_looked_up, itself), BATCH, 0)
    yield from sp.SavableLoader(run, seed=1, num_workers=place.workers, workers=sp.Workers(start_method=place.method))


def _looked_up(sample: Any) -> int:
    return int(sample.offset)


def blended(place: Place, sources: int) -> Iterator[Any]:
    """A blend of the first shards of a folder, each a source with a reader of its own in each lane."""
    from pipelines import FunctionEncoder, decode_json

    import savable_pipeline as sp

    tars = sorted(place.folder.glob("*.tar"))[:sources]
    run = partial(_blend, [str(tar) for tar in tars], FunctionEncoder(decode_json, itself))
    yield from sp.SavableLoader(run, seed=1, num_workers=place.workers, workers=sp.Workers(start_method=place.method))


def _blend(tars: list[str], encoder: Any, lane: Any) -> Any:
    import savable_pipeline as sp

    sources = {Path(tar).stem: sp.TarShardReader(tar, lane) for tar in tars}
    return sp.Batcher(sp.Encode(sp.Blend(sources), encoder), size=BATCH)


RUNS: dict[str, Callable[[Place], Iterator[Any]]] = {
    **{name: make for name, (_, make) in LOADERS.items()},
    "torch alone": imported,
    "samples": empty_samples,
    **{f"blend of {sources}": partial(blended, sources=sources) for sources in (1, 35)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("folder", type=Path)
    for name in ("workers", "rank", "ranks", "batches"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--method")
    args = parser.parse_args()
    batches = RUNS[args.what](Place(args.folder, args.workers, args.rank, args.ranks, args.method))
    for _ in range(args.batches):
        last = next(batches)
    gc.collect()
    print(READY, flush=True)
    sys.stdin.read()
    del last
    os._exit(0)


if __name__ == "__main__":
    main()
