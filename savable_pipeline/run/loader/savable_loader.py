"""`SavableLoader`: yields a rank's batches in slot order, and saves and restores its position."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from savable_pipeline.core.on_error import shortened
from savable_pipeline.core.weights import Weight
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.loader import trainer_calls
from savable_pipeline.run.loader.acknowledgements import InFlight
from savable_pipeline.run.loader.decided import Excluded
from savable_pipeline.run.loader.ranks import RanksLike
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import Acknowledge, LoaderSettings
from savable_pipeline.run.loader.trace import Trace, source_names
from savable_pipeline.stages.advice import advise
from savable_pipeline.stages.pipeline import PipelineFunction

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


_ADVICE = {  # for the options of other loaders
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
    """Yields the batches of a pipeline, in an order set by the data, the settings, `seed` and `lanes` alone.

    An epoch ends when its last batch is given. One thread iterates at a time; `state_dict()` may be called from
    another.

    Args:
        pipeline: Builds the stages of a lane.
        seed: Seed of all random numbers.
        lanes: Logical workers: fixed for the run, a multiple of each world size that it may have. None: of a loaded
            state; else 96, or fewer for small data.
        num_workers: Worker processes of this rank, kept from pass to pass; 0 works in this process.
        ranks: The data-parallel rank: (rank, world_size), a process group, a one-dimensional device mesh or
            `sp.Ranks`. None: from torch.distributed, else (0, 1).
        pin_memory: Copy tensors to page-locked memory.
        tail: A finite run ends with "stop" before the first round (a batch of each lane) that some lane cannot fill;
            with "pad" after the last sample, filled up to a step of all ranks; `batch["valid"]` marks the rows that
            count.
        on_iter: "continue" where the loader is, or "restart", for evaluation, at epoch 0, but for the first `iter()`
            after `load_state_dict`.
        epoch_slots: Slots of an endless run's epochs, of all ranks, a multiple of the lanes; may differ between runs.
        sample_ids: Add "sample_ids" to each batch, which must be a dict: int64 (rows, 3), source (number in `sources`),
            index and part, -1 in padding rows. If a row has several samples, there is one entry for each, and its row
            is in "sample_rows", int64 (samples,).
        acknowledge: Rows are in flight, and in the state, until `acknowledge` or `drop` has their receipts;
            `sp.Acknowledge(max_in_flight=)` bounds them.
        ledger: Folder where each rank records its batches, for `sp.Ledger`; one that cannot be recorded is not given.
        workers: `sp.Workers`: start method, time-out, restarts and prefetch of the worker processes.

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
        self._run = Run(LoaderSettings.of_loader(**arguments))

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch (pass of a finite pipeline) of the batch given last.

        Once StopIteration has been raised, or `iter()` has begun the next epoch, it is the next one's.
        """
        return self._run.epoch

    @property
    def sources(self) -> list[str]:
        """The sorted names of the sources of a `Blend`, "text/web" in nested ones; [""] without one.

        Opens the shards, and indexes them on first use.
        """
        return list(source_names(self._run.local.last_stage).values())

    # Iterating.

    def __iter__(self) -> SavableLoader:
        trainer_calls.warn_unsaved(trainer_calls.caller(), self._run)
        iter(self._run)
        return self

    def __next__(self) -> Any:
        try:
            return self._run.__next__()  # `next` would be a call that Python may deliver a signal behind: see there
        except (SavableError, TypeError, ValueError) as error:
            raise shortened(error) from error.__cause__

    def __len__(self) -> int:
        """The number of batches that this rank gets in an epoch.

        It is known with `epoch_slots`, and for a finite pipeline without packing whose encoder sets `one_to_one`.

        Raises:
            TypeError: It cannot be known beforehand.
        """
        length = self._run.length()
        if length is None:
            trainer_calls.refuse_samplers(trainer_calls.caller(), trainer_calls.caller(up=1))
            raise TypeError(
                "the length of this loader is not known. Set epoch_slots=, or use epochs=1 without packing and "
                "encoders with one_to_one = True."
            )
        return length

    def __getitem__(self, index: object) -> NoReturn:
        trainer_calls.refuse_items()

    def __bool__(self) -> bool:
        return True  # whether its length is known or not

    if not TYPE_CHECKING:  # a type checker knows all attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name == "dataset":
                trainer_calls.refuse_dataset()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def skip(self, slots: int) -> None:
        """Skip slots without building their batches, as after a spike of the loss. Call it on each rank.

        It equals as many calls of `next`. Samples are not even encoded or read where none can be lost: with an encoder
        that sets `one_to_one` (and `length_of`, if items are packed), on_error="raise", and no filter by content.
        Workers pass over theirs side by side. An epoch ends where it would have, and the rest of `slots` is not taken
        from the next one. Once an epoch's last batch has been given or skipped, the slots are the next epoch's, in a
        running loader as in one that was resumed there; a `for` loop still ends, and the next `iter()` continues after
        them.

        Args:
            slots: How many slots, of all ranks together.

        Raises:
            ValueError: A step of all ranks would be cut.
        """
        self._run.check_not_ahead()
        self._run.skip(slots)

    def close(self) -> None:
        """Stop the workers and close the shards, after a last look at them.

        Iterating again continues at the same place.

        Raises:
            ShardError: A shard was overwritten while batches read from it were given. During another error this is
                logged.
        """
        self._run.close()

    def __enter__(self) -> SavableLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving and restoring.

    def state_dict(self, *, lag: int = 0) -> dict[str, Any]:
        """Return where this rank is after the batch given last: a flat dict of int and bytes, with its own lanes.

        Starts nothing and waits for nothing. After an epoch's last batch it is the start of the next epoch.

        Args:
            lag: How many batches earlier, up to 16: a trainer that fetches one batch ahead always takes 1. Before the
                first batch since the loader was made, loaded or began the epoch, it is where the loader is. What was
                skipped since the batch taken back comes again: skip it again after loading.

        Returns:
            The state, which `torch.save` and torch.distributed.checkpoint take.

        Raises:
            ValueError: Fewer than `lag` batches have been given since.
            SavableError: A trainer asks that keeps rank 0's state only or fetches ahead (use
                `savable_pipeline.trainers`), or the loader is behind an `OnDevice`.
            ShardError: A shard was overwritten while batches read from it were given. Without workers the shards are
                looked at; with workers it is what they have reported.
        """
        trainer_calls.refuse_trainer(trainer_calls.caller(), trainer_calls.caller(up=1), self._run.ranks.world_size)
        self._run.check_not_ahead()
        return self._run.state_dict(lag)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Continue from a saved state, on any number of ranks and workers.

        If it raises, nothing has changed.

        Args:
            state: A state that holds this rank's lanes.
            allow: Names of fields that may differ from the saved ones, as `CheckpointMismatchError` names them. With
                "shards", new shards that sort after all old ones join at the epoch after the last that any lane has
                begun: that takes the state of all lanes (`global_state_dict`). With "joins", a `Join` may be added or
                exchanged.

        Raises:
            CheckpointMismatchError: Another field differs, or a lane is missing.
            StateError: The state is damaged.
        """
        self._run.check_not_ahead()
        self._run.load_state_dict(state, allow)

    def save_state(self) -> dict[str, Any]:
        """The same as `state_dict()`."""
        return self.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """The same as `load_state_dict(state)`.

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
        """What `trainers`, `verify` and `testing` move, save and look at: a protocol inside of the library."""
        return self._run

    # What a trainer says of it while it trains.

    def reconfigure(
        self,
        *,
        weights: Mapping[str, Weight] | None = None,
        exclude: Iterable[Excluded] | None = None,
        max_length: int | None = None,
    ) -> int:
        """Change the run from the next step on. Call it on each rank alike, between the same two steps.

        It is as if the run was stopped here and resumed with other settings: batches made ahead are made anew. What
        was decided is in the state, so that a resume needs no change of the code, and in the ledger.

        Args:
            weights: The weight of each source of a `Blend`, named as in `sources`; instead of a `Schedule`, too.
                Samples drawn before stay in buffers.
            exclude: Keys of samples, or pairs of a source and a key, that are given no more: as with `exclude=` of a
                reader, they leave buffers and open packs, too, and rows in flight, which are closed.
            max_length: Of packs that the `OnlinePacker` begins, at most its own. Open packs keep theirs, and an item
                that was held and is longer has a pack to itself.

        Returns:
            The slot from which it holds; in later epochs of a finite run `epoch << 40 | slot`, as receipts have it.

        Raises:
            ValueError: That cannot be decided in this pipeline, or other ranks, where they can communicate, decide
                otherwise.

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
            >>> loader.acknowledge(second[1])
            >>> loader.drop(first[1][:1], "stale")
            >>> resumed = sp.SavableLoader(pipeline, seed=7, acknowledge=True)
            >>> resumed.load_state_dict(loader.state_dict())
            >>> bool((next(resumed) == first[0]).all()), resumed.receipts().tolist()
            (True, [[-1, -1], [0, 1]])
        """
        return self._rows.receipts(self._run.position)

    def acknowledge(self, receipts: Any) -> None:
        """Say that rows were trained on: they do not come again. In any order, from any thread.

        Receipts that are not in flight are counted, as `acknowledged/unknown` in `stats()`.

        Args:
            receipts: Integers (rows, 2), of any batches; -1 is passed over.

        Raises:
            ValueError: These are no receipts, or the loader was made without `acknowledge=True`.
        """
        self._rows.table.acknowledge(receipts, "done")

    def drop(self, receipts: Any, reason: str) -> None:
        """Say that rows will not be trained on, such as stale ones: they do not come again, and are counted by reason.

        Args:
            receipts: As for `acknowledge`.
            reason: Why, in few words: `acknowledged/dropped/REASON` in `stats()`.

        Raises:
            ValueError: As for `acknowledge`.
        """
        self._rows.table.acknowledge(receipts, "dropped", reason)

    def requeue(self, receipts: Any) -> None:
        """Ask for rows again: their batches come in the next batches that are taken here, before those made ahead.

        Other rows of these batches have -1 there, and rows that are done by then. Such a batch takes no slot, so this
        rank takes one more than the others: where ranks step together, ask for equally many batches on each.

        Args:
            receipts: As for `acknowledge`, of rows that this rank was given.

        Raises:
            ValueError: As for `acknowledge`.
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

    # Looking at it.

    def stats(self) -> dict[str, int | float]:
        """Return the counters of this rank since the loader was made, by flat names; rates since the last call.

        `wait_s` is the trainer's time in `next`, `seconds/STAGE` the workers' (measured on some batches),
        `STAGE/skipped/REASON` the samples left out, `source/NAME/samples` those used from a source of a `Blend`. The
        page on operations lists all.
        """
        return self._run.numbers()

    def trace(self, *, lag: int = 0) -> Trace:
        """Return the slot and lane of the last batch given to this rank, and shard, key and ref of each of its samples.

        The refs came with the batch; only keys are read.

        Args:
            lag: How many batches before the last one, up to 16.

        Raises:
            ValueError: No such batch has been given since the loader was made or loaded, or began the epoch.
        """
        return self._run.trace(lag)

    def __repr__(self) -> str:
        settings, position = self._run.settings, self._run.position
        shown = f"seed={settings.seed}, lanes={settings.lanes}, num_workers={settings.num_workers}"
        rank = f"rank {position.ranks.rank} of {position.ranks.world_size}"
        place = f"at slot {position.slot} of epoch {position.epoch}"
        if settings.epoch_slots is not None:
            place = f"at slot {position.slot}, in epochs of {settings.epoch_slots} slots"
        if position.facts.decisions:
            place += f"; decided {position.facts.decisions}"
        return f"SavableLoader({shown}): {rank}, {place}\n{self._run.local.last_stage!r}"


def run_of(loader: SavableLoader) -> Run:
    """The run that a loader shows."""
    return loader.__savable_run__()


def settings_of(loader: SavableLoader) -> LoaderSettings:
    """The settings of a loader, for `verify` and `trainers`."""
    return run_of(loader).settings
