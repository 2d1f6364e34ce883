"""`PurityCheck`: encodes some samples twice to find impure encoders.

It finds causes that change from one call to the next: a clock, an unseeded generator, a counter of calls. Only
`savable verify-resume` finds a cause that is constant within a process, such as the order of a set of strings. Values
that cannot be copied, or that are equal only to themselves, are not compared.
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
from savable_pipeline.data.dataset.sample import Sample, sample_name
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.batch_difference import copied_leaves, difference_of_leaves, has_a_value
from savable_pipeline.stages.mapped_function import encoder_call
from savable_pipeline.stages.task_encoder import TaskEncoder

T = TypeVar("T")
_CHECKED_BY_DEFAULT = 8  # if `share` is None, so many samples of a process, and items of a sample, are checked
_LONGEST_S = 1.0  # if `share` is None, items that take longer than this are not built twice
# Number of the random word that decides whether a sample is checked. `Rng.numpy` and similar methods use -1 to -3.
_CHECK_WORD = -4


def check_share(share: float | None) -> None:
    """Raise ValueError unless `share` is a fraction of the samples, or None."""
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"Encode: check must be a fraction of the samples, 0.0 to 1.0, not {share!r}")


class PurityCheck:
    """Replacement of `encoder.encode` that encodes a `share` of the samples twice.

    It returns the first result of the encoder, and raises `EncodeError` if the second differs. The error names the
    `stage`.

    If `share` is None, the first samples of a process are checked, except for those that take longer than a second.
    A sample that is not checked is encoded twice too if `seeding` needs that to find draws from global generators.
    """

    def __init__(self, stage: str, encoder: TaskEncoder, share: float | None, seeding: Seeding, lane: Lane) -> None:
        check_share(share)
        self._most_parts = _CHECKED_BY_DEFAULT if share is None else math.inf  # most parts of a sample to check
        self.remaining = self._most_parts if share != 0 else 0  # number of samples that remain to be checked
        self._longest_s = _LONGEST_S if share is None else math.inf
        self._encoder, self._seeding, self._in_threads = encoder, seeding, lane.in_thread
        self._stage = stage
        self._limit = int((1.0 if share is None else share) * 2.0**64)  # a sample with a smaller random word is checked

    def __call__(self, sample: Sample, rng: Rng) -> Any:
        """Encode `sample`, twice if it is checked. Raises `EncodeError` if the two results differ."""
        started = time.perf_counter()
        result = self._encoder.encode(sample, rng)
        is_slow = time.perf_counter() - started > self._longest_s
        is_checked = self.remaining > 0 and word(rng.key, _CHECK_WORD) < self._limit
        if is_slow or not (is_checked or self._seeding.wants_second_run()):
            return result
        self.remaining -= is_checked
        second_rng = rng.restarted()
        if hasattr(result, "pass_over"):  # the generator `_check_parts` would lack this method
            return result
        if hasattr(result, "__next__"):
            second_result = self._repeat(sample, second_rng, lambda: self._encoder.encode(sample, second_rng))
            return self._check_parts(sample, result, second_result, rng, second_rng)
        first_leaves = _leaves(result)
        second_result = self._repeat(sample, second_rng, lambda: self._encoder.encode(sample, second_rng))
        self._compare(sample, first_leaves, second_result)
        return result

    def _check_parts(
        self, sample: Sample, result: Iterator[Any], second_result: Any, rng: Rng, second_rng: Rng
    ) -> Iterator[Any]:
        """Yield the parts of `result`, and compare the first ones with those of `second_result`.

        The encoder draws from `rng` for `result`, and from `second_rng` for `second_result`. The caller sets the key of
        `rng` before each part.
        """
        if not hasattr(second_result, "__next__"):
            raise self._error(sample, f"an iterator at first, {type(second_result).__name__} then")
        for number in count():
            started = time.perf_counter()
            part = next(result, _DONE)
            first_leaves = _leaves(part)
            if number >= self._most_parts or time.perf_counter() - started > self._longest_s:
                if part is not _DONE:
                    yield from chain([part], result)
                return
            second_rng.rekey(rng.parts)
            second_part = self._repeat(sample, second_rng, lambda: next(second_result, _DONE))
            if part is _DONE and second_part is _DONE:
                return
            if part is _DONE or second_part is _DONE:
                raise self._error(sample, f"another number of parts: {rng.parts[2]} once, more once")
            self._compare(sample, first_leaves, second_part)
            yield part

    def _repeat(self, sample: Sample, rng: Rng, call: Callable[[], T]) -> T:
        """Return `call()`. If the global generators were seeded for the first call, they are seeded by `rng` again."""
        self._seeding.start_second_run()
        if self._seeding.seed is not None:
            self._seeding.seed(rng.key)
        try:
            return call()
        except Exception as error:
            raise self._error(sample, f"the second time it raised {type(error).__name__}: {error}") from error

    def _compare(self, sample: Sample, first_leaves: list[tuple[str, Any]], second_result: Any) -> None:
        """Raise `EncodeError` if the second result differs from the first, which has the leaves `first_leaves`."""
        difference, second_leaves = None, _leaves(second_result)
        with contextlib.suppress(Exception):  # values of any class may fail to be printed or compared
            if first_leaves and second_leaves:
                difference = difference_of_leaves(first_leaves, second_leaves, has_a_value)
        if difference is not None:
            raise self._error(sample, str(difference))

    def _error(self, sample: Sample, difference: str) -> EncodeError:
        """Return the error for two results with this difference. From now on, all calls are seeded."""
        self._seeding.seed_from_now()
        other_threads = "what another thread changes meanwhile, " if self._in_threads else ""
        return EncodeError(
            f"{encoder_call(self._encoder)} returned two results for one sample: {difference}. Use only the sample, "
            f"settings and `rng`, not {other_threads}a clock or earlier calls, or pass check=0.0."
            f"\n  stage {self._stage}, {sample_name(sample)}, {sample.location}, ref {tuple(sample.ref)}"
        )


def _leaves(result: Any) -> list[tuple[str, Any]]:
    """Return (path, copy) of each leaf of an item, or [] if copying fails."""
    try:
        return copied_leaves(result, "item")
    except Exception:  # an item of any class may raise any error
        return []


_DONE: Any = object()  # what `next` returns at the end of an iterator
