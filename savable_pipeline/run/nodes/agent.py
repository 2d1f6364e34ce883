"""The agent of a node: it listens at one address, lets in who has the key, and passes the connection on.

    trainer ── TCP ──▶ agent ── the descriptor ──▶ session, a process for each loader (session.py)

It unpickles nothing. Before the key is proved a connection can send 82 bytes, within a few seconds, and there are only
so many of them at a time: the oldest goes first.
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
from savable_pipeline.run.nodes.wire import Secret, said
from savable_pipeline.run.transport.channel import Channel

log = logging.getLogger(__name__)

_MOST_HALF_OPEN = 64
_PROVED_IN_S = 3.0
_GLANCE_S = 0.5
_TOLD_EVERY_S = 60.0  # that connections were refused


@dataclass(eq=False)
class HalfOpen:
    """A connection that has not proved the key."""

    end: socket.socket
    peer: str
    until: float
    hello: bytes = field(default_factory=new_hello)
    reply: bytes = b""


@dataclass(eq=False)
class BegunSession:
    """A session's process."""

    channel: Channel
    process: subprocess.Popen[bytes]


def read_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ValueError if one is missing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} must be HOST:PORT, such as 10.0.0.5:7000")
    return host.strip("[]"), int(port)


class Agent:
    """Listens, and begins a session for each loader that has the key; each gets up to `workers` workers.

    Raises ValueError for an address that is none, and OSError for one that cannot be had.
    """

    def __init__(self, listen: str, key: bytes, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        host, port = read_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise OSError(f"{listen}: {said(error)}. Use an address of this machine, and a free port.") from error
        self._listener.setblocking(False)
        if ipaddress.ip_address(self._listener.getsockname()[0]).is_unspecified:
            log.warning("%s listens on every network. Use the address of the one that trainers use.", listen)
        self._key, self._workers = key, workers
        self._half_open: list[HalfOpen] = []  # the oldest first
        self._sessions: dict[bytes, BegunSession] = {}
        self._refused, self._told_at = 0, -_TOLD_EVERY_S
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> str:
        """Where it listens, as HOST:PORT."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def step(self) -> None:
        """Wait half a second for connections, and see to them."""
        for key, _ in self._selector.select(_GLANCE_S):
            key.data()
        now = time.monotonic()
        while self._half_open and self._half_open[0].until < now:
            self._refuse(self._half_open[0], "it has not proved the key in time")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again; or no descriptor is left, until some are closed
            end, peer = self._listener.accept()
            end.setblocking(False)
            caller = HalfOpen(end, str(peer[0]), time.monotonic() + _PROVED_IN_S)
            self._half_open.append(caller)
            self._selector.register(end, selectors.EVENT_READ, lambda: self._hear(caller))
            if len(self._half_open) > _MOST_HALF_OPEN:
                self._refuse(self._half_open[0], f"there were {_MOST_HALF_OPEN} more that had not proved the key")
            with contextlib.suppress(BlockingIOError):
                end.send(caller.hello)

    def _hear(self, caller: HalfOpen) -> None:
        if caller not in self._half_open:  # refused in this step
            return
        try:
            raw = caller.end.recv(REPLY_BYTES - len(caller.reply))
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        caller.reply += raw
        if not raw:
            self._refuse(caller, "it left before it had proved the key")
        elif len(caller.reply) == REPLY_BYTES:
            found = answered(self._key, caller.hello, caller.reply)
            if found is None:
                self._refuse(caller, "it has not the key")
            else:
                self._let_in(caller, *found)

    def _refuse(self, caller: HalfOpen, why: str) -> None:
        self._forget(caller)
        caller.end.close()
        self._refused += 1
        if time.monotonic() - self._told_at > _TOLD_EVERY_S:
            log.warning("rejected %d connections, the last from %s: %s", self._refused, caller.peer, why)
            self._refused, self._told_at = 0, time.monotonic()

    def _forget(self, caller: HalfOpen) -> None:
        self._half_open.remove(caller)
        self._selector.unregister(caller.end)

    def _let_in(self, caller: HalfOpen, proof: bytes, wanted: Wanted, secret: Secret) -> None:
        known = self._sessions.get(wanted.session)
        if (known is None) != (wanted.purpose == FOR_SESSION):
            self._refuse(caller, "its session has ended" if known is None else "its session has begun already")
            return
        self._forget(caller)
        with caller.end as end, contextlib.suppress(OSError):  # the trainer is gone, or the session
            end.send(proof)
            begun = known or self._begin(wanted.session)
            begun.channel.send(pickle.dumps(secret), [end.fileno()])

    def _begin(self, session: bytes) -> BegunSession:
        ours, theirs = socket.socketpair()
        with theirs:
            process = SpawnProcess(
                target=run_session, args=(theirs.fileno(), self._workers), name=f"{PROCESS_NAME} session"
            )
            begun = BegunSession(Channel(ours, waits=False), begin_interpreter(process, [theirs.fileno()]))
        self._sessions[session] = begun
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._ended(session))
        log.info("a loader has begun a session, process %d", begun.process.pid)
        return begun

    def _ended(self, session: bytes) -> None:
        """A session sends nothing: its channel can be read when it has ended."""
        begun = self._sessions.pop(session)
        self._selector.unregister(begun.channel)
        _end(begun)

    def close(self) -> None:
        """End all sessions, and listen no more."""
        self._listener.close()
        for caller in self._half_open:
            caller.end.close()
        for begun in self._sessions.values():
            _end(begun)
        self._selector.close()


def _end(begun: BegunSession) -> None:
    begun.channel.close()
    try:
        begun.process.wait(10.0)
    except subprocess.TimeoutExpired:
        begun.process.kill()
        begun.process.wait()
    if begun.process.stdin is not None:
        begun.process.stdin.close()
