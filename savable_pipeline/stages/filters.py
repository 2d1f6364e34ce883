"""The stages that `.filter(f)` makes: of samples, before `Encode`, and of items, after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from savable_pipeline.core.global_rng import DrawFound
from savable_pipeline.core.on_error import OnError, check_on_error, described, from_user_code, reason_of, skips
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import REF, RefArray, skip_counters
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.stages.encode import EncoderError, EncodeState, KeyedEncoder
from savable_pipeline.stages.item_buffer import SamplesAhead, known_refs
from savable_pipeline.stages.item_ref import Element, sample_indices
from savable_pipeline.stages.mapped_function import MappedFunction, check_mapped, mapped_name, mapped_settings
from savable_pipeline.stages.pipeline import sample_names
from savable_pipeline.stages.skipped_samples import SkippedSamples, absent_reason, max_empty_samples, too_many_errors
from savable_pipeline.stages.stage import (
    ChunkedStage,
    ItemStage,
    PassThrough,
    SampleStage,
    State,
    parse_state,
    saved_refs,
)

_NONE = np.empty(0, REF)
_MAX_ERRORS = 0.1  # the share of what a lane has tried that may be skipped because of errors
_NOTHING = "it returned None; return True or False"


class FilterCounts(msgspec.Struct):
    """What a filter has tried, kept, and skipped because of errors; `row`: the last ones, of which it kept none."""

    tried: SavedCount = 0
    kept: SavedCount = 0
    errors: SavedCount = 0
    row: SavedCount = 0


class SampleFilter(ChunkedStage, SampleStage):
    """Yields the samples of which `keep(sample)`, or `keep(sample, rng)`, is true.

    Samples that a reader excludes, or a `Join` skips, pass through it, untried, as they do through a buffer.

    Args:
        source: A stage of samples.
        keep: Says whether a sample stays, by the sample and `rng` alone.
        on_error: For a sample of which `keep` raises, as for `sp.Encode`.
        global_rng: As `TaskEncoder.global_rng`.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: `keep` raised, or no sample is kept of very many in a row, or of a whole pass without a loader.
    """

    source: SampleStage

    def __init__(
        self,
        source: SampleStage,
        keep: Callable[..., bool],
        *,
        on_error: OnError = "raise",
        global_rng: bool | tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(source)
        self.keep, self.on_error = keep, on_error
        encoder = MappedFunction(".filter", source.lane.own(keep), global_rng=global_rng)
        self._ahead = SamplesAhead()
        self._skipped = SkippedSamples(
            f".filter({mapped_name(keep)})", on_error, _MAX_ERRORS, self.counts, source.info, self._ahead
        )
        self.keyed = KeyedEncoder(encoder, source.lane, check=0.0, purpose=f"filter {source.info.depth}")
        self._limits = _Limits(self, keep)

    def take(self, n: int) -> RefArray:
        """The refs of the next samples that stay, 1 to `n` of them: REF (any,); empty only at the end."""
        ahead, excluded = self._ahead, self.info.excluded
        while n:
            if ahead.next == len(ahead.refs) and not ahead.load(self.source, n, keep=ahead.next):
                self._limits.end()
                break
            given: list[Element] = []
            first, before, kept = ahead.next, self._skipped.begin(given), list[bool | None]()
            try:
                chosen = ahead.samples[first : first + n]
                with self.keyed.seeding.row(len(chosen)):
                    for ahead.next, sample in enumerate(chosen, first):
                        untried = sample.index in excluded or absent_reason(sample.origin)
                        kept.append(True if untried else self._keeps(sample))
                        if kept[-1]:
                            given.append(Element((sample.index, sample.epoch, 0)))
                        elif kept[-1] is None:
                            break  # a later draw must not undo what is counted now
                ahead.next += 1
            except DrawFound:  # the row has no effect, and is repeated
                self._skipped.roll_back(before)
                continue
            except SavableError:
                if not given or len(kept) > ahead.next - first:  # a thread could not repeat the row
                    raise
                # those before it are given first, as without reading ahead; the next call tries it again
            except BaseException:
                self._skipped.roll_back(before)  # the call returns no sample: undo it as a whole
                raise
            self._skipped.end(self.info.tags)
            self._limits.count(kept)
            if given:
                left: RefArray = ahead.refs[first : ahead.next][np.array(kept, bool)]
                return left
        return _NONE

    def _keeps(self, sample: Sample) -> bool | None:
        """Whether a sample stays; None if it is skipped because of an error."""
        try:
            found, _ = self.keyed.encoded(sample)
            if found is not None:
                return bool(found)
            error: Exception = TypeError(_NOTHING)
        except EncoderError as failed:
            error = failed.error
        self.keyed.seeding.check(ends=True)
        self._skipped.tolerate(sample, error)
        return None

    def save_state(self) -> State:
        """`refs`: taken from the source but not tried, 12 bytes each; `samples`: the number of those tried.

        `counts`: a `FilterCounts`.
        """
        return {
            "refs": self._ahead.left.tobytes(),
            "samples": self._ahead.done,
            **self._skipped.save_state(),
            "counts": msgspec.to_builtins(self._limits.counts),
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is tried."""
        saved = parse_state(self, state, _SampleFilterState)
        self.source.restore_state(saved.source)
        self._ahead.restore(self.source, known_refs(self, saved_refs(self, saved.refs)), saved.samples)
        self._skipped.restore(self, saved.errors, saved.avoided)
        self._limits.counts = saved.counts

    def settings(self) -> dict[str, Any]:
        """The name of `keep`, and the arguments that a `partial` binds."""
        return mapped_settings("keep", self.keep)


