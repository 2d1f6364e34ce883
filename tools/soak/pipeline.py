"""Data and pipeline of the stress tests. The pipeline can kill its own worker process at chosen moments.

This module does not import torch, because spawned workers import it and should start quickly.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal

import numpy as np

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.stage import State

SAMPLES, PER_SHARD = 600, 100
SIDE, CROP = 24, 16  # pixels of a sample's image, and of a crop
Moment = Literal["write", "restore", "build", "birth"]


def write_shards(folder: Path) -> None:
    """Write 600 samples in 6 shards, each a number and a gray image of 24 × 24, uint8."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for first in range(0, SAMPLES, PER_SHARD):
        with tarfile.open(folder / f"{first:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, first + PER_SHARD):
                image = rng.integers(0, 256, SIDE * SIDE, dtype=np.uint8).tobytes()
                for extension, raw in (("json", json.dumps({"id": number}).encode()), ("grey", image)):
                    member = tarfile.TarInfo(f"s{number:04d}.{extension}")
                    member.size = len(raw)
                    tar.addfile(member, io.BytesIO(raw))


class SoakEncoder(sp.TaskEncoder):
    """Encoder of randomly cropped images with noise.

    It skips every seventh sample and yields three items of every fifth. It draws from `rng` and from the global
    generators of NumPy, which are seeded for each call. `copies` makes batches larger: a batch has that many copies of
    its images, with different noise.
    """

    global_rng = ("python", "numpy")

    def __init__(self, copies: int = 40) -> None:
        self.copies = copies

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number % 7 == 0:
            return sp.Skip("every 7th")
        image = np.frombuffer(sample["grey"], np.uint8).reshape(SIDE, SIDE)
        return self._parts(number, image, rng) if number % 5 == 0 else self._item(number, image, rng)

    def _parts(self, number: int, image: np.ndarray[Any, Any], rng: sp.Rng) -> Iterator[Any]:
        for _ in range(3):
            yield self._item(number, image, rng)

    def _item(self, number: int, image: np.ndarray[Any, Any], rng: sp.Rng) -> dict[str, Any]:
        top, left = rng.integers(SIDE - CROP), rng.numpy.integers(SIDE - CROP)
        cut = image[top : top + CROP, left : left + CROP]
        noise = np.random.randint(0, 9, cut.shape, np.uint8)
        return {"id": number, "image": (cut[:, ::-1] if rng.random() < 0.5 else cut) ^ noise, "length": 1 + number % 9}

    def length(self, item: Any) -> int:
        return int(item["length"])

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        images = np.stack([item["image"] for item in items])
        return {"id": [item["id"] for item in items], "image": images, "drawn": rng.random()}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        images = np.concatenate([item["image"].reshape(-1, CROP, CROP) for item in items])
        noise = np.random.randint(0, 256, (self.copies, 1, 1, 1), np.uint8)
        return {"id": [item["id"] for item in items], "images": images ^ noise, "drawn": rng.random()}

    def settings(self) -> dict[str, Any]:
        return {"copies": self.copies}


def soak_pipeline(
    shards: str,
    lane: sp.Lane,
    *,
    pack: bool = True,
    copies: int = 40,
    epochs: int | None = None,
    size: int = 2,
    dying: Dying | None = None,
) -> custom.Stage:
    """Build a lane that shuffles, encodes, packs and batches. `dying` says when it kills its process."""
    if dying is not None and dying.moment == "build" and lane.worker.status is not None:
        dying.die(f"lane {lane.index}")
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, epochs=epochs), size=20)
    items: custom.ItemStage = sp.Encode(samples, SoakEncoder(copies))
    packs = sp.OnlinePacker(items, max_length=20, open_packs=3) if pack else items
    batches = sp.Batcher(packs, size=size)
    return batches if dying is None else DyingStage(batches, dying)


@dataclass
class Dying:
    """Moment at which workers kill themselves.

    A worker dies every other time that it reaches the moment, until there were `times` deaths. Deaths are recorded in
    files in `folder`. At "birth", workers die when they are forked, or when a spawned worker unpickles its pipeline.
    The fork server and the trainer never die.
    """

    moment: Moment
    times: int
    folder: Path
    trainer: int

    def die(self, name: str) -> None:
        """Kill this process, unless `name` was killed the last time, or there were enough deaths."""
        was_killed = self.folder / f"{name} was killed"
        with self._lock():
            if was_killed.exists():
                was_killed.unlink()
                return
            if len(self.deaths()) >= self.times:
                return
            was_killed.touch()
            with (self.folder / "deaths").open("a") as file:
                file.write(f"{os.getpid()} ")
        self.kill()

    def kill(self) -> None:
        """Kill this process. At "write", a `KillServer` kills it a little later, while it writes a batch."""
        if self.moment != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / "kill me").open("wb", buffering=0) as pipe:
            pipe.write(struct.pack("I", os.getpid()))

    def deaths(self) -> list[int]:
        """Return the ids of the processes that have killed themselves."""
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in (self.folder / "deaths").read_text().split(" ")[:-1]]
        return []

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def watch_births(self) -> None:
        """Let workers die when they are forked from this process or from a fork server that it forks."""
        if self.moment == "birth":
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Let a forked process die if it is a worker, a child of the fork server, while the folder exists."""
        if os.getppid() != self.trainer and self.folder.exists():
            self.die("worker")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in a spawned process, which is a worker or the fork server."""
        self.__dict__.update(state)
        self.watch_births()
        if self.moment == "birth" and current_process().name.startswith("savable_pipeline worker"):
            self.die("worker")


class DyingStage(custom.PassThrough, custom.BatchStage):
    """Last stage, which kills its process in `restore_state`, or when a batch is pickled."""

    def __init__(self, source: custom.Stage, dying: Dying) -> None:
        super().__init__(source)
        self._dying = dying

    def __next__(self) -> Any:
        batch = next(self.source)
        if self._dying.moment != "write" or self.lane.worker.status is None:
            return batch
        return DyingBatch(batch, self._dying, f"lane {self.lane.index}")

    def restore_state(self, state: State) -> None:
        super().restore_state(state)
        if self._dying.moment == "restore" and self.lane.worker.status is not None:
            self._dying.die(f"lane {self.lane.index}")


class DyingBatch:
    """Batch that kills its process when it is pickled. It unpickles as the original batch."""

    def __init__(self, batch: Any, dying: Dying, name: str) -> None:
        self._batch = batch
        self._dying = dying
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        self._dying.die(self._name)
        return _unchanged, (self._batch,)


def _unchanged(batch: Any) -> Any:
    return batch
