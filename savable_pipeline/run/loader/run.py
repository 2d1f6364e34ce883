"""`Run`: one rank's part of a run, with its position, its steps and its state.

A step reads the position, gets a batch, and only then moves:

    the `Repeater`'s batch ──▶ or the batch of the next slot, from the prefetcher and its backend
      ──▶ the position after it: the epoch's end, if the ranks must vote
      ──▶ each observer. If one raises, the next step repeats the batch
      ──▶ position = after; the batch is yielded

`SavableLoader` shows users a run. `testing`, `verify` and `StatefulDataset` use one directly.
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
from savable_pipeline.run.loader.decided import agreed, check_decided, reconfigure
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
    """Iterator over this rank's batches. Only `position` changes, once a step.

    Attributes that need the number of lanes (`_NEED_LANES`) are created at first need if the data or a state sets it.

    `agree`, which may be replaced, takes this rank's vote and returns the smallest or largest of all ranks. None asks
    the other ranks. `pinned` has the shards that it must read, by default those that it finds. `backend` builds the
    batches, by default that of the settings. `observers` see each step. Raises ValueError for ranks that do not divide
    the lanes, or a pipeline that cannot be sent to workers.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        agree: Callable[[int], int] | None = None,
        pinned: PinnedShards | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.wanted = settings  # its number of lanes may not be known yet
        self.ranks = settings.find_ranks()
        self.local = local = LocalLanes(settings.job, self.ranks.rank, pinned)
        self.backend = backend or settings.new_backend(local.runner, lambda: local.last_stage, local.pinned)
        self.prefetcher = Prefetcher(self.backend)
        self.agree = agree
        self._process = IterationGuard(ranked=isinstance(settings.ranks, tuple | list | Ranks))
        self._last_repeat: BatchStep | None = None
        self.is_ahead: Callable[[], bool] = lambda: False  # whether `OnDevice` has batches that it has not yielded yet
        self._was_loaded = False
        self._lanes_lock = threading.RLock()
        self.backend.open()
        if not settings.by_data:
            self.fix_lanes(settings.lanes)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            with self._lanes_lock:  # `state_dict` may be called in another thread
                if name in _NEED_LANES and name not in vars(self):
                    self.fix_lanes()
            return object.__getattribute__(self, name)

    def fix_lanes(self, lanes: int | None = None) -> None:
        """Create attributes that depend on the number of lanes.

        `lanes` is None for the number that the data set. Raises ValueError for a number that does not fit.
        """
        self.settings = settings = with_lanes(self.wanted, self.ranks, self.local, lanes)
        self.states = States(settings, self.ranks, self.local)
        self.observers = new_observers(settings, self.ranks, self.local, self.states, self.prefetcher)
        self._repeater = next((each for each in self.observers if isinstance(each, Repeater)), None)
        self._ends = EpochEnds(settings, self.local, self.prefetcher, self.observers)
        self.epoch_of = self._ends.epoch_of
        self.begin_epoch(0)

    def observer(self, kind: type[T]) -> T | None:
        """Return the observer of a kind, or None."""
        found = [each for each in self.observers if isinstance(each, kind)]
        return found[0] if found else None

    def begin_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch."""
        self.position = Position.start(
            epoch, self.ranks, self.settings.lanes, pad=self.settings.pad, facts=self.local.facts
        )

    def end_epoch(self) -> None:
        """Set the position to that of a loader whose iterator has raised StopIteration."""
        at = self.position
        self.position = replace(at, previous=at.previous or at, iterator="ended")

    @property
    def epoch(self) -> int:
        """Return the epoch of the last batch, or of the iterator started since."""
        return self.epoch_of(self.position)

    def length(self) -> int | None:
        """Return how many batches this rank gets in the epoch, or None if unknown."""
        return self._ends.length(self.epoch, self.ranks.world_size)

    def yielded_of_epoch(self) -> int | None:
        """Return how many of an epoch's `length` batches were yielded. See `EpochEnds`."""
        return self._ends.yielded(self.position, self.epoch)

    def __iter__(self) -> Run:
        reject_while_importing()
        at = self.position
        was_used = at.history.batches or at.previous is not None or at.slot
        if self.settings.restarts and at.iterator != "loaded" and was_used:
            self.prefetcher.restart()
            self.begin_epoch(0)
        else:
            self.position = _with_new_iterator(at)
        return self

    def __next__(self) -> Any:
        try:
            self._process.claim()
            started = time.perf_counter()
            found = self._next_repeat(started)
            if found is None:
                if self.position.previous is not None:
                    self._stop()
                found = self._next_slot(started)
            after, batch = found.after, found.batch
        except BaseException:
            self._process.release()
            raise
        # Make no calls below. Python runs signal handlers at calls, and Ctrl-C after the assignment would lose the
        # batch.
        del self._process.thread["id"]
        self.position = after
        return batch

    def _stop(self) -> NoReturn:
        if self._ends.is_finite and self.position.iterator != "ended":
            self.prefetcher.check_shards()
        self.end_epoch()
        raise StopIteration

    def _next_slot(self, started: float) -> BatchStep:
        """Return the step with the batch of the next slot."""
        delivery, after = self._step("batch", 1)
        at = self.position
        try:
            if after.previous is None or after.slot:  # an endless run continues where its epoch ended
                self.prefetcher.prefetch(after)
            step = BatchStep(at, after, delivery, delivery.batch, started, at.epoch << EPOCH_SHIFT | at.own_slot)
            self._observe(step)
        except BaseException:
            self.prefetcher.put_back(at, delivery)
            raise
        return step

    def _next_repeat(self, started: float) -> BatchStep | None:
        """Return a step that repeats a batch and takes no slot, or None if there is none."""
        if self._repeater is None:
            return None
        at, vote = self.position, self._vote if self.agree is not None or self.ranks.has_group else None
        if (requests := self._repeater.repeats(at, vote)) is None:
            return None
        self._check_once()
        self.local.verify_excluded()
        delivery = self.prefetcher.again(at, requests)
        after = replace(at, history=replace(at.history, total=at.history.total + 1))
        step = BatchStep(at, after, delivery, delivery.batch, started, 0, 0)
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
        # the epoch whose last batch was yielded, but whose iterator has not ended yet
        finished = self.position.previous
        while slots and self.position.previous is finished:
            with self._process.moving():
                _, self.position = self._step("skip", slots)
            slots -= self.ranks.world_size

    def check_whole_steps(self, slots: int) -> None:
        """Raise ValueError unless this many slots are whole steps of all ranks."""
        if slots < 0 or slots % self.ranks.world_size:
            raise ValueError(f"skip takes a multiple of the {self.ranks.world_size} ranks, not {slots}")

    def _vote(self, vote: int) -> int:
        """Return the smallest vote of all ranks, or the largest if ranks are padded."""
        ask = self.agree or partial(self.ranks.agree, smallest=not self.settings.pad)
        return self.backend.agree(partial(ask, vote))

    def _step(self, want: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """Return this rank's batch of the next step, and the position after it.

        The next slots, `slots` in all, will be requested in the same way. The end of the epoch is determined before the
        batch is yielded, and stored at once. If the rest of the step fails and is repeated, the ranks do not vote
        again.
        """
        self._check_once()
        at = self.position
        if not self._ends.is_finite or at.slot + 2 * at.step <= at.end:  # most steps need no vote and no count
            return self._advance(want, slots)
        while not self.position.has_step:
            self.position = self._ends.towards_step(self.position, self._vote)
        delivery, after = self._advance(want, slots)
        if after.must_vote:
            try:
                end = self._vote(proposed_end(after, self.prefetcher))
            except BaseException:
                if want == "batch":
                    self.prefetcher.put_back(self.position, delivery)
                raise
            self.position = self._ends.agreed(self.position, end)
            after = self._ends.after(self.position, want, delivery)
        return delivery, self._ends.next_epoch(after) if after.is_over else after

    def _check_once(self) -> None:
        """Raise ValueError or `SavableError` if this rank must not iterate."""
        if self._process.checked:
            return
        reject_while_importing()
        self._process.check()
        self.ranks.check_world()
        if self.agree is None and (self.ranks.has_group or self.ranks.sharing):
            check_same_data(self.ranks, self.states.fingerprint, by_default=self.settings.by_default)
        if not (self._was_loaded or self.settings.restarts or self.position.epoch or self.position.slot):
            warn_unloaded()
        self._process.checked = True

    def _advance(self, want: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """Return this rank's batch of the next step of the epoch, and the position after it."""
        self.local.verify_excluded()
        position = self.position
        delivery = self.prefetcher.next(position, want, position.slot + slots - 1)
        if delivery.dry:
            self.close()
            lane = position.own_slot % self.settings.lanes
            raise SavableError(f"lane {lane} lost a batch that it had. Use deterministic stages.")
        return delivery, self._ends.after(position, want, delivery)

    def close(self) -> None:
        """See `SavableLoader.close`."""
        if "position" in vars(self):
            for observer in self.observers:
                observer.close()
            self.states.close()
        fault = self.prefetcher.close()
        self.local.close()
        if fault and isinstance(sys.exception(), StopIteration | None):
            raise ShardError(fault, reason="changed shard")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self, lag: int = 0, *, at: Position | None = None) -> dict[str, Any]:
        """Return the state here or `at` an earlier position, or `lag` batches before that."""
        before = (at or self.position).before(lag)
        self.backend.verify_delivered()
        state = self.states.flat(before)
        for observer in self.observers:
            observer.on_save(before, state, lag)
        return state

    def global_state(
        self, group: dist.ProcessGroup | None = None, *, position: Position | None = None, lag: int = 0
    ) -> dict[str, Any]:
        """Return the state of all ranks, now or at an earlier position of this run.

        Collective.
        """
        ranks = self.ranks if group is None else Ranks(self.ranks.rank, self.ranks.world_size, group)
        own = self.state_dict(lag, at=position)
        return self.joined(own, ranks.gather(own))

    def joined(self, own: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the `states` of all ranks, of which this rank has just saved `own`."""
        merged = merge_states(states)
        if self._repeater is not None:
            self._repeater.on_merge(own, merged)
        return merged

    def return_to(self, position: Position) -> None:
        """Return to an earlier position of this run, to repeat the following batches."""
        with self._process.moving():
            self._move(position)

    def _move(self, position: Position) -> None:
        """Set a position for which the prefetched batches are not valid."""
        self.local.use_facts(position.facts)
        self.prefetcher.restart()
        self._ends.forget()
        self.position = position
        self._adopt(position, None)

    def _adopt(self, position: Position, state: Mapping[str, Any] | None) -> None:
        """Let all observers check a state or position, and only then let them adopt it."""
        adopting = [observer.on_load(position, state) for observer in self.observers]
        for adopt in filter(None, adopting):
            adopt()

    def check_not_ahead(self) -> None:
        """Raise `SavableError` if this run is ahead of its trainer."""
        if self.is_ahead():
            raise SavableError(
                "OnDevice has fetched a batch ahead of the trainer. Save, load and skip through the OnDevice "
                "instead of the loader."
            )

    def undo_fetch(self, before: Position) -> None:
        """Return to `before` if the trainer did not get a batch yielded since then."""
        now, then = history_of(self.position).batches[-1:], history_of(before).batches[-1:]
        if now and not (then and now[0] is then[0]):
            self.return_to(before)

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """See `SavableLoader.load_state_dict`."""
        check_flat(state)
        with self._process.moving(), _loading(self, state):
            loaded = self.states.loaded(state, allow)
            self._adopt(loaded, state)
            self.prefetcher.restart_workers()
            self._ends.forget()
            self.position, self._was_loaded, self._last_repeat = loaded, True, None

    def reconfigure(self, **wanted: Any) -> int:
        """See `SavableLoader.reconfigure`. The run continues as if stopped and resumed.

            yielded  0  1  2  3 │ built ahead: 4 5 6    reconfigure: 4, 5, 6 are dropped, the lanes are before 4 again,
                                │                       with the decision in their states; 4 is built again

        Rows in flight with only excluded samples are dropped.
        """
        if self.settings.restarts:
            raise ValueError("reconfigure does not apply to on_iter='restart'. Create a loader with other settings.")
        with self._process.moving():
            at, last = self.position, self.local.last_stage
            arguments = at.facts.decisions, at.next_batch, last
            decisions = agreed(self.ranks, lambda: check_decided(self.local, reconfigure(*arguments, **wanted)))
            self._move(at.decided(decisions))
        return at.next_batch

    def trace(self, lag: int = 0) -> Trace:
        """See `SavableLoader.trace`."""
        repeat = self._last_repeat
        if repeat is not None and not lag and repeat.after.history.total == self.position.history.total:
            slot, samples = repeat.epoch_and_slot[1], repeat.samples
            return Trace(slot, slot % self.settings.lanes, traced_rows(self.local.last_stage, samples))
        batch = history_of(self.position).lagged(lag)
        rows = traced_rows(self.local.last_stage, batch.samples)
        return Trace(self.ranks.slot(batch.step), batch.lane, rows)

    def last_step(self) -> tuple[int, int]:
        """Return slot and lane of the last batch. Raises ValueError if there is none."""
        batch = history_of(self.position).lagged()
        return self.ranks.slot(batch.step), batch.lane


def history_of(position: Position) -> History:
    """Return the history of the epoch to which the last batch belongs."""
    return (position.previous or position).history


def _with_new_iterator(position: Position) -> Position:
    """Return the same position after a new iterator has started there."""
    return replace(position, previous=None, iterator="started")


@contextmanager
def _loading(run: Run, state: Mapping[str, Any]) -> Iterator[None]:
    """Set the number of lanes from a state unless the user has set it. Undo all changes if loading fails."""
    before, local = dict(vars(run)), run.local
    lanes, facts, pinned = local.lanes, local.facts, dict(local.pinned)
    try:
        if run.wanted.by_default and ("position" not in before or state["lanes"] != lanes):
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
    """Return the batch of each rank in the next step, with the votes of all.

    A rank that votes interrupts its step. The step is repeated with the result of the vote.
    """
    agreed: list[int] = []

    def agree(vote: int) -> int:
        if not known:
            votes.append(vote)
            raise _VoteNeeded
        return known.pop()

    while True:
        votes: list[int] = []
        taken: list[Any] = []
        for run in runs:
            known, before, run.agree = list(agreed), run.agree, agree
            try:
                taken.append(run.__next__())
            except _VoteNeeded:
                pass
            finally:
                run.agree = before
        assert not taken or not votes, "some ranks vote, others do not"
        if taken:
            return taken
        agreed = [max(votes) if runs[0].settings.pad else min(votes)]
