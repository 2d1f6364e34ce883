"""The other loaders, each in its fastest form, giving batches of what `decode` makes of a sample's parts.

    webdataset, StatefulDataLoader   tars, read through; with `workers` in torch's DataLoader
    torch DataLoader                 records already in memory, which no loader of tars can have
    HF datasets                      parquet, streamed
    Grain                            processes; reads the tars at offsets that our index knows
    spdl                             threads of this process; reads as Grain does
    Megatron-Energon                 tars with its metadata

Each import comes where it is used: a peer that is not installed is left out. What costs all of them the same, such as
the order of samples, is as random as each makes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pipelines import Collate, Decode
from torch.utils.data import DataLoader, RandomSampler

import savable_pipeline as sp

_FOR_EVER = 1 << 40  # samples


def web_dataset(folder: Path, decode: Decode, collate: Collate, *, size: int, buffer: int, workers: int) -> Any:
    """webdataset's own pipeline."""
    dataset = _web_dataset(folder, decode, collate, size, buffer)
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers) if workers else dataset)


def _web_dataset(folder: Path, decode: Decode, collate: Collate, size: int, buffer: int) -> Any:
    import webdataset as wds

    shards = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).repeat()
    if buffer:
        dataset = dataset.shuffle(buffer)
    return dataset.map(decode).batched(size, collation_fn=collate)


def stateful_dataloader(folder: Path, decode: Decode, collate: Collate, *, size: int, buffer: int, workers: int) -> Any:
    """torchdata's loader over webdataset's pipeline: what people combine it with for tars."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = _web_dataset(folder, decode, collate, size, buffer)
    return iter(StatefulDataLoader(dataset, batch_size=None, collate_fn=_itself, num_workers=workers))


def _itself(batch: Any) -> Any:
    return batch


def in_memory(records: list[Any], decode: Decode, collate: Collate, *, size: int, workers: int) -> Iterator[Any]:
    """torch's DataLoader over records in memory."""
    dataset = _InMemory(records, decode)
    order = RandomSampler(dataset, replacement=True, num_samples=_FOR_EVER)
    return iter(DataLoader(dataset, size, sampler=order, collate_fn=collate, num_workers=workers))  # type: ignore[arg-type]


class _InMemory:
    def __init__(self, records: list[Any], decode: Decode) -> None:
        self._records = records
        self._decode = decode

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._records[index])


def hf_datasets(folder: Path, *, size: int, buffer: int, workers: int) -> Iterator[Any]:
    """Parquet, whose columns need no decoding, streamed through a shuffle buffer; batches are lists of rows."""
    import datasets

    files = sorted(str(path) for path in folder.glob("*.parquet"))
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = rows.repeat(None).shuffle(seed=1, buffer_size=buffer)
    return iter(DataLoader(rows, size, collate_fn=_itself, num_workers=workers))


class _Tars:
    """One part of the samples of some tars, each read at its offset. Pickles as its folder."""

    def __init__(self, folder: Path, part: str) -> None:
        self._folder = folder
        self._part = part
        self._dataset = sp.TarShardReader(str(folder), sp.Lane()).dataset

    def __len__(self) -> int:
        return self._dataset.count

    def __getitem__(self, index: int) -> Any:
        shards, rows = self._dataset.locate(np.array([index]))
        return {self._part: self._dataset.read(int(shards[0]), int(rows[0]), self._part)}

    def __reduce__(self) -> Any:
        return _Tars, (self._folder, self._part)


def grain_processes(
    folder: Path, part: str, decode: Decode, collate: Collate, *, size: int, workers: int
) -> Iterator[Any]:
    """Grain with worker processes; numpy arrays come through its shared memory."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    samples = grain.MapDataset.source(_Tars(folder, part)).shuffle(seed=1).repeat().map(decode)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    batches = samples.to_iter_dataset(reading).batch(size, batch_fn=collate)
    return iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)))


class Threads:
    """spdl with threads, each making whole batches."""

    def __init__(self, folder: Path, part: str, decode: Decode, collate: Collate, *, size: int, threads: int) -> None:
        from spdl.pipeline import PipelineBuilder

        tars = _Tars(folder, part)

        def order() -> Iterator[list[int]]:
            for epoch in range(_FOR_EVER):
                shuffled = np.random.default_rng(epoch).permutation(len(tars)).tolist()
                yield from (shuffled[i : i + size] for i in range(0, len(tars) - size, size))

        def make(indices: list[int]) -> Any:
            return collate([decode(tars[index]) for index in indices])

        building = PipelineBuilder().add_source(order()).pipe(make, concurrency=threads).add_sink(4)
        self._pipeline = building.build(num_threads=threads)
        self._pipeline.start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pipeline)

    def close(self) -> None:
        """End the threads."""
        self._pipeline.stop()
