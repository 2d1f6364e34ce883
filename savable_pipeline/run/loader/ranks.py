"""`Ranks`: the data-parallel rank of this process, with its lanes and slots.

Slot q is batch ⌊q/L⌋ of lane q mod L and belongs to rank q mod W. W divides L, so a rank has the lanes that are
congruent to it:

    slot   0   1   2   3   4   5   6   7      L = 4 lanes, W = 2 ranks
    lane   0   1   2   3   0   1   2   3
    rank   0   1   0   1   0   1   0   1
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from xxhash import xxh3_128_hexdigest

from savable_pipeline.core.named_object import imported
from savable_pipeline.data.dataset.shard_digests import count
from savable_pipeline.data.shards.paths import without_commit
from savable_pipeline.errors import CheckpointMismatchError, SavableError
from savable_pipeline.run.state.fingerprint import PipelineFingerprint

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from savable_pipeline.run.peers.meeting import Sharing

RanksLike: TypeAlias = "tuple[int, int] | dist.ProcessGroup | DeviceMesh | Ranks | None"
ShareLike: TypeAlias = "str | Sequence[str] | dist.ProcessGroup | DeviceMesh | None"
_MESH_FIX = "Flatten others by mesh[...]._flatten('dp'), and pass Ranks.of(mesh['dp'], share=group)."
# ends of the names of a fingerprint's fields about the data and the number of lanes
_DATA_FIELDS = ("shards", "joins", "exclude", "media", "lanes")


class Ranks:
    """The data-parallel rank of this process, for `SavableLoader(..., ranks=)`.

    Args:
        rank: Its number, from 0.
        world_size: How many there are.
        group: The process group through which they communicate. None: all of torch.distributed, if its ranks are
            these; else they do not communicate, which an endless run need not.
        explicit: Whether these were arguments; else they were found in torch.distributed.

    Raises:
        ValueError: There is no such rank.

    Example:
        >>> pipeline = sp.read("shards/").batch(4)
        >>> loader = sp.SavableLoader(pipeline, seed=7, ranks=sp.Ranks(0, 2))  # or ranks=(0, 2)
    """

    def __init__(self, rank: int, world_size: int, group: Any = None, *, explicit: bool = True) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to {world_size - 1}, not {rank}")
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.explicit = explicit
        self.sharing: Sharing | None = None  # ranks with which it shares batches
        # whether this process builds its batches, and its number in messages, which is global if batches are shared
        self.builds, self.name = True, rank

    @classmethod
    def of(cls, mesh_or_group: DeviceMesh | dist.ProcessGroup, *, share: ShareLike = None) -> Ranks:
        """Return the data-parallel rank of processes that share one decode.

        The first process of each sharing group builds the batches, and the others get the same bytes.

        Args:
            mesh_or_group: A mesh with the dimensions of `share` and at most one other, or the data-parallel group or
                mesh of this process.
            share: Names of the dimensions whose processes need the same batches, such as ("tp", "cp"), or their group.
                None: each process builds its batches.

        Returns:
            The ranks, for `SavableLoader(..., ranks=)`.

        Raises:
            ValueError: The mesh has other dimensions, or the processes cannot share.

        Example:
            >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
            >>> ranks = sp.Ranks.of(mesh, share=("tp",))  # doctest: +SKIP
            >>> loader = sp.SavableLoader(pipeline, seed=7, ranks=ranks)  # doctest: +SKIP
        """
        if share is None:
            return _ranks_of(mesh_or_group)
        # imported here, because it imports the wire of run/nodes
        import torch.distributed as dist

        from savable_pipeline.run.peers.meeting import find_sharing

        if isinstance(share, str | tuple | list):
            found, members = _ranks_in_mesh(mesh_or_group, (share,) if isinstance(share, str) else tuple(share))
        else:
            found, members = _ranks_of(mesh_or_group), _global_ranks(share)
        data_ranks = () if found.group is None else _global_ranks(found.group)
        if (sharing := find_sharing(members, data_ranks, group_store(dist.group.WORLD))) is not None:
            found.sharing, found.builds, found.name = sharing, sharing.number == 0, sharing.ranks[sharing.number]
        return found

    def lanes(self, lanes: int) -> range:
        """Return the lanes of this rank.

        Args:
            lanes: The number of lanes of the run.
        """
        return range(self.rank, lanes, self.world_size)

    def slot(self, step_start: int) -> int:
        """Return this rank's slot in a step.

        Args:
            step_start: The first slot of the step.
        """
        return step_start + (self.rank - step_start) % self.world_size

    def check_world(self) -> None:
        """Raise ValueError if torch.distributed was initialized with other ranks later."""
        if self.explicit:
            return
        if _is_distributed_initialized():
            import torch.distributed as dist

            rank, world_size = dist.get_rank(), dist.get_world_size()
            if (rank, world_size) == (self.rank, self.world_size):
                return
            now = f"torch.distributed says rank {rank} of {world_size}"
        elif self.group is None and _env_world_size() > 1:
            now = f"WORLD_SIZE={_env_world_size()} says that there are several"
        else:
            return
        raise ValueError(
            f"this loader was created for rank {self.rank} of {self.world_size}, but now {now}. Create it after "
            "init_process_group, or pass ranks=(rank, world_size)."
        )

    def agree(self, proposed: int, *, smallest: bool) -> int:
        """Return the smallest or largest proposal of all ranks. Collective.

        Args:
            proposed: That of this rank.
            smallest: Whether the smallest is taken.

        Raises:
            ValueError: They cannot communicate.
        """
        if self.world_size == 1:
            return proposed
        group = self._find_group()
        if group is None:
            raise ValueError(
                f"the {self.world_size} ranks of a finite run must agree on its end. Call "
                "torch.distributed.init_process_group, or use epochs=None. In a test, use "
                "savable_pipeline.testing.steps_of_ranks."
            )
        import torch
        import torch.distributed as dist

        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        agreed = torch.tensor([proposed], dtype=torch.int64, device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN if smallest else dist.ReduceOp.MAX, group=group)
        return int(agreed.item())

    def first_value(self, key: str, value: str) -> str:
        """Return the value of the rank that sets `key` first.

        This waits for no rank. A rank's second call with the same key is a new round, in which its value is compared
        with the second values of the other ranks. Returns `value` if the ranks have no common store, or one without
        `compare_set`. Raises torch's error if the store does not answer.

        Args:
            key: The name of the value.
            value: The value of this rank.
        """
        store = self.sharing.store if self.sharing else group_store(self._find_group()) if self.has_group else None
        if store is None:
            return value
        try:
            round_number = store.add(f"{key}/times of {self.name}", 1)
            return str(store.compare_set(f"{key}/{round_number}", "", value).decode())
        except RuntimeError as error:  # includes NotImplementedError
            if isinstance(error, NotImplementedError) or "not implemented" in str(error).lower():
                return value
            raise

    @property
    def has_group(self) -> bool:
        """Return whether there are other ranks, and a group to communicate with them."""
        return self.world_size > 1 and self._find_group() is not None

    def _find_group(self) -> Any:
        """Return the process group of the ranks, by default that of torch.distributed if it has the same ranks."""
        if self.group is None and _is_distributed_initialized():
            import torch.distributed as dist

            if (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world_size):
                return dist.group.WORLD
        return self.group

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on each rank. Collective.

        Args:
            value: That of this rank.

        Raises:
            ValueError: There is no group.
            SavableError: Another rank does not take part.
        """
        if self.world_size == 1:
            return [value]
        group = self._find_group()
        if group is None:
            raise ValueError("gathering needs torch.distributed. Use merge_states for states saved by each rank.")
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, value, group=group)
        except RuntimeError as error:
            raise SavableError(
                f"rank {self.rank} could not gather the states of {self.world_size} ranks. Call global_state_dict "
                f"on every rank at the same step.\n  {error}"
            ) from error
        return gathered


