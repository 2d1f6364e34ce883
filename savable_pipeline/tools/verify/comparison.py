"""`verify`: compares an uninterrupted run with an interrupted and resumed one.

    uninterrupted   │ 0 ──────────────────────────────────────────▶ steps │     one interpreter, PYTHONHASHSEED=1
                    │ digest = digest = digest = …                        │
    interrupted     │ 0 ──────▶ c₁ │ c₁ ────────────▶ c₂ │ c₂ ──▶ steps   │     an interpreter per segment, 2, 3, 4, …

Both run side by side, each in its own interpreter. After each step, the digests of both batches are compared. So only
the states at the interruptions are written to a file, and one batch at the first difference. This process imports
neither the user's code nor torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.verify.segment import (
    Done,
    Explain,
    Explained,
    Failed,
    LoaderStarted,
    Order,
    Save,
    SaveBatch,
    SegmentAnswer,
    StartLoader,
    Stepped,
    TakeBatch,
)

_EXIT_WAIT_S = 10.0  # seconds for an interpreter to exit before it is killed


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """Settings of a comparison.

    `steps=None` means two batches of each lane. `cuts` are the steps after which the run is interrupted, and `cut_seed`
    is the seed of `random_cuts` further interruptions. Raises ValueError for settings that would compare nothing.
    """

    target: str
    steps: int | None = None
    cuts: tuple[int, ...] = ()
    random_cuts: int = 3
    cut_seed: int = 0
    workers: tuple[int, ...] = (2, 0)
    seed: int | None = None
    lanes: int | None = None
    pictures: Path = Path()

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 2:
            raise ValueError(f"--steps must be at least 2, to be cut between them, not {self.steps}")
        if self.random_cuts < 0 or not all(number >= 0 for number in self.workers):
            raise ValueError(f"--random-cuts and --workers must be at least 0: {self.random_cuts}, {self.workers}")
        if not self.cuts and not self.random_cuts:
            raise ValueError("no interruption is chosen. Pass --cut STEP or --random-cuts")

    def bounds(self, steps: int) -> list[int]:
        """Return the steps at which segments start and end, from 0 to `steps`.

        Raises ValueError for an interruption outside of the run.
        """
        outside = [cut for cut in self.cuts if not 0 < cut < steps]
        if outside:
            raise ValueError(f"--cut {outside[0]}: a cut is between two of the {steps} steps, 1 to {steps - 1}")
        drawn = permutation(derive_key(self.cut_seed, "verify-resume", steps), steps - 1)[: self.random_cuts] + 1
        return sorted({0, steps, *self.cuts, *map(int, drawn)})


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of the interrupted run, which a new interpreter runs.

    It starts after step `start`.
    """

    number: int
    start: int
    workers: int
    hash_seed: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First difference, after `step` equal steps.

    `error` is set if the two batches cannot be compared, such as when only one of the runs raised.
    """

    step: int
    segment: Segment
    explained: Explained | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a comparison: the first `equal_batches` of `steps` batches are equal.

    `epoch_ends` of these are the last batch of an epoch. `loader` has facts about the uninterrupted run's loader.
    """

    loader: LoaderStarted
    steps: int
    equal_batches: int
    epoch_ends: int
    segments: tuple[Segment, ...]
    mismatch: Mismatch | None = None


