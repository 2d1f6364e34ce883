"""`FromEnergon`: an unchanged `TaskEncoder` of Megatron-Energon for our stages.

A sample, a pack and a batch have a `__restore_key__`, from which `rebuild_by_key` rebuilds them:

    sample   ("Ref", source, epoch, index, part)                its origin, as `custom.Ref`
    pack     ("pack", key, number, key of each item, …)         the key of its random numbers, its number in the lane
    batch    ("batch", key, number, key of each item or pack, …)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import isgenerator
from typing import Any, TypeAlias, TypeGuard

import torch
from megatron.energon import SkipSample, SourceInfo
from megatron.energon.errors import SYSTEM_EXCEPTIONS
from megatron.energon.source_info import get_source_info
from torch.utils.data import default_convert

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker, seeder
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import is_environment_error
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.ref import Ref
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder
from savable_pipeline.trainers.energon.methods import IndexContext, Methods, recording_subject, subject_of
from savable_pipeline.trainers.energon.sources import Sources

ErrorHandler: TypeAlias = Callable[[Exception, Any, list[SourceInfo] | None], None]

_SKIPPED = "SkipSample"


class FromEnergon(TaskEncoder):
    """Calls the methods of Energon's `TaskEncoder` as an `sp.TaskEncoder`.

    Each call gets random numbers of its own.

    Cookers, `encode_sample` or `preencode_sample` build items. `select` is for `ItemPacker`. `postencode_sample` and
    `pack_selected_samples` build packs. `batch` and `encode_batch` build batches. `SkipSample` becomes an `sp.Skip`, in
    `batch` too, so the stage after the batcher must drop it. A sample's `__restore_key__` is its ref.

    Args:
        task_encoder: Energon's encoder.
        datasets: A prepared dataset or a metadataset: sample types, subflavors, aux. Its `samples(lane)` are read by
            `FromEnergon.samples`.
        split_part: The split to read.
        packing: Whether samples are packed (default False). `postencode_sample` is then called with the pack.
        batching: Whether `batch` and `encode_batch` are called (default). Otherwise a batch is one item, unless the
            encoder groups.
        trust: Whether to run the code that the dataset names, and unpickle its parts (default False).
        error_handler: A function that is called with each skipped error, its sample or samples, and their sources, as
            the `global_error_handler` of Energon's `WorkerConfig`. If it raises, the run ends. None (default): errors
            are only counted.

    Raises:
        TypeError: The encoder cannot be resumed exactly, or the dataset names code. The message says what to do.

    Example:
        ```python
        from savable_pipeline.energon import FromEnergon

        encoder = FromEnergon(TheirEncoder(), "dataset", packing=True)

        def pipeline(lane):
            items = sp.Encode(sp.ShuffleBuffer(encoder.samples(lane), size=100), encoder)
            return sp.Batcher(custom.ItemPacker(items, size=64, select=encoder.select), size=4)
        ```
    """

    global_rng = True  # Energon's methods expect seeded generators

    def __init__(
        self,
        task_encoder: Any,
        datasets: str | os.PathLike[str] | Sources,
        *,
        split_part: str = "train",
        packing: bool = False,
        batching: bool = True,
        trust: bool = False,
        error_handler: ErrorHandler | None = None,
    ) -> None:
        self._methods = Methods(task_encoder, packing=packing)
        if not isinstance(datasets, Sources):
            settings = {"split_part": split_part, "training": True}
            datasets = Sources(datasets, settings, task_encoder.decoder, trust)
        self.task_encoder = task_encoder
        self.sources = datasets
        self.error_handler = error_handler
        self._index_context = IndexContext()
        overridden = self._methods.overridden
        self._encode_method = next((name for name in ("preencode_sample", "encode_sample") if name in overridden), None)
        self._encodes_batches = "encode_batch" in overridden
        self._has_postencode = "postencode_sample" in overridden
        self.groups = "batch_group_criterion" in overridden
        self.packing, self.batching = packing, batching or self.groups
        if any(leaf.is_crude for leaf in datasets.leaves.values()) and not task_encoder.cookers:
            raise TypeError(f"{type(task_encoder).__name__} has no cookers. Add some, because the dataset is crude.")

    def __reduce__(self) -> Any:
        settings = {name: getattr(self, name) for name in ("packing", "batching", "error_handler")}
        return partial(FromEnergon, **settings), (self.task_encoder, self.sources)

    def with_sources(self, sources: Sources) -> FromEnergon:
        """Return the same encoder for other sources.

        Args:
            sources: The datasets.
        """
        build, (task_encoder, _) = self.__reduce__()
        return build(task_encoder, sources)  # type: ignore[no-any-return]

    def samples(self, lane: Any) -> Any:
        """Return the first stage of a pipeline: the samples of the datasets.

        Args:
            lane: The lane of the pipeline.
        """
        return self.sources.samples(lane)

    def encode(self, sample: Sample, rng: Rng) -> Any:
        """Return the encoder's item of a sample, or an iterator if it yields several."""
        key = ("Ref", *sample.ref)
        try:
            with self._index_context.at(rng.key):
                item = loaded = self._load_sample(sample)
                if type(loaded) is not Skip and self._encode_method is not None:
                    item = self._methods.call(self._encode_method, loaded, rng, seeded=True)
        except SkipSample:
            return Skip(_SKIPPED)
        if isgenerator(item):
            return self._yield_parts(item, loaded, key, rng)
        return item if type(item) is Skip else self._finished_item(item, key, rng)

    def _load_sample(self, sample: Sample) -> Any:
        """Load a sample as Energon does. If it is crude, which is Energon's word for raw parts, call its cooker."""
        leaf = self.sources.leaf_of(sample)
        raw = leaf.load(sample)
        with recording_subject(raw):
            return leaf.cook(raw, self.task_encoder) if leaf.is_crude and type(raw) is not Skip else raw

    def _yield_parts(self, items: Iterator[Any], sample: Any, key: tuple[Any, ...], rng: Rng) -> Iterator[Any]:
        """Yield the items of a sample that the encoder's generator yields.

        The stage `Encode` seeds the random numbers before each item.
        """
        while True:
            try:
                with self._index_context.at(rng.key), recording_subject(sample):
                    item = next(items)
            except StopIteration:
                return
            except SkipSample:
                yield Skip(_SKIPPED)
                return
            # the last number of a key counts the items of a sample
            yield self._finished_item(item, (*key[:-1], rng.parts[-1]), rng)

    def _finished_item(self, item: Any, key: tuple[Any, ...], rng: Rng) -> Any:
        """Return an item with its restore key, or a `Skip` if the encoder skips it.

        Items that are not packed are post-encoded here. The others are post-encoded when their pack is built.
        """
        if self.packing or not (self._has_postencode or self.groups):
            return _with_restore_key(item, *key)
        try:
            with self._index_context.at(rng.key):
                if self._has_postencode:
                    item = self._methods.call("postencode_sample", item, rng, seeded=False)
                return _with_restore_key(self._check_group(item), *key)
        except SkipSample:
            return Skip(_SKIPPED)

    def _check_group(self, item: Any) -> Any:
        """Return the item. The encoder may raise SkipSample when it determines the item's group."""
        if self.groups:
            self.task_encoder.batch_group_criterion(item)
        return item

    def select(self, items: list[Any], rng: Rng) -> Any:
        """Return the groups of items to pack, for `custom.ItemPacker`."""
        try:
            with self._index_context.at(rng.key):
                groups = self._methods.call("select_samples_to_pack", items, rng, seeded=True)
                return [group for group in groups if group]
        except SkipSample:
            return []
        except Exception as error:
            self._skip_or_raise(error)
            return []

    def pack(self, items: list[Any], rng: Rng) -> Any:
        """Return a pack of items, after post-encoding them."""
        try:
            with self._index_context.at(rng.key):
                return self._build_pack(items, rng)
        except SkipSample:
            return Skip(_SKIPPED)
        except Exception as error:
            return self._skip_or_raise(error)

    def _build_pack(self, items: list[Any], rng: Rng) -> Any:
        """Build a pack by the encoder's methods, and return it with its restore key, or a `Skip` if it is empty."""
        keys = _restore_keys(items)
        if self._has_postencode:
            encoded = [self._post_encode(item, rng) for item in items]
            items = [item for item in encoded if type(item) is not Skip]
        if not items:
            return Skip("a pack of nothing")
        pack = self._methods.call("pack_selected_samples", items, rng, seeded=not self._has_postencode)
        return self._check_group(_with_restore_key(pack, "pack", rng.key, rng.parts[0], *keys))

    def _post_encode(self, item: Any, rng: Rng) -> Any:
        """Call `postencode_sample` for an item; the result is a `Skip` if it skips the item."""
        try:
            return self._methods.call("postencode_sample", item, rng, seeded=False)
        except SkipSample:
            return Skip(_SKIPPED)

    def group(self, item: Any) -> Any:
        """Return the group of an item and its batch size, for `custom.BucketBatcher`."""
        with self._index_context.at(0):
            key, size = self.task_encoder.batch_group_criterion(item)
        return _plain_key(key), size

    def batch(self, items: list[Any], rng: Rng) -> Any:
        """Return an encoded batch with arrays as tensors, or a `Skip`.

        torch's loader converts arrays to tensors too.
        """
        if not self.batching:
            return as_torch_converts(items[0])
        try:
            with self._index_context.at(rng.key, rng.parts[0]):
                keys = _restore_keys(items)
                batch = self._methods.call("batch", items, rng, seeded=True)
                if self._encodes_batches:
                    batch = self._methods.call("encode_batch", batch, rng, seeded=False)
        except SkipSample:
            return Skip(_SKIPPED)
        except Exception as error:
            return self._skip_or_raise(error)
        if isgenerator(batch):
            raise TypeError("batch and encode_batch must return one batch, not a generator")
        return as_torch_converts(_with_restore_key(batch, "batch", rng.key, rng.parts[0], *keys))

    def _skip_or_raise(self, error: Exception) -> Skip:
        """Return the `Skip` of a pack or batch that raised a tolerated error. Raise any other error."""
        if not self._is_skipped(error):
            raise error
        return Skip(type(error).__name__)

    def is_skipped(self, error: SavableError) -> bool:
        """Return whether Energon would skip a sample with this error.

        It is the `on_error` of `sp.Encode`.

        Args:
            error: The error that the stage would raise.
        """
        return self._is_skipped(error.__cause__)

    def _is_skipped(self, error: BaseException | None) -> bool:
        """Return whether Energon continues after an error. If so, call its error handler."""
        if not is_tolerated(error):
            return False
        if self.error_handler is not None:
            subject = subject_of(error)
            self.error_handler(error, subject, _sources_of(subject))
        return True

    @property
    def max_errors(self) -> float:
        """Largest fraction of samples that may fail.

        Energon has no such fraction: it stops after a number of errors in a row.
        """
        return 0.9 if self._methods.tolerance else 1.0

    def settings(self) -> dict[str, Any]:
        """Return the class of the encoder, its decoder's settings, and whether it packs."""
        kind, decoder = type(self.task_encoder), self.sources.decoder
        config = None if decoder is None or not hasattr(decoder, "config") else decoder.config()
        name = f"{kind.__module__}.{kind.__qualname__}"
        return {"task_encoder": name, "decoder": str(config), "packing": self.packing, "batching": self.batching}


