"""`Encode`: stage that turns samples into items with the user's encoder.

The stage also rebuilds an item from its ref.

encode(sample, rng) ──▶ item                       part 0
encode(sample, rng) ──▶ iterator ──▶ item, …       parts 0, 1, …, each with its own random numbers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import index
from typing import Any, TypeAlias

import msgspec

from savable_pipeline.core.global_rng import DrawFound
from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.ref import Ref
from savable_pipeline.data.dataset.sample import Sample, sample_name
from savable_pipeline.errors import CheckpointMismatchError, EncodeError, SavableError
from savable_pipeline.stages.chunked_stage import ChunkedStage, count_of
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.encoder_calls import lane_encoder, seeding_of
from savable_pipeline.stages.item_buffer import TakenAhead, known_refs
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.length_column import LengthColumn
from savable_pipeline.stages.mapped_function import MappedFunction, encoder_call
from savable_pipeline.stages.purity_check import PurityCheck
from savable_pipeline.stages.skipped_samples import EXCLUDED, SkippedSamples, absent_reason
from savable_pipeline.stages.stage import ItemStage, SampleStage, State, parse_state, saved_refs
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings, overrides

EncodeCall: TypeAlias = Callable[[Sample, Rng], Any]

log = logging.getLogger(__name__)

DONE: Any = object()  # returned by an iterator over items after its last item
_LIST_WARNING = (
    "%s returned a list of %d dicts, which is a single item: a batch has a list of as many dicts. To make an item of "
    "each, yield them, or return iter(...)"
)
_MOST_OPENED = 10_000  # most open samples to remember that were taken without encoding them
_LEAST_TAKEN = 16  # least number of refs to take from the source at a time


class EncodeState(msgspec.Struct):
    """State of `Encode`, or of a `Filter`, which has no `part`."""

    refs: bytes | list[Any]
    source: dict[str, Any]
    part: SavedCount = 0
    samples: SavedCount = 0
    errors: SavedCount = 0
    avoided: dict[str, bytes] = {}


class Encode(ChunkedStage, ItemStage):
    """Yields items: `encoder.encode(sample, rng)` of each sample of its source.

    A sample becomes one item, none (`Skip`), or several (an iterator of items). Skipped samples are counted by reason.
    After an error the next call tries the same sample again.

    Args:
        source: A stage of samples.
        encoder: Encodes samples as items; or a function that builds the encoder, once per process.
        on_error: For a sample whose encoding raises: "raise", "skip", or a function of the `EncodeError` (its
            `__cause__` is the encoder's error) that returns True to skip and depends on the sample alone. For
            unreadable shards it is the reader's `on_error`.
        max_errors: The most samples that a lane may skip because of errors: a count as int, or a fraction of its
            samples so far as float; up to 100 are always allowed.
        check: Fraction of samples, 0.0 to 1.0, to encode twice, to find an encoder that is not pure. These are the same
            samples after a resume. None: the first 8 of a process, unless one takes more than a second.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: The encoder raised, too many samples were skipped, or the two results of a check differ. The error
            names shard, key and byte offset.

    Example:
        >>> class Ids(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         number = sample.json()["id"]
        ...         return number if number % 2 else sp.Skip("even")
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Ids())
        >>> next(items), next(items), items.counts["skipped/even"]
        (1, 3, 2)
        >>> items.ref, items.fetch(items.ref)  # (index, epoch, part), and the same item rebuilt
        ((3, 0, 0), 3)
    """

    source: SampleStage
    _maps_series = False  # whether to try `_map_series`

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
        encoder = lane_encoder("Encode", encoder, source.lane)
        self._ahead = TakenAhead()
        self._skipped = SkippedSamples(
            "Encode", encoder_call(encoder), on_error, max_errors, self.counts, source.info, self._ahead
        )
        self.on_error, self._encoder = on_error, encoder
        self.one_to_one = encoder.one_to_one
        self.keyed = KeyedEncoder(encoder, source.lane, check=check)
        if encoder.length_column is not None:
            column = LengthColumn(encoder.length_column, source)
            self.keyed.declared.length_of, self.datasets = column.of, column.datasets
        self._item_types: set[type] = set()  # types of all items so far, except `Skip` and iterators
        # samples that were taken without encoding them, and their declared sizes, by (index, epoch)
        self._opened: dict[ItemRef, tuple[Sample, Size | None]] = {}
        self._fan: FanOut | None = None  # iterator over the items of the next sample, if it has several

    def describe(self) -> StageInfo:
        """Describe items of the encoder, without excluded samples."""
        return replace(
            super().describe(), encoder=self._encoder, yields_excluded=False, declared=self.keyed.declared.known
        )

    def take(self, n: int) -> list[Element]:
        """Take the next 1 to `n` items, or none at the end.

        They have no values yet if the encoder declares their sizes.
        """
        elements: list[Element] = []
        ahead = self._ahead
        first, parts_taken, before = ahead.next, self._parts_taken, self._skipped.begin(elements)  # to undo the call
        try:
            while len(elements) < n:
                if ahead.next == len(ahead.refs):
                    if not ahead.load(self.source, max(n - len(elements), _LEAST_TAKEN), first=first):
                        break
                    first = 0  # `load` has dropped the samples before it
                snapshot, remaining_checks = self._skipped.snapshot(), self.keyed.check.remaining  # to undo one series
                fan, count = self._fan, self._parts_taken
                try:
                    if fan is not None:
                        self._take_parts(elements, n)
                    elif self.keyed.declared.known or (self.lane.skips and self._always_one_item):
                        self._take_unbuilt(elements)
                    else:
                        self._take_samples(elements, n)
                except DrawFound:  # it drew unseeded: undo the series, which the next iteration repeats with seeds
                    self._skipped.roll_back(snapshot)
                    self.keyed.check.remaining = remaining_checks
                    self._fan = FanOut(self.keyed, fan.sample, count=count) if fan is not None else None
        except BaseException:
            self._skipped.roll_back(before)  # undo the whole call, because it returns no item
            ahead.next = first
            self._fan = FanOut(self.keyed, ahead.opened[first], count=parts_taken) if parts_taken else None
            raise
        self._skipped.end(self.info.tags)
        self.counts["items"] += len(elements)
        return elements

    def _take_unbuilt(self, elements: list[Element]) -> None:
        """Take the next sample without encoding it, if its size is declared, or if the lane only skips its item."""
        sample, size, skips_item = self._ahead.opened[self._ahead.next], None, False
        if not self._is_dropped(sample):
            self._report_sample(sample)
            skips_item = self.lane.skips and self._always_one_item and sample.origin.on_error == "raise"
            try:
                size = self.keyed.declared.of(sample)
            except Exception as error:
                self._skipped.tolerate(sample, error)
                self._ahead.next += 1
                return
        if size is None and not skips_item:
            self._take_samples(elements, len(elements) + 1)
            return
        element = Element((sample.index, sample.epoch, 0), sizes=None if size is None else (size,))
        if not skips_item:
            self._opened[element.ref[:2]] = sample, size
            if len(self._opened) > _MOST_OPENED:
                del self._opened[next(iter(self._opened))]
        if self._makes:
            self.make([element])
        self._ahead.next += 1
        elements.append(element)

    def _is_dropped(self, sample: Sample) -> bool:
        """Return whether a sample must not be tried again, is excluded, or is missing in a joined dataset."""
        is_avoided = (sample.index, sample.epoch) in self._skipped.avoided
        return is_avoided or sample.index in self.info.excluded or bool(absent_reason(sample.origin))

    def _take_samples(self, elements: list[Element], n: int) -> None:
        """Encode samples until there are `n` items, no more refs, an error, or a sample that fans out."""
        ahead, keyed, avoided, first = self._ahead, self.keyed, self._skipped.avoided, self._ahead.next
        chosen = ahead.opened[first : first + n - len(elements)]
        with keyed.seeding.series(len(chosen)) as seed:
            function = keyed.function if (encode := keyed.due_encode()) is keyed.unchecked and seed is None else None
            may_map = self._maps_series and not avoided and function is not None
            if may_map and (function := self._map_series(chosen, elements)) is None:
                return
            item_types, status, append = self._item_types, self.lane.worker.status, elements.append
            excluded, depth, origin = self.info.excluded.numbers and self.info.excluded, self.info.depth, None
            for ahead.next, sample in enumerate(chosen, first):
                if sample.origin is not origin:
                    origin, source_key = sample.origin, keyed.base(sample.origin.source)
                    absent = absent_reason(origin)
                index, epoch, _ = ref = (sample.index, sample.epoch, 0)
                if absent or (excluded and index in excluded):
                    self._skipped.count_skip(sample, EXCLUDED if index in excluded else Skip(absent))
                    continue
                if status is not None:
                    status[0], status[1], status[2] = depth, index, epoch
                if (index, epoch) in avoided:  # it failed, and must not be tried again
                    keyed.seeding.check(ends=True)
                    self._skipped.count_avoided_again(sample)
                    break
                rng: Any = Rng(source_key, ref) if function is None else None
                if seed is not None:
                    seed(rng.key)
                try:
                    item = encode(sample, rng) if function is None else function(sample)
                    if item is None:
                        raise TypeError("it returned None; return an item or Skip(reason)")
                except Exception as error:
                    keyed.seeding.check(ends=True)
                    self._skipped.tolerate(sample, error)
                    break  # otherwise a `DrawFound` at a later sample would undo this count
                if type(item) in item_types or self._add_item_type(item):
                    append(Element(ref, item))
                elif self._ends_series(sample, item, rng or Rng(source_key, ref)):
                    return
        ahead.next += 1

    def _map_series(self, chosen: list[Sample], elements: list[Element]) -> Callable[[Sample], Any] | None:
        """Take samples with one `map` of a function of samples, which takes 0.2 µs less for each of them.

        If the function raises, or a result is not an item of a known type, none is taken. The return value is then a
        function that returns the stored results in turn, and an `EncoderError` in place of the error. Later series are
        mapped again once an item of a new type is found.
        """
        first, results = self._ahead.next, list[Any]()
        try:
            results += map(self.keyed.function, chosen)
        except Exception as error:  # the list has the results before it
            results.append(EncoderError(error))
        self._maps_series = self._item_types.issuperset(map(type, results))
        if self._maps_series:
            elements += map(Element, [(each.index, each.epoch, 0) for each in chosen], results)
            self._ahead.next += len(chosen)
        return None if self._maps_series else lambda _: results[self._ahead.next - first]

    def _add_item_type(self, item: Any) -> bool:
        """Record the type of an item. Returns False for a `Skip`, an iterator or an `EncoderError`, which are no items.

        Warns, once per process, about a list of dicts, which collates badly.
        """
        if type(item) in (Skip, EncoderError) or hasattr(item, "__next__"):
            return False
        self._item_types.add(type(item))
        is_plain = self.lane.worker.status is None and self.source.info.raises and not self.info.excluded.numbers
        self._maps_series = self.keyed.function is not None and is_plain
        is_list_of_dicts = type(item) is list and item and all(isinstance(each, dict) for each in item)
        if is_list_of_dicts and not (overrides(self._encoder, "batch") or overrides(self._encoder, "pack")):
            warn = partial(log.warning, _LIST_WARNING, encoder_call(self._encoder), len(item))
            self.lane.shared(("list", id(self._encoder)), warn)
        return True

    def _ends_series(self, sample: Sample, result: Any, rng: Rng) -> bool:
        """Set `_fan` to the iterator that the encoder returned, or count its `Skip` or error.

        Returns False for a `Skip`, after which the series continues.
        """
        if type(result) is EncoderError:
            self.keyed.seeding.check(ends=True)
            # popped, because otherwise error, frame and results refer to each other
            error, result.args = vars(result).pop("error"), ()
            self._skipped.tolerate(sample, error)
            self._ahead.next += 1
            return True
        if self._encoder.one_to_one:
            raise self._skipped.encode_error(sample, TypeError(f"one_to_one is set, but it returned {result!r}"))
        if type(result) is Skip:
            self._skipped.count_skip(sample, result)
            return False
        self._fan = FanOut(self.keyed, sample, (result, rng))
        return True

    @property
    def _parts_taken(self) -> int:
        """Return how many parts of the next sample were already taken, where a `Skip` counts too."""
        return 0 if self._fan is None else self._fan.count

    def _take_parts(self, elements: list[Element], n: int) -> None:
        """Take parts of the next sample until there are `n` items or no more parts."""
        fan, skipped, seeding = self._fan, self._skipped, self.keyed.seeding
        assert fan is not None
        if fan.encoded is None and self._is_dropped(fan.sample):
            self._fan = None  # the saved run yielded the first parts; the others are dropped
            return
        self._report_sample(fan.sample)
        try:
            with seeding.series(n - len(elements)):
                while len(elements) < n:
                    part, item = fan.count, fan.next()
                    if type(item) is Skip:
                        skipped.count_skip(fan.sample, item)
                    elif item is not DONE:
                        elements.append(Element((fan.sample.index, fan.sample.epoch, part), item))
                    else:
                        break
                else:
                    return
            if not part:
                skipped.count_skip(fan.sample, Skip("an iterator without items"))
        except EncoderError as wrapper:  # the parts before the error are still yielded
            skipped.tolerate(fan.sample, wrapper.error)
        self._ahead.next, self._fan = self._ahead.next + 1, None

    def _report_sample(self, sample: Sample) -> None:
        """Write this stage's depth and the sample to shared memory, to be reported if the worker dies."""
        status = self.lane.worker.status
        if status is not None:
            status[0], status[1], status[2] = self.info.depth, sample.index, sample.epoch

    def can_skip(self, error: SavableError) -> bool:
        """Return whether `on_error` skips a sample with this error.

        Args:
            error: The error of the sample.
        """
        return skips(self.on_error, error)

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Skip a sample from now on, also in lanes that are restored from a later state.

        Args:
            index: The sample's index, as in its ref.
            epoch: The epoch in its ref.
            reason: The reason under which the sample is counted.
        """
        self._skipped.avoid(index, epoch, reason)

    def make(self, elements: Sequence[Element]) -> None:
        """Build the values of items.

        A value is a `Skip` if encoding fails now and `on_error` skips the error, or if the sample is excluded. Raises
        `EncodeError` if the encoder raises another error, or no longer yields this part of the sample.
        """
        for element in elements:
            element.value = self._rebuilt(element)

    def _rebuilt(self, element: Element) -> Any:
        """Return the rebuilt item, or the `Skip` of a lost or excluded sample."""
        ref = element.ref
        opened, size = self._opened.pop(ref[:2], (None, None)) if type(ref) is tuple else (None, None)
        sample = self.source.fetch(ref) if opened is None else opened
        was_counted = opened is not None
        if sample.index in self.info.excluded:
            return EXCLUDED
        if (lost := self._skipped.known_loss(sample, was_counted=was_counted)) is not None:
            return lost
        self._report_sample(sample)
        try:
            return self.keyed.seeding.call_alone(self.keyed.rebuild, sample, element, size)
        except EncoderError as wrapper:
            return self._skipped.lose(sample, wrapper.error, was_counted=was_counted)

    @property
    def _always_one_item(self) -> bool:
        """Return whether each sample becomes one item, or raises an error."""
        return bool(self.one_to_one) and self.on_error == "raise"

    def is_certain(self, ref: ItemRef) -> bool:
        """Return whether rebuilding an item never yields a `Skip`.

        That is so if errors are raised, no sample is avoided, and no joined sample is missing.
        """
        never_skips = self.on_error == "raise" and not self._skipped.avoided
        if not never_skips or self.source.info.raises:
            return never_skips
        origin = self.source.fetch(ref).origin
        return origin.on_error == "raise" and not absent_reason(origin)

    def count_of(self, lane: int, epoch: int) -> int | None:
        """Return the number of items of a lane in a pass, or None if it is unknown.

        It is known if each sample becomes one item or raises an error.

        Args:
            lane: The number of the lane.
            epoch: The number of the pass.
        """
        return count_of(self.source, lane, epoch) if self._always_one_item and not self.info.excluded else None

    def save_state(self) -> State:
        """Return the position.

        `refs` has the refs of the samples that were taken from the source but not encoded, 12 bytes each. `part` is how
        many parts of the first of these samples were taken. `samples` is the number of encoded samples. For `errors`
        and `avoided`, see `SkippedSamples.save_state`.
        """
        return {
            "refs": self._ahead.save(),
            "part": self._parts_taken,
            "samples": self._ahead.done,
            **self._skipped.save_state(),
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`, without reading or encoding a sample."""
        saved = parse_state(self, state, EncodeState)
        self.source.restore_state(saved.source)
        refs = saved_refs(self, saved.refs)
        remaining = known_refs(self, refs)
        self._ahead.restore(self.source, remaining, saved.samples)
        if saved.part and not len(refs):
            raise CheckpointMismatchError(
                f"Encode: the state is damaged (part {saved.part} of no sample). Use another copy of the checkpoint."
            )
        # compared as bytes, because NumPy's comparison of structured arrays turns Ctrl-C into another error
        is_within_sample = saved.part > 0 and remaining[:1].tobytes() == refs[:1].tobytes()
        self._fan = FanOut(self.keyed, self._ahead.opened[0], count=saved.part) if is_within_sample else None
        self._skipped.restore(self, saved.errors, saved.avoided)

    def settings(self) -> dict[str, Any]:
        """Return the encoder's class and settings."""
        return encoder_settings(self._encoder)


class EncoderError(Exception):
    """Wrapper of an encoder's error, before `on_error` decides whether to skip it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_WARNED_CLASSES: set[type] = set()  # classes of encoders about which a warning was logged


def _warn_of_own_draws(encoder: TaskEncoder) -> None:
    """Warn, once per class, if an encoder uses Albumentations, which draws from generators of its own."""
    encoder_class = type(encoder)
    values = [value for owner in (*encoder_class.__mro__, encoder) for value in getattr(owner, "__dict__", {}).values()]
    draws = any(type(v).__module__.startswith("albumentations.") and hasattr(v, "set_random_seed") for v in values)
    used_names = {name for value in values for name in getattr(getattr(value, "__code__", None), "co_names", ())}
    if draws and "set_random_seed" not in used_names and encoder_class not in _WARNED_CLASSES:
        _WARNED_CLASSES.add(encoder_class)
        log.warning(
            "%s uses Albumentations, which draws its own random numbers. Call "
            "transform.set_random_seed(rng.integers(2**32)) in encode.",
            encoder_class.__name__,
        )


class KeyedEncoder:
    """Calls of `encode` with the random numbers of a sample.

    The key of these numbers is derived from the run's seed, the `purpose` and the sample's ref. A `Filter` has another
    purpose than `Encode`, so it gets different numbers for the same sample.
    """

    def __init__(self, encoder: TaskEncoder, lane: Lane, *, check: float | None, purpose: str = "encode") -> None:
        self.seeding = seeding_of(encoder, lane)
        stage = "Encode" if purpose == "encode" else "Filter"
        make_check = partial(PurityCheck, stage, encoder, check, self.seeding, lane)
        # by default all lanes of a process share one check
        self.check = lane.shared(("purity", id(encoder)), make_check) if check is None else make_check()
        self.unchecked: EncodeCall = encoder.encode
        self.encode: EncodeCall = self.unchecked if check == 0 and purpose == "encode" else self.check
        self.function: Any = encoder.function if isinstance(encoder, MappedFunction) and not encoder.with_rng else None
        _warn_of_own_draws(encoder)
        self.declared = DeclaredSize(encoder)
        self.encoder, self._name = encoder, type(encoder).__name__
        # returns the 64-bit key of a source (`Ref.source`), from which the keys of its samples are derived
        self.base: Callable[[int], int] = cache(partial(derive_key, lane.seed, purpose))
        self._open: FanOut | None = None  # open iterator of the part that was rebuilt last

    def due_encode(self) -> EncodeCall:
        """Return the function to encode the next samples with.

        It is the encoder's own method if none of these samples is checked, and otherwise the purity check.
        """
        may_check = self.encode is not self.check or self.check.remaining > 0 or self.seeding.wants_second_run()
        return self.encode if may_check else self.unchecked

    def encoded(self, sample: Sample) -> tuple[Any, Rng]:
        """Encode a sample, and return the result and its random numbers.

        Raises `EncoderError`.
        """
        rng = Rng(self.base(sample.origin.source), (sample.index, sample.epoch, 0))
        if self.seeding.seed is not None:
            self.seeding.seed(rng.key)
        try:
            return self.due_encode()(sample, rng), rng
        except Exception as error:
            raise EncoderError(error) from error

    def opened(self, sample: Sample, part: int) -> tuple[tuple[Any, Rng], int]:
        """Return (result, rng) of `encode`, and how many of its items were taken.

        The result is the open iterator if it has last rebuilt an earlier part of this sample. Raises `EncoderError`.
        """
        fan, self._open = self._open, None
        if fan is not None and fan.encoded and fan.count <= part and fan.sample.ref == sample.ref:
            return fan.encoded, fan.count
        return self.encoded(sample), 0

    def rebuild(self, sample: Sample, element: Element, declared: Size | None) -> Any:
        """Rebuild the item of `element`, and compare it with its `declared` or saved size.

        Raises `EncoderError`, or `EncodeError` if the sample no longer has this part.
        """
        part = part_of(element.ref)
        (result, rng), count = self.opened(sample, part)
        try:
            self.declared.check(sample, element, result, declared)
        except EncodeError:
            raise
        except Exception as error:
            raise EncoderError(error) from error
        if not hasattr(result, "__next__"):
            item = result if not part or type(result) is Skip else DONE
        else:
            fan = self._open = FanOut(self, sample, (result, rng), count=count)
            item = fan.next() if fan.pass_over(part) else DONE
        if item is DONE:
            raise EncodeError(
                f"{self._name}.encode did not yield item {part} of {sample_name(sample)} again. "
                "It must depend on the sample and `rng` alone."
            )
        return item


class FanOut:
    """Iterator over the items of a sample that fans out.

    `count` is the number of items so far, where a `Skip` counts too. `encoded` is the encoder's iterator with its
    random numbers. If it is None, the sample is encoded when the next item is requested.
    """

    def __init__(
        self, keyed: KeyedEncoder, sample: Sample, encoded: tuple[Any, Rng] | None = None, *, count: int = 0
    ) -> None:
        self.sample, self.count = sample, count
        self._keyed, self.encoded = keyed, encoded

    def next(self) -> Any:
        """Return the next item, or `DONE` after the last one.

        Raises `EncoderError`, and `CheckpointMismatchError` if there are fewer items than were yielded before.
        """
        if self.encoded is not None:
            return self._next(*self.encoded)
        part = self.count
        self.encoded, self.count = self._keyed.opened(self.sample, part)
        if not hasattr(self.encoded[0], "__next__") or not self.pass_over(part):
            raise CheckpointMismatchError(
                f"Encode: {sample_name(self.sample)} yields fewer items than in the saved "
                "run. Use its encoder, which must depend on the sample and `rng` alone."
            )
        return self._next(*self.encoded)

    def pass_over(self, parts: int) -> bool:
        """Skip items until `count` is `parts`. Returns False if there are fewer.

        The skipped items are not built if the encoder's iterator has a method `pass_over`.
        """
        assert self.encoded is not None
        items, rng = self.encoded
        if parts > self.count and (pass_over := getattr(items, "pass_over", None)) is not None:
            try:
                self.count += index(pass_over(parts - self.count))
            except Exception as error:
                raise EncoderError(error) from error
        else:
            while self.count < parts and self._next(items, rng) is not DONE:
                pass
        return self.count == parts

    def _next(self, items: Iterator[Any], rng: Rng) -> Any:
        """Return the next of the encoder's `items`, with random numbers of this part, or `DONE` at the end."""
        rng.rekey((self.sample.index, self.sample.epoch, self.count))
        if self._keyed.seeding.seed is not None:
            self._keyed.seeding.seed(rng.key)
        try:
            item = next(items, DONE)
        except Exception as error:
            raise EncoderError(error) from error
        self.count += item is not DONE
        return item


def part_of(ref: ItemRef | Ref) -> int:
    """Return `part` of the ref of an item: (index, epoch, part) or a `Ref`.

    Raises `CheckpointMismatchError` if `ref` is not such a ref.
    """
    if isinstance(ref, Ref):
        return ref.part
    if len(ref) != 3 or not hasattr(ref[2], "__index__"):
        raise CheckpointMismatchError(f"Encode: {ref} is no item. Use another copy of the checkpoint.")
    return int(ref[2])


class DeclaredSize:
    """Sizes of items that an encoder declares.

    An encoder declares them by `length_of` and `images_of`, or by its length column. `known` is whether it does.
    """

    def __init__(self, encoder: TaskEncoder) -> None:
        self._encoder = encoder
        self.length_of = encoder.length_of
        has_images = overrides(encoder, "images_of") or not overrides(encoder, "images")
        self.known = has_images and (encoder.length_column is not None or overrides(encoder, "length_of"))
        if encoder.length_column is not None and not has_images:
            raise ValueError(f"{type(encoder).__name__} has length_column and images. Add images_of.")

    def of(self, sample: Sample) -> Size | None:
        """Return the declared (length, images) of a sample's item, or None if unknown.

        Raises errors of the encoder.
        """
        if not self.known or (length := self.length_of(sample)) is None:
            return None
        return index(length), index(self._encoder.images_of(sample))

    def check(self, sample: Sample, element: Element, item: Any, declared: Size | None) -> None:
        """Raise `EncodeError` if the size of a built item differs from the declared one.

        The size of a saved element is the declared one, unless the item is one of several of a sample. A later stage
        has measured the size of such an item.
        """
        planned = declared or (element.sizes[0] if element.sizes and not hasattr(item, "__next__") else None)
        if planned is None or not self.known:
            return
        name = type(self._encoder).__name__
        length_of = "length_of" if self._encoder.length_column is None else "length_column"
        if type(item) is Skip or hasattr(item, "__next__"):
            did = f"skipped the sample with {item.reason!r}" if type(item) is Skip else "yields several items"
            raise EncodeError(
                f"{name}.{length_of} declared {planned[0]}, but encode {did}. Use length_of, which may return None."
                f"\n  stage Encode, {sample_name(sample)}"
            )
        element.measured = self._encoder, index(self._encoder.length(item))
        found = element.measured[1], self._encoder.images(item)
        names = (length_of, "length"), ("images_of", "images")
        for (declared_by, method), before, after in zip(names, planned, found, strict=True):
            if before != after:
                raise EncodeError(
                    f"{name}.{declared_by} declared {before}, but {method} of the item is {after}. The two must "
                    f"agree, also after a resume.\n  stage Encode, {sample_name(sample)}"
                )
