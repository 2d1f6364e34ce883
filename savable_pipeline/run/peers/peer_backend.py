"""`PeerBackend`: the `Backend` of ranks that share batches, which the first of them builds by a backend of its own.

first rank     Run ──▶ PeerBackend ──▶ Pool or InProcess
                         │ answers, votes and errors, in the order of its calls
other ranks    Run ──▶ PeerBackend
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.connection import Connection, Ended, Host
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.engine.process_host import ProcessHost
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.peers.group import PeerGroup
from savable_pipeline.run.peers.sharing import Sharing
from savable_pipeline.stages.batch_difference import digest

_SAME_PLACE = "Create the loader with the same settings, and load the same state, on each of these ranks."
_SAME_BATCH = "Install the same versions of Python, torch and NumPy for all ranks."
_LISTEN_S = 1.0  # for news of workers at a time


class PeerTicket(NamedTuple):
    """A request, and its ticket in the backend that builds the batch, if that is in this process."""

    lane: int
    state: bytes
    want: RequestKind
    ticket: Any


class PeerBackend(Backend):
    """Answers on each rank as the backend of the first one does.

    `describe` returns what must be the same on all ranks before the first batch.
    """

    def __init__(self, sharing: Sharing, workers: Workers) -> None:
        self.builds: Backend | None = None  # in the first rank
        self.describe: Callable[[], Mapping[str, Any]] = dict
        self._sharing, self._workers = sharing, workers
        self._group: PeerGroup | None = None
        self._runs = False
        self._states: dict[int, bytes] = {}  # of lanes, after their last answers

    @property
    def fault(self) -> str:
        """What the backend that builds has found in yielded batches."""
        return self.builds.fault if self.builds else ""

    @fault.setter
    def fault(self, fault: str) -> None:
        if self.builds is not None:
            self.builds.fault = fault

    @property
    def group(self) -> PeerGroup:
        """The peers, which are met at the first use."""
        if self._group is None:
            self._group = PeerGroup(self._sharing, self._workers.timeout, self._workers.prefetch)
        return self._group

    @property
    def capacity(self) -> int:
        """That of the backend that builds; 0 in the other ranks."""
        return self.builds.capacity if self.builds else 0

    def open(self) -> None:
        """Open what starts workers, in the first rank."""
        if self.builds is not None:
            self.builds.open()

    def start(self) -> None:
        """Check that all ranks are at the same place, and start the workers in the first. Waits for all of them."""
        if not self._runs:
            self.group.compare(self.describe(), _SAME_PLACE)
            self._runs = True
        if self.builds is not None:
            self.builds.start()

    def ask(self, lane: int, state: bytes, want: RequestKind = "batch", facts: RunFacts = NO_FACTS) -> PeerTicket:
        """Request a batch, in the first rank, and return a ticket."""
        if self.builds is None:
            return PeerTicket(lane, state, want, None)
        self._states.setdefault(lane, state)
        return PeerTicket(lane, state, want, self.builds.ask(lane, state, want, facts))

    def answer(self, ticket: PeerTicket) -> Delivery:
        """Wait for the answer of the first rank. Raises what it raises, or `SavableError` if ranks differ."""
        builds, state = self.builds, ticket.state
        if builds is not None:
            state = self._states[ticket.lane]
        key = ticket.want, ticket.lane, xxh3_64_intdigest(state)
        (want, *_), found = self.group.shared(key, None if builds is None else lambda: builds.answer(ticket.ticket))
        self._states[ticket.lane] = found.state
        if want == "batch" and not self.group.compared:
            self.group.compared = True
            self.group.compare({"the first batch": digest(found.batch)}, _SAME_BATCH)
        return found  # type: ignore[no-any-return]

    def agree(self, vote: Callable[[], int]) -> int:
        """What the first ranks of all groups have agreed on by their votes."""
        self.start()
        return self.group.shared(("vote",), vote)[1]  # type: ignore[no-any-return]

    def forget_requests(self) -> None:
        """Drop all requests."""
        self._states.clear()
        if self.builds is not None:
            self.builds.forget_requests()

    def verify_delivered(self) -> None:
        """Compare the shards, in the first rank."""
        if self.builds is not None:
            self.builds.verify_delivered()

    def look(self) -> None:
        """Have the first rank compare the shards. Raises on all ranks what it raises."""
        if self._runs:
            self.group.shared(("end of the epoch",), self.builds.look if self.builds else None)

    def stop(self) -> None:
        """End the workers. The ranks stay connected, and compare where they are at the next start."""
        self._runs = False
        self._states.clear()
        if self.builds is not None:
            self.builds.stop()

    def close(self) -> None:
        """Stop, and leave the group: other ranks may still take what was built before."""
        self.stop()
        if self.builds is not None:
            self.builds.close()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def numbers(self) -> dict[str, int]:
        """Return the counters of the first rank's workers; in other ranks, the batches viewed there."""
        names = ("ready_batches", "viewed_batches", "restarts", "num_workers", "moved_lanes")
        found = self.builds.numbers() if self.builds else dict.fromkeys(names, 0)
        viewed = self._group.viewed if self._group else 0
        return {**found, "viewed_batches": found["viewed_batches"] + viewed}


class PeerHost(Host):
    """A host whose workers' answers can be passed on, and that listens to peers while it waits for workers."""

    def __init__(self, host: Host, backend: PeerBackend) -> None:
        self._host, self._backend = host, backend
        if isinstance(host, ProcessHost):
            host.reader = lambda: backend.group.new_reader()

    def now(self) -> float:
        """Seconds on the host's clock."""
        return self._host.now()

    def count(self, wanted: int) -> int:
        """How many workers there are to be."""
        return self._host.count(wanted)

    def begin(self, pinned: PinnedShards) -> Connection:
        """Begin a worker."""
        return self._host.begin(pinned)

    def wait(self, seconds: float) -> tuple[Sequence[Connection], list[Ended]]:
        """Wait up to so long for news of workers. Raises if a peer has ended."""
        self._backend.group.watch()
        return self._host.wait(min(seconds, _LISTEN_S))

    def end_workers(self) -> None:
        """End all workers."""
        self._host.end_workers()

    def close(self) -> Any:
        """End what begins the workers."""
        self._host.close()
