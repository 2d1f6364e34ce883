"""Measures what acknowledgements cost: by row, in the state, and in a loop; the ratio holds.

python tools/bench/acknowledged.py           all of it, a minute
python tools/bench/acknowledged.py rows      microseconds for a row that is acknowledged
python tools/bench/acknowledged.py state     bytes and milliseconds of a state with 10,000 rows in flight
python tools/bench/acknowledged.py loop      samples by processor second, with and without them, in turn
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from data import FOLDER, console, few_jpegs, prepared

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders.captioning import CaptioningEncoder

ROWS, BATCH, ROUNDS = 10_000, 32, 15


class Texts(sp.TaskEncoder):
    """A batch is a dict of numbers and of texts."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        found = sample.json()
        return found["id"], found["text"]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"id": torch.tensor([number for number, _ in items]), "text": [text for _, text in items]}


def texts_pipeline(folder: str, size: int, lane: sp.Lane) -> custom.Stage:
    """Batches of JSON of 1 kB, from a shuffle buffer of 10,000."""
    samples = sp.ShuffleBuffer(sp.TarShardReader(folder, lane), size=-(-10_000 // lane.count))
    return sp.Batcher(sp.Encode(samples, Texts()), size=size)


def loader_of(folder: Path, size: int, **settings: Any) -> sp.SavableLoader:
    """A loader of such batches."""
    return sp.SavableLoader(partial(texts_pipeline, str(folder), size), seed=1, **settings)


def rows(folder: Path) -> dict[str, float]:
    """Microseconds of processor time for an acknowledged row, in batches and one by one."""
    found: dict[str, float] = {}
    for name, size in {"a batch of 32": BATCH, "one by one": 1}.items():
        with loader_of(folder, size, acknowledge=True) as loader:
            given = [(next(loader), loader.receipts())[1] for _ in range(ROWS // size)]
            began = time.process_time()
            for receipts in given:
                loader.done(receipts)
            found[f"µs a row, {name}"] = 1e6 * (time.process_time() - began) / ROWS
    return found


def state(folder: Path) -> dict[str, float]:
    """A state with 10,000 rows in flight beyond one with none: bytes, and milliseconds of the first and of others.

    Between two others a batch is taken, as in training.
    """
    found: dict[str, float] = {}
    for size in (BATCH, 1):
        with loader_of(folder, size, acknowledge=True) as loader, loader_of(folder, size, acknowledge=True) as other:
            for _ in range(ROWS // size):
                next(loader)
                other.done((next(other), other.receipts())[1])
            first, full = _measured(loader)
            first_bare, bare = _measured(other)
            found[f"kB, batches of {size}"] = (full - bare) / 1e3
            found[f"ms, the first, batches of {size}"] = 1e3 * (first - first_bare)
            times = [(next(loader), _measured(loader)[0], next(other), _measured(other)[0]) for _ in range(20)]
            found[f"ms, others, batches of {size}"] = 1e3 * statistics.median(each[1] - each[3] for each in times)
    return found


def _measured(loader: sp.SavableLoader) -> tuple[float, int]:
    """The seconds of processor time that a state takes, and its bytes."""
    began = time.process_time()
    saved = loader.state_dict()
    return time.process_time() - began, sum(len(value) for value in saved.values() if isinstance(value, bytes))


def loop(folder: Path) -> dict[str, float]:
    """Samples by second of processor time, in turn: the quartiles of the ratios."""
    images = folder.parent / "few_images"
    if not images.exists():
        with sp.ShardWriter(images) as writer:
            for number, jpeg in zip(range(2_000), cycle(few_jpegs()), strict=False):
                writer.write({"__key__": f"{number:06d}", "jpg": jpeg, "txt": "a picture"})
    found: dict[str, float] = {}
    for name, make, size, batches in (
        ("JSON, batches of 32", partial(loader_of, folder, BATCH), BATCH, 200),
        ("JSON, batches of 256", partial(loader_of, folder, 8 * BATCH), 8 * BATCH, 40),
        ("images, batches of 32", partial(images_of, images, BATCH), BATCH, 8),
    ):
        ratios, rate = _ratios(make, batches)
        quartiles = statistics.quantiles(ratios, n=4)
        found[f"samples/s without, {name}"] = rate * size
        found |= {f"ratio, {name}, quartile {number}": ratio for number, ratio in enumerate(quartiles, 1)}
    return found


def images_of(folder: Path, size: int, **settings: Any) -> sp.SavableLoader:
    """A loader of images of 256 by 256, decoded to 64 by 64."""
    return sp.SavableLoader(partial(images_pipeline, str(folder), size), seed=1, lanes=8, **settings)


def images_pipeline(folder: str, size: int, lane: sp.Lane) -> custom.Stage:
    """Images with captions."""
    return sp.Batcher(sp.Encode(sp.TarShardReader(folder, lane), CaptioningEncoder(image_size=64)), size=size)


def _ratios(make: Callable[..., sp.SavableLoader], batches: int) -> tuple[list[float], float]:
    with make() as plain, make(acknowledge=True) as acknowledging:
        for loader in (plain, acknowledging):
            _round(loader, batches)
        times = []
        for number in range(ROUNDS):
            order = [plain, acknowledging] if number % 2 else [acknowledging, plain]
            took = {id(loader): _round(loader, batches) for loader in order}
            times.append((took[id(plain)], took[id(acknowledging)]))
    return [without / took for without, took in times], batches / statistics.median(each for each, _ in times)


def _round(loader: sp.SavableLoader, batches: int) -> float:
    """The seconds of processor time of some batches, acknowledged where the loader wants that."""
    began = time.process_time()
    for _ in range(batches):
        batch = next(loader)
        if "receipts" in batch:
            loader.done(batch["receipts"])
    return time.process_time() - began


def main() -> None:
    """Measure what is asked for."""
    parts = {"rows": rows, "state": state, "loop": loop}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(parts))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the data lies, or is written")
    arguments = parser.parse_args()
    texts = prepared(arguments.folder, "json")
    for name in [arguments.part] if arguments.part else list(parts):
        for what, number in parts[name](texts).items():
            console.print(f"{what}: {number:,.3f}")


if __name__ == "__main__":
    main()
