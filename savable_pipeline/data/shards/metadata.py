"""Reads `.nv-meta` next to the shards: Energon's metadata, and marks of writers.

    .nv-meta/.info.json  or .info.yaml    shard_counts: {name: samples}
    .nv-meta/split.yaml  or split.json    split_parts: {"train": [name or brace pattern, ...]}
                                          exclude: [shard, or "shard/key", or brace patterns of these]
    .nv-meta/dataset.yaml                 field_map: {"image": "jpg,png", "caption": "json[caption]"}
                                          split_config, info_config: other files of `.nv-meta` than the two above
    .nv-meta/savable.convert.json         of a conversion: whether it is done
    .nv-meta/savable.writer/00003-of-00016-open            exists until the writer has finished
    .nv-meta/savable.writer/00003-of-00016-settings.json   of each part that was ever started

The modules, classes and loaders that `dataset.yaml` names are never run. The samples of a dataset with `sample_loader`
or `part_filter` have parts, but no fields. The files are not trusted: an invalid one is a `ShardError` that names it,
and a small file never becomes a large object.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.paths import expand_braces, is_inside
from savable_pipeline.errors import ShardError

META = ".nv-meta"
INDEX_NAME = f"{META}/savable.index"  # our index of tars is in the same folder
WRITTEN = f"{META}/savable.writer"  # folder in which `sp.ShardWriter` stores the rows of each shard, as `X.tar.index`
COUNT_FILES = (".info.json", ".info.yaml")
METADATA_FILES = (*COUNT_FILES, "split.yaml", "split.json", "dataset.yaml")
FieldPath: TypeAlias = tuple[str, ...]  # an extension, then keys and indices inside the part
# by field name: alternatives, of which the first that a sample has is used
FieldMap: TypeAlias = dict[str, list[FieldPath]]

_CODE = ("sample_loader", "part_filter")  # settings of dataset.yaml that are code or require it
_SPLITS, _FIELDS = METADATA_FILES[2:4], METADATA_FILES[4]
_LARGEST_FILE = 1 << 28  # most bytes of a metadata file
_LONGEST_PATTERN = 8192  # most characters of an entry of a split
_MOST_NAMES = 2_000_000  # most names that the entries of a split expand to
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
T = TypeVar("T")
CONVERTED = f"{META}/savable.convert.json"
OPEN = "open"  # suffix of a writer's mark
_PART = re.compile(r"(\d{5})-of-(\d{5})-settings\.json")
_LISTED_PARTS = 10  # most parts that a message lists


@dataclass(frozen=True, slots=True)
class Split:
    """Shards of a split without excluded ones, and keys of excluded samples.

    `unknown` are the entries of `exclude` that match no shard of the dataset.
    """

    shards: list[str]
    excluded: dict[str, set[str]]
    unknown: list[str]


def read_counts(root: Path) -> dict[str, int] | None:
    """Return the sample count by shard in `.info.json` or `.info.yaml`, or None.

    Raises `ShardError`.
    """
    if (path := _metadata_file(root, "info_config", COUNT_FILES)) is None:
        return None
    counts = _convert(path, _load(path).get("shard_counts"), dict[str, int], "`shard_counts`, samples by shard")
    outside = next((name for name in counts if not is_inside(name)), None)
    if outside is not None:
        raise ShardError(f"{path}: the shard {outside!r} is outside the dataset. Use names relative to {root}")
    return counts


def split_names(root: Path) -> list[str]:
    """Return the names of a dataset's splits. Raises `ShardError`."""
    path = _metadata_file(root, "split_config", _SPLITS)
    return [] if path is None else list(_split_parts(path, _load(path)))


def read_split(root: Path, name: str, known: Iterable[str]) -> Split:
    """Return the split `name` of a dataset with the shards `known`.

    Raises `ShardError`, also if it names an unknown shard.
    """
    if (path := _metadata_file(root, "split_config", _SPLITS)) is None:
        raise ShardError(f"{root / META}: split={name!r}, but there is no split.yaml. Leave out split=")
    loaded = _load(path)
    parts = _split_parts(path, loaded)
    if name not in parts:
        raise ShardError(f"{path}: no split {name!r}. Use one of {', '.join(map(repr, parts)) or 'none'}")
    shards = set(known)
    patterns = _convert(path, parts[name], list[str], f"a list of shards as split {name!r}")
    excludes = _convert(path, loaded.get("exclude") or [], list[str], "a list as `exclude`")
    named = dict.fromkeys(_expand(path, patterns))
    missing = [shard for shard in named if shard not in shards]
    if missing:
        raise ShardError(f"{path}: split {name!r} names {len(missing)} missing shards, such as {missing[0]}")
    excluded_shards = set(_expand(path, excludes))
    excluded: dict[str, set[str]] = {}
    unknown = []
    for entry in sorted(excluded_shards - shards):
        shard, key = _shard_and_key(entry, shards)
        if not shard:
            unknown.append(entry)
        elif shard in named:
            excluded.setdefault(shard, set()).add(key)
    return Split([shard for shard in named if shard not in excluded_shards], excluded, unknown)


