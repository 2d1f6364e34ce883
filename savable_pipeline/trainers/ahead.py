"""`Ahead`: how many batches a trainer has fetched beyond those that it has trained on.

given     1   2   3   4   5    counted here, from where the run began or was resumed
begun     1   2   3   4        the trainer's own counts, from any start: it fetches 1 ahead
trained   1   2                the optimizer has stepped on these: 3 is the lag of the state that is saved now

Between the moment when a batch is given and the one when the trainer counts it as begun, one more may be on its way.
"""

from __future__ import annotations

from collections.abc import Callable

from savable_pipeline.errors import SavableError


class Ahead:
    """Counts the batches that are given against `begun()`, which may be at most `most` behind, and `trained()`.

    Without `begun`, a batch is begun when it is trained on. Without `trained` the trainer trains on each batch before
    it takes the next one: it is never ahead.
    """

    def __init__(self, trained: Callable[[], int] | None, most: int, begun: Callable[[], int] | None = None) -> None:
        self._trained = trained
        self._begun = begun or trained
        self._most = most
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._given = 0
        self._start: int | None = None  # what the trainer had begun before the first batch from here on
        self._begun_at_last: int | None = None  # what it had begun when the last one was given

    def begin(self, begun: int) -> None:
        """Take `begun` for where an iterator began, if nothing has been given yet."""
        if not self._given:
            self._start = begun

    def give(self) -> None:
        """Count a batch."""
        self._begun_at_last = self.begun
        if self._start is None:
            self._start = self._begun_at_last
        self._given += 1

    @property
    def begun(self) -> int:
        """The trainer's count of the batches that it has begun to train on; 0 without one."""
        return 0 if self._begun is None else self._begun()

    @property
    def batches(self) -> int:
        """How many are given and not trained on."""
        if self._trained is None or not self._given:
            return 0
        return self._given - max(0, self._trained() - (self._start or 0))

    @property
    def _fetched(self) -> int:
        """How many are given and not begun."""
        return self._given - (self.begun - (self._start or 0))

    def check(self) -> None:
        """Raise `SavableError` where the trainer is further ahead than it ever is, or behind: it skipped batches."""
        if self._begun is None or not self._given:
            return
        on_its_way = self.begun == self._begun_at_last
        if not 0 <= self._fetched <= self._most + on_its_way:
            raise SavableError(
                f"{self._given} batches were given since the run began or was resumed, but the trainer trained on "
                f"{self._given - self._fetched} of them and fetches at most {self._most} ahead: it skips batches. "
                "The state says where to go on, so switch the trainer's own skipping off"
            )
