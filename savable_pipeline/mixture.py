"""`read_mixture`: which datasets to blend, from a YAML file.

    sources:
      web:
        path: shards/web                 # as TarShardReader takes it; relative to this file
        weight: 0.7
      books:
        path: [a.tar, b.tar]
        weight: 0.2
        split: train
        subset: 0.5
      code:                              # a mixture of its own
        weight: 0.1
        sources:
          c: {path: shards/c, repetitions: 1}
          python: {path: shards/python, repetitions: 3}

`weight` is a share, and the source never ends. `repetitions` is how many epochs the source has; then its share is what
lets all the sources beside it end at about one time. Sources side by side have all the one or all the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from savable_pipeline.blend import Blend
from savable_pipeline.blend_order import integer_weights
from savable_pipeline.lane import Lane
from savable_pipeline.reader import TarShardReader
from savable_pipeline.stage import Stage


class _How(msgspec.Struct, frozen=True):
    """The settings that all readers of a mixture have in common."""

    shuffle: bool
    block_size: int
    window: int | None
    cache: str | os.PathLike[str] | None
    cache_bytes: int | None


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One dataset: where its shards lie, how often it comes, and what is taken of it."""

    path: str | list[str]
    weight: int | float | str | None = None
    repetitions: int | None = None
    split: str | None = None
    subset: int | float | tuple[float, float] | None = None

    def _stage(self, lane: Lane, how: _How, stride: int) -> Stage:
        return TarShardReader(
            self.path,
            lane,
            epochs=self.repetitions,
            split=self.split,
            subset=self.subset,
            **msgspec.structs.asdict(how),
        )


class Mixture(msgspec.Struct, frozen=True):
    """Datasets and mixtures by name, side by side."""

    sources: dict[str, Source | Mixture]
    weight: int | float | str | None = None

    def samples(
        self,
        lane: Lane,
        *,
        shuffle: bool = True,
        block_size: int = 8,
        window: int | None = 128,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        stride: int = 8,
    ) -> Stage:
        """A `Blend` of the readers of all the datasets, each made with these settings of `TarShardReader`."""
        return self._stage(lane, _How(shuffle, block_size, window, cache, cache_bytes), stride)

    def _stage(self, lane: Lane, how: _How, stride: int) -> Stage:
        stages = {name: source._stage(lane, how, stride) for name, source in self.sources.items()}
        weights = {
            name: source.repetitions * stages[name].population
            if isinstance(source, Source) and source.repetitions
            else source.weight or 1
            for name, source in self.sources.items()
        }
        return Blend(stages, weights=weights, stride=stride)


def read_mixture(path: str | os.PathLike[str]) -> Mixture:
    """The mixture in a YAML file. Raises ValueError that names file and line where it is not as it should be."""
    import yaml  # type: ignore[import-untyped]  # here, so that workers need not import it

    file = Path(path)
    loader = yaml.SafeLoader(file.read_text())
    try:
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _wrong(file, mark.line + 1 if mark else 1, str(getattr(error, "problem", error))) from error
    finally:
        loader.dispose()
    return _mixture(_Entry(file, node, value, 1), top=True)


class _Entry:
    """A mapping in the file, and the line of each of its keys."""

    def __init__(self, file: Path, node: Any, value: Any, line: int) -> None:
        self.file = file
        self.line = line
        if not isinstance(value, dict):
            raise self.wrong(f"a mapping is expected here, not {value!r}")
        self.value: dict[Any, Any] = value
        self._nodes: dict[Any, tuple[int, Any]] = {}
        for key, inner in node.value:
            name, at = key.value, key.start_mark.line + 1
            if name in self._nodes:
                raise self.wrong(f"{name!r} is there twice, first in line {self._nodes[name][0]}", at)
            self._nodes[name] = at, inner

    def line_of(self, name: str) -> int:
        """The line of a key; that of the mapping if there is no such key."""
        return self._nodes[name][0] if name in self._nodes else self.line

    def entries(self) -> Iterator[tuple[str, _Entry]]:
        """The mappings in this one, by name."""
        for name, value in self.value.items():
            line, node = self._nodes.get(str(name), (self.line, None))
            yield str(name), _Entry(self.file, node, value, line)

    def inner(self, name: str) -> _Entry:
        """The mapping under a key."""
        return _Entry(self.file, self._nodes[name][1], self.value[name], self.line_of(name))

    def wrong(self, what: str, line: int | None = None) -> ValueError:
        """The error that says what is wrong in a line."""
        return _wrong(self.file, line or self.line, what)


def _mixture(entry: _Entry, *, top: bool = False) -> Mixture:
    for name in entry.value:
        if name != "sources" and (top or name != "weight"):
            raise entry.wrong(f"{name!r} is unknown here; there is `sources`", entry.line_of(str(name)))
    if not entry.value.get("sources"):
        raise entry.wrong("a mixture has `sources`, one at least, each with a name")
    sources: dict[str, Source | Mixture] = {}
    inside = entry.inner("sources")
    for name, each in inside.entries():
        if set("/#") & set(name):
            raise each.wrong(f"the name of a source has no / and no #: {name!r}")
        sources[name] = _mixture(each) if "sources" in each.value else _source(each)
    repeated = {name for name, source in sources.items() if isinstance(source, Source) and source.repetitions}
    for name, each in inside.entries():
        if repeated and name not in repeated:
            raise each.wrong(f"{name!r} has no `repetitions`, but {min(repeated)!r} beside it has: all have, or none")
        if not repeated:
            _check_weight(name, sources[name].weight, each)
    return Mixture(sources, entry.value.get("weight"))


def _source(entry: _Entry) -> Source:
    try:
        source = msgspec.convert(entry.value, Source)
    except msgspec.ValidationError as error:
        named = re.search(r"`\$\.(\w+)|field `(\w+)`", str(error))
        line = entry.line_of(named[1] or named[2]) if named else None
        raise entry.wrong(str(error).replace("Object", "a source"), line) from error
    if source.repetitions is not None and (source.repetitions < 1 or source.weight is not None):
        what = "`repetitions` is at least 1, and there is no `weight` beside it"
        raise entry.wrong(what, entry.line_of("repetitions"))
    folder = entry.file.absolute().parent
    path = (
        _resolved(folder, source.path) if isinstance(source.path, str) else [_resolved(folder, p) for p in source.path]
    )
    return msgspec.structs.replace(source, path=path)


def _check_weight(name: str, weight: Any, entry: _Entry) -> None:
    if weight is None:
        raise entry.wrong(f"{name!r} has neither `weight` nor `repetitions`")
    try:
        integer_weights({name: weight})
    except ValueError as error:
        raise entry.wrong(str(error), entry.line_of("weight")) from error


def _resolved(folder: Path, path: str) -> str:
    return path if "://" in path else str(folder / path)


def _wrong(file: Path, line: int, what: str) -> ValueError:
    return ValueError(f"{file}, line {line}: {what}")
