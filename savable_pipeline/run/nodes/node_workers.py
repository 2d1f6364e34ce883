"""`SocketWorkers` on other machines, and `RayWorkers` on machines that Ray finds.

With Ray, one actor on each machine (node) runs an agent, which starts workers (agent.py):

    loader ── creates actors, and asks each every two seconds for its address ──▶ Ray
           ◀── address and key of each running agent ──
    loader ◀═══ everything else: the TCP connections of `SocketHost` ═══▶ nodes

Only the loader replaces actors. Ray transfers addresses and keys, and no byte of a batch. A cluster that scales itself
grows while actors wait for a machine.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.connection import Host
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.nodes.agent import Agent
from savable_pipeline.run.nodes.socket_host import AgentAddress, SocketHost
from savable_pipeline.run.nodes.wire import can_authenticate_bodies, read_key


@dataclass(frozen=True)
class NodeWorkers(Workers):
    """Settings of workers on other machines.

    The machines determine the number of workers.
    """

    count: int | None = field(default=1, kw_only=True)
    start_method: None = field(default=None, init=False)
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

    def _open_agents(self) -> Callable[[], Sequence[AgentAddress]]:
        """Return a function that returns the current addresses of the agents."""
        raise NotImplementedError

    def host(self, job: LaneJob, share: tuple[int, int] = (0, 1)) -> Host:
        """Return the host that starts the workers of a loader.

        Args:
            job: The pipeline and the settings of its lanes.
            share: The loader's rank and the number of ranks.
        """
        return SocketHost(job, self._open_agents(), share, sorted(self.allow), trusted=self.trusted_network)


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
            authentication code, and the package cryptography is not needed.
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
        self._open_agents()

    def _open_agents(self) -> Callable[[], Sequence[AgentAddress]]:
        key = read_key(self.key_file)
        addresses = [AgentAddress.of(agent, key) for agent in self.agents]
        return lambda: addresses


log = logging.getLogger(__name__)

_ASK_S = 2.0  # interval at which actors are asked for their addresses
_MOST_START_S = 300.0  # longest time to wait until the least number of nodes runs


@dataclass(frozen=True)
class RayWorkers(NodeWorkers):
    """Workers on nodes of a Ray cluster, one agent each. No setting changes a batch.

    The ranks of a Ray job or of torchrun share the nodes. Each node needs this library and the user's modules.

    Args:
        nodes: The number of nodes, or a pair: the least to start with and the most to request.
        num_cpus: Workers per node. Ray reserves as many CPUs.
        resources: Other resources that Ray reserves on a node, by name.
        timeout: Seconds for a batch before its worker is replaced (default 600).
        max_restarts: How many workers may be replaced in the run so far, except those of lost nodes (default 100).
        prefetch: How many batches a worker may be ahead (default 2).
        allow: Differences to accept between this machine and a node, by the names in the error message, such as
            "processor".
        trusted_network: Whether only machines that you trust can change the traffic. Batches then have no
            authentication code, and the package cryptography is not needed.
        count: Do not pass it: `nodes` and `num_cpus` decide.
        start_method: Not an argument of these workers.

    Raises:
        ValueError: A number is out of range, or the package cryptography is not installed. The loader raises it if
            Ray is not installed or there is no cluster.

    Example:
        >>> sp.RayWorkers(nodes=(2, 8), num_cpus=16, resources={"cpu_node": 1}).nodes
        (2, 8)
    """

    nodes: int | tuple[int, int]
    num_cpus: int
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.range
        if not 1 <= least <= most or self.num_cpus < 1:
            raise ValueError(f"nodes and num_cpus must be at least 1, not {self.nodes!r} and {self.num_cpus}")

    @property
    def range(self) -> tuple[int, int]:
        """The least number of nodes to start with, and the most to request."""
        return self.nodes if isinstance(self.nodes, tuple) else (self.nodes, self.nodes)

    def _open_agents(self) -> Callable[[], Sequence[AgentAddress]]:
        nodes = RayNodes(self)
        nodes.wait()
        return nodes.addresses


class AgentActor:
    """Ray actor that runs an agent in a thread.

    The agent ends with the actor's process.
    """

    def __init__(self, workers: int) -> None:
        import ray

        self._key = secrets.token_bytes(32)
        self._agent = Agent(f"{ray.util.get_node_ip_address()}:0", self._key, workers)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._agent.step()

    def address_and_key(self) -> tuple[str, bytes]:
        """Return the agent's address and key."""
        return self._agent.address, self._key


