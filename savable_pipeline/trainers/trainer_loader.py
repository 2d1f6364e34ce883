"""`TrainerLoader`: a loader as a trainer takes it. Its state is that of all ranks, after the batch trained on last.

    given     1   2   3   4   5    counted here, from where the run began or was resumed
    begun     1   2   3   4        the trainer's own counts, from any start: it fetches 1 ahead
    trained   1   2                the optimizer has stepped on these: the state saved now is that after 2

A trainer may fetch ahead of what it trains on (Lightning does, by one batch, where the loader has no length). At any
moment of a step, the state is that after the last batch which the optimizer has stepped on. Between the return of a
batch and the moment when the trainer counts it as begun, one more may be on its way. A trainer that has fetched more
beyond what it has begun than it ever does has skipped batches: it was set up to skip, beside a state that says where to
continue. That is an error.

An integration makes a `TrainerLoader` with the trainer's counters (`trained`, `begun`), how far it may fetch ahead
(`most_ahead`) and a function that moves a batch to its device (`place`), passes it to the trainer in place of the
loader, and makes the trainer call `state_dict()` on every rank when it saves, and `load_state_dict()` on every rank
before the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.position import MAX_LAG, Position
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of, settings_of
from savable_pipeline.run.loader.trainer_calls import caller, refuse_dataset, refuse_fetching_ahead, refuse_fit
from savable_pipeline.run.state.state_dict import SlotSpan, taken_apart, with_spans


class TrainerLoader:
    """The batches of a loader, and on each rank the state of all lanes after the batch trained on last.

    Batches that the trainer fetched and left when it began another pass come again. Each `iter()` starts with its first
    batch, so that an iterator thrown away takes nothing. Between two batches only this object may move the loader: by
    `load_state_dict` and `skip`.

    Args:
        loader: The loader to wrap.
        trained: Returns the number of batches that this rank's optimizer has stepped on, from any start. None: the
            trainer trains on each batch before it takes the next one.
        begun: Returns the number that it has begun to train on, from the same start, where gradients of several batches
            are accumulated: up to 16 with those fetched ahead. None: the same as `trained`.
        most_ahead: How many batches the trainer may have fetched beyond those begun.
        place: Moves a batch to the trainer's device. None: batches stay where they are.
        carries: The trainer's gradients are carried over the end of a pass: batches left there do not come again unless
            it calls `give_back()`, after it has dropped the gradients.

    Raises:
        TypeError: `loader` is not a `SavableLoader`.

    Example:
        >>> from savable_pipeline.trainers.trainer_loader import TrainerLoader
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.TarShardReader("shards/", lane), size=4)
        >>> trained = 0
        >>> batches = TrainerLoader(sp.SavableLoader(pipeline, seed=7), trained=lambda: trained, most_ahead=1)
        >>> ahead = iter(batches)
        >>> first = next(ahead)
        >>> batches.state_dict()["slot"]  # given, but not trained on
        0
        >>> trained = 1
        >>> batches.state_dict()["slot"]
        1
    """

    def __init__(
        self,
        loader: SavableLoader,
        *,
        trained: Callable[[], int] | None = None,
        begun: Callable[[], int] | None = None,
        most_ahead: int = 0,
        place: Callable[[Any], Any] | None = None,
        carries: bool = False,
    ) -> None:
        if not isinstance(loader, SavableLoader):
            raise TypeError(
                f"TrainerLoader takes a SavableLoader, not {type(loader).__name__}. Remove the wrapper, because "
                "batches are moved anyway."
            )
        refuse_acknowledging(loader)
        self._loader = loader
        self._run = run_of(loader)
        self._trained, self._begun = trained, begun or trained
        self._most_ahead = most_ahead
        self._place = place
        self._carries = carries
        steps = 2 if carries else 1  # whose batches are in flight: those that wait, and those of the step behind them
        self._most_kept = most_ahead + 1 if begun is None else steps * MAX_LAG  # of which the positions are kept
        self._to_skip: list[SlotSpan] = []  # where the loader comes to them
        self._mark()

    def _mark(self) -> None:
        """Start counting here."""
        self._given: tuple[_Given, ...] = ()  # the last ones
        self._skipped: list[SlotSpan] = []  # since the last one
        self._begun_before: int | None = None  # what the trainer had begun before the first one; None: when it is given
        self._leave()

    def _leave(self) -> None:
        """Remember where the loader stands."""
        self._left_at = self._epoch_and_slot

    @property
    def _epoch_and_slot(self) -> tuple[int, int]:
        position = self._run.position
        return position.epoch, position.slot

    @property
    def epoch(self) -> int:
        """The epoch of the batch given last, as `SavableLoader.epoch`."""
        return self._loader.epoch

    @property
    def given_of_epoch(self) -> int | None:
        """How many of an epoch's `len` batches have been given, whichever ranks began it; None without a length.

        0 also at an epoch's end, which is the start of the next one.
        """
        return self._run.yielded_of_epoch()

    @property
    def ahead(self) -> int:
        """How many batches the trainer has fetched beyond those that it has trained on."""
        if not self._given or self._trained is None:
            return 0
        last = self._given[-1]
        return last.number - max(0, self._trained() - last.start)

    @property
    def _now_begun(self) -> int:
        """The trainer's count of the batches that it has begun to train on; 0 if it has none."""
        return 0 if self._begun is None else self._begun()

    def check(self) -> None:
        """Check that no batch was skipped, and that only this object moved the loader.

        While a batch is on its way to the trainer, a skipped batch looks the same: an integration also calls this at
        the end of each step.

        Raises:
            SavableError: Batches were skipped, or something else moved the loader.
        """
        self._check_not_moved()
        self._check_none_skipped()

    def _check_not_moved(self) -> None:
        if self._epoch_and_slot != self._left_at:
            (epoch, slot), (now_epoch, now_slot) = self._left_at, self._epoch_and_slot
            raise SavableError(
                f"something else moved the loader from slot {slot} of epoch {epoch} to slot {now_slot} of epoch "
                f"{now_epoch}. Take batches and restore through the trainer alone."
            )

    def _check_none_skipped(self) -> None:
        if self._begun is None or not self._given:
            return
        last, begun = self._given[-1], self._begun()
        on_its_way = begun == last.begun
        if not 0 <= last.number - (begun - last.start) <= self._most_ahead + on_its_way:
            raise SavableError(
                f"the trainer used {begun - last.start} of {last.number} batches and fetches at most "
                f"{self._most_ahead} ahead. Turn off its own skipping."
            )

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        refuse_fit(caller())
        return _Pass(partial(self._begin, self._now_begun), self._next)

    def _begin(self, begun: int) -> None:
        if not self._carries:
            self.give_back()
        iter(self._loader)
        self._begun_before = begun
        self._leave()

    def give_back(self) -> None:
        """Return to the place after the batch trained on last: what was fetched beyond it comes again."""
        self._check_not_moved()
        if ahead := self._fetched():
            position, self._to_skip = ahead[0].before, self._spans()
            self._run.return_to(position)
            self._mark()

    def take_over(self, other: TrainerLoader) -> None:
        """Continue, on the same loader, where the trainer of another `TrainerLoader` has left it.

        Args:
            other: Its batches that were fetched but not trained on come again here.
        """
        other.give_back()
        self._to_skip, other._to_skip = other._to_skip, []
        self._mark()

    def _next(self) -> Any:
        """The next batch, placed. If that fails or is interrupted, everything stands as before."""
        self._check_not_moved()
        self._skip_what_is_due()
        before, given = self._run.position, self._given
        try:
            batch = self._loader.__next__()  # in here, as what a signal may come behind
            placed = batch if self._place is None else self._place(batch)
            begun = self._now_begun
            start, number = (given[-1].start, given[-1].number) if given else (self._begun_before, 0)
            last = _Given(before, self._skipped, number + 1, begun if start is None else start, begun)
            self._given = (*given, last)[-self._most_kept :]
            self._leave()
        except BaseException:
            self._run.take_back(before)
            self._given = given
            self._leave()
            raise
        self._skipped = []
        return placed

    def _fetched(self) -> list[_Given]:
        """The batches given but not trained on."""
        ahead = max(0, self.ahead)
        if ahead > len(self._given):
            self._check_none_skipped()
            raise SavableError(
                f"the optimizer has not used the last {ahead} batches, more than the limit of {self._most_kept}. "
                "Accumulate fewer, larger batches."
            )
        return list(self._given[-ahead:]) if ahead else []

    def _spans(self) -> list[SlotSpan]:
        """What the loader has passed over, or will, after the batch trained on last."""
        fetched = self._fetched()
        done = [*(span for given in fetched[1:] for span in given.skipped), *(self._skipped if fetched else [])]
        return [*done, *self._to_skip]

    def _skip_what_is_due(self) -> None:
        """Pass over the spans that the loader has reached."""
        while self._to_skip:
            span, at = self._to_skip[0], self._run.position
            if (at.epoch, at.slot) < (span.epoch, span.first):
                return
            if at.epoch == span.epoch and at.slot < span.stop:
                try:
                    self._loader.skip(span.stop - at.slot)
                finally:
                    self._leave()
            self._skipped.append(span)
            del self._to_skip[0]

    def __len__(self) -> int:
        """The number of batches in an epoch, as `len(loader)`: TypeError where it is not known."""
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    @property
    def dataset(self) -> Any:
        """Raises AttributeError, as for the loader."""
        refuse_dataset()

    def skip(self, slots: int) -> None:
        """Pass over slots after the batches that the trainer has fetched, as `SavableLoader.skip`.

        Call it on each rank. Fetched batches are trained on first, or come again in the next pass. States saved until
        then contain what is still to be passed over; only `load_state_dict` of a `TrainerLoader` takes them.

        Args:
            slots: How many slots, of all ranks together.
        """
        self._check_not_moved()
        self._run.check_whole_steps(slots)
        at = self._run.position
        if not self.ahead:
            self._skip_what_is_due()
            self._loader.skip(slots)
            self._mark()
        elif slots and (at.previous is None or at.iterator == "ended"):  # else the epoch is over
            last = self._to_skip.pop() if self._to_skip else SlotSpan(at.epoch, at.slot, at.slot)
            self._to_skip.append(last._replace(stop=last.stop + slots))

    def close(self) -> None:
        """Stop the workers, as `SavableLoader.close`."""
        self._loader.close()

    # Saving and restoring.

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the lanes of all ranks, after the batch trained on last. Collective.

        Returns:
            A flat dict of int and bytes, the same on each rank; any number of ranks continues from it.

        Raises:
            SavableError: The trainer skips batches, or it is Lightning's, for which there is `SavableDataModule`.
        """
        refuse_fetching_ahead(caller())
        self.check()
        fetched = self._fetched()
        state = self._run.global_state(position=fetched[0].before if fetched else None)
        return with_spans(state, self._spans())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Call it on each rank, before the trainer takes its first batch.

        Args:
            state: A state of the same run, from any number of ranks.
        """
        bare, spans = taken_apart(state)
        self._loader.load_state_dict(bare)
        self._to_skip = spans
        self._mark()


