"""`DatasetFiles`: the files of one dataset of Energon's, and their samples as its loader has them; `KeyedStore`."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

from megatron.energon import SourceInfo
from megatron.energon.cache import FileStore
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.config import split_name_re

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.opening import Samples, open_dataset
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.readers import JsonlReader, TarShardReader
from savable_pipeline.trainers.energon.trust import check_not_pickled


class DatasetFiles:
    """The shards of a split, or a file of JSON lines; `unpickles=False`: a part that would be is an error."""

    def __init__(self, factory: Any, *, unpickles: bool) -> None:
        self._factory = factory
        self._unpickles = unpickles
        self.root = str(factory.path)
        self.is_tar = isinstance(factory, BaseWebdatasetFactory)
        self.paths: list[str] | str = self.root
        self._folder = ""  # of the shards' names here, below the root
        self._excluded: set[str] = set()
        if self.is_tar:
            self.paths = [str(shard.path) for shard in factory.shards]
            self._excluded = set(factory.sample_excludes)
            common = os.path.commonpath([str(PurePosixPath(shard.name).parent) for shard in factory.shards] or ["."])
            self._folder = "" if common in ("", ".") else f"{common}/"

    def reader(self, lane: Lane, **settings: Any) -> RecordReader:
        """The reader of these files."""
        kind: Any = TarShardReader if self.is_tar else JsonlReader
        reader: RecordReader = kind(self.paths, lane, **settings)
        return reader

    def leaves_out(self, sample: Sample) -> bool:
        """Whether the split excludes this sample."""
        return bool(self._excluded) and f"{self._folder}{sample.shard}/{sample.key}" in self._excluded

    def raw(self, sample: Sample, *, head: str = "") -> dict[str, Any]:
        """The parts that Energon would read; those whose names begin with `head`, without it."""
        ref = sample.ref
        keep, key = self._factory.part_filter, sample.key if self.is_tar else str(ref.index)
        names = [name[len(head) :] for name in sample if name.startswith(head)] if self.is_tar else ["json"]
        names = [name for name in names if keep is None or keep(name)]
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
            **{name: sample[head + name] for name in names},
        }


class KeyedStore(FileStore):  # type: ignore[misc]
    """The parts of a dataset by `key.extension`, for cookers: Energon's `aux` datasets, and the primary one."""

    def __init__(self, paths: list[str] | str, root: str, *, unpickles: bool) -> None:
        self._paths, self._root = paths, root
        self._unpickles = unpickles
        self._samples: Samples | None = None

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        if self._samples is None:
            self._samples = open_dataset(self._paths)
        found = split_name_re.match(key)
        if found is None:
            raise KeyError(f"{key!r} is no key with an extension, such as 'a/b.jpg'")
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
        return _store, (self._paths, self._root, self._unpickles)


def _store(paths: list[str] | str, root: str, unpickles: bool) -> KeyedStore:
    return KeyedStore(paths, root, unpickles=unpickles)
