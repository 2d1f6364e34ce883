"""`TrainerLoader`: a loader whose state follows the trainer's progress.

    yielded   1   2   3   4   5    counted by this class, since the run started or was resumed
    started     1   2   3   4        counted by the trainer, which fetches 1 batch ahead
    trained   1   2                the optimizer has stepped on these, so a state saved now is that after batch 2

A trainer may fetch batches ahead of those it trains on. Lightning does, by one batch, if the loader has no length. At
any moment of a step, the saved state of all ranks is that after the last batch that the optimizer has stepped on.

Just after a batch is returned, the trainer does not count it as started yet, so one more batch may be ahead. Even more
batches ahead are an error: the trainer has skipped some by itself, although the state already says where to resume.

An integration creates a `TrainerLoader` with the trainer's counters (`trained`, `begun`), its largest number of batches
ahead (`most_ahead`) and a function that moves a batch to its device (`to_device`). It passes the object to the trainer
instead of the loader, and makes the trainer call `state_dict()` on every rank when it saves, and `load_state_dict()` on
every rank before the first batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.misuse import caller, reject_dataset, reject_fetching_ahead, reject_fit
from savable_pipeline.run.loader.position import MAX_LAG, Position
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of, settings_of
from savable_pipeline.run.state.state_dict import SlotSpan, split_spans, with_spans


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
        most_ahead: How many batches the trainer may have fetched beyond those started (default 0).
        to_device: Moves a batch to the trainer's device. None (default): batches are not moved.
        carries: Whether the trainer carries gradients over the end of an epoch (default False). Then batches without a
            step at that moment are only repeated if it calls `rewind()`, after it has dropped the gradients.

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
        >>> batches.state_dict()["slot"]  # yielded, but not trained on
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
        reject_acknowledging(loader)
        self._loader = loader
        self._run = run_of(loader)
        self._trained, self._begun = trained, begun or trained
        self._most_ahead, self._carries = most_ahead, carries
        self._to_device = to_device
        untrained_steps = 2 if carries else 1  # optimizer steps whose batches may be yielded but not trained on
        self._most_recorded = most_ahead + 1 if begun is None else untrained_steps * MAX_LAG  # longest `_yielded`
        self._spans_to_skip: list[SlotSpan] = []  # slots to skip when the loader reaches them
        self._restart_count()

    def _restart_count(self) -> None:
        """Start counting at the current position."""
        self._yielded: tuple[_YieldedBatch, ...] = ()  # the last batches
        self._skipped: list[SlotSpan] = []  # slots skipped since the last batch
        # what `begun` returned at the first batch; None before it
        self._begun_at_start: int | None = None
        self._record_position()

    def _record_position(self) -> None:
        """Record the position of the loader, to detect later whether something else moved it."""
        self._expected_position = self._epoch_and_slot

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
        """The number of batches of this epoch that were yielded, or None without a length.

        Batches that other ranks got before a resume count too. At the end of an epoch, the number is 0.
        """
        return self._run.yielded_of_epoch()

    @property
    def ahead(self) -> int:
        """Number of batches that the trainer has fetched but not trained on."""
        if not self._yielded or self._trained is None:
            return 0
        last = self._yielded[-1]
        return last.number - max(0, self._trained() - last.begun_at_start)

    @property
    def _begun_count(self) -> int:
        """The number of batches that the trainer has started to train on, as `begun` returns it; 0 without it."""
        return 0 if self._begun is None else self._begun()

    def check(self) -> None:
        """Check that no batch was skipped, and that only this object moved the loader.

        A batch that was just yielded cannot be distinguished from a skipped one, because the trainer has not counted it
        yet. So an integration also calls this at the end of each step.

        Raises:
            SavableError: Batches were skipped, or something else moved the loader.
        """
        self._check_unmoved()
        self._check_none_skipped()

    def _check_unmoved(self) -> None:
        """Raise `SavableError` if the loader was moved by something else than this class."""
        if self._epoch_and_slot != self._expected_position:
            (epoch, slot), (now_epoch, now_slot) = self._expected_position, self._epoch_and_slot
            raise SavableError(
                f"something else moved the loader from slot {slot} of epoch {epoch} to slot {now_slot} of epoch "
                f"{now_epoch}. Take batches and restore through the trainer alone."
            )

    def _check_none_skipped(self) -> None:
        """Raise `SavableError` if the trainer skipped batches or fetched too many ahead."""
        if self._begun is None or not self._yielded:
            return
        last, begun = self._yielded[-1], self._begun()
        is_on_its_way = begun == last.begun  # the trainer has not counted the last batch yet
        used = begun - last.begun_at_start
        if not 0 <= last.number - used <= self._most_ahead + is_on_its_way:
            raise SavableError(
                f"the trainer used {used} of {last.number} batches and fetches at most "
                f"{self._most_ahead} ahead. Turn off its own skipping."
            )

    def __iter__(self) -> Iterator[Any]:
        reject_fit(caller())
        return _LazyIterator(partial(self._begin, self._begun_count), self._next)

    def _begin(self, begun: int) -> None:
        """Start an iteration, at which the trainer has started to train on `begun` batches."""
        if not self._carries:
            self.rewind()
        iter(self._loader)
        self._begun_at_start = begun
        self._record_position()

    def rewind(self) -> None:
        """Move the loader back to the position after the last batch trained on.

        Batches that were fetched after it are repeated.
        """
        self._check_unmoved()
        if untrained := self._untrained_batches():
            self._spans_to_skip = self._pending_spans()
            self._run.return_to(untrained[0].before)
            self._restart_count()

    def continue_from(self, other: TrainerLoader) -> None:
        """Continue where the trainer of another `TrainerLoader` stopped.

        Args:
            other: The other one, of the same loader. Its batches that were not trained on are repeated here.
        """
        other.rewind()
        self._spans_to_skip, other._spans_to_skip = other._spans_to_skip, []
        self._restart_count()

    def _next(self) -> Any:
        """Return the next batch, moved to the device.

        After an error or an interrupt, the position and the recorded batches are as before.
        """
        self._check_unmoved()
        self._skip_due_spans()
        before, yielded = self._run.position, self._yielded
        try:
            batch = self._loader.__next__()  # within `try`, because a signal may interrupt the lines below
            moved = batch if self._to_device is None else self._to_device(batch)
            begun = self._begun_count
            number = yielded[-1].number + 1 if yielded else 1
            at_start = yielded[-1].begun_at_start if yielded else self._begun_at_start
            last = _YieldedBatch(before, self._skipped, number, begun if at_start is None else at_start, begun)
            self._yielded = (*yielded, last)[-self._most_recorded :]
            self._record_position()
        except BaseException:
            self._run.undo_fetch(before)
            self._yielded = yielded
            self._record_position()
            raise
        self._skipped = []
        return moved

    def _untrained_batches(self) -> list[_YieldedBatch]:
        """Return the batches that were yielded but not trained on, the earliest first."""
        ahead = max(0, self.ahead)
        if ahead > len(self._yielded):
            self._check_none_skipped()
            raise SavableError(
                f"the optimizer has not used the last {ahead} batches, more than the limit of {self._most_recorded}. "
                "Accumulate fewer, larger batches."
            )
        return list(self._yielded[-ahead:]) if ahead else []

    def _pending_spans(self) -> list[SlotSpan]:
        """Return the spans that a run resumed after the last batch trained on has to skip."""
        untrained = self._untrained_batches()
        skipped = [span for batch in untrained[1:] for span in batch.skipped]  # those before the first are in its state
        return [*skipped, *(self._skipped if untrained else []), *self._spans_to_skip]

    def _skip_due_spans(self) -> None:
        """Skip the spans that the loader has reached."""
        while self._spans_to_skip:
            span, position = self._spans_to_skip[0], self._run.position
            if (position.epoch, position.slot) < (span.epoch, span.first):
                return
            if position.epoch == span.epoch and position.slot < span.stop:
                try:
                    self._loader.skip(span.stop - position.slot)
                finally:
                    self._record_position()
            self._skipped.append(span)
            del self._spans_to_skip[0]

    def __len__(self) -> int:
        """Return the number of batches in an epoch, as `len(loader)`. Raises TypeError if it is unknown."""
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    @property
    def dataset(self) -> Any:
        """Raise AttributeError, as for the loader."""
        reject_dataset()

    def skip(self, slots: int) -> None:
        """Skip slots after the batches that the trainer has fetched.

        Call it on each rank. Fetched batches are trained on first, or repeated in the next epoch. States saved until
        then have the slots that are still to be skipped. Only `load_state_dict` of a `TrainerLoader` accepts these.

        Args:
            slots: How many slots, of all ranks together.
        """
        self._check_unmoved()
        self._run.check_whole_steps(slots)
        position = self._run.position
        if not self.ahead:
            self._skip_due_spans()
            self._loader.skip(slots)
            self._restart_count()
        elif slots and (position.previous is None or position.iterator == "ended"):  # otherwise the epoch has ended
            empty = SlotSpan(position.epoch, position.slot, position.slot)
            last_span = self._spans_to_skip.pop() if self._spans_to_skip else empty
            self._spans_to_skip.append(last_span._replace(stop=last_span.stop + slots))

    def close(self) -> None:
        """Stop the workers, as `SavableLoader.close`."""
        self._loader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks after the last batch trained on. Collective.

        Returns:
            A flat dict of int and bytes, the same on each rank. Any number of ranks resumes from it.

        Raises:
            SavableError: The trainer skips batches, or the trainer is Lightning's, which needs a `SavableDataModule`.
        """
        reject_fetching_ahead(caller())
        self.check()
        untrained = self._untrained_batches()
        state = self._run.global_state(position=untrained[0].before if untrained else None)
        return with_spans(state, self._pending_spans())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, on each rank before the trainer's first batch.

        Args:
            state: A state of the same run, from any number of ranks.
        """
        bare, spans = split_spans(state)
        self._loader.load_state_dict(bare)
        self._spans_to_skip = spans
        self._restart_count()


class BetweenSteps(TrainerLoader):
    """Batches whose state is saved only between two steps of the optimizer.

    A trainer's checkpoints do not contain pending gradients.

    Args:
        loader: The loader to wrap.
        to_device: As for `TrainerLoader`.
        counts: Returns how many batches the trainer has started to train on, and how many it accumulates for a step.
        condition: The condition for saving, for the error message.
    """

    def __init__(self, loader: SavableLoader, to_device: Any, counts: Callable[[], Any], condition: str) -> None:
        super().__init__(loader, to_device=to_device)
        self._counts, self._condition = counts, condition

    def check(self) -> None:
        """Raise `SavableError` also in the middle of a gradient accumulation."""
        super().check()
        begun, step_size = self._counts()
        if done := begun % step_size:
            raise SavableError(
                f"the gradients of {done} of {step_size} batches would be lost. Save only where {self._condition}."
            )


class _YieldedBatch(NamedTuple):
    """Batch that the trainer got."""

    before: Position  # position of the loader before the batch
    skipped: list[SlotSpan]  # slots skipped between the previous batch and this one
    number: int  # counted from 1, since the run started or was resumed
    begun_at_start: int  # the trainer's count of started batches before batch 1
    begun: int  # the trainer's count of started batches when this one was yielded


class _LazyIterator:
    """Iterator that calls `begin` when its first batch is requested, and that continues after an error of `take`."""

    def __init__(self, begin: Callable[[], None] | None, take: Callable[[], Any] | None) -> None:
        self._begin, self._take = begin, take  # None once `begin` was called, or `take` has ended

    def __iter__(self) -> _LazyIterator:
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


def reject_acknowledging(loader: Any) -> None:
    """Raise ValueError for a loader that waits for acknowledgements of rows.

    No trainer acknowledges them.

    Args:
        loader: The loader of a trainer.

    Raises:
        ValueError: The loader waits for acknowledgements.
    """
    if isinstance(loader, SavableLoader) and settings_of(loader).acknowledge:
        raise ValueError("acknowledge=True is for your own training loop. Remove it for a trainer.")


def check_peers(loaders: Any, processes: int, sizes: Mapping[str, int], mesh: str) -> Any:
    """Check that processes that train on the same batch get the same batches.

    Args:
        loaders: A loader, or a container of loaders. Those of other libraries are not checked.
        processes: The number of processes of the trainer.
        sizes: The sizes of the dimensions of its mesh along which processes need the same batches, by name.
        mesh: The expression for the mesh, for the error.

    Returns:
        The loaders.

    Raises:
        ValueError: A loader has more ranks than the trainer has data-parallel ranks.
    """
    shared = tuple(name for name, size in sizes.items() if size > 1)
    most_ranks = processes // math.prod(sizes.values())
    if shared and any(
        isinstance(loader, SavableLoader) and run_of(loader).ranks.world_size > most_ranks
        for loader in loaders_in(loaders)
    ):
        advice = f"Pass ranks=sp.Ranks.of({mesh}, share={shared})."
        raise ValueError(f"processes of {' and '.join(shared)} need the same batches. {advice}")
    return loaders


def loaders_in(loaders: Any) -> list[Any]:
    """Return the loaders in a dict, list or tuple, or a single one, as a list.

    Args:
        loaders: A loader, or a container of loaders.
    """
    values = list(loaders.values()) if isinstance(loaders, dict) else loaders
    return list(values) if isinstance(values, list | tuple) else [values]


def length_of(batches: Any) -> int | None:
    """Return the number of batches of an epoch, or None if unknown.

    Args:
        batches: A loader, or an object that wraps it.
    """
    with suppress(TypeError):
        return len(batches)
    return None


def check_restarting(loaders: Any) -> Any:
    """Check that every `SavableLoader` restarts at each evaluation.

    Args:
        loaders: A loader, or a container of loaders. Those of other libraries are not checked.

    Returns:
        The loaders.

    Raises:
        ValueError: A loader was created without `on_iter="restart"`, so it would continue an interrupted evaluation.
    """
    for loader in loaders_in(loaders):
        if isinstance(loader, SavableLoader) and settings_of(loader).on_iter != "restart":
            raise ValueError(
                'set on_iter="restart" in a loader for evaluation, so that each evaluation starts at the first batch.'
            )
    return loaders
