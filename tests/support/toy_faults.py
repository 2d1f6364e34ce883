"""Encoders and pipelines that fail: by an error, a signal, an exit, a hang, or in ways that only a resume shows.

Torch is imported where it is used, because fresh interpreters import this file.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import savable_pipeline as sp
from savable_pipeline import custom


class NumberEncoder(sp.TaskEncoder):
    """An encoder whose item is a sample's number, and whose batch is a list of them."""

    global_rng: bool | tuple[str, ...] = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def length(self, item: Any) -> int:
        return 1

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def number_pipeline(
    shards: str,
    lane: sp.Lane,
    encoder: sp.TaskEncoder | None = None,
    *,
    size: int = 2,
    epochs: int | None = None,
    on_error: Any = "raise",
) -> custom.Stage:
    """Return numbers in file order: lane i has the i-th pair of every 2 × lanes samples."""
    samples = sp.TarShardReader(shards, lane, shuffle=False, block_size=2, epochs=epochs)
    # some encoders count their calls
    items = sp.Encode(samples, encoder or NumberEncoder(), on_error=on_error, check=0.0)
    return sp.Batcher(items, size=size)


def packed_numbers(shards: str, lane: sp.Lane, *, epochs: int | None = None) -> custom.Stage:
    """Return numbers from a buffer in packs of three, one pack per batch: stages with state and a cheap encoder."""
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, block_size=4, epochs=epochs), size=3)
    return sp.Batcher(sp.OnlinePacker(sp.Encode(samples, NumberEncoder()), max_length=3, open_packs=2), size=1)


class UnpicklableError(Exception):
    """An error that pickle can neither construct nor write."""

    def __init__(self, first: str, *, second: int) -> None:
        super().__init__(f"{first} {second}")
        self.held = lambda: second


class LocalShardError(sp.ShardError):
    """An error of a user's own stage, whose constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail(how: str) -> None:
    """Fail in the way that `how` names."""
    if how == "value":
        raise ValueError("no such colour")
    if how == "unpicklable":
        raise UnpicklableError("broken", second=7)
    if how == "exit":
        raise SystemExit(3)
    if how == "os exit":
        os._exit(5)
    if how == "hang":
        time.sleep(60)
    if how == "segfault":
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


class FaultyEncoder(NumberEncoder):
    """An encoder that fails at one sample, until the file `cured` exists."""

    def __init__(self, how: str, at: int, cured: Path) -> None:
        self.how = how
        self.at = at
        self.cured = cured

    def settings(self) -> dict[str, Any]:
        return {}  # the items are always the same

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = super().encode(sample, rng)
        if number == self.at and not self.cured.exists():
            fail(self.how)
        return number


class CuredEncoder(FaultyEncoder):
    """An encoder that fails at one sample a few times, and then no more."""

    def __init__(self, how: str, at: int, times: int, log: Path) -> None:
        super().__init__(how, at, log)
        self.times = times

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number == self.at and (not self.cured.exists() or self.cured.stat().st_size < self.times):
            with self.cured.open("a") as file:
                file.write("x")
            fail(self.how)
        return number


class LambdaEncoder(NumberEncoder):
    """An encoder whose batches cannot be pickled."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return lambda: items


class LargeEncoder(NumberEncoder):
    """An encoder of batches of 4 MB, more than a pipe holds."""

    def __init__(self, floats: int = 1 << 20) -> None:
        self.floats = floats

    def settings(self) -> dict[str, Any]:
        return {"floats": self.floats}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        import torch

        return torch.full((self.floats,), float(items[0]))


class SkipEverything(NumberEncoder):
    """An encoder that skips every sample."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sp.Skip("not wanted")


class FaultyStage(custom.PassThrough, custom.BatchStage):
    """A stage that raises an error of its own class at its first item."""

    def __next__(self) -> Any:
        raise LocalShardError("shard 7", "is upside down")


def faulty_stage_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    return FaultyStage(number_pipeline(shards, lane))


def fails_in_other_processes(process: int, shards: str, lane: sp.Lane) -> custom.Stage:
    """A pipeline that raises in every process except `process`."""
    if os.getpid() != process:
        raise RuntimeError("no licence for this process")
    return number_pipeline(shards, lane)


def no_stage_pipeline(lane: sp.Lane) -> custom.Stage:
    return [1, 2, 3]  # type: ignore[return-value]
