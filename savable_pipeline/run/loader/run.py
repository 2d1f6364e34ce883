"""`Run`: one rank's part of a run: where it stands, how it moves on, and what is saved of it.

`SavableLoader` shows users a run; `testing`, `verify` and `StatefulDataset` use one directly.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import cached_property, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.named_object import refuse_while_importing
from savable_pipeline.errors import CheckpointMismatchError, SavableError, ShardError, StateError
from savable_pipeline.run.engine.launchers import check_picklable
from savable_pipeline.run.engine.messages import Delivery, RequestKind
from savable_pipeline.run.loader.epoch_end import counted_end, proposed_end, warn_unused
from savable_pipeline.run.loader.fresh_lanes import cuts_of, drawing_by, may_be_cut_otherwise, with_known_cuts
from savable_pipeline.run.loader.growth import NEW_SHARDS, NewShards
from savable_pipeline.run.loader.ledger_keeper import LedgerKeeper
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.own_process import OwnProcess
from savable_pipeline.run.loader.pin_memory import pinned
from savable_pipeline.run.loader.position import MAX_LAG, Given, Position
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.same_data import check_same_data
from savable_pipeline.run.loader.sample_ids import SampleIds, source_names
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.stats import Stats
from savable_pipeline.run.loader.trace import Trace, traced_rows
from savable_pipeline.run.state.fingerprint import (
    Fingerprint,
    FingerprintHere,
    checked_allow,
    compare,
    fingerprint,
    pack_fingerprint,
    subset_order_of,
    unpack_fingerprint,
)
from savable_pipeline.run.state.restoring import restoring
from savable_pipeline.run.state.state_dict import check_flat, lane_name, merge_states, read_lanes
from savable_pipeline.run.state.to_skip import refuse_spans
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.capabilities import count_of

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)
T = TypeVar("T")
_CHANGED = "settings changed within the epoch"  # an entry of a state's fingerprint, while that epoch lasts


Voting: TypeAlias = Generator[int, int, T]
"""Gives this rank's vote wherever the ranks must agree, is sent the result, and returns a T."""


