"""`SavableLoader`: gives a rank its batches in slot order, and saves and restores where it is."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal

from savable_pipeline.errors import SavableError
from savable_pipeline.fingerprint import (
    Fingerprint,
    compare,
    fingerprint,
    pack_fingerprint,
    unpack_fingerprint,
)
from savable_pipeline.global_rng import KINDS, as_in_a_worker
from savable_pipeline.host import Delivery, LaneHost, Pipeline, Want, check_pipeline
from savable_pipeline.launch import check_picklable, get_context
from savable_pipeline.pinned import pinned
from savable_pipeline.position import Position
from savable_pipeline.ranks import find_ranks
from savable_pipeline.rounds import Rounds
from savable_pipeline.state import check_flat, lane_name, merge_states, read_lanes
from savable_pipeline.stats import Stats
from savable_pipeline.supply import Supply
from savable_pipeline.trace import Trace, data_path, trace
from savable_pipeline.worker import Job

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from savable_pipeline.stage import Stage

log = logging.getLogger(__name__)


class SavableLoader:
    """The batches of a pipeline, in an order that depends on the data, the settings, `seed` and `lanes` alone.

    `pipeline` is a function that builds the stages of a lane. `num_workers=0` runs it in this process; workers get it
    as it is when the loader is made. `rank` and `world_size`, of the data-parallel group, come from torch.distributed,
    `group` or `mesh` unless they are given. A finite run ends with `tail="stop"` before the first round (a batch of
    each lane) that some lane cannot fill, with `tail="pad"` when all are dry: then every sample comes, and what is
    there only to fill up is marked in `batch["valid"]`. `prefetch` is how many batches a worker may be ahead,
    `timeout` how many seconds one batch may take before its worker is replaced, `max_restarts` how many workers may be.

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
        tail: Literal["stop", "pad"] = "stop",
        timeout: float = 600.0,
        max_restarts: int = 100,
    ) -> None:
        self._with_workers = partial(  # makes the same loader anew, with another number of them
            SavableLoader,
            pipeline,
            seed=seed,
            lanes=lanes,
            rank=rank,
            world_size=world_size,
            group=group,
            mesh=mesh,
            prefetch=prefetch,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context,
            tail=tail,
            timeout=timeout,
            max_restarts=max_restarts,
        )
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
        if tail not in ("stop", "pad"):
            raise ValueError(f"tail must be 'stop' or 'pad', not {tail!r}")
        self._pad = tail == "pad"
        self._job = Job(pipeline, seed, lanes, self._pad)
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._shared: dict[Any, Any] = {}
        self._host = LaneHost(pipeline, seed=seed, lanes=lanes, pad=self._pad, shared=self._shared)
        self._built: Stage | None = None
        self._fingerprint: tuple[Fingerprint, bytes] | None = None
        self._stats = Stats(num_workers)
        me = weakref.ref(self)
        self._supply = Supply(
            self._job,
            self._host,
            me,
            lambda: me()._pipeline,  # type: ignore[union-attr]
            num_workers=num_workers,
            prefetch=prefetch,
            timeout=timeout,
            max_restarts=max_restarts,
            context=get_context(multiprocessing_context),
        )
        self._rounds = Rounds(lanes, self._supply, pad=self._pad, count=self._stats.count)
        self._begin(epoch=0)
        if num_workers > len(self._own_lanes):
            log.warning(
                "%d workers for the %d lanes of this rank: no more can work at a time than it has lanes; a new run "
                "had better have lanes=%d or more",
                num_workers,
                len(self._own_lanes),
                num_workers * self._ranks.world_size,
            )
        if num_workers:
            check_picklable(pipeline, get_context(multiprocessing_context))
            self._supply.launch()

    # Where the loader is. A *step* takes one slot on each rank.

    def _begin(self, epoch: int) -> None:
        """Stand at the start of an epoch."""
        self._stand(Position.start(epoch, self._ranks, self._job.lanes))

    def _stand(self, at: Position) -> None:
        self._at = at
        self._finished = False

    @property
    def epoch(self) -> int:
        """How many epochs (passes of a finite pipeline) have been finished."""
        return self._at.epoch

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

    def __len__(self) -> int:
        """How many batches this rank gets in an epoch. Raises TypeError where that cannot be known beforehand.

        It can for a finite pipeline without packing whose encoder says that it is `one_to_one`.
        """
        counts = [self._pipeline.count_of(lane, self._at.epoch) for lane in range(self._job.lanes)]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts) or self._pipeline.endless:
            raise TypeError(
                "the length of this loader is not known: it is for a finite pipeline (epochs=1) without packing whose "
                "encoder sets one_to_one = True"
            )
        return (max(known) if self._pad else min(known)) * self._job.lanes // self._ranks.world_size

    def __bool__(self) -> bool:
        return True  # whether its length is known or not

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        came = time.perf_counter()
        delivery = self._step("batch")
        batch = pinned(delivery.batch) if self._pin_memory else delivery.batch
        self._supply.ask_ahead(self._at)
        self._stats.add(time.perf_counter() - came, delivery.seconds, delivery.counts)
        self._commit(delivery)  # last: what fails before has given nothing
        return batch

    def _step(self, want: Want, last: int = -1) -> Delivery:
        """What this rank gets in the next step. Raises StopIteration at the end of an epoch."""
        if not self._pipeline.endless and not self._rounds.hold_step(self._at, self._ranks):
            self._finish()
            raise StopIteration
        slot = self._at.own_slot
        delivery = self._supply.receive(self._at, slot, want, last)
        if delivery.dry:
            self.close()
            raise SavableError(f"lane {slot % self._job.lanes} had said that it had more batches, but has none")
        return delivery

    def _commit(self, delivery: Delivery) -> None:
        """Take note that the trainer is given this batch.

        No function is called between the first change and the last line, since Python hears Ctrl-C at calls: it comes
        before or after all this.
        """
        at = self._at
        slot, next_step = at.own_slot, at.slot + at.step
        lane = slot % self._job.lanes
        received = self._supply.received
        before = (at.slot, lane, at.states[lane])
        del received[slot]
        at.states[lane] = delivery.state
        at.more[lane] = delivery.more
        at.slot = next_step
        at.history.append(before)

    def skip(self, slots: int) -> None:
        """Pass over the next `slots` slots of all ranks together, as after a spike of the loss. Call it on each rank.

        Batches are not made of what is passed over, and workers pass over side by side. A finite run's epoch ends where
        it would have. Raises ValueError if a step of all ranks would be cut.
        """
        if slots < 0 or slots % self._ranks.world_size:
            raise ValueError(f"skip takes a multiple of the {self._ranks.world_size} ranks, not {slots}")
        last = self._at.slot + slots - 1
        while self._at.slot <= last:
            try:
                self._commit(self._step("pass", last))
            except StopIteration:
                return

    def _finish(self) -> None:
        self._rounds.tell_what_is_left(self._at, self._ranks, self._pipeline.population)
        self._supply.drop()
        self._begin(self._at.epoch + 1)
        self._finished = True

    def close(self) -> None:
        """End the workers and close the shards. Iterating again goes on at the same place."""
        self._supply.close()
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
        return self._at.flat(lag, self._job.lanes, self._own_fingerprint()[1])

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Go on from where `state` was saved, by any number of ranks and workers, as long as it has our lanes.

        `allow` names fields that may differ from the saved ones, as `CheckpointMismatchError` calls them. Raises that
        error if another field differs or a lane is missing, `StateError` if the state is damaged; then nothing has
        changed here.
        """
        check_flat(state)
        differing = compare(unpack_fingerprint(state["fingerprint"]), self._own_fingerprint()[0], allow)
        lanes = read_lanes(state, self._own_lanes)
        self._supply.drop()
        states = {lane: state[lane_name(lane)] for lane in lanes}
        self._stand(Position.at(state["epoch"], state["slot"], lanes, states, self._ranks, self._job.lanes))
        if differing:  # with larger batches, say, what is left may be none
            self._at.more = dict.fromkeys(lanes)

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

    # Looking at it.

    def stats(self) -> dict[str, int | float]:
        """What happened on this rank since the loader was made, by flat names; rates since the last call.

        `wait_s` is the trainer's time in `next`, `seconds/STAGE` the workers' (measured on some batches),
        `STAGE/skipped/REASON` what was left out.
        """
        return {**self._stats.numbers(), **self._supply.numbers()}

    def trace(self) -> Trace:
        """The slot and lane of the last batch of this rank, and (shard, key, ref) of every sample in it, in order.

        The batch is made again here to see. Raises ValueError if no batch has been given since the loader was made or
        loaded.
        """
        if not self._at.history:
            raise ValueError("trace() tells of the last batch, and none has been given yet")
        step, _, state = self._at.history[-1]
        with as_in_a_worker(set(KINDS)):
            return trace(self._host, state, self._ranks.slot(step))

    def __repr__(self) -> str:
        ranks, job, at = self._ranks, self._job, self._at
        settings = f"seed={job.seed}, lanes={job.lanes}, num_workers={self._num_workers}"
        place = f"rank {ranks.rank} of {ranks.world_size}, at slot {at.slot} of epoch {at.epoch}"
        return f"SavableLoader({settings}): {place}\n{data_path(self._pipeline)}"

    def _own_fingerprint(self) -> tuple[Fingerprint, bytes]:
        if self._fingerprint is None:
            found = fingerprint(self._pipeline, seed=self._job.seed, lanes=self._job.lanes)
            self._fingerprint = found, pack_fingerprint(found)
        return self._fingerprint
