"""`read_mixture`: datasets to blend, and their weights, from a YAML file.

    sources:
      web:
        path: shards/web                 # what TarShardReader takes; relative to this file
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

`weight` is a source's proportion among its neighbours, which are the sources in the same `sources`. A source with a
weight repeats forever. `repetitions` is a number of epochs, which may be a fraction. The proportions then follow from
the sizes, so that sources end at about the same time. Neighbours all have a `weight`, or all have `repetitions`, or
none has either. In the last case they repeat forever, and their weights are their sizes, or those of a `schedule` next
to `sources`. A weight or repetitions of 0 turn a source off.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from savable_pipeline.core.weights import exact_weight
from savable_pipeline.stages.blending.mixture import Mixture, MixtureSource
from savable_pipeline.stages.blending.schedule import Schedule

_HUGE_POWER = re.compile(r"[eE][-+]?[0-9_]{4,}")  # a number whose power of ten has at least four digits
_MOST_VALUES = 100_000  # most values in a YAML file, where each use of an alias counts
_MOST_BYTES = 1 << 22  # most bytes of a YAML file
_CLASSES = ("Metadataset", "MetadatasetV2")  # class names in Megatron-Energon
# key of each kind of blend in a metadataset, and key of each dataset's proportion in it
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
_NESTED_SUFFIXES = (".yaml", ".yml", ".json")  # of files that are nested metadatasets
_MAX_NESTING = 20  # most levels of nested metadatasets
# Keys of a dataset that could change its samples, and the only value that is accepted, because it changes nothing.
_ONLY_VALUES = {"dataset_config": "dataset.yaml", "split_config": "split.yaml"}
_SHUFFLE_MULTIPLIER = "shuffle_over_epochs_multiplier"
_REJECTED = {
    "join": "datasets are not joined here: by custom.Join, or as there by savable_pipeline.energon.get_train_dataset",
    "joiner": "datasets are not joined here: by custom.Join, or as there by savable_pipeline.energon.get_train_dataset",
    "aux": "there is no auxiliary data here: savable_pipeline.energon.get_train_dataset reads it",
    "subset": "a range of consecutive samples there; `subset` of a mixture's own file chooses from every shard, so it "
    "would be other samples: leave it out, or write a mixture",
}
_DATASET_KEYS = {"path", "split_part", "subflavor", "subflavors", _SHUFFLE_MULTIPLIER, *_ONLY_VALUES}


def read_mixture(path: str | os.PathLike[str], *, split: str | None = None) -> Mixture:
    """Read a mixture from a YAML file. Paths in it are relative to the file's folder.

    A source has a `path`, which is anything that `TarShardReader` takes, a `weight` or `repetitions` (epochs), and
    optionally a `split` and a `subset`. Or it is a mixture with its own `sources`. The sources of a mixture all have a
    `weight` (a proportion; they repeat forever), or all have `repetitions` (they end at about the same time), or all
    have neither. In the last case, their weights are their sizes, or those of the `schedule` next to `sources`. A
    schedule has `points`, each with a count `at` and `weights`, and a `shape`, as in `Schedule`. `tags` may be any
    values; `Mixture.tags` returns them.

    A metadataset of Megatron-Energon, version 1 or 2, is a mixture too. A source is named by its folder, and its
    subflavors are its tags; `blend_epochized` sets repetitions.

    Args:
        path: The YAML file.
        split: The split to read. Required for a metadataset, and not allowed otherwise. Default: None.

    Returns:
        The mixture, whose `samples(lane)` is the first stage of a pipeline.

    Raises:
        ValueError: The file is not a valid mixture, or has unsupported settings; the error names file and line.
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
    if {"__class__", "__module__", "splits"} & entry.value.keys():  # a metadataset
        content = _MetadatasetReader([entry.file]).split_of(entry, split, {})
        return Mixture({_name_of(content): content}) if isinstance(content, MixtureSource) else content
    if split is not None:
        raise entry.error(f"split={split!r} is for a metadataset. Write `split` in each source instead.")
    return _mixture(entry, top=True)


