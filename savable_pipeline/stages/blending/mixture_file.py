"""`read_mixture`: reads the datasets to blend, and their weights, from a YAML file.

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

or, with weights that change during the run:

    schedule:
      shape: linear                      # or step
      points:
        - {at: 0, weights: {web: 8, books: 2}}
        - {at: 1_000_000, weights: {web: 4, books: 6}}
    sources:
      web: {path: shards/web}
      books: {path: shards/books}

`weight` is a source's share among those beside it; the source repeats for ever. `repetitions` is a number of epochs,
whole or not; the shares then follow from the sizes, so that sources end at about the same time. Sources side by side
all have a `weight`, or all have `repetitions`, or none has either: then they repeat for ever, and their sizes are the
weights, or a `schedule` beside `sources` has them. A weight or repetitions of 0 turn a source off.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from savable_pipeline.core.weights import exact_weight
from savable_pipeline.stages.blending.energon_mixture import is_metadataset, read_metadataset
from savable_pipeline.stages.blending.mixture import Mixture, MixtureSource
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.blending.yaml_entries import YamlEntry, read_yaml

_HUGE_POWER = re.compile(r"[eE][-+]?[0-9_]{4,}")  # of ten, in a weight that is a text


def read_mixture(path: str | os.PathLike[str], *, split: str | None = None) -> Mixture:
    """Read a mixture from a YAML file; paths in it are relative to the file's folder.

    A source has a `path` as `TarShardReader` takes it, a `weight` or `repetitions` (epochs), and may have a `split` and
    a `subset`; or it is a mixture with `sources` of its own. Neighbouring sources all have a `weight` (a share; they
    repeat for ever), or all have `repetitions` (they end at about the same time), or have neither: then they come by
    their sizes, or by the `schedule` beside `sources`: `points`, each with a count `at` and `weights`, and a `shape`,
    as of `Schedule`. `tags` are your own, for `Mixture.tags`.

    A metadataset of Megatron-Energon, version 1 or 2, is a mixture too. A source has the name of its folder, and its
    subflavors as tags; `blend_epochized` sets repetitions, which end.

    Args:
        path: The YAML file.
        split: The split of a metadataset to read; it needs one.

    Returns:
        The mixture, whose `samples(lane)` is the first stage of a pipeline.

    Raises:
        ValueError: The file is no valid mixture, or has what cannot be kept; it names file and line.
        OSError: The file cannot be read.

    Example:
        >>> _ = Path("mixture.yaml").write_text('''
        ... sources:
        ...   web: {path: shards/0.tar, weight: 3}
        ...   books: {path: shards/1.tar, weight: 1}
        ... ''')
        >>> samples = custom.read_mixture("mixture.yaml").samples(sp.Lane(seed=7))
        >>> [next(samples).shard for _ in range(8)].count("0.tar")
        6
    """
    entry = read_yaml(Path(path))
    if is_metadataset(entry):
        return read_metadataset(entry, split)
    if split is not None:
        raise entry.wrong(f"split={split!r} is for a metadataset; here each source may name its own `split`")
    return _mixture(entry, top=True)


def _mixture(entry: YamlEntry, *, top: bool = False) -> Mixture:
    for name in entry.value:
        if name not in ("sources", "schedule") and (top or name != "weight"):
            raise entry.wrong(f"{name!r} is unknown here; there is `sources`, and `schedule`", entry.line_of(str(name)))
    if not entry.value.get("sources"):
        raise entry.wrong("a mixture has `sources`, one at least, each with a name")
    sources: dict[str, MixtureSource | Mixture] = {}
    inside = entry.inner("sources")
    for name, each in inside.entries():
        if set("/#") & set(name):
            raise each.wrong(f"the name of a source has no / and no #: {name!r}")
        sources[name] = _mixture(each) if "sources" in each.value else _source(each)
    _check_shares(sources, dict(inside.entries()))
    schedule = _schedule(entry.inner("schedule"), sources) if "schedule" in entry.value else None
    return Mixture(sources, entry.value.get("weight"), schedule)


def _schedule(entry: YamlEntry, sources: dict[str, MixtureSource | Mixture]) -> Schedule:
    """The weights of some sources beside each other that have none of their own."""
    for name in entry.value:
        if name not in ("points", "shape"):
            raise entry.wrong_at(str(name), f"{name!r} is unknown here; there is `points`, and `shape`: step or linear")
    if "points" not in entry.value:
        raise entry.wrong("a schedule has `points`, each with `at` and `weights`")
    for name, source in sources.items():
        if source.weight is not None or (isinstance(source, MixtureSource) and source.repetitions is not None):
            raise entry.wrong(f"{name!r} has a weight or repetitions of its own: the schedule has the weights")
    points = []
    for point in entry.items("points"):
        if point.value.keys() != {"at", "weights"}:
            raise point.wrong(f"a point has `at` and `weights`, not {', '.join(map(str, point.value))}")
        weights = point.inner("weights")
        for name, weight in weights.value.items():
            if name not in sources:
                raise weights.wrong_at(str(name), f"{name!r} is none of the sources: {', '.join(sources)}")
            _check_weight(name, weight, weights, key=name)
        points.append((point.value["at"], weights.value))
    try:
        schedule = Schedule(points, shape=entry.value.get("shape", "step"))
    except ValueError as error:
        raise entry.wrong(str(error)) from error
    if absent := sources.keys() - schedule.names:
        raise entry.wrong(f"no point has a weight for {min(absent)!r}: add one, or leave the source out")
    return schedule


def _check_shares(sources: dict[str, MixtureSource | Mixture], entries: dict[str, YamlEntry]) -> None:
    """Raise ValueError unless all have a weight, all have repetitions, or none has either; one of them not 0."""
    repeated = {
        name for name, each in sources.items() if isinstance(each, MixtureSource) and each.repetitions is not None
    }
    weighted = {name for name, each in sources.items() if each.weight is not None}
    for kind, having in [("repetitions", repeated), ("weight", weighted)]:
        for name, entry in entries.items():
            if having and name not in having:
                raise entry.wrong(f"{name!r} has no `{kind}`, but {min(having)!r} beside it has: all have, or none")
    for name in weighted:
        _check_weight(name, sources[name].weight, entries[name])
    if not any(_is_on(source) for source in sources.values()):
        raise next(iter(entries.values())).wrong("every source beside each other is off: one at least is above 0")


def _is_on(source: MixtureSource | Mixture) -> bool:
    if isinstance(source, MixtureSource) and source.repetitions is not None:
        return source.repetitions > 0
    return source.weight is None or exact_weight("", source.weight) > 0


def _source(entry: YamlEntry) -> MixtureSource:
    try:
        source = msgspec.convert(entry.value, MixtureSource)
    except msgspec.ValidationError as error:
        named = re.search(r"`\$\.(\w+)|field `(\w+)`", str(error))
        line = entry.line_of(named[1] or named[2]) if named else None
        raise entry.wrong(str(error).replace("Object", "a source"), line) from error
    if source.repetitions is not None and not (0 <= source.repetitions < float("inf") and source.weight is None):
        message = "`repetitions` is at least 0, and there is no `weight` beside it"
        raise entry.wrong(message, entry.line_of("repetitions"))
    paths = source.path
    resolved = entry.resolved(paths) if isinstance(paths, str) else [entry.resolved(path) for path in paths]
    return msgspec.structs.replace(source, path=resolved)


def _check_weight(name: str, weight: Any, entry: YamlEntry, *, key: str = "weight") -> None:
    try:
        if isinstance(weight, str) and _HUGE_POWER.search(weight):
            raise ValueError(f"the weight of {name!r} has too large a power of ten: {weight[:100]!r}")
        exact_weight(name, weight)
    except ValueError as error:
        raise entry.wrong(str(error), entry.line_of(key)) from error
