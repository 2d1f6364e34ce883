"""`Ledger`: asks a run's ledger when samples were given, and makes batches again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from savable_pipeline.run.ledger.reader import GivenBatch, LedgerFiles
from savable_pipeline.run.loader.given_keys import Found, find_keys
from savable_pipeline.run.loader.outcomes import Outcome, outcomes

if TYPE_CHECKING:
    from savable_pipeline.stages.pipeline import PipelineFunction


@dataclass(frozen=True, slots=True)
class Sighting:
    """One time that a sample was given to a rank."""

    source: str
    """The name of its source in a `Blend`; "" without one."""
    epoch: int
    slot: int
    """The slot of the batch that the sample was in."""
    step: int
    """The number of that batch among those of its rank in the epoch."""
    rank: int
    world_size: int
    """The number of ranks at that time."""
    lost: bool
    """Whether the model that saw the sample was thrown away: the run was later resumed from a place before it."""
    again: bool = False
    """Whether it was given again, since it was in flight: `SavableLoader(acknowledge=True)`."""
    outcome: str = ""
    """What became of it: "trained", "dropped: REASON", "given again", or "" where nothing was acknowledged."""

    @classmethod
    def of(cls, source: str, given: GivenBatch, outcome: Outcome) -> Sighting:
        """The record of a batch that was given."""
        batch, start = given.batch, given.start
        place = (batch.epoch, batch.slot, given.step, start.rank, start.world_size)
        return cls(source, *place, outcome.lost, bool(batch.again), outcome.name)


class Ledger:
    """What a run was given, from the folder that its loaders wrote as `ledger=`: of all its ranks and starts.

    Args:
        folder: The folder of the ledger.

    Raises:
        SavableError: There is no ledger in the folder, one that cannot be read, or those of several runs.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> with sp.SavableLoader(pipeline, seed=7, lanes=2, ledger="ledger/") as loader:
        ...     first, second = next(loader), next(loader)
        ...     key = loader.trace().samples[0].key
        >>> ledger = sp.Ledger("ledger/")
        >>> [(seen.epoch, seen.slot, seen.rank) for seen in ledger.seen([key])[key]]
        [(0, 1, 0)]
        >>> bool((ledger.batch(pipeline, slot=1) == second).all())
        True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = LedgerFiles(Path(folder))

    def seen(
        self, keys: Iterable[str], *, source: str | None = None, data: str | None = None
    ) -> dict[str, list[Sighting] | None]:
        """When the samples with these keys were given.

        The keys are read where the run read its data and as it read them. What was given after a place from which the
        run was later resumed is marked as `lost`.

        Args:
            keys: Keys of samples.
            source: Only this source of a `Blend`. Default: all.
            data: Where the samples of the source are now. Default: where the run read them.

        Returns:
            For each key, in the order of `keys`: None if no sample has it, else a record for each time that a sample
            with it was given, source by source and file of the ledger by file; an empty list if none was. A record has
            `source`, `epoch`, `slot`, `step`, `rank`, `world_size`, `lost`, `again` and `outcome`.

        Raises:
            ValueError: `keys` is one str.
            SavableError: There is no such source, the data cannot be opened as the run opened them, or they are no
                longer those that it read.
        """
        if isinstance(keys, str):
            raise ValueError(f"keys must be a list of keys, not one str: give [{keys!r}]")
        found = find_keys(self._files, keys, source=source, data=data)
        return {key: None if given is None else self._sightings(given) for key, given in found.items()}

    def _sightings(self, found: Found) -> list[Sighting]:
        became = outcomes(self._files, [(given, rows) for _, given, rows in found])
        return [Sighting.of(name, given, each) for (name, given, _), each in zip(found, became, strict=True)]

    def batch(self, pipeline: PipelineFunction, *, slot: int, epoch: int = 0) -> Any:
        """Make a batch of the run again, byte for byte as it was given.

        The lane runs from its last state in the ledger, so at most 1,000 batches are passed over first.

        Args:
            pipeline: The run's pipeline function. Settings and data must be those of the run; shards may have been
                added since.
            slot: The slot of the batch.
            epoch: Its epoch. Default: 0, the only epoch of an endless run.

        Returns:
            The batch, as the pipeline's last stage made it.

        Raises:
            SavableError: No such batch was given, or the pipeline makes it of other samples than the ledger names.
            CheckpointMismatchError: Settings or data are not those of the run.
        """
        from savable_pipeline.run.loader.made_again import make_again  # with torch, which takes seconds

        return make_again(pipeline, self._files, epoch, slot).batch
