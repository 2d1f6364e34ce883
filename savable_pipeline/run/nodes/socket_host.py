"""`SocketHost`: starts workers that agents on other machines run.

    loader ── greets each agent, in a thread ──▶ agent ── starts ──▶ session, one process per loader and node
           ◀────── a connection for the job, one for each worker (wire.py) ──────▶

An agent is a process on another machine, called a node, that starts workers (agent.py). A loader reads only when it
wants a batch, and then pings silent connections. A connection is lost if several pings in a row are not answered while
the loader waits. So an agent does not count as lost while the trainer is suspended or busy. A lost connection is not
reopened. Its worker is replaced by one of an agent that answers. Agents that do not answer are retried from time to
time.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.connection import END_WAIT_S, STARTED, Host, WorkerAnswer, WorkerEnd
from savable_pipeline.run.engine.messages import Failure, LaneJob, Request, WorkerStatus
from savable_pipeline.run.engine.sealed_job import check_main_is_guarded, main_module_data, pickled_job
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.agent import read_address
from savable_pipeline.run.nodes.agreement import requirements_of

log = logging.getLogger(__name__)

_PING_S = 0.35  # between two pings
_MOST_SILENT = 5  # unanswered pings in a row, which take 1.75 s; then the link is lost
_CONNECT_S = 3.0  # to open a connection
_SESSION_S = 60.0  # for a session to start an interpreter and import this library
_RETRY_S = 2.0  # between two attempts to reach an agent
_FIRST_AGENT_S = 30.0  # to wait for the first agent to answer
_NO_AGENT_S = 240.0  # to wait without any agent later, because a network may be interrupted for minutes
_STACK_S = 2.0  # to wait for the stack of a worker
_MOST_FAILED = 4  # a node is lost after this many links in a row that are lost before their workers have answered


class AgentAddress(NamedTuple):
    """Address of an agent, and its key."""

    host: str
    port: int
    key: bytes

    @classmethod
    def of(cls, address: str, key: bytes) -> AgentAddress:
        """Parse HOST:PORT. Raises ValueError if it is invalid."""
        return cls(*read_address(address), key)


class Node:
    """Agent of another machine, in the loader that uses it."""

    def __init__(self, address: AgentAddress, *, trusted: bool = False) -> None:
        self.address = address
        self.trusted = trusted  # whether nobody else can change the network's traffic, see `wire.LinkRequest`
        self.name = f"{address.host}:{address.port}"
        self.session = b""  # identifies this loader's session to the agent
        self.link: wire.Link | None = None  # set once node and trainer have agreed, until it is lost
        self.workers = 0  # number of workers that it runs for all ranks of a loader
        self.failed_links = 0  # number of links lost in a row before their workers had answered
        self.error = ""  # why it did not answer the last attempt; "" if it did
        self.differences: list[str] = []  # requirements of `agreement` that it does not meet
        self.tried_at = 0.0  # time of the last attempt to reach it
        self.attempt: threading.Thread | None = None  # the thread that runs `try_once`
        self.agreed: tuple[wire.Link, int] | None = None  # result of `try_once`: the link and the number of workers

    def connect(self, purpose: int, memory: wire.ReusedMemory | None = None) -> wire.Link:
        """Open a connection to the node's session.

        Raises OSError or EOFError if that fails.
        """
        connection = socket.create_connection(self.address[:2], _CONNECT_S)
        try:
            request = wire.LinkRequest(purpose, self.session, self.trusted)
            # `greet` returns the secret that authenticates the connection.
            return wire.Link(connection, wire.greet(connection, self.address.key, request), memory)
        except BaseException:
            connection.close()
            raise

    def try_once(self, job: bytes) -> None:
        """Start a session, and let the node compare its versions with this machine's.

        This runs in a thread. The result is in `agreed`, or in `error` and `differences`.
        """
        try:
            self.session = os.urandom(16)
            link = self.connect(wire.FOR_SESSION)
            answer = link.exchange(wire.JOB, job, _SESSION_S)
            if answer.kind == wire.AGREED:
                self.agreed = link, int(answer.head)
            else:
                link.close()
                self.differences = bytes(answer.head).decode().splitlines()
                self.error = "it differs from this machine"
        except (OSError, EOFError) as error:
            self.error = wire.error_text(error)

    def poll(self) -> str:
        """Receive the answers to pings. Return why the connection is lost, or ""."""
        return self.link.poll(lambda _: None) if self.link is not None else ""


class SocketConnection:
    """Connection to a worker on a node, or to one that does not have a node yet.

    Requests to such a worker are sent once it has a node.
    """

    def __init__(self, pinned: PinnedShards, host: SocketHost) -> None:
        self.node: Node | None = None
        self.link: wire.Link | None = None
        self.end: WorkerEnd | None = None
        self.has_answered = False  # whether the worker has answered a request
        self.lost_reason = ""  # why the link was lost
        self.answers: list[tuple[int, WorkerAnswer]] = []
        self._host = host
        # frames to send once there is a link: kind and head
        self._unsent: list[tuple[int, bytes]] = [(wire.START_WORKER, pickle.dumps(pinned))]
        self.pid = 0  # of the worker; 0 until its first message
        self._shard_error = self._stack = ""
        self._checked = True
        self._status: WorkerStatus | None = None

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"process {self.pid} of {self.node.name}" if self.node else "a worker without a node"

    @property
    def viewed_batches(self) -> int:
        """Number of batches whose memory is viewed in this process."""
        return self.link.viewed[0] if self.link else 0

    def run_on(self, node: Node, link: wire.Link) -> None:
        """Use this node's worker from now on, and send what is unsent."""
        self.node, self.link = node, link
        for kind, head in self._unsent:
            self.send_frame(kind, head)
        self._unsent.clear()

    def send_frame(self, kind: int, head: bytes = b"") -> None:
        """Send a frame, or queue it until there is a link."""
        if self.link is None:
            self._unsent.append((kind, head))
        elif self.end is None:
            try:
                self.link.send(kind, head)
            except OSError as error:
                self.lose(wire.error_text(error))

    def send(self, request: Request) -> None:
        """Send a request."""
        self.send_frame(wire.REQUEST, pickle.dumps(request, protocol=5))

    def poll(self) -> str:
        """Handle the frames that have arrived. Return why the link is lost, or ""."""
        assert self.link is not None
        return self.link.poll(self._handle_frame)

    def _handle_frame(self, frame: wire.Frame) -> None:
        kind, head = frame.kind, frame.head
        if kind == wire.ANSWER:
            number, answer = wire.read_answer(frame)
            if number == STARTED and isinstance(answer, int):
                self.pid = answer
            elif number == STARTED and isinstance(answer, Failure) and answer.error is not None and self.node:
                answer.error.add_note(f"on the node {self.node.name}")
            if self.node is not None and number != STARTED:
                self.has_answered, self.node.failed_links, self.node.error = True, 0, ""
            self.answers.append((number, answer))
        elif kind == wire.SHARD_ERROR:
            self._shard_error = head.decode()
        elif kind == wire.CHECKED:
            self._checked = True
        elif kind == wire.STATUS:
            status, self._stack = pickle.loads(head)
            self._status = WorkerStatus(*status)
        elif kind == wire.ENDED:
            how, error, status, self._stack, self._shard_error = pickle.loads(head)
            self._status = WorkerStatus(*status)
            worker_error = None if error is None else WorkerError(f"{error} (on the node {self.name})")
            self.end = WorkerEnd(self, how, worker_error)

    def lose(self, lost_reason: str) -> None:
        """Record that the link is lost, which ends the worker."""
        if self.end is None and self.node is not None:
            self.lost_reason = lost_reason
            self.end = WorkerEnd(self, f"was lost with its link to {self.node.name} ({lost_reason})", lost=True)

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return the answers that have arrived."""
        answers, self.answers = self.answers, []
        if not answers and self.end is not None:
            raise EOFError
        return answers

    def check_shards(self) -> None:
        """Ask the worker to look for changed shards."""
        self._checked = False
        self.send_frame(wire.CHECK)

    def has_checked(self) -> bool:
        """Return whether the worker has done so since `check_shards`, or has ended."""
        return self._checked or self.end is not None

    def shard_error(self) -> str:
        """Return the message about a changed shard that the worker reported, or ""."""
        return self._shard_error

    def working_on(self) -> WorkerStatus:
        """Return the worker's status when it ended, or when `stack` was last called."""
        return self._status or WorkerStatus(None, None, 0, 0)

    def stack(self) -> str:
        """Return the worker's stack.

        If the worker has not ended, request it from the node.
        """
        if self.end is None and self.link is not None:
            self._status = None
            self.send_frame(wire.STACK)
            deadline = time.monotonic() + _STACK_S
            while self._status is None and self.end is None and (remaining_s := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self.link.fileno(), self.link.events)
                poll.poll(remaining_s * 1000)
                if lost_reason := self.poll():
                    self.lose(lost_reason)
        return self._stack

    def kill(self) -> bool:
        """Ask the agent's session to kill the worker."""
        self.send_frame(wire.KILL)
        return True

    def close(self) -> None:
        """Close the connection, which ends the worker."""
        self._host.forget(self)
        if self.link is not None:
            self.link.close()


