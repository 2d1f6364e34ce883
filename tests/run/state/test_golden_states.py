"""States of pipelines whose state and order are pinned: each goes on exactly as it did when it was written.

`golden/states.pt` is written again, by `python -m tests.run.state.test_golden_states`, where `ORDER` or `STATE`
changes; with the same `ORDER` the batches after each state must stay what they are in it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from xxhash import xxh3_64_hexdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.state_numbers import ORDER
from savable_pipeline.run.state.state_dict import read_lanes
from tests.conftest import write_tar

GOLDEN = Path(__file__).parent / "golden" / "states.pt"


class GoldenEncoder(sp.TaskEncoder):
    """Skips, fans out and draws, all by numbers that never change."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = int(sample.json()["id"])
        if number % 11 == 0:
            return sp.Skip("eleventh")
        return self._parts(number, rng) if number % 5 == 0 else (number, rng.integers(1000))

    def _parts(self, number: int, rng: sp.Rng) -> Iterator[tuple[int, int]]:
        for _ in range(3):
            yield number, rng.integers(1000)

    def length(self, item: Any) -> int:
        return 1 + int(item[0]) % 7

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(1000), *items]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [rng.integers(1000), *items]


def golden_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    reader = sp.TarShardReader(str(shards), lane, block_size=4, window=2)
    lane.rng("golden").random()
    items = sp.Encode(sp.ShuffleBuffer(reader, size=12), GoldenEncoder())
    return sp.Batcher(sp.OnlinePacker(items, max_length=15, open_packs=3), size=2)


def finite_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(str(shards), lane, epochs=1), GoldenEncoder()), size=3)


def file_order_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(str(shards), lane, shuffle=False), GoldenEncoder()), size=3)


def blended_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    readers = {name: sp.TarShardReader(str(shards / f"{name}.tar"), lane) for name in ("0", "3")}
    return sp.Batcher(sp.Encode(sp.Blend(readers, weights={"0": 7, "3": 3}), GoldenEncoder()), size=3)


def decreasing_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    items = sp.Encode(sp.TarShardReader(str(shards), lane), GoldenEncoder())
    packs = sp.OnlinePacker(items, max_length=15, policy="first_fit_decreasing", open_packs=2)
    return sp.Batcher(packs, size=2)


def part(shards: Path, lane: sp.Lane, **how: Any) -> sp.TarShardReader:
    return sp.TarShardReader(shards, lane, **{"subset": (0.2, 0.7), "block_size": 2, **how})


def subset_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(part(shards, lane), size=5), GoldenEncoder()), size=2)


def finite_subset_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(part(shards, lane, epochs=1), GoldenEncoder()), size=2)


def counted_subset_pipeline(shards: Path, lane: sp.Lane) -> custom.Stage:
    counted = part(shards, lane, subset=50, shuffle=False, block_size=None)
    return sp.Batcher(sp.Encode(counted, GoldenEncoder()), size=1)


PIPELINES: dict[str, Callable[[Path, sp.Lane], custom.Stage]] = {
    "packed": golden_pipeline,
    "finite": finite_pipeline,
    "file order": file_order_pipeline,
    "blended": blended_pipeline,
    "decreasing": decreasing_pipeline,
    "subset": subset_pipeline,
    "finite subset": finite_subset_pipeline,
    "counted subset": counted_subset_pipeline,
}


def golden_loader(folder: Path, name: str) -> sp.SavableLoader:
    """The run of a golden state: five shards, six lanes."""
    for shard, size in enumerate([30, 1, 25, 40, 12]):
        members = [(f"{n:03d}.json", b'{"id": %d}' % (100 * shard + n)) for n in range(size)]
        write_tar(folder / f"{shard}.tar", members)
    return sp.SavableLoader(partial(PIPELINES[name], folder), seed=7, lanes=6)


def next_digests(loader: sp.SavableLoader, n: int) -> list[str]:
    """Of the next batches, all integers, through the ends of epochs."""
    found: list[str] = []
    while len(found) < n:
        batches = zip(range(n - len(found)), loader, strict=False)
        found += [xxh3_64_hexdigest(repr(batch).encode()) for _, batch in batches]
    return found


def written(name: str) -> dict[str, Any]:
    """The state of a pipeline after 5 batches, or 20 of packs, and the digests of the next 40."""
    with tempfile.TemporaryDirectory() as folder, golden_loader(Path(folder), name) as loader:
        next_digests(loader, 20 if name == "packed" else 5)
        return {"data": loader.state_dict(), "next": next_digests(loader, 40)}


def write_golden() -> None:
    """Write all golden states again."""
    made = {name: written(name) for name in PIPELINES}
    for name, before in (torch.load(GOLDEN, weights_only=True) if GOLDEN.exists() else {}).items():
        if before["data"]["order"] == ORDER and before["next"] != made[name]["next"]:
            sys.exit(f"{name}: other batches than before, but the same ORDER")
    torch.save(made, GOLDEN)


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    found: dict[str, Any] = torch.load(GOLDEN, weights_only=True)
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_golden_state_resumes_exactly(tmp_path: Path, saved: dict[str, Any], name: str) -> None:
    with golden_loader(tmp_path, name) as loader:
        loader.load_state_dict(saved[name]["data"])
        assert next_digests(loader, 40) == saved[name]["next"]


@pytest.mark.parametrize("name", PIPELINES)
def test_this_release_writes_the_golden_states(saved: dict[str, Any], name: str) -> None:
    again, golden = written(name), saved[name]
    assert again["next"] == golden["next"]
    assert {**again["data"], "fingerprint": 0} == {**golden["data"], "fingerprint": 0}  # it names library versions


def test_golden_run_has_half_full_buffers_and_an_interrupted_fan_out(saved: dict[str, Any]) -> None:
    lanes = read_lanes(saved["packed"]["data"], range(6))
    stages = [state.stages for state in lanes.values() if state.stages]
    assert any(stage["source"]["packs"] for stage in stages)
    assert any(stage["source"]["source"]["part"] for stage in stages)
    assert all(stage["source"]["source"]["source"]["refs"] for stage in stages)


def test_golden_states_are_small() -> None:
    assert GOLDEN.stat().st_size < 80_000


if __name__ == "__main__":
    write_golden()
