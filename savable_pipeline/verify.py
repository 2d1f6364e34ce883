"""`verify`: runs a user's loader uninterrupted and cut, side by side in interpreters of their own, and compares.

    uninterrupted   │ 0 ──────────────────────────────────────────▶ steps │     one interpreter, PYTHONHASHSEED=1
                    │ digest = digest = digest = …                        │
    cut             │ 0 ──────▶ c₁ │ c₁ ────────────▶ c₂ │ c₂ ──▶ steps   │     an interpreter a leg, 2, 3, 4, …

Both take a step, and the digests of their batches are compared; so nothing is kept but a state at each cut, and, at the
first difference, one batch. Neither the user's code nor torch is imported here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from savable_pipeline.errors import SavableError
from savable_pipeline.keys import key, permutation
from savable_pipeline.verify_leg import (
    ANSWERS,
    ORDERS,
    Begin,
    Begun,
    Done,
    Explain,
    Explained,
    Failed,
    Keep,
    Save,
    Step,
    Stepped,
)

_EXIT_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be compared; `steps=None` is two batches of each lane, `draw` keys the random cuts.

    Raises ValueError for settings that make no sense.
    """

    target: str
    steps: int | None = None
    cuts: tuple[int, ...] = ()
    random_cuts: int = 3
    draw: int = 0
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
            raise ValueError("nothing would be cut: give --cut STEP or --random-cuts")

    def bounds(self, steps: int) -> list[int]:
        """Where the legs begin and end: 0, the cuts, `steps`. Raises ValueError for a cut outside."""
        outside = [cut for cut in self.cuts if not 0 < cut < steps]
        if outside:
            raise ValueError(f"--cut {outside[0]}: a cut lies between two of the {steps} steps, 1 to {steps - 1}")
        drawn = permutation(key(self.draw, "verify-resume", steps), steps - 1)[: self.random_cuts] + 1
        return sorted({0, steps, *self.cuts, *map(int, drawn)})


@dataclass(frozen=True, slots=True)
class LegRun:
    """A leg of the run that is cut: from which step, with how many workers and which hash seed."""

    number: int
    start: int
    workers: int
    hash_seed: int


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference: in the step that a leg took after `step` others; `error` is what only one run raised."""

    step: int
    leg: LegRun
    where: Explained | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared: of `steps`, `equal` are, and `ends` of these are ends of epochs; `finding`, if they differ."""

    begun: Begun
    steps: int
    equal: int
    ends: int
    legs: tuple[LegRun, ...]
    finding: Finding | None = None


class _Interpreter:
    """A fresh Python with a loader in it, which obeys orders."""

    def __init__(self, hash_seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "savable_pipeline.verify_leg"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )

    def send(self, order: ORDERS) -> None:
        """Give an order; `answer` waits until it is done."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says how it ended

    def answer(self) -> ANSWERS:
        """What came of the order before. Raises `SavableError` if the interpreter died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SavableError(
                f"an interpreter that ran the loader ended with exit code {self._process.wait()}; see above what it "
                "printed, if anything"
            )
        answer: ANSWERS = msgspec.json.decode(line, type=ANSWERS)
        return answer

    def __enter__(self) -> _Interpreter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let it end its workers; at once after an error."""
        if kind is not None:
            self._process.terminate()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def verify(plan: Plan, progress: Callable[[int, int], None]) -> Verdict:
    """Compare until the first difference. Raises `SavableError` if the uninterrupted run fails, else ValueError."""
    with tempfile.TemporaryDirectory(prefix="savable-verify-") as folder, _Interpreter(hash_seed=1) as reference:
        reference.send(Begin(plan.target, plan.seed, plan.lanes))
        begun = _whole(reference.answer())
        assert isinstance(begun, Begun)
        steps = plan.steps or 2 * begun.own_lanes
        comparison = _Comparison(plan, reference, Path(folder), steps, progress)
        legs: list[LegRun] = []
        for number, (start, stop) in enumerate(pairwise(plan.bounds(steps)), start=1):
            legs.append(LegRun(number, start, plan.workers[(number - 1) % len(plan.workers)], number + 1))
            finding = comparison.run(legs[-1], stop)
            if finding is not None:
                return Verdict(begun, steps, finding.step, comparison.ends, tuple(legs), finding)
    progress(steps, steps)
    return Verdict(begun, steps, steps, comparison.ends, tuple(legs))


class _Comparison:
    """The uninterrupted run, with which the legs of the other are compared one after the other."""

    def __init__(
        self, plan: Plan, reference: _Interpreter, folder: Path, steps: int, progress: Callable[[int, int], None]
    ) -> None:
        self._plan = plan
        self._reference = reference
        self._state = folder / "state.pt"
        self._batch = folder / "batch.pickle"
        self._steps = steps
        self._progress = progress
        self.ends = 0

    def run(self, leg: LegRun, stop: int) -> Finding | None:
        """Run a leg up to step `stop`, side by side with the uninterrupted run, until they differ."""
        plan = self._plan
        with _Interpreter(leg.hash_seed) as interpreter:
            state = str(self._state) if leg.start else None
            interpreter.send(Begin(plan.target, plan.seed, plan.lanes, leg.workers, state))
            answer = interpreter.answer()
            for step in range(leg.start, stop):
                if isinstance(answer, Failed):
                    return Finding(step, leg, error=answer.error)
                self._progress(step, self._steps)
                self._reference.send(Step())
                interpreter.send(Step())
                expected, answer = _whole(self._reference.answer()), interpreter.answer()
                self.ends += answer == expected == Stepped(None)
                if answer != expected and not isinstance(answer, Failed):
                    return self._finding(step, leg, interpreter, expected, answer)
            if stop < self._steps and not isinstance(answer, Failed):
                interpreter.send(Save(str(self._state)))
                answer = interpreter.answer()
            if isinstance(answer, Failed):
                return Finding(stop - 1, leg, error=answer.error)
        return None

    def _finding(self, step: int, leg: LegRun, interpreter: _Interpreter, expected: ANSWERS, found: ANSWERS) -> Finding:
        assert isinstance(expected, Stepped) and isinstance(found, Stepped)
        if expected.digest is None or found.digest is None:
            longer = "uninterrupted" if found.digest is None else "cut"
            return Finding(step, leg, error=f"the epoch ended, but the {longer} run has another batch in it")
        picture = self._plan.pictures / f"verify-resume-step-{step + 1:05d}.png"
        self._reference.send(Keep(str(self._batch)))
        answer = self._reference.answer()
        if isinstance(answer, Done):
            interpreter.send(Explain(str(self._batch), str(picture)))
            answer = interpreter.answer()
        if isinstance(answer, Failed):
            return Finding(step, leg, error=f"the batches differ, but cannot be shown: {answer.error}")
        assert isinstance(answer, Explained)
        return Finding(step, leg, answer)


def _whole(answer: ANSWERS) -> ANSWERS:
    """An answer that is no failure. Raises `SavableError` for one."""
    if isinstance(answer, Failed):
        raise SavableError(answer.error)
    return answer
