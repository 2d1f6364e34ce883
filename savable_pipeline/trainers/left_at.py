"""`LeftAt`: remembers where a loader was left, to notice when something else moves it."""

from __future__ import annotations

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.run import Run


class LeftAt:
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