class _Given(NamedTuple):
    """A batch given to the trainer."""

    before: Position  # where the loader stood
    skipped: list[SlotSpan]  # since the one before
    number: int  # from where the run began or was resumed, from 1 on
    start: int  # what the trainer had begun before the first of these
    begun: int  # what it had begun when this one was given


class _Pass:
    """An iterator that starts with its first batch, and that an error does not end."""

    def __init__(self, begin: Callable[[], None], take: Callable[[], Any]) -> None:
        self._begin: Callable[[], None] | None = begin
        self._take: Callable[[], Any] | None = take

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._take is None:
            raise StopIteration
        if self._begin is not None:
            self._begin()
            self._begin = None
        try:
            return self._take()
        except StopIteration:
            self._take = None
            raise


# What integrations check.


def refuse_acknowledging(loader: Any) -> None:
    """Check that a loader keeps no account of rows in flight, which no trainer acknowledges.

    Args:
        loader: What a trainer is to take batches from.

    Raises:
        ValueError: It does.
    """
    if isinstance(loader, SavableLoader) and settings_of(loader).acknowledge:
        raise ValueError("acknowledge=True is for your own training loop. Remove it for a trainer.")


def each(made: Any) -> list[Any]:
    """Return the loaders in a dict, list or tuple, or a single one, as a list.

    Args:
        made: A loader, or a container of loaders.
    """
    if isinstance(made, dict):
        return list(made.values())
    return list(made) if isinstance(made, list | tuple) else [made]


def length_of(batches: Any) -> int | None:
    """Return the number of batches of an epoch; None where it is not known.

    Args:
        batches: A loader, or an object in its place.
    """
    try:
        return len(batches)
    except TypeError:
        return None


def restarting(made: Any) -> Any:
    """Check that every `SavableLoader` starts each evaluation at the beginning.

    Args:
        made: A loader, or a container of loaders; other kinds pass.

    Returns:
        What was given.

    Raises:
        ValueError: A loader was made without `on_iter="restart"`: it would continue where an evaluation was broken off.
    """
    for loader in each(made):
        if isinstance(loader, SavableLoader) and settings_of(loader).on_iter != "restart":
            raise ValueError(
                'set on_iter="restart" in a loader for evaluation, so that each evaluation starts at the first batch.'
            )
    return made
