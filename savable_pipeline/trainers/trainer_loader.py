"""`TrainerLoader`: a loader whose state follows what the trainer has trained on.

    yielded   1   2   3   4   5    counted here, since the run started or was resumed
    begun     1   2   3   4        the trainer's own counts, from any start: it fetches 1 ahead
    trained   1   2                the optimizer has stepped on these: a state saved now is that after 2

The state is that of all ranks after the last batch trained on. A trainer may fetch batches ahead of those it trains on.
Lightning does, by one batch, if the loader has no length. At any moment of a step, the state is that after the last
batch that the optimizer has stepped on. Between the return of a batch and the moment when the trainer counts it as
begun, one more may be on its way. If a trainer has fetched more batches ahead than it ever does, it has skipped
batches, although the state already says where to resume. That is an error.

An integration creates a `TrainerLoader` with the trainer's counters (`trained`, `begun`), its largest number of batches
ahead (`most_ahead`) and a function that moves a batch to its device (`to_device`). It passes the object to the trainer
instead of the loader, and makes the trainer call `state_dict()` on every rank when it saves, and `load_state_dict()` on
every rank before the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.misuse import caller, refuse_dataset, refuse_fetching_ahead, refuse_fit
from savable_pipeline.run.loader.position import MAX_LAG, Position
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of, settings_of
from savable_pipeline.run.state.state_dict import SlotSpan, taken_apart, with_spans

_SHARE = "Pass ranks=sp.Ranks.of(accelerator.torch_device_mesh, share=accelerator.parallelism_config.non_dp_dim_names)."


class TrainerLoader:
    """Batches of a loader, and the state of all lanes after the last one trained on.

    Batches that the trainer fetched but did not use before it started another epoch are repeated. An iterator starts at
    its first batch, so one that is discarded takes nothing. Between two batches only this object may move the loader,
    by `load_state_dict` and `skip`.

    Args:
        loader: The loader to wrap.
        trained: Returns the number of batches that this rank's optimizer has stepped on, from any start. None: the
            trainer trains on each batch before it takes the next one.
        begun: Returns the number of batches that it has started to train on, from the same start, if gradients of
            several batches are accumulated: up to 16 with those fetched ahead. None (default): the same as `trained`.
        most_ahead: How many batches the trainer may have fetched beyond those begun (default 0).
        to_device: Moves a batch to the trainer's device. None (default): batches are not moved.
        carries: Whether the trainer's gradients are carried over the end of an epoch (default False). Batches pending
            there are then not repeated unless it calls `give_back()`, after it has dropped the gradients.

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
        to_device: Callable[[Any], Any] | None = None,
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
        self._most_ahead, self._carries = most_ahead, carries
        self._to_device = to_device
        steps = 2 if carries else 1  # whose batches are in flight: those that wait, and those of the step behind them
        self._most_recorded = most_ahead + 1 if begun is None else steps * MAX_LAG  # of which the positions are kept
        self._to_skip: list[SlotSpan] = []  # where the loader comes to them
        self._mark()

    def _mark(self) -> None:
        """Start counting at the current position."""
        self._yielded: tuple[_YieldedBatch, ...] = ()  # the last ones
        self._skipped: list[SlotSpan] = []  # since the last one
        self._begun_before: int | None = None  # begun before the first one; None: not yielded yet
        self._set_expected()

    def _set_expected(self) -> None:
        """Record the position of the loader, to detect that something else moved it."""
        self._expected_at = self._epoch_and_slot

    @property
    def _epoch_and_slot(self) -> tuple[int, int]:
        position = self._run.position
        return position.epoch, position.slot

    @property
    def epoch(self) -> int:
        """Epoch of the last batch, as `SavableLoader.epoch`."""
        return self._loader.epoch

    @property
    def yielded_of_epoch(self) -> int | None:
        """Count the batches of this epoch that were yielded, or None without a length.

        Batches that an earlier run yielded to other ranks count. The end of an epoch is the start of the next, so 0.
        """
        return self._run.yielded_of_epoch()

    @property
    def ahead(self) -> int:
        """Number of batches that the trainer has fetched but not trained on."""
        if not self._yielded or self._trained is None:
            return 0
        last = self._yielded[-1]
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
        if self._epoch_and_slot != self._expected_at:
            (epoch, slot), (now_epoch, now_slot) = self._expected_at, self._epoch_and_slot
            raise SavableError(
                f"something else moved the loader from slot {slot} of epoch {epoch} to slot {now_slot} of epoch "
                f"{now_epoch}. Take batches and restore through the trainer alone."
            )

    def _check_none_skipped(self) -> None:
        if self._begun is None or not self._yielded:
            return
        last, begun = self._yielded[-1], self._begun()
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
        self._set_expected()

    def give_back(self) -> None:
        """Return to the position after the last batch trained on.

        Batches fetched beyond it are repeated.
        """
        self._check_not_moved()
        if ahead := self._fetched():
            position, self._to_skip = ahead[0].before, self._spans()
            self._run.return_to(position)
            self._mark()

    def take_over(self, other: TrainerLoader) -> None:
        """Continue where the trainer of another `TrainerLoader` stopped.

        Both have the same loader.

        Args:
            other: Its batches that were fetched but not trained on come again here.
        """
        other.give_back()
        self._to_skip, other._to_skip = other._to_skip, []
        self._mark()

    def _next(self) -> Any:
        """Return the next batch, on the device.

        If that fails or is interrupted, nothing has changed.
        """
        self._check_not_moved()
        self._skip_due_spans()
        before, yielded = self._run.position, self._yielded
        try:
            batch = self._loader.__next__()  # in here, as what a signal may come behind
            moved = batch if self._to_device is None else self._to_device(batch)
            begun = self._now_begun
            start, number = (yielded[-1].start, yielded[-1].number) if yielded else (self._begun_before, 0)
            last = _YieldedBatch(before, self._skipped, number + 1, begun if start is None else start, begun)
            self._yielded = (*yielded, last)[-self._most_recorded :]
            self._set_expected()
        except BaseException:
            self._run.take_back(before)
            self._yielded = yielded
            self._set_expected()
            raise
        self._skipped = []
        return moved

    def _fetched(self) -> list[_YieldedBatch]:
        """Return the batches that were yielded but not trained on."""
        ahead = max(0, self.ahead)
        if ahead > len(self._yielded):
            self._check_none_skipped()
            raise SavableError(
                f"the optimizer has not used the last {ahead} batches, more than the limit of {self._most_recorded}. "
                "Accumulate fewer, larger batches."
            )
        return list(self._yielded[-ahead:]) if ahead else []

    def _spans(self) -> list[SlotSpan]:
        """Return the slots that are skipped, or will be, after the last batch trained on."""
        fetched = self._fetched()
        done = [*(span for yielded in fetched[1:] for span in yielded.skipped), *(self._skipped if fetched else [])]
        return [*done, *self._to_skip]

    def _skip_due_spans(self) -> None:
        """Skip the spans that the loader has reached."""
        while self._to_skip:
            span, at = self._to_skip[0], self._run.position
            if (at.epoch, at.slot) < (span.epoch, span.first):
                return
            if at.epoch == span.epoch and at.slot < span.stop:
                try:
                    self._loader.skip(span.stop - at.slot)
                finally:
                    self._set_expected()
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
        """Skip slots after the batches that the trainer has fetched.

        Call it on each rank. Fetched batches are trained on first, or repeated in the next epoch. States saved until
        then have the slots that are still to be skipped. Only `load_state_dict` of a `TrainerLoader` accepts these.

        Args:
            slots: How many slots, of all ranks together.
        """
        self._check_not_moved()
        self._run.check_whole_steps(slots)
        at = self._run.position
        if not self.ahead:
            self._skip_due_spans()
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
        """Return the state of all ranks after the last batch trained on. Collective.

        Returns:
            A flat dict of int and bytes, the same on each rank. Any number of ranks resumes from it.

        Raises:
            SavableError: The trainer skips batches, or it is Lightning's, for which there is `SavableDataModule`.
        """
        refuse_fetching_ahead(caller())
        self.check()
        fetched = self._fetched()
        state = self._run.global_state(position=fetched[0].before if fetched else None)
        return with_spans(state, self._spans())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, on each rank before the trainer's first batch.

        Args:
            state: A state of the same run, from any number of ranks.
        """
        bare, spans = taken_apart(state)
        self._loader.load_state_dict(bare)
        self._to_skip = spans
        self._mark()


class _YieldedBatch(NamedTuple):
    """Batch that the trainer got."""

    before: Position  # where the loader stood
    skipped: list[SlotSpan]  # since the one before
    number: int  # from where the run began or was resumed, from 1 on
    start: int  # what the trainer had begun before the first of these
    begun: int  # what it had begun when this one was given


class _Pass:
    """Iterator that starts at its first batch, and that an error does not end."""

    def __init__(self, begin: Callable[[], None] | None, take: Callable[[], Any] | None) -> None:
        self._begin, self._take = begin, take

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
    """Raise ValueError for a loader that waits for acknowledgements of rows.

    No trainer acknowledges them.

    Args:
        loader: What a trainer is to take batches from.

    Raises:
        ValueError: It does.
    """
    if isinstance(loader, SavableLoader) and settings_of(loader).acknowledge:
        raise ValueError("acknowledge=True is for your own training loop. Remove it for a trainer.")


def sharing_batches(loader: SavableLoader, accelerator: Any) -> SavableLoader:
    """Check that tensor-parallel processes of Accelerate get the same batches.

    Args:
        loader: The loader to train on. Anything else passes.
        accelerator: The accelerator of the run.

    Returns:
        The loader.

    Raises:
        ValueError: It has more ranks than there are data-parallel ranks.
    """
    config = accelerator.parallelism_config
    most = accelerator.num_processes // (config.non_data_parallel_size if config else 1)
    if config and isinstance(loader, SavableLoader) and run_of(loader).ranks.world_size > most:
        raise ValueError(f"processes of {' and '.join(config.non_dp_dim_names)} need the same batches. {_SHARE}")
    return loader


def each(loaders: Any) -> list[Any]:
    """Return the loaders in a dict, list or tuple, or a single one, as a list.

    Args:
        loaders: A loader, or a container of loaders.
    """
    found = list(loaders.values()) if isinstance(loaders, dict) else loaders
    return list(found) if isinstance(found, list | tuple) else [found]


def length_of(batches: Any) -> int | None:
    """Return the number of batches of an epoch, or None if unknown.

    Args:
        batches: A loader, or an object in its place.
    """
    with suppress(TypeError):
        return len(batches)
    return None


def restarting(loaders: Any) -> Any:
    """Check that every `SavableLoader` restarts at each evaluation.

    Args:
        loaders: A loader, or a container of loaders; other kinds pass.

    Returns:
        What was given.

    Raises:
        ValueError: A loader was made without `on_iter="restart"`: it would continue where an evaluation was broken off.
    """
    for loader in each(loaders):
        if isinstance(loader, SavableLoader) and settings_of(loader).on_iter != "restart":
            raise ValueError(
                'set on_iter="restart" in a loader for evaluation, so that each evaluation starts at the first batch.'
            )
    return loaders
