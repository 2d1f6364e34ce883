"""`meet`: how ranks that share batches find and authenticate each other.

These ranks are called peers.

    each peer              listens on a Unix socket, and writes its address into the store of torch.distributed;
                           connects to the first of the earlier ranks that it reaches by Unix socket, on its machine
    first on its machine   connects to the first rank by TCP, as to an agent of `savable serve`

    rank 0 ──┬── Unix ──▶ rank 1
             ├── Unix ──▶ rank 2
             └── TCP ───▶ rank 4 ──── Unix ──▶ rank 5

The first rank writes a secret into the store. Both ends of each connection prove that they have it (nodes/wire.py), and
a Unix socket also shows that both processes are of one user. Nothing waits longer than the loader's `timeout`.
"""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.run.nodes import wire
from savable_pipeline.run.peers.peer import LinkChannel, Peer
from savable_pipeline.run.transport.channel import Channel
from savable_pipeline.run.transport.segments import ALIGN

IS_LINUX = sys.platform == "linux"  # on other systems, each peer gets copies from the first rank by TCP
_STORE_POLL_S = 0.02  # interval at which the store and listening sockets are read
_ORDER_ADVICE = "Order the ranks of all sharing groups alike."
_LOADERS_ADVICE = "Create and iterate the same loaders in the same order on each of these ranks."
_ADDRESS_ADVICE = "Set MASTER_ADDR to an address of a network that both machines share."


class Sharing(NamedTuple):
    """Sharing group of this process: the peers, which get the same batches.

    `number` is the index of this process in the group. `ranks` are the global ranks of all peers. They find each other
    through `store`, the store of torch.distributed.
    """

    number: int
    ranks: tuple[int, ...]
    store: Any


def find_sharing(ranks: tuple[int, ...], data_ranks: tuple[int, ...], store: Any) -> Sharing | None:
    """Return the sharing group with these global ranks, or None for a single process.

    `data_ranks` are the global ranks of this process's data group, and `store` is shared by all processes. Raises
    ValueError for too many peers, or if some but not all processes of the data group are the first of their sharing
    groups. No process waits for another.
    """
    import torch.distributed as dist

    if len(ranks) > ALIGN:
        raise ValueError(f"{len(ranks)} ranks cannot share batches. Share among at most {ALIGN}.")
    own = dist.get_rank()
    sharing = Sharing(ranks.index(own), ranks, store)
    is_first = str(sharing.number == 0)
    store.set(f"savable_pipeline/peers/first {own}", is_first)
    for rank in data_ranks:
        if store.compare_set(f"savable_pipeline/peers/first {rank}", "", "").decode() not in ("", is_first):
            pair = f"ranks {own} and {rank}"
            raise ValueError(f"{pair} have one data group, but one alone is a first peer. {_ORDER_ADVICE}")
    return sharing if len(ranks) > 1 else None


def meet(sharing: Sharing, timeout: float) -> tuple[Peer | None, list[Peer]]:
    """Return the peer that passes batches to this process, and those that it serves.

    The first result is None on the first rank. Raises `WorkerError` if a peer does not come in time, and `SavableError`
    if the peers cannot share.
    """
    meeting = _Meeting(sharing, timeout)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket() as public:
        try:
            return meeting.connect(listener, public)
        # Pass the error on before the sockets close. Otherwise the other peers would only report closed sockets.
        except SavableError as error:
            meeting.write("failed", str(error))
            for peer in meeting.accepted.values():
                peer.send_note("failed", str(error))
            raise


