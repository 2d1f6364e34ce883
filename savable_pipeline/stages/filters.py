"""`Filter`: the stage of `.filter(f)`, for samples and for items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from savable_pipeline.core.global_rng import DrawFound
from savable_pipeline.core.on_error import OnError, is_environment_error
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.stages.chunked_stage import ChunkedStage, value_of
from savable_pipeline.stages.encode import EncoderError, EncodeState, KeyedEncoder
from savable_pipeline.stages.item_buffer import TakenAhead, known_refs, restored_elements
from savable_pipeline.stages.item_ref import Element
from savable_pipeline.stages.mapped_function import MappedFunction, check_mapped, mapped_name, mapped_settings
from savable_pipeline.stages.pipeline import sample_of
from savable_pipeline.stages.skipped_samples import SkippedSamples, absent_reason
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State, parse_state, saved_refs
from savable_pipeline.stages.task_encoder import Skip

_MAX_ERROR_FRACTION = 0.1  # greatest fraction of a lane's elements that may be skipped because of errors
_ITEMS_AT_ONCE = 16  # most items to take from the source at a time, because they are all in memory
_DROPPED_MESSAGE = "{} dropped {}. Change its condition."


class _FilterState(EncodeState, kw_only=True):
    passed: SavedCount
    row: SavedCount


class Filter(ChunkedStage, SampleStage, ItemStage):
    """Yields the samples, items or packs for which `function` returns True.

    Samples that a reader excludes, or a `Join` skips, pass through without a call of `function`.

    Args:
        source: A stage of samples, or of items.
        function: `function(sample)`, `function(sample, rng)` or `function(item)`. The result must only depend on the
            arguments.
        on_error: For elements for which `function` raises, as for `sp.Encode`. A tenth of a lane's elements may be
            skipped; up to 100 are always allowed. For items, errors of disk, network or memory are always raised.
        global_rng: See `TaskEncoder.global_rng`; only for samples.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: `function` raised, or dropped very many elements in a row, or all of an epoch without a loader.
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
        self.function, self.on_error, self.yields = function, on_error, source.yields
        self._ahead = TakenAhead(items=source.yields != "samples")
        if source.yields != "samples":
            check_mapped(".filter", function, most=1)
            global_rng = False  # a function of an item draws nothing
        self._name = f".filter({mapped_name(function)})"
        info, most = source.info, _MAX_ERROR_FRACTION
        self._skipped = SkippedSamples("Filter", self._name, on_error, most, self.counts, info, self._ahead)
        self._function = source.lane.own(function)
        encoder = MappedFunction(".filter", self._function, global_rng=global_rng)
        self.keyed = KeyedEncoder(encoder, source.lane, check=0.0, purpose=f"filter {source.info.depth}")
        # number of elements that passed, and of elements that were tried since the last of them
        self._passed, self._since_passed = 0, 0

    def take(self, n: int) -> Any:
        """Return the next elements that pass, 1 to `n`, or none at the end.

        Samples are returned as refs, REF (any,), and items as a list of `Element`.
        """
        ahead, n = self._ahead, n if self.yields == "samples" else min(n, _ITEMS_AT_ONCE)
        while n:
            if ahead.next == len(ahead.refs) and not ahead.load(self.source, n, first=ahead.next):
                self._check_passed()
                break
            elements: list[Element] = []
            first, before, results = ahead.next, self._skipped.begin(elements), list[bool | None]()
            try:
                chosen = ahead.opened[first : first + n]
                with self.keyed.seeding.series(len(chosen)):
                    for ahead.next, each in enumerate(chosen, first):  # at an error, `next` is the failed element
                        results.append(self._try(each))
                        if results[-1]:
                            elements.append(each if isinstance(each, Element) else Element((each.index, each.epoch, 0)))
                        elif results[-1] is None:
                            break  # otherwise a draw in a later element would undo this count
                ahead.next += 1
            except BaseException as error:
                is_of_later_element = isinstance(error, SavableError) and 0 < len(results) == ahead.next - first
                self._skipped.roll_back(before)
                if is_of_later_element:
                    n = len(results)  # return the elements before the failed one first, and raise at the next call
                elif not isinstance(error, DrawFound):  # after a `DrawFound`, the row is repeated
                    raise
                continue
            self._skipped.end(self.info.tags)
            self._count(results)
            if elements:
                refs = ahead.refs[first : ahead.next]
                return elements if isinstance(refs, list) else refs[np.array(results, bool)]
        return ahead.refs[:0]

    def _try(self, element: Any) -> bool | None:
        """Return the result of `function`, or None if the element is lost or skipped because of an error.

        `element` is a `Sample`, or an `Element` with an item.
        """
        if is_item := isinstance(element, Element):
            item = value_of(self.source, element)
            if type(item) is Skip:  # a lost item, which was counted upstream
                return None
        elif element.index in self.info.excluded or absent_reason(element.origin):
            return True
        try:
            result = self._function(item) if is_item else self.keyed.encoded(element)[0]
            if result is None:
                raise TypeError("it returned None; return True or False")
            return bool(result)
        except Exception as failed:
            error = failed.error if isinstance(failed, EncoderError) else failed
        self.keyed.seeding.check(ends=True)
        sample = sample_of(self.source, element.ref) if is_item else element
        if is_item and is_environment_error(error):  # if it were skipped, a resumed run would yield it
            raise self._skipped.encode_error(sample, error)
        self._skipped.tolerate(sample, error)
        return None

    def _count(self, results: Sequence[bool | None]) -> None:
        """Count results of `_try`, which are None for lost or failed elements.

        Raises `EncodeError` if `StageInfo.max_empty` consecutive elements did not pass.
        """
        if dropped := results.count(False):
            self.counts["filtered"] += dropped
        self._passed += results.count(True)
        self._since_passed = 0 if any(results) else self._since_passed + len(results)
        if self._since_passed >= self.info.max_empty:
            raise EncodeError(_DROPPED_MESSAGE.format(self._name, f"{self._since_passed:,} in a row"))

    def _check_passed(self) -> None:
        """Raise `EncodeError` if the only lane has tried all elements of an epoch, and none passed."""
        if self._ahead.done and not self._passed and self.lane.count == 1:
            raise EncodeError(_DROPPED_MESSAGE.format(self._name, f"all {self._ahead.done:,} of an epoch"))

    def save_state(self) -> State:
        """Return the position.

        `refs` are the elements that were taken but not tried, and `samples` is the number of tried elements. `passed`
        is how many of these passed, and `row` how many were tried since the last one that passed. For `errors` and
        `avoided`, see `SkippedSamples.save_state`.
        """
        return {
            "refs": self._ahead.save(),
            "samples": self._ahead.done,
            **self._skipped.save_state(),
            "passed": self._passed,
            "row": self._since_passed,
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`, without calling `function`."""
        saved = parse_state(self, state, _FilterState)
        self.source.restore_state(saved.source)
        is_samples = self.yields == "samples"
        refs = known_refs(self, saved_refs(self, saved.refs)) if is_samples else restored_elements(self, saved.refs)
        self._ahead.restore(self.source, refs, saved.samples)
        self._skipped.restore(self, saved.errors, saved.avoided)
        self._passed, self._since_passed = saved.passed, saved.row

    def settings(self) -> dict[str, Any]:
        """Return the name of `function`, and the arguments that a `partial` binds."""
        return mapped_settings("function", self.function)
