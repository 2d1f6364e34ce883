"""Interpreter of `savable verify-resume`, which runs a loader step by step.

It is started by `python -m savable_pipeline.tools.verify.segment`.

    command ── an order, as a line of JSON ──▶ stdin
            ◀── its answer, as a line of JSON ── stdout     the user's own prints go to stderr

A batch passes from the uninterrupted run's interpreter to the other's by `SaveBatch` and `Explain`, as a pickle in a
temporary folder of the command. A state passes by `torch.save` and `torch.load(weights_only=True)`. If two images
should be equal but differ, `draw_difference` writes an image of both.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.observers import TracedSample
from savable_pipeline.run.loader.run import Run
from savable_pipeline.stages.batch_difference import Difference, digest, find_difference
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.tools.verify.target import load_target

_GAP = 4  # white columns between two images
_MIN_SIDE = 4  # pixels; smaller arrays do not count as images


def draw_difference(difference: Difference, path: Path) -> bool:
    """Write a PNG of the expected image, the found one and their difference.

    Returns False if the parts that differ are not images.

    An image is a tensor or array (channels, height, width) or (height, width, channels) with 1, 3 or 4 channels, or a
    row of a batch of images. Floats are scaled so that the least value of both images is black and the greatest is
    white. The difference is scaled so that its greatest value is white.
    """
    if difference.parts is None:
        return False
    pair = [_as_image(part, difference.row) for part in difference.parts]
    if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
        return False
    expected, found = (np.nan_to_num(image.astype(np.float64)) for image in pair if image is not None)
    errors = np.abs(expected - found)
    both = np.stack([expected, found])
    low, high = (0.0, 255.0) if pair[0].dtype == np.uint8 else (float(both.min()), float(both.max()))
    images = [_to_uint8(expected, low, high), _to_uint8(found, low, high), _to_uint8(errors, 0.0, float(errors.max()))]
    gap = np.full((expected.shape[0], _GAP, 3), 255, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate([images[0], gap, images[1], gap, images[2]], axis=1)).save(path, "PNG")
    return True


def _as_image(part: Any, row: int | None) -> NDArray[Any] | None:
    """Return a part of a batch, or its `row`, as an array (height, width, channels), or None if it is no image."""
    if not hasattr(part, "shape"):
        return None
    if len(part.shape) == 4 and row is not None:
        part = part[row]
    if len(part.shape) != 3:
        return None
    if not isinstance(part, np.ndarray):
        part = part.detach().cpu()
        part = (part.float() if part.is_floating_point() else part).numpy()
    array = np.asarray(part)
    if array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.shape[-1] not in (1, 3, 4) or min(array.shape[:2]) < _MIN_SIDE or array.dtype.kind not in "fiu":
        return None
    return array[..., :3]


def _to_uint8(image: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Return the image as uint8 (height, width, 3); black is `low`, white `high`."""
    scaled = (image - low) * (255.0 / (high - low)) if high > low else np.zeros_like(image)
    return np.broadcast_to(np.clip(np.rint(scaled), 0, 255).astype(np.uint8), (*image.shape[:2], 3))


class StartLoader(msgspec.Struct, tag=True):
    """Order to create the loader that `target` names.

    It loads the `state` file if there is one.

    `workers` replaces the loader's own `num_workers` if set.
    """

    target: str
    seed: int | None
    lanes: int | None
    workers: int | None = None
    state: str | None = None


class TakeBatch(msgspec.Struct, tag=True):
    """Order to take the next batch."""


class Save(msgspec.Struct, tag=True):
    """Order to save the state to a file."""

    file: str


class SaveBatch(msgspec.Struct, tag=True):
    """Order to save the last batch to a file."""

    file: str


class Explain(msgspec.Struct, tag=True):
    """Order to find where the last batch differs from the one in `file`.

    If images differ, they are drawn in the file `picture`.
    """

    file: str
    picture: str


class Done(msgspec.Struct, tag=True):
    """Answer that the order was carried out."""


class LoaderStarted(msgspec.Struct, tag=True):
    """Answer that the loader is ready, with facts about it.

    `own_lanes` is the number of lanes of its rank.
    """

    lanes: int
    own_lanes: int
    workers: int
    encoders: list[str]


class Stepped(msgspec.Struct, tag=True):
    """Answer with the digest of the batch that was taken.

    It also says whether the batch was the last of an epoch.
    """

    digest: str
    ends_epoch: bool


