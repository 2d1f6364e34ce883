"""One interpreter of `savable verify-resume`: `python -m savable_pipeline.tools.verify.leg` runs a loader step by step.

    command ── an order, as a line of JSON ──▶ stdin
            ◀── its answer, as a line of JSON ── stdout     the user's own prints go to stderr

A batch passes from the uninterrupted run's interpreter to the other's by `Keep` and `Explain`, as a pickle in a
temporary folder of the command. A state passes by `torch.save` and `torch.load(weights_only=True)`.
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

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.trace import TracedSample
from savable_pipeline.stages.batch_difference import Difference, digest, find_difference
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.tools.verify.difference_image import draw_difference
from savable_pipeline.tools.verify.target import load_target

# Orders.


class Begin(msgspec.Struct, tag=True):
    """Make the loader, with `workers` in place of its own `num_workers` if given, and load a saved state."""

    target: str
    seed: int | None
    lanes: int | None
    workers: int | None = None
    state: str | None = None


class TakeBatch(msgspec.Struct, tag=True):
    """Take the next batch."""


class Save(msgspec.Struct, tag=True):
    """Save the state to a file."""

    file: str


class Keep(msgspec.Struct, tag=True):
    """Save the last batch to a file."""

    file: str


class Explain(msgspec.Struct, tag=True):
    """Find where the last batch differs from the one in `file`; draw the difference in `picture` if it is an image."""

    file: str
    picture: str


# Answers.


class Done(msgspec.Struct, tag=True):
    """The order has been carried out."""


class Begun(msgspec.Struct, tag=True):
    """The loader is ready: its number of lanes, of lanes of its rank, of workers, and its encoders' classes."""

    lanes: int
    own_lanes: int
    workers: int
    encoders: list[str]


class Stepped(msgspec.Struct, tag=True):
    """The digest of a batch, and whether it was the last of an epoch."""

    digest: str
    ends_epoch: bool


class Explained(msgspec.Struct, tag=True):
    """Where a batch differs, and the samples of that row, or of the batch if no single row differs."""

    slot: int
    lane: int
    field: str
    expected: str
    found: str
    rows: str
    samples: list[str]
    picture: str | None


class Failed(msgspec.Struct, tag=True):
    """The order raised an error."""

    error: str


ORDERS = Begin | TakeBatch | Save | Keep | Explain
ANSWERS = Done | Begun | Stepped | Explained | Failed


class LegProcess:
    """Carries out orders with a run of its own."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._batch: Any = None

    def obey(self, order: ORDERS) -> ANSWERS:
        """Carry out an order. Raises the run's own errors."""
        if isinstance(order, Begin):
            return self._begin(order)
        assert self._run is not None
        match order:
            case TakeBatch():
                if self._run.position.previous is not None:
                    iter(self._run)  # begins the next epoch
                self._batch = next(self._run)
                return Stepped(digest(self._batch), self._run.position.previous is not None)
            case Save(file):
                import torch  # here: it takes seconds, and the uninterrupted run's interpreter does without

                torch.save(self._run.state_dict(), file)
            case Keep(file):
                Path(file).write_bytes(pickle.dumps(self._batch))
            case Explain(file, picture):
                return self._explain(self._run, pickle.loads(Path(file).read_bytes()), Path(picture))
        return Done()

    def _begin(self, order: Begin) -> Begun:
        settings = replace(load_target(order.target, seed=order.seed, lanes=order.lanes), ledger=None)  # the run's own
        if order.workers is not None:
            settings = replace(settings, num_workers=order.workers)
        run = self._run = Run(settings)
        if order.state is not None:
            import torch

            run.load_state_dict(torch.load(order.state, weights_only=True))
        stages = upstream(run.local.last_stage)
        encoders = [stage.info.encoder for stage in stages if stage.info.encoder is not None]
        names = list(dict.fromkeys(type(encoder).__qualname__ for encoder in encoders))
        return Begun(settings.lanes, len(run.position.lanes), settings.num_workers, names)

    def _explain(self, run: Run, expected: Any, picture: Path) -> Explained:
        difference = find_difference(expected, self._batch)
        assert difference is not None
        drawn = draw_difference(difference, picture)
        slot, lane = run.last_step()
        return Explained(
            slot,
            lane,
            difference.path,
            difference.expected,
            f"{difference.found}{difference.place}",
            difference.rows,
            [f"shard {sample.shard}, key {sample.key}" for sample in _samples(run, difference)],
            str(picture) if drawn else None,
        )

    def close(self) -> None:
        """End the run's workers."""
        if self._run is not None:
            self._run.close()


def _samples(run: Run, difference: Difference) -> list[TracedSample]:
    """The samples of the row that differs, of all rows if no single one does, none if they cannot be traced."""
    try:
        rows = run.trace().rows
    except (SavableError, StopIteration):  # of an encoder that makes another number of items, or other lengths
        return []
    row = _first_number(difference.path)
    if row is None and difference.parts and difference.row is not None and len(difference.parts[0]) == len(rows):
        row = difference.row
    return rows[row] if row is not None and row < len(rows) else [sample for row in rows for sample in row]


def _first_number(path: str) -> int | None:
    """Of "batch['items'][3]['x']" the 3."""
    numbers = [part for part in path.replace("]", "[").split("[") if part.isdecimal()]
    return int(numbers[0]) if numbers else None


def serve(orders: TextIO, answers: TextIO) -> None:
    """Carry out orders until there are no more."""
    leg = LegProcess()
    for line in orders:
        answer: ANSWERS
        try:
            answer = leg.obey(msgspec.json.decode(line, type=ORDERS))
        except (SavableError, ValueError) as error:
            answer = Failed(f"{type(error).__name__}: {error}")
        except Exception as error:
            traceback.print_exc()
            answer = Failed(f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()
    leg.close()


def main() -> None:
    """Serve orders on the two pipes, which the user's code does not see: its stdin is empty, its stdout is stderr."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        serve(orders, answers)
    except (KeyboardInterrupt, BrokenPipeError):  # the command receives Ctrl-C too, and reports it
        sys.exit(130)


if __name__ == "__main__":
    main()
