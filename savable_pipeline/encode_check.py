"""`EncodedTwice`: encodes a share of samples twice, to find an encoder whose items do not depend on the sample alone.

It finds what differs from one call to the next: a clock, an unseeded generator, a count of calls. What stays as it is
while a process lives, such as the order of a set of strings, only `savable verify-resume` finds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from savable_pipeline.compare import find_difference
from savable_pipeline.encoder import TaskEncoder
from savable_pipeline.errors import EncodeError
from savable_pipeline.global_rng import seeder
from savable_pipeline.keys import word
from savable_pipeline.rng import Rng
from savable_pipeline.sample import Sample

T = TypeVar("T")
_WORD = -4  # of a sample's own key: whether it is checked; words -1 to -3 are those of `Rng.numpy` and the like


class EncodedTwice:
    """Stands in for `encoder.encode`; gives what that gives."""

    def __init__(self, encoder: TaskEncoder, share: float) -> None:
        self._encoder = encoder
        self._limit = int(share * 2.0**64)
        self._seed_globals = seeder(encoder.global_rng)

    def __call__(self, sample: Sample, rng: Rng) -> Any:
        """Encode `sample`, and once more if it is one of the share. Raises `EncodeError` where the results differ."""
        made = self._encoder.encode(sample, rng)
        if word(rng.key, _WORD) >= self._limit:
            return made
        again = Rng(rng._base, rng._parts)
        if hasattr(made, "__next__"):
            other = self._once_more(sample, again, lambda: self._encoder.encode(sample, again))
            return self._parts(sample, made, other, rng, again)
        before = self._copy(sample, made)
        self._compare(sample, before, self._once_more(sample, again, lambda: self._encoder.encode(sample, again)))
        return made

    def _parts(self, sample: Sample, made: Iterator[Any], other: Any, rng: Rng, again: Rng) -> Iterator[Any]:
        """What `made` gives, each part compared with one of `other`; `rng` is keyed anew for each by who asks."""
        if not hasattr(other, "__next__"):
            raise self._differs(sample, f"an iterator at first, {type(other).__name__} then")
        while True:
            part = next(made, _DONE)
            before = part if part is _DONE else self._copy(sample, part)
            again.rekey(rng._parts)
            second = self._once_more(sample, again, lambda: next(other, _DONE))
            if part is _DONE and second is _DONE:
                return
            if part is _DONE or second is _DONE:
                raise self._differs(sample, f"another number of parts: {rng._parts[2]} once, more once")
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
        """As it is now: an encoder may give the same buffer each time."""
        try:
            return copy.deepcopy(made)
        except Exception as error:
            raise EncodeError(
                f"{type(self._encoder).__name__}.encode cannot be checked: what it gave cannot be copied "
                f"({type(error).__name__}: {error}); leave out check= or give plain items; {_place(sample)}"
            ) from error

    def _compare(self, sample: Sample, first: Any, second: Any) -> None:
        difference = find_difference(first, second, "item")
        if difference is not None:
            raise self._differs(sample, str(difference))

    def _differs(self, sample: Sample, what: str) -> EncodeError:
        return EncodeError(
            f"{type(self._encoder).__name__}.encode gave two results for one sample, {what}; {_place(sample)}; an item "
            "must depend on the sample, the encoder's settings and `rng` alone, not on a clock, an unseeded generator "
            "or the calls before"
        )


def _place(sample: Sample) -> str:
    return (
        f"stage Encode, shard {sample.shard}, key {sample.key!r}, byte offset {sample.offset}, ref {tuple(sample.ref)}"
    )


_DONE: Any = object()