class _Meeting:
    """The values that peers of a loader write into the store, and their connections."""

    def __init__(self, sharing: Sharing, timeout: float) -> None:
        self._store, self._ranks, self._index = sharing.store, sharing.ranks, sharing.number
        # The first rank waits for all others and can name a missing one, so the others wait longer than it.
        self._timeout = timeout * 1.1 if self._index else timeout
        self.accepted = dict[int, Peer]()  # peers that connected to this process, by index
        self._deadline = time.monotonic() + self._timeout
        group = f"savable_pipeline/peers/{'-'.join(map(str, sharing.ranks))}"
        self._key = f"{group}/{sharing.store.add(f'{group} of {sharing.number}', 1)}"

    def write(self, name: str, value: object) -> None:
        """Write a value, for all peers."""
        self._store.set(f"{self._key}/{name}", repr(value).encode())

    def _read(self, name: str, index: int) -> Any:
        """Return the value of this name, once the peer `index` has written it."""
        while not self._store.check([f"{self._key}/{name}"]):
            self._check_in_time([index])
            time.sleep(_STORE_POLL_S)
        return ast.literal_eval(bytes(self._store.get(f"{self._key}/{name}")).decode())

    def _remaining_s(self, missing: Iterable[int]) -> float:
        """Return how many seconds remain to wait for these peers.

        Raises `WorkerError` if none remain, and `SavableError` if another peer has failed.
        """
        if self._store.check([f"{self._key}/failed"]):
            raise SavableError(self._read("failed", 0))
        if (seconds := self._deadline - time.monotonic()) > 0:
            return seconds
        own, names = self._ranks[self._index], ", ".join(str(self._ranks[index]) for index in missing)
        raise WorkerError(f"rank {own} waited {self._timeout:g} s for rank {names} to share batches. {_LOADERS_ADVICE}")

    def _check_in_time(self, missing: Iterable[int]) -> None:
        """Raise what `_remaining_s` raises for these peers."""
        self._remaining_s(missing)

    def connect(self, listener: socket.socket, public: socket.socket) -> tuple[Peer | None, list[Peer]]:
        """Connect to the other peers, and return the result of `meet`.

        `listener` is the socket for peers of this machine, `public` that for peers of other machines.
        """
        if IS_LINUX:  # such an address leaves nothing in the file system, even after SIGKILL
            listener.bind(b"\0savable_pipeline " + os.urandom(16).hex().encode())
            listener.listen()
        if (own := self._index) == 0:
            # Connecting a datagram socket sends nothing, but selects our address in the network of the other ranks.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((os.environ.get("MASTER_ADDR", "localhost"), 9))
                public.bind((probe.getsockname()[0], 0))
            public.listen()
            self.write("tcp", public.getsockname())
            self.write("secret", os.urandom(32))
        self.write(f"unix {own}", listener.getsockname())
        for index in range(own if IS_LINUX else 0):  # is an earlier peer on this machine?
            if (connection := reach(socket.AF_UNIX, self._read(f"unix {index}", index))) is not None:
                self.write(f"source {own}", index)
                return self._join(connection, index), []
        self.write(f"source {own}", own)  # this process is the first on its machine
        sources = {index: self._read(f"source {index}", index) for index in range(own + 1, len(self._ranks))}
        upstream = self._join(reach(socket.AF_INET, self._read("tcp", 0)), 0) if own else None
        self._accept(listener, {index for index, source in sources.items() if source == own})
        self._accept(public, {index for index, source in sources.items() if own == 0 and source == index})
        return upstream, [self.accepted[index] for index in sorted(self.accepted)]

    def _join(self, connection: socket.socket | None, index: int) -> Peer:
        """Greet a peer over a connected socket, and return the peer. Raises `WorkerError` without a socket."""
        with contextlib.suppress(OSError):
            if connection is not None:
                connection.settimeout(self._remaining_s([index]))
                wanted = wire.LinkRequest(wire.FOR_PEER, self._index.to_bytes(16, "little"), False)
                secret = wire.greet(connection, self._read("secret", 0), wanted)
                return self._peer(connection, index, secret, self._index)
        self._check_in_time([index])
        raise WorkerError(f"rank {self._ranks[self._index]} cannot reach rank {self._ranks[index]}. {_ADDRESS_ADVICE}")

    def _accept(self, listener: socket.socket, expected: set[int]) -> None:
        """Accept connections until these peers have connected. Reject processes that cannot prove the secret."""
        while missing := expected - self.accepted.keys():
            listener.settimeout(min(self._remaining_s(missing), _STORE_POLL_S))
            with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
                connection = cleanup.enter_context(listener.accept()[0])
                connection.settimeout(3.0)
                connection.sendall(hello := wire.new_hello())
                reply = wire.read_exactly(connection, wire.REPLY_BYTES)
                if proved := wire.check_reply(self._read("secret", 0), hello, reply):
                    proof, wanted, secret = proved
                    connection.sendall(proof)
                    index = int.from_bytes(wanted.session, "little")
                    self.accepted[index] = self._peer(connection, index, secret, index)
                    cleanup.pop_all()

    def _peer(self, connection: socket.socket, index: int, secret: wire.Secret, flag: int) -> Peer:
        """Return the peer at the other end of an authenticated connection.

        Raises `SavableError` if it is a process of another user, or if batches cannot be authenticated.
        """
        ranks = f"ranks {self._ranks[self._index]} and {self._ranks[index]}"
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _process, user, _group = struct.unpack("3i", credentials)
            if user != os.geteuid():
                raise SavableError(f"{ranks} share batches as users {os.geteuid()} and {user}. Start them as one user.")
            return Peer(self._ranks[index], flag, Channel(connection, blocking=False))
        if not wire.can_authenticate_bodies():
            raise SavableError(f"{ranks} share batches between machines. Run pip install cryptography on both.")
        return Peer(self._ranks[index], flag, LinkChannel(wire.Link(connection, secret)))


def reach(family: int, address: Any) -> socket.socket | None:
    """Return a socket connected to this address, or None if that is impossible.

    The Unix socket of a process on another machine cannot be reached.
    """
    if (connection := socket.socket(family)).connect_ex(address) == 0:
        return connection
    connection.close()
    return None
