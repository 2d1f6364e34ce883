"""`SocketWorkers`: workers on other machines, and the common settings of such."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from savable_pipeline.run.engine.connection import Host
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.nodes.handshake import read_key
from savable_pipeline.run.nodes.socket_host import AgentAddress, SocketHost
from savable_pipeline.run.nodes.wire import can_authenticate_bodies


@dataclass(frozen=True)
class NodeWorkers(Workers):
    """Settings of workers on other machines, which decide their number.

    See `SocketHost.count`.
    """

    count: int | None = field(default=1, kw_only=True)
    start_method: None = field(default=None, init=False)
    timeout: float = field(default=600.0, kw_only=True)
    max_restarts: int = field(default=100, kw_only=True)
    prefetch: int = field(default=2, kw_only=True)
    allow: Collection[str] = field(default=(), kw_only=True)
    trusted_network: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.count not in (None, 1):
            raise ValueError(
                f"count={self.count} does not apply here. Set the number of workers on the nodes (`savable serve`)."
            )
        if not self.trusted_network and not can_authenticate_bodies():
            raise ValueError(
                "remote workers need `cryptography`. Run pip install cryptography on all machines, or pass "
                "trusted_network=True on a trusted network."
            )
        object.__setattr__(self, "count", 1)
        super().__post_init__()


@dataclass(frozen=True)
class SocketWorkers(NodeWorkers):
    """Workers that agents on other machines run. No setting changes a batch.

    Run `savable serve` on each machine. The ranks share each agent's workers. If an agent is lost, the others do its
    work until it answers again.

    Args:
        agents: Addresses of the agents, HOST:PORT.
        key_file: A file with the key that the agents have too, and that nobody else can read.
        timeout: Seconds for a batch before its worker is replaced (default 600).
        max_restarts: How many workers may be replaced in the run so far, except those of lost nodes (default 100).
        prefetch: How many batches a worker may be ahead (default 2).
        allow: Differences to accept between this machine and a node, by the names in the error message, such as
            "processor".
        trusted_network: Whether only machines that you trust can change the traffic. Batches then have no
            authentication
            code, and the package cryptography is not needed.
        count: Do not pass it: the agents decide how many there are.
        start_method: Not an argument of these workers.

    Raises:
        ValueError: An address or a number is invalid, others can read the key, or the package cryptography is not
            installed.

    Example:
        >>> workers = sp.SocketWorkers(["cpu1:7000", "cpu2:7000"], key_file="nodes.key")  # doctest: +SKIP
        >>> loader = sp.SavableLoader(pipeline, seed=7, workers=workers)  # doctest: +SKIP
    """

    agents: Sequence[str]
    key_file: str | os.PathLike[str] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.agents, str) or not self.agents:
            raise ValueError(f"agents must be a list of HOST:PORT, not {self.agents!r}")
        self._addresses()

    def _addresses(self) -> list[AgentAddress]:
        key = read_key(self.key_file)
        return [AgentAddress.of(agent, key) for agent in self.agents]

    def host(self, job: LaneJob, share: tuple[int, int] = (0, 1)) -> Host:
        """Return the host that starts the workers of a loader.

        Args:
            job: The pipeline and the settings of its lanes.
            share: The loader's rank and the number of ranks.
        """
        addresses = self._addresses()
        return SocketHost(job, lambda: addresses, share, sorted(self.allow), trusted=self.trusted_network)