class _Interpreter:
    """New Python process that runs a loader, and carries out orders as a `SegmentProcess`."""

    def __init__(self, hash_seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "savable_pipeline.tools.verify.segment"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )

    def send(self, order: Order) -> None:
        """Send an order. `read_answer` waits until the order is carried out."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `read_answer` raises an error then
            self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            self._process.stdin.flush()

    def read_answer(self) -> SegmentAnswer:
        """Return the answer to the last order.

        Raises `SavableError` if the interpreter died.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SavableError(
                f"an interpreter that ran the loader ended with exit code {self._process.wait()}; its own "
                "output, if any, is above"
            )
        answer: SegmentAnswer = msgspec.json.decode(line, type=SegmentAnswer)
        return answer

    def __enter__(self) -> _Interpreter:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """End the interpreter. It stops its workers first, unless this process raises an error."""
        if error_type is not None:
            self._process.terminate()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def verify(plan: VerifyPlan, progress: Callable[[int, int], None]) -> Verdict:
    """Compare the runs up to the first difference.

    `progress` is called with the number of steps compared and the number of all steps. Raises `SavableError` if the
    uninterrupted run fails, and ValueError for an interruption outside of the run.
    """
    with tempfile.TemporaryDirectory(prefix="savable-verify-") as folder, _Interpreter(hash_seed=1) as reference:
        reference.send(StartLoader(plan.target, plan.seed, plan.lanes))
        loader = _check_success(reference.read_answer())
        assert isinstance(loader, LoaderStarted)
        steps = plan.steps or 2 * loader.own_lanes
        comparison = _Comparison(plan, reference, Path(folder), steps, progress)
        segments: list[Segment] = []
        for number, (start, stop) in enumerate(pairwise(plan.bounds(steps)), start=1):
            segments.append(Segment(number, start, plan.workers[(number - 1) % len(plan.workers)], number + 1))
            mismatch = comparison.run(segments[-1], stop)
            if mismatch is not None:
                return Verdict(loader, steps, mismatch.step, comparison.epoch_ends, tuple(segments), mismatch)
    progress(steps, steps)
    return Verdict(loader, steps, steps, comparison.epoch_ends, tuple(segments))


class _Comparison:
    """Comparison of each segment with the uninterrupted run, whose interpreter is `reference`."""

    def __init__(
        self, plan: VerifyPlan, reference: _Interpreter, folder: Path, steps: int, progress: Callable[[int, int], None]
    ) -> None:
        self._plan = plan
        self._reference = reference
        self._state_file = folder / "state.pt"
        self._batch_file = folder / "batch.pickle"
        self._steps = steps
        self._progress = progress
        self.epoch_ends = 0

    def run(self, segment: Segment, stop: int) -> Mismatch | None:
        """Run a segment beside the uninterrupted run, to step `stop` or a difference."""
        plan = self._plan
        with _Interpreter(segment.hash_seed) as interpreter:
            state = str(self._state_file) if segment.start else None
            interpreter.send(StartLoader(plan.target, plan.seed, plan.lanes, segment.workers, state))
            answer = interpreter.read_answer()
            for step in range(segment.start, stop):
                if isinstance(answer, Failed):
                    return Mismatch(step, segment, error=answer.error)
                self._progress(step, self._steps)
                self._reference.send(TakeBatch())
                interpreter.send(TakeBatch())
                expected = _check_success(self._reference.read_answer())
                answer = interpreter.read_answer()
                self.epoch_ends += answer == expected and isinstance(expected, Stepped) and expected.ends_epoch
                if answer != expected and not isinstance(answer, Failed):
                    return self._explain(step, segment, interpreter, expected, answer)
            if stop < self._steps and not isinstance(answer, Failed):
                interpreter.send(Save(str(self._state_file)))
                answer = interpreter.read_answer()
            if isinstance(answer, Failed):
                return Mismatch(stop - 1, segment, error=answer.error)
        return None

    def _explain(
        self, step: int, segment: Segment, interpreter: _Interpreter, expected: SegmentAnswer, found: SegmentAnswer
    ) -> Mismatch:
        """Find the first difference of the two batches of a step, and draw it if images differ."""
        assert isinstance(expected, Stepped) and isinstance(found, Stepped)
        if expected.digest == found.digest:
            longer = "uninterrupted" if found.ends_epoch else "cut"
            return Mismatch(step, segment, error=f"the epoch ended, but the {longer} run has another batch in it")
        picture = self._plan.pictures / f"verify-resume-step-{step + 1:05d}.png"
        self._reference.send(SaveBatch(str(self._batch_file)))
        answer = self._reference.read_answer()
        if isinstance(answer, Done):
            interpreter.send(Explain(str(self._batch_file), str(picture)))
            answer = interpreter.read_answer()
        if isinstance(answer, Failed):
            return Mismatch(step, segment, error=f"the batches differ, but cannot be shown: {answer.error}")
        assert isinstance(answer, Explained)
        return Mismatch(step, segment, answer)


def _check_success(answer: SegmentAnswer) -> SegmentAnswer:
    """Return the answer, or raise `SavableError` for a failure."""
    if isinstance(answer, Failed):
        raise SavableError(answer.error)
    return answer
