"""The agent of a node: accepts connections from holders of the key.

    trainer ── TCP ──▶ agent ── the descriptor ──▶ session, one process per loader (session.py)

It passes each such connection to a session and unpickles nothing. Before a connection has proved the key, it can send
82 bytes, within a few seconds. The number of such connections is limited, and the oldest is closed first.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import pickle
import selectors
import socket
import subprocess
import time
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess

from savable_pipeline.run.engine.sealed_job import PROCESS_NAME, begin_interpreter
from savable_pipeline.run.nodes.handshake import FOR_SESSION, REPLY_BYTES, Wanted, answered, new_hello
from savable_pipeline.run.nodes.session import run_session
from savable_pipeline.run.nodes.wire import Secret, error_text
from savable_pipeline.run.transport.channel import Channel

log = logging.getLogger(__name__)

_MOST_HALF_OPEN = 64
_PROVED_IN_S = 3.0
_STEP_S = 0.5
_WARN_EVERY_S = 60.0  # between two warnings about rejected connections


@dataclass(eq=False)
class HalfOpen:
    """Connection that has not proved the key."""

    end: socket.socket
    peer: str
    until: float
    hello: bytes = field(default_factory=new_hello)
    reply: bytes = b""


@dataclass(eq=False)
class RunningSession:
    """Process of a session."""

    channel: Channel
    process: subprocess.Popen[bytes]


def read_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ValueError if one is missing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} must be HOST:PORT, such as 10.0.0.5:7000")
    return host.strip("[]"), int(port)


class Agent:
    """Accepts connections and starts a session for each loader that has the key.

    It listens at `listen`. Each session gets up to `workers` workers. Raises ValueError for an invalid address, and
    OSError for one that cannot be used.
    """

    def __init__(self, listen: str, key: bytes, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        host, port = read_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise OSError(f"{listen}: {error_text(error)}. Use an address of this machine, and a free port.") from error
        self._listener.setblocking(False)
        if ipaddress.ip_address(self._listener.getsockname()[0]).is_unspecified:
            log.warning("%s listens on every network. Use the address of the one that trainers use.", listen)
        self._key, self._workers = key, workers
        self._half_open: list[HalfOpen] = []  # the oldest first
        self._sessions: dict[bytes, RunningSession] = {}
        self._rejected, self._warned_at = 0, -_WARN_EVERY_S
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
        while self._half_open and self._half_open[0].until < now:
            self._reject(self._half_open[0], "it has not proved the key in time")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller has gone, or there is no free descriptor at the moment
            end, peer = self._listener.accept()
            end.setblocking(False)
            caller = HalfOpen(end, str(peer[0]), time.monotonic() + _PROVED_IN_S)
            self._half_open.append(caller)
            self._selector.register(end, selectors.EVENT_READ, lambda: self._receive(caller))
            if len(self._half_open) > _MOST_HALF_OPEN:
                self._reject(self._half_open[0], f"there were {_MOST_HALF_OPEN} more that had not proved the key")
            with contextlib.suppress(BlockingIOError):
                end.send(caller.hello)

    def _receive(self, caller: HalfOpen) -> None:
        if caller not in self._half_open:  # rejected in this step
            return
        try:
            raw = caller.end.recv(REPLY_BYTES - len(caller.reply))
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        caller.reply += raw
        if not raw:
            self._reject(caller, "it left before it had proved the key")
        elif len(caller.reply) == REPLY_BYTES:
            found = answered(self._key, caller.hello, caller.reply)
            if found is None:
                self._reject(caller, "it has not the key")
            else:
                self._admit(caller, *found)

    def _reject(self, caller: HalfOpen, why: str) -> None:
        self._forget(caller)
        caller.end.close()
        self._rejected += 1
        if time.monotonic() - self._warned_at > _WARN_EVERY_S:
            log.warning("rejected %d connections, the last from %s: %s", self._rejected, caller.peer, why)
            self._rejected, self._warned_at = 0, time.monotonic()

    def _forget(self, caller: HalfOpen) -> None:
        self._half_open.remove(caller)
        self._selector.unregister(caller.end)

    def _admit(self, caller: HalfOpen, proof: bytes, wanted: Wanted, secret: Secret) -> None:
        known = self._sessions.get(wanted.session)
        if (known is None) != (wanted.purpose == FOR_SESSION):
            self._reject(caller, "its session has ended" if known is None else "its session has started already")
            return
        self._forget(caller)
        with caller.end as end, contextlib.suppress(OSError):  # the trainer or the session has gone
            end.send(proof)
            running = known or self._begin(wanted.session)
            running.channel.send(pickle.dumps(secret), [end.fileno()])

    def _begin(self, session: bytes) -> RunningSession:
        ours, theirs = socket.socketpair()
        with theirs:
            process = SpawnProcess(
                target=run_session, args=(theirs.fileno(), self._workers), name=f"{PROCESS_NAME} session"
            )
            running = RunningSession(Channel(ours, waits=False), begin_interpreter(process, [theirs.fileno()]))
        self._sessions[session] = running
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._ended(session))
        log.info("a loader has started a session, process %d", running.process.pid)
        return running

    def _ended(self, session: bytes) -> None:
        """Drop a session, whose channel becomes readable only when it has ended."""
        running = self._sessions.pop(session)
        self._selector.unregister(running.channel)
        _end(running)

    def close(self) -> None:
        """End all sessions and stop listening."""
        self._listener.close()
        for caller in self._half_open:
            caller.end.close()
        for running in self._sessions.values():
            _end(running)
        self._selector.close()


def _end(running: RunningSession) -> None:
    running.channel.close()
    try:
        running.process.wait(10.0)
    except subprocess.TimeoutExpired:
        running.process.kill()
        running.process.wait()
    if running.process.stdin is not None:
        running.process.stdin.close()
