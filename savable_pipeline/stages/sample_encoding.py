"""How `Encode` calls its encoder: for samples taken ahead, with keyed random numbers, part by part, and again.

encode(sample, rng) ──▶ item                       part 0
encode(sample, rng) ──▶ iterator ──▶ item, …       parts 0, 1, …, each with random numbers of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from savable_pipeline.core.global_rng import seeder
from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.ref import REF, Ref, RefArray
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.purity_check import PurityCheck
from savable_pipeline.stages.stage import SampleStage
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

EncodeCall: TypeAlias = Callable[[Sample, Rng], Any]

DONE: Any = object()


class EncoderError(Exception):
    """Carries an encoder's error to the place where `on_error` is applied."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class KeyedEncoder:
    """Calls `encode` of an encoder with the random numbers of a sample: their key is of the run's seed and its ref.

    `purpose` keeps the numbers of a stage other than `Encode` apart from those.
    """

    def __init__(self, encoder: TaskEncoder, lane: Lane, *, check: float | None, purpose: str = "encode") -> None:
        self.encoder = encoder
        self._check = _purity_check(encoder, lane, check)
        self._plain: EncodeCall = encoder.encode
        self.encode: EncodeCall = self._check or self._plain
        self.seed_globals = seeder(encoder.global_rng)
        self.told = ToldSize(encoder)
        self._name = type(encoder).__name__
        self._run_seed, self._purpose = lane.seed, purpose
        self._bases: dict[int, int] = {}

    def encode_many(self) -> EncodeCall:
        """What encodes the next samples: the encoder itself, once no more samples are to be checked."""
        if self._check is not None and self._check.left <= 0 and self.encode is self._check:
            self.encode, self._check = self._plain, None
        return self.encode

    def base(self, source: int) -> int:
        """The base of the keys of the random numbers of samples with this `Ref.source`."""
        if source not in self._bases:
            self._bases[source] = derive_key(self._run_seed, self._purpose, source)
        return self._bases[source]

    def encoded(self, sample: Sample) -> tuple[Any, Rng]:
        """What `encode` makes of a sample, and its random numbers. Raises `EncoderError`."""
        rng = Rng(self.base(sample.origin.source), (sample.index, sample.epoch, 0))
        if self.seed_globals is not None:
            self.seed_globals(rng.key)
        try:
            return self.encode(sample, rng), rng
        except Exception as error:
            raise EncoderError(error) from error

    def part(self, sample: Sample, part: int) -> Any:
        """Make a part of a sample again. Raises `EncoderError`, or `EncodeError` if there is no such part this time."""
        made, rng = self.encoded(sample)
        try:
            self.told.check(sample, made)
        except EncodeError:
            raise
        except Exception as error:
            raise EncoderError(error) from error
        if not hasattr(made, "__next__"):
            item = made if not part or type(made) is Skip else DONE
        else:
            fan = FanOut(self, sample, (made, rng))
            item = fan.next() if fan.pass_over(part) else DONE
        if item is DONE:
            raise EncodeError(
                f"{self._name}.encode made no part {part} of shard {sample.shard}, key {sample.key!r} this time; it "
                "must depend on the sample and `rng` alone"
            )
        return item


def _purity_check(encoder: TaskEncoder, lane: Lane, share: float | None) -> PurityCheck | None:
    """The check of some samples, by default of the first ones that all lanes of a process encode."""
    if share is None:
        return lane.shared(("purity", id(encoder)), lambda: PurityCheck(encoder, None))
    return PurityCheck(encoder, share) if share else None


@runtime_checkable
class PassesOver(Protocol):
    """An encoder's iterator that can leave out items without making them."""

    def pass_over(self, parts: int) -> int:
        """Go on behind this many more items, or the last; returns how many there were."""


