"""`Stage`: one step of a lane, and the protocol that a user's own stages follow.

    SampleStage ──▶ SampleStage ──▶ ItemStage ──▶ ItemStage ──▶ BatchStage
    reader          ShuffleBuffer   Encode        OnlinePacker  Batcher

The class a stage derives from tells whether it gives samples, items or batches, so that a type checker, and each
constructor, can refuse stages in a wrong order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.sample import REF, TAG_SHIFT, RefArray, Sample, skip_counters, tag_of
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import CheckpointMismatchError, SavableError
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.excluded_samples import NOTHING_EXCLUDED, REASON, ExcludedSamples
from savable_pipeline.stages.item_ref import ItemRef, as_ref, sample_indices
from savable_pipeline.stages.task_encoder import TaskEncoder

State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Where a stage lies in its pipeline, and facts about the stages before it ("upstream")."""

    lane: Lane
    depth: int
    """The number of stages before this one: part of the key of this stage's random numbers."""
    population: int
    """The number of samples in all datasets upstream."""
    endless: bool
    """Whether the stage never raises StopIteration."""
    tags: frozenset[int]
    """The tags of the readers upstream: the number in a ref that names its source in a `Blend`; {0} without one."""
    origins: frozenset[int]
    """The `Ref.source` of the readers upstream."""
    branch: str = ""
    """The source of a `Blend` that the stage belongs to: "web", or "text/web" in nested Blends; "" outside of one."""
    encoder: TaskEncoder | None = None
    """The encoder that made the items that the stage gives; None if it gives samples."""
    excluded: ExcludedSamples = NOTHING_EXCLUDED
    """The samples of the readers upstream that must not be given."""

    def key(self, purpose: str) -> int:
        """The 64-bit key of the stage's random numbers for `purpose`; no other stage of the lane has the same key."""
        return self.lane.key(purpose, self.depth, *([self.branch] if self.branch else []))


class Measured(NamedTuple):
    """An element as a stage that needs only its cost takes it."""

    ref: ItemRef
    sizes: tuple[Size, ...] | None
    """(length, images) of each item in a pack, or of the one item; None: ask the encoder."""
    item: Any
    """The element, or MISSING: `fetch(ref)` makes it."""


def _check_ref(cls: type[Stage]) -> None:
    """Raise TypeError for a class that defines `__next__` without a `ref`."""
    named = any("ref" in vars(base) or "ref" in vars(base).get("__annotations__", ()) for base in cls.__mro__[:-2])
    if "__next__" in vars(cls) and not named:
        raise TypeError(
            f"{cls.__name__} defines __next__ but no `ref`, so its output could not be made again after a resume. If "
            "it returns the element that it took last from its source, or drops elements, write\n"
            f"    class {cls.__name__}(sp.PassThrough, sp.{_kind_of(cls).__name__}):\n"
            "If it holds, reorders or merges elements, write `ref = ()` in the class, set `self.ref` in `__next__` to "
            "the ref of the element it returns (`self.source.ref` is the ref of the source's last element), and save "
            "the refs of the elements it holds"
        )


def _kind_of(cls: type[Stage]) -> type[Stage]:
    """The base class to suggest to a stage: of samples, items or batches; ItemStage if the stage names none."""
    return next((base for base in (BatchStage, ItemStage, SampleStage) if issubclass(cls, base)), ItemStage)


