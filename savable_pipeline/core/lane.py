"""`Lane`: one logical worker: the unit of order, of state and of randomness."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.core.thread_copies import thread_copy

T = TypeVar("T")
PinnedShards: TypeAlias = dict[str, bytes]  # by dataset: the run's shards (shard_digests.py), or a commit of the Hub


@dataclass(frozen=True)
class WorkerContext:
    """What the lanes of a worker have of it.

    `shared`: values shared by all of them, see `Lane.shared`. `status`: memory where stages record what they work on,
    for the report of a crash (status_page.py). `pinned`: the shards of the run, by dataset. `downloads`: whether
    readers may download ahead; not in a lane that is only looked at.
    """

    shared: dict[Any, Any] = field(default_factory=dict)
    status: memoryview | None = None
    pinned: PinnedShards = field(default_factory=dict)
    downloads: bool = True


class ThreadValues(dict[Any, Any]):
    """What the lanes of one worker thread share, by key; `process` is what those of all threads of a loader do."""

    def __init__(self, process: dict[Any, Any], lock: threading.RLock) -> None:
        super().__init__()
        self.process, self.lock = process, lock


class Lane:
    """One of the logical workers of a run, for which a pipeline function builds its stages.

    All random numbers of a run are keyed by the lane or by the sample, so a lane yields the same batches in any process
    on any machine. A loader makes them, with the keyword arguments, and calls the pipeline function with each: its
    stages must be made for that very one. Without a loader, `sp.Lane()` is enough.

    Args:
        index: The number of the lane, 0 … count - 1.
        count: The number of lanes of the run.
        seed: The seed of the run.
        epoch: The number of the pass over the data.
        pad: Whether batches are padded with rows that do not count, and continue after the lane's end.
        facts: What holds for all lanes of the run alike, such as what was decided.
        worker: What the lane has of the worker that runs it. None: one of its own.

    Raises:
        ValueError: `index` is not in 0 … count - 1.

    Example:
        >>> lane = sp.Lane(index=2, count=96, seed=7)
        >>> lane
        Lane(2 of 96, seed=7)
        >>> next(sp.TarShardReader("shards/", lane)).key == next(sp.TarShardReader("shards/", lane)).key
        True
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        seed: int = 0,
        *,
        epoch: int = 0,
        pad: bool = False,
        facts: RunFacts = NO_FACTS,
        worker: WorkerContext | None = None,
    ) -> None:
        if not 0 <= index < count:
            raise ValueError(f"a lane's index must be in 0 … count-1; got index {index}, count {count}")
        self.index, self.count = index, count
        self.seed, self.epoch = seed, epoch
        self.pad = pad  # whether batches are padded with rows that do not count, and continue after the lane's end
        self.facts = facts
        self.worker = WorkerContext() if worker is None else worker
        self.unused: int | None = None  # samples read since the last batch; None without a loader
        self.skips = False  # whether the current batch is skipped: nothing need be built that decides nothing
        self._rngs: dict[str, Rng] = {}
        self._restored: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Lane({self.index} of {self.count}, seed={self.seed})"

    def key(self, *parts: int | str) -> int:
        """Return a 64-bit key of random numbers, derived from this lane, its pass and `parts`.

        Args:
            *parts: What distinguishes the key from the lane's others.
        """
        return derive_key(self.seed, "lane", self.index, self.epoch, *parts)

    def rng(self, name: str) -> Rng:
        """Return the lane's own sequence of random numbers of this name, whose position is saved with the lane.

        Its `.numpy`, `.torch` and `.python` raise ValueError: a state cannot hold their positions.

        Args:
            name: The name of the sequence; each has a key of its own.

        Example:
            >>> sp.Lane(seed=7).rng("mixup").integers(10) == sp.Lane(seed=7).rng("mixup").integers(10)
            True
        """
        if name not in self._rngs:
            self._rngs[name] = Rng(self.key("rng", name), draws=self._restored.get(name, 0), counted=True)
        return self._rngs[name]

    def shared(self, key: Any, make: Callable[[], T], *, by_threads: bool = False) -> T:
        """Return a value that is made once for all lanes of a process; where threads are the workers, of a thread.

        Args:
            key: Identifies the value among the lanes of the same `worker`.
            make: Makes the value when it is first asked for.
            by_threads: Whether the threads share it too: their calls of it may come at the same time.
        """
        values = self.worker.shared
        if by_threads and isinstance(values, ThreadValues):
            with values.lock:
                values.setdefault(key, values.process.get(key) or values.process.setdefault(key, make()))
        elif key not in values:
            values[key] = make()
        return values[key]  # type: ignore[no-any-return]

    @property
    def in_thread(self) -> bool:
        """Whether a thread runs the lane, beside those that run others."""
        return isinstance(self.worker.shared, ThreadValues)

    def own(self, value: T) -> T:
        """Return the value; in a worker thread a copy that only the thread's lanes use, unless it is `thread_safe`.

        Args:
            value: An encoder, or a function that a stage calls.

        Raises:
            ValueError: It cannot be copied, or refers to what threads must not share.
        """
        values = self.worker.shared
        if not isinstance(values, ThreadValues) or getattr(value, "thread_safe", False):
            return value
        if ("own", id(value)) not in values:
            with values.lock:
                values["own", id(value)] = value, thread_copy(value)
        return values["own", id(value)][1]  # type: ignore[no-any-return]

    def save_state(self) -> dict[str, int]:
        """Return the number of words drawn from each named sequence. The reader saves this with its own position."""
        return {**self._restored, **{name: rng.draws for name, rng in self._rngs.items()}}

    def restore_state(self, state: dict[str, int]) -> None:
        """Return each named sequence to its saved position.

        Args:
            state: What `save_state` returned.
        """
        self._restored = dict(state)
        for name, rng in self._rngs.items():
            rng.draws = state.get(name, 0)


def latest_shared(lane: Lane, name: Hashable, of: Hashable, make: Callable[[], T]) -> T:
    """What was made of `of`, once for all lanes of a process, and let go as soon as a lane asks for that of another."""
    kept: dict[Hashable, T] = lane.shared(name, dict)
    if of not in kept:
        kept.clear()
        kept[of] = make()
    return kept[of]
