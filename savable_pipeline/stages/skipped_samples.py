"""`SkippedSamples`: samples that an `Encode` stage skips.

`SkippedSamples` counts them, and lists those that must not be tried again. `SourceCounts` counts the samples that a
stage uses and drops, by source.
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
_DETAILS = "\n  stage "  # start of the details of an error
_ALWAYS_ALLOWED = 100  # errors of a lane that are allowed even if `max_errors` is a smaller fraction
_MOST_REMEMBERED = 1000  # lost samples to remember, so that a later item of such a sample is not counted again


def check_limits(stage: str, on_error: OnError, max_errors: int | float) -> None:
    """Raise ValueError for a wrong `on_error` or `max_errors` of a stage."""
    check_on_error(stage, on_error)
    if max_errors < 0 or (isinstance(max_errors, float) and not max_errors <= 1):
        raise ValueError(f"{stage}: max_errors must be a count or a fraction of at most 1.0, not {max_errors!r}")


def _fix(stage: str, error: Exception) -> str:
    """Return advice for an error of the encoder or filter that `stage` calls."""
    if isinstance(error, ImportError):
        return "Install what is missing and resume."
    if lacks_handles(error):
        return "Raise `ulimit -n` and resume."
    value = "False" if stage == "Filter" else "sp.Skip(...)"
    skip = 'pass on_error="skip".'
    return f"Fix this and resume, or {skip}" if is_environment_error(error) else f"Return {value} or {skip}"


_Snapshot: TypeAlias = tuple[Any, ...]


class SkippedSamples:
    """Samples that one stage drops, counted in its `counts` by reason.

    Messages name the `stage`, "Encode" or "Filter", and the `function` that it calls. Raises ValueError for a wrong
    `on_error` or `max_errors`.
    """

    def __init__(
        self,
        stage: str,
        function: str,
        on_error: OnError,
        max_errors: int | float,
        counts: Counter[str],
        upstream: StageInfo,
        ahead: TakenAhead,
    ) -> None:
        check_limits(stage, on_error, max_errors)
        self._counts, self._ahead = counts, ahead
        self._lane, self._max_empty = upstream.lane, upstream.max_empty
        self._noun = "items" if upstream.encoder else "samples"
        self._stage, self._function = stage, function
        self._on_error, self._max_errors = on_error, max_errors
        self.errors = 0  # samples dropped because of an error
        # the reason why a sample is not tried again, by its (index, epoch)
        self.avoided: dict[tuple[int, int], str] = {}
        # the reason why a sample is lost although it was counted as used, by its (index, epoch)
        self._lost_reasons: dict[tuple[int, int], str] = {}
        self._by_source = SourceCounts(counts)
        self._skipped_in_row = 0  # number of consecutive samples without an item, including excluded ones
        self._elements: list[Element] = []  # what the call added since `begin`
        self._elements_at_reset = 0  # number of these elements at the last `_reset_consecutive`

    def begin(self, elements: list[Element]) -> _Snapshot:
        """Return a snapshot of the counts before a call that may fail.

        The call must append its elements to `elements`.
        """
        self._elements, self._elements_at_reset = elements, 0
        return self.snapshot()

    def snapshot(self) -> _Snapshot:
        """Return the counts, the number of elements and the position, for `roll_back`."""
        counts = dict(self._counts), self.errors, self._skipped_in_row, self._elements_at_reset
        return *counts, dict(self._by_source.dropped_in_row), len(self._elements), self._ahead.next

    def roll_back(self, before: _Snapshot) -> None:
        """Restore the counts, elements and position of a snapshot."""
        counts, self.errors, self._skipped_in_row, self._elements_at_reset, *others = before
        self._by_source.dropped_in_row, elements, self._ahead.next = others
        self._counts.clear()
        self._counts.update(counts)
        del self._elements[elements:]

    def end(self, tags: frozenset[int]) -> None:
        """Count the elements of a call that succeeded.

        `tags` are the tags of all sources that the stage reads. A sample's index has the tag of its source.
        """
        if self._elements:
            if self._skipped_in_row or self._by_source.dropped_in_row:
                self._reset_consecutive()
            self._by_source.count_items(self._elements, tags)
            self._elements = []

    def _reset_consecutive(self) -> None:
        """Restart counting consecutive samples without an item, if items were added since the last restart."""
        if self._elements[self._elements_at_reset :]:
            self._by_source.reset_rows(self._elements[self._elements_at_reset :])
            self._skipped_in_row, self._elements_at_reset = 0, len(self._elements)

    def count_skip(self, sample: Sample, skip: Skip) -> None:
        """Count a skipped sample.

        Raises `EncodeError` if `StageInfo.max_empty` consecutive samples had no item. They are counted for all
        sources together, and for each source. The count of a source does not include excluded samples, because a file
        may exclude a whole source.
        """
        self._reset_consecutive()
        self._skipped_in_row += 1
        in_row, of_source = self._skipped_in_row, ""
        if skip is EXCLUDED:
            self._counts.update(skip_counters(skip.reason, sample.index))
        else:
            in_row = self._by_source.count_dropped(skip.reason, (sample.index, sample.epoch))
            source = sample.origin.source_names.get(tag_of(sample.index))
            of_source = f" of the source {source!r}" if source and in_row > self._skipped_in_row else ""
            in_row = max(in_row, self._skipped_in_row)
        if in_row & 1023 == 0 and in_row.bit_count() == 1:  # 1024, 2048, 4096, …
            log.warning("%d samples%s in a row were skipped, the last one with %r", in_row, of_source, skip.reason)
        if in_row >= self._max_empty:
            parts = "" if skip is EXCLUDED else f" It has {', '.join(sample) or 'no part'}."
            raise EncodeError(
                f"{self._function} skipped {in_row:,} samples{of_source} in a row, the last one with {skip.reason!r}."
                f"{parts} Change the encoder or the data."
            )

    def tolerate(self, sample: Sample, error: Exception) -> None:
        """Skip the sample that is next in `ahead` if `on_error` says to skip its error.

        Otherwise raise the error.
        """
        is_of_shard = isinstance(error, ShardError)
        if isinstance(error, SavableError) and not is_of_shard:
            raise error
        described_error = error if isinstance(error, ShardError) else self.encode_error(sample, error)
        on_error = sample.origin.on_error if is_of_shard else self._on_error  # the reader's for a damaged shard
        # If a library is missing, this machine would skip all samples, and the others none.
        if lacks_handles(error) or isinstance(error, ImportError) or not skips(on_error, described_error):
            raise described_error
        if is_environment_error(error):
            self.avoid(sample.index, sample.epoch, reason_of(error))
            self._forget_before(sample.epoch - 1)
        self._skip_for_error(sample, reason_of(error), str(described_error).partition(_DETAILS)[0])

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Record the reason why this sample is not tried again."""
        self.avoided[index, epoch] = reason

    def count_avoided_again(self, sample: Sample) -> None:
        """Count a sample in `avoided` as skipped again."""
        self._skip_for_error(sample, self.avoided[sample.index, sample.epoch], "avoided since it failed before")

    def lose(self, sample: Sample, error: Exception, *, was_counted: bool) -> Skip:
        """Return the `Skip` of a sample whose item was yielded, but fails now.

        `was_counted` is whether this object counted the item. It is False if the run that saved the state did. Raises
        the error if `tolerate` does.
        """
        self.tolerate(sample, error)
        return self._subtract_item(sample, reason_of(error), was_counted=was_counted)

    def known_loss(self, sample: Sample, *, was_counted: bool) -> Skip | None:
        """Return the `Skip` of a sample that is known to be lost, or None.

        A loss is counted the first time. `was_counted` is as for `lose`.
        """
        ref = sample.index, sample.epoch
        if ref in self._lost_reasons:
            return Skip(self._lost_reasons[ref])
        if not (reason := self.avoided.get(ref) or absent_reason(sample.origin)):
            return None
        skip = self._subtract_item(sample, reason, was_counted=was_counted)
        self.count_skip(sample, skip)
        return skip

    def _subtract_item(self, sample: Sample, reason: str, *, was_counted: bool) -> Skip:
        """Subtract the item of a lost sample from the counts, and return the sample's `Skip`.

        The counter of its source is subtracted even if not `was_counted`: the state has this counter, so a resumed run
        continues it.
        """
        self._counts["items"] -= was_counted
        self._counts[source_counter(sample.index, "items")] -= 1
        self._lost_reasons[sample.index, sample.epoch] = reason
        if len(self._lost_reasons) > _MOST_REMEMBERED:
            del self._lost_reasons[next(iter(self._lost_reasons))]
        return Skip(reason)

    def _forget_before(self, first_epoch: int) -> None:
        """Remove samples of epochs before `first_epoch` from `avoided`, because these epochs are not read again."""
        for ref in [(index, epoch) for index, epoch in self.avoided if epoch < first_epoch]:
            del self.avoided[ref]

    def _skip_for_error(self, sample: Sample, reason: str, detail: str) -> None:
        """Count and quarantine a sample that is skipped for an error. Raises `EncodeError` if there are too many."""
        log.info("skipping index %d of epoch %d: %s", sample.index, sample.epoch, detail)
        if (quarantine := sample.origin.quarantine) is not None:
            fields = {"shard": sample.shard, "key": _key_of(sample), "offset": sample.offset, "ref": list(sample.ref)}
            quarantine.add(**fields, reason=reason, detail=detail, lane=self._lane.index)
        self.errors += 1
        tried, limit = self._ahead.done + 1, self._max_errors
        if self.errors > (max(limit * tried, _ALWAYS_ALLOWED) if isinstance(limit, float) else limit):
            fix = "return False for them" if self._stage == "Filter" else "raise max_errors"
            raise EncodeError(
                f"{self.errors} of the first {tried} {self._noun} of {self._lane} failed, more than "
                f"max_errors={limit!r}. Fix {self._function} or the data, or {fix}.\n  {detail}"
            )
        self.count_skip(sample, Skip(reason))

    def encode_error(self, sample: Sample, error: Exception) -> EncodeError:
        """Return the `EncodeError` of a sample for which the encoder or filter raised."""
        cause = f"{self._function} failed on {sample_name(sample)}: {described(error)}"
        details = f"{self._stage}, {sample.location}, ref {tuple(sample.ref)}"
        described_error = EncodeError(f"{cause}. {_fix(self._stage, error)}{_DETAILS}{details}")
        described_error.__cause__ = from_user_code(error)
        return described_error

    def restore(self, stage: Stage, errors: int, avoided: Mapping[str, bytes]) -> None:
        """Restore the result of `save_state`."""
        self.errors = errors
        for reason, refs in avoided.items():
            self.avoided.update(dict.fromkeys(saved_refs(stage, refs).tolist(), reason))

    def save_state(self) -> dict[str, Any]:
        """Return the number of samples skipped for errors, and the avoided samples.

        `avoided` has for each reason the refs of its samples, 12 bytes each.
        """
        avoided: dict[str, list[tuple[int, int]]] = {}
        for ref, reason in self.avoided.items():
            avoided.setdefault(reason, []).append(ref)
        return {
            "errors": self.errors,
            "avoided": {reason: np.array(refs, REF).tobytes() for reason, refs in avoided.items()},
        }


