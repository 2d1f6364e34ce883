"""An `Engine` of this process alone, which loses machines as a cluster does."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from savable_pipeline.core.job_engine import J, R


class ToyEngine:
    """Runs pickled jobs in another order, in another folder; some twice, as if the first run's machine was lost."""

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
