"""What the benchmarks have our loader do; it imports neither torch nor a peer, so that a worker starts with little."""

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
    """Items by `decode`, batches by `collate`, the functions that peers are given too; None: items are stacked."""

    def __init__(self, decode: Decode, collate: Collate | None = None) -> None:
        self._decode = decode
        self._collate = collate

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        """What `decode` makes of it."""
        return self._decode(sample)  # type: ignore[arg-type]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        """What `collate` makes of them."""
        return super().batch(items, rng) if self._collate is None else self._collate(items)


def pipeline(folder: str, encoder: sp.TaskEncoder, size: int, buffer: int, lane: sp.Lane) -> custom.Stage:
    """Batches of `size`, out of a shuffle buffer that all lanes share."""
    samples: custom.SampleStage = sp.TarShardReader(folder, lane)
    if buffer:
        samples = sp.ShuffleBuffer(samples, size=-(-buffer // lane.count))
    return sp.Batcher(sp.Encode(samples, encoder), size=size)


def loader(
    folder: Path, encoder: sp.TaskEncoder, use: Callable[[Any], float] = len, *, size: int, buffer: int = 0,
    workers: int = 0, lanes: int = 96, method: str = "fork",
) -> Loader:  # fmt: skip
    """Such a pipeline in our loader."""
    from rounds import Loader

    run = partial(pipeline, str(folder), encoder, size, buffer)
    loader = sp.SavableLoader(run, seed=1, lanes=lanes, workers=sp.Workers(workers, start_method=method))
    return Loader(iter(loader), use, loader.close, warm=2 * buffer)


def own_json(sample: Any) -> Any:
    """What a JSON sample becomes by its own method, which is faster."""
    return sample.json()


def nothing(sample: Any) -> int:
    """An item that costs nothing."""
    return 7


def filled(items: list[Any]) -> Any:
    """A batch of 9.6 MB that is only filled."""
    import torch

    return sp.empty((64, 3, 224, 224), torch.uint8).fill_(7)


def small_batch(items: list[Any]) -> Any:
    """Ignore the items and return the same batch of 10 kB."""
    import torch

    return torch.full((10_000,), 7, dtype=torch.uint8)


def slept(items: list[Any]) -> int:
    """A batch that takes 40 ms and no processor."""
    time.sleep(0.04)
    return 1


def imported(items: list[Any]) -> list[str]:
    """What the process that makes the batch has imported."""
    return sorted(sys.modules)


# Runs whose memory is measured.


def _loaded(run: Any, workers: int, rank: int, ranks: int, method: str) -> Iterator[Any]:
    how = sp.Workers(prefetch=2, start_method=method)  # as many ahead as the others make
    return iter(sp.SavableLoader(run, seed=1, num_workers=workers, ranks=(rank, ranks), workers=how))


def compared(folder: Path, workers: int, rank: int, ranks: int, method: str) -> Iterator[Any]:
    """What the peers do too; lanes share the buffer, so it is as large as those of all processes that read."""
    encoder, buffer = FunctionEncoder(decode_json, collecting), BUFFER * max(1, workers) * ranks
    return _loaded(partial(pipeline, str(folder), encoder, BATCH, buffer), workers, rank, ranks, method)


def looked_up(folder: Path, *where: Any) -> Iterator[Any]:
    """Samples that are only looked up in the index: order and index are all that costs."""
    return _loaded(partial(pipeline, str(folder), FunctionEncoder(_offset, collecting), BATCH, 0), *where)


def _offset(sample: Any) -> int:
    return int(sample.offset)


def blended(sources: int, folder: Path, *where: Any) -> Iterator[Any]:
    """A blend of the first shards of a folder, each a source with a reader of its own in each lane."""
    tars = sorted(str(tar) for tar in folder.glob("*.tar"))[:sources]
    return _loaded(partial(_blend, tars, FunctionEncoder(decode_json, collecting)), *where)


def _blend(tars: list[str], encoder: sp.TaskEncoder, lane: sp.Lane) -> custom.Stage:
    sources: dict[str, custom.SampleStage] = {Path(tar).stem: sp.TarShardReader(tar, lane) for tar in tars}
    return sp.Batcher(sp.Encode(sp.Blend(sources), encoder), size=BATCH)


def torch_alone(*where: Any) -> Iterator[Any]:
    """Yield None forever: the memory of a process that has only imported torch."""
    while True:
        yield None


RUNS: dict[str, Callable[..., Iterator[Any]]] = {
    "savable_pipeline": compared,
    "torch alone": torch_alone,
    "samples": looked_up,
    **{f"blend of {sources}": partial(blended, sources) for sources in (1, 35)},
}
