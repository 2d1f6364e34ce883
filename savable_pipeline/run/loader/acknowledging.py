"""`Acknowledging`: the methods of a loader with which a trainer says what became of the rows that it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from savable_pipeline.run.loader.acknowledgements import InFlight
from savable_pipeline.run.loader.deciding import Deciding
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.run import Run

if TYPE_CHECKING:
    import torch


class Acknowledging(Deciding):
    """Base of `SavableLoader`; without `acknowledge=True` its methods raise ValueError."""

    _run: Run

    @property
    def _rows(self) -> RowsInFlight:
        if self._run.rows is None:
            raise ValueError("this loader keeps no account of rows in flight: make it with acknowledge=True")
        return self._run.rows

    def receipts(self) -> torch.Tensor:
        """Return the receipts of the rows of the batch given last; a batch that is a dict has them as "receipts" too.

        A row is an item, or a pack, of the batch. Its receipt is the same in each resume and on any rank: its slot, and
        its number in the batch. In a finite run, whose slots begin anew in each epoch, the slot has the epoch above it:
        `epoch << 40 | slot`. Rows that must not be trained on have -1: fillers, and rows that were acknowledged before
        their batch came again.

        Returns:
            int64 (rows, 2); (0, 2) before the first batch.

        Raises:
            ValueError: The loader was made without `acknowledge=True`.

        Example:
            >>> class Numbers(sp.TaskEncoder):
            ...     def encode(self, sample, rng):
            ...         return sample.json()["id"]
            >>> def pipeline(lane):
            ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=2)
            >>> loader = sp.SavableLoader(pipeline, seed=7, acknowledge=True)
            >>> first, second = (next(loader), loader.receipts()), (next(loader), loader.receipts())
            >>> loader.done(second[1])
            >>> loader.dropped(first[1][:1], "stale")
            >>> resumed = sp.SavableLoader(pipeline, seed=7, acknowledge=True)
            >>> resumed.load_state_dict(loader.state_dict())
            >>> bool((next(resumed) == first[0]).all()), resumed.receipts().tolist()
            (True, [[-1, -1], [0, 1]])
        """
        return self._rows.receipts(self._run.position)

    def done(self, receipts: Any) -> None:
        """Say that rows were trained on: they do not come again. In any order, from any thread.

        Receipts that are not in flight are counted, as `acknowledged/unknown` in `stats()`.

        Args:
            receipts: Integers (rows, 2), of any batches; -1 is passed over.

        Raises:
            ValueError: These are no receipts, or the loader was made without `acknowledge=True`.
        """
        self._rows.table.acknowledge(receipts, "done")

    def dropped(self, receipts: Any, reason: str) -> None:
        """Say that rows will not be trained on, such as stale ones: they do not come again, and are counted by reason.

        Args:
            receipts: As for `done`.
            reason: Why, in few words: `acknowledged/dropped/REASON` in `stats()`.

        Raises:
            ValueError: As for `done`.
        """
        self._rows.table.acknowledge(receipts, "dropped", reason)

    def again(self, receipts: Any) -> None:
        """Ask for rows again: their batches come in the next batches that are taken here, before those made ahead.

        Other rows of these batches have -1 there, and rows that are done by then. Such a batch takes no slot, so this
        rank takes one more than the others: where ranks step together, ask for equally many batches on each.

        Args:
            receipts: As for `done`, of rows that this rank was given.

        Raises:
            ValueError: As for `done`.
        """
        self._rows.table.acknowledge(receipts, "again")

    def in_flight(self) -> InFlight:
        """Return how many rows this rank was given and has not acknowledged, and the oldest.

        Rows that will come again count, too: right after `load_state_dict` they are all that do.

        Returns:
            `rows`, and `oldest`, the receipt of one; None without any.

        Raises:
            ValueError: The loader was made without `acknowledge=True`.
        """
        return self._rows.table.in_flight()
