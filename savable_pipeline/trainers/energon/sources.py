"""`Sources`: the datasets of a path of Energon, their readers and sample types.

    path ── Energon reads dataset.yaml or the metadataset ──▶ datasets with weights, sample types, subflavors, aux
    lane ── a reader for each, in a Blend if there are several ──▶ sp.Sample
    sp.Sample ── the parts as Energon would pass them on ──▶ its sample type, or the first cooker that matches

Settings are loaded without running a dataset's code. A class, a module or a pickled part needs `trust=True`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any

from megatron.energon import CrudeSample, JoinedWebdatasetFactory, SourceInfo, WorkerConfig, load_dataset
from megatron.energon.cache import DecodeFileStore, FileStore
from megatron.energon.cache.file_store import WebdatasetFileStore
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.config import split_name_re
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.metadataset.join_dataset_loader import JoinDatasetLoader
from megatron.energon.metadataset.loader_interface import DatasetBlendMode
from megatron.energon.module_loader import ModuleLoader
from megatron.energon.typed_converter import JsonParser

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.opening import Samples, open_dataset
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError, ShardError
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.readers.join import Join
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.readers import JsonlReader, TarShardReader
from savable_pipeline.stages.stage import SampleStage
from savable_pipeline.stages.task_encoder import Skip
from savable_pipeline.trainers.energon.methods import recording_subject

_RESOLVE, _LOAD = "_resolve_object", "get_function"  # Energon's methods that import what a dataset names
_PICKLED = {"pkl", "pickle", "pyd", "pth", "pt"}  # extensions of parts that Energon's decoder unpickles
_ADVICE = "Pass trust=True only if you trust its author, because it runs code"
_lock = threading.Lock()


@contextmanager
def only_energons_classes() -> Iterator[None]:
    """Context that raises TypeError if settings name foreign code.

    The settings of a dataset may name only Energon's classes.
    """
    resolve, load = getattr(JsonParser, _RESOLVE), getattr(ModuleLoader, _LOAD)

    def resolve_class(parser: Any, module_name: str, object_name: str, *rest: Any) -> Any:
        """Resolve only classes of Energon, because a dataset must not name other code."""
        found = None
        if module_name.partition(".")[0] == "megatron" and module_name.split(".")[1:2] == ["energon"]:
            found = resolve(parser, module_name, object_name, *rest)
        if not isinstance(found, type) or not found.__module__.startswith("megatron.energon"):
            raise TypeError(f"the dataset names {module_name}.{object_name}. {_ADVICE}.")
        return found

    def reject_function(_: Any, function: str, *rest: Any, **__: Any) -> None:
        raise TypeError(f"the dataset names the function {function}. {_ADVICE}.")

    with _lock:
        setattr(JsonParser, _RESOLVE, resolve_class)
        setattr(ModuleLoader, _LOAD, reject_function)
        try:
            yield
        finally:
            setattr(JsonParser, _RESOLVE, resolve)
            setattr(ModuleLoader, _LOAD, load)


def check_not_pickled(names: Iterable[str], key: str) -> None:
    """Raise EncodeError for a part that the decoder would unpickle."""
    for name in names:
        if name.rpartition(".")[2].lower() in _PICKLED:
            raise EncodeError(
                f"part {name!r} of sample {key!r} is a pickle, which can run code. Pass trust=True if you trust its "
                "author, or set decoder = None in the encoder."
            )


class DatasetFiles:
    """Shards of a split, or a file of JSON lines.

    With `unpickles=False`, a part that would be unpickled is an error.
    """

    def __init__(self, factory: Any, *, unpickles: bool) -> None:
        self._factory = factory
        self._unpickles = unpickles
        self.root = str(factory.path)
        self.is_tar = isinstance(factory, BaseWebdatasetFactory)
        self.paths: list[str] | str = self.root
        self._folder = ""  # the common folder of the shards, below the root
        self._excluded: set[str] = set()
        if self.is_tar:
            self.paths = [str(shard.path) for shard in factory.shards]
            self._excluded = set(factory.sample_excludes)
            common = os.path.commonpath([str(PurePosixPath(shard.name).parent) for shard in factory.shards] or ["."])
            self._folder = "" if common in ("", ".") else f"{common}/"

    def reader(self, lane: Lane, **settings: Any) -> RecordReader:
        """Return the reader of these files."""
        kind: Any = TarShardReader if self.is_tar else JsonlReader
        reader: RecordReader = kind(self.paths, lane, **settings)
        return reader

    def excludes(self, sample: Sample) -> bool:
        """Return whether the split excludes this sample."""
        return bool(self._excluded) and f"{self._folder}{sample.shard}/{sample.key}" in self._excluded

    def raw(self, sample: Sample, *, prefix: str = "") -> dict[str, Any]:
        """Return the parts that Energon would read.

        They include the entries that it adds, such as `__key__`.

        Only parts whose names start with `prefix` are returned, under their names without it.
        """
        ref, matches = sample.ref, self._factory.part_filter
        key = sample.key if self.is_tar else str(ref.index)
        names = [name[len(prefix) :] for name in sample if name.startswith(prefix)] if self.is_tar else ["json"]
        names = [name for name in names if matches is None or matches(name)]
        if not self._unpickles:
            check_not_pickled(names, key)
        info = SourceInfo(
            dataset_path=self._factory.path,
            index=ref.index,
            shard_name=self._folder + sample.shard,
            file_names=tuple([f"{key}.{name}" for name in names]),
        )
        return {
            "__key__": key,
            "__shard__": info.shard_name,
            "__restore_key__": ("Ref", *ref),
            "__sources__": (info,),
            **{name: sample[prefix + name] for name in names},
        }


class KeyedStore(FileStore):  # type: ignore[misc]
    """Parts of a dataset by `key.extension`, for cookers.

    These are Energon's `aux` datasets and the primary one.
    """

    def __init__(self, paths: list[str] | str, root: str, *, unpickles: bool) -> None:
        self._paths, self._root = paths, root
        self._unpickles = unpickles
        self._samples: Samples | None = None

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        if self._samples is None:
            self._samples = open_dataset(self._paths)
        found = split_name_re.match(key)
        if found is None:
            raise KeyError(f"{key!r} has no extension. Use a key such as 'a/b.jpg'.")
        name, extension = found.groups()
        if not self._unpickles:
            check_not_pickled([extension], name)
        sample = self._samples[name]
        shard = sample.shard
        return sample[extension], SourceInfo(
            dataset_path=self._root, index=key, shard_name=shard, file_names=(f"{name}.{extension}",)
        )

    def get_path(self) -> str:
        """Return the folder of the dataset."""
        return self._root

    def __reduce__(self) -> Any:
        return partial(KeyedStore, unpickles=self._unpickles), (self._paths, self._root)


@dataclass(frozen=True)
class Sources:
    """Datasets of a path, loaded once in each process.

    `settings` are Energon's own, such as `split_part`.
    """

    path: Any
    settings: dict[str, Any]
    decoder: Any
    trust: bool = False
    repeat: bool = True
    shuffle: bool = True
    block_size: int | None = None
    only: str | None = None  # the name of the only dataset to read
    _loaded: dict[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> Any:
        own = (self.path, self.settings, self.decoder, self.trust, self.repeat, self.shuffle, self.block_size)
        return Sources, (*own, self.only)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Each dataset, by a unique name."""
        if not self._loaded:
            self._loaded.update(self._load())
        return self._loaded if self.only is None else {self.only: self._loaded[self.only]}

    def _load(self) -> dict[str, Leaf]:
        """Load the settings of all datasets by Energon, and return the datasets by name."""
        settings = dict(self.settings)
        files = {name: settings.pop(name) for name in ("dataset_config", "split_config") if name in settings}
        config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        with nullcontext() if self.trust else only_energons_classes():
            loader = load_dataset(self.path, **files)
            loaded = loader.get_datasets(worker_config=config, decoder=self.decoder, **settings)
        leaves: dict[str, Leaf] = {}
        nonmatch_of_joins = _nonmatch_settings(loader, settings["split_part"])
        for each in loaded.datasets:
            nonmatch = next(nonmatch_of_joins) if isinstance(each.dataset, JoinedWebdatasetFactory) else []
            leaf = Leaf(each, loaded.blend_mode, self, nonmatch)
            leaves[_unique_name(leaf.name, leaves)] = leaf
        return leaves

    def samples(self, lane: Lane) -> SampleStage:
        """Return the first stage of a lane: the samples of all datasets, blended."""
        stages = {name: leaf.reader(lane) for name, leaf in self.leaves.items()}
        if len(stages) == 1:
            return next(iter(stages.values()))
        return Blend(stages, weights={name: leaf.weight(stages[name]) for name, leaf in self.leaves.items()})

    def leaf_of(self, sample: Sample) -> Leaf:
        """Return the dataset of a sample."""
        leaves = self.leaves
        return leaves[sample.source] if sample.source in leaves else next(iter(leaves.values()))


