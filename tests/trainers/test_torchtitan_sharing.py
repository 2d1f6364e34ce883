"""torchtitan's dataloader shares one decode among processes of a data-parallel rank, by a stand-in for torchtitan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.conftest import MakeShards
from tests.support.peer_threads import unshared_loader
from tests.support.streams import next_hashes


def test_processes_of_one_data_parallel_rank_share_its_batches(make_shards: MakeShards, tmp_path: Path) -> None:
    shards = make_shards([40, 40, 40])
    words = ["-m", "tests.support.forked_ranks", "tests.support.toy_titan", "4", str(tmp_path), str(shards)]
    subprocess.run([sys.executable, *words], check=True, timeout=200)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    expected = next_hashes(unshared_loader(shards), 12)
    assert [each["batches"] for each in seen] == [expected[::2], expected[1::2]] * 2
    assert [each["workers"] for each in seen] == [1, 1, 0, 0]
    assert seen[0]["state"] == seen[2]["state"] != seen[1]["state"] == seen[3]["state"]
