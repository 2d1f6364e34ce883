"""What `stats()` says of samples, bytes, sources and times."""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.stats import Recent, Stats
from tests.support.streams import next_hashes
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import toy_pipeline


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 4, "num_workers": num_workers, **settings})


@pytest.mark.parametrize(("num_workers", "pack"), [(0, None), (2, "best_fit")])
def test_samples_counts_those_in_yielded_batches(make_shards: Any, num_workers: int, pack: Any) -> None:
    with loader(partial(toy_pipeline, str(make_shards([60])), pack=pack), num_workers) as own:
        expected = 0
        for _, _batch in zip(range(20), own, strict=False):
            expected += len(own.trace().samples)
        found = own.stats()
    assert found["samples"] == expected >= 40
    assert found.get("tokens") == found.get("OnlinePacker/tokens")
    assert ("tokens" in found) == (pack is not None)


class Pairs(custom.BatchStage):
    """Batches of two samples; their refs have no number."""

    ref: Any = ()

    def __next__(self) -> Any:
        pair = [(sample.key, self.source.ref) for _, sample in zip(range(2), self.source, strict=False)]
        keys, self.ref = zip(*pair, strict=True)
        return list(keys)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_a_users_batch_stage_are_counted_once(make_shards: Any, num_workers: int) -> None:
    root = str(make_shards([40]))
    with loader(lambda lane: Pairs(sp.TarShardReader(root, lane)), num_workers) as own:
        assert len(next_hashes(own, 7)) == 7
        assert own.stats()["samples"] == 14


class Numbers(sp.TaskEncoder):
    """Numbers of samples; skips odd ones, if told so."""

    def __init__(self, *, even: bool) -> None:
        self.even = even

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return sp.Skip("odd") if self.even and number % 2 else number

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"number": torch.tensor(items)}


def blended(folder: str, lane: sp.Lane, *, first: bool) -> custom.Stage:
    """Two sources, blended before the encoder, or after those of each."""
    sources = {name: sp.TarShardReader(folder, lane) for name in ("a", "b")}
    if first:
        return sp.Batcher(sp.Encode(sp.Blend(sources, weights={"a": 3, "b": 1}), Numbers(even=True)), size=4)
    branches = {name: sp.Encode(source, Numbers(even=name == "a")) for name, source in sources.items()}
    return sp.Batcher(sp.Blend(branches, weights={"a": 3, "b": 1}), size=4, encoder=Numbers(even=True))


@pytest.mark.parametrize(("num_workers", "first"), [(0, True), (2, False)])
def test_each_source_has_its_samples_drawn_and_skipped(make_shards: Any, num_workers: int, first: bool) -> None:
    with loader(partial(blended, str(make_shards([40])), first=first), num_workers, sample_ids=True) as own:
        given: Counter[int] = Counter()
        for _, batch in zip(range(24), own, strict=False):
            given.update(batch["sample_ids"][:, 0].tolist())
        found = own.stats()
    assert [found[f"source/{name}/samples"] for name in "ab"] == [given[0], given[1]]
    assert found["samples"] == sum(given.values()) == 96
    assert found["source/a/drawn"] > 2 * found["source/b/drawn"] > 0
    skipped = [found.get(f"source/{name}/skipped", 0) for name in "ab"]
    assert sum(skipped) == found["Encode/skipped/odd"] > 0 and bool(skipped[1]) == first


def test_without_a_blend_stats_have_no_sources(make_shards: Any) -> None:
    own = loader(partial(toy_pipeline, str(make_shards([40]))))
    next_hashes(own, 10)
    assert not [name for name in own.stats() if "source" in name]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bytes_are_those_of_the_parts_that_were_read(make_shards: Any, num_workers: int) -> None:
    """Each sample reads its JSON, of 8 or 9 bytes, and nothing else; 1 batch in 16 is looked at."""
    with loader(partial(number_pipeline, str(make_shards([60]))), num_workers) as own:
        next_hashes(own, 40)
        found = own.stats()
    assert 8 <= found["bytes"] / found["Encode/items"] <= 11


def test_read_time_is_not_counted_as_encode_time(make_shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread

    def slow_pread(*place: int) -> bytes:
        time.sleep(0.02)
        return pread(*place)

    with loader(partial(number_pipeline, str(make_shards([60])), size=20), lanes=1) as own:
        next_hashes(own, 1)
        monkeypatch.setattr(os, "pread", slow_pread)
        next_hashes(own, 16)  # one of these is timed
        found = own.stats()
    assert found["seconds/read"] > 5 * found["seconds/Encode"]


class SlowOnce(NumberEncoder):
    """Takes long for the first sample of the shard 0001."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = super().encode(sample, rng)
        if number == 20:
            time.sleep(0.3)
        return number


@pytest.mark.parametrize("num_workers", [0, 1])
def test_slowest_sample_and_shard_are_reported(make_shards: Any, num_workers: int) -> None:
    pipeline = partial(number_pipeline, str(make_shards([20, 20])), encoder=SlowOnce(), size=40)
    with loader(pipeline, num_workers, lanes=1) as own:
        next_hashes(own, 2)  # of which the first is timed
        found, names = own.stats(), own._run.observer(Stats).names()  # type: ignore[union-attr]
    assert 0.3 <= found["slowest_sample_s"] < 30 and found["slowest_shard_s"] >= 0.3 / 20
    assert names["slowest_sample_s"].endswith(".tar, sample 20")
    assert names["slowest_shard_s"] == names["slowest_sample_s"].split(",")[0] != "0.tar"


def test_percentiles_are_of_recent_values() -> None:
    series = Recent(count=100)
    for number in range(1000, 0, -1):
        series.add(float(number))
    assert dict(series.percentiles("wait")) == {"wait/p50": 50, "wait/p90": 90, "wait/p99": 99}
    assert not dict(Recent().percentiles("wait"))


def test_waits_and_stages_have_percentiles(make_shards: Any) -> None:
    own = loader(partial(toy_pipeline, str(make_shards([40]))))
    next_hashes(own, 20)
    found = own.stats()
    for name in ("wait_s", "making_s", "stage_s/Encode", "stage_s/TarShardReader"):
        assert 0 < found[f"{name}/p50"] <= found[f"{name}/p90"] <= found[f"{name}/p99"]
    assert found["wait_s/p99"] <= found["wait_s"]
