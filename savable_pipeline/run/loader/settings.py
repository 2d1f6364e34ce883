"""`LoaderSettings`: the arguments of a `SavableLoader`, checked."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Literal

from savable_pipeline.run.engine.launchers import get_context
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.loader.ranks import Ranks, find_ranks
from savable_pipeline.stages.pipeline import PipelineFunction, check_pipeline

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LoaderSettings:
    """`SavableLoader` says what each argument means. Raises ValueError for a wrong one."""

    pipeline: PipelineFunction
    _: KW_ONLY
    seed: int
    lanes: int = 96
    num_workers: int = 0
    rank: int | None = None
    world_size: int | None = None
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    prefetch: int = 2
    pin_memory: bool = False
    multiprocessing_context: str | BaseContext | None = None
    tail: Literal["stop", "pad"] = "stop"
    on_iter: Literal["continue", "restart"] = "continue"
    epoch_slots: int | None = None
    ids: bool = False
    acknowledge: bool = False
    max_in_flight: int | None = None
    ledger: str | os.PathLike[str] | None = None
    timeout: float = 600.0
    max_restarts: int = 100

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.prefetch < 1:
            raise ValueError(f"num_workers must be at least 0 and prefetch 1: {self.num_workers}, {self.prefetch}")
        check_pipeline(self.pipeline)
        if not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, not {self.seed!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, not {self.timeout}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed must fit into 64 bits, so that a state can hold it: {self.seed}")
        if self.tail not in ("stop", "pad"):
            raise ValueError(f"tail must be 'stop' or 'pad', not {self.tail!r}")
        if self.on_iter not in ("continue", "restart"):
            raise ValueError(f"on_iter must be 'continue' or 'restart', not {self.on_iter!r}")
        if self.epoch_slots is not None and (self.epoch_slots < 1 or self.epoch_slots % self.lanes):
            near = max(1, round(self.epoch_slots / self.lanes)) * self.lanes
            raise ValueError(
                f"epoch_slots counts the slots of all ranks and must be a multiple of the {self.lanes} lanes, not "
                f"{self.epoch_slots}: the nearest is {near}"
            )
        if self.ledger is not None and self.restarts:
            raise ValueError(
                "a ledger records what a run was given, once; with on_iter='restart' each pass begins again: give the "
                "ledger to the training's loader"
            )
        self._check_acknowledge()
        self.find_context()

    def _check_acknowledge(self) -> None:
        if self.acknowledge and self.restarts:
            raise ValueError(
                "acknowledge=True keeps what is not trained yet from pass to pass, and on_iter='restart' begins each "
                "anew: leave it out of a loader for evaluation"
            )
        if self.max_in_flight is not None and not (self.acknowledge and self.max_in_flight >= 1):
            raise ValueError(
                f"max_in_flight counts rows that are not acknowledged, at least 1, with acknowledge=True: "
                f"{self.max_in_flight}"
            )

    @property
    def pad(self) -> bool:
        """Whether an epoch's last batches are filled up with rows that do not count."""
        return self.tail == "pad"

    @property
    def restarts(self) -> bool:
        """Whether each iterator begins epoch 0 again."""
        return self.on_iter == "restart"

    @property
    def job(self) -> LaneJob:
        """The settings from which a process builds lanes."""
        return LaneJob(self.pipeline, self.seed, self.lanes, self.pad, self.acknowledge)

    def find_ranks(self) -> Ranks:
        """The rank of this process. Raises ValueError if there is none, or its world size does not divide the lanes."""
        return find_ranks(self.rank, self.world_size, self.group, self.mesh, self.lanes)

    def find_context(self) -> BaseContext:
        """How worker processes are started. Raises ValueError for a start method that this platform lacks."""
        return get_context(self.multiprocessing_context)