def group_store(group: Any) -> Any:
    """Return the store of a process group; None if torch.distributed does not know it.

    Args:
        group: The group. Before torch 2.8 it has no method for its store.
    """
    from torch.distributed import distributed_c10d

    find = getattr(group, "get_group_store", None)
    return find() if find else vars(distributed_c10d)["_world"].pg_map.get(group, (None, None))[1]


def _is_distributed_initialized() -> bool:
    """Return whether torch.distributed is imported and initialized."""
    dist = imported("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _env_world_size() -> int:
    """Return the number of ranks in the variable WORLD_SIZE, which torchrun sets, or 1."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def find_ranks(ranks: RanksLike, lanes: int | None) -> Ranks:
    """Return the rank of this process and the world size.

    `ranks` is the argument of a loader. If it is None, they are those of torch.distributed, or rank 0 of 1. Raises
    ValueError for an argument of another type, and if `lanes` is a number that the world size does not divide.
    """
    ranks = _ranks_of(ranks) if ranks is not None else _detect_ranks()
    if lanes is not None:
        check_lanes(ranks, lanes)
    return ranks


def next_lanes(lanes: int, world_size: int) -> int:
    """Return the least multiple of the world size that is at least `lanes`."""
    return -(-lanes // world_size) * world_size


def check_lanes(ranks: Ranks, lanes: int, source: str = "") -> None:
    """Check that the world size divides the lanes.

    Args:
        ranks: The rank of this process.
        lanes: The number of lanes.
        source: Text that follows their number in the message, such as ", the default for this data".

    Raises:
        ValueError: The world size does not divide the lanes, or there are none.
    """
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, not {lanes}")
    if lanes % ranks.world_size:
        divisors = [w for w in range(1, lanes + 1) if lanes % w == 0]
        raise ValueError(
            f"{ranks.world_size} ranks do not divide lanes={lanes}{source}. Start a run with "
            f"lanes={next_lanes(lanes, ranks.world_size)}, or use a world size of {', '.join(map(str, divisors))}."
        )


def _ranks_of(ranks: object) -> Ranks:
    """Convert the argument `ranks` of a loader. Raises ValueError for other types."""
    if isinstance(ranks, Ranks):
        return ranks
    if isinstance(ranks, tuple | list) and len(ranks) == 2 and all(isinstance(number, int) for number in ranks):
        return Ranks(*ranks)
    if hasattr(ranks, "get_group") and hasattr(ranks, "ndim"):  # a mesh, detected without importing torch.distributed
        if ranks.ndim != 1:
            raise ValueError("a mesh must have one dimension. Pass ranks=mesh['dp'].")
        ranks = ranks.get_group()
    import torch.distributed as dist

    if dist.is_available() and isinstance(ranks, dist.ProcessGroup):
        return Ranks(dist.get_rank(ranks), dist.get_world_size(ranks), ranks)
    raise ValueError(f"ranks must be (rank, world_size), a process group, a mesh or sp.Ranks(...), not {ranks!r}")


def _ranks_in_mesh(mesh: Any, share: tuple[str, ...]) -> tuple[Ranks, tuple[int, ...]]:
    """Return the data-parallel rank in a mesh, and the global ranks that share its batches."""
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    others = [name for name in names if name not in share]
    if not set(share) <= set(names) or len(others) > 1:
        raise ValueError(f"share={share} must name all but one of the dimensions {names} of the mesh. {_MESH_FIX}")
    members = tuple(mesh[tuple(name for name in names if name in share)].mesh.flatten().tolist())
    return _ranks_of(mesh[others[0]]) if others else Ranks(0, 1), members


def _global_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group or of a one-dimensional mesh."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group.get_group() if hasattr(group, "get_group") else group))


def _detect_ranks() -> Ranks:
    """Return the rank in torch.distributed, or rank 0 of 1. Raises ValueError if the group is not initialized yet."""
    if _is_distributed_initialized():
        import torch.distributed as dist

        return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, explicit=False)
    if _env_world_size() > 1:
        raise ValueError(
            f"WORLD_SIZE={_env_world_size()}, but torch.distributed is not initialized. Call init_process_group first, "
            "or pass ranks=(rank, world_size)."
        )
    return Ranks(0, 1, explicit=False)


def check_same_data(ranks: Ranks, found: PipelineFingerprint, *, has_default_lanes: bool = False) -> None:
    """Check that the ranks of a run have the same seed, shards and excluded samples.

    `has_default_lanes`: whether the user passed no `lanes`, so that the data or a loaded state set their number. Then
    all ranks must have the same number, too.

    Ranks of an endless run do not communicate. If a rank opened the folder after a shard was added, or has another
    seed, its lanes would have other samples, and nobody would notice. So the rank that comes first writes its seed and
    a digest of its data into the store of torch.distributed, and each other rank compares its own. No rank waits for
    another.

    A run is identified by its stages, its lanes, the last part of each data address, and how many such runs the rank
    has started. Raises ValueError for another seed, `CheckpointMismatchError` for other data, and the error of
    torch.distributed if its store does not answer.
    """
    names = sorted(PurePosixPath(without_commit(address)).name for address in found.addresses.values())
    key = _digest([found.fields["stages"], None if has_default_lanes else found.fields["lanes"], *names])
    data = {name: value for name, value in sorted(found.fields.items()) if name.endswith(_DATA_FIELDS)}
    shards, seed = sum(count(found.fields[name]) for name in found.shards), found.fields["seed"]
    first = ranks.first_value(f"savable_pipeline/{key}", f"{_digest(data)} {ranks.name} {shards} {seed}")
    first_digest, first_rank, first_shards, first_seed = first.split()
    if first_seed != str(seed):
        raise ValueError(
            f"rank {ranks.name} has seed={seed}, but rank {first_rank} has seed={first_seed}. Pass the same seed on "
            "all ranks, because it sets their common order."
        )
    if first_digest != _digest(data):
        raise CheckpointMismatchError(
            f"rank {ranks.name} and rank {first_rank} found different shards, exclude= files, media tables or lanes. "
            f"Start all ranks again.\n  {shards} here, {first_shards} there, in "
            f"{', '.join(sorted(set(found.addresses.values())))}"
        )


def _digest(value: Any) -> str:
    return xxh3_128_hexdigest(msgspec.msgpack.encode(value))
