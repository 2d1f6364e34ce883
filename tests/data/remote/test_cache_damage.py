"""Whatever becomes of the bytes of the cache, a run sees the batches of the shards on a disk.

Where an index in the cache is damaged, it may end with an error first, and the same run started again sees them.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.conftest import write_numbered_shards
from tests.support.toy_server import ToyServer, serving_a_machine

pytestmark = pytest.mark.timeout(120)  # beyond which it hangs
SAMPLES = 60


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    with serving_a_machine(tmp_path, monkeypatch) as server:
        write_numbered_shards(tmp_path / "www" / "tars", [20] * 3, pad="x" * 900)
        folder = tmp_path / "www" / "tables"
        folder.mkdir()
        for shard in range(3):
            rows = [json.dumps({"id": 20 * shard + i, "pad": os.urandom(600).hex()}) for i in range(20)]
            pq.write_table(pa.table({"json": rows}), folder / f"{shard}.parquet", compression="none", row_group_size=5)
        for name in ("tars", "tables"):
            sp.open_dataset(tmp_path / "www" / name)  # writes the index
        yield server


def batches(url: str) -> list[str]:
    pipeline = sp.read(url, epochs=2).shuffle(10).map(sp.Sample.json).batch(4)
    with sp.SavableLoader(pipeline, seed=5, lanes=4) as loader:
        return [digest(batch) for batch in islice(loader, 100)]


def flip(raw: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 1, 5))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return raw


def zero(raw: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(raw))
    stop = min(len(raw), start + rng.choice((1, 512, 4096, 1 << 20)))
    raw[start:stop] = bytes(stop - start)
    return raw


def cut(raw: bytearray, rng: random.Random) -> bytearray:
    return raw[: rng.randrange(len(raw))]


def empty(raw: bytearray, rng: random.Random) -> bytearray:
    return bytearray()


def damage(cache: Path, seed: int) -> str:
    """Alters one file of the cache, or several; returns what was done."""
    rng, done = random.Random(seed), []
    files = [path for path in sorted(cache.rglob("*")) if path.is_file() and path.stat().st_size]
    kinds = sorted({path.suffix or path.name for path in files})
    for _ in range(rng.choice((1, 1, 3))):
        kind = rng.choice(kinds)
        path, how = rng.choice([each for each in files if (each.suffix or each.name) == kind]), rng.choice(HOW)
        if path.stat().st_size:
            path.write_bytes(how(bytearray(path.read_bytes()), rng))
            done.append(f"{how.__name__} {path.name}")
    return ", ".join(done)


HOW = (flip, zero, cut, empty)


@pytest.mark.parametrize("name", ["tars", "tables"])
def test_a_run_on_a_damaged_cache_gives_the_same_batches(
    server: ToyServer, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    url, expected = f"{server.url}/{name}/", batches(str(tmp_path / "www" / name))
    assert batches(url) == expected
    for seed in range(int(os.environ.get("CACHE_DAMAGES", "25"))):
        gc.collect()  # lets go of the version
        done = damage(tmp_path / "cache", seed)
        try:
            found = batches(url)
        except sp.ShardError as error:
            assert "is damaged; start again" in str(error), (seed, done)
            found = batches(url)
        assert found == expected, (seed, done)


def test_a_flipped_bit_is_told_once_and_its_row_fetched_again(
    server: ToyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, expected = f"{server.url}/tars/", batches(str(tmp_path / "www" / "tars"))
    assert batches(url) == expected
    sent = server.sent()
    for path in (tmp_path / "cache").rglob("*.tar"):
        raw = bytearray(path.read_bytes())
        raw[2000] ^= 4
        path.write_bytes(raw)
    assert batches(url) == expected
    assert 0 < server.sent() - sent < 60_000  # of 150 kB
    assert 1 <= caplog.text.count("are not those that were downloaded") <= 3