def _mixture(entry: YamlEntry, *, top: bool = False) -> Mixture:
    """Return the mixture of a mapping with `sources`. `top` is False for an inner one, which may have a `weight`."""
    for name in entry.value:
        if name not in ("sources", "schedule") and (top or name != "weight"):
            raise entry.error(f"unknown key {name!r}. Use `sources` or `schedule`.", entry.line_of(str(name)))
    if not entry.value.get("sources"):
        raise entry.error("add `sources` with at least one named source.")
    sources: dict[str, MixtureSource | Mixture] = {}
    neighbours = entry.inner("sources")
    for name, source in neighbours.entries():
        if set("/#") & set(name):
            raise source.error(f"the name of a source must not contain / or #: {name!r}")
        sources[name] = _mixture(source) if "sources" in source.value else _source(source)
    _check_shares(sources, dict(neighbours.entries()))
    schedule = _schedule(entry.inner("schedule"), sources) if "schedule" in entry.value else None
    return Mixture(sources, entry.value.get("weight"), schedule)


def _schedule(entry: YamlEntry, sources: dict[str, MixtureSource | Mixture]) -> Schedule:
    """Return the schedule of neighbouring sources. Raises ValueError if one has a weight or repetitions of its own."""
    for name in entry.value:
        if name not in ("points", "shape"):
            raise entry.error_at(str(name), f"unknown key {name!r}. Use `points` or `shape` (step or linear).")
    if "points" not in entry.value:
        raise entry.error("add `points` with `at` and `weights` to the schedule.")
    for name, source in sources.items():
        if source.weight is not None or (isinstance(source, MixtureSource) and source.repetitions is not None):
            raise entry.error(f"the schedule sets the weight of {name!r}. Remove the one of the source.")
    points = []
    for point in entry.items("points"):
        if point.value.keys() != {"at", "weights"}:
            raise point.error(f"a point has `at` and `weights`, not {', '.join(map(str, point.value))}.")
        weights = point.inner("weights")
        for name, weight in weights.value.items():
            if name not in sources:
                raise weights.error_at(
                    str(name), f"no source is called {name!r}. The sources are {', '.join(sources)}."
                )
            _check_weight(name, weight, weights, key=name)
        points.append((point.value["at"], weights.value))
    try:
        schedule = Schedule(points, shape=entry.value.get("shape", "step"))
    except ValueError as error:
        raise entry.error(str(error)) from error
    if absent := sources.keys() - schedule.names:
        raise entry.error(f"no point has a weight for {min(absent)!r}. Add one, or remove the source.")
    return schedule


def _check_shares(sources: dict[str, MixtureSource | Mixture], entries: dict[str, YamlEntry]) -> None:
    """Raise ValueError unless all sources have a weight, all have repetitions, or none has either.

    Raises ValueError, too, if all of them are 0.
    """
    repeated = {
        name for name, each in sources.items() if isinstance(each, MixtureSource) and each.repetitions is not None
    }
    weighted = {name for name, each in sources.items() if each.weight is not None}
    for kind, named in [("repetitions", repeated), ("weight", weighted)]:
        for name, entry in entries.items():
            if named and name not in named:
                raise entry.error(f"{name!r} has no `{kind}`, but {min(named)!r} has. Set it in all, or in none.")
    for name in weighted:
        _check_weight(name, sources[name].weight, entries[name])
    if not any(_is_on(source) for source in sources.values()):
        raise next(iter(entries.values())).error("all weights are 0. Set one above 0.")


def _is_on(source: MixtureSource | Mixture) -> bool:
    """Return whether the weight or repetitions of a source are above 0 or not set."""
    if isinstance(source, MixtureSource) and source.repetitions is not None:
        return source.repetitions > 0
    return source.weight is None or exact_weight("", source.weight) > 0


def _source(entry: YamlEntry) -> MixtureSource:
    """Return the source of a mapping with a `path`."""
    try:
        source = msgspec.convert(entry.value, MixtureSource)
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.(\w+)|field `(\w+)`", str(error))
        line = entry.line_of(field[1] or field[2]) if field else None
        raise entry.error(str(error).replace("Object", "a source"), line) from error
    if source.repetitions is not None and not (0 <= source.repetitions < float("inf") and source.weight is None):
        message = "`repetitions` is at least 0, and there is no `weight` beside it"
        raise entry.error(message, entry.line_of("repetitions"))
    paths = source.path
    resolved = entry.resolved(paths) if isinstance(paths, str) else [entry.resolved(path) for path in paths]
    return msgspec.structs.replace(source, path=resolved)


