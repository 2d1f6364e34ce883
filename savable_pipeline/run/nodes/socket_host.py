"""`SocketHost`: starts workers that agents on other machines run.

    loader ── greets each agent, in a thread ──▶ agent ── starts ──▶ session, one process per loader and node
           ◀────── a connection for the job, one for each worker (wire.py) ──────▶

A loader reads only when it wants a batch, and then pings silent connections. A connection is lost if several pings in
a row are not answered while the loader waits. So an agent does not count as lost while the trainer is suspended or
busy. A lost connection is not reopened. Its worker is replaced by one of an agent that answers. Agents that do not
answer are retried from time to time.
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
from savable_pipeline.run.engine.connection import END_WAIT_S, STARTED, Ended, Host, WorkerAnswer
from savable_pipeline.run.engine.messages import Failure, LaneJob, Request, WorkerStatus
from savable_pipeline.run.engine.sealed_job import check_main_is_guarded, main_module, pickled_job
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.agent import read_address
from savable_pipeline.run.nodes.agreement import requirements_of

log = logging.getLogger(__name__)

_PING_S = 0.35  # between two pings
_MOST_SILENT = 5  # unanswered pings in a row, which take 1.75 s; then the link is lost
_CONNECT_S = 3.0  # to open a connection
_SESSION_S = 60.0  # for a session to start an interpreter and import this library
_RETRY_S = 2.0  # between two attempts to reach an agent
_FIRST_S = 30.0  # to wait for the first agent to answer
_ALONE_S = 240.0  # to wait without any agent later, because a network may be interrupted for minutes
_STACK_S = 2.0  # to wait for the stack of a worker
_MOST_FAILED = 4  # links lost in a row before their workers have answered; then the node is lost


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
        self.trusted = trusted
        self.name = f"{address.host}:{address.port}"
        self.session = b""
        self.link: wire.Link | None = None  # set once node and trainer have agreed, until it is lost
        self.workers = 0  # how many it runs for all ranks of a loader
        self.failed = 0  # links lost in a row before their workers had answered
        self.error = ""  # why it does not answer
        self.differs: list[str] = []  # how it differs from this machine
        self.tried_at = 0.0  # time of the last attempt to reach it
        self.trying: threading.Thread | None = None  # runs `try_once`
        self.arrived: tuple[wire.Link, int] | None = None  # the link and the number of workers, from `try_once`

    def connect(self, purpose: int, memory: wire.ReusedMemory | None = None) -> wire.Link:
        """Open a connection to its session. Raises OSError or EOFError if that fails."""
        end = socket.create_connection(self.address[:2], _CONNECT_S)
        try:
            return wire.Link(
                end, wire.greet(end, self.address.key, wire.Wanted(purpose, self.session, self.trusted)), memory
            )
        except BaseException:
            end.close()
            raise

    def try_once(self, job: bytes) -> None:
        """Start a session, and ask the node whether it matches this machine.

        This runs in a thread.
        """
        try:
            self.session = os.urandom(16)
            link = self.connect(wire.FOR_SESSION)
            answer = link.exchange(wire.JOB, job, _SESSION_S)
            if answer.kind == wire.AGREED:
                self.arrived = link, int(answer.head)
            else:
                link.close()
                self.differs = bytes(answer.head).decode().splitlines()
                self.error = "it differs from this machine"
        except (OSError, EOFError) as error:
            self.error = wire.error_text(error)

    def poll(self) -> str:
        """Handle the answers to pings. Returns why the node is lost, or ""."""
        return self.link.poll(lambda _: None) if self.link is not None else ""


class SocketConnection:
    """Worker on a node, or one that waits for a node.

    Requests to a waiting worker are sent once it has a node.
    """

    def __init__(self, pinned: PinnedShards, host: SocketHost) -> None:
        self.node: Node | None = None
        self.link: wire.Link | None = None
        self.end: Ended | None = None
        self.answered = False  # whether it has answered a request
        self.why = ""  # why its link was lost
        self.answers: list[tuple[int, WorkerAnswer]] = []
        self._host = host
        # frames to send once it has a link
        self._unsent: list[tuple[int, bytes]] = [(wire.BEGIN, pickle.dumps(pinned))]
        self.pid = 0  # 0 until its first message
        self._fault = self._stack = ""
        self._checked = True
        self._status: WorkerStatus | None = None

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"process {self.pid} of {self.node.name}" if self.node else "a worker without a node"

    @property
    def viewed(self) -> int:
        """Number of batches whose memory is viewed in this process."""
        return self.link.viewed[0] if self.link else 0

    def run_on(self, node: Node, link: wire.Link) -> None:
        """Run on this node."""
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
        """Handle what has arrived. Returns why the link is lost, or ""."""
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
                self.answered, self.node.failed, self.node.error = True, 0, ""
            self.answers.append((number, answer))
        elif kind == wire.FAULT:
            self._fault = head.decode()
        elif kind == wire.CHECKED:
            self._checked = True
        elif kind == wire.STATUS:
            status, self._stack = pickle.loads(head)
            self._status = WorkerStatus(*status)
        elif kind == wire.ENDED:
            how, error, status, self._stack, self._fault = pickle.loads(head)
            self._status = WorkerStatus(*status)
            self.end = Ended(self, how, None if error is None else WorkerError(f"{error} (on the node {self.name})"))

    def lose(self, why: str) -> None:
        """Record that its link is lost."""
        if self.end is None and self.node is not None:
            self.why = why
            self.end = Ended(self, f"was lost with its link to {self.node.name} ({why})", lost=True)

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return the answers that have arrived."""
        found, self.answers = self.answers, []
        if not found and self.end is not None:
            raise EOFError
        return found

    def check_shards(self) -> None:
        """Have the worker check its shards."""
        self._checked = False
        self.send_frame(wire.CHECK)

    def has_checked(self) -> bool:
        """Return whether it has checked its shards since the last request, or has ended."""
        return self._checked or self.end is not None

    def fault(self) -> str:
        """Return what the worker reported as wrong with delivered batches, or ""."""
        return self._fault

    def working_on(self) -> WorkerStatus:
        """Return its status when it ended, or when its stack was last requested."""
        return self._status or WorkerStatus(None, None, 0, 0)

    def stack(self) -> str:
        """Return its stack, which is requested from the node unless it has ended."""
        if self.end is None and self.link is not None:
            self._status = None
            self.send_frame(wire.STACK)
            deadline = time.monotonic() + _STACK_S
            while self._status is None and self.end is None and (rest := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self.link.fileno(), self.link.events)
                poll.poll(rest * 1000)
                if why := self.poll():
                    self.lose(why)
        return self._stack

    def kill(self) -> bool:
        """Have the agent's session kill the worker."""
        self.send_frame(wire.KILL)
        return True

    def close(self) -> None:
        """Close the connection, which ends the worker."""
        self._host.forget(self)
        if self.link is not None:
            self.link.close()


