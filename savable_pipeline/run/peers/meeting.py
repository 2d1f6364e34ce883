"""`meet`: how the peers of a sharing group find each other, and prove that they are of one run.

    each peer          listens on a Unix socket, and writes its address into the store of torch.distributed
                       connects to the first peer before it that passes it a descriptor: they share a machine
    first of a machine connects to the first rank by TCP, as to an agent of `savable serve`

    rank 0 ──┬── Unix ──▶ rank 1
             ├── Unix ──▶ rank 2
             └── TCP ───▶ rank 4 ──── Unix ──▶ rank 5

The first rank writes a secret into the store. Each connection proves it (nodes/handshake.py), and a Unix socket also
shows that both processes are of one user. Nothing waits longer than the loader's `timeout`.
"""

from __future__ import annotations

import ast
import contextlib
import os
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.run.nodes.handshake import (
    FOR_PEER,
    REPLY_BYTES,
    Wanted,
    answered,
    greet,
    new_hello,
    read_exactly,
)
from savable_pipeline.run.nodes.wire import Link, can_authenticate_bodies, said
from savable_pipeline.run.peers.connection import ChannelEnd, LinkEnd, Peer
from savable_pipeline.run.peers.sharing import Sharing
from savable_pipeline.run.transport.channel import Channel

_GLANCE_S = 0.02  # between two looks at the store
_PROVED_IN_S = 3.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class _Board:
    """What the peers of one loader write into the store for each other."""

    def __init__(self, sharing: Sharing, timeout: float) -> None:
        self._store, self._ranks, self._timeout = sharing.store, sharing.ranks, timeout
        self._own, self._until = sharing.ranks[sharing.index], time.monotonic() + timeout
        self._key = f"{sharing.key}/{sharing.store.add(f'{sharing.key}/loaders of {self._own}', 1)}"

    def write(self, name: str, value: bytes) -> None:
        """Write a value, for all peers."""
        self._store.set(f"{self._key}/{name}", value)

    def find(self, name: str) -> bytes | None:
        """The value; None if it is not written yet."""
        key = f"{self._key}/{name}"
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def read(self, name: str, index: int) -> bytes:
        """The value, once the peer `index` has written it."""
        while (found := self.find(name)) is None:
            self.remaining_s({index})
            time.sleep(_GLANCE_S)
        return found

    def remaining_s(self, missing: set[int]) -> float:
        """The time to wait for these peers. Raises `WorkerError` if it is over, `SavableError` if others failed."""
        if (found := self.find("failed")) is not None:
            raise SavableError(found.decode())
        if (seconds := self._until - time.monotonic()) > 0:
            return seconds
        names = ", ".join(str(self._ranks[index]) for index in sorted(missing))
        raise WorkerError(
            f"rank {self._own} waited {self._timeout:g} s for rank {names}, with which it shares batches. Create and "
            "iterate the same loaders in the same order on each of these ranks."
        )


def meet(sharing: Sharing, timeout: float) -> tuple[Peer | None, list[Peer]]:
    """The peer that passes batches to this process, None for the first rank; and those to which this one passes them.

    Raises `WorkerError` if a peer does not come in time, `SavableError` if they cannot share.
    """
    board = _Board(sharing, timeout)
    try:
        if sharing.builds:
            board.write("secret", os.urandom(32))
        with _listening_unix() as listener:
            board.write(f"unix {sharing.index}", os.fsencode(listener.getsockname()))
            return _connect(sharing, board, listener)
    except SavableError as error:
        board.write("failed", str(error).encode())
        raise


def _connect(sharing: Sharing, board: _Board, listener: socket.socket) -> tuple[Peer | None, list[Peer]]:
    key, own = board.read("secret", 0), sharing.index
    for index in range(own):
        address = board.read(f"unix {index}", index)
        if (source := _reach_unix(sharing, board, key, address, index)) is not None:
            board.write(f"source {own}", str(index).encode())
            return source, []
    board.write(f"source {own}", str(own).encode())
    if own:
        return _reach_tcp(sharing, board, key), _accept(sharing, board, key, [listener])
    with socket.create_server((_own_host(), 0)) as public:
        board.write("tcp", repr(public.getsockname()[:2]).encode())
        return None, _accept(sharing, board, key, [listener, public])


# Those that connect.