def is_tolerated(error: BaseException | None) -> TypeGuard[Exception]:
    """Return whether Energon continues after this error.

    It continues after errors of the data and of the encoder, but not of the environment, such as a full disk.
    """
    if not isinstance(error, Exception) or isinstance(error, (*SYSTEM_EXCEPTIONS, SavableError)):
        return False
    return not is_environment_error(error)


def _sources_of(subject: Any) -> list[SourceInfo] | None:
    """Return the sources of a sample, or of all samples of a list."""
    samples = subject if isinstance(subject, list) else [subject]
    return [source for sample in samples for source in get_source_info(sample) or ()] or None


def _restore_keys(items: list[Any]) -> tuple[Any, ...]:
    """Return the restore key of each item, or None for an item that has none."""
    return tuple(
        [
            item.get("__restore_key__") if isinstance(item, dict) else getattr(item, "__restore_key__", None)
            for item in items
        ]
    )


def _with_restore_key(value: Any, *key: Any) -> Any:
    """Set the `__restore_key__` of an item, pack or batch, if it has such a field."""
    if isinstance(value, dict):
        if "__restore_key__" in value:
            value["__restore_key__"] = key
    elif getattr(value, "__restore_key__", key) != key:
        value.__restore_key__ = key
    return value


def _plain_key(key: Any) -> Any:
    """Return a group's key of integers and strings, as a state stores it."""
    if isinstance(key, tuple):
        return tuple([_plain_key(each) for each in key])
    return key.hex() if isinstance(key, float) else key


