"""`PeerBackend`: the `Backend` of ranks that share batches.

The first rank builds them by a backend of its own:

    first rank    Run ──▶ PeerBackend ──▶ Pool or InProcess
                            │ answers, votes and errors, in the order of its calls
    other ranks   Run ──▶ PeerBackend

The first rank is at most `prefetch` answers ahead of the slowest peer. Each answer names its request, with a hash of
the lane's state before it. So a rank notices if it has made another request than the first rank. After a start, all
ranks compare the bytes of the first batch.

If a peer ends, or sends no message for `timeout` seconds while another rank waits for it, all ranks raise an error that
names it. While a rank itself waits in `next`, for a peer or for its workers, it sends alive messages.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.errors import WorkerError
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.messages import Delivery, Failure, RequestKind
from savable_pipeline.run.engine.shared_batches import AnswerSender
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.peers.meeting import Sharing, meet
from savable_pipeline.run.peers.peer import END_S, LOST, Note, PassedSegments, Peer, SourceReader
from savable_pipeline.stages.batch_difference import digest

_ALIVE_PER_TIMEOUT = 8  # number of alive messages within a timeout
_HANG_ADVICE = "Look for a rank that hangs, save the state of the last batch, and restart the ranks."
_SAVE_ADVICE = "The state of the last batch is intact: save it, and restart the ranks."
_VERSION_ADVICE = "Install the same versions of Python, torch and NumPy for all ranks."
_STEPS_ADVICE = "Load, skip and take batches alike on each of them."


class PeerBackend:
    """Backend that yields, on each rank, the answers of the first rank's backend.

    `builder` returns a backend for a host. It builds the batches in the first rank, and is idle in the others. The
    ranks connect to each other at the first request.
    """

    @property
    def shard_error(self) -> str:
        """The error of the backend that builds the batches, see `Backend.shard_error`."""
        return self._builder.shard_error

    @shard_error.setter
    def shard_error(self, message: str) -> None:
        self._builder.shard_error = message

    def __init__(self, sharing: Sharing, workers: Workers, host: Any, builder: Callable[[Any], Backend]) -> None:
        self._rank, self._timeout, self._prefetch = sharing.ranks[sharing.number], workers.timeout, workers.prefetch
        self._sources, self._next_alive_s = PassedSegments(self._send_alive), 0.0  # the time of the next alive message
        self._builder = own = builder(partial(self._sources.open_host, host))
        self.open, self.start, self.numbers = own.open, own.start, own.numbers
        self._meet, self.verify_delivered = partial(meet, sharing, workers.timeout), own.verify_delivered
        # set once the ranks have met: all peers, and those that get batches from this one
        self._peers = self._readers = list[Peer]()
        # states of lanes after their last answers, and whether the ranks compare the next batch
        self._states, self._compares = dict[int, bytes](), True
        self._passed_count, self._failed = 0, ""  # number of answers passed on, and the error that ended the group

    @property
    def capacity(self) -> int:
        """Return the builder's capacity, less the answers that some peer has not taken.

        A single such answer does not count, because it may be on its way. The result is at least one per worker.
        """
        behind = self._passed_count - min((reader.taken_count for reader in self._readers), default=self._passed_count)
        return (most := self._builder.capacity) and max(most // self._prefetch, most - behind * (behind > 1))

    def request(self, lane: int, state: bytes, kind: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> Any:
        """Request a batch from the builder, and return the ticket for `answer`."""
        self._states.setdefault(lane, state)
        return lane, state, kind, self._builder.request(lane, state, kind, facts)

    def answer(self, ticket: Any) -> Delivery:
        """Wait for the answer of the first rank.

        Raises the error of the first rank, or `WorkerError` if ranks differ.
        """
        lane, state, kind, builder_ticket = ticket
        state = self._states[lane] if self.capacity else state  # requests to workers are made with earlier states
        key = (kind, lane, xxh3_64_intdigest(state))
        delivery = self._share_result(key, partial(self._builder.answer, builder_ticket))
        self._states[lane] = delivery.state
        return delivery

    def agree(self, vote: Callable[[], int]) -> int:
        """Return the result of `vote` on the first rank of this group.

        It votes with the first ranks of the other groups.
        """
        return int(self._share_result(("vote",), vote).batch)

    def check_shards(self) -> None:
        """Let the builder look for changed shards. All ranks raise its error."""
        self._share_result(("check_shards",), self._builder.check_shards)

    def forget_requests(self) -> None:
        """Drop all requests."""
        self._states.clear()
        self._builder.forget_requests()

    def stop(self) -> None:
        """Stop the builder. The ranks stay connected, and compare their next batch."""
        self._states.clear()
        self._compares = True
        self._builder.stop()

    def close(self) -> None:
        """Stop, and leave the group.

        Wait up to 5 s for the other ranks to take the answers passed to them.
        """
        self._builder.close()
        self.stop()
        for peer in self._peers:
            peer.send_note("closes")
        until = time.monotonic() + END_S  # wait, because a closed TCP connection may lose what has not arrived
        while (seconds := until - time.monotonic()) > 0 and self._behind(self._passed_count):
            self._handle_messages(seconds)
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _share_result(self, key: Note, build: Callable[[], Any]) -> Delivery:
        """Return the result of `build` in the first rank, on all ranks.

        All ranks must call this with equal keys in the same order. If `build` raises, they all raise the error. The key
        of a batch is the kind of the request, the lane, and a hash of the lane's state before the batch. A result other
        than a batch is returned as the `batch` of a `Delivery`.
        """
        if not self._peers:
            self._upstream, self._readers = self._meet()
            self._peers = self._readers if self._upstream is None else [*self._readers, self._upstream]
            self._passed_count, self._failed, self._sources.mapped = 0, "", set()  # the peers have mapped no segment
            self._own, self._writer = SourceReader(self._sources), AnswerSender()
        self._handle_messages(0.0)
        self._check(self._readers)
        raised, other = None, key  # `other` is the key of the rank from which this one gets the answer
        compares = self._compares and key[0] == "batch"
        if (upstream := self._upstream) is not None:
            # For a vote, the first rank waits for that of another group, which may replace a worker after a timeout.
            self._wait(lambda: [] if upstream.inbox else [upstream], timeouts=2 if key[0] == "vote" else 1)
            (_, other, compares), message, descriptors = upstream.inbox.popleft()
            found: Any
            _, found = upstream.reader.read(message, descriptors)
            # A batch that the first rank requested before it skipped the slot answers a skip.
            if other[1:] != key[1:] or (other[0] != key[0] and (other[0], key[0]) != ("batch", "skip")):
                self._fail(_difference(self._rank, key, upstream.rank, other))
        else:
            try:
                found = build()
            except Exception as error:
                raised, found, compares = error, Failure.of(error), False
            found = found if isinstance(found, Delivery) else Delivery(found, b"", more=False)
        if self._readers:
            found = self._pass_on(("answer", other, compares), found)
        if upstream is not None:
            upstream.send_note("taken")
        if isinstance(found.batch, Failure):
            raise raised or found.batch.raised()
        if compares:  # the second answer shows that all ranks have equal batches
            self._compares = False
            for each in (digest(found.batch), "equal"):
                self._share_result(("digest", each), str)  # the result is "", because only the keys are compared
        return found  # type: ignore[no-any-return]

    def _pass_on(self, note: Note, found: Delivery) -> Delivery:
        """Pass an answer on to the readers, and return it for this process.

        This waits until no reader is more than `prefetch` answers behind. For a digest, it waits for all readers.
        """
        if found.pass_on is None:
            _, found = self._own.read(*self._writer.message(1, found))
        flags = [reader.flag for reader in self._readers if reader.is_local and not reader.end]
        passed = cache(lambda is_local: found.pass_on(note, flags * is_local))
        for reader in self._readers:
            reader.send(*passed(reader.is_local))
        self._passed_count += 1
        behind = self._passed_count - (0 if note[1][0] == "digest" else self._prefetch)
        self._wait(lambda: self._behind(behind))
        return replace(found, pass_on=None)

    def _behind(self, answers: int) -> list[Peer]:
        """Return the readers that have taken fewer than `answers` answers, or have unsent messages."""
        return [each for each in self._readers if each.unsent or (each.taken_count < answers and not each.end)]

    def _wait(self, missing: Callable[[], list[Peer]], *, timeouts: int = 1) -> None:
        """Wait until `missing` returns no peers.

        Raises `WorkerError` on all ranks if one of them ended, or sent nothing for `timeouts` times the timeout.
        """
        start, limit = time.monotonic(), self._timeout * timeouts
        while peers := missing():
            self._check(peers)
            if silent := [peer.rank for peer in peers if time.monotonic() - max(start, peer.last_heard_s) > limit]:
                ranks = ", ".join(map(str, silent))
                self._fail(f"rank {self._rank} waited {limit:g} s for rank {ranks}. {_HANG_ADVICE}")
            self._handle_messages(self._send_alive())

    def _send_alive(self) -> float:
        """Send all peers an alive message, unless one was sent recently.

        Returns the seconds between two such messages, which is how long a wait may take.
        """
        if (now := time.monotonic()) > self._next_alive_s:
            self._next_alive_s = now + self._timeout / _ALIVE_PER_TIMEOUT
            for peer in self._peers:
                peer.send_note("alive")
        return self._timeout / _ALIVE_PER_TIMEOUT

    def _check(self, needed: list[Peer]) -> None:
        """Raise `WorkerError` if a peer has failed or ended.

        A peer that has closed its loader is an error only if it is among those `needed`.
        """
        for failed in filter(None, [self._failed, *(peer.error for peer in self._peers)]):
            self._fail(failed)
        for peer in self._peers:
            if peer.end and not peer.inbox and (peer in needed or peer.end is LOST):
                self._fail(f"rank {peer.rank} {peer.end}, which shares batches with rank {self._rank}. {_SAVE_ADVICE}")

    def _handle_messages(self, seconds: float) -> None:
        """Handle messages that arrive within these seconds."""
        peers, poll = {peer.fileno(): peer for peer in self._peers if not peer.is_closed}, select.poll()
        for descriptor, peer in peers.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if peer.unsent else 0))
        for descriptor, _ in poll.poll(seconds * 1000):
            (peer := peers[descriptor]).handle_messages()
            for source in self._sources.readers if peer.end is LOST else ():
                source.segments.release(peer.flag)

    def _fail(self, text: str) -> NoReturn:
        """Raise an error here, and on all peers."""
        self._failed = text
        for peer in self._peers:
            peer.send_note("failed", text)
        raise WorkerError(text)


def _difference(rank: int, key: Note, other_rank: int, other: Note) -> str:
    """Return the message for two ranks with different requests."""
    if key[0] == other[0] == "digest":
        return f"the first batch of rank {rank} differs from that of rank {other_rank}. {_VERSION_ADVICE}"
    steps = f"{key[:2]} and {other[:2]}"
    return f"ranks {rank} and {other_rank} share batches, but not their steps: {steps}. {_STEPS_ADVICE}"
