"""`PeerGroup`: the connections of a loader with its peers, and what they agree on.

    first rank   builds ──▶ passes on ──▶ is at most `prefetch` answers ahead of the slowest
    others       take the same answers, votes and errors, in the same order

A peer that ends, or gives no sign of life, ends all: each raises an error with its rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.run.engine.messages import Delivery, Failure
from savable_pipeline.run.peers.connection import Note, Peer
from savable_pipeline.run.peers.meeting import meet
from savable_pipeline.run.peers.passed_answers import OwnSource, SourceReader
from savable_pipeline.run.peers.sharing import Sharing

_BUSY = 0.25  # part of the timeout after which the first rank reports again that it builds
_PATIENCE = 0.1  # part of the timeout by which others wait longer than the first rank, which knows more
_LISTEN_S = 0.25  # at a time
_END_S = 5.0  # for the last notes to be sent
_KINDS = {kind.__name__: kind for kind in (SavableError, WorkerError)}
_ALIKE = "Call next, skip, load_state_dict and reconfigure alike on each of these ranks."

Key: TypeAlias = tuple[Any, ...]
_lingering: list[Peer] = []  # closed, but this process still views their batches: they end with it


class PeerGroup:
    """The peers of one loader, which this process meets when it is created.

    `upstream` passes batches to this process, and is None in the first rank. This process passes them to `readers`.
    """

    def __init__(self, sharing: Sharing, timeout: float, prefetch: int) -> None:
        self.rank, self._timeout, self._prefetch = sharing.ranks[sharing.index], timeout, prefetch
        self.upstream, self.readers = meet(sharing, timeout)
        self.compared = False  # whether the peers have compared a batch
        self._own = OwnSource()
        self._sources: weakref.WeakSet[SourceReader] = weakref.WeakSet([self._own.reader])
        self._gone: list[int] = []  # sources that peers do not know to be gone
        self._passed = 0  # answers
        self._failed: SavableError | None = None
        self._builds = False  # at this moment
        self._busy_at = 0.0

    def new_reader(self) -> SourceReader:
        """What reads the answers of a new worker."""
        reader = SourceReader()
        self._sources.add(reader)
        weakref.finalize(reader, self._gone.append, reader.source)
        return reader

    @property
    def viewed(self) -> int:
        """The batches that are viewed in this process, but for those that workers of this process wrote."""
        return self._own.reader.segments.viewed + (self.upstream.end.viewed if self.upstream else 0)

    # What passes from the first rank to the others.

    def shared(self, key: Key, make: Callable[[], Any] | None) -> tuple[Key, Any]:
        """What the first rank has made, on each rank, and its key. Raises what was raised there.

        Raises `SavableError` on all ranks if they ask for different things.
        """
        self._hear(0.0)
        self._check()
        raised, found = None, None
        if self.upstream is not None:
            key, found = self._taken(self.upstream, key)
        elif make is not None:
            self._builds, self._busy_at = True, time.monotonic()
            try:
                found = make()
            except Exception as error:
                found, raised = Failure.of(error), error
            finally:
                self._builds = False
        found = self._pass_on(key, found)
        if raised is not None:
            raise raised
        if isinstance(found, Failure):
            raise found.raised()
        return key, found

    def _taken(self, peer: Peer, key: Key) -> tuple[Key, Any]:
        note, found = self._next_note(peer)
        if note[0] != "answer":
            self.fail(SavableError(f"ranks {self.rank} and {peer.rank} share batches, but not their steps. {_ALIKE}"))
        for source in note[2]:
            peer.end.forget(source)
        peer.send(("taken",))
        if not _answers(note[1], key):
            self.fail(
                SavableError(
                    f"ranks {self.rank} and {peer.rank} share batches, but are not at the same one: {_shown(key)} and "
                    f"{_shown(note[1])}. {_ALIKE}"
                )
            )
        return note[1], found

    def _pass_on(self, key: Key, found: Any) -> Any:
        """Pass an answer on, and return it as this process is to use it. Waits for readers that are far behind."""
        readers = [reader for reader in self.readers if not reader.ended]
        if not readers:
            return found
        message = found.written if isinstance(found, Delivery) else None
        if message is None:
            found, message = self._own.written(found)
        passed = message.passed([reader.flag for reader in readers])
        gone, self._gone[:] = tuple(self._gone), []
        for reader in readers:
            reader.send(("answer", key, gone), passed)
        for descriptor in passed.descriptors:
            os.close(descriptor)
        self._passed += 1
        self._wait(lambda: [each for each in self.readers if self._is_behind(each)])
        return found

    def _is_behind(self, reader: Peer) -> bool:
        return not reader.ended and reader.taken < self._passed - self._prefetch

    def compare(self, values: Mapping[str, Any], cure: str) -> None:
        """Wait until all peers have compared these values. Raises `SavableError` on all of them if some differ."""
        for reader in self.readers:
            reader.send(("compare",))
        for reader in self.readers:
            note, _ = self._next_note(reader)
            for name, value in values.items():
                if (other := note[1].get(name)) != value:
                    self.fail(
                        SavableError(
                            f"ranks that share batches differ: {name} is {other} on rank {reader.rank}, and {value} on "
                            f"rank {self.rank}. {cure}"
                        )
                    )
        if self.upstream is not None:
            self.upstream.send(("values", dict(values)))
            while self._next_note(self.upstream)[0] != ("same",):
                pass  # answers that an interrupted step did not take
        for reader in self.readers:
            reader.send(("same",))

    def _next_note(self, peer: Peer) -> tuple[Note, Any]:
        """The next note of a peer, with its answer."""
        self._wait(lambda: [] if peer.inbox else [peer])
        note, read = peer.inbox.popleft()
        return note, read()

    # Waiting, and ends.

    def watch(self) -> None:
        """While this process waits for its workers: report that, and raise if a peer has ended."""
        if self._builds:
            self._hear(0.0)
            self._check()
            if time.monotonic() - self._busy_at > self._timeout * _BUSY:
                self._busy_at = time.monotonic()
                for reader in self.readers:
                    reader.send(("busy",))

    def _wait(self, missing: Callable[[], list[Peer]]) -> None:
        """Wait until no peer is missing. Raises `WorkerError` on all if one ended, or gave no sign for too long."""
        start = time.monotonic()
        while peers := missing():
            self._check(peers)
            patience = self._timeout * (1 + _PATIENCE * (self.upstream in peers))
            seconds = max(start, *(peer.busy for peer in peers)) + patience - time.monotonic()
            if seconds <= 0:
                ranks = ", ".join(str(peer.rank) for peer in peers)
                self.fail(
                    WorkerError(
                        f"rank {self.rank} waited {self._timeout:g} s for rank {ranks}, with which it shares batches. "
                        "Look for a rank that hangs, save the last batch's state, and restart."
                    )
                )
            self._hear(min(seconds, _LISTEN_S))

    def _check(self, needed: Sequence[Peer] = ()) -> None:
        """Raise an error if a peer has failed or ended, or one that is needed has closed its loader."""
        if self._failed is not None:
            raise type(self._failed)(str(self._failed))
        for peer in self._peers():
            if peer.lost and not peer.ended and not peer.inbox:
                self.fail(
                    WorkerError(
                        f"rank {peer.rank} ended, which shares batches with rank {self.rank}. The state of the last "
                        "batch is intact: save it, and restart the ranks."
                    )
                )
            if peer.ended and peer in needed:
                self.fail(
                    SavableError(
                        f"rank {peer.rank} closed the loader that it shares with rank {self.rank}. Take the same "
                        "number of batches on each of these ranks."
                    )
                )

    def _peers(self) -> list[Peer]:
        return [*self.readers, *([] if self.upstream is None else [self.upstream])]

    def _hear(self, seconds: float) -> None:
        """Take what arrives within these seconds."""
        peers = [peer for peer in self._peers() if not peer.lost]
        poll = select.poll()
        for peer in peers:
            peer.end.watch(poll)
        poll.poll(seconds * 1000)
        for peer in peers:
            self._take(peer)

    def _take(self, peer: Peer) -> None:
        for note, read in peer.receive():
            if note[0] == "taken":
                peer.taken += 1
            elif note[0] == "busy":
                peer.busy = time.monotonic()
                for reader in self.readers:
                    reader.send(note)
            elif note[0] == "ended":
                peer.ended = True
            elif note[0] == "failed" and self._failed is None:
                self._failed = _KINDS[note[1]](note[2])
                self._report(note)
            else:
                peer.inbox.append((note, read))
        if peer.lost and peer is not self.upstream:
            for source in self._sources:
                source.segments.release(peer.flag)

    def fail(self, error: SavableError) -> NoReturn:
        """Raise an error here, and on all peers."""
        self._failed = error
        self._report(("failed", type(error).__name__, str(error)))
        raise error

    def _report(self, note: Note) -> None:
        for peer in self._peers():
            peer.send(note)

    def close(self) -> None:
        """Leave the group. Peers that have taken as many batches do not need this one."""
        self._report(("ended",))
        deadline = time.monotonic() + _END_S
        for peer in self._peers():
            with contextlib.suppress(OSError):
                while not peer.lost and not peer.end.flush() and time.monotonic() < deadline:
                    time.sleep(0.01)
            if peer is self.upstream and peer.end.viewed:
                _lingering.append(peer)
            else:
                peer.end.close()


def _answers(found: Key, wanted: Key) -> bool:
    """Whether an answer is the one that is wanted. A batch that was requested before it was skipped is one, too."""
    return found[1:] == wanted[1:] and (found[:1] == wanted[:1] or (found[0], wanted[0]) == ("batch", "skip"))


def _shown(key: Key) -> str:
    return f"{key[0]} of lane {key[1]}" if len(key) > 1 else str(key[0])
