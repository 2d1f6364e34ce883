"""`Ahead`: how many batches a trainer has fetched beyond those that it has trained on.

given     1   2   3   4        counted here, from where the run began or was resumed
trained   1   2   3            the trainer's own count, from any start
                      └ 1 ahead: the lag of the state that is saved now
"""

from __future__ import annotations

from collections.abc import Callable

from savable_pipeline.errors import SavableError


class Ahead:
    """Counts the batches that are given against `trained()`, which may be at most `most` behind.

    Without `trained` the trainer trains on each batch before it takes the next one: it is never ahead.
    """

    def __init__(self, trained: Callable[[], int] | None, most: int) -> None:
        self._trained = trained
        self._most = most
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._given = 0
        self._trained_before = 0  # the trainer's count when the first batch from here on was given

    def give(self) -> None:
        """Count a batch."""
        if not self._given and self._trained is not None:
            self._trained_before = self._trained()
        self._given += 1

    @property
    def batches(self) -> int:
        """How many are given and not trained on."""
        if self._trained is None or not self._given:
            return 0
        return self._given - (self._trained() - self._trained_before)

    def check(self) -> None:
        """Raise `SavableError` where the trainer is further ahead than it ever is, or behind: it skipped batches."""
        if not 0 <= self.batches <= self._most:
            raise SavableError(
                f"{self._given} batches were given since the run began or was resumed, but the trainer trained on "
                f"{self._given - self.batches} of them and fetches at most {self._most} ahead: it skips batches. "
                "The state says where to go on, so switch the trainer's own skipping off"
            )