class FanOut:
    """The items of a sample that fans out, one by one; `given` counts those so far, a `Skip` too.

    `made`: the encoder's iterator and its random numbers; without it, the sample is encoded for the next item.
    """

    def __init__(
        self, keyed: KeyedEncoder, sample: Sample, made: tuple[Any, Rng] | None = None, *, given: int = 0
    ) -> None:
        self.sample = sample
        self.given = given
        self._keyed = keyed
        self.made = made

    def next(self) -> Any:
        """The next item; `DONE` after the last.

        Raises `EncoderError`, and `CheckpointMismatchError` if there are not as many items as were given before.
        """
        if self.made is not None:
            return self._next(*self.made)
        made, rng = self.made = self._keyed.encoded(self.sample)
        wanted, self.given = self.given, 0
        fans_out = hasattr(made, "__next__")
        if not fans_out or not self.pass_over(wanted):
            raise CheckpointMismatchError(
                f"Encode: by the state, {wanted} items of sample {self.sample.key!r} of {self.sample.shard} were "
                f"given, but made again it gives {self.given if fans_out else 'one alone'}; is the encoder the one "
                "of the saved run, and pure?"
            )
        return self._next(made, rng)

    def pass_over(self, parts: int) -> bool:
        """Go on behind this many items, unmade where the iterator can do so; False if there are fewer.

        Raises `EncoderError`.
        """
        assert self.made is not None
        made, rng = self.made
        if parts and isinstance(made, PassesOver):
            try:
                self.given = index(made.pass_over(parts))
            except Exception as error:
                raise EncoderError(error) from error
        else:
            while self.given < parts and self._next(made, rng) is not DONE:
                pass
        return self.given == parts

    def _next(self, made: Iterator[Any], rng: Rng) -> Any:
        rng.rekey((self.sample.index, self.sample.epoch, self.given))
        if self._keyed.seed_globals is not None:
            self._keyed.seed_globals(rng.key)
        try:
            item = next(made, DONE)
        except Exception as error:
            raise EncoderError(error) from error
        self.given += item is not DONE
        return item


def part_of(ref: ItemRef | Ref) -> int:
    """The number of the part that a ref names. Raises `CheckpointMismatchError` for one of a state that names none."""
    if isinstance(ref, Ref):
        return ref.part
    if len(ref) != 3 or not hasattr(ref[2], "__index__"):
        raise CheckpointMismatchError(f"Encode: {ref} is not the ref of an item; use another copy of the checkpoint")
    return int(ref[2])


class ToldSize:
    """Asks `length_of` and `images_of` of one encoder."""

    def __init__(self, encoder: TaskEncoder) -> None:
        self._encoder = encoder
        self.tells = _has(encoder, "length_of") and (_has(encoder, "images_of") or not _has(encoder, "images"))

    def of(self, sample: Sample) -> Size | None:
        """(length, images) of the item of a sample; None if only encoding can tell. Raises what the encoder raises."""
        if not self.tells:
            return None
        length = self._encoder.length_of(sample)
        return None if length is None else (index(length), index(self._encoder.images_of(sample)))

    def check(self, sample: Sample, item: Any) -> None:
        """Raise `EncodeError` if the item of a sample has another size than the encoder declared."""
        told = self.of(sample)
        if told is None:
            return
        name = type(self._encoder).__name__
        where = f"stage Encode, shard {sample.shard}, key {sample.key!r}"
        if type(item) is Skip:
            raise EncodeError(
                f"{name}.length_of told {told[0]}, but encode skipped the sample, {item.reason!r}; {where}: length_of "
                "must be None for a sample that encode skips"
            )
        if hasattr(item, "__next__"):
            raise EncodeError(
                f"{name}.length_of told {told[0]}, but encode makes several items of the sample; {where}: length_of "
                "must be None for it"
            )
        found = self._encoder.length(item), self._encoder.images(item)
        for method, before, after in zip(("length", "images"), told, found, strict=True):
            if before != after:
                raise EncodeError(
                    f"{name}.{method}_of told {before}, but {method} of the item is {after}; {where}: the two must "
                    "agree for every sample"
                )


def _has(encoder: TaskEncoder, method: str) -> bool:
    """Whether an encoder has a method of its own in place of the default."""
    return getattr(getattr(encoder, method), "__func__", None) is not getattr(TaskEncoder, method)


class SamplesAhead:
    """Samples and their refs; those before `next` are done. `taken` counts all that the lane took in this run."""

    def __init__(self) -> None:
        self.refs: RefArray = np.empty(0, REF)
        self.samples: list[Sample] = []
        self.next = 0
        self._taken = 0

    @property
    def left(self) -> RefArray:
        """The refs of the samples that are not done: REF (any,)."""
        return self.refs[self.next :]

    @property
    def done(self) -> int:
        """The number of samples of the lane that are done."""
        return self._taken - len(self.refs) + self.next

    def load(self, source: SampleStage, n: int, *, keep: int) -> bool:
        """Take `n` more from the source and keep the old ones from `keep` on; False at the end."""
        fresh = source.take_refs(n)
        if not len(fresh):
            return False
        self._taken += len(fresh)
        samples = source.open_samples(fresh)
        if keep == len(self.refs):
            self.refs, self.samples, self.next = fresh, samples, 0
        else:
            self.next -= keep
            self.refs = np.concatenate([self.refs[keep:], fresh])
            self.samples = self.samples[keep:] + samples
        return True

    def restore(self, source: SampleStage, refs: RefArray, done: int) -> None:
        """Continue with these refs, after this many samples that are done."""
        self.refs, self.samples, self.next = refs, source.open_samples(refs), 0
        self._taken = done + len(refs)
