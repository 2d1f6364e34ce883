"""`PurityCheck`: encodes a share of samples twice, to find an encoder whose items do not depend on the sample alone.

It finds causes that change from one call to the next: a clock, an unseeded generator, a counter of calls. A cause that
is constant within a process, such as the order of a set of strings, is found only by `savable verify-resume`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from savable_pipeline.core.global_rng import seeder
from savable_pipeline.core.keyed_random import word
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.batch_difference import find_difference
from savable_pipeline.stages.task_encoder import TaskEncoder

T = TypeVar("T")
_WORD = -4  # this word of a sample's key decides whether it is checked; `Rng.numpy` and the like use words -1 to -3


class PurityCheck:
    """Takes the place of `encoder.encode` and returns the same; `share` of the samples, 0 to 1, are encoded twice."""

    def __init__(self, encoder: TaskEncoder, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"Encode: check must be a share of the samples, 0.0 to 1.0, not {share!r}")
        self._encoder = encoder
        self._limit = int(share * 2.0**64)
        self._seed_globals = seeder(encoder.global_rng)

    def __call__(self, sample: Sample, rng: Rng) -> Any:
        """Encode `sample`, twice if it is among the share. Raises `EncodeError` if the two results differ."""
        made = self._encoder.encode(sample, rng)
        if word(rng.key, _WORD) >= self._limit:
            return made
        again = rng.restarted()
        if hasattr(made, "__next__"):
            other = self._once_more(sample, again, lambda: self._encoder.encode(sample, again))
            return self._parts(sample, made, other, rng, again)
        before = self._copy(sample, made)
        self._compare(sample, before, self._once_more(sample, again, lambda: self._encoder.encode(sample, again)))
        return made

    def _parts(self, sample: Sample, made: Iterator[Any], other: Any, rng: Rng, again: Rng) -> Iterator[Any]:
        """The parts of `made`, each compared with one of `other`; the caller sets the key of `rng` before each part."""
        if not hasattr(other, "__next__"):
            raise self._differs(sample, f"an iterator at first, {type(other).__name__} then")
        while True:
            part = next(made, _DONE)
            before = part if part is _DONE else self._copy(sample, part)
            again.rekey(rng.parts)
            second = self._once_more(sample, again, lambda: next(other, _DONE))
            if part is _DONE and second is _DONE:
                return
            if part is _DONE or second is _DONE:
                raise self._differs(sample, f"another number of parts: {rng.parts[2]} once, more once")
            self._compare(sample, before, second)
            yield part

    def _once_more(self, sample: Sample, again: Rng, make: Callable[[], T]) -> T:
        if self._seed_globals is not None:
            self._seed_globals(again.key)
        try:
            return make()
        except Exception as error:
            raise self._differs(sample, f"the second time it raised {type(error).__name__}: {error}") from error

    def _copy(self, sample: Sample, made: Any) -> Any:
        """A deep copy of an item: the encoder may overwrite the item's buffers in its next call."""
        try:
            return copy.deepcopy(made)
        except Exception as error:
            raise EncodeError(
                f"{type(self._encoder).__name__}.encode cannot be checked: the item it returned cannot be copied "
                f"({type(error).__name__}: {error}); leave out check= or give plain items; {_place(sample)}"
            ) from error

    def _compare(self, sample: Sample, first: Any, second: Any) -> None:
        difference = find_difference(first, second, "item")
        if difference is not None:
            raise self._differs(sample, str(difference))

    def _differs(self, sample: Sample, difference: str) -> EncodeError:
        return EncodeError(
            f"{type(self._encoder).__name__}.encode gave two results for one sample, {difference}; {_place(sample)}; "
            "an item must depend on the sample, the encoder's settings and `rng` alone, not on a clock, an unseeded "
            "generator or the calls before"
        )


def _place(sample: Sample) -> str:
    return f"stage Encode, shard {sample.shard}, key {sample.key!r}, {sample.place}, ref {tuple(sample.ref)}"


_DONE: Any = object()
