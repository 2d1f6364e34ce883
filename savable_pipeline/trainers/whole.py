"""`Whole`: a loader as a trainer takes it. Its state is that of all ranks, after the batch that was trained on last.

    SavableLoader ── batch ──▶ Whole ── place(batch) ──▶ trainer
                              given            trained()         Ahead: given - trained

A trainer may fetch ahead of what it trains on (Lightning does, by one batch, where the loader has no length). It knows
how many batches it has trained on, `Whole` how many it gave; both count from where the run began or was resumed here.
The difference is the `lag` of the state that is saved. Where it is more than the trainer ever fetches ahead, the
trainer has skipped batches: it was wired to skip, beside a state that says where to go on. That is an error.

An integration makes a `Whole` with the trainer's counter (`trained`), how far it may fetch ahead (`most_ahead`) and
what moves a batch to its device (`place`), hands it to the trainer in the place of the loader, and has the trainer call
`state_dict()` on every rank when it saves, and `load_state_dict()` on every rank before the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from savable_pipeline.loader.savable_loader import SavableLoader, run_of
from savable_pipeline.state.state_dict import merge_states
from savable_pipeline.trainers.ahead import Ahead
from savable_pipeline.trainers.left_at import LeftAt


class Whole:
    """The batches of `loader`, and the state with the lanes of all ranks on each of them.

    `trained` gives the number of batches that this rank's trainer has trained on, from any start; without it, it trains
    on each batch before it takes the next one. `most_ahead` is how many it may have fetched beyond that. `place` moves
    a batch to the trainer's device. Batches that the trainer fetched and left when it began another pass are given
    again. Each `iter()` begins with its first batch, so that one that is thrown away takes nothing.

    Between two batches only this object may move the loader: by `load_state_dict` and `skip`.

    >>> from savable_pipeline.trainers.whole import Whole
    >>> def pipeline(lane):
    ...     return sp.Batcher(sp.TarShardReader("shards/", lane), size=4)
    >>> trained = 0
    >>> batches = Whole(sp.SavableLoader(pipeline, seed=7), trained=lambda: trained, most_ahead=1)
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
        most_ahead: int = 0,
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        if not isinstance(loader, SavableLoader):
            raise TypeError(f"Whole takes a SavableLoader, not {type(loader).__name__}")
        self._loader = loader
        self._run = run_of(loader)
        self._ahead = Ahead(trained, most_ahead)
        self._place = place
        self._left = LeftAt(self._run)

    def _mark(self) -> None:
        """Count from here."""
        self._ahead.restart()
        self._left.leave()

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self._run.ranks.world_size

    @property
    def epoch(self) -> int:
        """As that of the loader."""
        return self._loader.epoch

    @property
    def ahead(self) -> int:
        """How many batches the trainer has fetched beyond those that it has trained on."""
        return self._ahead.batches

    def check(self) -> None:
        """Raise `SavableError` if batches were skipped, or the loader was moved by anyone but this object."""
        self._left.check()
        self._ahead.check()

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        self._left.check()
        self._take_back()
        for batch in self._loader:
            self._ahead.give()
            self._left.leave()
            yield batch if self._place is None else self._place(batch)
            self._left.check()

    def _take_back(self) -> None:
        """Stand after the batch that was trained on last: what was fetched beyond it comes again."""
        if self.ahead > 0:
            self._loader.load_state_dict(self._run.state_ago(self.ahead))
            self._mark()

    def __len__(self) -> int:
        """As that of the loader: TypeError where it is not known."""
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    @property
    def dataset(self) -> Any:
        """Raises AttributeError: what looks for a dataset means to skip the batches of a run that is resumed."""
        raise AttributeError(
            "a SavableLoader has no dataset, and needs no skip_first_batches or the like: its saved state says where "
            "to go on. Leave the skipping out (Hugging Face Trainer: ignore_data_skip=True)"
        )

    def skip(self, slots: int) -> None:
        """As `SavableLoader.skip`, of batches that the trainer has not fetched yet. Call it on each rank."""
        self._left.check()
        self._take_back()
        self._loader.skip(slots)
        self._mark()

    def close(self) -> None:
        """As `SavableLoader.close`."""
        self._loader.close()

    # Saving and restoring.

    def state_dict(self) -> dict[str, Any]:
        """The state with the lanes of all ranks after the batch that was trained on last. Collective.

        A flat dict of int and bytes, the same on each rank; any number of ranks goes on from it. Raises `SavableError`
        if the trainer skips batches.
        """
        self.check()
        return merge_states(self._run.ranks.gather(self._run.state_ago(self.ahead)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `SavableLoader.load_state_dict`. Call it on each rank, before the trainer takes its first batch."""
        self._loader.load_state_dict(state)
        self._mark()
