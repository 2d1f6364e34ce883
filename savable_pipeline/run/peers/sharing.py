"""`Sharing`: the processes that need the same batches, as one of them knows the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_hexdigest

from savable_pipeline.run.peers.passed_answers import PASSING


@dataclass(frozen=True, slots=True)
class Sharing:
    """The peers of a sharing group: `index` is this one's number, `ranks` are their global ranks, for messages.

    `store` is that of torch.distributed, through which they find each other.
    """

    index: int
    ranks: tuple[int, ...]
    store: Any

    @property
    def builds(self) -> bool:
        """Whether this is the first rank, which builds the batches of all."""
        return self.index == 0

    @property
    def key(self) -> str:
        """The first part of all keys of this group in the store."""
        return f"savable_pipeline/peers/{xxh3_64_hexdigest(repr(self.ranks).encode())}"


def find_sharing(ranks: tuple[int, ...]) -> Sharing | None:
    """The sharing group of this process, by its global ranks; None for a group of one.

    Raises ValueError where torch.distributed has no store for it, or the group is too large.
    """
    import torch.distributed as dist

    if len(ranks) == 1:
        return None
    if len(ranks) > PASSING:
        raise ValueError(f"{len(ranks)} ranks cannot share batches. Share among at most {PASSING}.")
    find = getattr(dist.group.WORLD, "get_group_store", None)  # since torch 2.6
    if find is None:
        raise ValueError(f"share= needs torch 2.6, but this is {_torch_version()}. Update torch, or remove share=.")
    return Sharing(ranks.index(dist.get_rank()), ranks, find())


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def check_roles(sharing: Sharing, data_ranks: tuple[int, ...]) -> None:
    """Raise ValueError if some ranks of a data-parallel group build batches and others do not.

    Each writes which it is, and compares with those that have written it before. None waits for another.
    """
    roles, own = "savable_pipeline/peers/role of", b"builds" if sharing.builds else b"shares"
    mine = sharing.ranks[sharing.index]
    sharing.store.set(f"{roles} {mine}", own)
    for rank in data_ranks:
        name = f"{roles} {rank}"
        if rank != mine and sharing.store.check([name]) and sharing.store.get(name) != own:
            raise ValueError(
                f"ranks {mine} and {rank} are in one data-parallel group, but only one of them is the first of its "
                "sharing group. Order the sharing groups alike."
            )
