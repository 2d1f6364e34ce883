"""`PurityCheck`: encodes some samples twice to find impure encoders.

It finds causes that change from one call to the next: a clock, an unseeded generator, a counter of calls. A cause that
is constant within a process, such as the order of a set of strings, is found only by `savable verify-resume`. What
cannot be copied, or is compared by its address alone, is not looked at.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any, TypeVar

from savable_pipeline.core.global_rng import Seeding
from savable_pipeline.core.keyed_random import word
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.batch_difference import copied_leaves, difference_of_leaves, has_a_value
from savable_pipeline.stages.mapped_function import encoder_call
from savable_pipeline.stages.task_encoder import TaskEncoder

T = TypeVar("T")
_FIRST = 8  # samples of a process, and items of one, that are checked unless a share is given
_LONGEST_S = 1.0  # limit for an item that is built twice
_WORD = -4  # this word of a sample's key decides whether it is checked; `Rng.numpy` and the like use words -1 to -3


def check_share(share: float | None) -> None:
    """Raise ValueError unless this is a fraction or None."""
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"Encode: check must be a fraction of the samples, 0.0 to 1.0, not {share!r}")


class PurityCheck:
    """Replacement of `encoder.encode` that checks a `share` of the samples.

    It returns the same items. Checked samples are encoded twice.

    None: the first ones of a process, unless one takes longer than a second. More are encoded twice where `seeding`
    asks for it, from two states of the global generators.
    """

    def __init__(self, encoder: TaskEncoder, share: float | None, seeding: Seeding, lane: Lane) -> None:
        check_share(share)
        self._parts_of_one = _FIRST if share is None else math.inf
        self.remaining = self._parts_of_one if share != 0 else 0  # samples to check
        self._longest_s = _LONGEST_S if share is None else math.inf
        self._encoder, self._seeding, self._in_threads = encoder, seeding, lane.in_thread
        self._limit = int((1.0 if share is None else share) * 2.0**64)

    def __call__(self, sample: Sample, rng: Rng) -> Any:
        """Encode `sample`, twice if it is to be checked. Raises `EncodeError` if the two results differ."""
        begun = time.perf_counter()
        result = self._encoder.encode(sample, rng)
        slow = time.perf_counter() - begun > self._longest_s
        checked = self.remaining > 0 and word(rng.key, _WORD) < self._limit
        if slow or not (checked or self._seeding.wants_second_run()):
            return result
        self.remaining -= checked
        again = rng.restarted()
        if hasattr(result, "pass_over"):  # goes on in the middle of a sample without making what was given: stays so
            return result
        if hasattr(result, "__next__"):
            other = self._once_more(sample, again, lambda: self._encoder.encode(sample, again))
            return self._parts(sample, result, other, rng, again)
        before = _leaves(result)
        self._compare(sample, before, self._once_more(sample, again, lambda: self._encoder.encode(sample, again)))
        return result

    def _parts(self, sample: Sample, result: Iterator[Any], other: Any, rng: Rng, again: Rng) -> Iterator[Any]:
        """The parts of `result`, the first ones compared with those of `other`; the caller sets the key of `rng` before
        each.
        """
        if not hasattr(other, "__next__"):
            raise self._differs(sample, f"an iterator at first, {type(other).__name__} then")
        for number in count():
            begun = time.perf_counter()
            part = next(result, _DONE)
            before = _leaves(part)
            if number >= self._parts_of_one or time.perf_counter() - begun > self._longest_s:
                yield from () if part is _DONE else chain([part], result)
                return
            again.rekey(rng.parts)
            second = self._once_more(sample, again, lambda: next(other, _DONE))
            if part is _DONE and second is _DONE:
                return
            if part is _DONE or second is _DONE:
                raise self._differs(sample, f"another number of parts: {rng.parts[2]} once, more once")
            self._compare(sample, before, second)
            yield part

    def _once_more(self, sample: Sample, again: Rng, make: Callable[[], T]) -> T:
        self._seeding.start_second_run()
        if self._seeding.seed is not None:
            self._seeding.seed(again.key)
        try:
            return make()
        except Exception as error:
            raise self._differs(sample, f"the second time it raised {type(error).__name__}: {error}") from error

    def _compare(self, sample: Sample, before: list[tuple[str, Any]], second: Any) -> None:
        difference, after = None, _leaves(second)
        with contextlib.suppress(Exception):  # of whatever class a value is: it may not be printed or compared
            difference = difference_of_leaves(before, after, has_a_value) if before and after else None
        if difference is not None:
            raise self._differs(sample, str(difference))

    def _differs(self, sample: Sample, difference: str) -> EncodeError:
        self._seeding.seed_from_now()
        threads = "what another thread changes meanwhile, " if self._in_threads else ""
        return EncodeError(
            f"{encoder_call(self._encoder)} returned two results for one sample: {difference}. Use only the sample, "
            f"settings and `rng`, not {threads}a clock or earlier calls, or pass check=0.0."
            f"\n  stage Encode, shard {sample.shard}, key {sample.key!r}, {sample.location}, ref {tuple(sample.ref)}"
        )


def _leaves(result: Any) -> list[tuple[str, Any]]:
    """The leaves of an item as they are before the encoder is called again; none where they cannot be had."""
    try:
        return copied_leaves(result, "item")
    except Exception:  # of whatever class the item is
        return []


_DONE: Any = object()
