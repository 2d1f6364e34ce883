"""Peers of a sharing group as threads of one process, which connect through a dict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.peers.meeting import Sharing

T = TypeVar("T")
TIMEOUT_S = 20.0


class DictStore:
    """The methods of torch.distributed's stores that peers use, on a dict."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.values[key] = value

    def get(self, key: str) -> bytes:
        """Return a value, once it is written."""
        value: bytes = self.values[key]
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether all have been written."""
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return its value."""
        with self._lock:
            self.values[key] = self.values.get(key, 0) + number
            return int(self.values[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value if the key has the expected one, "" for none. Returns the value of the key after it."""
        with self._lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = value.encode()
            return self.get(key)


def sharing_of(ranks: Sequence[int], store: Any = None) -> list[Sharing]:
    """Return the sharing of each of the peers with these global ranks."""
    store = store or DictStore()
    return [Sharing(index, tuple(ranks), store) for index in range(len(ranks))]


def run_in_threads(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Return what each call returned or raised, in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(_catch, call) for call in calls]
        return [future.result(TIMEOUT_S * 3) for future in futures]


def _catch(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:
        return error


class Rows(sp.TaskEncoder):
    """An encoder of random rows, four of which are large enough for shared memory."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return {"id": number, "row": torch.from_numpy(rng.numpy.random(6000).astype(np.float32))}


def pipeline(shards: str, lane: sp.Lane, *, epochs: int | None = None) -> custom.Stage:
    """Return stages with batches of 96 KB."""
    items = sp.Encode(sp.TarShardReader(shards, lane, epochs=epochs), Rows())
    return sp.Batcher(sp.ShuffleBuffer(items, size=10), size=4)


def peer_loaders(
    shards: Path, peers: int, *, epochs: int | None = None, rank: int = 0, world_size: int = 1, **settings: Any
) -> list[sp.SavableLoader]:
    """Return the loaders of the peers of one data-parallel rank."""
    found = []
    for sharing in sharing_of(range(rank * peers, (rank + 1) * peers)):
        ranks = sp.Ranks(rank, world_size)
        ranks.sharing, ranks.name, ranks.builds = sharing, sharing.ranks[sharing.number], sharing.number == 0
        workers = {"workers": sp.Workers(timeout=TIMEOUT_S), "ranks": ranks}
        found.append(unshared_loader(shards, epochs=epochs, **{**workers, **settings}))
    return found


def unshared_loader(shards: Path, *, epochs: int | None = None, **settings: Any) -> sp.SavableLoader:
    """Return a loader that does not share, or with the sharing in `settings`."""
    made_by = partial(pipeline, str(shards), epochs=epochs)
    return sp.SavableLoader(made_by, **{"seed": 5, "lanes": 4, "ranks": (0, 1), **settings})
