"""Loaders whose memory is compared, each doing the same work with as little as it allows: none imports another.

Each gives batches of `BATCH` dicts of the 64,000 records of JSON of 1 kB, through a shuffle buffer of `BUFFER` samples
in each process that reads. What has no buffer draws from a permutation of all (torch) or of its chunks (LitData).
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

BATCH, BUFFER = 256, 1_000
PREFETCH = 2  # batches a worker makes ahead, the default of all
COLLECTED = 8  # the batch with which a process collects garbage, as each does in a long run
_FOR_EVER = 1 << 40  # samples
_made = 0  # batches, in this process


@dataclass(frozen=True)
class Place:
    """Which of the processes of a run this one is, where its data lie, and how it starts its workers."""

    folder: Path
    workers: int
    rank: int
    ranks: int
    method: str | None  # of multiprocessing; None where nothing is started

    @property
    def options(self) -> dict[str, Any]:
        """Of torch's DataLoader and its subclasses."""
        return {"num_workers": self.workers, "multiprocessing_context": self.method if self.workers else None}


def ours(place: Place) -> Iterator[Any]:
    """Lanes share the buffer, so it is as large as those of all processes that read."""
    from pipelines import FunctionEncoder, decode_json, pipeline

    import savable_pipeline as sp

    buffer = BUFFER * max(1, place.workers) * place.ranks
    run = partial(pipeline, str(place.folder), FunctionEncoder(decode_json, itself), BATCH, buffer)
    loader = sp.SavableLoader(
        run, seed=1, num_workers=place.workers, ranks=(place.rank, place.ranks),
        workers=sp.Workers(prefetch=PREFETCH, start_method=place.method),
    )  # fmt: skip
    yield from loader


def itself(batch: Any) -> Any:
    """What makes a batch, in the process that makes it: once, that process looks through its memory for garbage."""
    global _made
    _made += 1
    if _made == COLLECTED:
        gc.collect()
    return batch


class Offsets:
    """A dataset of torch's: JSON in tars, each read at the offset that the index beside its tar has."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._tars = sorted(str(path) for path in folder.glob("*.tar"))
        self._starts = [np.memmap(f"{tar}.idx", "<u8", "r")[:-1] for tar in self._tars]
        self._ends = np.cumsum([len(starts) for starts in self._starts])
        self._open: dict[int, int] = {}  # descriptors

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        shard = int(self._ends.searchsorted(index, "right"))
        starts = self._starts[shard]
        start = int(starts[index - self._ends[shard] + len(starts)])
        if shard not in self._open:
            self._open[shard] = os.open(self._tars[shard], os.O_RDONLY)
        size = int(os.pread(self._open[shard], 12, start + 124).rstrip(b"\0 "), 8)
        return json.loads(os.pread(self._open[shard], size, start + 512))


def torch_loader(place: Place) -> Iterator[Any]:
    """torch's DataLoader over offsets: nothing is held but the order."""
    from torch.utils.data import DataLoader, RandomSampler

    dataset = Offsets(place.folder)
    order = RandomSampler(dataset, replacement=True, num_samples=_FOR_EVER)
    return iter(DataLoader(dataset, BATCH, sampler=order, collate_fn=itself, **place.options))  # type: ignore[arg-type]


def web_dataset(place: Place) -> Iterator[Any]:
    """webdataset's pipeline in torch's DataLoader."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    tars = sorted(str(path) for path in place.folder.glob("*.tar"))[place.rank :: place.ranks]
    dataset = wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False).repeat().shuffle(BUFFER)
    return iter(DataLoader(dataset.map(decode).batched(BATCH, collation_fn=itself), batch_size=None, **place.options))


def decode(sample: Any) -> Any:
    """A sample of webdataset's as a dict."""
    return json.loads(sample["json"])


def energon(place: Place) -> Iterator[Any]:
    """Megatron-Energon, which decodes JSON itself."""
    from peer_energon import energon as made

    return made(
        place.folder, size=BATCH, buffer=BUFFER, workers=place.workers, rank=place.rank, world_size=place.ranks,
        collate=itself,
    )  # fmt: skip


def hf_datasets(place: Place) -> Iterator[Any]:
    """Parquet, streamed by HF datasets in torch's DataLoader."""
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    files = sorted(str(path) for path in place.folder.glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = split_dataset_by_node(rows, place.rank, place.ranks).repeat(None).shuffle(seed=1, buffer_size=BUFFER)
    return iter(DataLoader(rows, BATCH, collate_fn=itself, **place.options))


def litdata(place: Place) -> Iterator[Any]:
    """LitData's loader over its own chunks, each rank over all of them."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(place.folder), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=itself, **place.options)
    while True:
        yield from loader


# The data that each reads, and what makes its batches.
LOADERS: dict[str, tuple[str, Callable[[Place], Iterator[Any]]]] = {
    "savable_pipeline": ("few-json", ours),
    "torch DataLoader": ("few-json", torch_loader),
    "webdataset": ("few-json", web_dataset),
    "Energon": ("few-json", energon),
    "HF datasets": ("few-parquet", hf_datasets),
    "LitData": ("few-litdata", litdata),
}
