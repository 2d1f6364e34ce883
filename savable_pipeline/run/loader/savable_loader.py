"""`SavableLoader`: gives a rank its batches in slot order, and saves and restores where it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from savable_pipeline.errors import EncodeError, WorkerError
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.trace import Trace, source_names
from savable_pipeline.run.loader.trainer_calls import caller, refuse_dataset, refuse_trainer, warn_unsaved
from savable_pipeline.stages.pipeline import Pipeline, data_path

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class SavableLoader:
    """The batches of a pipeline, in an order that depends on the data, the settings, `seed` and `lanes` alone.

    `pipeline` is a function that builds the stages of a lane. `num_workers=0` runs it in this process; workers get it
    as it is when the loader is made. `rank` and `world_size`, of the data-parallel group, come from torch.distributed,
    `group` or `mesh` unless they are given. A finite run ends with `tail="stop"` before the first round (a batch of
    each lane) for which some lane has no batch, with `tail="pad"` after the last slot that holds a sample, rounded up
    to a step of all ranks: then every sample comes, and `batch["valid"]` marks the rows that count. `prefetch` is the
    number of batches that a worker may be ahead, `timeout` the seconds that one batch may take before its worker is
    replaced, `max_restarts` the number of workers that may be replaced.

    `ids=True` adds to each batch, a dict, the key "sample_ids": int64 (rows, 3), the source (its number in `sources`),
    index and part of each row's sample; -1 for rows that only fill up. Where rows hold several samples, as packs do, it
    has a row for each sample, and "sample_rows", int64 (samples,), is the row of the batch that each lies in.

    `ledger` is a folder to which each rank appends what it is given, so that `savable ledger` can tell when a sample
    was, and make any batch again; see the page on the ledger. A batch that cannot be written is not given.

    An epoch ends when its last batch is given. With `on_iter="continue"` each `iter()` goes on where the loader is,
    which then is the start of the next epoch. With `on_iter="restart"`, for evaluation, each begins epoch 0 anew; only
    the first one after `load_state_dict` goes on. Workers live from pass to pass. Raises ValueError for wrong settings.

    `epoch_slots` cuts a run without end into epochs of so many slots of all ranks, a multiple of the lanes, for a
    trainer that wants epochs with a length: after them StopIteration is raised, and the next `iter()` goes on. It
    changes no order and may differ from run to run; a step is of the epoch that its first slot lies in.

    One thread iterates at a time; `state_dict()` may be called from another.

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

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        seed: int,
        lanes: int = 96,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        tail: Literal["stop", "pad"] = "stop",
        on_iter: Literal["continue", "restart"] = "continue",
        epoch_slots: int | None = None,
        ids: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        max_restarts: int = 100,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self._run = Run(LoaderSettings(**arguments))

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch (pass of a finite pipeline) that the batch given last is of.

        Once StopIteration has been raised, or `iter()` has begun the next epoch, it is that one's.
        """
        return self._run.epoch

    @property
    def sources(self) -> list[str]:
        """The sorted names of the sources of a `Blend`, "text/web" in nested ones; [""] without one.

        Opens the shards, and on first use indexes them.
        """
        return list(source_names(self._run.local.last_stage).values())

    # Iterating.

    def __iter__(self) -> SavableLoader:
        warn_unsaved(caller(), self._run)
        iter(self._run)
        return self

    def __next__(self) -> Any:
        try:
            return self._run.__next__()  # `next` would be a call that Python may deliver a signal behind: see there
        except (EncodeError, WorkerError) as error:
            raise error.with_traceback(None)  # noqa: B904  # the same error; how it came here helps no one

    def __len__(self) -> int:
        """How many batches this rank gets in an epoch. Raises TypeError where that cannot be known beforehand.

        It can with `epoch_slots`, and for a finite pipeline without packing whose encoder says that it is `one_to_one`.
        """
        length = self._run.length()
        if length is None:
            raise TypeError(
                "the length of this loader is not known: it is for a finite pipeline (epochs=1) without packing whose "
                "encoder sets one_to_one = True, or with epoch_slots=; for torch's DataLoader: iterate over this "
                "loader itself"
            )
        return length

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a SavableLoader has no items by number: it takes the place of torch's DataLoader, so iterate over it "
            "itself; for torchdata's StatefulDataLoader there is sp.StatefulDataset"
        )

    def __bool__(self) -> bool:
        return True  # whether its length is known or not

    if not TYPE_CHECKING:  # a type checker knows all attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name == "dataset":
                refuse_dataset()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def skip(self, slots: int) -> None:
        """Pass over the next `slots` slots of all ranks together, as after a spike of the loss. Call it on each rank.

        No batch of them is made, and workers pass over theirs side by side. An epoch ends where it would have, and what
        is left of `slots` is not taken from the next one. Once an epoch's last batch has been given or skipped, the
        slots are the next epoch's, in a running loader as in one that was resumed there; a `for` loop still ends, and
        the next `iter()` goes on behind them. Raises ValueError if a step of all ranks would be cut.
        """
        self._run.check_nothing_held()
        self._run.skip(slots)

    def close(self) -> None:
        """End the workers and close the shards, after a last look at them. Iterating again goes on at the same place.

        Raises `ShardError` if a shard was overwritten while batches were read from it that were given; where another
        error is under way, that is logged.
        """
        self._run.close()

    def __enter__(self) -> SavableLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving and restoring.

    def state_dict(self, *, lag: int = 0) -> dict[str, Any]:
        """Where this rank is after the batch given last, or `lag` batches before: a flat dict of int and bytes.

        After an epoch's last batch that is the start of the next one. It holds the rank's own lanes. Starts nothing,
        waits for nothing. A trainer that fetches one batch ahead takes `lag=1` always: before any batch has been given
        since the loader was made, loaded or began the epoch, that is where it stands. What was skipped since the batch
        that is taken back comes again: skip it again after loading. Raises ValueError for a lag beyond the batches that
        have been given since, or beyond 16; `SavableError` where a trainer asks that keeps rank 0's state only, or
        fetches ahead, or behind an `OnDevice`: `savable_pipeline.trainers` has what it takes; `ShardError` if a shard
        was overwritten while batches were read from it that were given: without workers the shards are looked at,
        workers may have told.
        """
        refuse_trainer(caller(), caller(up=1), self._run.ranks.world_size)
        self._run.check_nothing_held()
        return self._run.state_dict(lag)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Go on from where `state` was saved, by any number of ranks and workers, as long as it has our lanes.

        `allow` names fields that may differ from the saved ones, as `CheckpointMismatchError` calls them. With "shards"
        new shards, which lie after all old ones, join at the epoch after the last that any lane has begun: that takes
        the state of all lanes (`global_state_dict`). With "joins" a `Join` may be added or exchanged. Raises that
        error if another field differs or a lane is missing, `StateError` if the state is damaged; then nothing has
        changed here.
        """
        self._run.check_nothing_held()
        self._run.load_state_dict(state, allow)

    def save_state(self) -> dict[str, Any]:
        """The same as `state_dict()`."""
        self._run.check_nothing_held()
        return self._run.state_dict(0)

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """The same as `load_state_dict(state)`."""
        self.load_state_dict(state)

    def global_state_dict(self, group: dist.ProcessGroup | None = None, *, lag: int = 0) -> dict[str, Any]:
        """The state with the lanes of all ranks, on each of them; `lag` as in `state_dict`. Collective."""
        self._run.check_nothing_held()
        return self._run.global_state(group, lag=lag)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a SavableLoader cannot be copied or pickled: it holds open shards, shared memory and workers. Make it in "
            "the process that uses it (give a function that makes it), and go on with load_state_dict(state_dict())"
        )

    def __savable_run__(self) -> Run:
        """What `trainers`, `verify` and `testing` move, save and look at: a protocol inside of the library."""
        return self._run

    # Looking at it.

    def stats(self) -> dict[str, int | float]:
        """Counters of this rank since the loader was made, by flat names; rates since the last call.

        `wait_s` is the trainer's time in `next`, `seconds/STAGE` the workers' (measured on some batches),
        `STAGE/skipped/REASON` the samples left out, `source/NAME/samples` those that a source of a `Blend` gave. The
        page on operations lists all.
        """
        return {**self._run.stats.numbers(), **self._run.prefetcher.numbers()}

    def trace(self, *, lag: int = 0) -> Trace:
        """The slot and lane of the last batch given to this rank, and (shard, key, ref) of each sample in it, in order.

        `lag`: of the batch that many before the last one. The refs came with the batch; only keys are read. Raises
        ValueError if no such batch has been given since the loader was made or loaded, or began the epoch, or if it
        lies more than 16 batches back.
        """
        return self._run.trace(lag)

    def __repr__(self) -> str:
        settings, position = self._run.settings, self._run.position
        shown = f"seed={settings.seed}, lanes={settings.lanes}, num_workers={settings.num_workers}"
        rank = f"rank {position.ranks.rank} of {position.ranks.world_size}"
        place = f"at slot {position.slot} of epoch {position.epoch}"
        if settings.epoch_slots is not None:
            place = f"at slot {position.slot}, in epochs of {settings.epoch_slots} slots"
        return f"SavableLoader({shown}): {rank}, {place}\n{data_path(self._run.local.last_stage)}"


def run_of(loader: SavableLoader) -> Run:
    """The run that a loader shows."""
    return loader.__savable_run__()


def settings_of(loader: SavableLoader) -> LoaderSettings:
    """The settings that a loader was made with: for `verify` and `trainers`."""
    return run_of(loader).settings
