"""`Selection`: the samples of a split and a subset, numbered in dataset order.

    dataset     0 1 2 3 │ 4 5 6 7 │ 8 9 …      three shards
    selection   0   1   │         │ 2 3        positions in the selection; refs have the indices of the dataset

A subset is drawn from each shard separately, with the shard's name without its format's suffix as the random key. So a
subset is the same in every run, epoch and lane, and for a tar and a Parquet file with equal names and rows. It does not
change when shards are added. Ranges of fractions that do not overlap have no sample in common.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.core.keyed_random import derive_key, permutation
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

Subset: TypeAlias = "float | int | tuple[float, float]"
_CACHED_SHARDS = 512  # shards whose selected rows stay in memory
_ONE = 1 << 32  # the fraction 1 in fixed point


def check_subset(reader: str, subset: Subset | None) -> None:
    """Raise ValueError unless a `subset` is None, a fraction, a range or a count.

    Examples are 0.1, (0.1, 0.3) and 1000.
    """
    low, high = subset if isinstance(subset, tuple) and len(subset) == 2 else (0.0, subset)
    if subset is None or (type(subset) is int and subset >= 1):
        return
    are_numbers = all(isinstance(each, float | int) and not isinstance(each, bool) for each in (low, high))
    if not are_numbers or type(subset) is int or not 0 <= low < high <= 1:  # type: ignore[operator]
        raise ValueError(f"{reader}: subset={subset!r}. Pass a fraction (0.1), a range (0.1, 0.3) or a count (1000)")


class Selection:
    """Some samples of a dataset with these shards.

    `names` are the names of the shards. `firsts` has the dataset index of the first sample of each, then the number of
    samples. `shards` names the shards to use, in this order (None: all). `excluded` has the rows to skip, by the
    shard's name. `keys` has for each shard the key of the random choice from it (None: its name). Raises `ShardError`
    if no sample remains.
    """

    def __init__(
        self,
        names: list[str],
        firsts: NDArray[np.int64],
        *,
        shards: list[str] | None = None,
        excluded: Mapping[str, Rows] | None = None,
        subset: Subset | None = None,
        keys: list[str] | None = None,
    ) -> None:
        self._shard_names = names
        self._random_keys = names if keys is None else keys
        self._dataset_firsts = firsts
        self._sizes = np.diff(firsts)
        self._excluded = excluded or {}
        self._has_subset = subset is not None
        counts = self._split_counts(shards)
        self._low, self._high = _subset_ranges(self._random_keys, counts, subset)
        self.order = _order(names, shards)  # int64 (shards,): dataset numbers of the shards in order
        # first position of each shard in that order, then the number of samples: int64 (shards + 1,)
        self.first_positions = np.concatenate([[0], np.cumsum((self._high - self._low)[self.order])])
        self.count = int(self.first_positions[-1])
        if not self.count:
            raise ShardError("split= and subset= leave no sample. Pass a larger subset=")
        self._rows_of = functools.lru_cache(_CACHED_SHARDS)(self._selected_rows)

    def _split_counts(self, shards: list[str] | None) -> NDArray[np.int64]:
        """Return the number of samples of each shard from which the subset is drawn."""
        used = None if shards is None else set(shards)
        counts = [
            size - len(self._excluded.get(name, ())) if used is None or name in used else 0
            for name, size in zip(self._shard_names, self._sizes.tolist(), strict=True)
        ]
        return np.array(counts, dtype=np.int64)

    def of_first(self, shards: int) -> Selection:
        """Return the selection of the first `shards` shards, in the same order.

        It may be empty.
        """
        restricted = copy.copy(self)
        restricted.order = self.order[self.order < shards]
        restricted.first_positions = np.concatenate([[0], np.cumsum((self._high - self._low)[restricted.order])])
        restricted.count = int(restricted.first_positions[-1])
        return restricted

    def locate(self, positions: Rows) -> Rows:
        """Return the dataset indices of samples at these positions of the selection.

        The result is int64 of the same shape.
        """
        ranks = np.searchsorted(self.first_positions, positions, side="right") - 1  # positions of shards in `order`
        rows = positions - self.first_positions[ranks]
        shards = self.order[ranks]
        for shard in np.unique(shards).tolist():
            if self._has_subset or self._shard_names[shard] in self._excluded:
                in_shard = shards == shard
                rows[in_shard] = self._rows_of(shard)[rows[in_shard]]
        indices: Rows = rows + self._dataset_firsts[shards]
        return indices

    def _selected_rows(self, shard: int) -> Rows:
        """Return the selected rows of a shard, counted from its first, ascending."""
        name = self._shard_names[shard]
        rows = np.delete(np.arange(self._sizes[shard]), self._excluded.get(name, []))
        if not self._has_subset:
            return rows
        order = permutation(derive_key("subset", self._random_keys[shard]), len(rows))
        return np.sort(rows[order[self._low[shard] : self._high[shard]]])

    def manifest(self) -> dict[str, Any]:
        """Return the values that must equal those of a saved state.

        They are the number of shards, the number of samples, and a hash of the selection.
        """
        digest = xxh3_64()
        counts = np.diff(self.first_positions)
        for shard in self.order[np.flatnonzero(counts)].tolist():
            name = self._shard_names[shard]
            digest.update(f"{self._random_keys[shard]}\0{self._low[shard]}\0{self._high[shard]}\0".encode())
            digest.update(np.asarray(self._excluded.get(name, []), dtype="<i8").tobytes())
        return {"shards": int((counts > 0).sum()), "samples": self.count, "digest": digest.intdigest()}


def without_ending(name: str, endings: Sequence[str]) -> str:
    """Return the name of a shard without its format's longest matching suffix.

    "a/train.001.tar" becomes "a/train.001".
    """
    ending = max((each for each in endings if name.endswith(each)), key=len, default="")
    return name.removesuffix(ending)


def _order(names: list[str], first: list[str] | None) -> Rows:
    """Return the numbers of the shards `first`, in that order, then of the others."""
    number_of = {name: number for number, name in enumerate(names)}
    return np.array([number_of[name] for name in dict.fromkeys([*(first or ()), *names])], dtype=np.int64)


def _subset_ranges(keys: list[str], counts: Rows, subset: Subset | None) -> tuple[Rows, Rows]:
    """Return two arrays: where the subset starts and ends in each shard's random order of `counts` samples."""
    if subset is None:
        return np.zeros_like(counts), counts
    if type(subset) is int:
        total = int(counts.sum())
        if subset > total:
            raise ShardError(f"subset={subset}: there are only {total} samples")
        bounds = np.array([subset * int(end) // total for end in [0, *np.cumsum(counts)]], dtype=np.int64)
        return np.zeros_like(counts), np.diff(bounds)
    low, high = subset if isinstance(subset, tuple) else (0.0, subset)
    offsets = np.array([derive_key("subset", "part", key) >> 32 for key in keys], dtype=np.uint64)
    return _scaled(counts, offsets, low), _scaled(counts, offsets, high)


def _scaled(counts: Rows, offsets: NDArray[np.uint64], fraction: float) -> Rows:
    """Return `fraction` of each count, rounded down after adding `offsets` / 2³².

    The offsets are random, so the expected total over many small shards is right.
    """
    products = counts.astype(np.uint64) * np.uint64(round(fraction * _ONE))
    return ((products + offsets) >> np.uint64(32)).astype(np.int64)
