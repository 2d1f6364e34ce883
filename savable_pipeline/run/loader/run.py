"""`Run`: one rank's part of a run: its position, its steps, and its state.

`SavableLoader` shows users a run; `testing`, `verify` and `StatefulDataset` use one directly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.named_object import refuse_while_importing
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.epoch_end import EpochEnds, Voting, proposed_end
from savable_pipeline.run.loader.ledger_keeper import LedgerKeeper
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.own_process import OwnProcess
from savable_pipeline.run.loader.pin_memory import pinned
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks, check_same_data
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.source_losses import SourceLosses
from savable_pipeline.run.loader.states import States
from savable_pipeline.run.loader.stats import Stats
from savable_pipeline.run.loader.trace import SampleIds, Trace, source_names, traced_rows
from savable_pipeline.run.state.state_dict import merge_states
from savable_pipeline.stages.batch_samples import BatchSamples

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Run:
    """An iterator over this rank's batches. Only `position` changes, by one assignment a step.

    `agree` takes this rank's vote and returns the smallest or largest of all ranks'; by default it asks the others.
    `pinned` are the shards that it must read; by default those that it finds. Raises ValueError for ranks that do not
    divide the lanes, or a pipeline that cannot be sent to workers.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        agree: Callable[[int], int] | None = None,
        pinned: PinnedShards | None = None,
    ) -> None:
        self.settings = settings
        self.ranks = settings.find_ranks()
        self.local = local = LocalLanes(settings.job, self.ranks.rank, pinned)
        self.prefetcher = Prefetcher(settings, local)
        self.stats = Stats(settings.num_workers, lambda: source_names(local.last_stage))
        self._asks_ranks = agree is None
        self._agree = agree or partial(self.ranks.agree, smallest=not settings.pad)
        self.states = States(settings, self.ranks, local)
        self._losses = SourceLosses(local)
        self._ends = EpochEnds(settings, local, self.prefetcher, self.stats, self._losses)
        self._process = OwnProcess(ranked=isinstance(settings.ranks, tuple | list | Ranks))
        self._ledger = None if settings.ledger is None else LedgerKeeper(settings.ledger, settings.seed, self.counters)
        self.held_ahead: Callable[[], bool] = lambda: False  # whether `OnDevice` has batches that it has not given yet
        self.begin_epoch(0)
        self.prefetcher.begin_workers(len(self.position.lanes))

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
        if self.position.previous is not None:
            if self._ends.is_finite and not self.position.told:
                self.prefetcher.look()
            self.end_epoch()
            raise StopIteration
        if not self._is_settled:
            return self._led(self.taking())
        try:
            self._process.claim()
            started = time.perf_counter()
            delivery, after = self._advance("batch", 1)
            batch = self._prepare(delivery, after, started)
        except BaseException:
            self._process.release()
            raise
        # from here to the trainer nothing is called: Python delivers signals at calls, so that none comes between
        del self._process.thread["id"]
        self.position = after
        return batch

    def taking(self) -> Voting[Any]:
        """Take the next batch."""
        started = time.perf_counter()
        delivery, after = yield from self._step("batch", 1)
        batch = self._prepare(delivery, after, started)
        self.position = after  # last, as in `__next__`: a step that fails or is interrupted before this gives nothing
        return batch

    def _prepare(self, delivery: Delivery, after: Position, started: float) -> Any:
        """The batch as the trainer gets it, at the position `after`: record it, and request the next ones."""
        self._losses.check(delivery.counts, after)
        batch = delivery.batch
        if self.settings.ids or self._ledger is not None:
            delivery = replace(delivery, samples=BatchSamples.of(delivery.samples))  # once for all that asks
        if self.settings.ids:
            batch = self._sample_ids.added(batch, BatchSamples.of(delivery.samples))
        if self.settings.pin_memory:
            batch = pinned(batch)
        if after.previous is None or after.slot:  # an endless run continues where its epoch is over
            self.prefetcher.prefetch(after)
        if self._ledger is not None:
            self._ledger.given(self.position, delivery, self.local.last_stage, self.states.packed)
        self.stats.add(time.perf_counter() - started, delivery)
        return batch

    @cached_property
    def _sample_ids(self) -> SampleIds:
        return SampleIds(self.local.last_stage, pad=self.settings.pad)

    def counters(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters without rates, and names: what the ledger notes from time to time."""
        return {**self.stats.totals(), **self.prefetcher.numbers()}, self.stats.names()

    def skip(self, slots: int) -> None:
        """See `SavableLoader.skip`."""
        self.check_whole_steps(slots)
        if self.position.told:
            self.position = self.position.begun()
        if slots and self._ledger is not None:
            self._ledger.skipping(self.position, self.local.last_stage, self.states.packed)
        if self.settings.epoch_slots is not None:
            slots = min(slots, self.position.left_of_epoch(self.settings.epoch_slots))
        over = self.position.previous  # the epoch whose last batch was given, but whose iterator has not ended yet
        while slots and self.position.previous is over:
            _, self.position = self._led(self._step("skip", slots))
            slots -= self.ranks.world_size

    def check_whole_steps(self, slots: int) -> None:
        """Raise ValueError unless this many slots are whole steps of all ranks."""
        if slots < 0 or slots % self.ranks.world_size:
            raise ValueError(f"skip takes a multiple of the {self.ranks.world_size} ranks, not {slots}")

    def _led(self, voting: Voting[T]) -> T:
        """What `voting` returns, with the votes of all ranks. Raises `SavableError` if another thread is in a step."""
        try:
            self._process.claim()
            vote = next(voting)
            while True:
                vote = voting.send(self._agree(vote))
        except StopIteration as returned:
            result: T = returned.value
            del self._process.thread["id"]  # no call, as in `__next__`
            return result
        except BaseException:
            self._process.release()
            raise

    def _step(self, want: RequestKind, slots: int) -> Voting[tuple[Delivery, Position]]:
        """This rank's batch of the next step, and the position after it; the next `slots` will be requested likewise.

        Whether the epoch continues after the step is determined before its batch is given, and stored at once: if the
        rest of the step fails and it is taken again, the ranks do not vote again.
        """
        if not self._process.checked:
            self._check_ranks()
        while self._ends.is_finite and not self.position.has_step:
            self.position = yield from self._ends.towards_step(self.position)
        delivery, after = self._advance(want, slots)
        if self._ends.is_finite and not after.has_step:
            if after.must_vote:
                end = yield proposed_end(after, self.prefetcher)
                self.position = self.position.agreed(end)
                after = self._ends.after(self.position, want, delivery)
            if after.is_over:
                after = self._ends.next_epoch(after)
        return delivery, after

    def _check_ranks(self) -> None:
        """Raise ValueError or `SavableError` where this rank must not iterate, or not with the data that it has."""
        refuse_while_importing()
        self._process.check()
        self.ranks.check_world()
        if self._asks_ranks and self.ranks.can_talk:
            check_same_data(self.ranks, self.states.fingerprint)
        self._process.checked = True

    @property
    def _is_settled(self) -> bool:
        """Whether the ranks need not vote in the next step, nor does the epoch end: most steps, the short way."""
        if not self._process.checked:
            return False
        at = self.position
        return not self._ends.is_finite or at.slot + 2 * at.step <= at.end

    def _advance(self, want: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """This rank's batch of the next step, which is in the epoch, and the position after it."""
        self.local.verify_excluded()
        position = self.position
        delivery = self.prefetcher.next(position, want, position.slot + slots - 1)
        if delivery.dry:
            self.close()
            lane = position.own_slot % self.settings.lanes
            raise SavableError(f"lane {lane} had said that it had more batches, but has none")
        return delivery, self._ends.after(position, want, delivery)

    def close(self) -> None:
        """See `SavableLoader.close`."""
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
        """The state dict at a position where this run was, or `lag` batches before."""
        before = position.before(lag)
        self.prefetcher.verify_given()
        if self._ledger is not None:
            self._ledger.saved(before)
        return self.states.flat(before)

    def global_state(
        self, group: dist.ProcessGroup | None = None, *, position: Position | None = None, lag: int = 0
    ) -> dict[str, Any]:
        """The state with the lanes of all ranks, on each of them, here or at `position` as `state_at`. Collective."""
        ranks = self.ranks if group is None else Ranks(self.ranks.rank, self.ranks.world_size, group)
        return merge_states(ranks.gather(self.state_at(self.position if position is None else position, lag)))

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
                "OnDevice has taken a batch of this loader ahead of the trainer, so that the loader's own state would "
                "be a batch late: save, load and skip through the OnDevice that the trainer iterates over, whose state "
                "is that of a loader"
            )

    def take_back(self, before: Position) -> None:
        """Return to `before` if a batch has been handed out since that its taker did not receive."""
        now, then = self.position.last_given, before.last_given
        if now is not None and now is not then:
            self.return_to(before)

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """See `SavableLoader.load_state_dict`."""
        with self._process.moving():
            loaded = self.states.loaded(state, allow)
            self.prefetcher.begin_anew()
            self._ends.forget()
            self._losses.load(state)
            if self._ledger is not None:
                self._ledger.begin_anew()
            self.position = loaded

    def trace(self, lag: int = 0) -> Trace:
        """See `SavableLoader.trace`."""
        given = self.position.given(lag)
        rows = traced_rows(self.local.last_stage, BatchSamples.of(given.samples))
        return Trace(self.ranks.slot(given.step), given.lane, rows)

    def last_step(self) -> tuple[int, int]:
        """The slot and the lane of this rank's last batch. Raises ValueError if none has been given."""
        given = self.position.given()
        return self.ranks.slot(given.step), given.lane