_UNCHANGED = {int, float, bool, str, bytes, type(None), torch.Tensor}


def as_torch_converts(value: Any) -> Any:
    """Return what torch's `default_convert` returns for a value, but faster.

    It is not called for each number of a list.
    """
    kind = type(value)
    if kind in _UNCHANGED or (kind in (list, tuple) and set(map(type, value)) <= _UNCHANGED):
        return value
    if kind is dict:
        return {name: as_torch_converts(each) for name, each in value.items()}
    if kind in (list, tuple):
        return kind([as_torch_converts(each) for each in value])
    converted: Any = default_convert(value)  # type: ignore[no-untyped-call]
    return converted


_seed: Any = seeder(True)


def rebuild_by_key(encoder: FromEnergon, key: Any, *, seed: int) -> Any:
    """Rebuild a sample, pack or batch of a run with this seed.

    The trainer's random generators stay as they are. Raises ValueError for an invalid key, and EncodeError if the
    sample is skipped this time.
    """
    with as_in_a_worker(set(KINDS)):
        return as_torch_converts(_rebuild(encoder, Encode(encoder.samples(Lane(seed=seed)), encoder), key))


def _rebuild(encoder: FromEnergon, samples: Encode, key: Any) -> Any:
    """Rebuild a sample, pack or batch from its restore key."""
    kind: Any  # "Ref", "pack" or "batch"
    parts: list[Any]
    kind, *parts = key if isinstance(key, Sequence) and len(key) > 2 else [None]
    if kind == "Ref":
        value = samples.fetch(Ref(*parts))
    elif kind in ("pack", "batch"):
        rng_key, number, *item_keys = parts
        items = [_rebuild(encoder, samples, item_key) for item_key in item_keys]
        rng = Rng(0, (number, 0, 0), 0, rng_key)  # with this key, the base (the first 0) is not used
        _seed(rng_key)
        value = encoder.pack(items, rng) if kind == "pack" else encoder.batch(items, rng)
    else:
        raise ValueError(
            f"{key!r} is no __restore_key__ of this dataset. Derive your sample class from the sample that it is "
            "made of."
        )
    if type(value) is Skip:
        raise EncodeError(
            f"{kind} {tuple(parts)} was skipped now ({value.reason!r}), but not in the saved run. Use its encoder."
        )
    return value
