"""Which data-parallel rank this is, which lanes and slots are its own, and what the ranks agree on.

Slot q is batch ⌊q/L⌋ of lane q mod L and belongs to rank q mod W; W divides L, so a rank has the lanes that are
congruent to it:

    slot   0   1   2   3   4   5   6   7      L = 4 lanes, W = 2 ranks
    lane   0   1   2   3   0   1   2   3
    rank   0   1   0   1   0   1   0   1
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """Rank `rank` of `world_size`; `group` is the process group in which they talk, if there is one."""

    def __init__(self, rank: int, world_size: int, group: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group

    def lanes(self, lanes: int) -> range:
        """The lanes of this rank."""
        return range(self.rank, lanes, self.world_size)

    def slot(self, step_start: int) -> int:
        """This rank's slot in the step that takes the slots from `step_start` on."""
        return step_start + (self.rank - step_start) % self.world_size

    def all_true(self, mine: bool) -> bool:
        """Whether every rank says True. Collective. Raises ValueError where the ranks cannot talk."""
        if self.world_size == 1:
            return mine
        if self.group is None:
            raise ValueError(
                f"the {self.world_size} ranks of a finite run must agree on its end, but rank and world_size were "
                "given as numbers: call torch.distributed.init_process_group and leave them out, or use epochs=None"
            )
        import torch
        import torch.distributed as dist

        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        bit = torch.tensor([int(mine)], device=device)
        dist.all_reduce(bit, op=dist.ReduceOp.MIN, group=self.group)
        return bool(bit.item())

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on each. Collective."""
        if self.world_size == 1:
            return [value]
        if self.group is None:
            raise ValueError("gathering needs torch.distributed; for states saved by each rank there is merge_states")
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered


def _initialised() -> bool:
    """Whether this process is one of torch.distributed; not if no one has imported that."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def find_ranks(
    rank: int | None,
    world_size: int | None,
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    lanes: int,
) -> Ranks:
    """From arguments, a group or a one-dimensional mesh, or else torch.distributed; one rank if there is none of it.

    Raises ValueError if they contradict each other, or the world size does not divide the lanes.
    """
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, not {lanes}")
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if mesh is not None:
        if group is not None or mesh.ndim != 1:
            raise ValueError("mesh must have one dimension, that of data parallelism: pass mesh['dp'], and no group")
        group = mesh.get_group()
    if rank is not None and world_size is not None:
        ranks = Ranks(rank, world_size, group)
    elif group is not None or _initialised():
        import torch.distributed as dist

        group = group or dist.group.WORLD
        ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
    elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that there are several ranks, but torch.distributed is not "
            "initialised: call init_process_group before making the loader, or pass rank and world_size"
        )
    else:
        ranks = Ranks(0, 1, None)
    if not 0 <= ranks.rank < ranks.world_size:
        raise ValueError(f"rank {ranks.rank} does not lie in 0 … {ranks.world_size - 1}")
    if lanes % ranks.world_size:
        divisors = [w for w in range(1, lanes + 1) if lanes % w == 0]
        raise ValueError(
            f"{ranks.world_size} ranks do not divide {lanes} lanes; world sizes that do: "
            f"{', '.join(map(str, divisors))}. Or begin a new run with another lanes="
        )
    return ranks
