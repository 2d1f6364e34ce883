"""`SkippedSamples`: which samples an `Encode` stage may leave out, how many it has, and which it must not try again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.core.files import is_out_of_handles
from savable_pipeline.core.on_error import OnError, check_on_error, is_of_environment, reason_of, skips
from savable_pipeline.core.user_frames import described, from_user_code
from savable_pipeline.data.dataset.ref import REF, RefArray, count_of_source, skip_counters, tag_of
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError, SavableError, ShardError
from savable_pipeline.stages.element import Element
from savable_pipeline.stages.excluded_samples import REASON
from savable_pipeline.stages.held_items import SamplesAhead
from savable_pipeline.stages.source_counts import SourceCounts
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import Skip

log = logging.getLogger(__name__)

EXCLUDED = Skip(REASON)
_ALWAYS = 100  # up to 100 errors of a lane are never too large a share
_REMEMBERED = 1000  # lost samples, so that a second piece of one is not counted again


class _Snapshot(NamedTuple):
    """The counts at the start of a call, restored if the call fails."""

    errors: int
    row: int
    rows: dict[int, int]


class SkippedSamples:
    """The samples that one stage leaves out, counted in its `counts` by reason.

    `function` names what leaves them out, in messages. Raises ValueError for wrong settings of `Encode`.
    """

    def __init__(
        self,
        function: str,
        on_error: OnError,
        max_errors: int | float,
        counts: Counter[str],
        upstream: StageInfo,
        ahead: SamplesAhead,
    ) -> None:
        check_on_error("Encode", on_error)
        if max_errors < 0 or (isinstance(max_errors, float) and not max_errors <= 1):
            raise ValueError(f"Encode: max_errors must be a count or a share of at most 1.0, not {max_errors!r}")
        self._counts = counts
        self._lane = upstream.lane
        self._ahead = ahead
        self._population = upstream.population
        self._function = function
        self._on_error = on_error
        self._max_errors = max_errors
        self.errors = 0  # samples left out because of an error
        self.avoided: dict[tuple[int, int], str] = {}  # (index, epoch) of samples not to be tried again → reason
        self._lost_reasons: dict[tuple[int, int], str] = {}  # (index, epoch) of the last ones lost after all → reason
        self._by_source = SourceCounts(counts)
        self._row = 0  # samples in a row without an item, of whatever source, excluded ones among them
        self._elements: list[Element] = []  # by the call since `begin`, of which `_noted` have ended rows
        self._noted = 0
        self._counted: Counter[str] = Counter()  # counters raised since `begin`

    def begin(self, elements: list[Element]) -> _Snapshot:
        """Snapshot the counts before a call that may fail, and that adds its elements to `elements`."""
        self._counted.clear()
        self._elements, self._noted = elements, 0
        return _Snapshot(self.errors, self._row, dict(self._by_source.rows))

    def roll_back(self, before: _Snapshot) -> None:
        """Undo the counting of a call that failed."""
        self._counts.subtract(self._counted)
        self.errors, self._row, self._by_source.rows = before
        self._elements = []

    def end(self, tags: frozenset[int]) -> None:
        """Count the items of a call, of sources with these tags."""
        if self._elements:
            if self._row or self._by_source.rows:
                self._end_rows()
            self._by_source.kept(self._elements, tags)
            self._elements = []

    def _end_rows(self) -> None:
        """End what came in a row without an item, where there are items since."""
        if self._elements[self._noted :]:
            self._by_source.end_rows(self._elements[self._noted :])
            self._row, self._noted = 0, len(self._elements)

    def skipped(self, sample: Sample, skip: Skip) -> None:
        """Count a skipped sample.

        Raises `EncodeError` after `max_empty_samples` in a row without an item, of one source, or of all with those
        that are excluded: these may be all of a source.
        """
        self._end_rows()
        self._row += 1
        row, of = self._row, ""
        if skip is EXCLUDED:
            counted = Counter(skip_counters(skip.reason, sample.index))
            self._counts.update(counted)
        else:
            counted, row = self._by_source.left_out(skip.reason, (sample.index, sample.epoch))
            source = sample.origin.names.get(tag_of(sample.index))
            row, of = max(row, self._row), f" of the source {source!r}" if source and row > self._row else ""
        self._counted.update(counted)
        if row & 1023 == 0 and row.bit_count() == 1:
            log.warning("%d samples%s in a row were skipped, the last as %r", row, of, skip.reason)
        if row >= max_empty_samples(self._population):
            raise EncodeError(
                f"{self._function} skipped {row} samples{of} in a row, the last as {skip.reason!r}: no item "
                "will ever come of this data; mend the encoder's conditions or the data"
            )

    def tolerate(self, sample: Sample, error: Exception) -> None:
        """Skip the sample that is next in `ahead` because of an error if `on_error` says so; else raise the error."""
        fault: SavableError
        on_error: OnError
        if isinstance(error, ShardError):
            fault, on_error = error, sample.origin.on_error  # the shard's fault: the reader's `on_error` decides
        elif isinstance(error, SavableError):
            raise error
        else:
            fault, on_error = self.failed(sample, error), self._on_error
            fault.__cause__ = from_user_code(error)
        # A library that is not installed here is no fault of any sample: all would be skipped, and elsewhere none.
        if is_out_of_handles(error) or isinstance(error, ImportError) or not skips(on_error, fault):
            raise fault
        if is_of_environment(error):
            self.avoid(sample.index, sample.epoch, reason_of(error))
            self._forget_before(sample.epoch - 1)
        self._lost(sample, reason_of(error), str(fault))

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Never try this sample again, for this reason."""
        self.avoided[index, epoch] = reason

    def avoided_again(self, sample: Sample) -> None:
        """Skip a sample that is not to be tried again."""
        reason = self.avoided[sample.index, sample.epoch]
        self._lost(sample, reason, "avoided since it failed before")

    def lose(self, sample: Sample, error: Exception) -> Skip:
        """The `Skip` of a sample whose item was counted as given and fails now, or raise the error, as `tolerate`."""
        self.tolerate(sample, error)
        return self._uncounted(sample, reason_of(error))

    def lost_before(self, sample: Sample) -> Skip | None:
        """The `Skip` of a sample that is known to be lost, counted if it was not; None if it may be tried."""
        where = sample.index, sample.epoch
        if where in self._lost_reasons:
            return Skip(self._lost_reasons[where])
        if where not in self.avoided:
            return None
        skip = self._uncounted(sample, self.avoided[where])
        self.skipped(sample, skip)
        return skip

    def _uncounted(self, sample: Sample, reason: str) -> Skip:
        """Count the item of a sample as given no more, and remember it."""
        self._counts.subtract(["items", count_of_source(sample.index, "items")])
        self._lost_reasons[sample.index, sample.epoch] = reason
        if len(self._lost_reasons) > _REMEMBERED:
            del self._lost_reasons[next(iter(self._lost_reasons))]
        return Skip(reason)

    def _forget_before(self, epoch: int) -> None:
        """Drop avoided samples of earlier epochs, whose refs do not come again."""
        for ref in [ref for ref in self.avoided if ref[1] < epoch]:
            del self.avoided[ref]

    def _lost(self, sample: Sample, reason: str, detail: str) -> None:
        """Count a sample skipped because of an error, and quarantine it. Raises `EncodeError` if there are too many."""
        log.info("skipping index %d of epoch %d: %s", sample.index, sample.epoch, detail)
        quarantine = sample.origin.quarantine
        if quarantine is not None:
            where = {"shard": sample.shard, "key": _key_of(sample), "offset": sample.offset, "ref": list(sample.ref)}
            quarantine.add(**where, reason=reason, detail=detail, lane=self._lane.index)
        self.errors += 1
        done = self._ahead.done + 1
        share = isinstance(self._max_errors, float)
        if self.errors > (max(self._max_errors * done, _ALWAYS) if share else self._max_errors):
            raise EncodeError(
                f"{self.errors} of the {done} samples of {self._lane} so far were skipped because of errors, "
                f"more than max_errors={self._max_errors!r} allows; the last: {detail}"
            )
        self.skipped(sample, Skip(reason))

    def failed(self, sample: Sample, error: Exception) -> EncodeError:
        """The `EncodeError` that says for which sample the encoder raised."""
        return EncodeError(
            f"{self._function} raised {described(error)}; stage Encode, shard "
            f"{sample.shard}, key {_key_of(sample)!r}, {sample.place}, ref {tuple(sample.ref)}"
        )

    def restore(self, errors: int, avoided: Mapping[str, RefArray]) -> None:
        """Go on with these numbers of a state: see `save_state`."""
        self.errors = errors
        for reason, refs in avoided.items():
            self.avoided.update(dict.fromkeys(refs.tolist(), reason))

    def save_state(self) -> dict[str, Any]:
        """`errors`: samples left out because of an error; `avoided`: refs by reason, 12 bytes each."""
        avoided: dict[str, list[tuple[int, int]]] = {}
        for ref, reason in self.avoided.items():
            avoided.setdefault(reason, []).append(ref)
        return {
            "errors": self.errors,
            "avoided": {reason: np.array(refs, REF).tobytes() for reason, refs in avoided.items()},
        }


def _key_of(sample: Sample) -> str:
    try:
        return sample.key
    except ShardError:  # the header with the key is unreadable, too
        return "?"


def max_empty_samples(population: int) -> int:
    """The number of samples in a row that may give no item before the run ends with an error.

    30 times the dataset plus 1,000, at most 100,000: a lane that draws at random would miss a single good sample this
    long with probability e**-30.
    """
    return min(30 * population + 1000, 100_000)
