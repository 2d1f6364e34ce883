"""`RecordReader`: first stage, which yields a lane's samples of a store.

Samples come in file order or shuffled. This file also has the settings that all readers have in common, and opens the
datasets that all lanes of a process share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeAlias, TypedDict

import msgspec
import numpy as np

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError, check_on_error
from savable_pipeline.core.state_numbers import EpochNumber, SavedCount
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT, TAGS, Ref, RefArray, skip_counters
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.shard_digests import pin, summary
from savable_pipeline.data.shards.selection import Selection, Subset, check_subset
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.opening import Cache, Source, at_commit, find_source
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.advice import check_count
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.readers.lane_shares import GrowingSamples, LaneShares, check_epochs
from savable_pipeline.stages.readers.read_order import BLOCK_SIZE, EpochOrders
from savable_pipeline.stages.stage import SampleStage, Stage, State, parse_state
from savable_pipeline.stages.stage_info import ExcludedSamples, StageInfo, excluded_indices, read_exclude_file
from savable_pipeline.stages.stage_settings import MEDIA_RULES, SettingRule

Names: TypeAlias = str | tuple[str, ...]


class ReaderSettings(TypedDict, total=False):
    """Settings that all readers have in common.

    `TarShardReader` explains them. `RecordReader` has the defaults.
    """

    split: str | None
    """A split in the dataset's `.nv-meta/split.yaml`. Default: None, all samples."""
    subset: Subset | None
    """A fraction of the samples (0.1), a range of fractions (0.1, 0.3), or a count. Default: None, all samples."""
    epochs: int | float | None
    """How many epochs a pass has; the last may be a fraction, as in 2.5. Default: None, an endless run."""
    shuffle: bool
    """Whether shards and blocks are permuted, differently in each epoch. Default: True."""
    block_size: int | None
    """Samples that stay together. Default: None, which is 8, or in file order a batch if each sample is a row."""
    window: int | None
    """Shards whose blocks are mixed; None: all. Default: 128."""
    on_error: OnError
    """For unreadable shards: "raise", "skip", or a function that returns True to skip. Default: "raise"."""
    quarantine: str | os.PathLike[str] | None
    """A file that gets a line of JSON for each skipped sample. Default: None."""
    exclude: str | os.PathLike[str] | None
    """A file that names samples to leave out. Default: None."""
    unpacked_bytes: int
    """The most bytes that a compressed part, shard, chunk or record may become. Default: 1 GiB."""


@dataclass(frozen=True, slots=True)
class ReaderData:
    """Data that a reader reads, and how to open it.

    `open(on_error=…, quarantine=…, unpacked_bytes=…)` opens the dataset that `named` identifies. It is called once per
    process for all readers with equal arguments and equal `kind`, `named` and `options` of the format. The run stores
    the list of shards under the name `pinned_as`, by default made of these three fields, `on_error` and `quarantine`.
    """

    kind: str
    named: Any
    open: Callable[..., Dataset]
    options: tuple[Any, ...] = ()
    pinned_as: str = ""

    def opened(self, lane: Lane, **settings: Any) -> tuple[Dataset, tuple[Any, ...]]:
        """Open the dataset, once for all readers of a process with equal arguments.

        Returns the dataset, and its key among the objects that lanes share. `settings` are the arguments of `open`.
        """
        key = (self.kind, self.named, *settings.values(), *self.options)
        # the name must be the same in all processes, but the repr of a function in `on_error` is not
        constant = settings["on_error"] == "raise", settings["quarantine"]
        pinned_as = self.pinned_as or repr((self.kind, self.named, *constant, *self.options))
        return lane.shared(key, lambda: pin(self.open(**settings), pinned_as, lane.worker.pinned)), key

    @classmethod
    def of_files(
        cls, kind: str, files: Names, lane: Lane, options: Any = (), cache: Cache = (None, None), **settings: Any
    ) -> ReaderData:
        """Return the data of files of a format. `settings` are those of its store.

        `cache` is (folder, most bytes). Files of the Hub are read at the commit that the run has stored.
        """

        def open_files(**reader_settings: Any) -> Dataset:
            """Open the dataset, at the commit that the run has stored by then."""
            source = source_at(files, kind, lane, cache)
            if source.session is not None:  # the run may have stored another commit since `source` was found
                source = replace(source, files=at_commit(files, lane.worker.pinned, source.session))
            return open_any(source, **reader_settings, **settings)

        return cls(kind, files, open_files, options)


