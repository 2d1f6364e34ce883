"""The agent of a node, which starts workers there, and its sessions.

A node is another machine. A session runs the workers of one loader.

    trainer ── TCP ──▶ agent ── the descriptor ──▶ session, one process per loader
    trainer ── one connection for the job, one for each worker ──▶ session ── worker processes (process_host.py)
            ◀── answers, as the workers wrote them ──                         batches in shared memory

Trainers and agents have a common key. The agent passes each connection that has proved the key to a session. It
unpickles nothing itself. Before the proof, a connection can only send 82 bytes, within a few seconds. The number of
such connections is limited, and the oldest is closed first.

A session starts workers as a local trainer would, and relays their messages. A request goes to its worker unchanged. An
answer is sent from the shared memory without a copy. A session answers each ping. It never waits for the trainer, which
reads only when it wants a batch. If the trainer is lost, its connections end, because the system probes silent ones.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import pickle
import select
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import Any

from savable_pipeline.run.engine.connection import END_WAIT_S, STARTED, WorkerEnd
from savable_pipeline.run.engine.process_host import ProcessConnection, ProcessHost, end_process
from savable_pipeline.run.engine.sealed_job import PROCESS_NAME, SealedJob, start_interpreter
from savable_pipeline.run.engine.worker_main import ignore_job_signals
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.nodes.agreement import unmet_requirements
from savable_pipeline.run.transport import batch_pickle
from savable_pipeline.run.transport.channel import Channel

log = logging.getLogger(__name__)

_MOST_HALF_OPEN = 64  # most connections that have not proved the key
_PROOF_S = 3.0  # time for a connection to prove the key
_STEP_S = 0.5  # longest wait of a step
_WARN_EVERY_S = 60.0  # least time between two warnings about rejected connections


@dataclass(eq=False)
class HalfOpen:
    """Connection that has not proved the key yet."""

    connection: socket.socket
    peer: str  # address of the caller, for messages
    deadline: float  # time until which it must prove the key
    hello: bytes = field(default_factory=wire.new_hello)  # our first message, as in wire.py
    reply: bytes = b""  # what has arrived of its reply


@dataclass(eq=False)
class RunningSession:
    """Process of a session, and the agent's channel to it."""

    channel: Channel
    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """End the process."""
        self.channel.close()
        end_process(self.process)


def read_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ValueError if one is missing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} must be HOST:PORT, such as 10.0.0.5:7000")
    return host.strip("[]"), int(port)


