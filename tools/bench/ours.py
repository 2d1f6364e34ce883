"""Our loader as the benchmarks use it.

This module imports neither torch nor another loader, because each worker process imports it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers import BATCH, BUFFER, Collate, Decode, collecting, decode_json

import savable_pipeline as sp
from savable_pipeline import custom

if TYPE_CHECKING:
    from rounds import Loader


class FunctionEncoder(sp.TaskEncoder):
    """Encoder from the `decode` and `collate` functions of the other loaders. Without `collate` it stacks items."""

    def __init__(self, decode: Decode, collate: Collate | None = None) -> None:
        self._decode = decode
        self._collate = collate

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        """Return `decode(sample)`."""
        return self._decode(sample)  # type: ignore[arg-type]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        """Return `collate(items)`, or the stacked items."""
        return super().batch(items, rng) if self._collate is None else self._collate(items)


def pipeline(folder: str, encoder: sp.TaskEncoder, lane: sp.Lane, *, size: int, buffer: int = 0) -> custom.Stage:
    """Build a lane with batches of `size`, and with its part of a shuffle buffer of `buffer` samples."""
    samples: custom.SampleStage = sp.TarShardReader(folder, lane)
    if buffer:
        samples = sp.ShuffleBuffer(samples, size=-(-buffer // lane.count))
    return sp.Batcher(sp.Encode(samples, encoder), size=size)


def loader(
    folder: Path, encoder: sp.TaskEncoder, use: Callable[[Any], float] = len, *, size: int, buffer: int = 0,
    workers: int = 0, lanes: int = 96, method: str = "fork",
) -> Loader:  # fmt: skip
    """Run `pipeline` in our loader. `size` and `buffer` are its arguments, `use` is that of `rounds.Loader`."""
    from rounds import Loader

    run = partial(pipeline, str(folder), encoder, size=size, buffer=buffer)
    loader = sp.SavableLoader(run, seed=1, lanes=lanes, workers=sp.Workers(workers, start_method=method))
    return Loader(iter(loader), use, loader.close, warm=2 * buffer)


def sample_json(sample: Any) -> Any:
    """Decode JSON by `Sample.json`, which is faster than `json.loads`."""
    return sample.json()


def constant_item(sample: Any) -> int:
    """Return an item without reading the sample."""
    return 7


def large_batch(items: list[Any]) -> Any:
    """Ignore the items and return a new batch of 9.6 MB."""
    import torch

    return sp.empty((64, 3, 224, 224), torch.uint8).fill_(7)


def small_batch(items: list[Any]) -> Any:
    """Ignore the items and return the same batch of 10 kB."""
    import torch

    return torch.full((10_000,), 7, dtype=torch.uint8)


def sleep_40_ms(items: list[Any]) -> int:
    """Build a batch that takes 40 ms, but no CPU time."""
    time.sleep(0.04)
    return 1


def imported_modules(items: list[Any]) -> list[str]:
    """Return the names of the modules that this worker has imported."""
    return sorted(sys.modules)


# The functions below run in processes whose memory is measured. Their common arguments are the number of workers, the
# rank, the number of ranks, and the start method of workers.


def _batches(build_lane: Any, workers: int, rank: int, ranks: int, method: str) -> Iterator[Any]:
    """Yield the batches of one rank."""
    options = sp.Workers(prefetch=2, start_method=method)  # the other loaders also prefetch two batches
    return iter(sp.SavableLoader(build_lane, seed=1, num_workers=workers, ranks=(rank, ranks), workers=options))


def json_batches(folder: Path, workers: int, rank: int, ranks: int, method: str) -> Iterator[Any]:
    """Yield batches of JSON, as the other loaders do."""
    # Lanes share one buffer, whereas other loaders have a buffer in each reading process.
    encoder, buffer = FunctionEncoder(decode_json, collecting), BUFFER * max(1, workers) * ranks
    return _batches(partial(pipeline, str(folder), encoder, size=BATCH, buffer=buffer), workers, rank, ranks, method)


def offset_batches(folder: Path, *arguments: Any) -> Iterator[Any]:
    """Yield batches of the offsets of samples. No sample is read, so only order and index use memory."""
    return _batches(partial(pipeline, str(folder), FunctionEncoder(_offset, collecting), size=BATCH), *arguments)


def _offset(sample: Any) -> int:
    """Return where a sample starts in its shard. The index has this number."""
    return int(sample.offset)


def blend_batches(sources: int, folder: Path, *arguments: Any) -> Iterator[Any]:
    """Yield batches of a blend of the first shards of a folder.

    Each shard is a source with its own reader per lane. `arguments` are those of `_batches` after the first.
    """
    tars = sorted(str(tar) for tar in folder.glob("*.tar"))[:sources]
    # `collecting` only collects garbage once, and returns each batch unchanged
    return _batches(partial(_blend, tars, FunctionEncoder(decode_json, collecting)), *arguments)


def _blend(tars: list[str], encoder: sp.TaskEncoder, lane: sp.Lane) -> custom.Stage:
    """Build a lane that blends shards, each a source."""
    sources: dict[str, custom.SampleStage] = {Path(tar).stem: sp.TarShardReader(tar, lane) for tar in tars}
    return sp.Batcher(sp.Encode(sp.Blend(sources), encoder), size=BATCH)


def torch_alone(*arguments: Any) -> Iterator[Any]:
    """Yield None forever: the memory of a process that has only imported torch."""
    while True:
        yield None


RUNS: dict[str, Callable[..., Iterator[Any]]] = {
    "savable_pipeline": json_batches,
    "torch alone": torch_alone,
    "samples": offset_batches,
    **{f"blend of {sources}": partial(blend_batches, sources) for sources in (1, 35)},
}
