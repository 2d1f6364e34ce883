"""Which samples a `subset` draws: the same of a shard in any format, and for a run that was begun before, as it was.

`golden/subsets.pt` was written by the last release that drew them by a shard's whole name, with its ending (order 1),
by `python -m tests.run.state.test_subset_order`. It is never written again.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.selection import without_ending
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.run.loader.made_again import make_again
from savable_pipeline.run.state.lane_state import LaneState, unpack_state
from savable_pipeline.run.state.state_dict import lane_name
from savable_pipeline.trainers.elastic import complete_state
from tests.conftest import write_tar

SUBSETS = Path(__file__).parent / "golden" / "subsets.pt"
LANES = 6


def written(folder: Path) -> Path:
    for shard, size in enumerate([30, 1, 25, 40, 12]):
        members = [(f"{100 * shard + n:03d}.json", b'{"id": %d}' % (100 * shard + n)) for n in range(size)]
        write_tar(folder / "a" / f"{shard}.tar", members)
    return folder


def part(folder: Path, lane: sp.Lane, **how: Any) -> sp.TarShardReader:
    return sp.TarShardReader(folder, lane, **{"subset": (0.2, 0.7), "block_size": 2, **how})


def endless(folder: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.ShuffleBuffer(part(folder, lane), size=5), size=2)


def finite(folder: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(part(folder, lane, epochs=1), size=2)


def counted(folder: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(part(folder, lane, subset=50, shuffle=False, block_size=None), size=1)


def blended(folder: Path, lane: sp.Lane) -> custom.Stage:
    sources = {"a": part(folder, lane), "b": sp.TarShardReader(folder, lane)}
    return sp.Batcher(sp.Blend(sources, weights={"a": 2, "b": 1}), size=2)


PIPELINES: dict[str, Callable[[Path, sp.Lane], custom.Stage]] = {
    "endless": endless,
    "finite": finite,
    "counted": counted,
    "blended": blended,
}
STEPS = (0, 2, 20)


def loader(folder: Path, name: str, num_workers: int = 0, **more: Any) -> sp.SavableLoader:
    pipeline = partial(PIPELINES[name], folder)
    return sp.SavableLoader(pipeline, seed=7, lanes=LANES, num_workers=num_workers, **more)


def keys(own: sp.SavableLoader, batches: int) -> list[list[str]]:
    """The keys in the next batches, through the ends of epochs."""
    found: list[list[str]] = []
    while len(found) < batches:
        found += [[sample.key for sample in batch] for batch in islice(own, batches - len(found))]
    return found


def write_subsets() -> None:
    """The state of each pipeline after some batches, and the keys in the next 60."""
    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PIPELINES:
            for steps in STEPS:
                with loader(written(Path(folder)), name) as own:
                    keys(own, steps)
                    state = own.state_dict()
                    kept[f"{name} {steps}"] = {"data": state, "next": keys(own, 60)}
    torch.save(kept, SUBSETS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    found: dict[str, Any] = torch.load(SUBSETS, weights_only=True)
    return found


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_of_order_one_goes_on_with_its_samples_through_many_resumes(
    folder: Path, saved: dict[str, Any], name: str, steps: int
) -> None:
    """Into later epochs, by lanes that had given nothing, and by a loader that gave other batches before."""
    state, expected = (saved[f"{name} {steps}"][part] for part in ("data", "next"))
    found: list[list[str]] = []
    with loader(folder, name) as own:
        fresh = keys(own, 3)
        for more in (1, 4, 9, 46):
            own.load_state_dict(state)
            found += keys(own, more)
            state = own.state_dict()
            with loader(folder, name) as other:
                other.load_state_dict(state)
                assert keys(other, 3) == (expected + keys(own, 3))[len(found) :][:3]
        assert found == expected
        assert steps or fresh != expected[:3], "a new run draws otherwise"


def test_workers_and_ranks_go_on_with_them_too(folder: Path, saved: dict[str, Any]) -> None:
    state, expected = saved["endless 2"]["data"], saved["endless 2"]["next"]
    with loader(folder, "endless", num_workers=2) as own:
        own.load_state_dict(state)
        assert keys(own, 60) == expected
    ranks = [loader(folder, "endless", ranks=(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [batch for _ in range(30) for rank in ranks for batch in keys(rank, 1)] == expected


def test_a_state_that_is_refused_leaves_the_new_draw(folder: Path, saved: dict[str, Any]) -> None:
    with loader(folder, "endless") as own, loader(folder, "endless") as other:
        with pytest.raises(sp.CheckpointMismatchError, match="Batcher"):
            own.load_state_dict(saved["counted 2"]["data"])
        assert own.state_dict() == other.state_dict() and keys(own, 60) == keys(other, 60)


@pytest.mark.parametrize("name", ["endless", "blended", "counted"])
def test_a_lane_restored_by_hand_reads_as_it_was_saved(folder: Path, saved: dict[str, Any], name: str) -> None:
    state, expected = saved[f"{name} 20"]["data"], saved[f"{name} 20"]["next"]
    stage = PIPELINES[name](folder, sp.Lane(2, LANES, 7))
    stage.restore_state(unpack_state(state[lane_name(2)], LaneState, "").stages or {})
    assert [[sample.key for sample in next(stage)] for _ in range(10)] == expected[::LANES]


@pytest.mark.parametrize("steps", [0, 2])
def test_lanes_of_a_dead_rank_pass_over_the_same_samples(folder: Path, saved: dict[str, Any], steps: int) -> None:
    last, expected = saved[f"endless {steps}"]["data"], saved[f"endless {steps}"]["next"]
    with loader(folder, "endless", ranks=(0, 2)) as survivor:
        survivor.load_state_dict(last)
        keys(survivor, 8)
        state = complete_state(survivor, [survivor.state_dict()], last)
    with loader(folder, "endless") as own:
        own.load_state_dict(state)
        assert keys(own, 40) == expected[16:56]


def test_a_dataset_for_torchdata_goes_on_with_them_in_later_epochs(folder: Path, saved: dict[str, Any]) -> None:
    """Also a copy of it that shares its memory, as the workers of the next epoch have."""
    data = sp.StatefulDataset(partial(finite, folder), seed=7, lanes=LANES)
    later = copy.copy(data)
    data.load_state_dict({"shares": 1, "iteration": 0, **saved["finite 2"]["data"]})
    found = [[sample.key for sample in batch] for batch in rest_of(data)]
    for passes in (data, later):
        found += [[sample.key for sample in batch] for batch in rest_of(iter(passes))]
    assert len(found) == 22 + 24 + 24 and found[:60] == saved["finite 2"]["next"]


def rest_of(batches: Any) -> list[Any]:
    found = []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(next(batches))
    return found


def test_a_batch_of_such_a_run_is_made_again_from_its_ledger(
    folder: Path, saved: dict[str, Any], tmp_path: Path
) -> None:
    with loader(folder, "endless", ledger=tmp_path) as own:
        own.load_state_dict(saved["endless 2"]["data"])
        given = keys(own, 30)
    for slot in (2, 5, 20, 31):
        made = make_again(partial(endless, folder), LedgerFiles(tmp_path), 0, slot)
        assert [sample.key for sample in made.batch] == given[slot - 2]


ROWS = {"a/train.001": 40, "a/train.002": 25, "b.x/0": 30}


def write_kind(folder: Path, kind: str) -> None:
    """The same rows in files of the same names, but for the ending."""
    for name, rows in ROWS.items():
        path = folder / f"{name}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        named = [f"{name}-{row:02d}" for row in range(rows)]
        table = pa.table({"id": named})
        if kind == "tar":
            write_tar(path, [(f"{row:02d}.id", key.encode()) for row, key in enumerate(named)])
        elif kind == "parquet":
            pq.write_table(table, path)
        elif kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        else:
            path.write_text("".join(f'{{"id": "{key}"}}\n' for key in named))


@pytest.mark.parametrize("subset", [0.3, (0.5, 0.75), 17])
def test_the_same_shards_in_any_format_have_the_same_subset(tmp_path: Path, subset: Any) -> None:
    readers = {
        "tar": sp.TarShardReader,
        "parquet": custom.ParquetReader,
        "arrow": custom.ArrowReader,
        "jsonl": custom.JsonlReader,
        "ndjson": custom.JsonlReader,
    }
    found = {}
    for kind, reader in readers.items():
        write_kind(tmp_path / kind, kind)
        samples = reader(tmp_path / kind, sp.Lane(), subset=subset, shuffle=False, epochs=1)  # type: ignore[operator]
        found[kind] = [sample["id"].decode() for sample in samples]
    assert len(found["tar"]) in (17, *range(23, 32))
    assert all(keys == found["tar"] for keys in found.values()), found


@pytest.mark.parametrize(
    ("name", "endings", "expected"),
    [
        ("a/train.001.tar", (".tar",), "a/train.001"),
        ("train.001.tar.gz", (".tar", ".tar.gz"), "train.001"),
        ("x.jsonl.gz", (".jsonl", ".jsonl.gz"), "x"),
        ("x.jsonl.gz", (".jsonl",), "x.jsonl.gz"),
        ("a.tar/b", (".tar",), "a.tar/b"),
        ("all", (), "all"),
    ],
)
def test_an_ending_is_that_of_the_format(name: str, endings: tuple[str, ...], expected: str) -> None:
    assert without_ending(name, endings) == expected


@pytest.mark.parametrize(("saved_order", "here"), [(1, 2), (2, 1)])
def test_a_reader_says_how_it_draws_where_it_has_a_subset(folder: Path, saved_order: int, here: int) -> None:
    """Both ways: what was saved decides, and a state of a later release is refused."""
    made = {order: part(folder, sp.Lane(subset_order=order), epochs=1) for order in (saved_order, here)}
    assert [("subset_order" in one.settings()) for one in made.values()] == [order > 1 for order in made]
    assert "subset_order" not in part(folder, sp.Lane(), subset=None).settings()
    next(made[saved_order])
    made[here].restore_state(made[saved_order].save_state())
    assert [sample.key for sample in made[here]] == [sample.key for sample in made[saved_order]]
    with pytest.raises(sp.CheckpointMismatchError, match="subset_order"):
        made[here].restore_state({**made[here].save_state(), "subset_order": 3})


if __name__ == "__main__":
    write_subsets()
