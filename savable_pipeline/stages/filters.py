"""`Filter`: the stage that `.filter(f)` makes, of samples or of items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.core.global_rng import DrawFound
from savable_pipeline.core.on_error import OnError, check_on_error, described, from_user_code, reason_of
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import REF, RefArray, skip_counters
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.stages.chunked_stage import ChunkedStage, last_element
from savable_pipeline.stages.encode import EncoderError, EncodeState, KeyedEncoder
from savable_pipeline.stages.item_buffer import SamplesAhead, known_refs
from savable_pipeline.stages.item_ref import Element, sample_indices
from savable_pipeline.stages.mapped_function import MappedFunction, check_mapped, mapped_name, mapped_settings
from savable_pipeline.stages.pipeline import sample_names
from savable_pipeline.stages.skipped_samples import (
    SkippedSamples,
    absent_reason,
    check_errors,
    skips_for_good,
)
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State, parse_state, saved_refs

_MAX_ERRORS = 0.1  # largest fraction of a lane's elements that may be skipped because of errors
_DROPS = "{} dropped {}. Change its condition."
_NOTHING = "it returned None; return True or False"


class FilterCounts(msgspec.Struct):
    """Counts of tried, passed and failed samples of a filter.

    `row` counts tried samples since the last one that passed.
    """

    tried: SavedCount = 0
    passed: SavedCount = msgspec.field(default=0, name="kept")
    errors: SavedCount = 0
    row: SavedCount = 0


class Filter(ChunkedStage, SampleStage, ItemStage):
    """Yields the samples, items or packs for which `function` returns True.

    Samples that a reader excludes, or a `Join` skips, pass through without a call of `function`.

    Args:
        source: A stage of samples, or of items.
        function: `function(sample)`, `function(sample, rng)` or `function(item)`. The result must only depend on the
            arguments.
        on_error: For elements for which `function` raises, as for `sp.Encode`. A tenth of a lane's elements may be
            skipped; up to 100 are always allowed. Of items, errors of disk, network or memory are always raised.
        global_rng: See `TaskEncoder.global_rng`; only for samples.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: `function` raised, or nothing is kept of very many in a row, or of a whole pass without a loader.
    """

    def __init__(
        self,
        source: SampleStage | ItemStage,
        function: Callable[..., bool],
        *,
        on_error: OnError = "raise",
        global_rng: bool | tuple[str, ...] | None = None,
    ) -> None:
        Stage.__init__(self, source)
        self.function, self.on_error, self.yields, self._tally = function, on_error, source.yields, FilterCounts()
        self._own_function, self._name = source.lane.own(function), f".filter({mapped_name(function)})"
        if source.yields != "samples":
            check_mapped(".filter", function, most=1)
            check_on_error("filter", on_error)
            return
        self._ahead = SamplesAhead()
        self._skipped = SkippedSamples(self._name, on_error, _MAX_ERRORS, self.counts, source.info, self._ahead)
        encoder = MappedFunction(".filter", self._own_function, global_rng=global_rng)
        self.keyed = KeyedEncoder(encoder, source.lane, check=0.0, purpose=f"filter {source.info.depth}")

    def take(self, n: int) -> Any:
        """Return the refs of the next samples, REF (any,), or the next item in a list.

        There are none only at the end.
        """
        return self._take_samples(n) if self.yields == "samples" else self._take_item()

    def _take_item(self) -> list[Element]:
        """Return the next item that passes, in a list, which is empty at the end."""
        for item in self.source:  # the source builds an item before it moves past it, so that an error loses nothing
            passed = self._try_item(item)
            self._count([passed])
            if passed:
                return [last_element(self.source, item)]
            if passed is None:
                counts, items = self._tally, f"items of {self.lane}"
                check_errors(self._name, counts.errors, counts.tried, _MAX_ERRORS, items, self._last_error)
        self._end()
        return []

    def _try_item(self, item: Any) -> bool | None:
        """Return the result of `function` for an item, or None if the item is skipped because of an error."""
        try:
            result = self._own_function(item)
            if result is None:
                raise TypeError(_NOTHING)
            return bool(result)
        except Exception as error:
            ref = self.source.ref
            fault = EncodeError(
                f'{self._name} failed: {described(error)}. Fix it, or pass on_error="skip".'
                f"\n  {sample_names(self.source, ref)}"
            )
            if not skips_for_good(self.on_error, error, fault):
                raise fault from from_user_code(error)
            self.counts.update(skip_counters(reason_of(error), next(iter(sample_indices(ref)))))
            self._last_error = str(fault)
            return None

    def _take_samples(self, n: int) -> RefArray:
        """Return the refs of up to `n` samples that pass: REF (any,). It is empty at the end."""
        ahead, excluded = self._ahead, self.info.excluded
        while n:
            if ahead.next == len(ahead.refs) and not ahead.load(self.source, n, first=ahead.next):
                self._end()
                break
            elements: list[Element] = []
            first, before, passed = ahead.next, self._skipped.begin(elements), list[bool | None]()
            try:
                chosen = ahead.samples[first : first + n]
                with self.keyed.seeding.row(len(chosen)):
                    for ahead.next, sample in enumerate(chosen, first):
                        untried = sample.index in excluded or absent_reason(sample.origin)
                        passed.append(True if untried else self._try_sample(sample))
                        if passed[-1]:
                            elements.append(Element((sample.index, sample.epoch, 0)))
                        elif passed[-1] is None:
                            break  # a later draw must not undo this count
                ahead.next += 1
            except DrawFound:  # the row has no effect, and is repeated
                self._skipped.roll_back(before)
                continue
            except SavableError:
                if not elements or len(passed) > ahead.next - first:  # a thread could not repeat the row
                    raise
                # Yield the samples before it first, as without reading ahead. The next call tries it again.
            except BaseException:
                self._skipped.roll_back(before)  # the call returns no sample, so undo all of it
                raise
            self._skipped.end(self.info.tags)
            self._count(passed)
            if elements:
                found: RefArray = ahead.refs[first : ahead.next][np.array(passed, bool)]
                return found
        return np.empty(0, REF)

    def _try_sample(self, sample: Sample) -> bool | None:
        """Return the result of `function` for a sample, or None if the sample is skipped because of an error."""
        try:
            result, _ = self.keyed.encoded(sample)
            if result is not None:
                return bool(result)
            error: Exception = TypeError(_NOTHING)
        except EncoderError as failed:
            error = failed.error
        self.keyed.seeding.check(ends=True)
        self._skipped.tolerate(sample, error)
        return None

    def _count(self, passed: Sequence[bool | None]) -> None:
        """Count results of `function`. Raises `EncodeError` if very many in a row were dropped."""
        counts = self._tally
        if dropped := passed.count(False):
            self.counts["filtered"] += dropped
        counts.tried += len(passed)
        counts.passed += passed.count(True)
        counts.errors += passed.count(None)
        counts.row = 0 if any(passed) else counts.row + len(passed)
        if counts.row >= self.info.max_empty:
            raise EncodeError(_DROPS.format(self._name, f"{counts.row:,} in a row"))

    def _end(self) -> None:
        """Raise `EncodeError` if this was a pass over all samples, and none passed."""
        counts = self._tally
        if counts.tried and not counts.passed and self.lane.count == 1:
            raise EncodeError(_DROPS.format(self._name, f"all {counts.tried:,} of an epoch"))

    def save_state(self) -> State:
        """Return the counts.

        For samples, the state also has the `refs` that were taken but not tried, and the number of tried `samples`.
        """
        state = {"counts": msgspec.to_builtins(self._tally), "source": self.source.save_state()}
        if self.yields != "samples":
            return state
        ahead = {"refs": self._ahead.remaining.tobytes(), "samples": self._ahead.done}
        return {**ahead, **self._skipped.save_state(), **state}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`, without calling `function`."""
        saved: Any = parse_state(self, state, _SampleFilterState if self.yields == "samples" else _FilterState)
        self.source.restore_state(saved.source)
        self._tally = saved.counts
        if self.yields == "samples":
            self._ahead.restore(self.source, known_refs(self, saved_refs(self, saved.refs)), saved.samples)
            self._skipped.restore(self, saved.errors, saved.avoided)

    def settings(self) -> dict[str, Any]:
        """Return the name of `function`, and the arguments that a `partial` binds."""
        return mapped_settings("function", self.function)


class _FilterState(msgspec.Struct):
    counts: FilterCounts
    source: dict[str, Any]


class _SampleFilterState(EncodeState, kw_only=True):
    counts: FilterCounts
