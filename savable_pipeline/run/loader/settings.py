"""`LoaderSettings`: the checked arguments of a loader, and `Acknowledge`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.run.engine.backend import Backend, InProcess
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.engine.pool import Pool
from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.loader.ranks import Ranks, RanksLike, find_ranks
from savable_pipeline.stages.pipeline import PipelineFunction, check_pipeline
from savable_pipeline.stages.pipeline_value import Pipeline
from savable_pipeline.stages.stage import Stage

MOST_LANES = 96  # default number of lanes; small data have fewer


@dataclass(frozen=True)
class Acknowledge:
    """`acknowledge=True` of a `SavableLoader`, with a bound.

    Args:
        max_in_flight: Most rows given here and not acknowledged here: `next` waits, and raises after the workers'
            `timeout`. None: any number.

    Raises:
        ValueError: It is less than 1.

    Example:
        >>> pipeline = sp.read("shards/").batch(4)
        >>> loader = sp.SavableLoader(pipeline, seed=7, acknowledge=sp.Acknowledge(max_in_flight=64))
    """

    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, not {self.max_in_flight}")


@dataclass(frozen=True)
class LoaderSettings:
    """Arguments of a `SavableLoader`. Raises ValueError for a wrong one."""

    pipeline: PipelineFunction
    _: KW_ONLY
    seed: int
    lanes: int = MOST_LANES
    num_workers: int = 0
    ranks: RanksLike = None
    pin_memory: bool = False
    tail: Literal["stop", "pad"] = "stop"
    on_iter: Literal["continue", "restart"] = "continue"
    epoch_slots: int | None = None
    sample_ids: bool = False
    acknowledge: bool | Acknowledge = False
    ledger: str | os.PathLike[str] | None = None
    workers: Workers = field(default_factory=Workers)
    has_default_lanes: bool = False
    """Whether the user passed no `lanes`, so that the data or a loaded state may set them."""

    def __post_init__(self) -> None:
        self._check_workers()
        check_pipeline(self.pipeline)
        if not isinstance(self.seed, int):
            raise ValueError(f"seed must be an int, not {self.seed!r}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed must fit into 64 bits, not {self.seed}")
        if self.tail not in ("stop", "pad"):
            raise ValueError(f"tail must be 'stop' or 'pad', not {self.tail!r}")
        if self.on_iter not in ("continue", "restart"):
            raise ValueError(f"on_iter must be 'continue' or 'restart', not {self.on_iter!r}")
        if self.epoch_slots is not None and (self.epoch_slots < 1 or self.epoch_slots % self.lanes):
            multiple = max(1, round(self.epoch_slots / self.lanes)) * self.lanes
            raise ValueError(
                f"epoch_slots must be a multiple of the {self.lanes} lanes, such as {multiple}, not {self.epoch_slots}"
            )
        if self.restarts_on_iter and (self.ledger is not None or self.acknowledge):
            option = "ledger=" if self.ledger is not None else "acknowledge="
            raise ValueError(f"{option} does not apply to on_iter='restart'. Pass it to the loader for training.")
        if self.acknowledge and isinstance(self.ranks, Ranks) and self.ranks.sharing:
            raise ValueError("peers would acknowledge at different times. Remove share= of Ranks.of or acknowledge=.")

    def _check_workers(self) -> None:
        """Raise ValueError if `num_workers` and `workers.count` differ."""
        if not isinstance(self.workers, Workers):
            raise ValueError(
                f"workers must be sp.Workers(...), not {self.workers!r}. Set their number by num_workers=."
            )
        if self.num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, not {self.num_workers}")
        if (count := self.workers.count) is not None:
            uncounted = replace(self.workers, count=None)  # these settings compare equal if nodes set the number
            if self.num_workers and self.workers != uncounted:
                raise ValueError(f"pass num_workers={self.num_workers} or sp.Workers({count}), not both")
            object.__setattr__(self, "num_workers", count)
            object.__setattr__(self, "workers", uncounted)

    @property
    def pad(self) -> bool:
        """Return whether the last batches of an epoch get padding rows."""
        return self.tail == "pad"

    @property
    def restarts_on_iter(self) -> bool:
        """Return whether each iterator starts epoch 0 again."""
        return self.on_iter == "restart"

    @property
    def lanes_by_data(self) -> bool:
        """Return whether the data determine the number of lanes.

        They do not if the pipeline is a function, because it may use the number itself.
        """
        by_slots = self.pad or self.epoch_slots is not None
        return self.has_default_lanes and not by_slots and isinstance(self.pipeline, Pipeline)

    @property
    def job(self) -> LaneJob:
        """Return the settings from which a process builds lanes.

        The number of lanes is 1 until it is known.
        """
        lanes = 1 if self.lanes_by_data else self.lanes
        return LaneJob(self.pipeline, self.seed, lanes, self.pad, bool(self.acknowledge))

    def find_ranks(self) -> Ranks:
        """Return the rank of this process.

        Raises ValueError if the lanes do not fit the ranks.
        """
        return find_ranks(self.ranks, None if self.lanes_by_data else self.lanes)

    def new_backend(self, runner: LaneRunner, last_stage: Callable[[], Stage], pinned: PinnedShards) -> Backend:
        """Return the backend that builds the batches, or gets them from another rank.

        Without workers, `runner` builds the batches in this process. `last_stage` returns the last stage of a lane, and
        `pinned` has the shards that workers must read.
        """
        ranks, workers = self.find_ranks(), replace(self.workers, count=self.num_workers)
        host = partial(workers.host, self.job, (ranks.rank, ranks.world_size))

        def builder(host: Any) -> Backend:
            return Pool(host, workers, last_stage, pinned) if self.num_workers and ranks.builds else InProcess(runner)

        if ranks.sharing is None:
            return builder(host)
        # imported here, because it imports the wire of run/nodes
        from savable_pipeline.run.peers.peer_backend import PeerBackend

        return PeerBackend(ranks.sharing, workers, host, builder)
