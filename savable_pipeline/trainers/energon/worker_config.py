"""Energon's `WorkerConfig`, and the one that an encoder sees while it is called: the same in every process."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron.energon import NoCachePool, WorkerConfig

from savable_pipeline.errors import EncodeError

__all__ = ["Active", "WorkerConfig"]

_INDEX_BITS = 31  # of `current_sample_index`, so that it seeds any generator


class _NoBatchIndex:
    """The batch index where none is known yet: any use of it raises EncodeError."""

    def __mul__(self, _: Any) -> NoReturn:
        raise EncodeError(
            "current_batch_index is not known before the items of a batch are chosen: use it in `batch` or "
            "`encode_batch`, or current_sample_index, which is keyed by the sample"
        )


class _AnywhereConfig(WorkerConfig):  # type: ignore[misc]
    """The only worker of the only rank, whatever process it is asked in."""

    __slots__ = ()

    def rank_worker_id(self) -> int:
        return 0


class Active:
    """Within it, Energon's encoder sees `current_sample_index` and, in `batch`, `current_batch_index`.

    One for each encoder: `with active.at(key):`. Not to be nested, as Energon's own loader is not.
    """

    def __init__(self) -> None:
        self._config = _AnywhereConfig(rank=0, world_size=1, num_workers=0)
        self._cache = NoCachePool()
        self._unknown = _NoBatchIndex()
        self._index = 0
        self._batch: Any = self._unknown

    def at(self, key: int, batch: int | None = None) -> Active:
        """Enter with the sample index of this 64-bit key."""
        self._index = key >> (64 - _INDEX_BITS)
        self._batch = self._unknown if batch is None else batch
        return self

    def __enter__(self) -> None:
        self._config.worker_activate(self._batch, cache_pool=self._cache)
        self._config.worker_push_sample_index(self._index)

    def __exit__(self, *_: object) -> None:
        self._config.worker_pop_sample_index()
        self._config.worker_deactivate()

    def __reduce__(self) -> Any:
        return Active, ()