def _check_weight(name: str, weight: Any, entry: YamlEntry, *, key: str = "weight") -> None:
    """Raise ValueError, with the line of `key`, for an invalid weight."""
    try:
        if isinstance(weight, str) and _HUGE_POWER.search(weight):
            raise ValueError(f"the weight of {name!r} is too large: {weight[:100]!r}")
        exact_weight(name, weight)
    except ValueError as error:
        raise entry.error(str(error), entry.line_of(key)) from error


class _MetadatasetReader:
    """Reader of a metadataset of Megatron-Energon, version 1 or 2. `files` are the outer files, and its own one last.

        __module__: megatron.energon
        __class__: MetadatasetV2           # version 1: Metadataset, with `datasets` instead of `blend`
        splits:
          train:
            blend:                         # or `blend_epochized` with `repetitions`, or only a `path`
              - {path: ./coco, weight: 5, subflavors: {kind: photo}}
              - {path: ./coyo, weight: 2, split_part: val}
              - {path: ./other.yaml}       # another metadataset

    The split of a dataset is its `split_part`, or else the requested split. `shuffle_over_epochs_multiplier` is
    ignored: each sample comes once per epoch, which is one of the orders that a larger multiplier allows. Settings that
    a mixture cannot follow, such as `join` or a consecutive `subset`, raise ValueError, so that no other data is read
    unnoticed.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def split_of(self, entry: YamlEntry, split: str | None, tags: dict[str, Any]) -> MixtureSource | Mixture:
        """Return the sources of a split. `tags` are those of the outer metadataset."""
        _check_class(entry)
        splits = entry.inner("splits")
        known = ", ".join(map(str, splits.value))
        if split is None:
            raise splits.error(f"choose a split of the metadataset: split= one of {known}.")
        if split not in splits.value:
            raise splits.error(f"no split is called {split!r}. Use one of {known}.")
        chosen = splits.inner(split)
        kind = next((kind for kind in _BLENDS if kind in chosen.value), None)
        if kind is None:  # the split is a single dataset
            return self._dataset(chosen, split, tags, "weight")
        _check_keys(chosen, {kind})
        return self._blend(chosen, kind, split, tags)

    def _blend(self, entry: YamlEntry, kind: str, split: str, tags: dict[str, Any]) -> Mixture:
        """Return the mixture of the datasets under the key `kind`, with their weights or repetitions."""
        share_key = _BLENDS[kind]
        sources: dict[str, MixtureSource | Mixture] = {}
        for each in entry.items(kind):
            share = _share_of(each, share_key)
            dataset = self._dataset(each, split, tags, share_key)
            for name, source in _sources_of(dataset, share_key, share, each):
                sources[_free_name(name, sources)] = source
        if not any(getattr(source, share_key, None) for source in sources.values()):
            raise entry.error_at(kind, f"each `{share_key}` is 0. Set one above 0.")
        return Mixture(sources)

    def _dataset(self, entry: YamlEntry, split: str, tags: dict[str, Any], share_key: str) -> MixtureSource | Mixture:
        """Return the dataset, or the split of another metadataset, that an entry names."""
        _check_keys(entry, {*_DATASET_KEYS, share_key})
        path = entry.value.get("path")
        if not isinstance(path, str):
            raise entry.error("add a `path` to the dataset.")
        split = entry.value.get("split_part") or split
        if not isinstance(split, str):
            raise entry.error_at("split_part", f"`split_part` must be a name, not {split!r}.")
        tags = {**_tags_of(entry), **tags}
        resolved = entry.resolved(path)
        if path.endswith(_NESTED_SUFFIXES) or ("://" not in path and Path(resolved).is_file()):
            return self._nested(entry, resolved, split, tags)
        if path.startswith("msc://"):
            raise entry.error_at("path", f"{path}: use the URL of the bucket (s3, gs, az, https).")
        return MixtureSource(resolved, split=split, tags=tags)

    def _nested(self, entry: YamlEntry, path: str, split: str, tags: dict[str, Any]) -> MixtureSource | Mixture:
        """Return the sources of a split of the metadataset at `path`."""
        file = Path(path)
        if "://" in path:
            raise entry.error_at("path", f"{path}: remote metadatasets are not supported. Copy it beside this one.")
        if file.suffix not in _NESTED_SUFFIXES:  # any other local file, such as one shard
            raise entry.error_at(
                "path", f"{path} is a file. Name a folder of shards or a metadataset, or convert it first."
            )
        if file in self._files or len(self._files) > _MAX_NESTING:
            raise entry.error_at(
                "path", f"{path}: this metadataset includes itself, or is more than {_MAX_NESTING} deep. Flatten it."
            )
        try:
            inner = read_yaml(file)
        except OSError as error:
            raise entry.error_at("path", f"{path}: {error.strerror}") from error
        return _MetadatasetReader([*self._files, file]).split_of(inner, split, tags)


def _check_class(entry: YamlEntry) -> None:
    """Raise ValueError if a file is not a metadataset of a supported version."""
    module, name = entry.value.get("__module__", "megatron.energon"), entry.value.get("__class__", _CLASSES[0])
    if not str(module).startswith("megatron.energon") or name not in _CLASSES:
        raise entry.error_at("__class__", f"{module}.{name} is not supported. Use {' or '.join(_CLASSES)}.")
    for key in entry.value:
        if key not in ("__module__", "__class__", "splits"):
            raise entry.error_at(str(key), f"unknown key `{key}` of a metadataset. Remove it.")
    if "splits" not in entry.value:
        raise entry.error("add `splits` to the metadataset.")


def _check_keys(entry: YamlEntry, known: set[str]) -> None:
    """Raise ValueError for a key that is unknown or unsupported, or has an unsupported value."""
    for key, value in entry.value.items():
        if key in _REJECTED and value is not None:
            raise entry.error_at(key, f"`{key}`: {_REJECTED[key]}")
        if key not in known and key not in _REJECTED:
            raise entry.error_at(str(key), f"`{key}` is not known here")
        if key in _ONLY_VALUES and value not in (_ONLY_VALUES[key], None):
            raise entry.error_at(key, f"`{key}: {value}` is not supported. Use {_ONLY_VALUES[key]!r}.")
        if key == _SHUFFLE_MULTIPLIER and (type(value) is not int or value < 1) and value != -1:
            raise entry.error_at(key, f"`{key}: {value}` is not supported. Use `shuffle=`, which is for all sources.")


def _share_of(entry: YamlEntry, share_key: str) -> int | float:
    """Return the weight or the repetitions of an entry, as `share_key` says. Default: 1."""
    value = entry.value.get(share_key, 1)
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{share_key}` must be a number, not {value!r}")
        exact_weight(str(entry.value.get("path")), value)
    except ValueError as error:
        raise entry.error_at(share_key, str(error)) from error
    return value


def _tags_of(entry: YamlEntry) -> dict[str, Any]:
    """Return the tags of an entry's samples, which the file calls `subflavors`.

    An entry of version 1 may have a single `subflavor` without a name. It becomes the tag `__subflavor__`.
    """
    single = entry.value.get("subflavor")
    tags = {} if single is None else {"__subflavor__": single}
    own = entry.value.get("subflavors") or {}
    if not isinstance(own, dict):
        raise entry.error_at("subflavors", f"`subflavors` must be a mapping, not {own!r}.")
    return {**tags, **{str(name): value for name, value in own.items()}}


def _sources_of(
    content: MixtureSource | Mixture, share_key: str, share: int | float, entry: YamlEntry
) -> list[tuple[str, MixtureSource | Mixture]]:
    """Return (name, source) for each source that an entry adds to the surrounding blend.

    `share` is the weight or the repetitions of the entry, as `share_key` says. The proportions within a nested
    metadataset stay the same.
    """
    if isinstance(content, MixtureSource):
        return [(_name_of(content), _with_share(content, share_key, share))]
    has_repetitions = any(getattr(source, "repetitions", None) is not None for source in content.sources.values())
    if has_repetitions is not (share_key == "repetitions"):
        raise entry.error_at("path", "use weights in both of the nested blends, or repetitions in both.")
    name = _base_name(str(entry.value["path"]))
    if share_key == "weight":
        return [(name, Mixture(content.sources, share))]
    inner = {name: source for name, source in content.sources.items() if isinstance(source, MixtureSource)}
    return [
        (f"{name}.{inner_name}", _with_share(source, share_key, _product(share, source.repetitions or 0)))
        for inner_name, source in inner.items()
    ]


def _with_share(source: MixtureSource, share_key: str, share: int | float) -> MixtureSource:
    weight, repetitions = (share, None) if share_key == "weight" else (None, share)
    return MixtureSource(source.path, weight, repetitions, source.split, tags=source.tags)


def _product(a: int | float, b: int | float) -> int | float:
    """Return the product of two decimal numbers without the rounding errors of floats."""
    exact = Fraction(str(a)) * Fraction(str(b))
    return int(exact) if exact.denominator == 1 else float(exact)


def _name_of(source: MixtureSource) -> str:
    assert isinstance(source.path, str)
    return _base_name(source.path)


def _base_name(path: str) -> str:
    """Return the last part of a path, without `.yaml`.

    The order depends on the names of sources, so moving a folder to another parent does not change it.
    """
    name = path.rstrip("/").rsplit("/", 1)[-1].replace("#", "_")
    return name.rsplit(".", 1)[0] if name.endswith(_NESTED_SUFFIXES) else name or "data"


def _free_name(name: str, taken: dict[str, Any]) -> str:
    """Return the name, with a number appended if it is in `taken`."""
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


class YamlEntry:
    """Mapping `value` in an untrusted YAML file, with the line of each key for errors."""

    def __init__(self, file: Path, node: Any, value: Any, line: int) -> None:
        self.file = file
        self.line = line
        if not isinstance(value, dict):
            raise self.error(f"expected a mapping, not {reprlib.repr(value)}.")
        self.value: dict[Any, Any] = value
        self._nodes: dict[Any, tuple[int, Any]] = {}  # line of each key, and the YAML node of its value
        for key, inner in node.value:
            name, line = key.value, key.start_mark.line + 1
            if name in self._nodes:
                raise self.error(f"{name!r} is a repeated key, first in line {self.line_of(name)}. Remove one.", line)
            self._nodes[name] = line, inner

    def line_of(self, name: str) -> int:
        """Return the line of a key, or the line of the mapping if there is no such key."""
        return self._nodes[name][0] if name in self._nodes else self.line

    def entries(self) -> Iterator[tuple[str, YamlEntry]]:
        """Yield the mappings in this one, by name."""
        for name, value in self.value.items():
            if str(name) not in self._nodes:
                raise self.error(f"the name {name!r} is not a string. Write it in quotes.")
            line, node = self._nodes[str(name)]
            yield str(name), YamlEntry(self.file, node, value, line)

    def inner(self, name: str) -> YamlEntry:
        """Return the mapping under a key."""
        return YamlEntry(self.file, self._nodes[name][1], self.value[name], self.line_of(name))

    def items(self, name: str) -> list[YamlEntry]:
        """Return the list of mappings under a key.

        Raises ValueError if it is not a list, or empty.
        """
        value, (line, node) = self.value[name], self._nodes[name]
        if not isinstance(value, list) or not value:
            raise self.error(f"`{name}` must be a list of mappings, not {reprlib.repr(value)}.", line)
        pairs = zip(node.value, value, strict=True)
        return [YamlEntry(self.file, each, inner, each.start_mark.line + 1) for each, inner in pairs]

    def error(self, message: str, line: int | None = None) -> ValueError:
        """Return an error with this message, the file and a line.

        The default is the line of this mapping.
        """
        return _error(self.file, line or self.line, message)

    def error_at(self, name: str, message: str) -> ValueError:
        """Return an error with this message, the file and the line of a key."""
        return self.error(message, self.line_of(name))

    def resolved(self, path: str) -> str:
        """Return a path in the file as absolute. It may be relative to the file's folder."""
        return path if "://" in path else str(self.file.absolute().parent / path)


def read_yaml(file: Path) -> YamlEntry:
    """Return the mapping in a file.

    Raises ValueError with file and line if the file is not a valid mapping.
    """
    import yaml  # type: ignore[import-untyped]  # imported late, because workers do not need it

    from savable_pipeline.data.shards.yaml_limits import check_yaml, construct_yaml_value

    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes, more than the {_MOST_BYTES:,} of a mixture. Shorten it."
        )
    raw = file.read_bytes()
    try:
        check_yaml(raw, aliases=True, most=_MOST_VALUES, loader=yaml.SafeLoader)
        loader = yaml.SafeLoader(raw)
        try:
            node = loader.get_single_node()
            value = None if node is None else construct_yaml_value(lambda: loader.construct_document(node))
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise _error(file, mark.line + 1 if mark else 1, str(getattr(error, "problem", error))) from error
    return YamlEntry(file, node, value, 1)


def _error(file: Path, line: int, message: str) -> ValueError:
    return ValueError(f"{file}, line {line}: {message}")
