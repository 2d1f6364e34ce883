"""An `Engine` in this process that behaves like a cluster losing machines."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from savable_pipeline.core.job_engine import J, R


class ToyEngine:
    """An engine that runs pickled jobs in another order and folder, and some twice, as if a machine was lost."""

    def __init__(self, elsewhere: Path, seed: int = 0) -> None:
        self._elsewhere = elsewhere
        self._rng = random.Random(seed)
        self.runs = 0

    def each(self, function: Callable[[J], R], jobs: Iterable[J]) -> Generator[tuple[J, R], None, None]:
        shuffled = list(jobs)
        self._rng.shuffle(shuffled)
        for job in shuffled:
            for _ in range(self._rng.choice([1, 2])):
                result = self._run(function, job)
            yield job, result

    def _run(self, function: Callable[[J], R], job: J) -> R:
        self.runs += 1
        self._elsewhere.mkdir(exist_ok=True)
        here = Path.cwd()
        os.chdir(self._elsewhere)
        try:
            there: J = pickle.loads(pickle.dumps(job))
            result: R = pickle.loads(pickle.dumps(function(there)))
            return result
        finally:
            os.chdir(here)
