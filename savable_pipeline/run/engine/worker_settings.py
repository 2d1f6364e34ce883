"""`Workers`: how a loader's workers are started, awaited and replaced."""

from __future__ import annotations

import multiprocessing
from dataclasses import KW_ONLY, dataclass
from multiprocessing.context import BaseContext

from savable_pipeline.run.engine.connection import Host
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.engine.process_host import ProcessHost
from savable_pipeline.run.engine.thread_host import ThreadHost


@dataclass(frozen=True)
class Workers:
    """The workers of a rank, for `SavableLoader(..., workers=)`. None of it changes a batch.

    Args:
        count: How many, in place of `num_workers=`.
        start_method: "fork", "forkserver", "spawn" or a context of multiprocessing. None: "fork" if available. Or
            "thread": threads of this process, for functions that do not draw from global generators.
        timeout: Seconds for a batch before its worker is replaced; a thread cannot be, and is an error.
        max_restarts: Workers that may be replaced, in the run so far.
        prefetch: Batches that a worker may be ahead.

    Raises:
        ValueError: A number is out of range, or this platform lacks the start method.

    Example:
        >>> sp.Workers(8, start_method="spawn", timeout=60).prefetch
        2
    """

    count: int | None = None
    _: KW_ONLY
    start_method: str | BaseContext | None = None
    timeout: float = 600.0
    max_restarts: int = 100
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 0:
            raise ValueError(f"the number of workers must be at least 0, not {self.count}")
        if self.prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, not {self.prefetch}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, not {self.timeout}")
        if self.start_method != "thread":
            self.context()

    def context(self) -> BaseContext:
        """How worker processes are started."""
        method = self.start_method
        if isinstance(method, BaseContext):
            return method
        methods = multiprocessing.get_all_start_methods()
        if method is not None and method not in methods:
            raise ValueError(f"start_method must be one of {', '.join(methods)}, thread, not {method!r}")
        return multiprocessing.get_context(method or ("fork" if "fork" in methods else "spawn"))

    def host(self, job: LaneJob, share: tuple[int, int] = (0, 1)) -> Host:
        """Return what begins the workers of a loader.

        Args:
            job: The pipeline and settings of their lanes.
            share: The loader's rank and the number of ranks, for workers that all ranks share.
        """
        return ThreadHost(job) if self.start_method == "thread" else ProcessHost(job, self.context())