class _SampleFilterState(EncodeState, kw_only=True):
    counts: FilterCounts


class _ItemFilterState(msgspec.Struct):
    counts: FilterCounts
    source: dict[str, Any]


class ItemFilter(PassThrough, ItemStage):
    """Yields the items, or packs, of which `keep(item)` is true.

    Args:
        source: A stage of items.
        keep: Says whether an item stays, by the item alone.
        on_error: For an item of which `keep` raises: "raise", "skip", or a function of the `EncodeError`. A tenth of a
            lane's items may be skipped; up to 100 are never too many.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: As for `SampleFilter`.
    """

    source: ItemStage

    def __init__(self, source: ItemStage, keep: Callable[[Any], bool], *, on_error: OnError = "raise") -> None:
        self._check_source(source, ItemStage)
        super().__init__(source)
        check_mapped(".filter", keep, most=1)
        check_on_error("filter", on_error)
        self.keep, self.on_error = source.lane.own(keep), on_error
        self._limits = _Limits(self, keep)

    def __next__(self) -> Any:
        for item in self.source:
            kept = self._keeps(item)
            self._limits.count([kept])
            if kept:
                return item
            if kept is None:
                self._limits.check_errors(self._last_error)
        self._limits.end()
        raise StopIteration

    def _keeps(self, item: Any) -> bool | None:
        """Whether an item stays; None if it is skipped because of an error."""
        try:
            found = self.keep(item)
            if found is None:
                raise TypeError(_NOTHING)
            return bool(found)
        except Exception as error:
            ref = self.source.ref
            fault = EncodeError(
                f'.filter({mapped_name(self.keep)}) failed: {described(error)}. Fix it, or pass on_error="skip".'
                f"\n  {sample_names(self.source, ref)}"
            )
            if isinstance(error, ImportError) or not skips(self.on_error, fault):
                raise fault from from_user_code(error)
            self.counts.update(skip_counters(reason_of(error), next(iter(sample_indices(ref)))))
            self._last_error = fault
            return None

    def save_state(self) -> State:
        """`counts`: a `FilterCounts`."""
        return {"counts": msgspec.to_builtins(self._limits.counts), **super().save_state()}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no item is tried."""
        saved = parse_state(self, state, _ItemFilterState)
        super().restore_state(state)
        self._limits.counts = saved.counts

    def settings(self) -> dict[str, Any]:
        """The name of `keep`, and the arguments that a `partial` binds."""
        return mapped_settings("keep", self.keep)


class _Limits:
    """Counts what a filter leaves out, and raises where it leaves out all."""

    def __init__(self, stage: SampleFilter | ItemFilter, keep: object) -> None:
        self._stage, self._name = stage, mapped_name(keep)
        self.counts = FilterCounts()

    def count(self, kept: Sequence[bool | None]) -> None:
        """Count a call's results. Raises `EncodeError` after very many in a row without one that stays."""
        counts = self.counts
        if left_out := kept.count(False):
            self._stage.counts["filtered"] += left_out
        counts.tried += len(kept)
        counts.kept += kept.count(True)
        counts.errors += kept.count(None)
        counts.row = 0 if any(kept) else counts.row + len(kept)
        if counts.row >= max_empty_samples(self._stage.info.population):
            self._raise(f"{counts.row:,} in a row")

    def check_errors(self, last: EncodeError) -> None:
        """Raise `EncodeError` where too many of the results are errors."""
        counts = self.counts
        if too_many_errors(counts.errors, counts.tried, _MAX_ERRORS):
            raise EncodeError(
                f".filter({self._name}) failed for {counts.errors} of the first {counts.tried} items of "
                f"{self._stage.lane}. Fix it, or return False for them.\n  {last}"
            ) from last

    def end(self) -> None:
        """The pass is over. Raises `EncodeError` if it was one of all samples, and nothing was kept."""
        counts = self.counts
        if counts.tried and not counts.kept and self._stage.lane.count == 1:
            self._raise(f"all {counts.tried:,} of an epoch")

    def _raise(self, which: str) -> NoReturn:
        raise EncodeError(f".filter({self._name}) dropped {which}. Change its condition.")
