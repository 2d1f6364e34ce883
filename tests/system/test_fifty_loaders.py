"""Of fifty loaders that were closed nothing stays open, nor in memory: neither descriptors nor stores."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores.record_store import FileStore
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.data.stores.tar_store import TarStore
from tests.support.toy_stores import WRITERS

READERS: dict[str, Callable[..., custom.Stage]] = {
    "tar": sp.TarShardReader,
    "parquet": custom.ParquetReader,
    "arrow": custom.ArrowReader,
    "jsonl": custom.JsonlReader,
    "tokens": partial(custom.TokenReader, length=3),
}


class Sizes(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return len(sample[list(sample)[-1]])


def alone(kind: str, folder: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(READERS[kind](str(folder), lane), Sizes()), size=2)


def joined(kind: str, folder: Path, lane: sp.Lane) -> custom.Stage:
    samples = custom.Join(READERS[kind](str(folder), lane), {"other": str(folder)})
    return sp.Batcher(sp.Encode(samples, Sizes()), size=2)


def held() -> tuple[int, int]:
    """The descriptors of this process, and the stores and their files in its memory."""
    gc.collect()
    stores = sum(isinstance(one, FileStore | TarStore | ShardFiles) for one in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), stores  # noqa: PTH208  # it is counted only


def use(pipeline: Callable[[sp.Lane], custom.Stage], loaders: int) -> None:
    for _ in range(loaders):
        with sp.SavableLoader(pipeline, seed=0, lanes=2) as loader:
            for _ in range(20):
                next(loader)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("kind", "make"), [*((kind, alone) for kind in READERS), *((kind, joined) for kind in READERS if kind != "tokens")]
)
def test_fifty_closed_loaders_leave_nothing(tmp_path: Path, kind: str, make: Any) -> None:
    WRITERS[kind](tmp_path / "data", [12, 9])
    pipeline = partial(make, kind, tmp_path / "data")
    use(pipeline, 1)  # indexes, and imports what it needs
    before = held()
    use(pipeline, 50)
    assert held() <= before


@pytest.mark.parametrize("kind", READERS)
def test_files_of_a_closed_loader_are_closed_without_garbage_collection(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path / "data", [12, 9])
    pipeline = partial(alone, kind, tmp_path / "data")
    use(pipeline, 1)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # it is counted only
    gc.disable()
    try:
        use(pipeline, 5)
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208  # it is counted only
    finally:
        gc.enable()
