"""`SkippedSamples`: samples that an `Encode` stage skips.

It counts them, and lists those that must not be tried again. `SourceCounts` counts by source what a stage uses and
drops.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from savable_pipeline.core.files import lacks_handles
from savable_pipeline.core.on_error import (
    OnError,
    check_on_error,
    described,
    from_user_code,
    is_environment_error,
    reason_of,
    skips,
)
from savable_pipeline.data.dataset.ref import REF, skip_counters, source_counter, tag_of
from savable_pipeline.data.dataset.sample import JoinedParts, Sample, sample_name
from savable_pipeline.data.dataset.sample_source import SampleSource
from savable_pipeline.errors import EncodeError, SavableError, ShardError
from savable_pipeline.stages.item_buffer import TakenAhead
from savable_pipeline.stages.item_ref import Element, ItemRef, sample_refs
from savable_pipeline.stages.stage import Stage, saved_refs
from savable_pipeline.stages.stage_info import REASON, StageInfo
from savable_pipeline.stages.task_encoder import Skip

log = logging.getLogger(__name__)

EXCLUDED = Skip(REASON)
_STAGE = "\n  stage Encode"
_ALWAYS = 100  # number of errors of a lane that are allowed whatever the fraction in `max_errors`
_REMEMBERED = 1000  # lost samples to remember, so that a second piece of one is not counted again


def check_limits(on_error: OnError, max_errors: int | float) -> None:
    """Raise ValueError for a wrong `on_error` or `max_errors` of `Encode`."""
    check_on_error("Encode", on_error)
    if max_errors < 0 or (isinstance(max_errors, float) and not max_errors <= 1):
        raise ValueError(f"Encode: max_errors must be a count or a fraction of at most 1.0, not {max_errors!r}")


def _fix(function: str, error: Exception) -> str:
    """Return advice for an error of an encoder or a filter."""
    if isinstance(error, ImportError):
        return "Install what is missing and resume."
    if lacks_handles(error):
        return "Raise `ulimit -n` and resume."
    value = "False" if function.startswith(".filter") else "sp.Skip(...)"
    skip = 'pass on_error="skip".'
    return f"Fix this and resume, or {skip}" if is_environment_error(error) else f"Return {value} or {skip}"


_Mark: TypeAlias = tuple[Any, ...]


class SkippedSamples:
    """Samples that one stage drops, counted in its `counts` by reason.

    `function` is the name of the encoder or filter in messages. Raises ValueError for wrong settings of `Encode`.
    """

    def __init__(
        self,
        function: str,
        on_error: OnError,
        max_errors: int | float,
        counts: Counter[str],
        upstream: StageInfo,
        ahead: TakenAhead,
    ) -> None:
        check_limits(on_error, max_errors)
        self._counts, self._ahead = counts, ahead
        self._lane, self._max_empty = upstream.lane, upstream.max_empty
        self._noun = "items" if upstream.encoder else "samples"
        self._function, self._on_error, self._max_errors = function, on_error, max_errors
        self.errors = 0  # samples dropped because of an error
        # why a sample is not tried again, by (index, epoch)
        self.avoided: dict[tuple[int, int], str] = {}
        # why a sample that was counted as used is lost, by (index, epoch)
        self._lost_reasons: dict[tuple[int, int], str] = {}
        self._by_source = SourceCounts(counts)
        self._row = 0  # consecutive samples without an item, of all sources, including excluded ones
        self._elements: list[Element] = []  # the elements of the call since `begin`
        self._noted = 0  # number of these elements that `_row` already includes

    def begin(self, elements: list[Element]) -> _Mark:
        """Snapshot the counts before a call that may fail.

        The call adds its elements to `elements`.
        """
        self._elements, self._noted = elements, 0
        return self.mark()

    def mark(self) -> _Mark:
        """Snapshot the counts, the number of elements and the position, for `roll_back`."""
        counts = dict(self._counts), self.errors, self._row, self._noted, dict(self._by_source.rows)
        return *counts, len(self._elements), self._ahead.next

    def roll_back(self, before: _Mark) -> None:
        """Return to a snapshot."""
        counts, self.errors, self._row, self._noted, self._by_source.rows, elements, self._ahead.next = before
        self._counts.clear()
        self._counts.update(counts)
        del self._elements[elements:]

    def end(self, tags: frozenset[int]) -> None:
        """Count the items of a call. `tags` are those of all sources."""
        if self._elements:
            if self._row or self._by_source.rows:
                self._end_rows()
            self._by_source.count_items(self._elements, tags)
            self._elements = []

    def _end_rows(self) -> None:
        """Reset the count of consecutive samples without an item if items were added since the last reset."""
        if self._elements[self._noted :]:
            self._by_source.end_rows(self._elements[self._noted :])
            self._row, self._noted = 0, len(self._elements)

    def skipped(self, sample: Sample, skip: Skip) -> None:
        """Count a skipped sample.

        Raises `EncodeError` after `StageInfo.max_empty` in a row without an item, either of one source without excluded
        samples, which may be all of a source, or of all sources together.
        """
        self._end_rows()
        self._row += 1
        row, of = self._row, ""
        if skip is EXCLUDED:
            self._counts.update(skip_counters(skip.reason, sample.index))
        else:
            row = self._by_source.count_dropped(skip.reason, (sample.index, sample.epoch))
            source = sample.origin.names.get(tag_of(sample.index))
            row, of = max(row, self._row), f" of the source {source!r}" if source and row > self._row else ""
        if row & 1023 == 0 and row.bit_count() == 1:  # 1024, 2048, 4096, …
            log.warning("%d samples%s in a row were skipped, the last one with %r", row, of, skip.reason)
        if row >= self._max_empty:
            has = "" if skip is EXCLUDED else f" It has {', '.join(sample) or 'no part'}."
            raise EncodeError(
                f"{self._function} skipped {row:,} samples{of} in a row, the last one with {skip.reason!r}.{has} "
                "Change the encoder or the data."
            )

    def tolerate(self, sample: Sample, error: Exception) -> None:
        """Skip the sample that is next in `ahead` if `on_error` skips its error.

        Otherwise raise the error.
        """
        is_of_shard = isinstance(error, ShardError)
        if isinstance(error, SavableError) and not is_of_shard:
            raise error
        fault = error if isinstance(error, ShardError) else self.failed(sample, error)
        on_error = sample.origin.on_error if is_of_shard else self._on_error  # for a damaged shard, the reader's
        # If a library is not installed on this machine, all samples would be skipped, and on others none.
        if lacks_handles(error) or isinstance(error, ImportError) or not skips(on_error, fault):
            raise fault
        if is_environment_error(error):
            self.avoid(sample.index, sample.epoch, reason_of(error))
            self._forget_before(sample.epoch - 1)
        self._lost(sample, reason_of(error), str(fault).split(_STAGE)[0])

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Never try this sample again, for this reason."""
        self.avoided[index, epoch] = reason

    def count_avoided_again(self, sample: Sample) -> None:
        """Skip a sample that failed earlier and must not be tried again."""
        self._lost(sample, self.avoided[sample.index, sample.epoch], "avoided since it failed before")

    def lose(self, sample: Sample, error: Exception, *, counted: bool) -> Skip:
        """Return the `Skip` of a sample that was used but fails now.

        `counted` is whether these counts have its item. Otherwise a loader that saved the state has counted it. Raises
        the error like `tolerate`.
        """
        self.tolerate(sample, error)
        return self._uncounted(sample, reason_of(error), counted=counted)

    def lost_before(self, sample: Sample, *, counted: bool) -> Skip | None:
        """Return the `Skip` of a sample that is known to be lost, otherwise None.

        The loss is counted if it was not counted yet. `counted` is as for `lose`.
        """
        number = sample.index, sample.epoch
        if number in self._lost_reasons:
            return Skip(self._lost_reasons[number])
        if not (reason := self.avoided.get(number) or absent_reason(sample.origin)):
            return None
        skip = self._uncounted(sample, reason, counted=counted)
        self.skipped(sample, skip)
        return skip

    def _uncounted(self, sample: Sample, reason: str, *, counted: bool) -> Skip:
        """Subtract the item of a lost sample from the counts, and remember the sample.

        The counter of its source becomes part of the state, so it is the same in a resumed run.
        """
        self._counts["items"] -= counted
        self._counts[source_counter(sample.index, "items")] -= 1
        self._lost_reasons[sample.index, sample.epoch] = reason
        if len(self._lost_reasons) > _REMEMBERED:
            del self._lost_reasons[next(iter(self._lost_reasons))]
        return Skip(reason)

    def _forget_before(self, epoch: int) -> None:
        """Forget avoided samples of earlier epochs, whose refs do not come again."""
        for ref in [ref for ref in self.avoided if ref[1] < epoch]:
            del self.avoided[ref]

    def _lost(self, sample: Sample, reason: str, detail: str) -> None:
        """Count a sample skipped because of an error, and quarantine it. Raises `EncodeError` if there are too many."""
        log.info("skipping index %d of epoch %d: %s", sample.index, sample.epoch, detail)
        quarantine = sample.origin.quarantine
        if quarantine is not None:
            row = {"shard": sample.shard, "key": _key_of(sample), "offset": sample.offset, "ref": list(sample.ref)}
            quarantine.add(**row, reason=reason, detail=detail, lane=self._lane.index)
        self.errors += 1
        done, most = self._ahead.done + 1, self._max_errors
        if self.errors > (max(most * done, _ALWAYS) if isinstance(most, float) else most):
            fix = "return False for them" if self._function.startswith(".filter") else "raise max_errors"
            raise EncodeError(
                f"{self.errors} of the first {done} {self._noun} of {self._lane} failed, more than "
                f"max_errors={most!r}. Fix {self._function} or the data, or {fix}.\n  {detail}"
            )
        self.skipped(sample, Skip(reason))

    def failed(self, sample: Sample, error: Exception) -> EncodeError:
        """Return an `EncodeError` that names the sample for which the encoder raised."""
        cause = f"{self._function} failed on {sample_name(sample)}: {described(error)}"
        fix = _fix(self._function, error)
        fault = EncodeError(f"{cause}. {fix}{_STAGE}, {sample.location}, ref {tuple(sample.ref)}")
        fault.__cause__ = from_user_code(error)
        return fault

    def restore(self, stage: Stage, errors: int, avoided: Mapping[str, bytes]) -> None:
        """Restore the result of `save_state`."""
        self.errors = errors
        for reason, refs in avoided.items():
            self.avoided.update(dict.fromkeys(saved_refs(stage, refs).tolist(), reason))

    def save_state(self) -> dict[str, Any]:
        """Return the number of samples skipped for errors, and avoided samples.

        These are refs by reason, 12 bytes each.
        """
        avoided: dict[str, list[tuple[int, int]]] = {}
        for ref, reason in self.avoided.items():
            avoided.setdefault(reason, []).append(ref)
        return {
            "errors": self.errors,
            "avoided": {reason: np.array(refs, REF).tobytes() for reason, refs in avoided.items()},
        }


