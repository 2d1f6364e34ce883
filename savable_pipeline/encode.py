"""`Encode`: reads samples and turns them into items by the user's encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from savable_pipeline.encode_check import EncodedTwice
from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.errors import CheckpointMismatchError, EncodeError, SavableError, ShardError
from savable_pipeline.global_rng import seeder
from savable_pipeline.keys import key
from savable_pipeline.on_error import OnError, check_on_error, is_of_environment, reason_of, skips
from savable_pipeline.rng import Rng
from savable_pipeline.sample import REF, Ref, RefArray, Sample
from savable_pipeline.stage import ItemRef, Stage, State, dry_limit, parse_state

log = logging.getLogger(__name__)

_AHEAD = 16  # refs taken from the source at a time at least
_ALWAYS = 100  # so many errors of a lane are never too large a share


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
        check_on_error("Encode", on_error)
        if max_errors < 0 or (isinstance(max_errors, float) and not max_errors <= 1):
            raise ValueError(f"Encode: max_errors must be a count or a share of at most 1.0, not {max_errors!r}")
        self.on_error = on_error
        self.max_errors = max_errors
        if not 0 <= check <= 1:
            raise ValueError(f"Encode: check must be a share of the samples, 0.0 to 1.0, not {check!r}")
        self._encoder = encoder
        self._encode = EncodedTwice(encoder, check) if check else encoder.encode
        self._seed_globals = seeder(encoder.global_rng)
        self._bases: dict[int, int] = {}  # by source: what the random numbers of its samples are keyed with
        self._plain: set[type] = set()  # types of items seen so far that are neither `Skip` nor iterators
        self._refs = np.empty(0, REF)  # taken from the source; those before `_next` are done
        self._samples: list[Sample] = []
        self._next = 0
        self._taken = 0  # refs that were ever taken from the source
        self._parts: Iterator[Any] | None = None  # what is left of the sample at `_next`, if it fans out
        self._part = 0  # how many of its parts have been given
        self._rng = Rng(0)
        self._row_of_skips = 0
        self._ref: ItemRef = ()
        self._counted: list[str] = []  # what was counted in the last call of `take`
        self._errors = 0  # samples skipped because of one
        self._avoided: dict[tuple[int, int], str] = {}  # (index, epoch) of samples not to be tried again: why

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
        first, part, row, errors = self._next, self._part, self._row_of_skips, self._errors
        self._counted.clear()
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
            self.counts.subtract(self._counted)
            self._row_of_skips, self._errors = row, errors
            raise
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
        encode, seed, plain, avoided, note = (
            self._encode,
            self._seed_globals,
            self._plain,
            self._avoided,
            self.lane.note,
        )
        dataset, base = None, 0
        if note is not None:
            note[0] = self.depth
        for sample in self._samples[self._next : self._next + n - len(items)]:
            if sample._dataset is not dataset:
                dataset = sample._dataset
                base = self._base(dataset.source)
            index, epoch = sample._index, sample._epoch
            if note is not None:
                note[1], note[2] = index, epoch
            if avoided and (index, epoch) in avoided:
                self._avoided_again(sample)
                self._next += 1
                continue
            ref = (index, epoch, 0)
            rng = Rng(base, ref)
            if seed is not None:
                seed(rng.key)
            try:
                item = encode(sample, rng)
                if item is None:
                    raise TypeError("it gave None; return an item or Skip(reason)")
            except Exception as error:
                self._tolerate(sample, error)
                self._next += 1
                continue
            if type(item) in plain:
                items.append(item)
                refs.append(ref)
                self._row_of_skips = 0
            elif self._encoder.one_to_one and (type(item) is Skip or hasattr(item, "__next__")):
                raise self._failed(sample, TypeError(f"it is one_to_one, but gave {item!r}"))
            elif type(item) is Skip:
                self._skipped(item)
            elif hasattr(item, "__next__"):
                self._parts, self._part, self._rng = item, 0, rng
                return
            else:
                plain.add(type(item))
                items.append(item)
                refs.append(ref)
                self._row_of_skips = 0
            self._next += 1

    def _take_parts(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Take parts of the sample at `_next` until there are `n` items or it is done."""
        sample = self._samples[self._next]
        self._note(sample)
        try:
            if self._parts is None:
                if (sample._index, sample._epoch) in self._avoided:
                    self._avoided_again(sample)
                    self._end_of_parts()
                    return
                self._parts = self._parts_from(sample, self._part)
            while len(items) < n:
                item = self._next_part(sample, self._parts, self._rng, self._part)
                if item is _DONE:
                    if not self._part:
                        self._skipped(Skip("an iterator without items"))
                    self._end_of_parts()
                    return
                if type(item) is Skip:
                    self._skipped(item)
                else:
                    items.append(item)
                    refs.append((sample._index, sample._epoch, self._part))
                    self._row_of_skips = 0
                self._part += 1
        except _EncoderError as failed:  # what it gave before is given; the rest is left out
            self._tolerate(sample, failed.error)
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

    def _skipped(self, skip: Skip) -> None:
        """Count it; end the run when so many samples in a row give nothing that none ever will."""
        name = f"skipped/{skip.reason}"
        self.counts[name] += 1
        self._counted.append(name)
        self._row_of_skips += 1
        if self._row_of_skips & 1023 == 0 and self._row_of_skips.bit_count() == 1:
            log.warning("%d samples in a row were skipped, the last as %r", self._row_of_skips, skip.reason)
        if self._row_of_skips >= dry_limit(self.population):
            raise EncodeError(
                f"{type(self._encoder).__name__}.encode skipped {self._row_of_skips} samples in a row, the last as "
                f"{skip.reason!r}: no item will ever come of this data; mend the encoder's "
                "conditions or the data"
            )

    def avoid(self, ref: Ref | ItemRef, reason: str) -> None:
        """Skip the sample of `ref` from now on, in this lane and all that are restored from its state."""
        index, epoch = (ref.index, ref.epoch) if isinstance(ref, Ref) else (ref[0], ref[1])
        self._avoided[index, epoch] = reason

    def _avoided_again(self, sample: Sample) -> None:
        reason = self._avoided[sample._index, sample._epoch]
        self._lost(sample, reason, "avoided since it failed before")

    def _tolerate(self, sample: Sample, error: Exception) -> None:
        """Skip a sample because of an error, if the policy allows it; else raise."""
        fault: SavableError
        on_error: OnError
        if isinstance(error, ShardError):
            fault, on_error = error, sample._dataset.on_error  # of the shard, not of the encoder
        elif isinstance(error, SavableError):
            raise error
        else:
            fault, on_error = self._failed(sample, error), self.on_error
            fault.__cause__ = error
        if not skips(on_error, fault):
            raise fault
        if is_of_environment(error):
            self.avoid((sample._index, sample._epoch), reason_of(error))
            self._forget_before(sample._epoch - 1)
        self._lost(sample, reason_of(error), str(fault))

    def _forget_before(self, epoch: int) -> None:
        """Refs of epochs long gone do not come again."""
        for ref in [ref for ref in self._avoided if ref[1] < epoch]:
            del self._avoided[ref]

    def _lost(self, sample: Sample, reason: str, detail: str) -> None:
        """Count a sample that is skipped because of an error, write it down, and end the run if there are too many."""
        log.info("skipping index %d of epoch %d: %s", sample._index, sample._epoch, detail)
        quarantine = sample._dataset.quarantine
        if quarantine is not None:
            where = {"shard": sample.shard, "key": _key_of(sample), "offset": sample.offset, "ref": list(sample.ref)}
            quarantine.add(**where, reason=reason, detail=detail, lane=self.lane.index)
        self._errors += 1
        done = self._taken - len(self._refs) + self._next + 1
        most = max(self.max_errors * done, _ALWAYS) if isinstance(self.max_errors, float) else self.max_errors
        if self._errors > most:
            raise EncodeError(
                f"{self._errors} of the {done} samples of {self.lane} so far were skipped because of errors, more than "
                f"max_errors={self.max_errors!r} allows; the last: {detail}"
            )
        self._skipped(Skip(reason))

    def _failed(self, sample: Sample, error: Exception) -> EncodeError:
        return EncodeError(
            f"{type(self._encoder).__name__}.encode raised {type(error).__name__}: {error}; stage Encode, shard "
            f"{sample.shard}, key {_key_of(sample)!r}, byte offset {sample.offset}, ref {tuple(sample.ref)}"
        )

    def fetch(self, ref: ItemRef | Ref) -> Any:
        """Make the item that a ref names again; a `Skip` if it no longer can be and the policy allows that."""
        sample = self.source.fetch(ref)
        avoided = self._avoided.get((sample._index, sample._epoch))
        if avoided is not None:
            return Skip(avoided)
        self._note(sample)
        rng = self._rng
        try:
            return self._made_again(sample, ref.part if isinstance(ref, Ref) else ref[2])
        except _EncoderError as failed:
            self._tolerate(sample, failed.error)
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

        `samples`: how many are done; `errors`: how many of these were skipped because of one; `avoided`: by reason, the
        refs that are not to be tried again, since the fault was not the data's.
        """
        left: RefArray = self._refs[self._next :]
        avoided: dict[str, list[tuple[int, int]]] = {}
        for ref, reason in self._avoided.items():
            avoided.setdefault(reason, []).append(ref)
        return {
            "refs": left.tobytes(),
            "part": self._part,
            "samples": self._taken - len(left),
            "errors": self._errors,
            "avoided": {reason: np.array(refs, REF).tobytes() for reason, refs in avoided.items()},
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
        self._taken, self._errors = saved.samples + len(self._refs), saved.errors
        for reason, avoided in saved.avoided.items():
            self._avoided.update(dict.fromkeys(self._refs_of(avoided).tolist(), reason))

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


def _key_of(sample: Sample) -> str:
    try:
        return sample.key
    except ShardError:  # its header cannot be read either
        return "?"


_DONE = object()
