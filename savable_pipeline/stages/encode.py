"""`Encode`: the stage that turns samples into items with the user's encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from savable_pipeline.core.global_rng import seeder
from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.on_error import OnError, reason_of, skips
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.data.dataset.sample import REF, Ref, RefArray, Sample
from savable_pipeline.errors import CheckpointMismatchError, EncodeError, SavableError
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.encoder_calls import check_encoder
from savable_pipeline.stages.excluded_samples import REASON
from savable_pipeline.stages.item_ref import MISSING, ItemRef
from savable_pipeline.stages.purity_check import PurityCheck
from savable_pipeline.stages.skipped_samples import SkippedSamples
from savable_pipeline.stages.stage import ItemStage, Measured, SampleStage, StageInfo, State, parse_state, saved_refs
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.stages.told_size import ToldSize

EncodeCall: TypeAlias = Callable[[Sample, Rng], Any]

_EXCLUDED = Skip(REASON)
_AHEAD = 16  # the least number of refs to take from the source at a time


class _EncodeState(msgspec.Struct):
    refs: bytes
    part: SavedCount
    source: dict[str, Any]
    samples: SavedCount = 0
    errors: SavedCount = 0
    avoided: dict[str, bytes] = {}


class Encode(ItemStage):
    """Yields items: `encoder.encode(sample, rng)` of each sample of its source.

    A sample becomes one item, none (`Skip`), or several (an iterator of items). Skipped samples are counted by reason.
    After an error the next call tries the same sample again.

    Args:
        source: A stage of samples.
        encoder: Makes the items.
        on_error: For a sample whose encoding raises: "raise", "skip", or a function of the `EncodeError` (its
            `__cause__` is the encoder's error) that returns True to skip and depends on the sample alone. For
            unreadable shards it is the reader's `on_error`.
        max_errors: Most samples that a lane may skip because of errors: an int is a count, a float a share of its
            samples so far; up to 100 are never too many.
        check: Share of samples, 0.0 to 1.0, to encode twice, to find an encoder that is not pure; the same after a
            resume.

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
    ref: ItemRef = ()
    leaves_out_excluded = True

    def __init__(
        self,
        source: SampleStage,
        encoder: TaskEncoder,
        *,
        on_error: OnError = "raise",
        max_errors: int | float = 0.1,
        check: float = 0.0,
    ) -> None:
        self._check_source(source, SampleStage)
        super().__init__(source)
        check_encoder("Encode", encoder)
        if not 0 <= check <= 1:
            raise ValueError(f"Encode: check must be a share of the samples, 0.0 to 1.0, not {check!r}")
        self._skipped = SkippedSamples(
            type(encoder).__name__,
            on_error,
            max_errors,
            counts=self.counts,
            lane=source.lane,
            population=source.info.population,
        )
        self.on_error = on_error
        self._encoder = encoder
        self._encode: EncodeCall = PurityCheck(encoder, check) if check else encoder.encode
        self._told = ToldSize(encoder)
        self._seed_globals = seeder(encoder.global_rng)
        self._bases: dict[int, int] = {}  # by `Ref.source`: the base of the keys of its samples' random numbers
        self._plain: set[type] = set()  # types of items seen so far that are neither `Skip` nor iterators
        self._refs = np.empty(0, REF)  # taken from the source; those before `_next` are done
        self._samples: list[Sample] = []
        self._next = 0
        self._taken = 0  # refs taken from the source since the run began
        self._given = 0  # items given since this stage was made
        self._parts: Iterator[Any] | None = None  # the remaining parts of the sample at `_next`, if it fans out
        self._part = 0  # parts of that sample given so far
        self._rng = Rng(0)

    def describe(self) -> StageInfo:
        """The source's, one deeper, with the encoder."""
        return replace(super().describe(), encoder=self._encoder)

    def __next__(self) -> Any:
        items, refs = self.take(1)
        if not items:
            raise StopIteration
        self.ref = refs[0]
        return items[0]

    def take(self, n: int) -> tuple[list[Any], list[ItemRef]]:
        """Up to `n` items and their refs; fewer only at the end."""
        items: list[Any] = []
        refs: list[ItemRef] = []
        first, part, before = self._next, self._part, self._skipped.begin()
        try:
            while len(items) < n:
                if self._next == len(self._refs):
                    if not self._load(max(n - len(items), _AHEAD), keep=first):
                        break
                    first = 0
                if self._part or self._parts is not None:
                    self._take_parts(items, refs, n)
                else:
                    self._take_samples(items, refs, n)
        except BaseException:
            self._next, self._part, self._parts = first, part, None  # the call returns no item: undo it as a whole
            self._skipped.roll_back(before)
            raise
        self._given += len(items)
        self.counts["items"] += len(items)
        return items, refs

    @property
    def unmade(self) -> bool:
        """Whether the encoder tells lengths without encoding."""
        return self._told.tells

    def take_measured(self) -> Measured | None:
        """The next item's ref and size, as the encoder tells it; the item itself where it cannot tell."""
        while self._told.tells and self._parts is None and not self._part:
            if self._next == len(self._refs) and not self._load(_AHEAD, keep=self._next):
                return None
            sample = self._samples[self._next]
            if sample.index in self.info.excluded:
                self._leave_out()
                continue
            size = None if (sample.index, sample.epoch) in self._skipped.avoided else self._size_of(sample)
            if size is None:
                break
            self._next += 1
            if not isinstance(size, Skip):
                self._given += 1
                self.counts["items"] += 1
                return Measured((sample.index, sample.epoch, 0), (size,), MISSING)
        return super().take_measured()

    def _leave_out(self, given: int = 0) -> None:
        """Skip the sample at `_next`, which is excluded. `given`: items of this call."""
        self._skipped.skipped(self._samples[self._next], _EXCLUDED, self._given + given)
        self._end_of_parts()

    def _size_of(self, sample: Sample) -> Size | Skip | None:
        """What the encoder tells of a sample; a `Skip` if it raises and `on_error` says to skip."""
        before = self._skipped.begin()
        self._report_sample(sample)
        try:
            return self._told.of(sample)
        except Exception as error:
            try:
                self._skipped.tolerate(sample, error, self._done, self._given)
            except BaseException:
                self._skipped.roll_back(before)
                raise
            return Skip(reason_of(error))

    def _load(self, n: int, keep: int) -> bool:
        """Take `n` more refs from the source and keep the old ones from `keep` on; False at the end."""
        fresh = self.source.take_refs(n)
        if not len(fresh):
            return False
        self._taken += len(fresh)
        samples = self.source.open_samples(fresh)
        if keep == len(self._refs):
            self._refs, self._samples, self._next = fresh, samples, 0
        else:
            self._next -= keep
            self._refs = np.concatenate([self._refs[keep:], fresh])
            self._samples = self._samples[keep:] + samples
        return True

    def exchange(self, change: Callable[[EncodeCall], EncodeCall]) -> EncodeCall:
        """Replace the function that makes items of samples, such as by one that measures it.

        Args:
            change: Returns the new function from the present one.

        Returns:
            The function before.
        """
        before = self._encode
        self._encode = change(before)
        return before

    def _take_samples(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Encode samples until there are `n` items, no more refs, or a sample that fans out into several items."""
        encode, seed, plain, status = self._encode, self._seed_globals, self._plain, self.lane.status
        avoided, excluded = self._skipped.avoided, self.info.excluded
        dataset, base = None, 0
        if status is not None:
            status[0] = self.info.depth
        first = self._next
        chosen = self._samples[first : first + n - len(items)]
        for self._next, sample in enumerate(chosen, first):
            if sample.origin is not dataset:
                dataset = sample.origin
                base = self._base(dataset.source)
            index, epoch = sample.index, sample.epoch
            if excluded and index in excluded:
                self._skipped.skipped(sample, _EXCLUDED, self._given + len(items))
                continue
            if status is not None:
                status[1], status[2] = index, epoch
            if avoided and (index, epoch) in avoided:
                self._skipped.avoided_again(sample, self._done, self._given + len(items))
                continue
            ref = (index, epoch, 0)
            rng = Rng(base, ref)
            if seed is not None:
                seed(rng.key)
            try:
                item = encode(sample, rng)
            except Exception as error:
                self._skipped.tolerate(sample, error, self._done, self._given + len(items))
                continue
            if type(item) not in plain:
                if type(item) is Skip or item is None or hasattr(item, "__next__"):
                    if self._fans_out(sample, item, rng, self._given + len(items)):
                        return
                    continue
                plain.add(type(item))
            items.append(item)
            refs.append(ref)
        self._next += 1

    def _fans_out(self, sample: Sample, item: Any, rng: Rng, given: int) -> bool:
        """Whether the encoder's result is an iterator of parts; if it is a `Skip` or None, count the sample."""
        if item is None:
            self._skipped.tolerate(sample, TypeError("it gave None; return an item or Skip(reason)"), self._done, given)
        elif self._encoder.one_to_one:
            raise self._skipped.failed(sample, TypeError(f"it is one_to_one, but gave {item!r}"))
        elif type(item) is Skip:
            self._skipped.skipped(sample, item, given)
        else:
            self._parts, self._part, self._rng = item, 0, rng
            return True
        return False

    @property
    def _done(self) -> int:
        """The number of samples of the lane that are done, counting the one at `_next`."""
        return self._taken - len(self._refs) + self._next + 1

    def _take_parts(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Take parts of the sample at `_next` until there are `n` items or no more parts."""
        sample, skipped = self._samples[self._next], self._skipped
        self._report_sample(sample)
        try:
            if self._parts is None:
                if sample.index in self.info.excluded:
                    self._leave_out(len(items))
                    return
                if (sample.index, sample.epoch) in skipped.avoided:
                    skipped.avoided_again(sample, self._done, self._given + len(items))
                    self._end_of_parts()
                    return
                self._parts = self._parts_from(sample, self._part)
            while len(items) < n:
                item = self._next_part(sample, self._parts, self._rng, self._part)
                if item is _DONE:
                    if not self._part:
                        skipped.skipped(sample, Skip("an iterator without items"), self._given + len(items))
                    self._end_of_parts()
                    return
                if type(item) is Skip:
                    skipped.skipped(sample, item, self._given + len(items))
                else:
                    items.append(item)
                    refs.append((sample.index, sample.epoch, self._part))
                self._part += 1
        except _EncoderError as failed:  # the parts before the error count as items; the rest of the sample is skipped
            skipped.tolerate(sample, failed.error, self._done, self._given + len(items))
            self._end_of_parts()

    def _end_of_parts(self) -> None:
        self._next, self._part, self._parts = self._next + 1, 0, None

    def _parts_from(self, sample: Sample, part: int) -> Iterator[Any]:
        """Encode `sample` again and pass over its first `part` parts."""
        self._rng = Rng(self._base(sample.origin.source), (sample.index, sample.epoch, 0))
        if self._seed_globals is not None:
            self._seed_globals(self._rng.key)
        try:
            parts: Iterator[Any] = self._encode(sample, self._rng)
        except Exception as error:
            raise _EncoderError(error) from error
        fans_out = hasattr(parts, "__next__")
        for passed in range(part):
            if not fans_out or self._next_part(sample, parts, self._rng, passed) is _DONE:
                raise CheckpointMismatchError(
                    f"Encode: by the state, {part} items of sample {sample.key!r} of {sample.shard} were given, but "
                    f"made again it gives {passed if fans_out else 'one alone'}; is the encoder the one of the saved "
                    "run, and pure?"
                )
        return parts

    def _next_part(self, sample: Sample, parts: Iterator[Any], rng: Rng, part: int) -> Any:
        rng.rekey((sample.index, sample.epoch, part))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        try:
            return next(parts, _DONE)
        except Exception as error:
            raise _EncoderError(error) from error

    def _report_sample(self, sample: Sample) -> None:
        """Record this stage and sample on the worker's status page, for a report if the worker dies."""
        status = self.lane.status
        if status is not None:
            status[0], status[1], status[2] = self.info.depth, sample.index, sample.epoch

    def _base(self, source: int) -> int:
        if source not in self._bases:
            self._bases[source] = derive_key(self.lane.seed, "encode", source)
        return self._bases[source]

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
            return _EXCLUDED
        lost = self._skipped.lost_before(sample, self._given)
        if lost is not None:
            return lost
        self._report_sample(sample)
        rng = self._rng
        try:
            return self._made_again(sample, _part_of(ref))
        except _EncoderError as failed:
            return self._skipped.lose(sample, failed.error, self._done, self._given)
        finally:
            self._rng = rng

    def _made_again(self, sample: Sample, part: int) -> Any:
        item: Any = self._parts_from(sample, 0)
        try:
            self._told.check(sample, item)
        except EncodeError:
            raise
        except Exception as error:
            raise _EncoderError(error) from error
        if hasattr(item, "__next__"):
            parts = (self._next_part(sample, item, self._rng, number) for number in range(part + 1))
            item = next((made for number, made in enumerate(parts) if made is _DONE or number == part), _DONE)
        elif part and type(item) is not Skip:
            item = _DONE
        if item is _DONE:
            raise EncodeError(
                f"{type(self._encoder).__name__}.encode made no part {part} of shard {sample.shard}, key "
                f"{sample.key!r} this time; it must depend on the sample and `rng` alone"
            )
        return item

    def hint_rows(self, rows: int, *, aligned: bool) -> None:
        """Pass it on; rows are aligned with samples only where the encoder makes one item of each."""
        self.source.hint_rows(rows, aligned=aligned and self._encoder.one_to_one)

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The source's count if each sample becomes one item (`one_to_one`) or an error that is raised; else None."""
        one_to_one = self._encoder.one_to_one and self.on_error == "raise" and not self.info.excluded
        return self.source.count_of(lane, epoch) if one_to_one else None

    def save_state(self) -> State:
        """`refs`: taken from the source but not done, 12 bytes each; `part`: parts of the first one given so far.

        `samples`: the number of samples that are done; `errors` and `avoided`: see `SkippedSamples.save_state`.
        """
        left: RefArray = self._refs[self._next :]
        return {
            "refs": left.tobytes(),
            "part": self._part,
            "samples": self._taken - len(left),
            **self._skipped.save_state(),
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is read or encoded."""
        saved = parse_state(self, state, _EncodeState)
        self.source.restore_state(saved.source)
        refs = saved_refs(self, saved.refs)
        self._refs = self.keep_known(refs)
        self._samples = self.source.open_samples(self._refs)
        self._next, self._part, self._parts = 0, saved.part, None
        if saved.part and not len(refs):
            raise CheckpointMismatchError(f"Encode: by the state, {saved.part} items of no sample were given")
        if not np.array_equal(self._refs[:1], refs[:1]):
            self._part = 0
        self._taken = saved.samples + len(self._refs)
        self._skipped.errors = saved.errors
        for reason, avoided in saved.avoided.items():
            for index, epoch in saved_refs(self, avoided).tolist():
                self._skipped.avoid(index, epoch, reason)

    def settings(self) -> dict[str, Any]:
        """The encoder's class and its own settings."""
        return encoder_settings(self._encoder)


def _part_of(ref: ItemRef | Ref) -> int:
    """The number of the part that a ref names. Raises `CheckpointMismatchError` for one of a state that names none."""
    if isinstance(ref, Ref):
        return ref.part
    if len(ref) != 3 or not hasattr(ref[2], "__index__"):
        raise CheckpointMismatchError(f"Encode: {ref} is not the ref of an item; use another copy of the checkpoint")
    return int(ref[2])


class _EncoderError(Exception):
    """Carries an encoder's error to the place where `on_error` is applied."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_DONE = object()