def absent_reason(origin: SampleSource) -> str:
    """Return why a `Join` upstream skips the sample from this source, or ""."""
    return origin.absent if isinstance(origin, JoinedParts) else ""


def _key_of(sample: Sample) -> str:
    """Return the key of a sample, or "?" if it cannot be read."""
    try:
        return sample.key
    except ShardError:  # the header with the key may be unreadable too
        return "?"


@cache
def _names_of(tag: int) -> tuple[str, str]:
    """Return the names of the counters of a source's items and tokens."""
    return f"source/{tag}/items", f"source/{tag}/tokens"


def _tag_of_first(ref: ItemRef) -> int:
    """Return the tag of the source of an item's or pack's first sample."""
    return tag_of(ref[0] if type(ref[0]) is type(ref[-1]) is int else next(sample_refs(ref))[0])


class SourceCounts:
    """Counts of the samples that a stage uses and drops, by source.

    Drops are counted by reason and in a row.

        counter of the stage           counts
        skipped/REASON                 dropped samples
        source/TAG/skipped             the same, for the source with this tag
        source/TAG/skipped/REASON      the same, without drops that the user requested
        source/TAG/first               those of them in the source's first epoch
        source/TAG/items               items of the source; a packer also counts `tokens` and `skipped_tokens`

    The loader sums up the last three over its lanes, to find sources that yield few items or none. `rows` has by tag
    how many samples of a source were dropped in a row.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.rows: dict[int, int] = {}

    def count_items(self, elements: Sequence[Element], tags: Collection[int]) -> None:
        """Count items. `tags` are those of all sources."""
        found = {tag: len(elements) for tag in tags}
        if len(tags) > 1:
            found = Counter([_tag_of_first(element.ref) for element in elements])
        for tag, number in found.items():
            self._counts[_names_of(tag)[0]] += number

    def end_rows(self, elements: Sequence[Element]) -> None:
        """Restart counting drops in a row for the sources of these items."""
        for tag in {_tag_of_first(element.ref) for element in elements} if self.rows else ():
            self.rows.pop(tag, None)

    def count_item(self, ref: ItemRef, tokens: int = 0) -> None:
        """Count an item, a part of an item or a pack, for the source of its first sample."""
        tag = _tag_of_first(ref)
        items, of_tokens = _names_of(tag)
        self._counts[items] += 1
        if tokens:
            self._counts[of_tokens] += tokens
        if self.rows:
            self.rows.pop(tag, None)

    def count_dropped(self, reason: str, ref: ItemRef, tokens: int = 0, *, asked: bool = False) -> int:
        """Count a dropped sample, or a dropped item for the source of its first sample.

        `asked` is True if the user requested it. Returns how many samples of this source were dropped in a row.
        """
        index, epoch = next(sample_refs(ref))[:2]
        self._counts.update(skip_counters(reason, index))
        if not asked:
            self._counts[source_counter(index, f"skipped/{reason}")] += 1
            for counter, number in (("first", int(not epoch)), ("skipped_tokens", tokens)):
                if number:
                    self._counts[source_counter(index, counter)] += number
        row = self.rows[tag_of(index)] = self.rows.get(tag_of(index), 0) + 1
        return row
