"""`RayEngine`: jobs as tasks of a Ray cluster.

Ray chooses the node of each task, and repeats a task when its node is lost.

    this process ── a task per job, some more than the cluster has processors ──▶ Ray ──▶ nodes
                 ◀── results, in the order of arrival ──

Only this file imports ray, when an engine is created.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import socket
from collections.abc import Callable, Generator, Iterable
from typing import Any

from savable_pipeline.core.job_engine import J, R
from savable_pipeline.errors import RemoteError, SavableError, WorkerError

_RETRIES = 20  # most retries of a task whose node is lost or whose process is killed
_CONNECT_S = 10.0  # seconds to wait for an answer of the cluster
_AHEAD = 2  # tasks submitted per processor, so that no processor waits, and Ray adds nodes to a growing cluster


class RayEngine:
    """An `Engine` on the Ray cluster of RAY_ADDRESS, or on that of this machine.

    It runs at most `at_once` tasks at a time. None: twice the number of the cluster's processors. At the end of its
    `with` block it disconnects from the cluster, unless the program was connected before.

    Raises ValueError if Ray is not installed or there is no cluster.
    """

    def __init__(self, at_once: int | None = None) -> None:
        if at_once is not None and at_once < 1:
            raise ValueError(f"workers must be 1 or more, not {at_once}")
        self._at_once = at_once
        self._ray = _imported()
        self._was_connected = self._ray.is_initialized()
        if not self._was_connected:
            _connect(self._ray)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._was_connected:
            self._ray.shutdown()

    def each(self, function: Callable[[J], R], jobs: Iterable[J]) -> Generator[tuple[J, R], None, None]:
        """Yield the jobs and the results of `function`. See `Engine`."""
        task = self._ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_on_node)
        versions, remaining = _versions(), iter(jobs)
        waiting: dict[Any, J] = {}  # job by the reference of its result
        try:
            while True:
                for job in itertools.islice(remaining, max(0, self._room() - len(waiting))):
                    waiting[task.options(name=job.name).remote(function, job, versions)] = job
                if not waiting:
                    return
                finished, _ = self._ray.wait([*waiting])
                for ref in finished:
                    job = waiting.pop(ref)
                    yield job, self._result(ref, job.name)
        finally:
            for ref in waiting:
                self._ray.cancel(ref, force=True)

    def _room(self) -> int:
        """Return the most tasks to submit at a time."""
        return self._at_once or max(1, _AHEAD * int(self._ray.cluster_resources().get("CPU", 0)))

    def _result(self, ref: Any, name: str) -> Any:
        """Return the result of the job `name`. Raises its own errors, and `WorkerError` for those of Ray."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, SavableError | ValueError):
                raise error.cause from None
            raise
        except exceptions.RayError as error:
            raise WorkerError(
                f"{name}: Ray gave up after {_RETRIES} retries. Check the nodes' memory, and run it again\n{error}"
            ) from error


def _imported() -> Any:
    """Return the module ray. Raises ValueError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError("the engine ray needs Ray. Run `pip install ray` on every node") from error
    return ray


def _connect(ray: Any) -> None:
    """Connect to the cluster. Raises ValueError if there is none."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit() and "://" not in host:  # without this check, Ray would try for five minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except OSError as error:
        raise ValueError(
            f"no Ray cluster at {address}. Start one by `ray start --head`, or set RAY_ADDRESS to another"
        ) from error


def _versions() -> dict[str, str]:
    """Return the versions of libraries that decide the bytes of a shard, and which samples are rejected."""
    names = ("savable_pipeline", "pillow", "pyarrow")
    return {name: found.version for name in names for found in importlib.metadata.distributions(name=name)}


def _on_node(function: Callable[[J], R], job: J, expected: dict[str, str]) -> R:
    """Run a job in a process on a node. Raises `SavableError` for a node with other versions."""
    node = socket.gethostname()
    if _versions() != expected:
        raise SavableError(f"node {node} has {_versions()}, this machine {expected}. Install the same on both")
    try:
        return function(job)
    except RemoteError as error:
        raise RemoteError(f"node {node}: {error}") from error
    except OSError as error:
        raise SavableError(f"node {node}: {error}. Use storage that all nodes share") from error
