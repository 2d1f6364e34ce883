"""`Encode`: the stage that turns samples into items with the user's encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.data.dataset.ref import Ref
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import CheckpointMismatchError, SavableError
from savable_pipeline.stages.capabilities import count_of
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.encoder_calls import made_encoder
from savable_pipeline.stages.held_items import known_refs
from savable_pipeline.stages.item_ref import MISSING, ItemRef
from savable_pipeline.stages.mapped_function import encoder_call
from savable_pipeline.stages.sample_encoding import (
    DONE,
    EncoderError,
    FanOut,
    KeyedEncoder,
    SamplesAhead,
    part_of,
)
from savable_pipeline.stages.skipped_samples import EXCLUDED, SkippedSamples
from savable_pipeline.stages.stage import SampleStage, State, parse_state, saved_refs
from savable_pipeline.stages.stage_bases import TakesItems
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings

_AHEAD = 16  # the least number of refs to take from the source at a time


class _EncodeState(msgspec.Struct):
    refs: bytes
    part: SavedCount
    source: dict[str, Any]
    samples: SavedCount = 0
    errors: SavedCount = 0
    avoided: dict[str, bytes] = {}


class Encode(TakesItems):
    """Yields items: `encoder.encode(sample, rng)` of each sample of its source.

    A sample becomes one item, none (`Skip`), or several (an iterator of items). Skipped samples are counted by reason.
    After an error the next call tries the same sample again.

    Args:
        source: A stage of samples.
        encoder: Makes the items; or a function that makes it, once a process.
        on_error: For a sample whose encoding raises: "raise", "skip", or a function of the `EncodeError` (its
            `__cause__` is the encoder's error) that returns True to skip and depends on the sample alone. For
            unreadable shards it is the reader's `on_error`.
        max_errors: Most samples that a lane may skip because of errors: an int is a count, a float a share of its
            samples so far; up to 100 are never too many.
        check: Share of samples, 0.0 to 1.0, to encode twice, to find an encoder that is not pure; the same after a
            resume. None: the first 8 of a process, unless one takes more than a second.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: The encoder raised, too many samples were skipped, or the two results of a check differ; it names
            shard, key and byte offset.

    Example:
        >>> class Ids(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         number = sample.json()["id"]
        ...         return number if number % 2 else sp.Skip("even")
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Ids())
        >>> next(items), next(items), items.counts["skipped/even"]
        (1, 3, 2)
        >>> items.ref, items.fetch(items.ref)  # (index, epoch, part), and the same item made again
        ((3, 0, 0), 3)
    """

    source: SampleStage
    sizes: tuple[Size, ...] | None = None

    def __init__(
        self,
        source: SampleStage,
        encoder: TaskEncoder | Callable[[], TaskEncoder],
        *,
        on_error: OnError = "raise",
        max_errors: int | float = 0.1,
        check: float | None = None,
    ) -> None:
        self._check_source(source, SampleStage)
        super().__init__(source)
        encoder = made_encoder("Encode", encoder, source.lane)
        self._ahead = SamplesAhead()
        self._skipped = SkippedSamples(
            encoder_call(encoder), on_error, max_errors, self.counts, source.info, self._ahead
        )
        self.on_error = on_error
        self.one_for_one = encoder.one_to_one
        self._encoder = encoder
        self.keyed = KeyedEncoder(encoder, source.lane, check=check)
        self._plain: set[type] = set()  # types of items seen so far that are neither `Skip` nor iterators
        self._fan: FanOut | None = None  # the parts of the next sample, if it fans out

    def describe(self) -> StageInfo:
        """The source's, one deeper, with the encoder; excluded samples are left out."""
        return replace(super().describe(), encoder=self._encoder, gives_excluded=False, deferred=self.keyed.told.tells)

    def take(self, n: int, *, deferred: bool = False) -> tuple[list[Any], list[ItemRef]]:
        """Up to `n` items and their refs; fewer only at the end.

        `deferred`: one item, not made if the encoder declares its length, which is then in `sizes`.
        """
        if deferred:
            n, self.sizes = 1, None
        items: list[Any] = []
        refs: list[ItemRef] = []
        ahead = self._ahead
        first, part, before = ahead.next, self._part, self._skipped.begin(refs)
        try:
            while len(items) < n:
                if ahead.next == len(ahead.refs):
                    if not ahead.load(self.source, max(n - len(items), _AHEAD), keep=first):
                        break
                    first = 0
                if self._fan is not None:
                    self._take_parts(items, refs, n)
                elif deferred and self.keyed.told.tells:
                    self._take_told(items, refs)
                else:
                    self._take_samples(items, refs, n)
        except BaseException:
            ahead.next = first  # the call returns no item: undo it as a whole
            self._fan = FanOut(self.keyed, ahead.samples[first], given=part) if part else None
            self._skipped.roll_back(before)
            raise
        self._skipped.end(self.info.tags)
        self.counts["items"] += len(items)
        return items, refs

    def _take_told(self, items: list[Any], refs: list[ItemRef]) -> None:
        """Take the next sample, unmade if the encoder declares its size, which is then in `sizes`."""
        sample, size = self._ahead.samples[self._ahead.next], None
        if not self._is_left_out(sample):
            self._report_sample(sample)
            try:
                size = self.keyed.told.of(sample)
            except Exception as error:
                self._skipped.tolerate(sample, error)
                self._ahead.next += 1
                return
        if size is None:
            self._take_samples(items, refs, 1)
            return
        self.sizes = (size,)
        self._ahead.next += 1
        items.append(MISSING)
        refs.append((sample.index, sample.epoch, 0))

    def _is_left_out(self, sample: Sample) -> bool:
        return sample.index in self.info.excluded or (sample.index, sample.epoch) in self._skipped.avoided

    def _take_samples(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Encode samples until there are `n` items, no more refs, or a sample that fans out into several items."""
        ahead, keyed, plain, status = self._ahead, self.keyed, self._plain, self.lane.status
        encode, seed = keyed.encode_many(), keyed.seed_globals
        avoided, excluded = self._skipped.avoided, self.info.excluded
        dataset, base = None, 0
        if status is not None:
            status[0] = self.info.depth
        first = ahead.next
        chosen = ahead.samples[first : first + n - len(items)]
        for ahead.next, sample in enumerate(chosen, first):
            if sample.origin is not dataset:
                dataset = sample.origin
                base = keyed.base(dataset.source)
            index, epoch = sample.index, sample.epoch
            if excluded and index in excluded:
                self._skipped.skipped(sample, EXCLUDED)
                continue
            if status is not None:
                status[1], status[2] = index, epoch
            if avoided and (index, epoch) in avoided:
                self._skipped.avoided_again(sample)
                continue
            ref = (index, epoch, 0)
            rng = Rng(base, ref)
            if seed is not None:
                seed(rng.key)
            try:
                item = encode(sample, rng)
            except Exception as error:
                self._skipped.tolerate(sample, error)
                continue
            if type(item) not in plain:
                if type(item) is Skip or item is None or hasattr(item, "__next__"):
                    if self._fans_out(sample, item, rng):
                        return
                    continue
                plain.add(type(item))
            items.append(item)
            refs.append(ref)
        ahead.next += 1

    def _fans_out(self, sample: Sample, item: Any, rng: Rng) -> bool:
        """Whether the encoder's result is an iterator of parts; if it is a `Skip` or None, count the sample."""
        if item is None:
            self._skipped.tolerate(sample, TypeError("it returned None; return an item or Skip(reason)"))
        elif self._encoder.one_to_one:
            raise self._skipped.failed(sample, TypeError(f"it is one_to_one, but returned {item!r}"))
        elif type(item) is Skip:
            self._skipped.skipped(sample, item)
        else:
            self._fan = FanOut(self.keyed, sample, (item, rng))
            return True
        return False

    @property
    def _part(self) -> int:
        """The number of parts given so far of the sample at `_next`."""
        return 0 if self._fan is None else self._fan.given

    def _take_parts(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Take parts of the sample at `_next` until there are `n` items or no more parts."""
        fan, skipped = self._fan, self._skipped
        assert fan is not None
        if fan.made is None and self._is_left_out(fan.sample):
            self._fan = None  # which began before the state was saved: all of it is left out, with the other samples
            return
        self._report_sample(fan.sample)
        try:
            while len(items) < n:
                part, item = fan.given, fan.next()
                if type(item) is Skip:
                    skipped.skipped(fan.sample, item)
                elif item is not DONE:
                    items.append(item)
                    refs.append((fan.sample.index, fan.sample.epoch, part))
                else:
                    if not part:
                        skipped.skipped(fan.sample, Skip("an iterator without items"))
                    break
            else:
                return
        except EncoderError as failed:  # the parts before the error count as items; the rest of the sample is skipped
            skipped.tolerate(fan.sample, failed.error)
        self._ahead.next, self._fan = self._ahead.next + 1, None

    def _report_sample(self, sample: Sample) -> None:
        """Record this stage and sample on the worker's status page, for a report if the worker dies."""
        status = self.lane.status
        if status is not None:
            status[0], status[1], status[2] = self.info.depth, sample.index, sample.epoch

    def may_avoid(self, error: SavableError) -> bool:
        """Whether `on_error` says to skip such a sample."""
        return skips(self.on_error, error)

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Leave this sample out from now on, in this lane and all that are restored from its state."""
        self._skipped.avoid(index, epoch, reason)

    def fetch(self, ref: ItemRef | Ref) -> Any:
        """Make the item with this ref again; a `Skip` if that fails now and `on_error` says to skip, or it is excluded.

        Raises `EncodeError` if the encoder raises, or no longer makes that part of the sample.
        """
        sample = self.source.fetch(ref)
        if sample.index in self.info.excluded:
            return EXCLUDED
        lost = self._skipped.lost_before(sample)
        if lost is not None:
            return lost
        self._report_sample(sample)
        try:
            return self.keyed.part(sample, part_of(ref))
        except EncoderError as failed:
            return self._skipped.lose(sample, failed.error)

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The source's count if each sample becomes one item (`one_to_one`) or an error that is raised; else None."""
        counted = self.one_for_one and self.on_error == "raise" and not self.info.excluded
        return count_of(self.source, lane, epoch) if counted else None

    def save_state(self) -> State:
        """`refs`: taken from the source but not done, 12 bytes each; `part`: parts of the first one given so far.

        `samples`: the number of samples that are done; `errors` and `avoided`: see `SkippedSamples.save_state`.
        """
        return {
            "refs": self._ahead.left.tobytes(),
            "part": self._part,
            "samples": self._ahead.done,
            **self._skipped.save_state(),
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is read or encoded."""
        saved = parse_state(self, state, _EncodeState)
        self.source.restore_state(saved.source)
        refs = saved_refs(self, saved.refs)
        left = known_refs(self, refs)
        self._ahead.restore(self.source, left, saved.samples)
        if saved.part and not len(refs):
            raise CheckpointMismatchError(f"Encode: by the state, {saved.part} items of no sample were given")
        # as bytes: where NumPy compares structured arrays it takes Ctrl-C for a fault of them
        begun = saved.part > 0 and left[:1].tobytes() == refs[:1].tobytes()
        self._fan = FanOut(self.keyed, self._ahead.samples[0], given=saved.part) if begun else None
        self._skipped.restore(saved.errors, {name: saved_refs(self, raw) for name, raw in saved.avoided.items()})

    def settings(self) -> dict[str, Any]:
        """The encoder's class and its own settings."""
        return encoder_settings(self._encoder)
