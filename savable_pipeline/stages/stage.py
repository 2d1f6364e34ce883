"""`Stage`: one step of a lane, and the protocol that a user's own stages follow.

    SampleStage ──▶ SampleStage ──▶ ItemStage ──▶ ItemStage ──▶ BatchStage
    reader          ShuffleBuffer   Encode        OnlinePacker  Batcher

The base class of a stage says whether it yields samples, items or batches. Type checkers and constructors can therefore
reject stages in a wrong order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.ref import REF, RefArray
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import called, tree

State: TypeAlias = dict[str, Any]


_OWN_STAGE_PAGE = "https://github.com/savable-pipeline/savable_pipeline/blob/main/docs/own-stage.md"


def check_class(cls: type[Any]) -> None:
    """Raise TypeError if a stage class defines `__next__` without a `ref`."""
    classes = cls.__mro__[:-2]  # the class and its bases, without `Stage` and `object`
    has_ref = any("ref" in vars(each) or "ref" in vars(each).get("__annotations__", ()) for each in classes)
    if "__next__" in vars(cls) and not has_ref:
        kinds = ("BatchStage", "SampleStage", "ItemStage")
        kind = next((each.__name__ for each in classes if each.__name__ in kinds), "ItemStage")
        raise TypeError(
            f"{cls.__name__} has no `ref`, so its elements cannot be rebuilt. See {_OWN_STAGE_PAGE}\n"
            f"  To drop elements: class {cls.__name__}(custom.PassThrough, custom.{kind})\n"
            "  To hold or reorder them: set `self.ref` in `__next__`, such as to `self.source.ref`, and save the refs."
        )


class Stage:
    """One step of a lane.

    It is an iterator that can save and restore its position, and rebuild earlier elements.

    Derive your own stage from `SampleStage`, `ItemStage` or `BatchStage`, depending on what it yields.

    - `__init__(source)` calls `super().__init__(source)`, which stores the stage before it as `self.source`.
    - `__next__()` returns the next element, or raises StopIteration at the end.
    - `ref` is the ref of the element that `__next__` returned last. Set it in `__next__`. `self.source.ref` is the ref
      of the source's last element. A stage that returns the elements of its source unchanged sets no `ref`: it also
      derives from `PassThrough`.
    - `fetch(ref)` rebuilds the element with this ref, identically. By default it calls `self.source.fetch(ref)`. It
      returns a `Skip` for an element that can no longer be built, and the caller must then drop the element.
    - `save_state()` returns the stage's position as numbers, strings, bytes, lists and dicts, together with
      `self.source.save_state()`. Save refs, never contents: after a restore, `self.source.fetch(ref)`
      rebuilds a buffered element when it is needed.
    - `restore_state(state)` moves a fresh stage with the same settings, and its source, to the position of `state`.
      Tuples become lists; `fetch` accepts both, and `custom.as_ref` turns them into tuples.
    - `settings()` returns every setting that changes the output. A state is only loaded if it has equal settings.

    Draw random numbers from `self.lane.rng("a name")`, whose position is saved with the lane. If the stage takes
    elements before it returns them, store them in a `custom.ItemBuffer`. The other methods have defaults.

    Args:
        source: The stage before this one.

    Raises:
        TypeError: A class is defined with `__next__` and no `ref`.
        ValueError: The source yields another kind of elements.

    Example:
        >>> class Numbered(custom.ItemStage):  # yields each item with its number
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
    yields: str = "elements"
    """The kind of the elements: "samples", "items" or "batches"."""
    ref: ItemRef
    """The ref of the element that `__next__` returned last, to be passed to `fetch`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_class(cls)

    def __init__(self, source: Stage) -> None:
        self._check_source(source, Stage)
        self.source = source

    def _check_source(self, source: object, kind: type[Stage]) -> None:
        """Raise ValueError unless `source` is a stage of this kind.

        A `Filter` has the classes of all kinds, so `yields` decides between samples and items.
        """
        if isinstance(source, kind) and (kind is Stage or (source.yields == "samples") == (kind is SampleStage)):
            return
        found = f"{type(source).__name__}, which yields {source.yields}" if isinstance(source, Stage) else repr(source)
        raise ValueError(
            f"{type(self).__name__} takes a stage of {kind.yields} (custom.{kind.__name__}), not {found}. The order "
            "is reader, ShuffleBuffer, Encode, OnlinePacker, Batcher."
        )

    def __iter__(self) -> Stage:
        return self

    def __repr__(self) -> str:
        return tree(called(type(self).__name__, self.settings()), map(repr, self.sources))

    def __next__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __next__. Write one.")

    def save_state(self) -> State:
        """Return the positions of this stage and of all before it, as plain values."""
        return {"source": self.source.save_state()}

    def restore_state(self, state: State) -> None:
        """Return to a saved position. The stage must be fresh and have the same settings.

        Args:
            state: The result of `save_state`, with lists instead of tuples.

        Raises:
            CheckpointMismatchError: The state is of another stage.
        """
        self.source.restore_state(state["source"])

    def fetch(self, ref: Any) -> Any:
        """Rebuild an earlier element.

        Returns a `Skip` if the element can no longer be rebuilt.

        Args:
            ref: The ref of the element.
        """
        return self.source.fetch(ref)

    def settings(self) -> dict[str, Any]:
        """Return every setting that changes the stage's output, as plain values.

        A saved state is only loaded with equal settings.
        """
        return {}

    @property
    def sources(self) -> tuple[Stage, ...]:
        """Return the sources: none for a reader, several for a stage that merges."""
        return (self.source,)

    @cached_property
    def info(self) -> StageInfo:
        """Return the facts about this stage and its sources, which `describe` finds."""
        return self.describe()

    def describe(self) -> StageInfo:
        """Return the facts of the source, with a depth larger by 1.

        `info` calls it at the first access, and again after a `Blend` has named the branch.
        """
        info = self.source.info
        return replace(info, depth=info.depth + 1, declared=False)

    @property
    def lane(self) -> Lane:
        """Return the lane that the pipeline was built for."""
        return self.info.lane

    @cached_property
    def counts(self) -> Counter[str]:
        """Return the event counters of this stage, such as `skipped/REASON`.

        A loader collects and clears them at each batch.
        """
        return Counter()


class SampleStage(Stage):
    """Stage that yields samples, whose parts are read on access.

    It is a reader, a `ShuffleBuffer`, a `Blend` of such stages, or your own filter.

    It also yields the samples that a reader excludes; `Encode` drops them later.

    Args:
        source: The stage before this one, of samples.

    Raises:
        ValueError: The source yields items or batches.

    Example:
        >>> class Even(custom.PassThrough, custom.SampleStage):  # leaves out samples with an odd id
        ...     def __next__(self) -> sp.Sample:
        ...         return next(sample for sample in self.source if sample.json()["id"] % 2 == 0)
        >>> samples = Even(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
        >>> [next(samples).key for _ in range(3)]
        ['s000000', 's000002', 's000004']
    """

    source: SampleStage
    yields = "samples"

    def __init__(self, source: SampleStage) -> None:
        self._check_source(source, SampleStage)
        super().__init__(source)

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """Return the samples with these refs. Parts are read on access.

        Args:
            refs: REF (any,).
        """
        return self.source.open_samples(refs)

    def prefetch(self, refs: RefArray) -> None:
        """Start to download samples that a restored stage has in its buffer.

        This does nothing for local files.

        Args:
            refs: The refs of the samples, REF (any,).
        """
        self.source.prefetch(refs)


class ItemStage(Stage):
    """Stage that yields items, or packs of items.

    It is `Encode`, `OnlinePacker`, a `Blend` of such stages, or your own stage.

    Args:
        source: The stage before this one.

    Example:
        >>> class Below(custom.PassThrough, custom.ItemStage):  # leaves out numbers of `limit` and more
        ...     def __init__(self, source: custom.ItemStage, limit: int) -> None:
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

    yields = "items"


class BatchStage(ItemStage):
    """A stage that yields batches: `Batcher`, `BucketBatcher`, or your own last stage.

    `SavableLoader(tail="pad")` needs two more methods. `filler()` returns a batch of padding rows, for a lane that has
    no more batches: a dict with a key "valid", bool (rows,), all False. While `self.lane.pad` is true, every batch must
    have the key "valid" and the same number of rows.

    Args:
        source: The stage before this one.

    Example:
        >>> from itertools import islice
        >>> class Pairs(custom.BatchStage):  # batches of two samples; the last one of an odd number is alone
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

    yields = "batches"

    def filler(self) -> Any:
        """Return a batch of padding rows for a lane that has no more batches.

        See `tail="pad"`.
        """
        raise NotImplementedError(f'{type(self).__name__} has no filler(). Write one, or use tail="stop".')

    def more(self) -> bool | None:
        """Return whether another batch follows, or None if only building it can tell."""
        return None

    def pass_over(self) -> bool:
        """Skip the next batch, and build only what that needs. Returns False at the end."""
        return any(True for _ in self)


StructType = TypeVar("StructType", bound=msgspec.Struct)


def parse_state(stage: Stage, state: State, kind: type[StructType]) -> StructType:
    """Return the state of a stage as a struct of the class `kind`.

    Raises `CheckpointMismatchError` if the state does not have the fields of `kind`.
    """
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"this is no state of {type(stage).__name__}: {error}. Use the stages of the saved run."
        ) from error


def saved_refs(stage: Stage, raw: object) -> RefArray:
    """Return the refs of samples from their bytes in a state: REF (n,).

    Raises `CheckpointMismatchError` if `raw` is anything else.
    """
    if not isinstance(raw, bytes) or len(raw) % REF.itemsize:
        found = f"{len(raw)} bytes" if isinstance(raw, bytes) else repr(raw)
        raise CheckpointMismatchError(
            f"{type(stage).__name__}: {found} instead of refs of samples. Use another copy of the checkpoint."
        )
    return np.frombuffer(raw, REF)


class PassThrough(Stage):
    """Base of a stage, such as a filter, that returns its source's elements unchanged.

    `__next__` must return the last element of the source. The stage then needs no `ref`, `fetch` or state of its own.
    A stage that buffers, reorders or merges elements must not derive from this class:
    `savable_pipeline.testing.assert_exact_resume` finds that mistake.

    Args:
        source: The stage before this one.

    Example:
        >>> class Logged(custom.PassThrough, custom.SampleStage):
        ...     def __next__(self) -> sp.Sample:
        ...         sample = next(self.source)
        ...         print(sample.key)
        ...         return sample
        >>> _ = next(Logged(sp.TarShardReader("shards/", sp.Lane(), shuffle=False)))
        s000000
    """

    @property
    def ref(self) -> ItemRef:  # type: ignore[override]
        """Return the ref of the source's last element."""
        return self.source.ref