class Leaf:
    """One dataset of a metadataset, or several joined ones.

    Energon has loaded their settings.

    `nonmatch` is empty without a join. Otherwise it has the setting of each joined dataset for samples that it lacks:
    "skip", "none" or "error". That of the first dataset is not used.

    Attributes:
        factory: Energon's dataset.
    """

    def __init__(self, loaded: Any, mode: Any, sources: Sources, nonmatch: list[str]) -> None:
        self.factory = loaded.dataset
        self._weight, self._blend_mode = loaded.weight, mode
        self._repetitions = loaded.repetitions if sources.settings["training"] else None
        self._sources = sources
        self._aux = loaded.aux or {}
        self._unpickles = sources.trust or sources.decoder is None  # without a decoder, pickles stay bytes
        self.is_crude = self.factory.__sample_type__ is CrudeSample
        self.subflavors: dict[str, Any] = getattr(self.factory, "subflavors", None) or {}
        self._nonmatch = nonmatch
        inner = self.factory.inner_datasets if nonmatch else [self.factory]
        self._files = [DatasetFiles(each, unpickles=self._unpickles) for each in inner]
        if self.factory.subset is not None:
            raise ValueError(f"{self._files[0].root}: `subset` is not supported. Make a split of the shards instead.")

    @property
    def name(self) -> str:
        """Last component of the dataset's path, without its extension."""
        return PurePosixPath(self._files[0].root).name.partition(".")[0]

    @property
    def samples(self) -> int:
        """Number of samples in all repetitions, without excluded ones, as in Energon."""
        return int(len(self.factory) * (1 if self._repetitions is None else self._repetitions))

    def reader(self, lane: Lane) -> SampleStage:
        """Return the samples of this dataset, with the parts of joined datasets."""
        epochs = None if self._sources.repeat else self._repetitions or 1
        shuffle, block_size = self._sources.shuffle, self._sources.block_size
        shuffle = shuffle and self.factory.shuffle_over_epochs is not None
        stage: SampleStage = self._files[0].reader(lane, epochs=epochs, shuffle=shuffle, block_size=block_size)
        for number, files in enumerate(self._files[1:], 1):
            skips = self._nonmatch[number] == "skip"
            stage = Join(stage, {_join_name(number): files.paths}, missing="skip" if skips else "empty")
        return stage

    def weight(self, stage: SampleStage) -> int | float:
        """Return the weight of these samples in the blend.

        It is the one in the metadataset, or the number of samples in all repetitions.
        """
        if self._blend_mode is DatasetBlendMode.DATASET_WEIGHT:
            return 1.0 if self._weight is None else float(self._weight)
        return stage.info.population * (1 if self._repetitions is None else self._repetitions)

    def load(self, sample: Sample) -> Any:
        """Return the sample that Energon's loader would pass to the encoder.

        With a cooker, it is the sample passed to the cooker. A `Skip` stands for a sample that is skipped.
        """
        first, *others = self._files
        if first.excludes(sample):
            return Skip("excluded")
        raw = first.raw(sample)
        if self._nonmatch:
            parts = [raw, *(self._joined_part(sample, number, files) for number, files in enumerate(others, 1))]
            data = RawSampleData(__restore_key__=raw["__restore_key__"], data=tuple(parts))
            with recording_subject(data):
                return self.factory.load_sample(data)
        if first.is_tar:
            with recording_subject(raw):
                return self.factory.load_sample(raw)
        return CrudeSample({**raw, "__subflavors__": self.factory.subflavors, "json": json.loads(raw["json"])})

    def _joined_part(self, sample: Sample, number: int, files: DatasetFiles) -> dict[str, Any] | None:
        """Return a sample's parts of a joined dataset, or None if it has none."""
        prefix = f"{_join_name(number)}."
        if any(name.startswith(prefix) for name in sample):
            return files.raw(sample, prefix=prefix)
        if self._nonmatch[number] == "error":
            raise ShardError(f"{files.root} has no sample {sample.key!r}. Add it, or change `nonmatch`.")
        return None

    def cook(self, raw: Any, encoder: Any) -> Any:
        """Cook a crude sample by the first cooker that matches the subflavors."""
        cooker = next((each for each in encoder.cookers if each.is_match(self.subflavors)), None)
        if cooker is None:
            raise TypeError(f"{type(encoder).__name__} has no cooker for the subflavors {self.subflavors}. Add one.")
        aux = self._aux_and_primary if cooker.need_primary else self._aux_stores
        return encoder.cook_crude_sample(raw, cooker=cooker, aux=aux)

    @cached_property
    def _aux_stores(self) -> dict[str, Any]:
        """Auxiliary datasets by name, whose parts are decoded as those of samples."""
        return {name: self._decoded(self._opened(store)) for name, store in self._aux.items()}

    @cached_property
    def _aux_and_primary(self) -> dict[str, Any]:
        """The auxiliary datasets, and this dataset as "primary"."""
        own = KeyedStore(self._files[0].paths, self._files[0].root, unpickles=self._unpickles)
        return {"primary": self._decoded(own), **self._aux_stores}

    def _opened(self, store: Any) -> Any:
        """Return a store for the dataset of Energon's `store`, which finds samples by key."""
        if not isinstance(store, WebdatasetFileStore):
            return store
        return KeyedStore(store.get_path(), store.get_path(), unpickles=self._unpickles)

    def _decoded(self, store: Any) -> Any:
        """Return a store whose parts are decoded, if there is a decoder."""
        decoder = self._sources.decoder
        return store if decoder is None else DecodeFileStore(store, decoder=decoder)


def _nonmatch_settings(node: Any, split: str) -> Iterator[list[str]]:
    """Yield the `nonmatch` settings of every join of a metadataset in Energon's order."""
    if isinstance(node, JoinDatasetLoader):
        datasets = node.datasets.values() if isinstance(node.datasets, dict) else node.datasets
        yield [each.nonmatch for each in datasets]
    elif isinstance(getattr(node, "splits", None), dict):
        yield from _nonmatch_settings(node.splits[split], split)
    elif isinstance(node, list):
        for each in node:
            yield from _nonmatch_settings(each, split)
    elif is_dataclass(node) and not isinstance(node, type):
        for each in fields(node):
            yield from _nonmatch_settings(getattr(node, each.name), getattr(node, "split_part", None) or split)


def _join_name(number: int) -> str:
    """Return the name under which a sample has the parts of joined dataset `number`."""
    return f"join{number}"


def _unique_name(name: str, taken: dict[str, Any]) -> str:
    """Return the name, with a number appended if it is taken."""
    base = candidate = name.replace("#", "_") or "data"
    number = 2
    while candidate in taken:
        candidate, number = f"{base}-{number}", number + 1
    return candidate
