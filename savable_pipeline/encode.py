"""`Encode`: reads samples and turns them into items by the user's encoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from savable_pipeline.encode_check import EncodedTwice
from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.global_rng import seeder
from savable_pipeline.keys import key
from savable_pipeline.losses import Losses
from savable_pipeline.on_error import OnError, reason_of
from savable_pipeline.rng import Rng
from savable_pipeline.sample import REF, Ref, RefArray, Sample
from savable_pipeline.stage import ItemRef, Stage, State, parse_state

_AHEAD = 16  # refs taken from the source at a time at least


class _EncodeState(msgspec.Struct):
    refs: bytes
    part: Annotated[int, msgspec.Meta(ge=0)]
    source: dict[str, Any]
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    errors: Annotated[int, msgspec.Meta(ge=0)] = 0
    avoided: dict[str, bytes] = {}


class Encode(Stage):
    """Gives the items that `encoder.encode(sample, rng)` makes of its source's samples.

    One item, none (`Skip`), or several (an iterator) come of a sample. What is left out is counted by reason.
    Raises `EncodeError` from the encoder's own error, with shard, key and offset; asked again, it tries the same
    sample again.

    `on_error` is for samples of which the encoder makes an error: "raise", "skip", or a function of the `EncodeError`,
    whose `__cause__` is the encoder's, that gives True to skip; what it gives must depend on the sample alone. Shards
    that cannot be read are the reader's to tolerate. More than `max_errors` in a lane, a count or a share of its
    samples so far, end the run; up to 100 are never too large a share.

    `check` is a share of samples to encode twice, to find an encoder that is not pure: where the two results differ,
    `EncodeError` says in which field. A run that is resumed checks the same samples.
    """

    def __init__(
        self,
        source: Stage,
        encoder: TaskEncoder,
        *,
        on_error: OnError = "raise",
        max_errors: int | float = 0.1,
        check: float = 0.0,
    ) -> None:
        super().__init__(source)
        if not isinstance(encoder, TaskEncoder):
            hint = ": make one of this class" if isinstance(encoder, type) else ""
            raise ValueError(f"Encode takes a TaskEncoder, not {encoder!r}{hint}")
        if source.encoder is not None:
            raise ValueError("Encode takes samples: there is an Encode stage upstream already")
        if not 0 <= check <= 1:
            raise ValueError(f"Encode: check must be a share of the samples, 0.0 to 1.0, not {check!r}")
        self._losses = Losses(self, type(encoder).__name__, on_error, max_errors)
        self.on_error = on_error
        self._encoder = encoder
        self._encode = EncodedTwice(encoder, check) if check else encoder.encode
        self._seed_globals = seeder(encoder.global_rng)
        self._bases: dict[int, int] = {}  # by source: what the random numbers of its samples are keyed with
        self._plain: set[type] = set()  # types of items seen so far that are neither `Skip` nor iterators
        self._refs = np.empty(0, REF)  # taken from the source; those before `_next` are done
        self._samples: list[Sample] = []
        self._next = 0
        self._taken = 0  # refs that were ever taken from the source
        self._given = 0  # items that were ever given
        self._parts: Iterator[Any] | None = None  # what is left of the sample at `_next`, if it fans out
        self._part = 0  # how many of its parts have been given
        self._rng = Rng(0)
        self._ref: ItemRef = ()

    @property
    def encoder(self) -> TaskEncoder:
        """The encoder."""
        return self._encoder

    @property
    def ref(self) -> ItemRef:
        """The ref of the item that `next` gave last."""
        return self._ref

    def __next__(self) -> Any:
        items, refs = self.take(1)
        if not items:
            raise StopIteration
        self._ref = refs[0]
        return items[0]

    def take(self, n: int) -> tuple[list[Any], list[ItemRef]]:
        """Up to `n` items and their refs; fewer only at the end."""
        items: list[Any] = []
        refs: list[ItemRef] = []
        first, part, mark = self._next, self._part, self._losses.mark()
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
            self._next, self._part, self._parts = first, part, None  # nothing of this call was given
            self._losses.back_to(mark)
            raise
        self._given += len(items)
        self.counts["items"] += len(items)
        return items, refs

    def _load(self, n: int, keep: int) -> bool:
        """Take refs from the source behind those from `keep` on; False at the end."""
        fresh = self.source.take_refs(n)
        if not len(fresh):
            return False
        self._taken += len(fresh)
        samples = self.source.samples(fresh)
        if keep == len(self._refs):
            self._refs, self._samples, self._next = fresh, samples, 0
        else:
            self._next -= keep
            self._refs = np.concatenate([self._refs[keep:], fresh])
            self._samples = self._samples[keep:] + samples
        return True

    def _take_samples(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Encode samples until there are `n` items, or no more refs, or one fans out."""
        encode, seed, plain, note = self._encode, self._seed_globals, self._plain, self.lane.note
        avoided = self._losses.avoided
        dataset, base = None, 0
        if note is not None:
            note[0] = self.depth
        first = self._next
        chosen = self._samples[first : first + n - len(items)]
        for self._next, sample in enumerate(chosen, first):
            if sample._dataset is not dataset:
                dataset = sample._dataset
                base = self._base(dataset.source)
            index, epoch = sample._index, sample._epoch
            if note is not None:
                note[1], note[2] = index, epoch
            if avoided and (index, epoch) in avoided:
                self._losses.avoided_again(sample, self._done, self._given + len(items))
                continue
            ref = (index, epoch, 0)
            rng = Rng(base, ref)
            if seed is not None:
                seed(rng.key)
            try:
                item = encode(sample, rng)
            except Exception as error:
                self._losses.tolerate(sample, error, self._done, self._given + len(items))
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
        """Whether there are parts to take of what is no item; if not, it is counted."""
        if item is None:
            self._losses.tolerate(sample, TypeError("it gave None; return an item or Skip(reason)"), self._done, given)
        elif self._encoder.one_to_one:
            raise self._losses.failed(sample, TypeError(f"it is one_to_one, but gave {item!r}"))
        elif type(item) is Skip:
            self._losses.skipped(item, given)
        else:
            self._parts, self._part, self._rng = item, 0, rng
            return True
        return False

    @property
    def _done(self) -> int:
        """How many samples of the lane are done, with the one at `_next`."""
        return self._taken - len(self._refs) + self._next + 1

    def _take_parts(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Take parts of the sample at `_next` until there are `n` items or it is done."""
        sample, losses = self._samples[self._next], self._losses
        self._note(sample)
        try:
            if self._parts is None:
                if (sample._index, sample._epoch) in losses.avoided:
                    losses.avoided_again(sample, self._done, self._given + len(items))
                    self._end_of_parts()
                    return
                self._parts = self._parts_from(sample, self._part)
            while len(items) < n:
                item = self._next_part(sample, self._parts, self._rng, self._part)
                if item is _DONE:
                    if not self._part:
                        losses.skipped(Skip("an iterator without items"), self._given + len(items))
                    self._end_of_parts()
                    return
                if type(item) is Skip:
                    losses.skipped(item, self._given + len(items))
                else:
                    items.append(item)
                    refs.append((sample._index, sample._epoch, self._part))
                self._part += 1
        except _EncoderError as failed:  # what it gave before is given; the rest is left out
            losses.tolerate(sample, failed.error, self._done, self._given + len(items))
            self._end_of_parts()

    def _end_of_parts(self) -> None:
        self._next, self._part, self._parts = self._next + 1, 0, None

    def _parts_from(self, sample: Sample, part: int) -> Iterator[Any]:
        """Encode `sample` again and pass over its first `part` parts."""
        self._rng = Rng(self._base(sample._dataset.source), (sample._index, sample._epoch, 0))
        if self._seed_globals is not None:
            self._seed_globals(self._rng.key)
        try:
            parts: Iterator[Any] = self._encode(sample, self._rng)
        except Exception as error:
            raise _EncoderError(error) from error
        for passed in range(part):
            self._next_part(sample, parts, self._rng, passed)
        return parts

    def _next_part(self, sample: Sample, parts: Iterator[Any], rng: Rng, part: int) -> Any:
        rng.rekey((sample._index, sample._epoch, part))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        try:
            return next(parts, _DONE)
        except Exception as error:
            raise _EncoderError(error) from error

    def _note(self, sample: Sample) -> None:
        """Tell whoever watches this process what it is at."""
        note = self.lane.note
        if note is not None:
            note[0], note[1], note[2] = self.depth, sample._index, sample._epoch

    def _base(self, source: int) -> int:
        if source not in self._bases:
            self._bases[source] = key(self.lane.seed, "encode", source)
        return self._bases[source]

    def avoid(self, ref: Ref | ItemRef, reason: str) -> None:
        """Skip the sample of `ref` from now on, in this lane and all that are restored from its state."""
        index, epoch = (ref.index, ref.epoch) if isinstance(ref, Ref) else (ref[0], ref[1])
        self._losses.avoid(index, epoch, reason)

    def fetch(self, ref: ItemRef | Ref) -> Any:
        """Make the item that a ref names again; a `Skip` if it no longer can be and the policy allows that."""
        sample = self.source.fetch(ref)
        avoided = self._losses.avoided.get((sample._index, sample._epoch))
        if avoided is not None:
            return Skip(avoided)
        self._note(sample)
        rng = self._rng
        try:
            return self._made_again(sample, ref.part if isinstance(ref, Ref) else ref[2])
        except _EncoderError as failed:
            self._losses.tolerate(sample, failed.error, self._done, self._given)
            return Skip(reason_of(failed.error))
        finally:
            self._rng = rng

    def _made_again(self, sample: Sample, part: int) -> Any:
        item: Any = self._parts_from(sample, 0)
        if hasattr(item, "__next__"):
            for number in range(part):
                self._next_part(sample, item, self._rng, number)
            item = self._next_part(sample, item, self._rng, part)
        if item is _DONE:
            raise EncodeError(
                f"{type(self._encoder).__name__}.encode made no part {part} of shard {sample.shard}, key "
                f"{sample.key!r} this time; it must depend on the sample and `rng` alone"
            )
        return item

    def count_of(self, lane: int, epoch: int) -> int | None:
        """As many as its source, if the encoder makes one item of each sample, or an error that is raised."""
        one_to_one = self._encoder.one_to_one and self.on_error == "raise"
        return self.source.count_of(lane, epoch) if one_to_one else None

    def save_state(self) -> State:
        """`refs`: those taken but not done, 12 bytes each; `part`: how many parts of the first have been given.

        `samples`: how many are done; `errors` and `avoided`: see `Losses`.
        """
        left: RefArray = self._refs[self._next :]
        return {
            "refs": left.tobytes(),
            "part": self._part,
            "samples": self._taken - len(left),
            **self._losses.save_state(),
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Hold the refs of `state` again; nothing is read or encoded."""
        saved = parse_state(self, state, _EncodeState)
        self.source.restore_state(saved.source)
        refs = self._refs_of(saved.refs)
        self._refs = self.known(refs)
        self._samples = self.source.samples(self._refs)
        self._next, self._part, self._parts = 0, saved.part, None
        if not np.array_equal(self._refs[:1], refs[:1]):
            self._part = 0
        self._taken = saved.samples + len(self._refs)
        self._losses.errors = saved.errors
        for reason, avoided in saved.avoided.items():
            for index, epoch in self._refs_of(avoided).tolist():
                self._losses.avoid(index, epoch, reason)

    def _refs_of(self, raw: bytes) -> RefArray:
        if len(raw) % REF.itemsize:
            raise CheckpointMismatchError(f"Encode: {len(raw)} bytes are no refs of {REF.itemsize} bytes each")
        return np.frombuffer(raw, REF)

    def settings(self) -> dict[str, Any]:
        """The encoder's class and its own settings."""
        return encoder_settings(self._encoder)


class _EncoderError(Exception):
    """Carries what an encoder raised to where it is known what the policy says."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_DONE = object()