def source_at(files: Names, kind: str, lane: Lane, cache: Cache = (None, None), settings: Iterable[str] = ()) -> Source:
    """Return the files with their recognized format, which is found once per process.

    If `kind` is not empty, the format must be this one. `settings` are the names of the user's settings.
    """
    key = "source", files, kind, cache
    return lane.shared(
        key, lambda: find_source(files, format=kind, settings=(*settings,), pinned=lane.worker.pinned, cache=cache)
    )


def _number_of_store(store: RecordStore, lane: Lane) -> int:
    """Return how many other stores with this address the lane has opened before.

    The number is the same in all processes, because they build readers in one order.
    """
    stores: list[RecordStore] = lane.shared(("stores", store.address), list)
    if not any(each is store for each in stores):
        stores.append(store)
    return next(number for number, each in enumerate(stores) if each is store)


_STEP_NAMES = ("shuffle", "filter", "map", "encode", "batch", "take")  # methods of a pipeline value
_REFS_AT_ONCE = 2048  # most refs to compute at a time
_DAMAGED = "rest of a damaged or missing shard"  # reason in names of counters and in the quarantine file
_EPOCH_LIMIT = 1 << 32  # number of epochs that a ref can express


def check_samples(
    reader: str, subset: Subset | None, block_size: int | None, window: int | None, on_error: OnError
) -> None:
    """Raise ValueError or TypeError for a wrong setting of a reader."""
    for setting, value in (("block_size", block_size), ("window", window)):
        if value is not None:
            check_count(reader, setting, value)
    check_subset(reader, subset)
    check_on_error(reader, on_error)


class _ReaderState(msgspec.Struct):
    epoch: EpochNumber
    position: SavedCount
    lane: dict[str, SavedCount]
    cut: SavedCount = 0


