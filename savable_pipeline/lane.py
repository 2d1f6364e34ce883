"""`Lane`: one logical worker, the unit of order, of state and of randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from savable_pipeline.keys import key
from savable_pipeline.rng import Rng

T = TypeVar("T")


class Lane:
    """Lane `index` of `count`, of the run with this `seed`, in its pass number `epoch` over the data.

    A pipeline function gets one and builds its stages for it. Everything in a run that is random is keyed by the
    lane or by a sample, so a lane gives the same batches wherever it runs.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        seed: int = 0,
        *,
        epoch: int = 0,
        shared: dict[Any, Any] | None = None,
        note: memoryview | None = None,
        pad: bool = False,
    ) -> None:
        if not 0 <= index < count:
            raise ValueError(f"a lane's index must lie in 0 … count-1; got index {index}, count {count}")
        self.index = index
        self.count = count
        self.seed = seed
        self.epoch = epoch
        self.note = note  # words in which stages say what they work on (see note.py), for when the process dies
        self.pad = pad  # whether batches are filled up, and go on beyond the end, with rows that do not count
        self._shared: dict[Any, Any] = {} if shared is None else shared
        self._rngs: dict[str, Rng] = {}
        self._restored: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Lane({self.index} of {self.count}, seed={self.seed})"

    def key(self, *parts: int | str) -> int:
        """A 64-bit key that belongs to this lane, this pass and `parts`."""
        return key(self.seed, "lane", self.index, self.epoch, *parts)

    def rng(self, name: str) -> Rng:
        """The lane's own sequence of random numbers called `name`; where it stands is saved with the lane.

        It has no `.numpy`, `.torch` and `.python`, whose places a state could not hold.
        """
        if name not in self._rngs:
            self._rngs[name] = Rng(self.key("rng", name), draws=self._restored.get(name, 0), _counted=True)
        return self._rngs[name]

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned for `key`, once for all lanes of a process that were given one `shared` dict."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[no-any-return]

    def save_state(self) -> dict[str, int]:
        """How many words each named sequence has given. The reader saves this with its own position."""
        return {**self._restored, **{name: rng.draws for name, rng in self._rngs.items()}}

    def restore_state(self, state: dict[str, int]) -> None:
        """Put each named sequence where it stood."""
        self._restored = dict(state)
        for name, rng in self._rngs.items():
            rng.draws = state.get(name, 0)