class Stage:
    """One step of a lane: an iterator that can save its position, return to it, and make an earlier element again.

    Derive your own stage from `SampleStage`, `ItemStage` or `BatchStage`, by the kind of element it gives.

    - `__init__(source)` calls `super().__init__(source)`, which stores the stage before it as `self.source`.
    - `__next__()` returns the next element, or raises StopIteration at the end.
    - `ref` is the ref of the element that `__next__` returned last. Set it there; or derive from `PassThrough` too, if
      the stage returns the element it took last from its source. `self.source.ref` is the ref of that element.
    - `fetch(ref)` makes the element with this ref again, identically. By default it asks the source. It returns a
      `Skip` for an element that can no longer be made: leave that one out.
    - `save_state()` returns the stage's position as numbers, strings, bytes, lists and dicts, together with
      `self.source.save_state()`. Save refs, never contents: after a restore, make a held element again by
      `self.source.fetch(ref)` when it is needed.
    - `restore_state(state)` puts a fresh stage of the same settings, and its source, at the position of `state`.
      Tuples come back as lists; `fetch` accepts both, and `sp.as_ref` turns them into tuples.
    - `settings()` returns every setting that changes the output: a saved state must agree on them.

    Draw random numbers from `self.lane.rng("a name")`: its position is saved with the lane. A class with `__next__`
    and no `ref` raises TypeError when it is defined; a source of the wrong kind raises ValueError.

    What a stage has taken and not given yet lies in `sp.HeldItems`.

    >>> class Numbered(sp.ItemStage):  # gives each item with its number
    ...     ref, count = (), 0
    ...     def __next__(self):
    ...         item = next(self.source)
    ...         self.ref, self.count = (self.count, self.source.ref), self.count + 1
    ...         return self.count - 1, item
    ...     def fetch(self, ref):
    ...         item = self.source.fetch(ref[1])
    ...         return item if isinstance(item, sp.Skip) else (ref[0], item)
    ...     def save_state(self):
    ...         return {"count": self.count, **super().save_state()}
    ...     def restore_state(self, state):
    ...         super().restore_state(state)
    ...         self.count = state["count"]
    >>> class Ids(sp.TaskEncoder):
    ...     def encode(self, sample, rng):
    ...         return sample.json()["id"]
    >>> numbered = Numbered(sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Ids()))
    >>> next(numbered), next(numbered), numbered.fetch(numbered.ref)
    ((0, 0), (1, 1), (1, 1))
    """

    source: Stage
    ref: ItemRef
    """The ref of the element that `__next__` returned last, to be passed to `fetch`."""
    sizes: tuple[Size, ...] | None = None
    """(length, images) of each item in the pack that `__next__` returned last; None for other elements."""
    gives: ClassVar[str] = "things"
    leaves_out_excluded: bool = False
    """Whether nothing that the stage gives is made of `info.excluded` samples, though its sources may give them."""
    _info: StageInfo | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _check_ref(cls)

    def __init__(self, source: Stage) -> None:
        self._check_source(source, Stage)
        self.source = source

    def _check_source(self, source: object, kind: type[Stage]) -> None:
        """Raise ValueError unless `source` is a stage of this kind."""
        if isinstance(source, kind):
            return
        found = f"{type(source).__name__}, which gives {source.gives}" if isinstance(source, Stage) else repr(source)
        raise ValueError(
            f"{type(self).__name__} takes a stage that gives {kind.gives} (sp.{kind.__name__}), not {found}; the order "
            "of stages is reader, ShuffleBuffer, Encode, OnlinePacker, Batcher"
        )

    # Methods that your own stage may define.

    def __iter__(self) -> Stage:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __next__")

    def save_state(self) -> State:
        """The positions of this stage and of all before it, as plain values."""
        return {"source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`. The stage must be fresh and have the same settings.

        Raises `CheckpointMismatchError` for a state of another stage.
        """
        self.source.restore_state(state["source"])

    def fetch(self, ref: Any) -> Any:
        """Make the element with this ref again; a `Skip` if that is no longer possible."""
        return self.source.fetch(ref)

    def settings(self) -> dict[str, Any]:
        """Every setting that changes the stage's output, as plain values: a saved state must agree on them."""
        return {}

    def addresses(self) -> dict[str, str]:
        """Where the data of a setting lie, by the setting's name: told where the setting differs, never compared."""
        return {}

    # Properties of every stage.

    @property
    def sources(self) -> tuple[Stage, ...]:
        """The stages just upstream: none before a reader, several before a stage that merges."""
        return (self.source,)

    def map_sources(self, change: Callable[[Stage], Stage]) -> None:
        """Replace each source by `change(source)`."""
        self.source = change(self.source)

    @property
    def info(self) -> StageInfo:
        """Lane, depth, encoder and further facts from `describe`, which is called once."""
        if self._info is None:
            self._info = self.describe()
        return self._info

    def describe(self) -> StageInfo:
        """Build `info`: the source's, one deeper. Called again in a `Blend`, once the branch has its name."""
        info = self.source.info
        return replace(info, depth=info.depth + 1)

    def name_branch(self, name: str) -> None:
        """Make this stage and all upstream part of the `Blend` source `name`. Called before the first element."""
        for source in self.sources:
            source.name_branch(name)
        self._info = None

    @property
    def lane(self) -> Lane:
        """The lane that the pipeline was built for."""
        return self.info.lane

    @cached_property
    def counts(self) -> Counter[str]:
        """Event counters of this stage, such as `skipped/REASON`. A loader collects and clears them at each batch."""
        return Counter()

    # Defaults that a stage may replace by something better.

    def take(self, n: int) -> tuple[list[Any], list[ItemRef]]:
        """The next elements, 1 to `n` of them, and their refs; two empty lists only at the end."""
        for item in self:
            return [item], [as_ref(self.ref)]
        return [], []

    @property
    def unmade(self) -> bool:
        """Whether `take_measured` gives elements that are not made yet, where the encoder tells their sizes."""
        return False

    def take_measured(self) -> Measured | None:
        """The next element with its sizes, not made where `unmade`; None only at the end."""
        items, refs = self.take(1)
        return Measured(refs[0], self.sizes, items[0]) if items else None

    def make_again(self, ref: ItemRef) -> tuple[Any, ItemRef]:
        """What `fetch(ref)` makes, and the ref of what is in it: a pack may have lost items that cannot be made."""
        return self.source.make_again(ref) if type(self).fetch is Stage.fetch else (self.fetch(ref), ref)

    def count_of(self, lane: int, epoch: int) -> int | None:
        """The number of elements that this stage gives in pass `epoch` of a lane; None if not known beforehand."""
        return None

    @property
    def held_items(self) -> int:
        """The number of made items that this stage holds: to be made again if the lane moves to another process."""
        return 0

    def more(self) -> bool | None:
        """Whether another batch will come; None if that is not known before it is made."""
        return None

    def verify(self, slot: int) -> None:
        """Raise `ShardError` if data changed of which the batch of this slot, to be given next, may be made."""

    def stores_read(self) -> Iterable[RecordStore]:
        """The stores that this stage itself reads from, to be looked at once more when the lane is at its end."""
        return ()

    def pass_over(self) -> None:
        """Skip the next element, made only as far as that needs. Raises StopIteration at the end."""
        next(self)

    def hint_rows(self, rows: int, *, aligned: bool) -> None:
        """Hear that a batch downstream is made of `rows` of these things, before anything was given.

        `aligned`: each makes one row. A stage that gives one thing for each of its source passes it on.
        """

    def ref_alone(self, ref: ItemRef) -> ItemRef:
        """The ref of the element that this stage would make of the source's single element `ref`."""
        return ref

    def may_avoid(self, error: SavableError) -> bool:
        """Whether this stage may leave out a sample that repeatedly killed its worker, as `error` describes."""
        return False

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Leave this sample out from now on, in this lane and in all that are restored from its state."""

    def keep_known(self, refs: RefsT) -> RefsT:
        """The saved refs whose source still exists; the others are counted as dropped.

        Of refs of items and packs, what is left without excluded samples; samples are left out where they are encoded.
        """
        if isinstance(refs, np.ndarray):
            tags = (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)
            known = np.isin(tags, list(self.info.tags))
            kept: Any = refs if known.all() else refs[known]
        else:
            tags = self.info.tags
            kept = [ref for ref in refs if all(tag_of(index) in tags for index in sample_indices(ref))]
        if len(kept) < len(refs):
            self.counts["dropped/source removed"] += len(refs) - len(kept)
        if self.info.excluded and not isinstance(refs, np.ndarray):
            kept = self._without_excluded(kept)
        return kept  # type: ignore[no-any-return]

    def keep_whole(self, refs: list[ItemRef]) -> list[ItemRef]:
        """`keep_known` for refs of which no part may be missing: those that lose one are left out, all counted."""
        whole = []
        for ref in refs:
            left = self.keep_known([ref])
            if left == [ref]:
                whole.append(ref)
            elif left:
                self.counts["dropped/beside an excluded one"] += sum(1 for _ in sample_indices(left[0]))
        return whole

    def _without_excluded(self, refs: list[ItemRef]) -> list[ItemRef]:
        excluded = self.info.excluded
        found = [index for ref in refs for index in sample_indices(ref) if index in excluded]
        if not found:
            return refs
        for index in found:
            self.counts.update(skip_counters(REASON, index))
        left = map(excluded.left_of, refs)
        return [ref for ref in left if ref is not None]


RefsT = TypeVar("RefsT", RefArray, list[ItemRef])


class SampleStage(Stage):
    """A stage that gives samples, not read yet: a reader, a `ShuffleBuffer`, a `Blend` of them, or your own filter.

    The samples that a reader is told to `exclude` pass through it too: they are left out later, by `Encode`.

    Raises ValueError if its source gives items or batches.

    >>> class Even(sp.PassThrough, sp.SampleStage):  # leaves out samples with an odd id
    ...     def __next__(self) -> sp.Sample:
    ...         return next(sample for sample in self.source if sample.json()["id"] % 2 == 0)
    >>> samples = Even(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
    >>> [next(samples).key for _ in range(3)]
    ['s000000', 's000002', 's000004']
    """

    source: SampleStage
    gives = "samples"

    def __init__(self, source: SampleStage) -> None:
        self._check_source(source, SampleStage)
        super().__init__(source)

    def take_refs(self, n: int) -> RefArray:
        """The refs of the next samples, 1 to `n` of them: REF (any,); empty only at the end, or if `n` is 0."""
        if n > 0:
            for sample in self:
                return np.array([(sample.index, sample.epoch)], dtype=REF)
        return np.empty(0, REF)

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """The samples with these refs; their parts are read when asked for."""
        return self.source.open_samples(refs)

    def prefetch(self, refs: RefArray) -> None:
        """Begin to download the samples with these refs, which a restored stage holds; nothing for local files."""
        self.source.prefetch(refs)


class ItemStage(Stage):
    """A stage that gives items, or packs of them: `Encode`, `OnlinePacker`, a `Blend` of them, or your own stage.

    >>> class Below(sp.PassThrough, sp.ItemStage):  # leaves out numbers of `limit` and more
    ...     def __init__(self, source: sp.ItemStage, limit: int) -> None:
    ...         super().__init__(source)
    ...         self.limit = limit
    ...     def __next__(self):
    ...         return next(item for item in self.source if item < self.limit)
    ...     def settings(self):
    ...         return {"limit": self.limit}
    >>> class Ids(sp.TaskEncoder):
    ...     def encode(self, sample, rng):
    ...         return sample.json()["id"]
    >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False, epochs=1), Ids())
    >>> list(Below(items, limit=3))
    [0, 1, 2]
    """

    gives = "items"


class BatchStage(ItemStage):
    """A stage that gives batches: `Batcher`, `BucketBatcher`, or your own last stage.

    `SavableLoader(tail="pad")` needs two things more. `filler()` returns a batch of rows that do not count, for a lane
    that has no more: a dict with a key "valid", bool (rows,), all False. While `self.lane.pad` is true, every batch has
    the key "valid" and the same number of rows.

    >>> from itertools import islice
    >>> class Pairs(sp.BatchStage):  # batches of two samples; the last one of an odd number is alone
    ...     ref = ()
    ...     def __next__(self):
    ...         pair = [(sample, self.source.ref) for sample in islice(self.source, 2)]
    ...         if not pair:
    ...             raise StopIteration
    ...         samples, self.ref = zip(*pair)
    ...         return [sample.key for sample in samples]
    ...     def fetch(self, ref):
    ...         return [self.source.fetch(each).key for each in ref]
    >>> pairs = Pairs(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
    >>> next(pairs), pairs.fetch(pairs.ref)
    (['s000000', 's000001'], ['s000000', 's000001'])
    """

    gives = "batches"


class PassThrough(Stage):
    """Marks a stage whose `__next__` returns the element that it took last from its source, such as a filter.

    Such a stage holds nothing back, so it needs neither `ref` nor `fetch`, nor a state of its own. Do not mark a stage
    that holds, reorders or merges elements: `savable_pipeline.testing.assert_exact_resume` finds that mistake.

    >>> class Logged(sp.PassThrough, sp.SampleStage):
    ...     def __next__(self) -> sp.Sample:
    ...         sample = next(self.source)
    ...         print(sample.key)
    ...         return sample
    >>> _ = next(Logged(sp.TarShardReader("shards/", sp.Lane(), shuffle=False)))
    s000000
    """

    @property
    def ref(self) -> ItemRef:  # type: ignore[override]
        """The ref of the source's last element."""
        return self.source.ref

    @property
    def sizes(self) -> tuple[Size, ...] | None:  # type: ignore[override]
        """The sizes of the source's last element."""
        return self.source.sizes


StructType = TypeVar("StructType", bound=msgspec.Struct)


def parse_state(stage: Stage, state: State, kind: type[StructType]) -> StructType:
    """The state of a stage as the struct `kind`. Raises `CheckpointMismatchError` if it is another stage's."""
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"this is no state of {type(stage).__name__}: {error}; was a stage added, removed or exchanged?"
        ) from error


def saved_refs(stage: Stage, raw: bytes) -> RefArray:
    """The refs that a state has as bytes. Raises `CheckpointMismatchError` for half a ref."""
    if len(raw) % REF.itemsize:
        raise CheckpointMismatchError(
            f"{type(stage).__name__}: {len(raw)} bytes are no refs of {REF.itemsize} bytes each; use another copy of "
            "the checkpoint"
        )
    return np.frombuffer(raw, REF)


def max_empty_samples(population: int) -> int:
    """The number of samples in a row that may give no item before the run ends with an error.

    30 times the dataset plus 1,000, at most 100,000: a lane that draws at random would miss a single good sample this
    long with probability e**-30.
    """
    return min(30 * population + 1000, 100_000)
