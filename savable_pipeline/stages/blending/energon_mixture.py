"""`read_metadataset`: a metadataset of Megatron-Energon, version 1 or 2, as a `Mixture`.

    __module__: megatron.energon
    __class__: MetadatasetV2           # version 1: Metadataset, with `datasets` in the place of `blend`
    splits:
      train:
        blend:                         # or `blend_epochized` with `repetitions`, or only a `path`
          - {path: ./coco, weight: 5, subflavors: {kind: photo}}
          - {path: ./coyo, weight: 2, split_part: val}
          - {path: ./other.yaml}       # another metadataset

A dataset without a `split_part` is read in the split that is asked for. Any `shuffle_over_epochs_multiplier` is as 1,
each sample once an epoch, which is among the orders that a larger one allows. What a mixture cannot keep as it is
there, such as `join` or a consecutive `subset`, is refused with its line: other data under the same name would be
worse.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from savable_pipeline.core.weights import exact_weight
from savable_pipeline.stages.blending.mixture import Mixture, MixtureSource
from savable_pipeline.stages.blending.yaml_entries import YamlEntry, read_yaml

_CLASSES = ("Metadataset", "MetadatasetV2")
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
_NESTED = (".yaml", ".yml", ".json")
_DEEPEST = 20
# Keys of a dataset that change its samples, with the value that changes nothing.
_PLAIN = {"dataset_config": "dataset.yaml", "split_config": "split.yaml"}
_SHUFFLED = "shuffle_over_epochs_multiplier"
_REFUSED = {
    "join": "datasets are not joined here: by custom.Join, or as there by savable_pipeline.energon.get_train_dataset",
    "joiner": "datasets are not joined here: by custom.Join, or as there by savable_pipeline.energon.get_train_dataset",
    "aux": "there is no auxiliary data here: savable_pipeline.energon.get_train_dataset reads it",
    "subset": "a range of consecutive samples there; `subset` of a mixture's own file chooses from every shard, so it "
    "would be other samples: leave it out, or write a mixture",
}
_KEYS = {"path", "split_part", "subflavor", "subflavors", _SHUFFLED, *_PLAIN}


def is_metadataset(entry: YamlEntry) -> bool:
    """Whether a file is a metadataset and not a mixture."""
    return bool({"__class__", "__module__", "splits"} & entry.value.keys())


def read_metadataset(entry: YamlEntry, split: str | None) -> Mixture:
    """A split of the metadataset in a file. Raises ValueError, with file and line, for what cannot be read as it is."""
    found = _Reading([entry.file]).split_of(entry, split, {})
    return Mixture({_name_of(found): found}) if isinstance(found, MixtureSource) else found


class _Reading:
    """Reads one file; `files` are those that led to it, itself last."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def split_of(self, entry: YamlEntry, split: str | None, tags: dict[str, Any]) -> MixtureSource | Mixture:
        """A split, with these tags of the metadataset around it."""
        _check_class(entry)
        splits = entry.inner("splits")
        known = ", ".join(map(str, splits.value))
        if split is None:
            raise splits.wrong(f"a metadataset is read one split at a time: give split=, one of {known}")
        if split not in splits.value:
            raise splits.wrong(f"there is no split {split!r}; it has {known}")
        chosen = splits.inner(split)
        kinds = [kind for kind in _BLENDS if kind in chosen.value]
        if not kinds:
            return self._dataset(chosen, split, tags, "weight")
        _check_keys(chosen, {kinds[0]})
        return self._blend(chosen, kinds[0], split, tags)

    def _blend(self, entry: YamlEntry, kind: str, split: str, tags: dict[str, Any]) -> Mixture:
        share = _BLENDS[kind]
        sources: dict[str, MixtureSource | Mixture] = {}
        for each in entry.items(kind):
            number = _number(each, share)
            found = self._dataset(each, split, tags, share)
            for name, source in _shared(found, share, number, each):
                sources[_unused(name, sources)] = source
        if not any(getattr(source, share, None) for source in sources.values()):
            raise entry.wrong_at(kind, f"every `{share}` is 0: one at least is above it")
        return Mixture(sources)

    def _dataset(self, entry: YamlEntry, split: str, tags: dict[str, Any], share: str) -> MixtureSource | Mixture:
        """The dataset, or the split of another metadataset, that an entry names."""
        _check_keys(entry, {*_KEYS, share})
        path = entry.value.get("path")
        if not isinstance(path, str):
            raise entry.wrong("a dataset has a `path`")
        split = entry.value.get("split_part") or split
        if not isinstance(split, str):
            raise entry.wrong_at("split_part", f"`split_part` is a name, not {split!r}")
        tags = {**_tags_of(entry), **tags}
        resolved = entry.resolved(path)
        if path.endswith(_NESTED) or ("://" not in path and Path(resolved).is_file()):
            return self._nested(entry, resolved, split, tags)
        if path.startswith("msc://"):
            raise entry.wrong_at("path", f"{path}: name the bucket by its own URL (s3, gs, az, https)")
        return MixtureSource(resolved, split=split, tags=tags)

    def _nested(self, entry: YamlEntry, path: str, split: str, tags: dict[str, Any]) -> MixtureSource | Mixture:
        file = Path(path)
        if "://" in path:
            raise entry.wrong_at("path", f"{path}: a metadataset behind a URL is not read; copy it beside this one")
        if file.suffix not in _NESTED:
            raise entry.wrong_at("path", f"{path} is a file, not a folder of shards or a metadataset; convert it first")
        if file in self._files or len(self._files) > _DEEPEST:
            raise entry.wrong_at("path", f"{path}: a metadataset inside itself, or more than {_DEEPEST} deep")
        try:
            inner = read_yaml(file)
        except OSError as error:
            raise entry.wrong_at("path", f"{path}: {error.strerror}") from error
        return _Reading([*self._files, file]).split_of(inner, split, tags)


