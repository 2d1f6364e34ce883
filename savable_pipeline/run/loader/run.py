"""`Run`: one rank's part of a run: its position, its steps, and its state.

`SavableLoader` shows users a run; `testing`, `verify` and `StatefulDataset` use one directly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.named_object import refuse_while_importing
from savable_pipeline.core.weights import Weight
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.run.engine.backend import Backend
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.decided import Excluded, agreed, check_decided, reconfigure
from savable_pipeline.run.loader.epoch_end import EpochEnds, proposed_end
from savable_pipeline.run.loader.ledger_keeper import LedgerKeeper
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.own_process import OwnProcess, warn_unloaded
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks, check_same_data
from savable_pipeline.run.loader.rows_in_flight import Flights, RowsInFlight, open_rows_lost, rows_lost
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.source_losses import SourceLosses
from savable_pipeline.run.loader.states import States
from savable_pipeline.run.loader.stats import Stats
from savable_pipeline.run.loader.trace import SampleIds, Trace, source_names, traced_rows
from savable_pipeline.run.peers.peer_backend import PeerBackend
from savable_pipeline.run.state.flights import read_acks, read_flights, without_flights
from savable_pipeline.run.state.state_dict import check_flat, lane_numbers, merge_states
from savable_pipeline.stages.batch_samples import BatchSamples

if TYPE_CHECKING:
    import torch.distributed as dist
from collections.abc import Sequence

from savable_pipeline.core.containers import with_parts_changed


class Run:
    """An iterator over this rank's batches. Only `position` changes, by one assignment a step.

    `agree`, which may be exchanged, takes this rank's vote and returns the smallest or largest of all ranks'; None asks
    the others. `rows` are those that the trainer acknowledges, None without `acknowledge=True`. `pinned` are the shards
    that it must read; by default those that it finds. `backend` builds the batches; by default that of the settings.
    Raises ValueError for ranks that do not divide the lanes, or a pipeline that cannot be sent to workers.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        agree: Callable[[int], int] | None = None,
        pinned: PinnedShards | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.settings = settings
        self.ranks = settings.find_ranks()
        self.local = local = LocalLanes(settings.job, self.ranks.rank, pinned)
        self.backend = backend or settings.new_backend(local.runner, lambda: local.last_stage, local.pinned)
        self.prefetcher = Prefetcher(self.backend)
        self.stats = Stats(settings.num_workers, lambda: source_names(local.last_stage))
        self.agree = agree
        self.states = States(settings, self.ranks, local)
        self._losses = SourceLosses(local)
        self._ends = EpochEnds(settings, local, self.prefetcher, self.stats, self._losses)
        self._process = OwnProcess(ranked=isinstance(settings.ranks, tuple | list | Ranks))
        ledger = settings.ledger if self.ranks.builds else None
        self._ledger = None if ledger is None else LedgerKeeper(ledger, settings.seed, self.counters)
        self.rows = RowsInFlight(settings, self.ranks, local) if settings.acknowledge else None
        if self.rows is not None:
            self.stats.others = self.rows.table.numbers
        self.held_ahead: Callable[[], bool] = lambda: False  # whether `OnDevice` has batches that it has not given yet
        self._was_loaded = False
        self.begin_epoch(0)
        self.backend.open()

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.position = Position.start(
            epoch, self.ranks, self.settings.lanes, pad=self.settings.pad, facts=self.local.facts
        )

    def end_epoch(self) -> None:
        """Go to the place where StopIteration has been raised: the next iterator continues there."""
        self.position = self.position.ended()

    @property
    def epoch(self) -> int:
        """The epoch of the batch given last, until StopIteration or the next iterator; then the one that follows."""
        return self._ends.epoch_of(self.position)

    def epoch_at(self, position: Position) -> int:
        """The same where this run was."""
        return self._ends.epoch_of(position)

    def length(self) -> int | None:
        """How many batches this rank gets in the epoch; None where that cannot be counted beforehand."""
        return self._ends.length(self.epoch, self.ranks.world_size)

    def given_of_epoch(self) -> int | None:
        """How many of an epoch's `length` batches lie before this place; see `EpochEnds.given`."""
        return self._ends.given(self.position, self.epoch)

    # Going on.

    def __iter__(self) -> Run:
        refuse_while_importing()
        at = self.position
        if self.settings.restarts and not at.loaded and (at.history or at.previous is not None or at.slot):
            self.prefetcher.restart()
            self.begin_epoch(0)
        else:
            self.position = at.begun()
        return self

    def __next__(self) -> Any:
        try:
            self._process.claim()
            started = time.perf_counter()
            if self.rows is not None and self._comes_again(self.rows):
                batch, after = self._take_again(self.rows, started)
            else:
                if self.position.previous is not None:
                    self._stop()
                delivery, after = self._step("batch", 1)
                batch = self._prepare(delivery, after, started)
        except BaseException:
            self._process.release()
            raise
        # from here to the trainer nothing is called: Python delivers signals at calls, so that none comes between
        del self._process.thread["id"]
        self.position = after
        return batch

    def _stop(self) -> NoReturn:
        if self._ends.is_finite and not self.position.stop_raised:
            self.prefetcher.look()
        self.end_epoch()
        raise StopIteration

    def _prepare(self, delivery: Delivery, after: Position, started: float) -> Any:
        """The batch as the trainer gets it, at the position `after`: record it, and request the next ones."""
        rows = self.rows
        if rows is not None:
            try:
                rows.wait(delivery.made_of.rows if delivery.made_of else 0)
            except BaseException:
                self.prefetcher.put_back(self.position, delivery)
                raise
        self._losses.check(delivery.counts, after)
        if self.settings.sample_ids or self._ledger is not None:
            delivery = replace(delivery, samples=BatchSamples.of(delivery.samples))  # once for all that asks
        batch = self._finished(delivery)
        if after.previous is None or after.slot:  # an endless run continues where its epoch is over
            self.prefetcher.prefetch(after)
        if self._ledger is not None:
            self._ledger.given(self.position, delivery, self.local.last_stage, self.states.packed)
        self.stats.add(time.perf_counter() - started, delivery)
        if rows is not None:
            batch = rows.give(self.position, delivery, batch)
            self._note_acknowledged()
        return batch

    def _finished(self, delivery: Delivery) -> Any:
        """The batch with the ids of its samples, and in page-locked memory, where the settings say so."""
        batch = delivery.batch
        if self.settings.sample_ids:
            batch = self._sample_ids.added(batch, BatchSamples.of(delivery.samples))
        return in_pinned_memory(batch) if self.settings.pin_memory else batch

    # Batches that come again, and take no slot.

    def _comes_again(self, rows: RowsInFlight) -> bool:
        """Whether the next batch is one that comes again: of them the ranks give equally many after a load."""
        rows.table.settle(self.position.batches)
        if self.position.stop_raised:
            return False
        if not rows.is_agreed:
            if self.agree is not None or self.ranks.can_talk:
                own = len(rows.table.waiting)
                rows.table.fill_up(abs(self._vote(own if self.settings.pad else -own)))
            rows.is_agreed = True
        return bool(rows.table.waiting)

    def _take_again(self, rows: RowsInFlight, started: float) -> tuple[Any, Position]:
        """The first of the batches that come again, as the trainer gets it, and the position after it."""
        self._check_once()
        self.local.verify_excluded()
        at, flight = self.position, rows.table.waiting[0]
        delivery = self.prefetcher.again(at, rows.remakes(at))
        rows.wait((flight.to_come & flight.open).bit_count())
        samples = BatchSamples.of(delivery.samples)
        batch, given = rows.give_again(at, delivery, self._finished(delivery))
        if self._ledger is not None and flight.rows:
            kept = delivery.made_of.kept if delivery.made_of else ()
            last = self.local.last_stage
            self._ledger.given_again(at, flight.batch, samples.in_rows(kept), given, last, self.states.packed)
        self._note_acknowledged()
        self.stats.add(time.perf_counter() - started, replace(delivery, samples=()))
        return batch, at.given_again()

    def _note_acknowledged(self) -> None:
        """Write to the ledger what was acknowledged, if it has a file open."""
        if self.rows is not None and self._ledger is not None:
            self._ledger.acknowledged(self.rows.table)

    @cached_property
    def _sample_ids(self) -> SampleIds:
        return SampleIds(self.local.last_stage, pad=self.settings.pad)

    def counters(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters without rates, and names: what the ledger notes from time to time."""
        return {**self.stats.totals(), **self.prefetcher.numbers()}, self.stats.names()

    def skip(self, slots: int) -> None:
        """See `SavableLoader.skip`."""
        self.check_whole_steps(slots)
        if self.position.stop_raised:
            self.position = self.position.begun()
        if slots and self._ledger is not None:
            self._ledger.skipping(self.position, self.local.last_stage, self.states.packed)
        if self.settings.epoch_slots is not None:
            slots = min(slots, self.position.left_of_epoch(self.settings.epoch_slots))
        over = self.position.previous  # the epoch whose last batch was given, but whose iterator has not ended yet
        while slots and self.position.previous is over:
            with self._process.moving():
                _, self.position = self._step("skip", slots)
            slots -= self.ranks.world_size

    def check_whole_steps(self, slots: int) -> None:
        """Raise ValueError unless this many slots are whole steps of all ranks."""
        if slots < 0 or slots % self.ranks.world_size:
            raise ValueError(f"skip takes a multiple of the {self.ranks.world_size} ranks, not {slots}")

    def _vote(self, vote: int) -> int:
        """The smallest or largest of all ranks' votes."""
        ask = self.agree or partial(self.ranks.agree, smallest=not self.settings.pad)
        return self.backend.agree(partial(ask, vote)) if isinstance(self.backend, PeerBackend) else ask(vote)

    def _step(self, want: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """This rank's batch of the next step, and the position after it; the next `slots` will be requested likewise.

        Whether the epoch continues after the step is determined before its batch is given, and stored at once: if the
        rest of the step fails and it is taken again, the ranks do not vote again.
        """
        self._check_once()
        at = self.position
        if not self._ends.is_finite or at.slot + 2 * at.step <= at.end:  # most steps: nothing is to be determined
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
            self.position = self.position.agreed(end)
            after = self._ends.after(self.position, want, delivery)
        return delivery, self._ends.next_epoch(after) if after.is_over else after

    def _check_once(self) -> None:
        """Raise ValueError or `SavableError` where this rank must not iterate, or not with the data that it has."""
        if self._process.checked:
            return
        refuse_while_importing()
        self._process.check()
        self.ranks.check_world()
        if self.agree is None and (self.ranks.can_talk or self.ranks.sharing):
            check_same_data(self.ranks, self.states.fingerprint)
        if not (self._was_loaded or self.settings.restarts or self.position.epoch or self.position.slot):
            warn_unloaded()
        self._process.checked = True

    def _advance(self, want: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """This rank's batch of the next step, which is in the epoch, and the position after it."""
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
        self._note_acknowledged()
        if self._ledger is not None:
            self._ledger.close()
        fault = self.prefetcher.close()
        self.local.close()
        self.states.close()
        if fault and isinstance(sys.exception(), StopIteration | None):
            raise ShardError(fault, reason="changed shard")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving, restoring and looking back.

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """See `SavableLoader.state_dict`."""
        return self.state_at(self.position, lag)

    def state_at(self, position: Position, lag: int = 0) -> dict[str, Any]:
        """The state dict at a position where this run was, or `lag` batches before, with what is in flight."""
        if lag and self.rows is not None:
            raise ValueError("lag must be 0 with acknowledge=True, whose state has each unacknowledged row")
        before = position.before(lag)
        self.backend.verify_delivered()
        if self._ledger is not None:
            self._ledger.saved(before)
        state = self.states.flat(before)
        if self.rows is None:
            return state
        self._note_acknowledged()
        return state | self.rows.entries(before, state)

    def global_state(
        self, group: dist.ProcessGroup | None = None, *, position: Position | None = None, lag: int = 0
    ) -> dict[str, Any]:
        """The state with the lanes of all ranks, on each of them, here or at `position` as `state_at`. Collective."""
        ranks = self.ranks if group is None else Ranks(self.ranks.rank, self.ranks.world_size, group)
        own = self.state_at(self.position if position is None else position, lag)
        return self.joined(own, ranks.gather(own))

    def joined(self, own: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of all ranks, of which this one has just saved `own`; it learns what the others acknowledged."""
        merged = merge_states(states)
        if self.rows is not None and self.ranks.world_size > 1:
            self.rows.table.agree(read_flights(own), read_flights(merged), read_acks(own))
        return merged

    def return_to(self, position: Position) -> None:
        """Stand at a position where this run was: what was given or passed over since then comes again."""
        with self._process.moving():
            self.prefetcher.restart()
            if self._ledger is not None:
                self._ledger.begin_anew()
            self.local.learn(position.facts)
            self.position = position

    def check_nothing_held(self) -> None:
        """Raise `SavableError` if this run is ahead of its trainer."""
        if self.held_ahead():
            raise SavableError(
                "OnDevice has fetched a batch ahead of the trainer. Save, load and skip through the OnDevice "
                "instead of the loader."
            )

    def take_back(self, before: Position) -> None:
        """Return to `before` if a batch has been handed out since that its taker did not receive."""
        now, then = self.position.last_given, before.last_given
        if now is not None and now is not then:
            self.return_to(before)

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """See `SavableLoader.load_state_dict`."""
        with self._process.moving():
            flights: Flights = {}
            if self.rows is not None:
                check_flat(state)
                flights, state = read_flights(state), without_flights(state)
            loaded = self.states.loaded(state, allow)
            lost = rows_lost(self.local.last_stage, flights) if flights else {}
            self._note_acknowledged()
            self.prefetcher.begin_anew()
            self._ends.forget()
            self._losses.load(state)
            if self._ledger is not None:
                self._ledger.begin_anew()
            self.position, self._was_loaded = loaded, True
            if self.rows is not None:
                self.rows.load(loaded, flights, lost, whole=len(lane_numbers(state)) == self.settings.lanes)

    def reconfigure(
        self,
        weights: Mapping[str, Weight] | None = None,
        exclude: Iterable[Excluded] | None = None,
        max_length: int | None = None,
    ) -> int:
        """See `SavableLoader.reconfigure`: as if it had been stopped and resumed.

            given   0  1  2  3 │ made ahead: 4 5 6      decide: 4, 5, 6 are thrown away, the lanes stand before 4 again,
                               │                        with the decision in their states; 4 is made anew

        Rows in flight of which all is excluded are closed.
        """
        if self.settings.restarts:
            raise ValueError("reconfigure does not apply to on_iter='restart'. Create a loader with other settings.")
        with self._process.moving():
            at, last = self.position, self.local.last_stage
            arguments = (at.facts.decisions, at.next_batch, last, weights, exclude, max_length)
            decisions = agreed(self.ranks, lambda: check_decided(self.local, reconfigure(*arguments)))
            after = at.decided(decisions)
            self.local.learn(after.facts)
            self.prefetcher.restart()
            self._ends.forget()
            self.position = after
            if self.rows is not None:
                self.rows.table.settle(after.batches)
                self.rows.table.lose(partial(open_rows_lost, self.local.last_stage))
        return at.next_batch

    def trace(self, lag: int = 0) -> Trace:
        """See `SavableLoader.trace`."""
        if self.rows is not None and not lag and (again := self.rows.traced(self.position)) is not None:
            return again
        given = self.position.given(lag)
        rows = traced_rows(self.local.last_stage, BatchSamples.of(given.samples))
        return Trace(self.ranks.slot(given.step), given.lane, rows)

    def last_step(self) -> tuple[int, int]:
        """The slot and the lane of this rank's last batch. Raises ValueError if none has been given."""
        given = self.position.given()
        return self.ranks.slot(given.step), given.lane


class _Asked(Exception):
    """A rank has voted, and breaks its step off until the others have."""


def voted_step(runs: Sequence[Run]) -> list[Any]:
    """The batch of each rank in the next step, whose votes are taken together.

    A step that is broken off gives nothing; taken again, it goes on with what the ranks have agreed on.
    """
    agreed: list[int] = []

    def agree(vote: int) -> int:
        if not known:
            votes.append(vote)
            raise _Asked
        return known.pop()

    while True:
        votes: list[int] = []
        taken: list[Any] = []
        for run in runs:
            known, before, run.agree = list(agreed), run.agree, agree
            try:
                taken.append(run.__next__())
            except _Asked:
                pass
            finally:
                run.agree = before
        assert not taken or not votes, "some ranks vote, others do not"
        if taken:
            return taken
        agreed = [max(votes) if runs[0].settings.pad else min(votes)]


def in_pinned_memory(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory, so that copies to a GPU do not wait; itself without a GPU.

    Through torch's own caching allocator, which reuses a block only once copies from it, as by
    `tensor.to("cuda", non_blocking=True)`, are done.
    """
    import torch

    return _pinned(batch, torch.Tensor) if torch.cuda.is_available() else batch


def _pinned(value: Any, tensor: type) -> Any:
    if isinstance(value, tensor):
        return value.pin_memory()  # type: ignore[attr-defined]
    return with_parts_changed(value, lambda part: _pinned(part, tensor))
