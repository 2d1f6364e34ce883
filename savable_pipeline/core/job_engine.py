"""`Engine`: something that runs jobs on other machines. It knows nothing of shards; jobs know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar


class Named(Protocol):
    """A job: picklable, with a name for people."""

    @property
    def name(self) -> str:
        """The name shown to people."""


J = TypeVar("J", bound=Named)
R = TypeVar("R")


class Engine(Protocol):
    """Runs a function of a module on many jobs, each at least once: a job whose machine is lost is run again.

    A machine taken for lost may keep running for a while, so two runs of one job may overlap.
    """

    def each(self, function: Callable[[J], R], jobs: Iterable[J]) -> Generator[tuple[J, R], None, None]:
        """Yield the jobs and their results, in the order in which they finish.

        Args:
            function: A function of a module; it is called with each job.
            jobs: The jobs.

        Raises:
            WorkerError: A machine was lost too often; what a job raised is raised as well.
        """