class _LaneReader(ChunkedStage, SampleStage):
    """Base of readers. Its errors help if a reader is built without a lane or used like a pipeline value."""

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Raise TypeError if the second argument is not a lane."""
        lane = settings["lane"] if "lane" in settings else arguments[1] if len(arguments) > 1 else None
        if not isinstance(lane, Lane):
            data = repr(arguments[0]) if arguments else "…"
            raise TypeError(f"{cls.__name__} needs a lane after {data}, not {lane!r}. Use sp.read({data}) without one.")
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            fix = f": sp.read(…).{name}(…) makes a chain, a class puts a stage around it" if name in _STEP_NAMES else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{fix}")


class RecordReader(_LaneReader):
    """Samples of a record store for one lane.

    Parts of a sample are read on access.

    The order depends on the number of samples in each shard, not on the kind of store. Two stores with the same samples
    in the same shards yield them in the same order, if `block_size` and `window` are equal.

    Args:
        store: A `custom.RecordStore`, built once per process: `lane.shared("its name", lambda: MyStore(...))`.
        lane: The lane of the pipeline.
        split: A split in the dataset's `.nv-meta/split.yaml`. None: all samples.
        subset: A fraction of the samples (0.1), a range of fractions (0.1, 0.3), or a count. None: all samples.
        epochs: Epochs of one pass; the last may be a fraction, as in 2.5. None: endless.
        shuffle: Permute shards and blocks, differently in each epoch. False: deal blocks in file order.
        block_size: Samples that stay together. None: 8, or in file order a batch if each sample is one row.
        window: The number of shards whose blocks are mixed; None: all.
        on_error: For unreadable shards: "raise", "skip", or a function of the `ShardError` that returns True to skip.
        quarantine: A file that gets a line of JSON for each skipped sample. None: they are only counted.
        exclude: A file that names samples to leave out, as for `sp.TarShardReader`. None: none.
        unpacked_bytes: The most bytes that a compressed part may become, as for `sp.TarShardReader`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: There are no samples, or no such split.

    Example:
        >>> class Numbers(custom.RecordStore):
        ...     address = "numbers"
        ...     entries = [custom.ShardEntry("all", size=0, samples=1000, digest=1)]
        ...     def key(self, shard, row):
        ...         return str(row)
        ...     def extensions(self, shard, row):
        ...         return ["json"]
        ...     def read(self, shard, row, extension):
        ...         return str(row).encode()
        >>> def samples(lane):
        ...     return custom.RecordReader(lane.shared("numbers", Numbers), lane, subset=0.1, shuffle=False, epochs=1)
        >>> sum(1 for sample in samples(sp.Lane()))
        100
    """

    files: str | tuple[str, ...] = ""
    """The files that the user named; empty for a reader of a store."""
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {
        "shards": SettingRule(
            fixed="shards were added, removed or rewritten since", shards=lambda reader: reader.dataset.entries
        ),
        "exclude": SettingRule(field="exclude"),
        **MEDIA_RULES,
    }

    def __init__(
        self,
        store: RecordStore | ReaderData,
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
        unpacked_bytes: int = UNPACKED_BYTES,
    ) -> None:
        name = type(self).__name__
        check_samples(name, subset, block_size, window, on_error)
        if not isinstance(store, ReaderData):
            pinned_as = f"store {store.address} {_number_of_store(store, lane)}"
            store = ReaderData("dataset", id(store), partial(Dataset, store), pinned_as=pinned_as)
        common: dict[str, Any] = {"on_error": on_error, "quarantine": quarantine, "unpacked_bytes": unpacked_bytes}
        self.dataset, shared_key = store.opened(lane, **common)
        self.datasets = (self.dataset,)
        self.exclude_file = read_exclude_file(exclude, lane, shared_key, self.dataset)
        self.split, self.subset, self.on_error = split, subset, on_error
        self.tag, self.branch, self._lane = 0, "", lane
        self.chosen = (shared_key, split, subset)
        """The key of these samples among the objects that lanes share."""
        self.selection: Selection | None = lane.shared(
            ("selection", *self.chosen, shuffle), lambda: self.dataset.select(split, subset, in_order=not shuffle)
        )
        self.epochs, self.shuffles, self.window = check_epochs(name, epochs), shuffle, window
        self.has_default_blocks = shuffle and block_size is None
        self._deals_groups = self.has_default_blocks and self.dataset.store.row_groups(0) is not None
        self.block_size = BLOCK_SIZE if self.has_default_blocks else block_size
        self._endless_lane = lane if self.epochs is None else None  # counts samples without a batch
        self._batch_rows, self._aligned = 1, False  # the arguments of `set_batch_size`, once it is called
        self._start_with(lane.facts.growth.get("", ()))

    def _start_with(self, growth: Sequence[tuple[int, int]]) -> None:
        """Go to the start of the run's pass. `growth` has pairs for `GrowingSamples` if shards were added."""
        self.samples = GrowingSamples(self.dataset, self.selection, growth)
        self._orders = self.lane.shared(
            ("orders", *self.chosen, self.window, self._deals_groups),
            lambda: EpochOrders(self.dataset, self.window, deals=self._deals_groups),
        )
        self._start_pass()
        if self._deals_groups:
            self._orders.groups_of(self.samples.of(self._epoch))  # logs a warning if groups are too large

    def _start_pass(self) -> None:
        """Go to the start of the pass.

        If other lanes have already started the pass, use the unit of their shares, and otherwise the best one.
        """
        settings = (self.epochs, self.shuffles, self.block_size, self.tag, self._batch_rows, self._aligned)
        shares = LaneShares(type(self).__name__, self.lane, self.samples, *settings).at_pass(self.lane.epoch)
        cut = self.lane.facts.chunk_sizes.get(self.branch)
        self._shares = shares if cut is None else shares.cut_by(cut)
        self._move_to(shares.first_epoch, 0)

    def set_batch_size(self, rows: int, *, aligned: bool) -> None:
        """Divide the samples among the lanes in whole batches of `rows` samples.

        This is called before the first sample.

        Args:
            rows: The number of samples in a batch.
            aligned: Whether each sample becomes one row of a batch.
        """
        self._batch_rows, self._aligned = rows, aligned
        self._start_pass()
        self._shares.warn_of_few(self.dataset.address, self.chosen)

    def shares_of(self, number: int) -> LaneShares:
        """Return the shares of all lanes in a pass, as this lane reads or would read them.

        Args:
            number: The number of the pass.
        """
        return self._shares.of_pass(number)

    def _move_to(self, epoch: int, position: int) -> None:
        """Go to a position in the lane's share of an epoch.

        Raises `CheckpointMismatchError` if a ref cannot express the epoch.
        """
        if epoch >= _EPOCH_LIMIT:
            raise CheckpointMismatchError(
                f"{type(self).__name__}: epoch {epoch} is above {_EPOCH_LIMIT}. Use another copy of the checkpoint."
            )
        self._span_start, span_stop = self._shares.span(self.lane.index, epoch)
        self._span_length = span_stop - self._span_start
        self._epoch = epoch
        self._position = position  # position of the next ref in the lane's share of the epoch
        self._ahead = np.empty(0, REF)  # computed refs, of which the first `_used` are already yielded
        self._used = 0
        self._prefetched_to = position  # position up to which samples were prefetched
        self._omitted_prefetch = False  # whether computed refs were not prefetched, because the lane only skipped them

    def take(self, n: int) -> RefArray:
        """Return the next `n` refs: REF (n,).

        There are fewer only at the end of a finite pass.
        """
        parts = []
        if self._omitted_prefetch and not self.lane.skips:
            self._prefetch_ahead()
        while n:
            part = self._ahead[self._used : self._used + n]
            if not len(part):
                if not self._compute_refs():
                    break
                continue
            parts.append(part)
            n -= len(part)
            self._used += len(part)
            self._position += len(part)
            if self._endless_lane is not None and self._endless_lane.unused is not None:
                self._endless_lane.unused += len(part)
                self._shares.check_used(self._span_length)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, REF)

    def _compute_refs(self) -> bool:
        """Compute the next refs, and prefetch their samples. Returns False at the end of the pass."""
        while self._position == self._span_length:
            if self.epochs is not None and self._epoch + 1 - self._shares.first_epoch >= self.epochs:
                return False
            self._move_to(self._epoch + 1, 0)
        start = self._position
        stop = min(start + min(_REFS_AT_ONCE, self.dataset.prefetch_refs or _REFS_AT_ONCE), self._span_length)
        if not start and not self.lane.index:
            self.count_faults()  # once per epoch, by the first lane
        self._ahead = self._refs_between(start, stop)
        self._used = 0
        self._prefetch_ahead()
        return True

    def _prefetch_ahead(self) -> None:
        """Start to download the samples of the computed refs, and later ones of a remote dataset.

        Nothing is downloaded if the lane only skips these samples.
        """
        self._omitted_prefetch = self.lane.skips
        if self._omitted_prefetch or not self.lane.worker.downloads:
            return
        refs, later = self._ahead[self._used :], self.dataset.prefetch_refs
        if not later:
            self.dataset.prefetch(refs)
            return
        start = max(self._prefetched_to, self._position)
        stop = min(self._position + len(refs) + later, self._span_length)
        if start < stop:
            self._prefetched_to = stop
            self.dataset.prefetch(self._refs_between(start, stop))

    def _refs_between(self, start: int, stop: int) -> RefArray:
        """Compute the refs at positions `start` to `stop - 1` of the lane's share of the epoch: REF (stop - start,)."""
        if self.shuffles:
            order = self._orders.of(self._shares, self._epoch, self.origin)
            positions = order.locate(self._span_start + start, self._span_start + stop)
        else:
            positions = self._shares.in_file_order(self._epoch, start, stop)
        refs = np.empty(stop - start, REF)
        refs["index"] = self.samples.of(self._epoch).numbers(positions) | (self.tag << TAG_SHIFT)
        refs["epoch"] = self._epoch
        return refs

    def prefetch(self, refs: RefArray) -> None:
        """Start to download the samples with these refs.

        This does nothing for local files, unless rows are decoded in groups. The refs of a restored buffer are
        scattered, so readahead of a disk would cost a system call per ref.
        """
        is_useful = self.lane.worker.downloads if self.dataset.prefetch_refs else self._deals_groups
        if is_useful:
            self.dataset.prefetch(refs)

    def count_of(self, lane: int, epoch: int) -> int | None:
        """Return the number of samples of a lane in a pass, or None if unknown.

        It is unknown if the pass never ends, or if damaged shards may be skipped.

        Args:
            lane: The number of the lane.
            epoch: The number of the pass.
        """
        if self.epochs is None or self.on_error != "raise":
            return None
        shares = self.shares_of(epoch)
        spans = [shares.span(lane, shares.first_epoch + number) for number in range(shares.epochs_started)]
        return sum(stop - start for start, stop in spans)

    def save_state(self) -> State:
        """Return the position of the reader.

        `position` is that of the next sample in the lane's share of `epoch`. `lane` has the positions of the lane's
        random sequences. `cut`, if not 0, is the unit of shares, which stays the same within a pass even if the size of
        batches changes.
        """
        state = {"epoch": self._epoch, "position": self._position, "lane": self.lane.save_state()}
        return {**state, "cut": self._shares.cut} if self._shares.cut else state

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`, without reading a sample.

        Raises `CheckpointMismatchError` if the position is out of range.
        """
        saved: _ReaderState = parse_state(self, state, _ReaderState)
        self._shares = self._shares.cut_by(saved.cut)
        self._move_to(saved.epoch, saved.position)
        if not 0 <= saved.position <= self._span_length:
            raise CheckpointMismatchError(
                f"{type(self).__name__}: the state is at sample {saved.position} of {self._span_length}. Use the saved "
                "shards and lanes."
            )
        self.lane.restore_state(saved.lane)

    def settings(self) -> dict[str, Any]:
        """Return every argument that changes the data.

        `shards` has name, number of samples and index hash of each shard, or joint hashes if there are many shards (see
        shard_digests.py). `exclude` is a hash of the indices of the excluded samples, and absent if there are none.
        `media` is a hash of the table of media, and absent if there is no table.
        """
        exclude_file = self.exclude_file
        return {
            "split": self.split,
            "subset": self.subset,
            "selection": None if self.selection is None else self.selection.manifest(),
            "epochs": self.epochs,
            "shuffle": self.shuffles,
            "block_size": self.block_size,
            "window": self.window if self.shuffles and not self._deals_groups else None,
            **({"decoded_bytes": self.dataset.store.decoded_bytes} if self._deals_groups else {}),
            "shards": summary(self.dataset.entries),
            **self.dataset.known_media.settings(),
            **({"exclude": exclude_file.digest} if exclude_file is not None and exclude_file.indices else {}),
        }

    def name_branch(self, name: str) -> None:
        """Become the source `name` of a `Blend`.

        The name is then part of the keys of the order and of random numbers.

        Args:
            name: The name of the source.
        """
        vars(self).pop("info", None)  # the next access describes the reader again
        self.branch = name
        self.tag = 1 + derive_key("branch", name) % (TAGS - 1)
        self.dataset.source_names[self.tag] = name
        self._start_with(self.lane.facts.growth.get(name, ()))

    @property
    def last_epoch_read(self) -> int:
        """Return the last epoch of which the lane has read samples.

        Before the first sample, this is the first epoch minus 1.
        """
        return self._epoch if self._position or not self._span_length else self._epoch - 1

    @property
    def population(self) -> int:
        """Return the number of samples in the shards, or in the chosen split and subset."""
        return self.dataset.count if self.selection is None else self.selection.count

    @property
    def origin(self) -> int:
        """Return the `Ref.source` of these samples."""
        return self.dataset.source ^ self.tag << TAG_SHIFT

    def describe(self) -> StageInfo:
        """Return the facts that all later stages inherit."""
        excluded = excluded_indices(self.exclude_file, self._lane, self.tag)
        return StageInfo(
            self._lane,
            depth=0,
            population=self.population,
            endless=self.epochs is None,
            tags=frozenset([self.tag]),
            origins=frozenset([self.origin]),
            branch=self.branch,
            excluded=ExcludedSamples({self.tag: excluded} if excluded else {}),
            yields_excluded=bool(excluded),
            raises=self.on_error == "raise",
        )

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """Return the samples with these refs. Parts are read on access."""
        return self.dataset.open_samples(refs, request=not self.lane.skips)

    def fetch(self, ref: ItemRef | Ref) -> Sample:
        """Return the sample with this ref: (index, epoch, part) or a `Ref`.

        Raises `CheckpointMismatchError` if there is no such sample.
        """
        try:
            index, epoch = (ref.index | self.tag << TAG_SHIFT, ref.epoch) if isinstance(ref, Ref) else (ref[0], ref[1])
            refs = np.array([(index, epoch)], REF)
        except (OverflowError, TypeError, IndexError) as error:
            raise CheckpointMismatchError(
                f"{type(self).__name__}: the state has a sample that is not in the data. Restore the saved shards."
            ) from error
        return self.open_samples(refs)[0]

    def count_faults(self) -> None:
        """Count the shards that could not be indexed completely.

        They are also added to the quarantine file.
        """
        for shard, error in self.dataset.faults:
            self.counts.update(skip_counters(_DAMAGED, self.tag << TAG_SHIFT))
            if self.dataset.quarantine is not None:
                self.dataset.quarantine.add(shard=shard, reason=_DAMAGED, detail=error)

    @property
    def sources(self) -> tuple[Stage, ...]:
        """Return (), because no stage comes before a reader."""
        return ()


def set_batch_size(stage: Stage, rows: int) -> None:
    """Set the batch size of the reader upstream of `stage`, before the first sample.

    This does nothing if a stage in between changes the number of elements unpredictably.
    """
    aligned = True
    while (one_to_one := chunked(stage).one_to_one) is not None:
        aligned = aligned and one_to_one
        stage = stage.source
    if isinstance(stage, RecordReader):
        stage.set_batch_size(rows, aligned=aligned)