class SocketHost(Host):
    """Starts workers on the nodes whose agents answer at `addresses`.

    The addresses may change. The workers of all agents are numbered, those of the first agent first. Worker q belongs
    to rank q % ranks. So each agent with enough workers has some for every rank. A rank without a worker uses an extra
    one. `share` is this rank and the number of ranks. Raises ValueError for a pipeline that cannot be sent to nodes.
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
        raw, main = pickled_job(job, "other machines"), main_module()
        self._job = pickle.dumps((requirements_of(raw, main), list(allow), sys.path, raw, main), protocol=5)
        self._memory = wire.ReusedMemory()
        self._nodes: list[Node] = []
        self._connections: list[SocketConnection] = []  # those that are open
        self._pinged_at = self._waited_at = time.monotonic()
        self._alone_s = 0.0  # how long it has waited without any node
        self._has_started = False  # whether any worker has started
        self._update_nodes()

    def _update_nodes(self) -> None:
        """Connect new nodes, retry lost ones, and start waiting workers on nodes."""
        now = time.monotonic()
        known = self._addresses()
        gone = [node for node in self._nodes if node.address not in known and not node.link and not node.trying]
        new = [address for address in known if all(node.address != address for node in self._nodes)]
        self._nodes = [node for node in self._nodes if node not in gone] + [
            Node(each, trusted=self._trusted) for each in new
        ]
        for node in self._nodes:
            if node.trying is not None and not node.trying.is_alive():
                node.trying = None
                self._handle_attempt(node)
            if node.link is None and node.trying is None and (not node.tried_at or now > node.tried_at + _RETRY_S):
                node.tried_at, node.differs = now, []
                node.trying = threading.Thread(target=node.try_once, args=(self._job,), daemon=True)
                node.trying.start()
        if all(node.link or node.error for node in self._nodes):  # each has been tried
            for waiting in [each for each in self._connections if each.link is None and each.end is None]:
                self._start_on_a_node(waiting)

    def _handle_attempt(self, node: Node) -> None:
        """Handle the result of an attempt to reach a node.

        Raises `WorkerError` for one that differs, before the first batch.
        """
        node.tried_at = time.monotonic()
        if node.arrived is not None:
            (node.link, node.workers), node.arrived = node.arrived, None
            log.info("%s has answered: %d workers", node.name, node.workers)
        elif node.differs:
            message = (
                f"the node {node.name} differs from this machine, so its batches could differ: "
                f"{'; '.join(node.differs)}. Install the same there, or name in allow= of the workers what may differ"
            )
            if not self._has_started:
                raise WorkerError(message)
            log.warning("%s. It is not used.", message)

    def _lose(self, each: Node | SocketConnection, why: str) -> None:
        """Record that a worker or node is lost for the reason `why`, unless that is ""."""
        if not why or each.link is None:
            return
        if isinstance(each, SocketConnection):
            each.lose(why)
            return
        log.warning("node %s is lost: %s. It is retried.", each.name, why)
        each.link.close()
        each.link, each.error, each.tried_at = None, why, time.monotonic()
        for worker in self._connections:
            if worker.node is each:
                worker.lose(why)

    def _share(self, node: Node) -> int:
        """Return how many of a node's workers belong to this rank."""
        first = sum(other.workers for other in self._nodes[: self._nodes.index(node)])
        return sum((first + i) % self._ranks == self._rank for i in range(node.workers))

    def _room(self, node: Node) -> int:
        """Return how many more workers a node can run for this rank.

        The result is negative if the node runs workers of lost nodes, too.
        """
        return self._share(node) - sum(each.node is node and each.end is None for each in self._connections)

    def count(self, wanted: int) -> int:
        """Return this rank's number of workers on the nodes that answer."""
        return max(1, sum(self._share(node) for node in self._nodes if node.link is not None))

    def _start_on_a_node(self, worker: SocketConnection) -> None:
        """Start a worker on the node with the most room.

        The worker continues to wait if no node answers, and ends if none has room.
        """
        while answering := [node for node in self._nodes if node.link is not None]:
            first = self._rank % len(answering)  # if none has room, ranks use different nodes
            node = max([*answering[first:], *answering[:first]], key=self._room)
            if self._room(node) <= 0 and any(each.node and not each.end for each in self._connections):
                worker.end = Ended(
                    worker, f"has no node, since {node.name} and others run as many as they can", lost=True
                )
                return
            try:
                worker.run_on(node, node.connect(wire.FOR_WORKER, self._memory))
                return
            except (OSError, EOFError) as error:
                self._lose(node, wire.error_text(error))

    def start_worker(self, pinned: PinnedShards) -> SocketConnection:
        """Start a worker, on a node if one answers, else as soon as one does."""
        worker = SocketConnection(pinned, self)
        self._connections.append(worker)
        self._update_nodes()
        return worker

    def forget(self, worker: SocketConnection) -> None:
        """Stop waiting for a worker."""
        if worker in self._connections:
            self._connections.remove(worker)

    def wait(self, seconds: float) -> tuple[list[SocketConnection], list[Ended]]:
        """Return the workers with answers, and the ends of others.

        This waits for some, at most until the next ping is due.
        """
        self._update_nodes()
        self._poll(0.0 if any(each.answers or each.end for each in self._connections) else min(seconds, _PING_S))
        self._check_alone()
        ended = [each for each in self._connections if each.end is not None]
        for each in ended:
            if each.why and each.node is not None and not each.answered:
                each.node.failed += 1
                if each.node.failed >= _MOST_FAILED:
                    self._lose(each.node, each.why)
        self._has_started = self._has_started or any(each.pid for each in self._connections)
        heard = [each for each in self._connections if each.answers]
        for each in ended:
            self.forget(each)
        return heard, [each.end for each in ended if each.end is not None]

    def _poll(self, seconds: float) -> None:
        """Handle what arrives within these seconds, and send pings when they are due."""
        poll = select.poll()
        peers: list[Node | SocketConnection] = [*(each for each in self._connections if each.end is None), *self._nodes]
        links = {each.link.fileno(): (each, each.link) for each in peers if each.link is not None}
        for descriptor, (_, link) in links.items():
            poll.register(descriptor, link.events)
        for descriptor, _ in poll.poll(seconds * 1000):
            self._lose(links[descriptor][0], links[descriptor][0].poll())
        if time.monotonic() - self._pinged_at >= _PING_S:
            self._pinged_at = time.monotonic()
            for each, link in links.values():
                if link.fileno() >= 0:  # a part of a body on a slow link does not end `poll`, but is a sign of life
                    self._lose(each, each.poll() or _ping(link))

    def _check_alone(self) -> None:
        """Raise `WorkerError` if no agent has answered for too long."""
        now = time.monotonic()
        since, self._waited_at = now - self._waited_at, now
        if any(node.link is not None and node.failed < _MOST_FAILED for node in self._nodes):
            self._alone_s = 0.0
            return
        self._alone_s += min(since, 2 * _PING_S)
        limit = _ALONE_S if self._has_started else _FIRST_S
        if self._alone_s > limit:
            self._alone_s = 0.0
            found = "; ".join(f"{node.name}: {node.error or 'not tried yet'}" for node in self._nodes)
            raise WorkerError(
                f"no agent answered in {limit:g} s ({found or 'none known'}). Run `savable serve` on each node and "
                "check the network. The state of the loader is intact."
            )

    def end_workers(self) -> None:
        """Have all workers check their shards a last time and end.

        After 5 s their connections are closed, which kills the others.
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
            if node.trying is not None:
                node.trying.join(_CONNECT_S)
            for link in (node.link, node.arrived and node.arrived[0]):
                if link:
                    link.close()
            node.link = node.arrived = None


def _ping(link: wire.Link) -> str:
    """Send a ping. Returns why the connection is lost, or ""."""
    link.silent = 0 if link.heard else link.silent + 1
    link.heard = False
    if link.silent >= _MOST_SILENT:
        return f"no sign of life in {_MOST_SILENT * _PING_S:.2g} s"
    try:
        link.send(wire.PING)
    except OSError as error:
        return wire.error_text(error)
    return ""