class Run:
    """An iterator over this rank's batches. `position` is all that changes as it goes on, by one assignment a change.

    `agree` takes this rank's vote and gives the smallest or largest of all ranks'; by default it asks the other ranks.
    `pinned` are the shards that it must read; by default those that it finds. Raises ValueError for ranks that do not
    divide the lanes, or a pipeline that workers cannot be given.
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
        self._ends: dict[int, int | None] = {}  # of epochs, as far as it was counted
        self._process = OwnProcess(ranked=settings.rank is not None)
        self._ledger = None if settings.ledger is None else LedgerKeeper(settings.ledger, settings.seed, self.counters)
        self._thread: dict[str, int] = {}  # that moves the run now, its "id"
        self.held_ahead: Callable[[], bool] = lambda: False  # whether `OnDevice` has batches that it has not given yet
        self.begin_epoch(0)
        own_lanes = len(self.position.lanes)
        if settings.num_workers > own_lanes:
            log.warning(
                "%d workers for the %d lanes of this rank: no more can work at a time than it has lanes; a new run "
                "had better have lanes=%d or more",
                settings.num_workers,
                own_lanes,
                settings.num_workers * self.ranks.world_size,
            )
        if settings.num_workers:
            check_picklable(settings.pipeline, settings.find_context())
            self.prefetcher.launch()

    def begin_epoch(self, epoch: int) -> None:
        """Stand at the start of an epoch."""
        kept: dict[str, Any] = {"growth": self.local.growth, "subset_order": self.local.subset_order}
        self.position = Position.start(epoch, self.ranks, self.settings.lanes, pad=self.settings.pad, **kept)

    def end_epoch(self) -> None:
        """Stand where StopIteration has been raised: the next iterator goes on here."""
        self.position = self.position.ended()

    # Epochs.

    @property
    def epoch(self) -> int:
        """The epoch of the batch given last, until StopIteration or the next iterator; then the one that follows."""
        return self.epoch_at(self.position)

    def epoch_at(self, position: Position) -> int:
        """The same at a position where this run was."""
        slots, last = self.settings.epoch_slots, None if position.told else position.previous
        if slots is None or self._restarts:
            return position.epoch if last is None else last.epoch
        return position.epoch_of(slots) - (last is not None)

    def length(self) -> int | None:
        """How many batches this rank gets in the epoch; None where that cannot be counted beforehand."""
        if self.settings.epoch_slots is not None and not self._is_finite:
            return self.settings.epoch_slots // self.ranks.world_size
        end = self._counted_end(self.epoch)
        if end is None:
            return None
        return -(-end // self.ranks.world_size) if self.settings.pad else end // self.ranks.world_size

    def given_of_epoch(self) -> int | None:
        """How many of an epoch's `length` batches lie before this place, whatever ranks began it.

        None without a length, and in an epoch that was begun with other settings, which cannot be counted.
        """
        length, at, slots = self.length(), self.position, self.settings.epoch_slots
        if length is None or at.changed:
            return None
        if slots is not None and not self._is_finite:
            return length - at.left_of_epoch(slots) // at.step
        left = (self._counted_end(self.epoch) or 0) - at.slot
        return length - (-(-left // at.step) if self.settings.pad else left // at.step)

    def _counted_end(self, epoch: int) -> int | None:
        """Where an epoch ends, if the stages can count their lanes."""
        if epoch not in self._ends:
            stage = self.local.last_stage
            counts = [count_of(stage, lane, epoch) for lane in range(self.settings.lanes)]
            known = [count for count in counts if count is not None]
            countable = len(known) == len(counts) and not stage.info.endless
            self._ends = {epoch: counted_end(known, pad=self.settings.pad) if countable else None}
        return self._ends[epoch]

    @cached_property
    def _is_finite(self) -> bool:
        finite = not self.local.last_stage.info.endless
        if finite and self.settings.epoch_slots is not None:
            raise ValueError(
                "epoch_slots cuts a run without end into epochs, but this pipeline ends: give its readers epochs=None, "
                "or leave epoch_slots out"
            )
        return finite

    @property
    def _restarts(self) -> bool:
        return self.settings.on_iter == "restart"

    # Going on.

    def __iter__(self) -> Run:
        refuse_while_importing()
        at = self.position
        if self._restarts and not at.loaded and (at.history or at.previous is not None or at.slot):
            self.prefetcher.restart()
            self.begin_epoch(0)
        else:
            self.position = at.begun()
        return self

    def __next__(self) -> Any:
        if self.position.previous is not None:
            if self._is_finite and not self.position.told:
                self.prefetcher.look()
            self.end_epoch()
            raise StopIteration
        if not self._is_settled:
            return self._led(self.taking())
        try:
            self._claim()
            started = time.perf_counter()
            delivery, after = self._advance("batch", 1)
            batch = self._prepare(delivery, after, started)
        except BaseException:
            self._release()
            raise
        # from here to the trainer nothing is called: Python delivers signals at calls, so that none comes between
        del self._thread["id"]
        self.position = after
        return batch

    def taking(self) -> Voting[Any]:
        """Take the next batch."""
        started = time.perf_counter()
        delivery, after = yield from self._step("batch", 1)
        batch = self._prepare(delivery, after, started)
        self.position = after  # last, as in `__next__`: a step that fails or is interrupted before has given nothing
        return batch

    def _prepare(self, delivery: Delivery, after: Position, started: float) -> Any:
        """The batch as the trainer gets it, which then stands at `after`: noted, and the next ones requested."""
        batch = delivery.batch
        if self.settings.ids or self._ledger is not None:
            delivery = replace(delivery, samples=BatchSamples.of(delivery.samples))  # once for all that asks
        if self.settings.ids:
            batch = self._sample_ids.added(batch, BatchSamples.of(delivery.samples))
        if self.settings.pin_memory:
            batch = pinned(batch)
        if after.previous is None or after.slot:  # an endless run goes on where its epoch is over
            self.prefetcher.prefetch(after)
        if self._ledger is not None:
            self._ledger.given(self.position, delivery, self.local.last_stage, self._packed_fingerprint)
        self.stats.add(time.perf_counter() - started, delivery)
        return batch

    @cached_property
    def _sample_ids(self) -> SampleIds:
        return SampleIds(self.local.last_stage)

    def counters(self) -> tuple[dict[str, float], dict[str, str]]:
        """Counters without rates, and names: what the ledger notes from time to time."""
        return {**self.stats.totals(), **self.prefetcher.numbers()}, self.stats.names()

    @property
    def sources(self) -> list[str]:
        """See `SavableLoader.sources`."""
        return list(source_names(self.local.last_stage).values())

    def skip(self, slots: int) -> None:
        """See `SavableLoader.skip`."""
        self.check_whole_steps(slots)
        if self.position.told:
            self.position = self.position.begun()
        if slots and self._ledger is not None:
            self._ledger.skipping(self.position, self.local.last_stage, self._packed_fingerprint)
        if self.settings.epoch_slots is not None:
            slots = min(slots, self.position.left_of_epoch(self.settings.epoch_slots))
        over = self.position.previous  # the epoch whose last batch was given, which its iterator has yet to say
        while slots and self.position.previous is over:
            _, self.position = self._led(self._step("skip", slots))
            slots -= self.ranks.world_size

    def check_whole_steps(self, slots: int) -> None:
        """Raise ValueError unless so many slots are steps of all ranks."""
        if slots < 0 or slots % self.ranks.world_size:
            raise ValueError(f"skip takes a multiple of the {self.ranks.world_size} ranks, not {slots}")

    def _led(self, voting: Voting[T]) -> T:
        """What `voting` returns, with the votes of all ranks. Raises `SavableError` if another thread is in a step."""
        try:
            self._claim()
            vote = next(voting)
            while True:
                vote = voting.send(self._agree(vote))
        except StopIteration as returned:
            result: T = returned.value
            del self._thread["id"]  # no call, as in `__next__`
            return result
        except BaseException:
            self._release()
            raise

    def _claim(self) -> None:
        """Note this thread as the one that moves the run. Raises `SavableError` if another one does."""
        this = get_ident()
        if self._thread.setdefault("id", this) != this:
            raise SavableError(
                "two threads use one loader at a time: take batches, skip and load in one thread, or under a lock; "
                "state_dict() may be called from any"
            )

    def _release(self) -> None:
        """Let other threads move the run, if this one may."""
        if self._thread.get("id") == get_ident():
            self._thread.clear()

    def _step(self, want: RequestKind, slots: int) -> Voting[tuple[Delivery, Position]]:
        """This rank's batch of the next step, and the position after it; the next `slots` are wanted alike.

        Whether the epoch goes on after it is found out before it is given. That is stored at once: where the rest of
        the step fails and it is taken again, the ranks do not vote again.
        """
        if not self._process.checked:
            self._check_ranks()
        if self._is_finite:
            yield from self._find_step()
        delivery, after = self._advance(want, slots)
        if self._is_finite and not after.has_step:
            if after.must_vote:
                end = yield proposed_end(after, self.prefetcher)
                self.position = self.position.agreed(end)
                after = self._moved(self.position, want, delivery)
            if after.is_over:
                after = self._next_epoch(after)
        return delivery, after

    def _check_ranks(self) -> None:
        """Raise ValueError for ranks that were others, `CheckpointMismatchError` for ranks that read other shards, and
        `SavableError` in a process that must not iterate."""
        refuse_while_importing()
        self._process.check()
        self.ranks.check_world()
        if self._asks_ranks and self.ranks.can_talk:
            check_same_data(self.ranks, self._fingerprint)
        self._process.checked = True

    @property
    def _is_settled(self) -> bool:
        """Whether the ranks need not vote in the next step, nor does the epoch end: most steps, the short way."""
        if not self._process.checked:
            return False
        at = self.position
        return not self._is_finite or at.slot + 2 * at.step <= at.end

    def _advance(self, want: RequestKind, slots: int) -> tuple[Delivery, Position]:
        """This rank's batch of the next step, which is in the epoch, and the position after it."""
        self.local.verify_excluded()
        position = self.position
        delivery = self.prefetcher.next(position, want, position.slot + slots - 1)
        if delivery.dry:
            self.close()
            lane = position.own_slot % self.settings.lanes
            raise SavableError(f"lane {lane} had said that it had more batches, but has none")
        return delivery, self._rolled_over(self._moved(position, want, delivery))

    def _moved(self, position: Position, want: RequestKind, delivery: Delivery) -> Position:
        """The position after a step whose batch is given, or skipped."""
        after = position.passed_over(delivery) if want == "skip" else position.advanced(delivery)
        return after if position.slot else after.begun_with(cuts_of(self.local.last_stage, position.epoch))

    def _rolled_over(self, after: Position) -> Position:
        """The position after a step, at the start of the next epoch if an epoch of `epoch_slots` is over."""
        slots = self.settings.epoch_slots
        if slots is None or after.epoch_of(slots) == self.position.epoch_of(slots):
            return after
        return after.next_epoch(0) if self._restarts else after.rolled_over()

    def _find_step(self) -> Voting[None]:
        """Go to where it is known that a step follows. Raises `SavableError` for an epoch without any."""
        while not self.position.has_step:
            if self.position.is_over:  # loaded there, or with fewer slots left than a step
                self.position = self._next_epoch(self.position).begun()
            elif (end := (yield from self._end_beforehand())) is not None:
                self.position = self.position.ending_at(end)
            else:
                self._find_more()
                end = yield proposed_end(self.position, self.prefetcher)
                self.position = self.position.agreed(end)

    def _end_beforehand(self) -> Voting[int | None]:
        """Where this epoch ends, if that can be known before its first batch."""
        if self.position.changed:
            return None
        end = self._counted_end(self.position.epoch)
        if end is None and self._restarts and self.ranks.world_size > 1:
            # ranks may break their passes at different batches: they must not have to vote in the middle of one
            self._ends[0] = end = yield self._count_lanes()
        return end

    def _count_lanes(self) -> int:
        """This rank's vote on the end of epoch 0, found by passing over all batches of its lanes."""
        start = Position.start(0, self.ranks, self.settings.lanes, pad=self.settings.pad)
        found = self.prefetcher.count(start)
        if self.settings.pad:
            return counted_end([found.get(lane, 0) for lane in range(self.settings.lanes)], pad=True)
        return min(found.values()) * self.settings.lanes

    def _next_epoch(self, over: Position) -> Position:
        """The position that follows the end of an epoch. Raises `SavableError` if it had no batch."""
        warn_unused(over, self.local.last_stage.info.population)
        return over.next_epoch(0 if self._restarts else over.epoch + 1)

    def _find_more(self) -> None:
        """Ask lanes whether they have a batch where that is not known: before any batch of theirs is requested."""
        if self.position.unknown_lanes:
            peeks = self.prefetcher.find_more(self.position)
            self.position = self.position.learned(peeks)
            for found in peeks.values():
                self.stats.count(found.counts)

    def close(self) -> None:
        """See `SavableLoader.close`."""
        if self._ledger is not None:
            self._ledger.close()
        fault = self.prefetcher.close()
        self.local.close()
        self.__dict__.pop("_fingerprint", None)
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
        return before.flat(self._changed_fingerprint if before.changed else self._packed_fingerprint)

    def global_state(
        self, group: dist.ProcessGroup | None = None, *, position: Position | None = None, lag: int = 0
    ) -> dict[str, Any]:
        """The state with the lanes of all ranks, on each of them, here or at `position` as `state_at`. Collective."""
        ranks = self.ranks if group is None else Ranks(self.ranks.rank, self.ranks.world_size, group)
        return merge_states(ranks.gather(self.state_at(self.position if position is None else position, lag)))

    def return_to(self, position: Position) -> None:
        """Stand at a position where this run was: what was given or passed over since then comes again."""
        try:
            self._claim()
            self.prefetcher.restart()
            if self._ledger is not None:
                self._ledger.begin_anew()
            self.position = position
        finally:
            self._release()

    def check_nothing_held(self) -> None:
        """Raise `SavableError` if this run is further than what its trainer was given."""
        if self.held_ahead():
            raise SavableError(
                "OnDevice has taken a batch of this loader ahead of the trainer, so that the loader's own state would "
                "be a batch late: save, load and skip by what the trainer iterates over, the OnDevice, whose state is "
                "that of a loader"
            )

    def take_back(self, before: Position) -> None:
        """Return to `before` if a batch has been handed out since, which its taker has not got."""
        now, then = self.position.last_given, before.last_given
        if now is not None and now is not then:
            self.return_to(before)

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """See `SavableLoader.load_state_dict`."""
        try:
            self._claim()
            self._load(state, allow)
        finally:
            self._release()

    def _load(self, state: Mapping[str, Any], allow: Iterable[str]) -> None:
        check_flat(state)
        refuse_spans(state)
        with restoring("the state"):
            saved = unpack_fingerprint(state["fingerprint"])
            order = subset_order_of(saved)
        before = self.local.subset_order
        self.draw_subsets_by(order)
        try:
            loaded = self._loaded(state, saved, allow)
        except BaseException:
            self.draw_subsets_by(before)
            raise
        self.prefetcher.begin_anew()
        self._ends.clear()
        if self._ledger is not None:
            self._ledger.begin_anew()
        self.position = loaded

    def draw_subsets_by(self, order: int | None) -> None:
        """Have readers draw subsets by this order's number, as a run did that is loaded next."""
        if order != self.local.subset_order:
            self.local.draw_subsets_by(order)
            for made in ("_fingerprint", "_packed_fingerprint", "_changed_fingerprint"):
                self.__dict__.pop(made, None)

    def _loaded(self, state: Mapping[str, Any], saved: Fingerprint, allow: Iterable[str]) -> Position:
        """The position in a state of the fingerprint `saved`, in data that have grown as its own."""
        here, allowed = self._fingerprint, {allow} if isinstance(allow, str) else set(allow)
        checked_allow(allowed - {NEW_SHARDS}, saved, here)
        with restoring("the state"):
            loaded = self._read(state, saved, here, allowed)
            if loaded.growth and self._restarts:
                raise CheckpointMismatchError(
                    "shards joined this run at a later epoch, but with on_iter='restart' each pass is epoch 0, which "
                    "has none of them: begin a new loader"
                )
            self.local.grow(loaded.growth)
        return loaded

    def _read(self, state: Mapping[str, Any], saved: Fingerprint, here: FingerprintHere, allowed: set[str]) -> Position:
        """The position in a state of the fingerprint `saved`, whose fields may differ where they are `allowed`."""
        changed = saved.environment.pop(_CHANGED, None) is not None and state["slot"] > 0
        new = NewShards(saved, here, self.local) if NEW_SHARDS in allowed else None
        differing = compare(new.before if new else saved, here, allowed - {NEW_SHARDS})
        if state["lanes"] != self.settings.lanes:
            raise StateError(
                f"the state says that it has {state['lanes']} lanes, and its fingerprint {self.settings.lanes}; use "
                "another copy of the checkpoint"
            )
        state = new.join(state) if new else state
        lanes = read_lanes(state, self.position.lanes)
        order = self.local.subset_order
        if order is not None:  # an earlier release saved it
            state = {**state, **{lane_name(number): drawing_by(lane, order) for number, lane in lanes.items()}}
        differs = bool(differing and state["slot"]) or changed or may_be_cut_otherwise(state, lanes, self.local)
        state = with_known_cuts(state, lanes, self.local, settings_differ=differs)
        pad = self.settings.pad
        loaded = Position.saved(state, lanes, self.ranks, self.settings.lanes, pad=pad, subset_order=order)
        # with larger batches, say, a lane of which some was left may have no batch
        return loaded.with_changes() if differs else loaded

    @cached_property
    def _fingerprint(self) -> FingerprintHere:
        """What a state must agree on. It holds the index of the shards open."""
        return fingerprint(self.local.last_stage, seed=self.settings.seed, lanes=self.settings.lanes)

    @cached_property
    def _packed_fingerprint(self) -> bytes:
        """The same as bytes."""
        return pack_fingerprint(self._fingerprint)

    @cached_property
    def _changed_fingerprint(self) -> bytes:
        """The same in an epoch that was begun with other settings."""
        found = self._fingerprint
        return pack_fingerprint(replace(found, environment={**found.environment, _CHANGED: "yes"}))

    def trace(self, lag: int = 0) -> Trace:
        """See `SavableLoader.trace`."""
        given = self._given(lag)
        rows = traced_rows(self.local.last_stage, BatchSamples.of(given.samples))
        return Trace(self.ranks.slot(given.step), given.lane, rows)

    def last_step(self) -> tuple[int, int]:
        """The slot and the lane of this rank's last batch. Raises ValueError if none has been given."""
        given = self._given(0)
        return self.ranks.slot(given.step), given.lane

    def _given(self, lag: int) -> Given:
        """The batch given `lag` batches before the last one."""
        history = (self.position.previous or self.position).history
        if not 0 <= lag < len(history):
            found = f"{len(history)} have" if history else "none has"
            raise ValueError(
                f"trace(lag={lag}) tells of one of the last {MAX_LAG} batches, and {found} been given since the loader "
                "was made, loaded, or began the epoch"
            )
        return history[-1 - lag]