def _check_class(entry: YamlEntry) -> None:
    module, name = entry.value.get("__module__", "megatron.energon"), entry.value.get("__class__", _CLASSES[0])
    if not str(module).startswith("megatron.energon") or name not in _CLASSES:
        raise entry.wrong_at("__class__", f"{module}.{name} is not read; there are {' and '.join(_CLASSES)}")
    for key in entry.value:
        if key not in ("__module__", "__class__", "splits"):
            raise entry.wrong_at(str(key), f"`{key}` is not known of a metadataset")
    if "splits" not in entry.value:
        raise entry.wrong("a metadataset has `splits`")


def _check_keys(entry: YamlEntry, known: set[str]) -> None:
    """Raise ValueError for a key that is refused or not known, or has a value that is not kept."""
    for key, value in entry.value.items():
        if key in _REFUSED and value is not None:
            raise entry.wrong_at(key, f"`{key}`: {_REFUSED[key]}")
        if key not in known and key not in _REFUSED:
            raise entry.wrong_at(str(key), f"`{key}` is not known here")
        if key in _PLAIN and value not in (_PLAIN[key], None):
            raise entry.wrong_at(key, f"`{key}: {value}` is not kept: only {_PLAIN[key]!r} is read")
        if key == _SHUFFLED and (type(value) is not int or value < 1) and value != -1:
            raise entry.wrong_at(key, f"`{key}: {value}` is not kept: all sources are shuffled, or none (`shuffle=`)")


def _number(entry: YamlEntry, share: str) -> int | float:
    """The weight or the repetitions of an entry; 1 where it has none."""
    value = entry.value.get(share, 1)
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{share}` is a number, not {value!r}")
        exact_weight(str(entry.value.get("path")), value)
    except ValueError as error:
        raise entry.wrong_at(share, str(error)) from error
    return value


def _tags_of(entry: YamlEntry) -> dict[str, Any]:
    old = entry.value.get("subflavor")
    tags = {} if old is None else {"__subflavor__": old}
    own = entry.value.get("subflavors") or {}
    if not isinstance(own, dict):
        raise entry.wrong_at("subflavors", f"`subflavors` is a mapping, not {own!r}")
    return {**tags, **{str(name): value for name, value in own.items()}}


def _shared(
    found: MixtureSource | Mixture, share: str, number: int | float, entry: YamlEntry
) -> list[tuple[str, MixtureSource | Mixture]]:
    """What an entry adds to the blend around it, by name: a nested metadataset keeps the shares in it."""
    if isinstance(found, MixtureSource):
        return [(_name_of(found), _with_share(found, share, number))]
    repeated = any(getattr(source, "repetitions", None) is not None for source in found.sources.values())
    if repeated is not (share == "repetitions"):
        raise entry.wrong_at("path", "one of the two has weights and the other repetitions: they do not blend")
    name = _base_name(str(entry.value["path"]))
    if share == "weight":
        return [(name, Mixture(found.sources, number))]
    inner = [(each, source) for each, source in found.sources.items() if isinstance(source, MixtureSource)]
    return [
        (f"{name}.{each}", _with_share(source, share, _product(number, source.repetitions or 0)))
        for each, source in inner
    ]


def _with_share(source: MixtureSource, share: str, number: int | float) -> MixtureSource:
    weight, repetitions = (number, None) if share == "weight" else (None, number)
    return MixtureSource(source.path, weight, repetitions, source.split, tags=source.tags)


def _product(a: int | float, b: int | float) -> int | float:
    exact = Fraction(str(a)) * Fraction(str(b))
    return int(exact) if exact.denominator == 1 else float(exact)


def _name_of(source: MixtureSource) -> str:
    assert isinstance(source.path, str)
    return _base_name(source.path)


def _base_name(path: str) -> str:
    """The last part of a path, without `.yaml`: it goes into the keys of order, and the folder around it does not."""
    name = path.rstrip("/").rsplit("/", 1)[-1].replace("#", "_")
    return name.rsplit(".", 1)[0] if name.endswith(_NESTED) else name or "data"


def _unused(name: str, taken: dict[str, Any]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free
