"""`Lane`: a logical worker, which is the unit of order, state and randomness."""

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
# What a run always reads. By dataset: its shards (shard_digests.py), or a commit of the Hub. By `LANE_COUNT`: the
# number of lanes, if it was derived from the data.
PinnedShards: TypeAlias = dict[str, bytes]
LANE_COUNT = "lanes"


@dataclass(frozen=True)
class WorkerContext:
    """Values of a worker that its lanes use.

    `shared`: values shared by all lanes of the process, see `Lane.shared`. `status`: memory where stages record what
    they work on, for the report of a crash (status_page.py). `pinned`: the shards that readers must read, and the
    number of lanes. `downloads`: whether readers may download ahead, which a lane that is only inspected does not.
    """

    shared: dict[Any, Any] = field(default_factory=dict)
    status: memoryview | None = None
    pinned: PinnedShards = field(default_factory=dict)
    downloads: bool = True


class ThreadValues(dict[Any, Any]):
    """Values shared by the lanes of one worker thread, by key.

    `process` has the values shared by all threads of a loader.
    """

    def __init__(self, process: dict[Any, Any], lock: threading.RLock) -> None:
        super().__init__()
        self.process, self.lock = process, lock


class Lane:
    """Logical worker of a run, for which a pipeline function builds its stages.

    All random numbers of a run are keyed by the lane or by the sample, so a lane yields the same batches in any process
    on any machine. A loader creates lanes with the keyword arguments and calls the pipeline function with each. The
    function must build its stages for the lane that it gets. Without a loader, `sp.Lane()` is enough.

    Args:
        index: The index of the lane, 0 … count - 1.
        count: The number of lanes of the run.
        seed: The seed of the run.
        epoch: The index of the epoch.
        pad: Whether batches are padded with rows that do not count, and continue after the lane's end.
        facts: Facts that are the same for all lanes of the run, such as decisions.
        worker: Values of the worker that runs the lane. None (default) creates an empty context.

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
        self.pad, self.facts = pad, facts  # `pad`: batches get rows that do not count, also after the lane's end
        self.worker = WorkerContext() if worker is None else worker
        self.unused: int | None = None  # samples read since the last batch; None without a loader
        self.skips = False  # whether the current batch is skipped, so that stages need not build its values
        self._rngs: dict[str, Rng] = {}
        self._restored: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Lane({self.index} of {self.count}, seed={self.seed})"

    def key(self, *parts: int | str) -> int:
        """Return a 64-bit key of random numbers for this lane, its epoch and `parts`.

        Args:
            *parts: What distinguishes the key from the lane's others.
        """
        return derive_key(self.seed, "lane", self.index, self.epoch, *parts)

    def rng(self, name: str) -> Rng:
        """Return the lane's own sequence of random numbers with this name.

        Its position is saved with the lane. Its `.numpy`, `.torch` and `.python` raise ValueError, because a state
        cannot save their positions.

        Args:
            name: The name of the sequence. Each name has a key of its own.

        Example:
            >>> sp.Lane(seed=7).rng("mixup").integers(10) == sp.Lane(seed=7).rng("mixup").integers(10)
            True
        """
        if name not in self._rngs:
            self._rngs[name] = Rng(self.key("rng", name), draws=self._restored.get(name, 0), counted=True)
        return self._rngs[name]

    def shared(self, key: Any, make: Callable[[], T], *, by_threads: bool = False) -> T:
        """Return a value that is built once for all lanes of a process.

        If threads are the workers, each thread has its own value unless `by_threads` is set.

        Args:
            key: Identifies the value among all shared values of the `worker`.
            make: Builds the value at first use.
            by_threads: Whether all threads share one value. They may then use it at the same time.
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
        """Return whether a worker thread runs the lane, and other threads other lanes."""
        return isinstance(self.worker.shared, ThreadValues)

    def own(self, value: T) -> T:
        """Return the value, or in a worker thread a copy that only the thread's lanes use.

        A value that is `thread_safe` is never copied.

        Args:
            value: An encoder, or a function that a stage calls.

        Raises:
            ValueError: It cannot be copied, or refers to objects that threads must not share.
        """
        values = self.worker.shared
        if not isinstance(values, ThreadValues) or getattr(value, "thread_safe", False):
            return value
        if ("own", id(value)) not in values:
            with values.lock:  # the original is stored too, so that no other object gets its id
                values["own", id(value)] = value, thread_copy(value)
        return values["own", id(value)][1]  # type: ignore[no-any-return]

    def save_state(self) -> dict[str, int]:
        """Return the number of words drawn from each named sequence, by name.

        The reader of the lane saves this with its own position.
        """
        return {**self._restored, **{name: rng.draws for name, rng in self._rngs.items()}}

    def restore_state(self, state: dict[str, int]) -> None:
        """Set each named sequence to its saved position.

        Args:
            state: The result of `save_state`.
        """
        self._restored = dict(state)
        for name, rng in self._rngs.items():
            rng.draws = state.get(name, 0)


def latest_shared(lane: Lane, name: Hashable, version: Hashable, make: Callable[[], T]) -> T:
    """Return a value that `make` builds, shared by all lanes of a process.

    They must need the same version. Only the latest version of each `name` is stored.
    """
    latest: dict[Hashable, T] = lane.shared(name, dict)
    if version not in latest:
        latest.clear()
        latest[version] = make()
    return latest[version]
