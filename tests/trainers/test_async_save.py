"""`torch.distributed.checkpoint.async_save` while the loader goes on: the checkpoint is of the moment of the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import savable_pipeline as sp
from tests.conftest import MakeShards
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline


class SlowWriter(dcp.FileSystemWriter):
    """Writer that waits until it may write."""

    def __init__(self, path: Path, may_write: threading.Event) -> None:
        super().__init__(path)
        self.may_write = may_write

    def write_data(self, *arguments: Any) -> Any:
        assert self.may_write.wait(30)
        return super().write_data(*arguments)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("one_rank")
def test_async_checkpoint_has_the_state_at_its_call(make_shards: MakeShards, tmp_path: Path, workers: int) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([20, 7, 30])))
    make = partial(sp.SavableLoader, pipeline, seed=3, lanes=4)
    expected = next_hashes(make(), 17)
    may_write = threading.Event()
    with make(num_workers=workers) as loader:
        next_hashes(loader, 5)
        saving: Any = dcp.async_save({"data": loader}, storage_writer=SlowWriter(tmp_path / "run", may_write))
        assert next_hashes(loader, 6) == expected[5:11]  # the buffers, packs and counters that were saved have moved on
        assert not saving.done()
        may_write.set()
        saving.result(timeout=30)
    with make(num_workers=workers) as again:
        dcp.load({"data": again}, checkpoint_id=tmp_path / "run")
        assert again.state_dict()["slot"] == 5
        assert next_hashes(again, 12) == expected[5:]