class Explained(msgspec.Struct, tag=True):
    """Answer that says where a batch differs.

    It has the samples of the row that differs.

    If more than one row may differ, `samples` are those of the whole batch.
    """

    slot: int
    lane: int
    field: str
    expected: str
    found: str
    rows: str
    samples: list[str]
    picture: str | None


class Failed(msgspec.Struct, tag=True):
    """Answer that the order raised an error."""

    error: str


Order = StartLoader | TakeBatch | Save | SaveBatch | Explain
SegmentAnswer = Done | LoaderStarted | Stepped | Explained | Failed


class SegmentProcess:
    """Runs a loader, and carries out the orders of the command."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._batch: Any = None

    def execute(self, order: Order) -> SegmentAnswer:
        """Carry out an order. Raises the run's own errors."""
        if isinstance(order, StartLoader):
            return self._start_loader(order)
        assert self._run is not None
        match order:
            case TakeBatch():
                if self._run.position.previous is not None:
                    iter(self._run)  # starts the next epoch
                self._batch = next(self._run)
                return Stepped(digest(self._batch), self._run.position.previous is not None)
            case Save(file):
                import torch  # it takes seconds, and the uninterrupted run does not need it

                torch.save(self._run.state_dict(), file)
            case SaveBatch(file):
                Path(file).write_bytes(pickle.dumps(self._batch))
            case Explain(file, picture):
                return self._explain(self._run, pickle.loads(Path(file).read_bytes()), Path(picture))
        return Done()

    def _start_loader(self, order: StartLoader) -> LoaderStarted:
        """Build the loader, and load the state if there is one."""
        # drop the user's ledger
        settings = replace(load_target(order.target, seed=order.seed, lanes=order.lanes), ledger=None)
        if order.workers is not None:
            settings = replace(settings, num_workers=order.workers)
        run = self._run = Run(settings)
        if order.state is not None:
            import torch

            run.load_state_dict(torch.load(order.state, weights_only=True))
        stages = upstream(run.local.last_stage)
        encoders = [stage.info.encoder for stage in stages if stage.info.encoder is not None]
        names = list(dict.fromkeys(type(encoder).__qualname__ for encoder in encoders))
        return LoaderStarted(settings.lanes, len(run.position.lanes), settings.num_workers, names)

    def _explain(self, run: Run, expected: Any, picture: Path) -> Explained:
        """Describe the first difference from the expected batch, and draw it."""
        difference = find_difference(expected, self._batch)
        assert difference is not None
        drawn = draw_difference(difference, picture)
        slot, lane = run.last_step()
        return Explained(
            slot=slot,
            lane=lane,
            field=difference.path,
            expected=difference.expected,
            found=f"{difference.found}{difference.element}",  # such as "7 at [3], 2 of 16 values differ"
            rows=difference.rows,
            samples=[f"shard {sample.shard}, key {sample.key}" for sample in _differing_samples(run, difference)],
            picture=str(picture) if drawn else None,
        )

    def close(self) -> None:
        """Stop the run's workers."""
        if self._run is not None:
            self._run.close()


def _differing_samples(run: Run, difference: Difference) -> list[TracedSample]:
    """Return the samples of the row that differs, or of all rows if that row is unknown.

    The result is empty if the samples cannot be traced.
    """
    try:
        rows = run.trace().rows
    except (SavableError, StopIteration):  # an inexact encoder may now build other items
        return []
    number = _first_index(difference.path)
    if number is None and difference.parts and difference.row is not None and len(difference.parts[0]) == len(rows):
        number = difference.row
    return rows[number] if number is not None and number < len(rows) else [sample for row in rows for sample in row]


def _first_index(path: str) -> int | None:
    """Return the first index in a path, such as 3 in "batch['items'][3]['x']"."""
    numbers = [part for part in path.replace("]", "[").split("[") if part.isdecimal()]
    return int(numbers[0]) if numbers else None


def serve_orders(orders: TextIO, answers: TextIO) -> None:
    """Carry out orders until there are no more."""
    process = SegmentProcess()
    for line in orders:
        answer: SegmentAnswer
        try:
            answer = process.execute(msgspec.json.decode(line, type=Order))
        except Exception as error:
            if not isinstance(error, SavableError | ValueError):  # an error of the user's code
                traceback.print_exc()
            answer = Failed(f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()
    process.close()


def main() -> None:
    """Serve orders on stdin and stdout, which are hidden from the user's code.

    That code gets an empty stdin, and its prints go to stderr.
    """
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    try:
        serve_orders(orders, answers)
    except (KeyboardInterrupt, BrokenPipeError):  # the parent process receives Ctrl-C too, and reports it
        sys.exit(130)


if __name__ == "__main__":
    main()
