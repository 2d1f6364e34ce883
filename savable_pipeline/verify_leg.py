"""One interpreter of `savable verify-resume`: `python -m savable_pipeline.verify_leg` runs a loader step by step.

    command ── an order, as a line of JSON ──▶ stdin
            ◀── its answer, as a line of JSON ── stdout     what the user's code prints goes to stderr

A batch passes from the uninterrupted run's interpreter to the other's by `Keep` and `Explain`, as a pickle in a folder
that the command made for itself. A state passes by `torch.save` and `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import msgspec

from savable_pipeline.compare import Difference, digest, find_difference
from savable_pipeline.difference_picture import draw_difference
from savable_pipeline.encode import Encode
from savable_pipeline.errors import SavableError
from savable_pipeline.loader import SavableLoader
from savable_pipeline.stage import upstream
from savable_pipeline.trace import TracedSample
from savable_pipeline.verify_target import load_target

# Orders.


class Begin(msgspec.Struct, tag=True):
    """Make the loader, with `workers` or as many as it has by itself, and put it to a saved state."""

    target: str
    seed: int | None
    lanes: int | None
    workers: int | None = None
    state: str | None = None


class Step(msgspec.Struct, tag=True):
    """Take the next batch, or the end of an epoch."""


class Save(msgspec.Struct, tag=True):
    """Write the state down."""

    file: str


class Keep(msgspec.Struct, tag=True):
    """Write the last batch down."""

    file: str


class Explain(msgspec.Struct, tag=True):
    """Say where the last batch differs from one that was kept; draw it at `picture` if it is an image."""

    file: str
    picture: str


# Answers.


class Done(msgspec.Struct, tag=True):
    """What was ordered is done."""


class Begun(msgspec.Struct, tag=True):
    """The loader stands: it has so many lanes, of which so many are its rank's, and so many workers."""

    lanes: int
    own_lanes: int
    workers: int
    encoders: list[str]


class Stepped(msgspec.Struct, tag=True):
    """The digest of a batch; None at the end of an epoch."""

    digest: str | None


class Explained(msgspec.Struct, tag=True):
    """Where a batch differs, and the samples of the row, or of the batch where it is not known which row it is."""

    slot: int
    lane: int
    field: str
    expected: str
    found: str
    rows: str
    samples: list[str]
    picture: str | None


class Failed(msgspec.Struct, tag=True):
    """It raised."""

    error: str


ORDERS = Begin | Step | Save | Keep | Explain
ANSWERS = Done | Begun | Stepped | Explained | Failed


class Leg:
    """Obeys orders."""

    def __init__(self) -> None:
        self._loader: SavableLoader | None = None
        self._batch: Any = None

    def obey(self, order: ORDERS) -> ANSWERS:
        """Do it. Raises what the loader raises."""
        if isinstance(order, Begin):
            return self._begin(order)
        assert self._loader is not None
        match order:
            case Step():
                self._batch = next(iter(self._loader), None)
                return Stepped(None if self._batch is None else digest(self._batch))
            case Save(file):
                import torch  # here: it takes seconds, and the interpreter that is not cut does without

                torch.save(self._loader.state_dict(), file)
            case Keep(file):
                Path(file).write_bytes(pickle.dumps(self._batch))
            case Explain(file, picture):
                return self._explain(self._loader, pickle.loads(Path(file).read_bytes()), Path(picture))
        return Done()

    def _begin(self, order: Begin) -> Begun:
        named = load_target(order.target, seed=order.seed, lanes=order.lanes)
        workers = named._num_workers if order.workers is None else order.workers
        named.close()
        loader = self._loader = named._with_workers(num_workers=workers)
        if order.state is not None:
            import torch

            loader.load_state_dict(torch.load(order.state, weights_only=True))
        encoders = [stage.encoder for stage in upstream(loader._pipeline) if isinstance(stage, Encode)]
        names = list(dict.fromkeys(type(encoder).__qualname__ for encoder in encoders))
        return Begun(loader._job.lanes, len(loader._own_lanes), workers, names)

    def _explain(self, loader: SavableLoader, expected: Any, picture: Path) -> Explained:
        step = loader._at.history[-1][0]
        slot = loader._ranks.slot(step)
        difference = find_difference(expected, self._batch)
        assert difference is not None
        drawn = draw_difference(difference, picture)
        return Explained(
            slot,
            slot % loader._job.lanes,
            difference.path,
            difference.expected,
            f"{difference.found}{difference.place}",
            difference.rows,
            [f"shard {sample.shard}, key {sample.key}" for sample in _samples(loader, difference)],
            str(picture) if drawn else None,
        )

    def close(self) -> None:
        """End the loader's workers."""
        if self._loader is not None:
            self._loader.close()


def _samples(loader: SavableLoader, difference: Difference) -> list[TracedSample]:
    """Those of the row that differs, of all rows if it is none of the batch's, none if they cannot be found again."""
    try:
        rows = loader.trace().rows
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
    """Obey orders until there are no more, or one fails."""
    leg = Leg()
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
    """Keep the two pipes for ourselves: the user's code reads nothing, and prints to stderr."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        serve(orders, answers)
    except (KeyboardInterrupt, BrokenPipeError):  # the command hears Ctrl-C too, and tells it
        sys.exit(130)


if __name__ == "__main__":
    main()
