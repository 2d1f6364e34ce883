"""`SavableLoader`: gives a rank its batches in slot order, and saves and restores where it is."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from savable_pipeline.errors import SavableError
from savable_pipeline.fingerprint import (
    Fingerprint,
    compare,
    fingerprint,
    pack_fingerprint,
    unpack_fingerprint,
)
from savable_pipeline.global_rng import KINDS, as_in_a_worker
from savable_pipeline.host import Delivery, LaneHost, Pipeline, check_pipeline, seeded_kinds
from savable_pipeline.pool import Pool, check_picklable, get_context
from savable_pipeline.ranks import find_ranks
from savable_pipeline.state import (
    VERSION,
    LaneState,
    check_flat,
    lane_name,
    merge_states,
    pack_state,
    read_lanes,
)
from savable_pipeline.worker import Job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from savable_pipeline.stage import Stage

log = logging.getLogger(__name__)

MAX_LAG = 16  # how many batches ago `state_dict(lag=)` reaches back


class SavableLoader:
    """The batches of a pipeline, in an order that depends on the data, the settings, `seed` and `lanes` alone.

    `pipeline` is a function that builds the stages of a lane. `num_workers=0` runs it in this process. `rank` and
    `world_size`, of the data-parallel group, come from torch.distributed, `group` or `mesh` unless they are given.
    `prefetch` is how many batches a worker may be ahead, `timeout` how many seconds one batch may take.

    Iterating goes on where the loader is; each `iter()` on a finished loader begins the next epoch. Raises ValueError
    for wrong settings.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        lanes: int = 96,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 600.0,
    ) -> None:
        if num_workers < 0 or prefetch < 1:
            raise ValueError(f"num_workers must be at least 0 and prefetch 1: {num_workers}, {prefetch}")
        check_pipeline(pipeline)
        if not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, not {seed!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, not {timeout}")
        if not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed must fit into 64 bits, so that a state can hold it: {seed}")
        self._ranks = find_ranks(rank, world_size, group, mesh, lanes)
        self._job = Job(pipeline, seed, lanes)
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._timeout = timeout
        self._context = get_context(multiprocessing_context)
        if num_workers:
            check_picklable(pipeline, self._context)
        self._shared: dict[Any, Any] = {}
        self._host = LaneHost(pipeline, seed=seed, lanes=lanes, shared=self._shared)
        self._built: Stage | None = None
        self._seeded: set[str] | None = None  # the global generators that its encoders have seeded
        self._fingerprint: tuple[Fingerprint, bytes] | None = None
        self._pool: Pool | None = None
        self._finalizer: Callable[[], Any] | None = None
        self._begin(epoch=0)

    # Where the loader is. A *step* takes one slot on each rank.

    def _begin(self, epoch: int) -> None:
        """Stand at the start of an epoch."""
        fresh = {lane: LaneState(lane, epoch) for lane in self._own_lanes}
        self._stand(epoch, 0, fresh, {lane: pack_state(state) for lane, state in fresh.items()})

    def _stand(self, epoch: int, slot: int, lanes: dict[int, LaneState], states: dict[int, bytes]) -> None:
        more = {lane: state.more for lane, state in lanes.items()}
        history: deque[tuple[int, int, bytes]] = deque(maxlen=MAX_LAG)
        self._epoch = epoch
        self._slot = slot  # the first slot of the next step
        self._states = states  # by lane: after its batch that was given last
        self._more = more
        self._rounds = -(-slot // self._job.lanes)  # rounds that are known to take place
        self._finished = False
        self._history = history
        self._asked: dict[int, int] = {}  # slot → ticket
        self._received: dict[int, Delivery] = {}
        self._running: set[int] = set()  # lanes that the host in this process holds as they stand

    @property
    def epoch(self) -> int:
        """How many epochs (passes of a finite pipeline) have been finished."""
        return self._epoch

    @property
    def _own_lanes(self) -> range:
        return self._ranks.lanes(self._job.lanes)

    @property
    def _pipeline(self) -> Stage:
        """The stages of one lane, built to be looked at."""
        if self._built is None:
            with as_in_a_worker(set(KINDS)):
                self._built = self._host.build(self._ranks.rank, 0)[0]
        return self._built

    # Iterating.

    def __iter__(self) -> SavableLoader:
        self._finished = False
        return self

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if not self._pipeline.endless and not self._step_takes_place():
            self._finish()
            raise StopIteration
        slot = self._ranks.slot(self._slot)
        delivery = self._receive(slot)
        if delivery.dry:
            self.close()
            raise SavableError(f"lane {slot % self._job.lanes} had said that it had more batches, but has none")
        batch = _pinned(delivery.batch) if self._pin_memory else delivery.batch
        if self._num_workers:
            with self._workers_dropped_on_error():
                self._ask_ahead()
        self._commit(slot, slot % self._job.lanes, delivery)  # last: what fails before has given nothing
        return batch

    def _commit(self, slot: int, lane: int, delivery: Delivery) -> None:
        """Take note that the trainer is given this batch.

        Nothing is called before the last line, since Python hears Ctrl-C at calls: it comes before or after all this.
        """
        before = (self._slot, lane, self._states[lane])
        del self._received[slot]
        self._states[lane] = delivery.state
        self._more[lane] = delivery.more
        self._slot += self._ranks.world_size
        self._history.append(before)

    def _finish(self) -> None:
        left = self._rounds * self._job.lanes - self._slot
        if left and self._ranks.rank == 0:
            log.warning(
                "the last %d slots of epoch %d are given to no rank: %d ranks that began at a slot they do not divide "
                "would need more for a step",
                left,
                self._epoch,
                self._ranks.world_size,
            )
        self._tell_what_is_left()
        self._drop_workers()
        self._begin(self._epoch + 1)
        self._finished = True

    def _tell_what_is_left(self) -> None:
        """Say how many lanes have more at an epoch's end. Raises `SavableError` if the epoch had no batch at all."""
        dry = [lane for lane, more in self._more.items() if not more]
        rest = len(self._more) - len(dry)
        if self._rounds == 0:
            raise SavableError(
                f"epoch {self._epoch} has no batch: it ends before the first round that some lane cannot fill, and of "
                f"{self._job.lanes} lanes {dry[0] if dry else 'one of another rank'} has nothing; this is too little "
                f"data ({self._pipeline.population} samples) for so many lanes and this batch size: give fewer lanes="
            )
        if rest and self._ranks.rank == 0:
            log.warning(
                "epoch %d ends after %d rounds, before the first that lane %s cannot fill; %d lanes of this rank have "
                "more, which is left out; fewer lanes leave less",
                self._epoch,
                self._rounds,
                dry[0] if dry else "(of another rank)",
                rest,
            )

    def _step_takes_place(self) -> bool:
        """Whether every slot of the next step lies in a round that every lane can fill."""
        last_round = (self._slot + self._ranks.world_size - 1) // self._job.lanes
        while self._rounds <= last_round:
            if not self._ranks.all_true(self._own_lanes_have_more()):
                return False
            self._rounds += 1
        return True

    def _own_lanes_have_more(self) -> bool:
        return all(self._has_more(lane) for lane in self._own_lanes)

    def _has_more(self, lane: int) -> bool:
        """Whether a lane has a batch for round `_rounds`."""
        before = (self._rounds - 1) * self._job.lanes + lane
        if before >= self._slot:
            return self._receive(before).more
        if self._more[lane] is None:
            if self._num_workers:
                with self._workers_dropped_on_error():
                    self._probe()
            else:
                delivery = self._deliver(lane, probe=True)
                self._states[lane], self._more[lane] = delivery.state, delivery.more
                self._running.add(lane)
        return bool(self._more[lane])

    # Getting batches made.

    def _probe(self) -> None:
        """Let workers find out which lanes have a batch at all."""
        pool = self._start()
        unknown = [lane for lane in self._own_lanes if self._more[lane] is None]
        tickets = {lane: pool.ask(lane, self._states[lane], probe=True) for lane in unknown}
        for lane, ticket in tickets.items():
            found = pool.answer(ticket)
            self._states[lane], self._more[lane] = found.state, found.more

    def _receive(self, slot: int) -> Delivery:
        """The batch of a slot of this rank; waits for it."""
        if slot not in self._received:
            if self._num_workers:
                with self._workers_dropped_on_error():
                    self._ask_ahead(upto=slot)
                    self._received[slot] = self._start().answer(self._asked.pop(slot))
            else:
                lane = slot % self._job.lanes
                self._received[slot] = self._deliver(lane)
                self._running.add(lane)
        return self._received[slot]

    def _deliver(self, lane: int, *, probe: bool = False) -> Delivery:
        """Run a lane in this process. It counts as running when what it gave is noted, not before."""
        state = None if lane in self._running else self._states[lane]
        self._running.discard(lane)
        if self._seeded is None:
            self._seeded = seeded_kinds(self._pipeline)
        with as_in_a_worker(self._seeded if state is None else set(KINDS)):  # a pipeline function may draw from any
            return self._host.deliver(lane, state, probe=probe)

    def _start(self) -> Pool:
        """The worker processes, started if they are not there."""
        if self._pool is None:
            _ = self._pipeline  # opens, and on first use indexes, the shards once, before there are workers
            self._pool = Pool(
                self._job,
                num_workers=self._num_workers,
                context=self._context,
                timeout=self._timeout,
                shared=self._shared,
            )
            self._finalizer = weakref.finalize(self, self._pool.close)
        return self._pool

    def _ask_ahead(self, upto: int = -1) -> None:
        """Ask workers for this rank's next slots: to `upto` at least, then as far as `prefetch` allows."""
        pool, lanes, step = self._start(), self._job.lanes, self._ranks.world_size
        limit = self._prefetch * self._num_workers + (1 if self._received else 0)  # besides the one to be given now
        slot = max([self._ranks.slot(self._slot) - step, *self._asked, *self._received]) + step
        while slot <= upto or len(self._asked) + len(self._received) < limit:
            lane = slot % lanes
            if slot > upto and self._more[lane] is False:
                return
            self._asked[slot] = pool.ask(lane, self._states[lane])
            slot += step

    def _drop_workers(self) -> None:
        """End the workers and forget what they were asked; the state stays."""
        finalizer, self._pool, self._finalizer = self._finalizer, None, None
        self._asked, self._received, self._running = {}, {}, set()
        if finalizer is not None:
            finalizer()

    @contextlib.contextmanager
    def _workers_dropped_on_error(self) -> Iterator[None]:
        """After an error, Ctrl-C too, no one knows what the workers were asked: begin again from the state."""
        try:
            yield
        except BaseException:
            self._drop_workers()
            raise

    def close(self) -> None:
        """End the workers and close the shards. Iterating again goes on at the same place."""
        self._drop_workers()
        self._host.forget()
        self._built = None
        self._shared.clear()

    def __enter__(self) -> SavableLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving and restoring.

    def state_dict(self, *, lag: int = 0) -> dict[str, Any]:
        """Where this rank is after the batch given last, or `lag` batches before: a flat dict of int and bytes.

        It holds the rank's own lanes. Starts nothing, waits for nothing. Raises ValueError for a lag beyond what the
        loader has given since it was made, loaded or began the epoch, or beyond 16.
        """
        if not 0 <= lag <= len(self._history):
            raise ValueError(f"lag={lag}: only the last {len(self._history)} batches can be taken back")
        slot, states = self._slot, dict(self._states)
        for before, lane, state in list(reversed(self._history))[:lag]:
            slot, states[lane] = before, state
        return {
            "format": VERSION,
            "lanes": self._job.lanes,
            "epoch": self._epoch,
            "slot": slot,
            "fingerprint": self._own_fingerprint()[1],
            **{lane_name(lane): states[lane] for lane in sorted(states)},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Go on from where `state` was saved, by any number of ranks and workers, as long as it has our lanes.

        `allow` names fields that may differ from the saved ones, as `CheckpointMismatchError` calls them. Raises that
        error if another field differs or a lane is missing, `StateError` if the state is damaged; then nothing has
        changed here.
        """
        check_flat(state)
        compare(unpack_fingerprint(state["fingerprint"]), self._own_fingerprint()[0], allow)
        lanes = read_lanes(state, self._own_lanes)
        self._drop_workers()
        self._stand(state["epoch"], state["slot"], lanes, {lane: state[lane_name(lane)] for lane in lanes})

    def save_state(self) -> dict[str, Any]:
        """The same as `state_dict()`."""
        return self.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """The same as `load_state_dict(state)`."""
        self.load_state_dict(state)

    def global_state_dict(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The state with the lanes of all ranks, on each of them. Collective."""
        ranks = self._ranks if group is None else type(self._ranks)(self._ranks.rank, self._ranks.world_size, group)
        return merge_states(ranks.gather(self.state_dict()))

    def _own_fingerprint(self) -> tuple[Fingerprint, bytes]:
        if self._fingerprint is None:
            found = fingerprint(self._pipeline, seed=self._job.seed, lanes=self._job.lanes)
            self._fingerprint = found, pack_fingerprint(found)
        return self._fingerprint


def _pinned(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory, for copies to a GPU that do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {name: _pinned(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_pinned, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_pinned, batch))
    return batch
