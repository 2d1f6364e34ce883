"""`Balance` in real runs: two ranks that train for as long as a pack costs, and the processor time of loading."""

from __future__ import annotations

import io
import json
import os
import socket
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from balance_data import HIDDEN, Corpus, lognormal
from packs import balance, pack, waiting
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders import LanguageModelingEncoder

_LANES, _HOLD = 8, 32
_BEFORE, _STEPS, _STEP_S = 320, 160, 0.2  # steps that are not timed, that are, and the mean time of a pack
_CHUNK, _ROUNDS = 300, 7  # batches in a turn


def two_ranks(*, seed: int) -> None:
    """Print what `Balance` saves two ranks, and what the simulation says."""
    corpus = lognormal(1500, 1.4, 32 << 10)
    packs = pack(corpus.of_lanes(seed), corpus.cost, lanes=96, packs=600, seed=seed, max_length=corpus.longest)
    given = balance(packs.costs, hold=_HOLD, slots=500, seed=seed)
    expected = [waiting(costs[:, 100:500], 2) for costs in (packs.costs, given.costs)]
    unit = _STEP_S / float(packs.costs.mean())
    with tempfile.TemporaryDirectory() as folder:
        _write_lengths(Path(folder), corpus, samples=24_000, seed=seed)
        measured = [_measured(folder, hold, unit, seed) for hold in (0, _HOLD)]
    print(f"{'two ranks, waiting':24}{'without':>9}{'with':>9}{'saves':>9}")
    for name, (before, after) in ("simulated", expected), ("measured", measured):
        print(f"{name:24}{before:9.1%}{after:9.1%}{1 - (1 - before) / (1 - after):9.1%}")


def _measured(folder: str, hold: int, unit: float, seed: int) -> float:
    """The share of the time of two processes that is not training."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = get_context("spawn").SimpleQueue()
    spawn(_rank, args=(folder, hold, unit, seed, port, results), nprocs=2)  # type: ignore[no-untyped-call]
    trained, took = zip(*[results.get() for _ in range(2)], strict=True)
    return 1 - float(sum(trained) / sum(took))


def _rank(rank: int, folder: str, hold: int, unit: float, seed: int, port: int, results: Any) -> None:
    """One rank: sleeps for as long as its pack costs, and waits for the other."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    trained = 0.0
    with sp.SavableLoader(partial(_lengths, folder, hold), seed=seed, lanes=_LANES, num_workers=0) as loader:
        batches = iter(loader)
        for _ in islice(batches, _BEFORE):
            pass
        dist.barrier()
        start = time.perf_counter()
        batch = next(batches)
        for _ in range(_STEPS):
            train_s = int(batch["cost"]) * unit
            ends = time.perf_counter() + train_s
            batch = next(batches)  # while the step is computed
            time.sleep(max(0.0, ends - time.perf_counter()))
            trained += train_s
            dist.all_reduce(torch.ones(1))
        results.put((trained, time.perf_counter() - start))
    dist.destroy_process_group()


class Costs(sp.TaskEncoder):
    """An item is its length, a pack what it costs."""

    global_rng = False
    cost = staticmethod(sp.attention_cost(hidden=HIDDEN))

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        """The length."""
        return int(sample.json()["length"])

    def length(self, item: int) -> int:
        """Itself."""
        return item

    def pack(self, items: list[int], rng: sp.Rng) -> dict[str, int]:
        """The sum of their costs."""
        return {"cost": sum(self.cost(length, 0) for length in items)}


def _lengths(folder: str, hold: int, lane: sp.Lane) -> custom.Stage:
    packs: custom.ItemStage = sp.OnlinePacker(sp.Encode(sp.TarShardReader(folder, lane), Costs()), max_length=32 << 10)
    return sp.Batcher(sp.Balance(packs, hold=hold, cost=Costs.cost) if hold else packs, size=1)


def loading(*, seed: int) -> None:
    """Print the processor time of a batch with and without `Balance`, by turns, for packs of 4 k and of 32 k tokens."""
    print(f"{'packs, bytes as tokens':26}{'without, µs':>13}{'with, µs':>11}{'rate with it':>14}{'state, bytes':>14}")
    for corpus in (lognormal(400, 1.0, 4 << 10), lognormal(1500, 1.4, 32 << 10)):
        with tempfile.TemporaryDirectory() as folder:
            _write_texts(Path(folder), corpus, samples=20_000, seed=seed)
            _compare(folder, corpus, seed)


def _compare(folder: str, corpus: Corpus, seed: int) -> None:
    loaders = [sp.SavableLoader(partial(_texts, folder, corpus.longest, n), seed=seed, lanes=16) for n in (0, _HOLD)]
    running: list[Iterator[Any]] = [iter(loader) for loader in loaders]
    for batches in running:
        _processor_us(batches, 16 * 2 * _HOLD)
    pairs = [_turn(running, reverse=bool(number % 2)) for number in range(_ROUNDS)]
    without, balanced = (statistics.median(column) for column in zip(*pairs, strict=True))
    rate = statistics.median(before / after for before, after in pairs)
    size = sum(len(value) for value in loaders[1].state_dict().values() if isinstance(value, bytes)) // 16
    print(f"{f'{corpus.longest:,}':26}{without:13.0f}{balanced:11.0f}{rate:14.3f}{size:14,}", flush=True)
    for loader in loaders:
        loader.close()


def _turn(running: list[Iterator[Any]], *, reverse: bool) -> list[float]:
    """Processor time of a batch of each, in this order or the other."""
    found = [0.0, 0.0]
    for number in (1, 0) if reverse else (0, 1):
        found[number] = _processor_us(running[number], _CHUNK)
    return found


def _processor_us(batches: Iterator[Any], n: int) -> float:
    start = time.process_time()
    for _ in islice(batches, n):
        pass
    return 1e6 * (time.process_time() - start) / n


def _texts(folder: str, max_length: int, hold: int, lane: sp.Lane) -> custom.Stage:
    encoder = LanguageModelingEncoder(max_length=max_length)
    packs: custom.ItemStage = sp.OnlinePacker(
        sp.Encode(sp.TarShardReader(folder, lane), encoder), max_length=max_length
    )
    return sp.Batcher(sp.Balance(packs, hold=hold, cost=Costs.cost) if hold else packs, size=1)


def _write_lengths(folder: Path, corpus: Corpus, *, samples: int, seed: int) -> None:
    _write(folder, corpus, samples, seed, "json", lambda length: json.dumps({"length": length}).encode())


def _write_texts(folder: Path, corpus: Corpus, *, samples: int, seed: int) -> None:
    letters = np.random.default_rng(seed).integers(97, 123, corpus.longest, dtype=np.uint8).tobytes()
    _write(folder, corpus, samples, seed, "txt", lambda length: letters[: max(1, length - 2)])


def _write(folder: Path, corpus: Corpus, samples: int, seed: int, part: str, content: Callable[[int], bytes]) -> None:
    """Shards of 1,000 samples with documents of these lengths."""
    lengths = [length for length, _ in islice(corpus.documents(seed), samples)]
    for first in range(0, samples, 1000):
        with tarfile.open(folder / f"{first // 1000:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, first + 1000):
                info = tarfile.TarInfo(f"s{number:06d}.{part}")
                payload = content(lengths[number])
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
