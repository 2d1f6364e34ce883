"""What the soak runs load: small shards, a pipeline with every stage, and moments at which it kills its own process.

No torch here: a spawned worker imports this file, and nothing that it imports should take seconds.
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
SIDE, CROP = 24, 16  # pixels of a sample's image, and of what is cut out of it
Moment = Literal["write", "restore", "build", "birth"]


def write_shards(folder: Path) -> None:
    """600 samples in 6 shards: a number and a grey image of 24 × 24, uint8."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for first in range(0, SAMPLES, PER_SHARD):
        with tarfile.open(folder / f"{first:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, first + PER_SHARD):
                image = draw.integers(0, 256, SIDE * SIDE, dtype=np.uint8).tobytes()
                for extension, raw in (("json", json.dumps({"id": number}).encode()), ("grey", image)):
                    member = tarfile.TarInfo(f"s{number:04d}.{extension}")
                    member.size = len(raw)
                    tar.addfile(member, io.BytesIO(raw))


class SoakEncoder(sp.TaskEncoder):
    """Cuts, mirrors and adds noise; leaves out every seventh sample and makes three items of every fifth.

    A batch is `copies` arrays uint8 (items, 16, 16) and more, as large as one likes. Draws from `rng` and, seeded for
    each call, from the global generators of Python and NumPy.
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
    """Shuffle, encode, pack, batch; with `dying`, ending its process now and then."""
    if dying is not None and dying.moment == "build" and lane.worker.status is not None:
        dying.die(f"lane {lane.index}")
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, epochs=epochs), size=20)
    items: custom.ItemStage = sp.Encode(samples, SoakEncoder(copies))
    packs = sp.OnlinePacker(items, max_length=20, open_packs=3) if pack else items
    batches = sp.Batcher(packs, size=size)
    return batches if dying is None else DyingStage(batches, dying)


# Processes that end themselves.


@dataclass
class Dying:
    """Where a worker kills itself, every other time that it comes there, until that has happened `times` times.

    What was killed is written to files in `folder`, since no process lives to tell. Workers, never the server or the
    trainer, die at birth: when they are forked, or when a spawned one is given its pipeline.
    """

    moment: Moment
    times: int
    folder: Path
    trainer: int

    def die(self, name: str) -> None:
        """Kill this process, unless that was done at the same place the last time, or often enough."""
        mark = self.folder / f"{name} was killed"
        with self._alone():
            if mark.exists():
                mark.unlink()
                return
            if len(self.deaths()) >= self.times:
                return
            mark.touch()
            with (self.folder / "deaths").open("a") as file:
                file.write(f"{os.getpid()} ")
        self.kill()

    def kill(self) -> None:
        """SIGKILL to itself; while it writes a batch, a bit later, from outside, by who reads the pipe `kill me`."""
        if self.moment != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / "kill me").open("wb", buffering=0) as pipe:
            pipe.write(struct.pack("I", os.getpid()))

    def deaths(self) -> list[int]:
        """Which processes have done so."""
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in (self.folder / "deaths").read_text().split(" ")[:-1]]
        return []

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def watch_births(self) -> None:
        """From now on, workers may die at birth, if their server is forked from here or is this process."""
        if self.moment == "birth":
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if os.getppid() != self.trainer and self.folder.exists():
            self.die("worker")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a spawned process: it is a worker, or the server that will fork some."""
        self.__dict__.update(state)
        self.watch_births()
        if self.moment == "birth" and current_process().name.startswith("savable_pipeline worker"):
            self.die("worker")


class DyingStage(custom.PassThrough, custom.BatchStage):
    """The last stage, which dies in `restore_state`, or has its batches die."""

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
    """A batch that, when it is pickled, has its process killed; what arrives is the batch itself."""

    def __init__(self, batch: Any, dying: Dying, name: str) -> None:
        self._batch = batch
        self._dying = dying
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        self._dying.die(self._name)
        return _itself, (self._batch,)


def _itself(batch: Any) -> Any:
    return batch
