"""`Run`: one rank's part of a run, with its position, its steps and its state.

A slot is a place in the global sequence of batches. A step takes one slot on each rank, and sets the position last:

    get the batch to repeat, if there is one, or else the batch of the next slot, from the prefetcher
    ──▶ find the position after it; if the epoch may end there, all ranks vote
    ──▶ call each observer; if one raises, the next step gets the same batch
    ──▶ set the position, and yield the batch

`SavableLoader` is the public interface of a run. `testing`, `verify` and `StatefulDataset` use a run directly.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.named_object import reject_while_importing
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.decided import agreed_decisions, check_decided, reconfigure
from savable_pipeline.run.loader.epoch_end import EpochEnds, proposed_end, remaining_slots
from savable_pipeline.run.loader.local_lanes import LocalLanes, with_lanes
from savable_pipeline.run.loader.misuse import IterationGuard, warn_unloaded
from savable_pipeline.run.loader.observers import Trace, new_observers, traced_rows
from savable_pipeline.run.loader.position import BatchStep, History, Observer, Position, Repeater
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks, check_same_data
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.states import States
from savable_pipeline.run.state.flights import EPOCH_SHIFT
from savable_pipeline.run.state.state_dict import check_flat, merge_states

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T", bound=Observer)
_NEED_LANES = {"settings", "states", "observers", "position", "epoch_of", "_ends", "_repeater"}
_MOST_LANES = 1 << 16  # limit for a state that sets the number of lanes, because it may be damaged


class Run:
    """Iterator over this rank's batches. A step changes only `position`.

    If the data or a state sets the number of lanes, the attributes in `_NEED_LANES` are created when first needed.

    `vote_function` takes this rank's vote and returns the smallest or largest vote of all ranks. It may be replaced.
    With None, the ranks communicate. `pinned` has the shards that the run must read, by default those that it finds.
    `backend` builds the batches, by default that of the settings. Raises ValueError for ranks that do not divide the
    lanes, or a pipeline that cannot be sent to workers.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        vote_function: Callable[[int], int] | None = None,
        pinned: PinnedShards | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.initial_settings = settings  # its number of lanes may not be known yet
        self.ranks = settings.find_ranks()
        self.local = local = LocalLanes(settings.job, self.ranks.rank, pinned)
        self.backend = backend or settings.new_backend(local.runner, lambda: local.last_stage, local.pinned)
        self.prefetcher = Prefetcher(self.backend)
        self.vote_function = vote_function
        self._guard = IterationGuard(ranked=isinstance(settings.ranks, tuple | list | Ranks))
        self._last_repeat: BatchStep | None = None  # the last step that repeated a batch
        self.is_ahead: Callable[[], bool] = lambda: False  # whether `OnDevice` has batches that it has not yielded yet
        self._was_loaded = False
        self._lanes_lock = threading.RLock()
        self.backend.open()
        if not settings.lanes_by_data:
            self.fix_lanes(settings.lanes)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            with self._lanes_lock:  # `state_dict` may be called in another thread
                if name in _NEED_LANES and name not in vars(self):
                    self.fix_lanes()
            return object.__getattribute__(self, name)

    def fix_lanes(self, lanes: int | None = None) -> None:
        """Set the number of lanes, and create the attributes that depend on it.

        With None, the data determine the number. Raises ValueError if the number does not fit the ranks or settings.
        """
        self.settings = settings = with_lanes(self.initial_settings, self.ranks, self.local, lanes)
        self.states = States(settings, self.ranks, self.local)
        self.observers = new_observers(settings, self.ranks, self.local, self.states, self.prefetcher)
        self._repeater = self.observer(Repeater)
        self._ends = EpochEnds(settings, self.local, self.prefetcher, self.observers)
        self.epoch_of = self._ends.epoch_of
        self.begin_epoch(0)

    def observer(self, kind: type[T]) -> T | None:
        """Return the observer of this class, or None."""
        return next((each for each in self.observers if isinstance(each, kind)), None)

    def begin_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch."""
        lanes, pad = self.settings.lanes, self.settings.pad
        self.position = Position.start(epoch, self.ranks, lanes, pad=pad, facts=self.local.facts)

    def end_epoch(self) -> None:
        """Set the position as after a StopIteration of the loader's iterator."""
        position = self.position
        self.position = replace(position, previous=position.previous or position, iterator="ended")

    @property
    def epoch(self) -> int:
        """Return the epoch of the last batch, or of an iterator that was started after it."""
        return self.epoch_of(self.position)

    def length(self) -> int | None:
        """Return how many batches this rank gets in the epoch, or None if unknown."""
        return self._ends.length(self.epoch, self.ranks.world_size)

    def yielded_of_epoch(self) -> int | None:
        """Return how many of an epoch's `length` batches were yielded. See `EpochEnds`."""
        return self._ends.yielded(self.position, self.epoch)

    def __iter__(self) -> Run:
        reject_while_importing()
        position = self.position
        was_used = position.history.batches or position.previous is not None or position.slot
        if self.settings.restarts_on_iter and position.iterator != "loaded" and was_used:
            self.prefetcher.restart()
            self.begin_epoch(0)
        else:
            self.position = _with_new_iterator(position)
        return self

    def __next__(self) -> Any:
        try:
            self._guard.claim()
            started = time.perf_counter()
            step = self._next_repeat(started)
            if step is None:
                if self.position.previous is not None:
                    self._stop()
                step = self._next_slot(started)
            after, batch = step.after, step.batch
        except BaseException:
            self._guard.release()
            raise
        # Make no calls below. Python runs signal handlers at calls, and Ctrl-C after the assignment would lose the
        # batch.
        del self._guard.thread["id"]
        self.position = after
        return batch

    def _stop(self) -> NoReturn:
        """End the epoch, and raise StopIteration."""
        if self._ends.is_finite and self.position.iterator != "ended":
            self.prefetcher.check_shards()
        self.end_epoch()
        raise StopIteration

    def _next_slot(self, started: float) -> BatchStep:
        """Return the step with the batch of the next slot."""
        delivery, after = self._step("batch", 1)
        position = self.position
        try:
            if after.previous is None or after.slot:  # an endless run continues where its epoch ended
                self.prefetcher.prefetch(after)
            number = position.epoch << EPOCH_SHIFT | position.own_slot
            step = BatchStep(position, after, delivery, delivery.batch, started, number)
            self._observe(step)
        except BaseException:
            self.prefetcher.put_back(position, delivery)
            raise
        return step

    def _next_repeat(self, started: float) -> BatchStep | None:
        """Return a step that repeats a batch and takes no slot, or None if no batch must be repeated."""
        if self._repeater is None:
            return None
        position = self.position
        vote = self._vote if self.vote_function is not None or self.ranks.has_group else None
        if (requests := self._repeater.repeats(position, vote)) is None:
            return None
        self._check_may_iterate()
        self.local.verify_excluded()
        delivery = self.prefetcher.again(position, requests)
        after = replace(position, history=replace(position.history, batch_count=position.history.batch_count + 1))
        step = BatchStep(position, after, delivery, delivery.batch, started, 0, 0)
        self._observe(step)
        self._last_repeat = step
        return step

    def _observe(self, step: BatchStep) -> None:
        for observer in self.observers:
            observer.on_batch(step)

    def skip(self, slots: int) -> None:
        """See `SavableLoader.skip`."""
        self.check_whole_steps(slots)
        if self.position.iterator == "ended":
            self.position = _with_new_iterator(self.position)
        if slots:
            for observer in self.observers:
                observer.on_skip(self.position)
        if self.settings.epoch_slots is not None:
            slots = min(slots, remaining_slots(self.position, self.settings.epoch_slots))
        finished = self.position.previous  # an epoch whose last batch was yielded, but whose iterator has not ended
        while slots and self.position.previous is finished:
            with self._guard.moving():
                _, self.position = self._step("skip", slots)
            slots -= self.ranks.world_size

    def check_whole_steps(self, slots: int) -> None:
        """Raise ValueError unless this many slots are whole steps of all ranks."""
        if slots < 0 or slots % self.ranks.world_size:
            raise ValueError(f"skip takes a multiple of the {self.ranks.world_size} ranks, not {slots}")

    def _vote(self, vote: int) -> int:
        """Return the smallest vote of all ranks, or the largest with tail="pad"."""
        ask = self.vote_function or partial(self.ranks.agree, smallest=not self.settings.pad)
        return self.backend.agree(partial(ask, vote))

    def _step(self, kind: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """Return this rank's batch of the next step, and the position after it.

        `slots` is the number of slots from here on that the caller takes with the same `kind`. The result of a vote
        about the epoch's end is stored in the position at once. So if the rest of the step fails and is repeated, the
        ranks do not vote again.
        """
        self._check_may_iterate()
        position = self.position
        # most steps are far from the end, and need no vote and no count
        if not self._ends.is_finite or position.slot + 2 * position.step <= position.end:
            return self._advance(kind, slots)
        while not self.position.has_step:
            self.position = self._ends.towards_step(self.position, self._vote)
        delivery, after = self._advance(kind, slots)
        if after.must_vote:
            try:
                end = self._vote(proposed_end(after, self.prefetcher))
            except BaseException:
                if kind == "batch":
                    self.prefetcher.put_back(self.position, delivery)
                raise
            self.position = self._ends.agreed(self.position, end)
            after = self._ends.after(self.position, kind, delivery)
        return delivery, self._ends.next_epoch(after) if after.is_over else after

    def _check_may_iterate(self) -> None:
        """Raise ValueError or `SavableError` if this rank must not iterate."""
        if self._guard.checked:
            return
        reject_while_importing()
        self._guard.check()
        self.ranks.check_world()
        # a run with a `vote_function` does not communicate
        if self.vote_function is None and (self.ranks.has_group or self.ranks.sharing):
            check_same_data(self.ranks, self.states.fingerprint, has_default_lanes=self.settings.has_default_lanes)
        if not (self._was_loaded or self.settings.restarts_on_iter or self.position.epoch or self.position.slot):
            warn_unloaded()
        self._guard.checked = True

    def _advance(self, kind: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """Return this rank's batch of the next step of the epoch, and the position after it."""
        self.local.verify_excluded()
        position = self.position
        delivery = self.prefetcher.next(position, kind, position.slot + slots - 1)
        if delivery.exhausted:
            self.close()
            lane = position.own_slot % self.settings.lanes
            raise SavableError(f"lane {lane} lost a batch that it had. Use deterministic stages.")
        return delivery, self._ends.after(position, kind, delivery)

    def close(self) -> None:
        """See `SavableLoader.close`."""
        if "position" in vars(self):
            for observer in self.observers:
                observer.close()
            self.states.close()
        changed_shard = self.prefetcher.close()
        self.local.close()
        if changed_shard and isinstance(sys.exception(), StopIteration | None):
            raise ShardError(changed_shard, reason="changed shard")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self, lag: int = 0, *, position: Position | None = None) -> dict[str, Any]:
        """Return the state `lag` batches before a position.

        The position, by default the current one, is an earlier one of this run.
        """
        before = (position or self.position).before(lag)
        self.backend.verify_delivered()
        state = self.states.flat(before)
        for observer in self.observers:
            observer.on_save(before, state, lag)
        return state

    def global_state(
        self, group: dist.ProcessGroup | None = None, *, position: Position | None = None, lag: int = 0
    ) -> dict[str, Any]:
        """Return the state of all ranks, see `state_dict`. Collective."""
        ranks = self.ranks if group is None else Ranks(self.ranks.rank, self.ranks.world_size, group)
        own = self.state_dict(lag, position=position)
        return self.joined(own, ranks.gather(own))

    def joined(self, own: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the merged `states` of all ranks.

        `own` is that of this rank, which it has just saved.
        """
        merged = merge_states(states)
        if self._repeater is not None:
            self._repeater.on_merge(own, merged)
        return merged

    def return_to(self, position: Position) -> None:
        """Return to an earlier position of this run, to repeat the following batches."""
        with self._guard.moving():
            self._move(position)

    def _move(self, position: Position) -> None:
        """Set another position, and drop the prefetched batches, which are of the current one."""
        self.local.use_facts(position.facts)
        self.prefetcher.restart()
        self._ends.forget()
        self.position = position
        self._adopt(position, None)

    def _adopt(self, position: Position, state: Mapping[str, Any] | None) -> None:
        """Let all observers check a state or position. If none raises, let all adopt it."""
        adopting = [observer.on_load(position, state) for observer in self.observers]
        for adopt in filter(None, adopting):
            adopt()

    def check_not_ahead(self) -> None:
        """Raise `SavableError` if `OnDevice` has batches that the trainer did not get yet."""
        if self.is_ahead():
            raise SavableError(
                "OnDevice has fetched a batch ahead of the trainer. Save, load and skip through the OnDevice "
                "instead of the loader."
            )

    def undo_fetch(self, before: Position) -> None:
        """Return to the position `before` if a batch was yielded since.

        The trainer did not get this batch.
        """
        last_batch, batch_before = history_of(self.position).batches[-1:], history_of(before).batches[-1:]
        if last_batch and not (batch_before and last_batch[0] is batch_before[0]):
            self.return_to(before)

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """See `SavableLoader.load_state_dict`."""
        check_flat(state)
        with self._guard.moving(), _loading(self, state):
            loaded = self.states.loaded(state, allow)
            self._adopt(loaded, state)
            self.prefetcher.restart_workers()
            self._ends.forget()
            self.position, self._was_loaded, self._last_repeat = loaded, True, None

    def reconfigure(self, **changes: Any) -> int:
        """See `SavableLoader.reconfigure`. The run continues as if stopped and resumed.

            slots    0  1  2  3 │ 4  5  6        `reconfigure` drops batches 4 to 6, and returns each lane to its state
                     yielded    │ prefetched     before them, with the decision in it; then 4 is built again

        Rows in flight with only excluded samples are dropped.
        """
        if self.settings.restarts_on_iter:
            raise ValueError("reconfigure does not apply to on_iter='restart'. Create a loader with other settings.")
        with self._guard.moving():
            position, last = self.position, self.local.last_stage
            before = position.facts.decisions, position.next_batch_number, last
            decisions = agreed_decisions(self.ranks, lambda: check_decided(self.local, reconfigure(*before, **changes)))
            self._move(position.decided(decisions))
        return position.next_batch_number

    def trace(self, lag: int = 0) -> Trace:
        """See `SavableLoader.trace`."""
        repeat = self._last_repeat
        if repeat is not None and not lag and repeat.after.history.batch_count == self.position.history.batch_count:
            _, slot = repeat.epoch_and_slot
            return Trace(slot, slot % self.settings.lanes, traced_rows(self.local.last_stage, repeat.samples))
        batch = history_of(self.position).lagged(lag)
        rows = traced_rows(self.local.last_stage, batch.samples)
        return Trace(self.ranks.slot(batch.step_start), batch.lane, rows)

    def last_step(self) -> tuple[int, int]:
        """Return slot and lane of the last batch. Raises ValueError if there is none."""
        batch = history_of(self.position).lagged()
        return self.ranks.slot(batch.step_start), batch.lane


def history_of(position: Position) -> History:
    """Return the history of the epoch to which the last batch belongs."""
    return (position.previous or position).history


def _with_new_iterator(position: Position) -> Position:
    """Return this position as after a call of `iter`."""
    return replace(position, previous=None, iterator="started")


@contextmanager
def _loading(run: Run, state: Mapping[str, Any]) -> Iterator[None]:
    """Set the number of lanes from a state unless the user has set it. Undo all changes if loading fails."""
    before, local = dict(vars(run)), run.local
    lanes, facts, pinned = local.lanes, local.facts, dict(local.pinned)
    try:
        if run.initial_settings.has_default_lanes and ("position" not in before or state["lanes"] != lanes):
            for observer in before.get("observers", ()):
                observer.close()
            run.fix_lanes(min(state["lanes"], _MOST_LANES))
        yield
    except BaseException:
        run.__dict__ = before
        if local.pinned != pinned:
            (run.states if "states" in before else local).pin(pinned)
        local.set_lanes(lanes)
        local.use_facts(facts)
        raise


class _VoteNeeded(Exception):
    """Raised in a step that needs the votes of the other ranks."""


def voted_step(runs: Sequence[Run]) -> list[Any]:
    """Take the next step of all ranks in this process, and return the batch of each.

    A rank that must vote interrupts its step. When all have voted, the step is repeated with the result.
    """
    results: list[int] = []  # the result of the vote, once all ranks have voted

    def cast_vote(vote: int) -> int:
        if not unused_results:
            votes.append(vote)
            raise _VoteNeeded
        return unused_results.pop()

    while True:
        votes: list[int] = []
        batches: list[Any] = []
        for run in runs:
            unused_results, function_before = list(results), run.vote_function
            run.vote_function = cast_vote
            try:
                batches.append(run.__next__())
            except _VoteNeeded:
                pass
            finally:
                run.vote_function = function_before
        assert not batches or not votes, "some ranks vote, others do not"
        if batches:
            return batches
        results = [max(votes) if runs[0].settings.pad else min(votes)]
