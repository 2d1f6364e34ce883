"""`Mixture`: datasets with weights or repetitions, from a file.

`Mixture.samples` builds the `Blend` of one lane.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import msgspec

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.weights import Weight
from savable_pipeline.data.shards.index import TAR
from savable_pipeline.data.shards.paths import as_names
from savable_pipeline.data.stores.opening import Cache
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.readers.reader import source_at
from savable_pipeline.stages.readers.readers import reader_of
from savable_pipeline.stages.stage import SampleStage


class MixtureSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One dataset of a mixture.

    It has files, a weight or repetitions, the user's tags, and settings of its reader.
    """

    path: str | list[str]
    weight: int | float | str | None = None
    repetitions: int | float | None = None
    split: str | None = None
    subset: int | float | tuple[float, float] | None = None
    columns: list[str] | None = None
    key: str | None = None
    length: int | None = None
    stride: int | None = None
    dtype: str | None = None
    tags: dict[str, Any] = {}


class Mixture(msgspec.Struct, frozen=True):
    """Datasets and nested mixtures by name, as `read_mixture` reads them.

    Attributes:
        sources: The datasets and mixtures, by name.
        weight: The weight of this mixture among its neighbours in an outer mixture.
        schedule: The weights of the sources, if they change during the run.

    Example:
        >>> _ = Path("two.yaml").write_text('''
        ... sources:
        ...   web: {path: shards/0.tar, weight: 0.7}
        ...   books: {path: [shards/1.tar, shards/2.tar], weight: 0.3}
        ... ''')
        >>> mixture = custom.read_mixture("two.yaml")
        >>> {name: source.weight for name, source in mixture.sources.items()}
        {'web': 0.7, 'books': 0.3}
    """

    sources: dict[str, MixtureSource | Mixture]
    weight: int | float | str | None = None
    schedule: Schedule | None = None

    def samples(
        self,
        lane: Lane,
        *,
        shuffle: bool = True,
        block_size: int | None = None,
        window: int | None = 128,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        exclude: str | os.PathLike[str] | None = None,
        epochs: int | None = None,
        stride: int = 8,
    ) -> SampleStage:
        """Build a `Blend` of one reader for each dataset.

        Each reader is the one for its files: `TarShardReader`, `ParquetReader`, `ArrowReader`, `JsonlReader` or
        `TokenReader`.

        Args:
            lane: The lane of the pipeline.
            shuffle: As for `sp.TarShardReader`.
            block_size: As for `sp.TarShardReader`.
            window: As for `sp.TarShardReader`.
            cache: As for `sp.TarShardReader`.
            cache_bytes: As for `sp.TarShardReader`.
            exclude: As for `sp.TarShardReader`.
            epochs: The epochs of datasets without repetitions. None: they repeat forever.
            stride: As for `sp.Blend`.

        Raises:
            ValueError: A setting is wrong.
            ShardError: Shards cannot be read.
            RemoteError: A server cannot be reached.

        Example:
            >>> _ = Path("one.yaml").write_text("sources: {web: {path: shards/0.tar, repetitions: 2}}")
            >>> len(list(custom.read_mixture("one.yaml").samples(sp.Lane(seed=7))))
            200
        """
        shared = {"shuffle": shuffle, "block_size": block_size, "window": window, "exclude": exclude, "epochs": epochs}

        def build(entry: MixtureSource | Mixture) -> SampleStage:
            """Build the reader of a dataset, or the `Blend` of a nested mixture."""
            if isinstance(entry, MixtureSource):
                return _reader(entry, lane, shared, (cache, cache_bytes))
            stages = {name: build(source) for name, source in entry.sources.items()}
            weights = {name: _weight(source, stages[name]) for name, source in entry.sources.items()}
            return Blend(stages, weights=weights if entry.schedule is None else entry.schedule, stride=stride)

        return build(self)

    @property
    def is_scheduled(self) -> bool:
        """Return whether weights change during the run, here or in a nested mixture.

        Such a mixture is endless.
        """
        nested = [source for source in self.sources.values() if isinstance(source, Mixture)]
        return self.schedule is not None or any(mixture.is_scheduled for mixture in nested)

    def tags(self) -> dict[str, dict[str, Any]]:
        """Return the tags of each dataset by `Sample.source`.

        The source is named like "code/python" in a nested mixture.

        Example:
            >>> text = "sources: {web: {path: shards/0.tar, weight: 1, tags: {kind: page}}}"
            >>> _ = Path("tagged.yaml").write_text(text)
            >>> custom.read_mixture("tagged.yaml").tags()
            {'web': {'kind': 'page'}}
        """
        return dict(self._tags())

    def _tags(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the tags of each dataset, also in nested mixtures."""
        for name, entry in self.sources.items():
            if isinstance(entry, MixtureSource):
                yield name, entry.tags
            else:
                yield from ((f"{name}/{inner_name}", tags) for inner_name, tags in entry.tags().items())


def _reader(entry: MixtureSource, lane: Lane, shared: dict[str, Any], cache: Cache) -> SampleStage:
    """Build the reader of a dataset, with the options that all readers share, and the cache of tars."""
    values = {name: getattr(entry, name) for name in ("columns", "key", "length", "stride", "dtype", "split", "subset")}
    options = {**shared, **{name: value for name, value in values.items() if value is not None}}
    if source_at(as_names(entry.path), "", lane, cache).format.name == TAR:
        options |= zip(("cache", "cache_bytes"), cache, strict=True)
    if entry.repetitions is not None:
        options["epochs"] = entry.repetitions or 1  # with 0 repetitions, the weight in the Blend is 0
    return reader_of(entry.path, lane, options)


def _weight(entry: MixtureSource | Mixture, stage: SampleStage) -> Weight:
    """Return the weight of a dataset or a nested mixture: its own, or the number of samples in all its repetitions."""
    if entry.weight is not None:
        return entry.weight
    repetitions = entry.repetitions if isinstance(entry, MixtureSource) else None
    return int(Fraction(str(1 if repetitions is None else repetitions)) * stage.info.population)
