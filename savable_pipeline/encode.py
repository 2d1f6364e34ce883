"""`Encode`: reads samples and turns them into items by the user's encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.encoder import Skip, TaskEncoder, encoder_settings
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.global_rng import seeder
from savable_pipeline.keys import key
from savable_pipeline.rng import Rng
from savable_pipeline.sample import REF, Ref, RefArray, Sample
from savable_pipeline.stage import ItemRef, Stage, State, dry_limit, parse_state

log = logging.getLogger(__name__)

_AHEAD = 16  # refs taken from the source at a time at least


class _EncodeState(msgspec.Struct):
    refs: bytes
    part: int
    source: dict[str, Any]


class Encode(Stage):
    """Gives the items that `encoder.encode(sample, rng)` makes of its source's samples.

    One item, none (`Skip`), or several (an iterator) come of a sample. What is left out is counted by reason.
    Raises `EncodeError` from the encoder's own error, with shard, key and offset; asked again, it tries the same
    sample again.
    """

    def __init__(self, source: Stage, encoder: TaskEncoder) -> None:
        super().__init__(source)
        if not isinstance(encoder, TaskEncoder):
            hint = ": make one of this class" if isinstance(encoder, type) else ""
            raise ValueError(f"Encode takes a TaskEncoder, not {encoder!r}{hint}")
        if source.encoder is not None:
            raise ValueError("Encode takes samples: there is an Encode stage upstream already")
        self._encoder = encoder
        self._seed_globals = seeder(encoder.global_rng)
        self._bases: dict[int, int] = {}  # by source: what the random numbers of its samples are keyed with
        self._plain: set[type] = set()  # types of items seen so far that are neither `Skip` nor iterators
        self._refs = np.empty(0, REF)  # taken from the source; those before `_next` are done
        self._samples: list[Sample] = []
        self._next = 0
        self._parts: Iterator[Any] | None = None  # what is left of the sample at `_next`, if it fans out
        self._part = 0  # how many of its parts have been given
        self._rng = Rng(0)
        self._row_of_skips = 0
        self._ref: ItemRef = ()
        self._counted: list[str] = []  # what was counted in the last call of `take`

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
        first, part, row = self._next, self._part, self._row_of_skips
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
            self._row_of_skips = row
            raise
        self.counts["items"] += len(items)
        return items, refs

    def _load(self, n: int, keep: int) -> bool:
        """Take refs from the source behind those from `keep` on; False at the end."""
        fresh = self.source.take_refs(n)
        if not len(fresh):
            return False
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
        encode, seed, plain = self._encoder.encode, self._seed_globals, self._plain
        dataset, base, note = None, 0, self.lane.note
        for sample in self._samples[self._next : self._next + n - len(items)]:
            if sample._dataset is not dataset:
                dataset = sample._dataset
                base = self._base(dataset.source)
            ref = (sample._index, sample._epoch, 0)
            if note is not None:
                note[0], note[1], note[2] = self.depth, sample._index, sample._epoch
            rng = Rng(base, ref)
            if seed is not None:
                seed(rng.key)
            try:
                item = encode(sample, rng)
            except SavableError:  # of the shard, not of the encoder
                raise
            except Exception as error:
                raise self._failed(sample, error) from error
            if type(item) in plain:
                items.append(item)
                refs.append(ref)
                self._row_of_skips = 0
            elif type(item) is Skip:
                self._skipped(item)
            elif hasattr(item, "__next__"):
                self._parts, self._part, self._rng = item, 0, rng
                return
            elif item is None:
                raise self._failed(sample, TypeError("it gave None; return an item or Skip(reason)"))
            else:
                plain.add(type(item))
                items.append(item)
                refs.append(ref)
                self._row_of_skips = 0
            self._next += 1

    def _take_parts(self, items: list[Any], refs: list[ItemRef], n: int) -> None:
        """Take parts of the sample at `_next` until there are `n` items or it is done."""
        sample = self._samples[self._next]
        if self._parts is None:
            self._parts = self._parts_from(sample, self._part)
        while len(items) < n:
            item = self._next_part(sample, self._parts, self._rng, self._part)
            if item is _DONE:
                if not self._part:
                    self._skipped(Skip("an iterator without items"))
                self._next, self._part, self._parts = self._next + 1, 0, None
                return
            if type(item) is Skip:
                self._skipped(item)
            else:
                items.append(item)
                refs.append((sample._index, sample._epoch, self._part))
                self._row_of_skips = 0
            self._part += 1

    def _parts_from(self, sample: Sample, part: int) -> Iterator[Any]:
        """Encode `sample` again and pass over its first `part` parts."""
        self._rng = Rng(self._base(sample._dataset.source), (sample._index, sample._epoch, 0))
        if self._seed_globals is not None:
            self._seed_globals(self._rng.key)
        try:
            parts: Iterator[Any] = self._encoder.encode(sample, self._rng)
        except SavableError:  # of the shard, not of the encoder
            raise
        except Exception as error:
            raise self._failed(sample, error) from error
        for passed in range(part):
            self._next_part(sample, parts, self._rng, passed)
        return parts

    def _next_part(self, sample: Sample, parts: Iterator[Any], rng: Rng, part: int) -> Any:
        rng.rekey((sample._index, sample._epoch, part))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        try:
            return next(parts, _DONE)
        except SavableError:  # of the shard, not of the encoder
            raise
        except Exception as error:
            raise self._failed(sample, error) from error

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

    def _failed(self, sample: Sample, error: Exception) -> EncodeError:
        return EncodeError(
            f"{type(self._encoder).__name__}.encode raised {type(error).__name__}: {error}; stage Encode, shard "
            f"{sample.shard}, key {sample.key!r}, byte offset {sample.offset}, ref {tuple(sample.ref)}"
        )

    def fetch(self, ref: ItemRef | Ref) -> Any:
        """Make the item that a ref names again."""
        sample = self.source.fetch(ref)
        part = ref.part if isinstance(ref, Ref) else ref[2]
        rng = self._rng
        try:
            item: Any = self._parts_from(sample, 0)
            if hasattr(item, "__next__"):
                for number in range(part):
                    self._next_part(sample, item, self._rng, number)
                item = self._next_part(sample, item, self._rng, part)
        finally:
            self._rng = rng
        if item is _DONE:
            raise EncodeError(
                f"{type(self._encoder).__name__}.encode made no part {part} of shard {sample.shard}, key "
                f"{sample.key!r} this time; it must depend on the sample and `rng` alone"
            )
        return item

    def save_state(self) -> State:
        """`refs`: those taken but not done, 12 bytes each; `part`: how many parts of the first have been given."""
        left: RefArray = self._refs[self._next :]
        return {"refs": left.tobytes(), "part": self._part, "source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Hold the refs of `state` again; nothing is read or encoded."""
        saved = parse_state(self, state, _EncodeState)
        self.source.restore_state(saved.source)
        refs = np.frombuffer(saved.refs, REF)
        self._refs = self.known(refs)
        self._samples = self.source.samples(self._refs)
        self._next, self._part, self._parts = 0, saved.part, None
        if not np.array_equal(self._refs[:1], refs[:1]):
            self._part = 0

    def settings(self) -> dict[str, Any]:
        """The encoder's class and its own settings."""
        return encoder_settings(self._encoder)


_DONE = object()
