"""What Megatron-Energon keeps beside the shards: counts, splits, and names for the parts. Read, and never run.

    .nv-meta/.info.json  or .info.yaml    shard_counts: {name: samples}
    .nv-meta/split.yaml  or split.json    split_parts: {"train": [name or brace pattern, ...]}
                                          exclude: [shard, or "shard/key", or brace patterns of these]
    .nv-meta/dataset.yaml                 field_map: {"image": "jpg,png", "caption": "json[caption]"}

Modules, classes and loaders that `dataset.yaml` names are left alone. Files that somebody else wrote can hold
anything: a wrong one is a `ShardError` that names it, and no small file becomes a large object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]

from savable_pipeline.errors import ShardError
from savable_pipeline.shard_paths import expand_braces, is_inside

META = ".nv-meta"
FieldPath: TypeAlias = tuple[str, ...]  # an extension, then keys and indices inside of what it holds
FieldMap: TypeAlias = dict[str, list[FieldPath]]  # by name: alternatives, of which the first that is there holds

_INFOS = (".info.json", ".info.yaml")
_SPLITS = ("split.yaml", "split.json")
_LIMIT = 1 << 28  # bytes of one of these files
_DEEPEST = 20
_SHOWN = 5  # names told before the rest is counted
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """The shards of a split, and what is left out of them: whole shards are gone already, samples by shard and key.

    `unknown` is what `exclude` names besides: shards, or samples of shards, that the dataset has not.
    """

    shards: list[str]
    excluded: dict[str, set[str]]
    unknown: list[str]


def read_counts(root: Path) -> dict[str, int] | None:
    """Samples by shard as `.info.json` or `.info.yaml` has it; None where there is neither. Raises `ShardError`."""
    path = _first(root, _INFOS)
    if path is None:
        return None
    counts = _convert(path, _load(path).get("shard_counts"), dict[str, int], "`shard_counts`, samples by shard")
    outside = next((name for name in counts if not is_inside(name)), None)
    if outside is not None:
        raise ShardError(f"{path}: the shard {outside!r} lies outside of the dataset; name shards relative to {root}")
    return counts


def split_names(root: Path) -> list[str]:
    """The splits that a dataset has. Raises `ShardError`."""
    path = _first(root, _SPLITS)
    return [] if path is None else list(_split_parts(path, _load(path)))


def read_split(root: Path, name: str, known: Iterable[str]) -> Split:
    """The split `name`, of a dataset whose shards are `known`. Raises `ShardError`, also for shards that are not."""
    path = _first(root, _SPLITS)
    if path is None:
        raise ShardError(f"{root / META}: no split.yaml or split.json, but split={name!r} was asked for")
    loaded = _load(path)
    parts = _split_parts(path, loaded)
    if name not in parts:
        raise ShardError(f"{path}: no split {name!r}; there are {', '.join(map(repr, parts)) or 'none'}")
    shards = set(known)
    patterns = _convert(path, parts[name], list[str], f"a list of shards as split {name!r}")
    excludes = _convert(path, loaded.get("exclude") or [], list[str], "a list as `exclude`")
    named = dict.fromkeys(_expand(path, patterns))
    missing = [shard for shard in named if shard not in shards]
    if missing:
        raise ShardError(f"{path}: split {name!r} names {len(missing)} shards that are not there, such as {missing[0]}")
    left_out = set(_expand(path, excludes))
    excluded: dict[str, set[str]] = {}
    unknown = []
    for entry in sorted(left_out - shards):
        shard, key = _shard_and_key(entry, shards)
        if not shard:
            unknown.append(entry)
        elif shard in named:
            excluded.setdefault(shard, set()).add(key)
    return Split([shard for shard in named if shard not in left_out], excluded, unknown)


def read_field_map(root: Path) -> FieldMap:
    """What `dataset.yaml` calls the parts; nothing where there is none. Raises `ShardError`."""
    path = root / META / "dataset.yaml"
    if not path.is_file():
        return {}
    field_map = _load(path).get("field_map") or {}
    fields = _convert(path, field_map, dict[str, str], "`field_map`, a part for each field")
    return {field: [_field_path(path, option) for option in place.split(",")] for field, place in fields.items()}


def _field_path(path: Path, place: str) -> FieldPath:
    match = _FIELD.fullmatch(place.strip())
    if match is None:
        raise ShardError(f"{path}: `field_map` has {place!r}; expected a part, such as jpg, or json[caption]")
    return (match[1], *re.findall(r"\[([^\[\]]+)\]", match[2]))


def listed(names: Iterable[str]) -> str:
    """The first names of some, and how many there are besides."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _shard_and_key(entry: str, shards: set[str]) -> tuple[str, str]:
    """`"a/0.tar/folder/key"` taken apart: shards and keys may hold slashes."""
    for slash in re.finditer("/", entry):
        if entry[: slash.start()] in shards:
            return entry[: slash.start()], entry[slash.end() :]
    return "", entry  # of a shard that is not there


def _expand(path: Path, patterns: list[str]) -> Iterator[str]:
    for pattern in patterns:
        try:
            yield from expand_braces(pattern)
        except ShardError as error:
            raise ShardError(f"{path}: {error}") from error


def _first(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / META / name for name in names if (root / META / name).is_file()), None)


def _yaml(raw: bytes) -> Any:
    """Plain values of YAML that is not deep and has no aliases, which make a large object of a small file.

    Both are looked for first, token by token: the fast loader overflows the stack of the process at some depth.
    """
    depth = 0
    for event in yaml.parse(raw, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{event.start_mark}: values deeper than {_DEEPEST}, or an alias")
    return yaml.load(raw, _LOADER)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LIMIT:
            raise ShardError(f"{path}: {path.stat().st_size} bytes; at most {_LIMIT} are read")
        raw = path.read_bytes()
        loaded = msgspec.json.decode(raw) if path.suffix == ".json" else _yaml(raw)
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ShardError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ShardError(f"{path}: expected names with values, found {type(loaded).__name__}")
    return loaded


def _split_parts(path: Path, loaded: dict[str, Any]) -> dict[str, Any]:
    parts = loaded.get("split_parts")
    if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
        raise ShardError(f"{path}: expected `split_parts` with a list of shards for each split")
    return parts


def _convert(path: Path, value: Any, kind: type[T], expected: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ShardError(f"{path}: expected {expected}: {error}") from error
