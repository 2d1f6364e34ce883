"""`Selection`: the samples that a split and a subset leave of a dataset, counted through in the dataset's order.

    dataset     0 1 2 3 │ 4 5 6 7 │ 8 9 …      three shards
    selection   0   1   │         │ 2 3        places; a ref keeps the number in the dataset

A subset is drawn from each shard alone, by a key of the shard's name: it is the same in every run, epoch and lane, and
stays as it is where shards are added. Shares that do not overlap have no sample in common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.errors import ShardError
from savable_pipeline.keys import key, permutation

Subset: TypeAlias = "float | int | tuple[float, float]"
Rows = NDArray[np.int64]
_SHARDS_KEPT = 512  # whose rows are kept in memory
_ONE = 1 << 32  # a share of 1


def check_subset(subset: Subset | None) -> None:
    """Raise ValueError unless this is None, a share (0.1), two shares to lie between (0.1, 0.3), or a count (1000)."""
    low, high = subset if isinstance(subset, tuple) and len(subset) == 2 else (0.0, subset)
    if subset is None or (type(subset) is int and subset >= 1):
        return
    shares = all(isinstance(share, float | int) and not isinstance(share, bool) for share in (low, high))
    if not shares or type(subset) is int or not 0 <= low < high <= 1:  # type: ignore[operator]
        raise ValueError(
            f"TarShardReader: subset must be a share (0.1), a range of shares (0.1, 0.3), or a count (1000): {subset!r}"
        )


class Selection:
    """Some samples of a dataset whose shards have these names and sizes.

    `shards` names those to take (None: all), `excluded` the rows to leave out, by shard. Raises `ShardError` if
    nothing is left.
    """

    def __init__(
        self,
        names: list[str],
        firsts: NDArray[np.int64],
        *,
        shards: list[str] | None = None,
        excluded: Mapping[str, Rows] | None = None,
        subset: Subset | None = None,
    ) -> None:
        self._names = names
        self._dataset_firsts = firsts
        self._sizes = np.diff(firsts)
        self._excluded = excluded or {}
        self._drawn = subset is not None
        left = self._left(shards)
        self._low, self._high = _drawn(names, left, subset)
        self.firsts = np.concatenate([[0], np.cumsum(self._high - self._low)])  # int64 (shards + 1,)
        self.count = int(self.firsts[-1])
        if not self.count:
            raise ShardError("the split and the subset leave no sample")
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    def _left(self, shards: list[str] | None) -> NDArray[np.int64]:
        """Samples of each shard before a subset is drawn."""
        taken = None if shards is None else set(shards)
        left = [
            size - len(self._excluded.get(name, ())) if taken is None or name in taken else 0
            for name, size in zip(self._names, self._sizes.tolist(), strict=True)
        ]
        return np.array(left, dtype=np.int64)

    def locate(self, places: Rows) -> Rows:
        """The samples at these places, as indices of the dataset: int64 of the same shape."""
        shards = np.searchsorted(self.firsts, places, side="right") - 1
        found = places - self.firsts[shards]
        for shard in np.unique(shards).tolist():
            if self._drawn or self._names[shard] in self._excluded:
                mine = shards == shard
                found[mine] = self._rows_of(shard)[found[mine]]
        located: Rows = found + self._dataset_firsts[shards]
        return located

    def _rows_of(self, shard: int) -> Rows:
        """The rows of a shard that are selected, in their order."""
        if shard not in self._rows:
            name = self._names[shard]
            rows = np.delete(np.arange(self._sizes[shard]), self._excluded.get(name, []))
            if self._drawn:
                order = permutation(key("subset", name), len(rows))
                rows = np.sort(rows[order[self._low[shard] : self._high[shard]]])
            self._rows[shard] = rows
            if len(self._rows) > _SHARDS_KEPT:
                self._rows.popitem(last=False)
        return self._rows[shard]

    def manifest(self) -> dict[str, Any]:
        """What a saved state must agree on: how many shards and samples, and a hash of which."""
        digest = xxh3_64()
        counts = np.diff(self.firsts)
        for shard in np.flatnonzero(counts).tolist():
            name = self._names[shard]
            digest.update(f"{name}\0{self._low[shard]}\0{self._high[shard]}\0".encode())
            digest.update(np.asarray(self._excluded.get(name, []), dtype="<i8").tobytes())
        return {"shards": int((counts > 0).sum()), "samples": self.count, "digest": digest.intdigest()}


def _drawn(names: list[str], left: Rows, subset: Subset | None) -> tuple[Rows, Rows]:
    """Of each shard's samples, in the order of its key, the first that is taken and the one behind the last."""
    if subset is None:
        return np.zeros_like(left), left
    if type(subset) is int:
        total = int(left.sum())
        if subset > total:
            raise ShardError(f"subset={subset}: there are only {total} samples")
        ends = np.array([subset * int(end) // total for end in [0, *np.cumsum(left)]], dtype=np.int64)
        return np.zeros_like(left), ends[1:] - ends[:-1]
    low, high = subset if isinstance(subset, tuple) else (0.0, subset)
    parts = np.array([key("subset", "part", name) >> 32 for name in names], dtype=np.uint64)
    return _cut(left, parts, low), _cut(left, parts, high)


def _cut(left: Rows, parts: NDArray[np.uint64], share: float) -> Rows:
    """`share` of each count, rounded down after a random part of one is added, so that few samples a shard add up."""
    cut: Rows = ((left.astype(np.uint64) * np.uint64(round(share * _ONE)) + parts) >> np.uint64(32)).astype(np.int64)
    return cut