def absent_reason(origin: SampleSource) -> str:
    """Return why a `Join` upstream skips samples of this `Sample.origin`, or ""."""
    return origin.absent if isinstance(origin, JoinedParts) else ""


def _key_of(sample: Sample) -> str:
    """Return the key of a sample, or "?" if it cannot be read."""
    try:
        return sample.key
    except ShardError:  # the header with the key may be unreadable too
        return "?"


@cache
def _counter_names(tag: int) -> tuple[str, str]:
    """Return the names of the counters of a source's items and tokens."""
    return f"source/{tag}/items", f"source/{tag}/tokens"


def _tag_of_first(ref: ItemRef) -> int:
    """Return the tag of the source of an item's or pack's first sample."""
    # an item has the ref (index, epoch, part), a pack one with the refs of its items
    return tag_of(ref[0] if type(ref[0]) is type(ref[-1]) is int else next(sample_refs(ref))[0])


class SourceCounts:
    """Counts of the samples that a stage uses and drops, by source.

    Drops are counted by reason, and how many of them are consecutive.

        counter of the stage           counts
        skipped/REASON                 dropped samples
        source/TAG/skipped             the same, for the source with this tag
        source/TAG/skipped/REASON      the same, without drops that the user requested
        source/TAG/first               those of the previous line in the source's first epoch
        source/TAG/items               items of the source; a packer also counts `tokens` and `skipped_tokens`

    The loader adds up the counters of the last three lines over its lanes, to find sources that yield few items or
    none. `dropped_in_row` has, by the tag of a source, how many of its samples were dropped since its last item.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.dropped_in_row: dict[int, int] = {}

    def count_items(self, elements: Sequence[Any], tags: Collection[int], *, has_lengths: bool = False) -> None:
        """Count items, and their tokens if they have a `length`.

        `tags` are those of all sources.
        """
        by_tag: dict[int, Any] = dict.fromkeys(tags, elements) if elements and len(tags) == 1 else {}
        if len(tags) > 1:
            for element in elements:
                by_tag.setdefault(_tag_of_first(element.ref), []).append(element)
        for tag, group in by_tag.items():
            items_counter, tokens_counter = _counter_names(tag)
            self._counts[items_counter] += len(group)
            if has_lengths:
                self._counts[tokens_counter] += sum([element.length for element in group])

    def reset_rows(self, elements: Sequence[Element]) -> None:
        """Restart counting consecutive drops for the sources of these items."""
        for tag in {_tag_of_first(element.ref) for element in elements} if self.dropped_in_row else ():
            self.dropped_in_row.pop(tag, None)

    def count_item(self, ref: ItemRef) -> None:
        """Count an item or a pack, for the source of its first sample."""
        tag = _tag_of_first(ref)
        self._counts[_counter_names(tag)[0]] += 1
        if self.dropped_in_row:
            self.dropped_in_row.pop(tag, None)

    def count_dropped(self, reason: str, ref: ItemRef, tokens: int = 0, *, asked: bool = False) -> int:
        """Count a dropped sample, or a dropped item for the source of its first sample.

        `asked` is whether the user chose to drop such items. Returns the number of consecutive drops of the source.
        """
        index, epoch = next(sample_refs(ref))[:2]
        self._counts.update(skip_counters(reason, index))
        if not asked:
            self._counts[source_counter(index, f"skipped/{reason}")] += 1
            for counter, number in (("first", int(not epoch)), ("skipped_tokens", tokens)):
                if number:
                    self._counts[source_counter(index, counter)] += number
        in_row = self.dropped_in_row[tag_of(index)] = self.dropped_in_row.get(tag_of(index), 0) + 1
        return in_row
