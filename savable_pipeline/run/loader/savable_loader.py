"""`SavableLoader`: yields a rank's batches, and saves and restores its position."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from savable_pipeline.core.on_error import shortened
from savable_pipeline.core.weights import Weight
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.loader import misuse
from savable_pipeline.run.loader.acknowledgements import InFlight
from savable_pipeline.run.loader.decided import Excluded
from savable_pipeline.run.loader.observers import Trace, source_names
from savable_pipeline.run.loader.ranks import RanksLike
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import MOST_LANES, Acknowledge, LoaderSettings
from savable_pipeline.run.loader.stats import Stats
from savable_pipeline.stages.advice import advise
from savable_pipeline.stages.pipeline import PipelineFunction

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


_ADVICE = {  # advice for the options of other loaders
    "batch_sampler": "Use .bucket(bounds, size=...) instead.",
    "batch_size": "Use .batch({}) at the end of the pipeline.",
    "collate_fn": "Write it as `batch(self, items, rng)` of an sp.TaskEncoder.",
    "dataset": "Pass a pipeline: sp.SavableLoader(sp.read(path).map(function).batch(4), seed=0).",
    "drop_last": "Use .batch(size, drop_last={}).",
    "epochs": "Use sp.read(path, epochs={}).",
    "generator": "Use seed=.",
    "multiprocessing_context": "Use workers=sp.Workers(start_method={}).",
    "persistent_workers": "Remove it, because workers always persist.",
    "prefetch_factor": "Use workers=sp.Workers(prefetch={}).",
    "rank": "Use ranks=(rank, world_size).",
    "sampler": "Use subset= or exclude= of sp.read, or sp.blend with weights=.",
    "shuffle": "Use sp.read(path, shuffle={}) and .shuffle(size).",
    "timeout": "Use workers=sp.Workers(timeout={}).",
    "world_size": "Use ranks=(rank, world_size).",
}


class SavableLoader:
    """Yields the batches of a pipeline, the same ones when it resumes from a state.

    Only the data, the settings, `seed` and `lanes` set their order. An epoch ends when its last batch is yielded. One
    thread iterates at a time. Any thread may call `state_dict()`.

    Args:
        pipeline: Builds the stages of a lane.
        seed: Seed of all random numbers.
        lanes: Logical workers, fixed for the run, a multiple of each world size that it may have. None: from a loaded
            state, else 96, or fewer for small data.
        num_workers: Worker processes of this rank. With 0, this process does the work.
        ranks: The data-parallel rank: (rank, world_size), a process group, a one-dimensional device mesh or
            `sp.Ranks`. None: from torch.distributed, else (0, 1).
        pin_memory: Copy tensors to pinned memory.
        tail: What to do at the end of a finite run. "stop" ends before the first round (a batch of each lane) that a
            lane cannot fill. "pad" ends after the last sample, padded to a step of all ranks. `batch["valid"]` is False
            in padding rows.
        on_iter: "continue", or for evaluation "restart" at epoch 0, except in the first `iter()` after
            `load_state_dict`.
        epoch_slots: Slots in each epoch of an endless run, on all ranks, a multiple of the lanes. A resumed run may
            change it.
        sample_ids: Add "sample_ids" to each batch, which must be a dict: int64 (rows, 3), source (number in `sources`),
            index and part, -1 in padding rows. If a row has several samples, there is one entry for each, and its row
            is in "sample_rows", int64 (samples,).
        acknowledge: Whether rows stay in the state until `acknowledge` or `drop` gets their receipts.
            `sp.Acknowledge(max_in_flight=)` bounds their number.
        ledger: Folder where each rank records its batches, for `sp.Ledger`. A batch that cannot be recorded is not
            yielded.
        workers: `sp.Workers`, with start method, timeout, restarts and prefetch of the worker processes.

    Raises:
        ValueError: A setting is wrong.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> loader = sp.SavableLoader(pipeline, seed=7)
        >>> first, state, second = next(loader), loader.state_dict(), next(loader)
        >>> again = sp.SavableLoader(pipeline, seed=7)
        >>> again.load_state_dict(state)
        >>> bool((next(again) == second).all())
        True
    """

    @advise(_ADVICE)
    def __init__(
        self,
        pipeline: PipelineFunction,
        *,
        seed: int,
        lanes: int | None = None,
        num_workers: int = 0,
        ranks: RanksLike = None,
        pin_memory: bool = False,
        tail: Literal["stop", "pad"] = "stop",
        on_iter: Literal["continue", "restart"] = "continue",
        epoch_slots: int | None = None,
        sample_ids: bool = False,
        acknowledge: bool | Acknowledge = False,
        ledger: str | os.PathLike[str] | None = None,
        workers: Workers = Workers(),  # noqa: B008  # immutable
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        arguments["lanes"] = MOST_LANES if lanes is None else lanes
        self._run = Run(LoaderSettings(**arguments, has_default_lanes=lanes is None))

    @property
    def epoch(self) -> int:
        """Number of the epoch of the last batch, from 0.

        After StopIteration, or an `iter()` that starts the next epoch, it is that of the next epoch.
        """
        return self._run.epoch

    @property
    def sources(self) -> list[str]:
        """Sorted names of the sources of a `Blend` ("text/web" if nested), or [""].

        Opens the shards, and indexes them on first use.
        """
        return list(source_names(self._run.local.last_stage).values())

    def __iter__(self) -> SavableLoader:
        misuse.warn_unsaved(misuse.caller(), self._run.position, restarts_on_iter=self._run.settings.restarts_on_iter)
        iter(self._run)
        return self

    def __next__(self) -> Any:
        try:
            # `next(...)` would be one more call, at which Python may run a signal handler, see `Run.__next__`
            return self._run.__next__()
        except (SavableError, TypeError, ValueError) as error:
            raise shortened(error) from error.__cause__

    def __len__(self) -> int:
        """Return the number of batches that this rank gets in an epoch.

        It is known with `epoch_slots`, and for a finite pipeline without packing whose encoder sets `one_to_one`.

        Raises:
            TypeError: The number is unknown.
        """
        length = self._run.length()
        if length is None:
            misuse.reject_samplers(misuse.caller(), misuse.caller(up=1))
            raise TypeError(
                "the length of this loader is not known. Set epoch_slots=, or use epochs=1 without packing and "
                "encoders with one_to_one = True."
            )
        return length

    def __getitem__(self, index: object) -> NoReturn:
        misuse.reject_items()

    def __bool__(self) -> bool:
        return True  # whether its length is known or not

    if not TYPE_CHECKING:  # a type checker knows the existing attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name == "dataset":
                misuse.reject_dataset()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def skip(self, slots: int) -> None:
        """Skip slots without building their batches, on each rank.

        The position is the same as after `next`. Samples are neither encoded nor read if none can be lost. That needs
        an encoder that sets `one_to_one` (and `length_of` for packing), on_error="raise", and no filter by content.
        Workers skip in parallel. An epoch ends as usual, and the rest of `slots` is not skipped in the next one. After
        an epoch's last batch, the slots belong to the next epoch, in a running loader as in a resumed one. A `for` loop
        still ends, and the next `iter()` continues after them.

        Args:
            slots: How many slots, of all ranks together.

        Raises:
            ValueError: A step of all ranks would be cut.
        """
        self._run.check_not_ahead()
        self._run.skip(slots)

    def close(self) -> None:
        """Stop the workers and close the shards, after a last check of them.

        Iterating again continues at the same slot.

        Raises:
            ShardError: A shard was overwritten while batches read from it were yielded. During another error this is
                logged.
        """
        self._run.close()

    def __enter__(self) -> SavableLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self, *, lag: int = 0) -> dict[str, Any]:
        """Return the state after the last batch, a flat dict of int and bytes.

        The call starts nothing and waits for nothing. After an epoch's last batch, the state is the start of the next
        epoch.

        Args:
            lag: The state is that of this many batches earlier, up to 16. A trainer that fetches one batch ahead
                always passes 1. As long as no batch was yielded, by a new loader, after loading a state or in an
                epoch, `lag` has no effect. Slots skipped since the earlier batch are not skipped in the state, so skip
                them again after loading.

        Returns:
            The state, which `torch.save` and torch.distributed.checkpoint take.

        Raises:
            ValueError: Fewer than `lag` batches were yielded since then.
            SavableError: The caller is a trainer that saves only rank 0's state or fetches ahead (use
                `savable_pipeline.trainers`), or an `OnDevice` uses the loader.
            ShardError: A shard was overwritten while batches read from it were yielded. Without workers, this call
                checks the shards. With workers, it raises what they have reported.
        """
        misuse.reject_trainer(misuse.caller(), misuse.caller(up=1), self._run.ranks.world_size)
        self._run.check_not_ahead()
        return self._run.state_dict(lag)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Continue from a saved state, on any number of ranks and workers.

        If it raises, nothing has changed.

        Args:
            state: A state that holds this rank's lanes.
            allow: Names of fields that may differ from the saved ones, as `CheckpointMismatchError` names them. With
                "shards", new shards that sort after all old ones join at the epoch after the last that any lane has
                started: that takes the state of all lanes (`global_state_dict`). With "joins", a `Join` may be added or
                exchanged.

        Raises:
            CheckpointMismatchError: Another field differs, or a lane is missing.
            StateError: The state is damaged.
        """
        self._run.check_not_ahead()
        self._run.load_state_dict(state, allow)

    def save_state(self) -> dict[str, Any]:
        """Return the result of `state_dict()`."""
        return self.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Call `load_state_dict(state)`.

        Args:
            state: As for `load_state_dict`.
        """
        self.load_state_dict(state)

    def global_state_dict(self, group: dist.ProcessGroup | None = None, *, lag: int = 0) -> dict[str, Any]:
        """Return the state with the lanes of all ranks, on each of them. Collective.

        Args:
            group: The process group of the data-parallel ranks. None: that of the loader.
            lag: As for `state_dict`.
        """
        self._run.check_not_ahead()
        return self._run.global_state(group, lag=lag)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a SavableLoader cannot be copied or pickled. Create it in the process that uses it, and call "
            "load_state_dict(state_dict())."
        )

    def __savable_run__(self) -> Run:
        """Return the run behind the loader, for `trainers`, `verify` and `testing`."""
        return self._run

    def reconfigure(
        self,
        *,
        weights: Mapping[str, Weight] | None = None,
        exclude: Iterable[Excluded] | None = None,
        max_length: int | None = None,
    ) -> int:
        """Change the run from the next step on. Call it on each rank at the same step.

        The run continues as if it was stopped and resumed with other settings, so prefetched batches are rebuilt. The
        state and the ledger record the change, so a resume needs no change of the code.

        Args:
            weights: The weight of each source of a `Blend`, named as in `sources`. They also replace a `Schedule`.
                Samples that were already drawn stay in the buffers.
            exclude: Keys of samples, or pairs of a source and a key, to drop. As with `exclude=` of a reader, they are
                also removed from buffers, open packs and rows in flight.
            max_length: Maximum length of new packs, at most that of the `OnlinePacker`. Open packs keep theirs, and a
                longer item that is buffered gets its own pack.

        Returns:
            The first slot that the change affects. In later epochs of a finite run, the epoch is in its high bits:
            `epoch << 40 | slot`.

        Raises:
            ValueError: The pipeline does not support the change, or another rank requested a different one (compared
                only if the ranks can communicate).

        Example:
            >>> def pipeline(lane):
            ...     sources = {name: sp.TarShardReader(f"shards/{name}.tar", lane) for name in "01"}
            ...     return sp.Batcher(sp.Blend(sources, weights={"0": 1, "1": 1}), size=4)
            >>> loader = sp.SavableLoader(pipeline, seed=7, lanes=2)
            >>> _ = next(loader), next(loader)
            >>> loader.reconfigure(weights={"0": 3, "1": 1})
            2
            >>> [sample.shard for _ in range(8) for sample in next(loader)].count("0.tar")
            24
        """
        self._run.check_not_ahead()
        return self._run.reconfigure(weights=weights, exclude=exclude, max_length=max_length)

    @property
    def _rows(self) -> RowsInFlight:
        rows = self._run.observer(RowsInFlight)
        if rows is None:
            raise ValueError("receipts need acknowledge=True. Pass it to SavableLoader.")
        return rows

    def receipts(self) -> torch.Tensor:
        """Return the receipts of the last batch's rows.

        If the batch is a dict, its key "receipts" has them too. A row is an item or a pack of the batch. Its receipt
        has two numbers: the slot of the batch, and the number of the row in the batch. A repeated row has the same
        receipt, after each resume and on whichever rank. In later epochs of a finite run the slot is
        `epoch << 40 | slot`. Padding rows, and rows that were acknowledged before their batch was repeated, have -1 and
        must not be trained on.

        Returns:
            int64 (rows, 2); (0, 2) before the first batch.

        Raises:
            ValueError: The loader has no `acknowledge=True`.

        Example:
            >>> class Numbers(sp.TaskEncoder):
            ...     def encode(self, sample, rng):
            ...         return sample.json()["id"]
            >>> def pipeline(lane):
            ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=2)
            >>> loader = sp.SavableLoader(pipeline, seed=7, acknowledge=True)
            >>> first, first_receipts = next(loader), loader.receipts()
            >>> second, second_receipts = next(loader), loader.receipts()
            >>> loader.acknowledge(second_receipts)
            >>> loader.drop(first_receipts[:1], "stale")
            >>> resumed = sp.SavableLoader(pipeline, seed=7, acknowledge=True)
            >>> resumed.load_state_dict(loader.state_dict())
            >>> bool((next(resumed) == first).all()), resumed.receipts().tolist()
            (True, [[-1, -1], [0, 1]])
        """
        return self._rows.receipts(self._run.position)

    def acknowledge(self, receipts: Any) -> None:
        """Report rows that were trained on, so that they are not repeated.

        The order does not matter, and any thread may call it. Receipts that are not in flight are counted as
        `acknowledged/unknown` in `stats()`.

        Args:
            receipts: Integers (rows, 2) of any batches, where -1 is skipped.

        Raises:
            ValueError: These are no receipts, or the loader has no `acknowledge=True`.
        """
        self._rows.table.acknowledge(receipts, "done")

    def drop(self, receipts: Any, reason: str) -> None:
        """Report rows that will not be trained on, such as stale ones, with the reason.

        They are not repeated.

        Args:
            receipts: As for `acknowledge`.
            reason: A few words, for `acknowledged/dropped/REASON` in `stats()`.

        Raises:
            ValueError: As for `acknowledge`.
        """
        self._rows.table.acknowledge(receipts, "dropped", reason)

    def requeue(self, receipts: Any) -> None:
        """Repeat rows: the next batches of this rank are theirs, before prefetched ones.

        Other rows of these batches, and rows that are done by then, have -1. Such a batch takes no slot, so this rank
        gets one more than the others. If ranks step together, requeue equally many batches on each.

        Args:
            receipts: As for `acknowledge`, of rows that this rank got.

        Raises:
            ValueError: As for `acknowledge`.
        """
        self._rows.table.acknowledge(receipts, "again")

    def in_flight(self) -> InFlight:
        """Return how many rows of this rank are not acknowledged, and the oldest.

        Rows to repeat count, too, such as those of a loaded state.

        Returns:
            `rows`, and `oldest`, a receipt, or None if there are no rows.

        Raises:
            ValueError: The loader has no `acknowledge=True`.
        """
        return self._rows.table.in_flight()

    def stats(self) -> dict[str, int | float]:
        """Return counters since the loader was created, and rates since the last call.

        `wait_s` is the trainer's time in `next`, `seconds/STAGE` the workers' (measured on some batches),
        `STAGE/skipped/REASON` counts skipped samples, and `source/NAME/samples` those used from a source of a `Blend`.
        The page on operations lists all.
        """
        stats = self._run.observer(Stats)
        assert stats is not None
        return stats.numbers()

    def trace(self, *, lag: int = 0) -> Trace:
        """Return slot and lane of the last batch, and shard, key and ref of its samples.

        The refs are part of the batch, and only keys are read.

        Args:
            lag: How many batches before the last one, up to 16.

        Raises:
            ValueError: No such batch was yielded since the loader was created, was loaded or started the epoch.
        """
        return self._run.trace(lag)

    def __repr__(self) -> str:
        settings, position = self._run.settings, self._run.position
        shown = f"seed={settings.seed}, lanes={settings.lanes}, num_workers={settings.num_workers}"
        rank = f"rank {position.ranks.rank} of {position.ranks.world_size}"
        where = f"at slot {position.slot} of epoch {position.epoch}"
        if settings.epoch_slots is not None:
            where = f"at slot {position.slot}, in epochs of {settings.epoch_slots} slots"
        if position.facts.decisions:
            where += f"; decided {position.facts.decisions}"
        return f"SavableLoader({shown}): {rank}, {where}\n{self._run.local.last_stage!r}"


def run_of(loader: SavableLoader) -> Run:
    """Return the `Run` of a loader."""
    return loader.__savable_run__()


def settings_of(loader: SavableLoader) -> LoaderSettings:
    """Return the settings of a loader, for `verify` and `trainers`."""
    return run_of(loader).settings