class RayNodes:
    """Actors of a Ray cluster, one for each node, and the addresses of their agents.

    Raises ValueError if Ray is not installed or there is no cluster.
    """

    def __init__(self, workers: RayWorkers) -> None:
        self._ray = _connect()
        self._least, self._most = workers.range
        self._workers = workers.num_cpus
        self._options: dict[str, Any] = {
            "num_cpus": workers.num_cpus,
            "resources": dict(workers.resources),
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
            "get_if_exists": True,
        }
        self._actors: dict[int, Any] = {}  # by number, 0 … most - 1
        self._address_calls: dict[int, Any] = {}  # by number of the actor, the pending call that returns its address
        self._known: dict[int, AgentAddress] = {}  # by number of the actor
        self._last_asked_s = -_ASK_S  # time at which the actors were last asked

    def addresses(self) -> list[AgentAddress]:
        """Return the addresses of the running agents.

        Every two seconds, update them first.
        """
        if time.monotonic() - self._last_asked_s >= _ASK_S:
            self._last_asked_s = time.monotonic()
            self._update_addresses()
        return [self._known[number] for number in sorted(self._known)]

    def _update_addresses(self) -> None:
        """Read the answers of actors, replace actors that died, and ask all again for their addresses."""
        for number, call in list(self._address_calls.items()):
            finished_calls, _ = self._ray.wait([call], timeout=0)
            if finished_calls:
                del self._address_calls[number]
                try:
                    self._known[number] = AgentAddress.of(*self._ray.get(call))
                except self._ray.exceptions.RayError as error:
                    log.warning("node %d of Ray is lost: %s", number, str(error).splitlines()[0])
                    self._known.pop(number, None)
                    del self._actors[number]
        for number in range(self._most):
            if number not in self._actors:
                name = f"savable_pipeline node {number} with {self._workers}"
                actor = self._ray.remote(AgentActor).options(name=name, **self._options)
                self._actors[number] = actor.remote(self._workers)
            if number not in self._address_calls:
                self._address_calls[number] = self._actors[number].address_and_key.remote()

    def wait(self) -> None:
        """Wait for the least number of nodes, or raise `WorkerError` after a timeout."""
        deadline = time.monotonic() + _MOST_START_S
        while len(self.addresses()) < self._least:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"Ray provided {len(self._known)} of {self._least} nodes in {_MOST_START_S:g} s. See `ray status` "
                    f"(num_cpus={self._workers}, resources={self._options['resources']})."
                )
            self._ray.wait([*self._address_calls.values()], timeout=_ASK_S / 4)
            self._last_asked_s = -_ASK_S


def _connect() -> Any:
    """Return the module `ray`, connected to its cluster. All ranks of one run use the same namespace."""
    try:
        import ray
    except ImportError as error:
        raise ValueError("RayWorkers needs Ray. Install it on every node: pip install ray") from error
    if not ray.is_initialized():
        variables = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        run = [os.environ[name] for name in variables if name in os.environ]
        try:
            ray.init(
                address=os.environ.get("RAY_ADDRESS", "auto"),
                namespace=" ".join(["savable_pipeline", *run]) if run else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except ConnectionError as error:
            raise ValueError(
                f"RayWorkers found no Ray cluster: {error}. Run `ray start --head`, or set RAY_ADDRESS."
            ) from error
    return ray
