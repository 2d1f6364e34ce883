"""`Workers`: how a loader's workers are started, awaited and replaced."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import KW_ONLY, dataclass

from savable_pipeline.run.engine.connection import Host
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.engine.process_host import ProcessHost
from savable_pipeline.run.engine.thread_host import ThreadHost


@dataclass(frozen=True)
class Workers:
    """Workers of a rank, for `SavableLoader(workers=)`. No setting changes a batch.

    Args:
        count: How many, in place of `num_workers=`.
        start_method: "fork", "forkserver" or "spawn". None: "fork" if available. Or "thread": threads of this process,
            for functions that do not draw from global generators.
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
    start_method: str | None = None
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
        methods = [*multiprocessing.get_all_start_methods(), "thread"]
        if self.start_method not in (None, *methods):
            raise ValueError(f"start_method must be one of {', '.join(methods)}, not {self.start_method!r}")

    def host(self, job: LaneJob, share: tuple[int, int] = (0, 1)) -> Host:
        """Return the host that starts the workers of a loader.

        Args:
            job: The pipeline and settings of the lanes that they run.
            share: The rank and the number of ranks, for a host whose workers are divided among all ranks.
        """
        if self.start_method == "thread":
            return ThreadHost(job)
        return ProcessHost(job, self.start_method or ("fork" if hasattr(os, "fork") else "spawn"))