class Agent:
    """Accepts connections and starts a session for each loader that has the key.

    It listens at the address `listen`. Each session runs up to `workers` workers. Raises ValueError for an invalid
    address, and OSError for one that cannot be used.
    """

    def __init__(self, listen: str, key: bytes, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        host, port = read_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise OSError(
                f"{listen}: {wire.error_text(error)}. Use an address of this machine, and a free port."
            ) from error
        self._listener.setblocking(False)
        if ipaddress.ip_address(self._listener.getsockname()[0]).is_unspecified:
            log.warning("%s listens on every network. Use the address of the one that trainers use.", listen)
        self._key, self._workers = key, workers
        self._half_open: list[HalfOpen] = []  # the oldest first
        self._sessions: dict[bytes, RunningSession] = {}  # by `LinkRequest.session`
        self._rejected, self._warned_at = 0, -_WARN_EVERY_S  # rejected connections since the last warning, and its time
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> str:
        """Address of the agent, as HOST:PORT."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def step(self) -> None:
        """Handle connections for up to half a second."""
        for key, _ in self._selector.select(_STEP_S):
            key.data()
        now = time.monotonic()
        while self._half_open and self._half_open[0].deadline < now:
            self._reject(self._half_open[0], "it has not proved the key in time")

    def _accept(self) -> None:
        """Accept a connection, and send it our first message."""
        with contextlib.suppress(OSError):  # the caller has gone, or there is no free descriptor at the moment
            connection, peer = self._listener.accept()
            connection.setblocking(False)
            caller = HalfOpen(connection, str(peer[0]), time.monotonic() + _PROOF_S)
            self._half_open.append(caller)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(caller))
            if len(self._half_open) > _MOST_HALF_OPEN:
                self._reject(self._half_open[0], f"there were {_MOST_HALF_OPEN} more that had not proved the key")
            with contextlib.suppress(BlockingIOError):
                connection.send(caller.hello)

    def _receive(self, caller: HalfOpen) -> None:
        """Receive a part of the reply to our first message, and check the reply once it is complete."""
        if caller not in self._half_open:  # rejected in this step
            return
        try:
            raw = caller.connection.recv(wire.REPLY_BYTES - len(caller.reply))
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        caller.reply += raw
        if not raw:
            self._reject(caller, "it left before it had proved the key")
        elif len(caller.reply) == wire.REPLY_BYTES:
            proved = wire.check_reply(self._key, caller.hello, caller.reply)
            if proved is None:
                self._reject(caller, "it has not the key")
            else:
                self._admit(caller, *proved)

    def _reject(self, caller: HalfOpen, why: str) -> None:
        """Close a connection, and warn unless there was a warning a short time ago."""
        self._remove(caller)
        caller.connection.close()
        self._rejected += 1
        if time.monotonic() - self._warned_at > _WARN_EVERY_S:
            log.warning("rejected %d connections, the last from %s: %s", self._rejected, caller.peer, why)
            self._rejected, self._warned_at = 0, time.monotonic()

    def _remove(self, caller: HalfOpen) -> None:
        self._half_open.remove(caller)
        self._selector.unregister(caller.connection)

    def _admit(self, caller: HalfOpen, proof: bytes, request: wire.LinkRequest, secret: wire.Secret) -> None:
        """Pass a connection that has proved the key to its session, which is started for the first one."""
        known = self._sessions.get(request.session)
        if (known is None) != (request.purpose == wire.FOR_SESSION):
            self._reject(caller, "its session has ended" if known is None else "its session has started already")
            return
        self._remove(caller)
        with caller.connection as connection, contextlib.suppress(OSError):  # the trainer or the session has gone
            connection.send(proof)
            running = known or self._start_session(request.session)
            running.channel.send(pickle.dumps(secret), [connection.fileno()])

    def _start_session(self, session: bytes) -> RunningSession:
        ours, theirs = socket.socketpair()
        with theirs:
            name, arguments = f"{PROCESS_NAME} session", (theirs.fileno(), self._workers)
            process = SpawnProcess(target=run_session, args=arguments, name=name)
            running = RunningSession(Channel(ours, blocking=False), start_interpreter(process, [theirs.fileno()]))
        self._sessions[session] = running
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._drop_session(session))
        log.info("a loader has started a session, process %d", running.process.pid)
        return running

    def _drop_session(self, session: bytes) -> None:
        """Drop a session that has ended. Its channel becomes readable only then."""
        running = self._sessions.pop(session)
        self._selector.unregister(running.channel)
        running.end()

    def close(self) -> None:
        """End all sessions and stop listening."""
        self._listener.close()
        for caller in self._half_open:
            caller.connection.close()
        for running in self._sessions.values():
            running.end()
        self._selector.close()


_REPORTS_S = 0.2  # between two looks for reports of workers
_CHECK_S = 0.005  # between two such looks while a worker checks its shards on request


def run_session(descriptor: int, workers: int) -> None:
    """Run a session on the agent's channel until the trainer or the agent has gone."""
    ignore_job_signals()
    session = NodeSession(Channel(socket.socket(fileno=descriptor), blocking=False), workers)
    try:
        session.run()
    except (EOFError, OSError):
        pass  # the trainer has gone, or the agent
    finally:
        if session.host is not None:
            session.host.close()
        os._exit(0)


class Relay:
    """Passes messages between the connection of a trainer and that of a worker."""

    def __init__(self, link: wire.Link, host: ProcessHost) -> None:
        self.link = link
        self.worker: ProcessConnection | None = None  # None until the trainer asks to start it
        self.is_checking = False  # whether the worker is checking its shards on request
        self.is_done = False  # whether everything that the trainer needs is sent
        self._ends_by: float | None = None  # when to kill a worker that was asked to end
        self._host = host
        self._reported = ""  # the message about a changed shard that was forwarded last

    def handle_requests(self) -> None:
        """Handle the frames that the trainer has sent.

        Raises OSError or EOFError if its connection has ended.
        """
        self.link.flush()
        for frame in self.link.receive():
            self._handle(frame)

    def _handle(self, frame: wire.Frame) -> None:
        kind, worker = frame.kind, self.worker
        if kind == wire.PING:
            self.link.send(wire.PONG)
        elif kind == wire.START_WORKER and worker is None:
            self.worker = self._host.start_worker(pickle.loads(frame.head))
        elif worker is None or worker.is_closed:
            return
        elif kind == wire.REQUEST:
            with contextlib.suppress(OSError):  # the worker is dead, which the host will report
                worker.channel.send(bytes(frame.head))
        elif kind == wire.CHECK:
            self.is_checking = True
            worker.check_shards()
        elif kind == wire.STACK:
            status, stack = worker.working_on(), worker.stack()
            self.link.send(wire.STATUS, pickle.dumps((tuple(status), stack)))
        elif kind == wire.KILL:
            worker.kill()
        elif kind == wire.END:
            self._end(worker)

    def _end(self, worker: ProcessConnection) -> None:
        """End the worker after a last check, or kill one that has not started."""
        self._ends_by = time.monotonic() + END_WAIT_S
        worker.channel.close()
        worker.is_closed = True
        if worker.killed or not worker.pid:
            worker.kill()

    def relay(self) -> bool:
        """Forward the worker's answers, and return whether there were any."""
        assert self.worker is not None
        try:
            answers: list[tuple[int, Any]] = self.worker.receive()
        except EOFError:
            self.worker.kill()  # it may be alive, although its connection has ended
            return False
        for number, answer in answers:
            if number == STARTED:
                pieces, buffers = batch_pickle.dumps(answer)
                answer = wire.WrittenAnswer(b"".join(pieces), buffers)
            self.link.send(wire.ANSWER, answer.head(number), answer.body())
        return bool(answers)

    def forward_reports(self) -> None:
        """Forward reports about the worker's shards.

        If the worker takes too long to end, kill it.
        """
        if self.worker is None or self.is_done:
            return
        if (message := self.worker.shard_error()) != self._reported:
            self._reported = message
            self.link.send(wire.SHARD_ERROR, message.encode())
        if self.is_checking and self.worker.has_checked():
            self.is_checking = False
            self.link.send(wire.CHECKED)
        if self._ends_by is not None and time.monotonic() > self._ends_by:
            self._ends_by = None
            self.worker.kill()

    def forward_end(self, end: WorkerEnd) -> None:
        """Forward the last answers of the worker, and how it ended."""
        assert self.worker is not None
        while not self.worker.is_closed and self.relay():
            pass
        worker, error = self.worker, None if end.error is None else str(end.error)
        report = (end.how, error, tuple(worker.working_on()), worker.stack(), worker.shard_error())
        self.is_done = True
        worker.close()
        self.link.send(wire.ENDED, pickle.dumps(report))

    def close(self) -> None:
        """Close the connection and kill the worker."""
        self.link.close()
        if self.worker is not None and not self.is_done:
            self.worker.kill()
            self.worker.close()
        self.is_done = True


class NodeSession:
    """The connections of a loader to this node, and its workers.

    `channel` is that to the agent, over which connections arrive.
    """

    def __init__(self, channel: Channel, workers: int) -> None:
        self.host: ProcessHost | None = None  # None until the node has compared its versions with the trainer's
        self._channel = channel
        self._count = workers
        self._control: wire.Link | None = None  # the loader's connection for the job
        self._trusted = False  # whether the network is trusted
        self._relays: list[Relay] = []
        self._selector: Any = selectors.DefaultSelector()  # its descriptor wakes the host
        self._selector.register(channel.fileno(), selectors.EVENT_READ, channel)
        self._watched: dict[int, int] = {}  # events by descriptor

    def run(self) -> None:
        """Relay messages until the trainer or the agent has gone.

        Raises EOFError or OSError then.
        """
        while True:
            seconds = _CHECK_S if any(relay.is_checking for relay in self._relays) else _REPORTS_S
            if self.host is None:
                ready = self._selector.select(seconds)
            else:
                with_messages, ends = self.host.wait(seconds)
                self._relay(with_messages, ends)
                ready = self._selector.select(0)
            for key, _ in ready:
                if key.data is self._channel:
                    for message, descriptors in self._channel.receive():
                        self._add_connection(socket.socket(fileno=descriptors[0]), pickle.loads(message))
                elif key.data is self._control:
                    self._handle()
            self._serve_trainers({key.data for key, _ in ready})

    def _add_connection(self, connection: socket.socket, secret: wire.Secret) -> None:
        """Add a connection of the loader: the first is for the job, and each later one for a worker."""
        link = wire.Link(connection, secret)
        if self._control is None:
            self._control, self._trusted = link, secret.trusted
            self._watch(link, link)
        elif self.host is not None:
            self._relays.append(Relay(link, self.host))
            self._watch(link, self._relays[-1])

    def _watch(self, link: wire.Link, data: Any) -> None:
        """Let the selector return `data` when the link has something to receive or room to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.events & select.POLLOUT else 0)
        if (known := self._watched.get(link.fileno())) != events:
            (self._selector.register if known is None else self._selector.modify)(link.fileno(), events, data)
            self._watched[link.fileno()] = events

    def _handle(self) -> None:
        """Handle the trainer's frames about the job."""
        assert self._control is not None
        self._control.flush()
        for frame in self._control.receive():
            if frame.kind == wire.PING:
                self._control.send(wire.PONG)
            elif frame.kind == wire.JOB and self.host is None:
                self._agree(*pickle.loads(frame.head))
        self._watch(self._control, self._control)

    def _agree(self, requirements: dict[str, str], allow: list[str], path: list[str], raw: bytes, main: Any) -> None:
        """Create the host of workers if this machine meets the requirements, and answer the trainer.

        `path` is the trainer's `sys.path`, `raw` the pickled job, and `main` describes its main module.
        """
        assert self._control is not None
        sys.path += [folder for folder in path if folder not in sys.path]
        unmet = unmet_requirements(requirements, main, allow)
        if not self._trusted and not wire.can_authenticate_bodies():
            unmet.append("cryptography: none there, and needed unless trusted_network=True")
        if unmet:
            self._control.send(wire.REFUSED, "\n".join(unmet).encode())
            return
        self.host = ProcessHost(SealedJob(None, raw, main), "forkserver", wire.WrittenAnswerReader)
        self.host.wake_descriptors.append(self._selector.fileno())
        self._control.send(wire.AGREED, str(self._count).encode())

    def _relay(self, with_messages: list[ProcessConnection], ends: list[WorkerEnd]) -> None:
        """Forward the answers and the ends of workers."""
        end_by_worker = {id(each.worker): each for each in ends}
        for relay in self._relays:
            if relay.worker is None or relay.is_done:
                continue
            with contextlib.suppress(OSError):  # the trainer's end is closed, which `_serve_trainers` will notice
                if relay.worker in with_messages:
                    relay.relay()
                if end := end_by_worker.get(id(relay.worker)):
                    relay.forward_end(end)

    def _serve_trainers(self, ready: set[Any]) -> None:
        """Handle the requests of `ready` relays, and the reports of all workers. Close relays of lost connections."""
        for relay in list(self._relays):
            try:
                if relay in ready:
                    relay.handle_requests()
                relay.forward_reports()
                self._watch(relay.link, relay)
            except (EOFError, OSError):
                self._selector.unregister(relay.link.fileno())
                del self._watched[relay.link.fileno()]
                relay.close()
                self._relays.remove(relay)
