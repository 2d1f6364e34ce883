"""`SourceLosses`: warns of a source of which much is left out, and ends a run to which a source gives nothing.

workers ── counters with each batch ──▶ shares of this rank's lanes ──▶ a warning, once for each source
lanes   ── states, with `in_vain`   ──▶ nothing from any lane yet   ──▶ an error

The error depends on the states of the lanes alone: a resumed run meets it where an uninterrupted one does, and not
because a source that has given before the checkpoint gives nothing for a while after it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.observer import BatchStep, Observer
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.state.lane_state import FIRST, LaneState, OfSource, reasons_of, unpack_state
from savable_pipeline.run.state.state_dict import lane_numbers, read_lanes
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.pipeline import upstream

log = logging.getLogger(__name__)

_ENOUGH = 1000  # samples of a source before its share is looked at
_MUCH = 0.1  # of a source's samples, or tokens
_IN_VAIN = 10_000  # samples of a source of which none is given end the run, or all of its first epoch
_EPOCHS = 5  # the same, where other ranks have a part of that epoch, or a buffer holds some of it: e**-5
_SHOWN = 5  # reasons in a message
_MISSING = "Check the names of parts in the encoder with `savable info PATH`"  # most skipped ones are "no ..."
_CURES = {
    "Encode": "Change the encoder or its settings, or the data",
    "OnlinePacker": "Pass too_long='split', 'truncate' or 'skip'",
    "BucketBatcher": "Raise the last bound",
}


class SourceLosses(Observer):
    """What each stage keeps and leaves out of each source, on the lanes of this rank, since it was made.

    What an `exclude=`, a decision or a filter leaves out does not count; nor does what a setting says to leave out.
    """

    def __init__(self, local: LocalLanes) -> None:
        self._local = local
        self._kept: Counter[tuple[str, str]] = Counter()  # by stage and source: items, tokens and skipped tokens
        self._left: dict[str, Counter[str]] = {}  # by stage and source: by reason
        self._warned: set[str] = set()
        self._due: Counter[str] = Counter()  # how many must have been left out when the states are looked at again

    @cached_property
    def _sources(self) -> dict[str, tuple[str, int]]:
        """The name of each source in a `Blend`, or "", and its number of samples, by its tag; 0 where it is off."""
        stages = list(upstream(self._local.last_stage))
        readers = [stage.info for stage in stages if not stage.sources]
        off = frozenset[int]().union(*(stage.off_tags for stage in stages if isinstance(stage, Blend)))
        return {str(tag): (info.branch, info.population * (tag not in off)) for info in readers for tag in info.tags}

    def _source(self, key: str) -> tuple[str, int]:
        """The name and the number of samples of a stage's source.

        None of a source that was removed.
        """
        return self._sources.get(key.rpartition("/")[2], ("", 0))

    def on_load(self, at: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Start again at a state, whose lanes of other ranks may have got something of a source, too."""
        return None if state is None else partial(self._load, state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._kept, self._left, self._due = Counter(), {}, Counter()
        for number in lane_numbers(state):
            with suppress(SavableError):  # of a lane that this rank does not need
                in_vain = read_lanes(state, [number])[number].in_vain or {}
                self._kept.update((key, "items") for key, found in in_vain.items() if not found)

    def on_counts(self, counts: Mapping[str, int | float]) -> set[str]:
        """Count what the counters of a batch say.

        Returns the stages and sources of which something was left out.
        """
        touched = set()
        for name, number in counts.items():
            of = OfSource.of(name) if "/source/" in name else None
            if of is not None and of.reason:
                self._left.setdefault(of.key, Counter())[of.reason] += int(number)
                touched.add(of.key)
            elif of is not None:
                self._kept[of.key, of.what] += int(number)
        return touched

    def on_batch(self, step: BatchStep) -> None:
        """Count a batch. Raises `EncodeError` for a source that has given nothing yet."""
        if step.repeated is not None:
            return
        after = step.after
        for key in self.on_counts(step.delivery.counts):
            population, left = self._source(key)[1], self._left[key].total()
            own = population * len(after.lanes) // after.lane_count  # of an epoch, on the lanes of this rank
            if population and not self._kept[key, "items"] and left >= self._due[key]:
                found = self._in_vain(key, after)
                total = reasons_of(found).total()
                missing = min(_IN_VAIN, _EPOCHS * population) - total
                if own == population:
                    missing = min(missing, population - found[FIRST])
                if found and missing <= 0:
                    raise self._error(key, found, len(after.lanes))
                self._due[key] = left + max(1, missing)
            self._warn_of_share(key, min(_ENOUGH, own))

    def on_epoch_end(self, over: Position) -> None:
        """The same at the end of an epoch, of which the lanes must have had enough of a source."""
        states = [unpack_state(lane.state, LaneState, f"lane {number}") for number, lane in over.lanes.items()]
        for key in dict.fromkeys(key for state in states for key in state.in_vain or {}):
            population, found = self._source(key)[1], self._in_vain(key, over)
            enough = (population + 1) // 2 if len(over.lanes) == over.lane_count else _ENOUGH
            if population and found and reasons_of(found).total() >= enough:
                raise self._error(key, found, len(over.lanes))
        for key in self._left:
            self._warn_of_share(key, 1)

    def _in_vain(self, key: str, at: Position) -> Counter[str]:
        """What was in vain of a stage's source on all lanes, by their states.

        Nothing once it has given something.
        """
        found: Counter[str] = Counter()
        for number, lane in at.lanes.items():
            saved = unpack_state(lane.state, LaneState, f"lane {number}")
            of_lane = (saved.in_vain or {}).get(key)
            if of_lane == {} or (saved.batches and not saved.in_vain):  # else all have
                self._kept[key, "items"] += 1
                return Counter()
            found.update(of_lane or {})
        return found

    def _error(self, key: str, in_vain: Counter[str], lanes: int) -> EncodeError:
        stage, source = key.rpartition("/")[0], self._source(key)[0]
        reasons = reasons_of(in_vain)
        named, cure = f"the source {source!r}" if source else "the data", _cure(stage, reasons)
        return EncodeError(
            f"{stage} skipped the first {reasons.total():,} samples of {named}: {_listed(reasons)}. {cure}."
            f"\n  on {lanes} lanes of this rank"
        )

    def _warn_of_share(self, key: str, enough: int) -> None:
        """Warn, once, where more than a tenth of `enough` samples of a source, or of its tokens, is left out."""
        left, items = self._left[key].total(), self._kept[key, "items"]
        lost, tokens = self._kept[key, "skipped_tokens"], self._kept[key, "tokens"]
        share, share_of_tokens = left / max(1, left + items), lost / max(1, lost + tokens)
        if key in self._warned or left + items < enough or max(share, share_of_tokens) <= _MUCH:
            return
        self._warned.add(key)
        stage, source = key.rpartition("/")[0], self._source(key)[0]
        log.warning(
            "%s skips %.0f %% of %s%s: %s. %s.",
            stage,
            100 * share,
            f"the source {source!r}" if source else "the samples",
            f", {share_of_tokens:.0%} of its tokens" if lost else "",
            _listed(self._left[key]),
            _cure(stage, self._left[key]),
        )


def _cure(stage: str, reasons: Counter[str]) -> str:
    """What to do about a stage that skips samples, by the most frequent reason."""
    lacks_part = stage == "Encode" and reasons.most_common(1)[0][0].startswith("no ")
    return _MISSING if lacks_part else _CURES.get(stage, "See loader.stats()")


def _listed(reasons: Counter[str]) -> str:
    """`'no txt' 990, 'empty' 10`."""
    shown = ", ".join(f"{reason!r} {number:,}" for reason, number in reasons.most_common(_SHOWN))
    return f"{shown} and {len(reasons) - _SHOWN} more reasons" if len(reasons) > _SHOWN else shown
