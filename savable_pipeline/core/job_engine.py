"""`Engine`: protocol of what runs jobs on other machines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar


class Named(Protocol):
    """Picklable job with a name for people."""

    @property
    def name(self) -> str:
        """Name shown to people."""


J = TypeVar("J", bound=Named)
R = TypeVar("R")


class Engine(Protocol):
    """Calls a function with many jobs, each at least once.

    A job whose machine is lost is run again. A machine that is considered lost may still run, so two runs of one job
    may overlap.
    """

    def each(self, function: Callable[[J], R], jobs: Iterable[J]) -> Generator[tuple[J, R], None, None]:
        """Yield pairs of a job and its result, in the order in which they finish.

        Args:
            function: A module-level function, called with each job.
            jobs: The jobs.

        Raises:
            WorkerError: A machine was lost too often. Errors that `function` raises are raised as well.
        """
