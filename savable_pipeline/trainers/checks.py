"""What integrations check: how far a trainer is ahead, what else moves its loader, and what it evaluates on.

given     1   2   3   4   5    counted here, from where the run began or was resumed
begun     1   2   3   4        the trainer's own counts, from any start: it fetches 1 ahead
trained   1   2                the optimizer has stepped on these: the state saved now has lag 3

Between the return of a batch and the moment when the trainer counts it as begun, one more may be on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.savable_loader import SavableLoader, settings_of


class Counts(NamedTuple):
    """The counts of `Ahead`, from where the run began or was resumed.

    Attributes:
        given: Batches given to the trainer.
        start: What the trainer had begun before the first of them; None before it.
        begun_at_last: What it had begun when the last one was given; None before the first.
    """

    given: int = 0
    start: int | None = None  # what the trainer had begun before the first of them
    begun_at_last: int | None = None  # what it had begun when the last one was given


class Ahead:
    """Compares the batches given with the trainer's own counts of those begun and trained on.

    Args:
        trained: Returns the number of batches trained on. None: the trainer trains on each batch before it takes the
            next one, and is never ahead.
        most: How many batches the trainer may have fetched beyond those begun.
        begun: Returns the number of batches begun. None: the same as `trained`.
    """

    def __init__(self, trained: Callable[[], int] | None, most: int, begun: Callable[[], int] | None = None) -> None:
        self._trained = trained
        self._begun = begun or trained
        self._most = most
        self.restart()

    def restart(self) -> None:
        """Start counting here."""
        self.counts = Counts()

    def begin(self, begun: int) -> None:
        """Set where an iterator began, unless a batch has been given already.

        Args:
            begun: The trainer's count at that moment.
        """
        if not self.counts.given:
            self.counts = Counts(start=begun)

    def give(self) -> None:
        """Count a batch."""
        given, start, _ = self.counts
        begun = self.begun
        self.counts = Counts(given + 1, begun if start is None else start, begun)

    @property
    def begun(self) -> int:
        """The trainer's count of the batches that it has begun to train on; 0 if it has none."""
        return 0 if self._begun is None else self._begun()

    @property
    def batches(self) -> int:
        """The number of batches given but not trained on."""
        given, start, _ = self.counts
        return given - max(0, self._trained() - (start or 0)) if given and self._trained is not None else 0

    @property
    def _fetched(self) -> int:
        """The number of batches given but not begun."""
        return self.counts.given - (self.begun - (self.counts.start or 0))

    def check(self) -> None:
        """Check that the trainer has skipped no batch.

        Raises:
            SavableError: The trainer is further ahead than it ever is, or behind: it skipped batches.
        """
        given = self.counts.given
        if self._begun is None or not given:
            return
        on_its_way = self.begun == self.counts.begun_at_last
        if not 0 <= self._fetched <= self._most + on_its_way:
            raise SavableError(
                f"{given} batches were given since the run began or was resumed, but the trainer trained on "
                f"{given - self._fetched} of them and fetches at most {self._most} ahead: it skips batches. "
                "The state says where to continue, so switch the trainer's own skipping off"
            )


class MoveCheck:
    """The epoch and slot at which a loader was left last.

    Args:
        run: The run of the loader.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.leave()

    def leave(self) -> None:
        """Remember the present place."""
        self._left_at = self._now

    @property
    def _now(self) -> tuple[int, int]:
        position = self._run.position
        return position.epoch, position.slot

    def check(self) -> None:
        """Check that the loader still stands there.

        Raises:
            SavableError: It stands elsewhere.
        """
        now = self._now
        if now != self._left_at:
            raise SavableError(
                f"the loader was left at slot {self._left_at[1]} of epoch {self._left_at[0]}, but stands at slot "
                f"{now[1]} of epoch {now[0]}: something else took batches of it, skipped some or restored it a second "
                "time. Restore through the trainer alone, and take batches from what the trainer was given"
            )


def refuse_acknowledging(loader: Any) -> None:
    """Check that a loader keeps no account of rows in flight, which no trainer acknowledges.

    Args:
        loader: What a trainer is to take batches from.

    Raises:
        ValueError: It does.
    """
    if isinstance(loader, SavableLoader) and settings_of(loader).acknowledge:
        raise ValueError(
            "this loader was made with acknowledge=True, for a loop of your own that says which rows are done: a "
            "trainer's integration counts batches, so leave it out here"
        )


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
                'a loader for evaluation needs on_iter="restart": each evaluation begins at the start then, also after '
                "one that was broken off, by a sanity check or a limit on its batches"
            )
    return made