class SocketHost(Host):
    """Starts workers on the nodes whose agents answer at `addresses`.

    The result of `addresses` may change. All workers are numbered, those of the first agent first, and worker q belongs
    to rank q % ranks. So each agent with enough workers has some for every rank. A rank without a worker uses one more.
    `share` is this rank and the number of ranks. Raises ValueError for a pipeline that cannot be sent to nodes.
    """

    def __init__(
        self,
        job: LaneJob,
        addresses: Callable[[], Sequence[AgentAddress]],
        share: tuple[int, int],
        allow: Sequence[str] = (),
        *,
        trusted: bool = False,
    ) -> None:
        check_main_is_guarded()
        self._addresses, self._trusted = addresses, trusted
        self._rank, self._ranks = share
        raw, main = pickled_job(job, "other machines"), main_module_data()
        self._job = pickle.dumps((requirements_of(raw, main), list(allow), sys.path, raw, main), protocol=5)
        self._memory = wire.ReusedMemory()
        self._nodes: list[Node] = []
        self._connections: list[SocketConnection] = []  # connections to workers that have not ended
        self._pinged_at = self._waited_at = time.monotonic()
        self._no_agent_s = 0.0  # seconds that it has waited without any node that answers
        self._has_started = False  # whether any worker has ever started
        self._update_nodes()

    def _update_nodes(self) -> None:
        """Connect new nodes, retry lost ones, and start waiting workers on nodes."""
        now = time.monotonic()
        addresses = self._addresses()
        known = [node for node in self._nodes if node.address in addresses or node.link or node.attempt]
        new = [address for address in addresses if all(node.address != address for node in self._nodes)]
        self._nodes = known + [Node(address, trusted=self._trusted) for address in new]
        for node in self._nodes:
            if node.attempt is not None and not node.attempt.is_alive():
                node.attempt = None
                self._handle_attempt(node)
            if node.link is None and node.attempt is None and (not node.tried_at or now > node.tried_at + _RETRY_S):
                node.tried_at, node.differences = now, []
                node.attempt = threading.Thread(target=node.try_once, args=(self._job,), daemon=True)
                node.attempt.start()
        if all(node.link or node.error for node in self._nodes):  # each has been tried
            for waiting in [each for each in self._connections if each.link is None and each.end is None]:
                self._start_on_a_node(waiting)

    def _handle_attempt(self, node: Node) -> None:
        """Handle the result of an attempt to reach a node.

        Raises `WorkerError` for a node that differs from this machine, if no worker has started yet.
        """
        node.tried_at = time.monotonic()
        if node.agreed is not None:
            # `try_once` has stored the link and the number of workers.
            (node.link, node.workers), node.agreed = node.agreed, None
            log.info("%s has answered: %d workers", node.name, node.workers)
        elif node.differences:
            differences = "; ".join(node.differences)
            message = (
                f"the node {node.name} differs from this machine, so its batches could differ: {differences}. Install "
                "the same there, or name in allow= of the workers what may differ"
            )
            if not self._has_started:
                raise WorkerError(message)
            log.warning("%s. It is not used.", message)

    def _lose(self, each: Node | SocketConnection, lost_reason: str) -> None:
        """Record that a worker or node is lost. Do nothing if `lost_reason` is ""."""
        if not lost_reason or each.link is None:
            return
        if isinstance(each, SocketConnection):
            each.lose(lost_reason)
            return
        log.warning("node %s is lost: %s. It is retried.", each.name, lost_reason)
        each.link.close()
        each.link, each.error, each.tried_at = None, lost_reason, time.monotonic()
        for worker in self._connections:
            if worker.node is each:
                worker.lose(lost_reason)

    def _own_workers(self, node: Node) -> int:
        """Return how many of a node's workers belong to this rank."""
        first = sum(other.workers for other in self._nodes[: self._nodes.index(node)])  # number of its first worker
        return sum((first + i) % self._ranks == self._rank for i in range(node.workers))

    def _free_workers(self, node: Node) -> int:
        """Return how many more workers a node can run for this rank.

        The result is negative if the node has taken over workers of lost nodes.
        """
        return self._own_workers(node) - sum(each.node is node and each.end is None for each in self._connections)

    def count(self, wanted: int) -> int:
        """Return this rank's number of workers on the nodes that answer."""
        return max(1, sum(self._own_workers(node) for node in self._nodes if node.link is not None))

    def _start_on_a_node(self, worker: SocketConnection) -> None:
        """Start a worker on the node that can run most more workers.

        If no node answers, the worker continues to wait. If no node can run more, it ends.
        """
        while answering := [node for node in self._nodes if node.link is not None]:
            first = self._rank % len(answering)  # among equal nodes, each rank prefers another one
            node = max([*answering[first:], *answering[:first]], key=self._free_workers)
            if self._free_workers(node) <= 0 and any(each.node and not each.end for each in self._connections):
                worker.end = WorkerEnd(
                    worker, f"has no node, since {node.name} and others run as many as they can", lost=True
                )
                return
            try:
                worker.run_on(node, node.connect(wire.FOR_WORKER, self._memory))
                return
            except (OSError, EOFError) as error:
                self._lose(node, wire.error_text(error))

    def start_worker(self, pinned: PinnedShards) -> SocketConnection:
        """Start a worker, or if no node answers, let it wait for one."""
        worker = SocketConnection(pinned, self)
        self._connections.append(worker)
        self._update_nodes()
        return worker

    def forget(self, worker: SocketConnection) -> None:
        """Stop waiting for a worker."""
        if worker in self._connections:
            self._connections.remove(worker)

    def wait(self, seconds: float) -> tuple[list[SocketConnection], list[WorkerEnd]]:
        """Wait until a worker sends a message or ends.

        Return those with messages, and the ends. This returns at the latest when the next ping is due.
        """
        self._update_nodes()
        self._poll(0.0 if any(each.answers or each.end for each in self._connections) else min(seconds, _PING_S))
        self._check_any_agent()
        ended = [each for each in self._connections if each.end is not None]
        for each in ended:
            if each.lost_reason and each.node is not None and not each.has_answered:
                each.node.failed_links += 1
                if each.node.failed_links >= _MOST_FAILED:
                    self._lose(each.node, each.lost_reason)
        self._has_started = self._has_started or any(each.pid for each in self._connections)
        with_messages = [each for each in self._connections if each.answers]
        for each in ended:
            self.forget(each)
        return with_messages, [each.end for each in ended if each.end is not None]

    def _poll(self, seconds: float) -> None:
        """Handle what arrives within these seconds, and send pings when they are due."""
        poll = select.poll()
        peers: list[Node | SocketConnection] = [*(each for each in self._connections if each.end is None), *self._nodes]
        links = {each.link.fileno(): (each, each.link) for each in peers if each.link is not None}
        for descriptor, (_, link) in links.items():
            poll.register(descriptor, link.events)
        for descriptor, _ in poll.poll(seconds * 1000):
            peer, _ = links[descriptor]
            self._lose(peer, peer.poll())
        if time.monotonic() - self._pinged_at >= _PING_S:
            self._pinged_at = time.monotonic()
            for each, link in links.values():
                if link.fileno() >= 0:  # receive before, because a part of a large body does not end `poll.poll`
                    self._lose(each, each.poll() or _ping(link))

    def _check_any_agent(self) -> None:
        """Raise `WorkerError` if no agent has answered for too long."""
        now = time.monotonic()
        since, self._waited_at = now - self._waited_at, now
        if any(node.link is not None and node.failed_links < _MOST_FAILED for node in self._nodes):
            self._no_agent_s = 0.0
            return
        self._no_agent_s += min(since, 2 * _PING_S)
        limit = _NO_AGENT_S if self._has_started else _FIRST_AGENT_S
        if self._no_agent_s > limit:
            self._no_agent_s = 0.0
            found = "; ".join(f"{node.name}: {node.error or 'not tried yet'}" for node in self._nodes)
            raise WorkerError(
                f"no agent answered in {limit:g} s ({found or 'none known'}). Run `savable serve` on each node and "
                "check the network. The state of the loader is intact."
            )

    def end_workers(self) -> None:
        """End all workers after a last check of their shards.

        After 5 s all connections are closed, which kills the workers that have not ended.
        """
        workers = [each for each in self._connections if each.link is not None and each.end is None]
        for worker in workers:
            worker.send_frame(wire.END)
        deadline = time.monotonic() + END_WAIT_S
        while any(worker.end is None for worker in workers) and time.monotonic() < deadline:
            self._poll(0.05)
        if late := sum(worker.end is None for worker in workers):
            log.warning("%d workers did not end within %g s and are killed", late, END_WAIT_S)
        for worker in list(self._connections):
            worker.close()

    def close(self) -> None:
        """End the workers and the sessions."""
        for worker in list(self._connections):
            worker.close()
        for node in self._nodes:
            if node.attempt is not None:
                node.attempt.join(_CONNECT_S)
            for link in (node.link, node.agreed and node.agreed[0]):
                if link:
                    link.close()
            node.link = node.agreed = None


def _ping(link: wire.Link) -> str:
    """Send a ping. Return why the connection is lost, or ""."""
    link.unanswered_pings = 0 if link.has_heard else link.unanswered_pings + 1
    link.has_heard = False
    if link.unanswered_pings >= _MOST_SILENT:
        return f"no sign of life in {_MOST_SILENT * _PING_S:.2g} s"
    try:
        link.send(wire.PING)
    except OSError as error:
        return wire.error_text(error)
    return ""