def _reach_unix(sharing: Sharing, board: _Board, key: bytes, address: bytes, index: int) -> Peer | None:
    """A peer of this machine; None if it is on another one, from which no descriptor can be passed."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(board.remaining_s({index}))
        end.connect(address)
        greet(end, key, Wanted(FOR_PEER, _number(sharing.index), True))
        _check_user(end, sharing.ranks[sharing.index], sharing.ranks[index])
        _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        end.sendall(b"y" if descriptors else b"n")
        for descriptor in descriptors:
            os.close(descriptor)
            return Peer(sharing.ranks[index], index, ChannelEnd(Channel(end, waits=False), sharing.index))
    except OSError:
        pass
    end.close()
    return None


def _reach_tcp(sharing: Sharing, board: _Board, key: bytes) -> Peer:
    """The first rank, from another machine."""
    _check_cryptography()
    address = ast.literal_eval(board.read("tcp", 0).decode())
    try:
        end = socket.create_connection(address, board.remaining_s({0}))
        secret = greet(end, key, Wanted(FOR_PEER, _number(sharing.index), False))
    except OSError as error:
        raise WorkerError(
            f"rank {sharing.ranks[sharing.index]} cannot reach rank {sharing.ranks[0]} at {address[0]}: {said(error)}. "
            "Set MASTER_ADDR to an address of a network that both machines share."
        ) from error
    return Peer(sharing.ranks[0], 0, LinkEnd(Link(end, secret), sharing.index))


def _own_host() -> str:
    """The address of this machine in the network of MASTER_ADDR, or of its default route."""
    for target in (os.environ.get("MASTER_ADDR", "localhost"), "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.connect((target, 9))  # sends nothing
            host = str(end.getsockname()[0])
            if not host.startswith("127."):
                return host
    return "127.0.0.1"


# Those to which they connect.


def _accept(sharing: Sharing, board: _Board, key: bytes, listeners: list[socket.socket]) -> list[Peer]:
    """The peers that get batches from this process, once all have connected."""
    own, peers, sources = sharing.index, dict[int, Peer](), dict[int, int]()
    later = range(own + 1, len(sharing.ranks))
    while missing := {index for index in later if _is_missing(index, own, sources, peers)}:
        try:
            board.remaining_s(missing)
        except SavableError as error:
            for peer in peers.values():
                peer.send(("failed", type(error).__name__, str(error)))
            raise
        for index in missing - sources.keys():
            if (found := board.find(f"source {index}")) is not None:
                sources[index] = int(found)
        for ready in select.select(listeners, [], [], _GLANCE_S)[0]:
            if (peer := _admit(sharing, key, ready)) is not None:
                peers[peer.flag] = peer
    return [peers[index] for index in sorted(peers)]


def _is_missing(index: int, own: int, sources: dict[int, int], peers: dict[int, Peer]) -> bool:
    if index not in sources:
        return True
    return sources[index] in ((own, index) if own == 0 else (own,)) and index not in peers


def _admit(sharing: Sharing, key: bytes, listener: socket.socket) -> Peer | None:
    """A peer that has connected; None for another process, which has not the secret."""
    end, _ = listener.accept()
    try:
        end.settimeout(_PROVED_IN_S)
        hello = new_hello()
        end.sendall(hello)
        found = answered(key, hello, read_exactly(end, REPLY_BYTES))
        if found is not None and found[1].purpose == FOR_PEER:
            proof, wanted, secret = found
            index = int.from_bytes(wanted.session, "little")
            end.sendall(proof)
            if listener.family == socket.AF_INET:
                _check_cryptography()
                return Peer(sharing.ranks[index], index, LinkEnd(Link(end, secret), index))
            _check_user(end, sharing.ranks[sharing.index], sharing.ranks[index])
            socket.send_fds(end, [b"d"], [listener.fileno()])
            if read_exactly(end, 1) == b"y":
                return Peer(sharing.ranks[index], index, ChannelEnd(Channel(end, waits=False), index))
    except OSError:
        pass
    end.close()
    return None


def _number(index: int) -> bytes:
    return index.to_bytes(16, "little")


def _check_user(end: socket.socket, own: int, other: int) -> None:
    """Raise `SavableError` if the process at the other end is of another user, where the system can say so."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise SavableError(
            f"ranks {own} and {other} share batches on one machine, but run as users {os.geteuid()} and {user}. Start "
            "them as one user."
        )


def _check_cryptography() -> None:
    if not can_authenticate_bodies():
        raise SavableError(
            "ranks that share batches between machines need the package cryptography. Run pip install cryptography "
            "on all of them."
        )


@contextmanager
def _listening_unix() -> Iterator[socket.socket]:
    """A socket of which nothing remains in the file system, even after SIGKILL, where the system has such."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as cleanup:
        if sys.platform == "linux":
            listener.bind(b"\0savable_pipeline " + os.urandom(16).hex().encode())
        else:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory())
            listener.bind(f"{folder}/peers")
        listener.listen(128)
        yield listener
