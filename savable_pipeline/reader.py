"""`TarShardReader`: the first stage, which says what the lane reads next."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Annotated, Any

import msgspec
import numpy as np

from savable_pipeline.encoder import TaskEncoder
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.keys import key
from savable_pipeline.lane import Lane
from savable_pipeline.on_error import OnError, check_on_error
from savable_pipeline.reader_order import ShuffledEpoch, dealt, dealt_count, span
from savable_pipeline.remote_dataset import open_dataset
from savable_pipeline.sample import REF, TAG_SHIFT, TAGS, Ref, RefArray, Sample
from savable_pipeline.selection import Subset, check_subset
from savable_pipeline.shard_paths import Shards
from savable_pipeline.stage import ItemRef, Stage, State, parse_state

_CHUNK = 2048  # refs worked out at a time
_DAMAGED = "rest of a damaged or missing shard"
_EPOCHS_KEPT = 4  # orders kept by the lanes of a process, which are seldom further apart


class _ReaderState(msgspec.Struct):
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    position: Annotated[int, msgspec.Meta(ge=0)]
    lane: dict[str, int]


class TarShardReader(Stage):
    """Gives the samples of a lane's share of some tar shards, unread.

    `shards` is a folder (searched below), a glob, a brace pattern such as `{000..099}.tar`, one tar, a URL, or a list.
    `epochs=None` never ends; a number is how many epochs one pass takes. `shuffle` permutes shards, and blocks of
    `block_size` samples within windows of `window` shards (None: all), anew each epoch, the same for all lanes;
    `block_size=1, window=None` is a full shuffle. Without it, blocks come in file order, dealt over the lanes.

    Shards may lie behind a URL (s3, gs, az, http, https): they are read through the folder `cache` (`SAVABLE_CACHE`,
    or the user's cache), shared by all processes of a node, which takes at most `cache_bytes` of its disk
    (`SAVABLE_CACHE_BYTES`, or 256 GiB but no more than 80 % of what is free).

    `split` names one in the dataset's `.nv-meta/split.yaml`. `subset` is a share of the samples (0.1), a range of
    shares (0.1, 0.3), or a count: the same ones in every run and epoch, drawn from each shard, and shares that do not
    overlap have none in common.

    `on_error` is for shards that are missing, damaged, changed since they were indexed, or cannot be read: "raise",
    "skip" what cannot be had of them, or a function of the `ShardError` that gives True to skip. Unless it is "raise",
    a shard that has changed stays in the index as it was, until `savable index` is run. What is skipped, here or by
    `Encode`, is counted, and written to the file `quarantine` as lines of JSON.

    Raises `ShardError` if there is nothing to read, or for a split that is not there, `RemoteError` if a server cannot
    be reached.
    """

    def __init__(
        self,
        shards: Shards,
        lane: Lane,
        *,
        split: str | None = None,
        subset: Subset | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        block_size: int = 8,
        window: int | None = 128,
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        for name, value in [("epochs", epochs), ("block_size", block_size), ("window", window)]:
            if value is not None and value < 1:
                raise ValueError(f"TarShardReader: {name} must be at least 1, not {value}")
        check_subset(subset)
        check_on_error("TarShardReader", on_error)
        shards = os.fspath(shards) if isinstance(shards, str | os.PathLike) else [os.fspath(spec) for spec in shards]
        names = shards if isinstance(shards, str) else tuple(shards)
        self.dataset = lane.shared(
            ("dataset", names, on_error, quarantine, cache, cache_bytes),
            lambda: open_dataset(shards, on_error=on_error, quarantine=quarantine, cache=cache, cache_size=cache_bytes),
        )
        chosen = (names, on_error, split, subset)
        self._selection = lane.shared(("selection", *chosen), lambda: self.dataset.select(split, subset))
        self._orders: OrderedDict[Any, ShuffledEpoch] = lane.shared(("orders", *chosen), OrderedDict)
        self.split = split
        self.subset = subset
        self.on_error = on_error
        self._lane = lane
        self.epochs = epochs
        self.shuffle = shuffle
        self.block_size = block_size
        self.window = window
        self._first_epoch = lane.epoch * (epochs or 0)
        self._epoch = self._first_epoch
        self._tag = 0
        self._ref: ItemRef = ()
        self._move_to(self._epoch, 0)

    def _move_to(self, epoch: int, position: int) -> None:
        """Stand at a position of the lane's share of an epoch."""
        lane, count = self._lane, self.population
        if self.shuffle:
            self._begin, end = span(count, lane.index, lane.count, epoch)
            self._length = end - self._begin
        else:
            self._length = self._share(lane.index, epoch)
        self._epoch = epoch
        self._position = position  # of the next ref to give
        self._ahead = np.empty(0, REF)  # refs worked out but not given
        self._used = 0
        self._announced = position  # up to here the dataset knows what comes

    def _share(self, lane: int, epoch: int) -> int:
        """How many samples of an epoch a lane gets."""
        count, lanes = self.population, self._lane.count
        if self.shuffle:
            begin, end = span(count, lane, lanes, epoch)
            return end - begin
        return dealt_count(count, lane, lanes, epoch, self.block_size)

    def __next__(self) -> Sample:
        refs = self.take_refs(1)
        if not len(refs):
            raise StopIteration
        self._ref = (int(refs["index"][0]), int(refs["epoch"][0]), 0)
        return self.dataset.samples(refs)[0]

    @property
    def ref(self) -> ItemRef:
        """The ref of the sample that `next` gave last."""
        return self._ref

    def take_refs(self, n: int) -> RefArray:
        """Up to `n` refs: REF (n,); fewer only at the end of a finite pass."""
        parts = []
        while n:
            piece = self._ahead[self._used : self._used + n]
            if not len(piece):
                if not self._work_out():
                    break
                continue
            parts.append(piece)
            n -= len(piece)
            self._used += len(piece)
            self._position += len(piece)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, REF)

    def _work_out(self) -> bool:
        """Work out the next refs; False at the end of the pass."""
        while self._position == self._length:
            if self.epochs is not None and self._epoch + 1 - self._first_epoch >= self.epochs:
                return False
            self._move_to(self._epoch + 1, 0)
        start, ahead = self._position, self.dataset.ahead
        stop = min(start + min(_CHUNK, ahead or _CHUNK), self._length)
        if not start and not self.lane.index:
            self._tell_faults()
        self._ahead = self._refs(start, stop)
        self._used = 0
        if not ahead:
            self.dataset.announce(self._ahead)
        elif (begin := max(self._announced, start)) < (end := min(stop + ahead, self._length)):
            self._announced = end
            self.dataset.announce(self._refs(begin, end))
        return True

    def _refs(self, start: int, stop: int) -> RefArray:
        """The refs at these positions of the lane's share of the epoch."""
        lane = self.lane
        if self.shuffle:
            index = self._order().locate(self._begin + start, self._begin + stop)
        else:
            index = dealt(start, stop, lane.index, lane.count, self._epoch, self.block_size)
        refs = np.empty(stop - start, REF)
        chosen = index if self._selection is None else self._selection.locate(index)
        refs["index"] = chosen | (self._tag << TAG_SHIFT)
        refs["epoch"] = self._epoch
        return refs

    def _tell_faults(self) -> None:
        """Count and write down, once an epoch and in one lane, the shards that could not be indexed to their end."""
        for shard, fault in self.dataset.faults:
            self.counts[f"skipped/{_DAMAGED}"] += 1
            if self.dataset.quarantine is not None:
                self.dataset.quarantine.add(shard=shard, reason=_DAMAGED, detail=fault)

    def _order(self) -> ShuffledEpoch:
        lane, chosen = self.lane, self._selection or self.dataset
        wanted = (lane.seed, self._tag, self._epoch, self.block_size, self.window)
        if wanted not in self._orders:
            self._orders[wanted] = ShuffledEpoch(
                chosen.firsts,
                seed=lane.seed,
                source=self._source,
                epoch=self._epoch,
                block_size=self.block_size,
                window=self.window,
            )
            while len(self._orders) > _EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[wanted]

    def samples(self, refs: RefArray) -> list[Sample]:
        """The samples that these refs name, unread."""
        return self.dataset.samples(refs)

    def announce(self, refs: RefArray) -> None:
        """Let a dataset that fetches ahead do so. A disk is not told: a buffer's refs lie all over it, a call each."""
        if self.dataset.ahead:
            self.dataset.announce(refs)

    def fetch(self, ref: ItemRef | Ref) -> Sample:
        """The sample that a ref names."""
        index, epoch = (ref.index | self._tag << TAG_SHIFT, ref.epoch) if isinstance(ref, Ref) else (ref[0], ref[1])
        return self.dataset.samples(np.array([(index, epoch)], REF))[0]

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The lane's share of the epochs of a pass; None if it never ends, or damaged shards may be left out."""
        if self.epochs is None or self.on_error != "raise":
            return None
        return sum(self._share(lane, number) for number in range(epoch * self.epochs, (epoch + 1) * self.epochs))

    def save_state(self) -> State:
        """The epoch, the position in the lane's share of it, and where the lane's named random sequences stand."""
        return {"epoch": self._epoch, "position": self._position, "lane": self.lane.save_state()}

    def restore_state(self, state: State) -> None:
        """Stand where `state` was taken; nothing is read."""
        saved: _ReaderState = parse_state(self, state, _ReaderState)
        self._move_to(saved.epoch, saved.position)
        if not 0 <= saved.position <= self._length:
            raise CheckpointMismatchError(
                f"TarShardReader: the state stands at sample {saved.position} of the lane's {self._length}; was it "
                "saved with other shards or another number of lanes?"
            )
        self.lane.restore_state(saved.lane)

    def settings(self) -> dict[str, Any]:
        """Every argument that changes the data, the shards: name, samples and hash of each, and what is selected."""
        return {
            "split": self.split,
            "subset": self.subset,
            "selection": None if self._selection is None else self._selection.manifest(),
            "epochs": self.epochs,
            "shuffle": self.shuffle,
            "block_size": self.block_size,
            "window": self.window if self.shuffle else None,
            "shards": self.dataset.manifest(),
        }

    @property
    def lane(self) -> Lane:
        """The lane that the reader was given."""
        return self._lane

    @property
    def tags(self) -> frozenset[int]:
        """The reader's own."""
        return frozenset([self._tag])

    @property
    def _source(self) -> int:
        """What refs to samples here have as their `source`."""
        return self.dataset.source ^ self._tag << TAG_SHIFT

    def reads(self, source: int) -> bool:
        """Whether a `Ref` with this `source` is one of a sample here."""
        return source == self._source

    def name_branch(self, name: str) -> None:
        """Take part in a `Blend` as the source `name`, which the refs, their order and random numbers are keyed by."""
        self.branch = name
        self._tag = 1 + key("branch", name) % (TAGS - 1)

    @property
    def depth(self) -> int:
        """0: nothing comes before a reader."""
        return 0

    @property
    def endless(self) -> bool:
        """Whether the reader begins the next epoch by itself, for ever."""
        return self.epochs is None

    @property
    def population(self) -> int:
        """How many samples the shards hold, in the split and the subset."""
        return self.dataset.count if self._selection is None else self._selection.count

    @property
    def encoder(self) -> TaskEncoder | None:
        """None: a reader encodes nothing."""
        return None
