"""Four processes, two data-parallel ranks of two peers: who gets what, who saves, and what a checkpoint holds."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.run.state.state_dict import lane_numbers
from tests.support.shards import write_tar
from tests.support.streams import next_hashes
from tests.support.toy_mesh import AFTER, SETTINGS, STEPS, packed_pipeline

LAYOUTS = ("tp", "pp", "cp")
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "tests.support.toy_mesh"]
STARTS = {"forked": ["tests.support.forked_ranks", "tests.support.toy_mesh", "4"], "torchrun": TORCHRUN}


@pytest.fixture(scope="module", params=["forked", pytest.param("torchrun", marks=pytest.mark.long)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder, and what each process saw, by layout."""
    folder = tmp_path_factory.mktemp(request.param)
    for shard in range(3):
        texts = [(f"{i}.txt", f"{i} of {shard}{' and more' * (i % 3)}".encode()) for i in range(40)]
        write_tar(folder / f"shards/{shard}.tar", texts)
    how = "mesh" if request.param == "torchrun" else "groups"
    command = [sys.executable, "-m", *STARTS[request.param], str(folder / "shards"), str(folder), how, *LAYOUTS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return folder, {
        layout: [torch.load(folder / f"{layout}_{process}.pt") for process in range(4)] for layout in LAYOUTS
    }


def single_loader(folder: Path, **settings: Any) -> sp.SavableLoader:
    """Return a loader of one process."""
    return sp.SavableLoader(partial(packed_pipeline, str(folder / "shards"), **settings), **SETTINGS)


def in_slots(processes: list[dict[str, Any]], what: str) -> list[str]:
    """Return what the first peer of each data-parallel rank saw, in the order of the slots."""
    first = [seen[what] for seen in processes if seen["peer"] == 0]
    return [batch for step in zip(*first, strict=True) for batch in step]


def resumed_from(loader: sp.SavableLoader, checkpoint: Path) -> sp.SavableLoader:
    """Return the loader, resumed from a checkpoint of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    with redirect_stderr(io.StringIO()), pytest.warns(UserWarning, match="single process"):
        dcp.load({"data": loader}, checkpoint_id=checkpoint)
    return loader


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peers_get_equal_batches_and_data_parallel_ranks_share_slots(runs: Any, layout: str) -> None:
    folder, seen = runs
    processes = seen[layout]
    assert [process["peer"] for process in processes] == [0, 1, 0, 1]
    for left, right in (processes[:2], processes[2:]):
        assert all(left[what] == right[what] for what in ("before", "after", "state"))
    assert processes[0]["before"] != processes[2]["before"]
    assert in_slots(processes, "before") + in_slots(processes, "after") == next_hashes(
        single_loader(folder), 2 * (STEPS + AFTER)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_process_has_the_global_state_and_one_rank_resumes_it(runs: Any, layout: str) -> None:
    folder, seen = runs
    one = single_loader(folder)
    next_hashes(one, 2 * STEPS)
    assert [process["global"] for process in seen[layout]] == [one.state_dict()] * 4
    assert [lane_numbers(process["state"]) for process in seen[layout]] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert next_hashes(one, 2 * AFTER) == in_slots(seen[layout], "after")
    if (checkpoint := folder / f"checkpoint_{layout}").exists():
        assert next_hashes(resumed_from(single_loader(folder), checkpoint), 2 * AFTER) == in_slots(
            seen[layout], "after"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epoch_ends_on_all_processes_and_pipeline_stages_without_data_need_no_loader(runs: Any, layout: str) -> None:
    folder, seen = runs
    expected = next_hashes(single_loader(folder, epochs=1), 1000)
    found = in_slots(seen[layout], "epoch")
    assert found == expected[: len(found)] and len(expected) - len(found) in (0, 1) and len(found) > 20
    others = [process["epoch"] for process in seen[layout] if process["peer"] == 1]
    assert others == [None, None] if layout == "pp" else others == [seen[layout][i]["epoch"] for i in (0, 2)]


def test_parts_of_context_parallel_ranks_join_to_the_batch(runs: Any) -> None:
    _, seen = runs
    assert all(process["joined"] == process["after"] for process in seen["cp"])
