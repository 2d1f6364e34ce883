"""`RecordReader`: the first stage, which gives a lane its share of a store's samples, in order or shuffled."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.core.saved_count import EpochNumber, SavedCount
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.pinned_shards import pin
from savable_pipeline.data.dataset.sample import REF, TAG_SHIFT, TAGS, Ref, RefArray, Sample, skip_counters
from savable_pipeline.data.dataset.shard_digests import summary
from savable_pipeline.data.shards.selection import SUBSET_ORDER, Subset
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import CheckpointMismatchError, SavableError
from savable_pipeline.stages.excluded_samples import ExcludedSamples, read_exclude_file
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.readers.dealt_order import DealtOrder
from savable_pipeline.stages.readers.growth import EpochSamples, GrowingSamples
from savable_pipeline.stages.readers.pass_length import check_epochs, pass_length
from savable_pipeline.stages.readers.read_order import (
    EpochOrder,
    Positions,
    batches_span,
    lane_span,
    sequential_count,
    sequential_positions,
)
from savable_pipeline.stages.readers.reader_settings import ReaderSettings
from savable_pipeline.stages.readers.row_groups import BLOCK, RowGroups, row_groups
from savable_pipeline.stages.setting_rules import OTHER_ORDER, SettingRule
from savable_pipeline.stages.stage import Stage, State, parse_state
from savable_pipeline.stages.stage_bases import TakesRefs
from savable_pipeline.stages.stage_info import StageInfo

log = logging.getLogger(__name__)

_CHUNK = 2048  # refs computed at a time
_DAMAGED = "rest of a damaged or missing shard"
_UNUSED, _SHARES_UNUSED = 100_000, 10  # a lane may read this many samples, or this many epochs' shares, for one batch
_ORDER = 2  # the version of the order of finite passes and of file order, which a state must agree on
_EPOCHS = 1 << 32  # that a ref can name
_EPOCHS_KEPT = 4  # orders cached for the lanes of a process, which are seldom more epochs apart


class _ReaderState(msgspec.Struct):
    epoch: EpochNumber
    position: SavedCount
    lane: dict[str, SavedCount]
    cut: SavedCount = 0
    growth: list[tuple[EpochNumber, EpochNumber]] = []
    subset_order: Annotated[int, msgspec.Meta(ge=1, le=SUBSET_ORDER)] = 1


class RecordReader(TakesRefs):
    """Gives the samples of a lane's share of a record store; the parts of a sample are read when they are asked for.

    `store` is a `sp.RecordStore`: one of your own, or what a reader of a known format opens. Make it once a process:
    `lane.shared("its name", lambda: MyStore(...))`. The other settings are those of `sp.TarShardReader`, for every
    store. The order of the samples depends on the number of samples in each shard, not on the kind of the store: the
    same samples, cut alike into shards, come in the same order from each, with the same `block_size` and `window`.

    Raises ValueError for wrong settings, `ShardError` if there are no samples or no such split.

    >>> class Numbers(sp.RecordStore):
    ...     address = "numbers"
    ...     entries = [sp.ShardEntry("all", size=0, samples=1000, digest=1)]
    ...     def key(self, shard, row):
    ...         return str(row)
    ...     def extensions(self, shard, row):
    ...         return ["json"]
    ...     def read(self, shard, row, extension):
    ...         return str(row).encode()
    >>> def samples(lane):
    ...     return sp.RecordReader(lane.shared("numbers", Numbers), lane, subset=0.1, shuffle=False, epochs=1)
    >>> sum(1 for sample in samples(sp.Lane()))
    100
    """

    files: str | tuple[str, ...] = ""
    """What was named to be read; empty of a store that was given."""
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {
        "order": SettingRule(fixed=OTHER_ORDER, follows=("epochs", "shuffle")),
        "subset_order": SettingRule(fixed=OTHER_ORDER, follows=("subset",)),
        "shards": SettingRule(
            fixed="shards were added, removed or rewritten since", shards=lambda reader: reader.dataset.entries
        ),
        "exclude": SettingRule(field="exclude"),
    }

    def __init__(
        self,
        store: RecordStore,
        lane: Lane,
        *,
        split: str | None = None,
        subset: Subset | None = None,
        epochs: int | float | None = None,
        shuffle: bool = True,
        block_size: int | None = None,
        window: int | None = 128,
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        exclude: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = ReaderSettings(split, subset, epochs, shuffle, block_size, window, on_error, exclude)
        self._begin_reading(
            lane,
            settings,
            ("dataset", id(store), on_error, quarantine),
            lambda: Dataset(store, on_error=on_error, quarantine=quarantine),
            pinned_as=f"store {store.address} {_number_of(store, lane)}",
        )

    def _begin_reading(
        self,
        lane: Lane,
        settings: ReaderSettings,
        named: Any,
        open_dataset: Callable[[], Dataset],
        *,
        pinned_as: str | None = None,
    ) -> None:
        """Stands at the start of the lane's share of a dataset; lanes of a process that are `named` alike share it."""
        settings.check(type(self).__name__)
        self.dataset = lane.shared(named, lambda: pin(open_dataset(), pinned_as or repr(named), lane.pinned))
        self.exclude_file = read_exclude_file(settings.exclude, lane, named, self.dataset)
        self.split, self.subset, self.on_error = settings.split, settings.subset, settings.on_error
        self.shuffle, self.window = settings.shuffle, settings.window
        self._lane, self._named = lane, named
        self.epochs = check_epochs(type(self).__name__, settings.epochs)
        self._draw_by(lane.subset_order or SUBSET_ORDER)
        self._deals = settings.block_size is None and self.shuffle and self.dataset.store.row_groups(0) is not None
        self.block_size = BLOCK if settings.block_size is None and self.shuffle else settings.block_size
        self._first_epoch = lane.epoch * (self._pass.epochs if self._pass else 0)
        self._epoch = self._first_epoch
        self._tag = 0
        self._branch = ""
        self._rows, self._aligned = 1, False  # of a batch downstream
        self._begin_with(lane.growth.get("", ()))

    def _draw_by(self, order: int) -> None:
        """Read the samples of the split and the subset that this order's number draws."""
        self._subset_order = order
        self._chosen = (self._named, self.split, self.subset, order)
        self._selection = self._lane.shared(
            ("selection", *self._chosen, self.shuffle),
            lambda: self.dataset.select(self.split, self.subset, in_order=not self.shuffle, subset_order=order),
        )
        self._orders: OrderedDict[Any, EpochOrder | DealtOrder] = self._lane.shared(
            ("orders", *self._chosen), OrderedDict
        )
        self._pass = pass_length(type(self).__name__, self.epochs, self.population)
        vars(self).pop("info", None)

    def _begin_with(self, growth: Sequence[tuple[int, int]]) -> None:
        """Stand at the beginning, in a dataset to which shards were added so."""
        self.samples = GrowingSamples(self.dataset, self._selection, growth)
        if self._deals:
            self._groups_of(self.samples.of(self._first_epoch))  # which warns of groups too large
        self._cut = self._own_cut()
        self._move_to(self._first_epoch, 0)

    def hint_rows(self, rows: int, *, aligned: bool) -> None:
        """Cut the lanes' shares for batches of `rows` samples. Called before anything was given."""
        self._rows, self._aligned = rows, aligned
        self._cut = self._own_cut()
        self._move_to(self._epoch, 0)
        whole = self._least // rows
        if self.epochs is not None and not self._lane.pad and 0 < whole < self._lane.count:
            self._lane.shared(("few batches", id(self._orders)), lambda: self._warn_of_few(rows, whole))

    @property
    def _least(self) -> int:
        """The number of samples of a pass's first epoch."""
        return self._count(self._first_epoch, self._first_epoch)

    def _warn_of_few(self, rows: int, whole: int) -> bool:
        log.warning(
            "%s: %d samples are %d batches of %d, too few for %d lanes: batches will be smaller, or there will be "
            "none; begin with lanes=%d or fewer",
            self.dataset.address,
            self._least,
            whole,
            rows,
            self._lane.count,
            whole,
        )
        return True

    def _own_cut(self) -> int:
        """That by which other lanes have begun the pass, if some have; else the best."""
        begun = self._lane.cuts.get(self._branch)
        return self._best_cut(self._first_epoch) if begun is None else self._checked_cut(begun)

    def _checked_cut(self, saved: int) -> int:
        """A cut of a state. Raises `CheckpointMismatchError` for none in file order."""
        if not self.shuffle and not saved:
            raise CheckpointMismatchError(f"{type(self).__name__}: the state has no unit in which shares are cut")
        return saved

    def cut_of(self, epoch: int) -> int:
        """The unit in which the lanes' shares of pass `epoch` are cut, by which this lane stands or would begin it."""
        first = epoch * (self._pass.epochs if self._pass else 0)
        return self._cut if first == self._first_epoch else self._best_cut(first)

    def is_cut_by_tail(self, epoch: int) -> bool:
        """Whether a run with another `tail` would cut the lanes' shares of pass `epoch` in another unit."""
        first = epoch * (self._pass.epochs if self._pass else 0)
        return self.shuffle and self.epochs is not None and not self._has_batches(first)

    def _best_cut(self, first_epoch: int) -> int:
        """The unit in which samples are dealt over the lanes, which is saved: blocks in file order, else batches.

        0: spans that differ by a sample at most, for a run without end, and where a lane's share is not one batch.
        `first_epoch` is that of the pass.
        """
        if not self.shuffle:
            return self.block_size or (self._rows if self._aligned else 8)
        return self._rows if self.epochs is not None and (self._lane.pad or self._has_batches(first_epoch)) else 0

    def _has_batches(self, first_epoch: int) -> bool:
        """Whether a pass has a batch for each lane."""
        return self._count(first_epoch, first_epoch) >= self._rows * self._lane.count

    def _count(self, epoch: int, first_epoch: int) -> int:
        """The number of samples of an epoch in the pass that begins with `first_epoch`."""
        count = self.samples.of(epoch).count
        length = pass_length(type(self).__name__, self.epochs, count)
        return length.samples(epoch - first_epoch, count) if length else count

    def _move_to(self, epoch: int, position: int) -> None:
        """Go to a position in the lane's share of an epoch. Raises `CheckpointMismatchError` for no epoch of a ref."""
        if epoch >= _EPOCHS:
            raise CheckpointMismatchError(f"{type(self).__name__}: epoch {epoch}, but a run has at most {_EPOCHS}")
        self._begin, end = self._share(self._lane.index, epoch, self._first_epoch, self._cut)
        self._length = end - self._begin
        self._epoch = epoch
        self._position = position  # of the next ref to give
        self._ahead = np.empty(0, REF)  # refs computed at once; the first `_used` of them are given
        self._used = 0
        self._announced = position  # the dataset was told to prefetch up to here

    def _share(self, lane: int, epoch: int, first_epoch: int, cut: int) -> tuple[int, int]:
        """First and last position (exclusive) of a lane's share of an epoch; `first_epoch` is that of the pass."""
        count, lanes = self._count(epoch, first_epoch), self._lane.count
        if not cut:
            return lane_span(count, lane, lanes, epoch)
        place = self._place(lane, epoch, first_epoch, cut)
        if self.shuffle:
            return batches_span(count, cut, place, lanes)
        return 0, sequential_count(count, place, lanes, cut)

    def _place(self, lane: int, epoch: int, first_epoch: int, cut: int) -> int:
        """The lane's place in dealing an epoch: each goes on where the last one of the pass ended.

        The sources of a `Blend` begin at different lanes, so that their remainders do not fall to the same ones.
        """
        dealt = self.samples.blocks(first_epoch, epoch, cut)
        return (lane - dealt - self._tag) % self._lane.count

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
            self._count_unused(len(piece))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, REF)

    def _count_unused(self, n: int) -> None:
        """Count samples given since the lane's last batch. Raises `SavableError` after far too many in an endless run.

        Without this, a filter that leaves out every sample would read for ever.
        """
        lane = self._lane
        if lane.unused is None or self.epochs is not None:
            return
        lane.unused += n
        if lane.unused > max(_SHARES_UNUSED * self._length, _UNUSED):
            raise SavableError(
                f"{type(self).__name__}: {lane} read {lane.unused:,} samples since its last batch, of a share of "
                f"{self._length:,}, and no batch came of them: a stage between the reader and the Batcher leaves "
                "(nearly) everything out; mend its condition, or filter when the shards are made"
            )

    def _work_out(self) -> bool:
        """Compute the next refs and prefetch their samples; False at the end of the pass."""
        while self._position == self._length:
            if self.epochs is not None and self._epoch + 1 - self._first_epoch >= self.epochs:
                return False
            self._move_to(self._epoch + 1, 0)
        start, ahead = self._position, self.dataset.prefetch_refs
        stop = min(start + min(_CHUNK, ahead or _CHUNK), self._length)
        if not start and not self.lane.index:
            self._tell_faults()
        self._ahead = self._refs(start, stop)
        self._used = 0
        if not self._lane.downloads:
            return True
        if not ahead:
            self.dataset.prefetch(self._ahead)
        elif (begin := max(self._announced, start)) < (end := min(stop + ahead, self._length)):
            self._announced = end
            self.dataset.prefetch(self._refs(begin, end))
        return True

    def _refs(self, start: int, stop: int) -> RefArray:
        """The refs at positions `start` to `stop - 1` of the lane's share of the epoch: REF (stop - start,)."""
        lane = self.lane
        if self.shuffle:
            index = self._order().locate(self._begin + start, self._begin + stop)
        else:
            place = self._place(lane.index, self._epoch, self._first_epoch, self._cut)
            index = sequential_positions(start, stop, place, lane.count, self._cut)
        refs = np.empty(stop - start, REF)
        refs["index"] = self.samples.of(self._epoch).numbers(index) | (self._tag << TAG_SHIFT)
        refs["epoch"] = self._epoch
        return refs

    def _tell_faults(self) -> None:
        """Count the shards that could not be indexed to their end, and add them to the quarantine file.

        Called in lane 0 at the start of each epoch, so that each shard is reported once an epoch.
        """
        for shard, fault in self.dataset.faults:
            self.counts.update(skip_counters(_DAMAGED, self._tag << TAG_SHIFT))
            if self.dataset.quarantine is not None:
                self.dataset.quarantine.add(shard=shard, reason=_DAMAGED, detail=fault)

    def _order(self) -> EpochOrder | DealtOrder:
        lane, chosen = self.lane, self.samples.of(self._epoch)
        groups = self._groups_of(chosen) if self._deals else None
        window = self.window if groups is None else groups.window
        wanted = (lane.seed, self._tag, self._epoch, chosen.shards, self.block_size, window, self._cut)
        if wanted not in self._orders:
            order = EpochOrder(
                chosen.firsts if groups is None else groups.firsts,
                seed=lane.seed,
                source=self._source,
                epoch=self._epoch,
                block_size=self.block_size or 1,
                window=window,
            )
            self._orders[wanted] = DealtOrder(order, self._begins(), self.block_size or 1) if self._deals else order
            while len(self._orders) > _EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[wanted]

    def _groups_of(self, chosen: EpochSamples) -> RowGroups:
        """The row groups of the samples of an epoch, for a store that decodes them."""
        named = ("groups", *self._chosen, chosen.shards)
        groups: RowGroups = self._lane.shared(named, lambda: row_groups(self.dataset, chosen))
        return groups

    def _begins(self) -> Positions:
        """The first positions of the lanes' spans of this epoch, ascending, then the number of samples."""
        lanes = self._lane.count
        shares = sorted(self._share(lane, self._epoch, self._first_epoch, self._cut) for lane in range(lanes))
        return np.array([*(begin for begin, _ in shares), shares[-1][1]], dtype=np.int64)

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """The samples with these refs; their parts are read when asked for."""
        return self.dataset.open_samples(refs)

    def prefetch(self, refs: RefArray) -> None:
        """Begin to download the samples with these refs; nothing for local files.

        Refs of a restored buffer are scattered: readahead on a disk would cost one system call per ref.
        """
        if self._lane.downloads if self.dataset.prefetch_refs else self._deals:
            self.dataset.prefetch(refs)

    def fetch(self, ref: ItemRef | Ref) -> Sample:
        """The sample with this ref. Raises `CheckpointMismatchError` if there is none."""
        try:
            index, epoch = (ref.index | self._tag << TAG_SHIFT, ref.epoch) if isinstance(ref, Ref) else (ref[0], ref[1])
            refs = np.array([(index, epoch)], REF)
        except (OverflowError, TypeError, IndexError) as error:
            raise CheckpointMismatchError(f"{type(self).__name__}: no sample has the ref {tuple(ref)}") from error
        return self.dataset.open_samples(refs)[0]

    def verify(self, slot: int) -> None:
        """See `ReadsFiles`: the shards are looked at, at most once a second."""
        self.dataset.verify(slot)
        if self.exclude_file is not None:
            self.exclude_file.verify()

    def stores_read(self) -> Iterable[RecordStore]:
        """See `ReadsFiles`."""
        return (self.dataset.store,)

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The number of samples of a lane in a pass; None if it never ends, or damaged shards may be left out."""
        if self._pass is None or self.on_error != "raise":
            return None
        first, cut = epoch * self._pass.epochs, self.cut_of(epoch)
        shares = [self._share(lane, number, first, cut) for number in range(first, first + self._pass.epochs)]
        return sum(end - begin for begin, end in shares)

    def save_state(self) -> State:
        """`epoch`; `position` in the lane's share of it; `lane`: the positions of the lane's named random sequences.

        `cut`, if there is one: the unit in which shares are cut. With other batches, a pass goes on in its own shares.
        `growth`, if shards were added: see growth.py. `subset_order`, of a subset: how it is drawn.
        """
        state = {"epoch": self._epoch, "position": self._position, "lane": self.lane.save_state()}
        more = {"cut": self._cut, "growth": self.samples.pairs, **self._newest()}
        return {**state, **{name: value for name, value in more.items() if value}}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`; no sample is read. Raises `CheckpointMismatchError` if it lies outside."""
        saved: _ReaderState = parse_state(self, state, _ReaderState)
        drawn_otherwise = self.subset is not None and saved.subset_order != self._subset_order
        if drawn_otherwise:
            self._draw_by(saved.subset_order)
        if drawn_otherwise or (saved.growth and not self.samples.pairs):  # by hand, in a lane that no loader made
            self._begin_with(saved.growth or self.samples.pairs)
        self._cut = self._checked_cut(saved.cut)
        self._move_to(saved.epoch, saved.position)
        if not 0 <= saved.position <= self._length:
            raise CheckpointMismatchError(
                f"{type(self).__name__}: the state's position is sample {saved.position} of the lane's {self._length}; "
                "was it saved with other shards or another number of lanes?"
            )
        self.lane.restore_state(saved.lane)

    def settings(self) -> dict[str, Any]:
        """Every argument that changes the data; name, number of samples and index hash of each shard, or hashes of
        many (see shard_digests.py); the selection.

        `exclude` is a hash of the numbers of the excluded samples, absent if there are none.
        """
        return {
            "split": self.split,
            "subset": self.subset,
            "selection": None if self._selection is None else self._selection.manifest(),
            "epochs": self.epochs,
            "shuffle": self.shuffle,
            "block_size": self.block_size,
            "window": self.window if self.shuffle and not self._deals else None,
            **({"decoded_bytes": self.dataset.store.decoded_bytes} if self._deals else {}),
            "shards": summary(self.dataset.entries),
            **self._newest(),
            **({"order": _ORDER} if self.epochs is not None or not self.shuffle else {}),
            **(
                {"exclude": self.exclude_file.digest}
                if self.exclude_file is not None and self.exclude_file.numbers
                else {}
            ),
        }

    def _newest(self) -> dict[str, int]:
        """The number of the order by which a subset is drawn; nothing for the first, which had none."""
        return {"subset_order": self._subset_order} if self.subset is not None and self._subset_order > 1 else {}

    def addresses(self) -> dict[str, str]:
        """The folder or the URL of the shards."""
        return {"shards": self.dataset.address}

    @property
    def sources(self) -> tuple[Stage, ...]:
        """None: nothing comes before a reader."""
        return ()

    def describe(self) -> StageInfo:
        """The facts that all stages after this reader inherit."""
        excluded = frozenset() if self.exclude_file is None else self.exclude_file.numbers
        return StageInfo(
            self._lane,
            depth=0,
            population=self.population,
            endless=self.epochs is None,
            tags=frozenset([self._tag]),
            origins=frozenset([self._source]),
            branch=self._branch,
            excluded=ExcludedSamples.of_reader(self._tag, excluded),
            gives_excluded=bool(excluded),
        )

    def name_branch(self, name: str) -> None:
        """Become the source `name` of a `Blend`: the name is part of the keys of order and of random numbers."""
        vars(self).pop("info", None)
        self._branch = name
        self._tag = 1 + derive_key("branch", name) % (TAGS - 1)
        self.dataset.names[self._tag] = name
        self._begin_with(self._lane.growth.get(name, ()))

    @property
    def begun(self) -> int:
        """The last epoch that the lane has begun to read; the one before the first if it has begun none."""
        return self._epoch if self._position or not self._length else self._epoch - 1

    @property
    def _source(self) -> int:
        """The `Ref.source` of this reader's samples."""
        return self.dataset.source ^ self._tag << TAG_SHIFT

    @property
    def population(self) -> int:
        """The number of samples in the shards, or in the split and subset of them."""
        return self.dataset.count if self._selection is None else self._selection.count


def _number_of(store: RecordStore, lane: Lane) -> int:
    """The same in each process for each of the stores with one address: in the order in which readers were made."""
    known: list[RecordStore] = lane.shared(("stores", store.address), list)
    if not any(each is store for each in known):
        known.append(store)
    return next(number for number, each in enumerate(known) if each is store)