def read_field_map(root: Path) -> FieldMap:
    """Return the `field_map` of `dataset.yaml`, or {}. Raises `ShardError`."""
    path, settings = root / META / _FIELDS, _settings(root)
    if unused := unused_settings(root):
        raise ShardError(
            f"{path}: only Energon applies `{unused[0]}`, so samples have no fields. Read parts, such as "
            'sample["jpg"], or write a field_map'
        )
    field_map = settings.get("field_map") or {}
    fields = _convert(path, field_map, dict[str, str], "`field_map`, a part for each field")
    return {field: [_field_path(path, option) for option in paths.split(",")] for field, paths in fields.items()}


def named_files(root: Path) -> list[str]:
    """Return the other files of `.nv-meta` that `dataset.yaml` names.

    Raises `ShardError`.
    """
    return [name for key in ("info_config", "split_config") if (name := _configured_file(root, key)) is not None]


def unused_settings(root: Path) -> list[str]:
    """Return the settings of `dataset.yaml` that are ignored because they name code.

    Raises `ShardError`.
    """
    settings = _settings(root)
    return [name for name in _CODE if settings.get(name)]


def _settings(root: Path) -> dict[str, Any]:
    path = root / META / _FIELDS
    return _load(path) if path.is_file() else {}


def _configured_file(root: Path, key: str) -> str | None:
    """Return the file of `.nv-meta` that `dataset.yaml` names as `key`, or None."""
    if (name := _settings(root).get(key)) is not None and not (isinstance(name, str) and is_inside(name)):
        raise ShardError(f"{root / META / _FIELDS}: `{key}` must be the name of a file in {META}, not {name!r}")
    return name


def _field_path(path: Path, option: str) -> FieldPath:
    if (match := _FIELD.fullmatch(option.strip())) is None:
        raise ShardError(f"{path}: `field_map` has {option!r}. Name a part, such as jpg or json[caption]")
    return (match[1], *re.findall(r"\[([^\[\]]+)\]", match[2]))


def _shard_and_key(entry: str, shards: set[str]) -> tuple[str, str]:
    """Split an entry such as `"a/0.tar/folder/key"` into shard and key, which may both have slashes."""
    for slash in re.finditer("/", entry):
        if entry[: slash.start()] in shards:
            return entry[: slash.start()], entry[slash.end() :]
    return "", entry  # the entry names an unknown shard


def _expand(path: Path, patterns: list[str]) -> Iterator[str]:
    total = 0
    for pattern in patterns:
        if len(pattern) > _LONGEST_PATTERN:
            raise ShardError(f"{path}: {pattern[:100]!r}… is longer than {_LONGEST_PATTERN} characters")
        try:
            names = expand_braces(pattern)
        except ShardError as error:
            raise ShardError(f"{path}: {error}") from error
        total += len(names)
        if total > _MOST_NAMES:
            raise ShardError(f"{path}: more than {_MOST_NAMES:,} names up to {pattern!r}. Name only existing shards")
        yield from names


def _metadata_file(root: Path, key: str, names: tuple[str, ...]) -> Path | None:
    """Return the file that `dataset.yaml` names as `key`, or the first existing one of `names`, or None."""
    if (name := _configured_file(root, key)) is not None:
        if not (root / META / name).is_file():
            raise ShardError(f"{root / META / _FIELDS}: `{key}` names {name}, which is not in {META}")
        return root / META / name
    return next((root / META / name for name in names if (root / META / name).is_file()), None)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ShardError(f"{path}: {path.stat().st_size} bytes, more than the limit of {_LARGEST_FILE}")
        raw = path.read_bytes()
        loaded = msgspec.json.decode(raw) if path.suffix == ".json" else _yaml(raw)
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ShardError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ShardError(f"{path}: expected a mapping, found {type(loaded).__name__}")
    return loaded


def _yaml(raw: bytes) -> Any:
    # imported here, because most datasets have no such file
    from savable_pipeline.data.shards.yaml_limits import load_yaml

    return load_yaml(raw)


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


class _Conversion(msgspec.Struct):
    done: bool
    source: str = ""


def unfinished(folder: Path) -> str:
    """Return why samples may be missing from a folder of shards, and what to do.

    The result is "" if all writers of the folder have finished.
    """
    return _unfinished_conversion(folder) or _unfinished_writers(folder)


def _unfinished_conversion(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, RecursionError):  # msgspec's errors are subclasses of ValueError
        found = msgspec.json.decode((folder / CONVERTED).read_bytes(), type=_Conversion)
        if not found.done:
            return (
                f"{folder}: samples are missing: the conversion of {found.source or 'its source'} was stopped, or is "
                "still writing; the same command again completes it"
            )
    return ""


def _unfinished_writers(folder: Path) -> str:
    try:
        names = {path.name for path in (folder / WRITTEN).iterdir()}
    except OSError:
        return ""
    parts = [match for name in names if (match := _PART.fullmatch(name))]
    finished = {int(match[1]) for match in parts if f"{match[1]}-of-{match[2]}-{OPEN}" not in names}
    count = max((int(match[2]) for match in parts), default=0)
    missing = [str(part) for part in range(count) if part not in finished]
    if OPEN not in names and not missing:
        return ""
    more = f" and {counted(len(missing) - _LISTED_PARTS, 'more', 'more')}" if len(missing) > _LISTED_PARTS else ""
    which = f": parts {', '.join(missing[:_LISTED_PARTS])}{more} of {count}" if missing else ""
    return (
        f"{folder}: samples may be missing: an sp.ShardWriter was stopped, never begun, or is still writing{which}; "
        "run the program again that writes there"
    )
