"""A Ray cluster of processes on this machine: a head that runs no tasks, and nodes that can be killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import descendants

_STORE_BYTES = 80_000_000
_NOTICES = {  # settings by which a node counts as dead after three seconds without a heartbeat
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """A cluster of nodes with one processor each, whose address is in RAY_ADDRESS."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _NOTICES})
        self.nodes = [self.add() for _ in range(nodes)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        """Add a node."""
        return self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)

    def kill(self, node: Any) -> None:
        """Kill a node like a machine that loses power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_cluster(nodes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Yield a cluster whose nodes import from this checkout. The test is skipped if ray is not installed."""
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}")
    cluster = RayCluster(nodes)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        yield cluster
    finally:
        cluster.close()


def is_writing(node: Any, folder: Path) -> bool:
    """Return whether a process of a node has a shard open below a folder."""
    return bool(writer(node, folder))


def writer(node: Any, folder: Path) -> int:
    """Return a process of a node that has a shard open below a folder, or 0."""
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in descendants(raylet):
        with contextlib.suppress(OSError):
            links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: PTH115
            if any(link.startswith(str(folder)) and ".tar" in link for link in links):
                return pid
    return 0
