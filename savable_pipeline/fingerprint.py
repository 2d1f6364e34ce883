"""What a saved state must agree on with the run that loads it, and how the two are compared, field by field."""

from __future__ import annotations

import logging
import platform
import sys
import zlib
from collections.abc import Iterable, Mapping, Set
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from savable_pipeline.blend_order import reduced
from savable_pipeline.errors import CheckpointMismatchError, StateError
from savable_pipeline.stage import Stage, upstream
from savable_pipeline.state import pack_state, unpack_state

log = logging.getLogger(__name__)

_PIXEL_LIBRARIES = ("numpy", "torch", "torchvision", "pillow")
_FIXED = {
    "lanes": "the number of lanes is a setting of the run: pass the saved one",
    "stages": "a stage was added, removed or exchanged",
    "TarShardReader.shards": "shards were added, removed or rewritten since",
}
_SHORT = {("Batcher", "size"): "batch_size", ("Blend", "weights"): "weights", ("Blend", "sources"): "sources"}
_SHOWN = 5  # shards named in a message before the rest is counted


class Fingerprint(msgspec.Struct):
    """Settings that change the data, by field; and the libraries that may change pixels."""

    fields: dict[str, Any]
    environment: dict[str, str]


def fingerprint(stage: Stage, *, seed: int, lanes: int) -> Fingerprint:
    """The fingerprint of a pipeline in a run with this seed and number of lanes."""
    path = [(step.branch, type(step).__qualname__, step.settings()) for step in upstream(stage)]
    names = [_in_branch(branch, name) for branch, name, _ in path]
    fields: dict[str, Any] = {"lanes": lanes, "seed": seed, "stages": names}
    for branch, name, settings in path:
        for setting, value in settings.items():
            field = _unique(_in_branch(branch, field_name(name, setting)), fields)
            fields[field] = _plain(field, value)
    return Fingerprint(fields, _environment())


def pack_fingerprint(found: Fingerprint) -> bytes:
    """As compressed, checksummed bytes."""
    return pack_state(_Packed(zlib.compress(msgspec.msgpack.encode(found), 6)))


def unpack_fingerprint(raw: bytes) -> Fingerprint:
    """The fingerprint in a saved state. Raises `StateError`."""
    packed = unpack_state(raw, _Packed, "fingerprint")
    try:
        return msgspec.msgpack.decode(zlib.decompress(packed.compressed), type=Fingerprint)
    except (zlib.error, msgspec.DecodeError) as error:
        raise StateError(f"fingerprint: {error}") from error


def compare(saved: Fingerprint, here: Fingerprint, allow: Iterable[str] = ()) -> list[str]:
    """The fields that differ. Raises `CheckpointMismatchError` that lists those that `allow` does not name.

    A field inside a source of a `Blend`, such as "web/TarShardReader.shuffle", is allowed by "TarShardReader.shuffle"
    too. Of a source that only one side has, nothing is compared but its name. Libraries or processors that may change
    pixels are a warning.
    """
    allowed = _allowed(allow, saved.fields.keys() | here.fields.keys())
    before, after = _of_shared_sources(saved.fields, here.fields), _of_shared_sources(here.fields, saved.fields)
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if "stages" in differing:  # then the settings below it tell nothing new
        kept = set(before) & set(after)
        differing = [name for name in differing if name in kept]
    refused = [name for name in differing if not {name, _base(name)} & allowed]
    if refused:
        lines = [f"  {name}: {_difference(name, before.get(name), after.get(name))}" for name in refused]
        may_differ = not any(_fixed(name) for name in refused)
        hint = f"\nTo go on all the same, without exactness: allow={refused}" if may_differ else ""
        raise CheckpointMismatchError(
            "the state was saved by a run with other settings or data:\n" + "\n".join(lines) + hint
        )
    for name in differing:
        log.warning(
            "restoring although %s differs: %s",
            name,
            _difference(name, before.get(name), after.get(name)),
        )
    for name in saved.environment.keys() | here.environment.keys():
        old, new = saved.environment.get(name), here.environment.get(name)
        if old != new:
            log.warning("the state was saved with %s %s, here is %s: pixels may differ", name, old, new)
    return differing


def field_name(stage: str, setting: str) -> str:
    """What a stage's setting is called in a fingerprint, in messages and in `allow`."""
    return _SHORT.get((stage, setting), f"{stage}.{setting}")


def _in_branch(branch: str, name: str) -> str:
    return f"{branch}/{name}" if branch else name


def _base(field: str) -> str:
    """A field's name without the sources of `Blend`s in which it lies, and without its number."""
    return field.rsplit("/")[-1].split("#")[0]


def _of_shared_sources(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The fields but those of sources of a `Blend` that `others` has not; weights in their relation to each other."""
    kept = dict(fields)
    for field, names in fields.items():
        if _base(field) != "sources" or field not in others:
            continue
        prefix = field[: -len("sources")]
        unshared = [f"{prefix}{name}/" for name in names if name not in others[field]]
        kept = {name: value for name, value in kept.items() if not name.startswith(tuple(unshared))}
        kept["stages"] = [name for name in kept["stages"] if not name.startswith(tuple(unshared))]
        weights = fields.get(f"{prefix}weights", {})
        kept[f"{prefix}weights"] = reduced({name: weights[name] for name in names if name in others[field]})
    return kept


def _allowed(allow: Iterable[str], fields: Set[str]) -> set[str]:
    names = {allow} if isinstance(allow, str) else set(allow)
    known = {*fields, *map(_base, fields)}
    for name in names:
        if cause := _fixed(name):
            raise ValueError(f"allow={name!r}: this can never differ; {cause}")
        if name not in known:
            raise ValueError(f"allow={name!r}: no such field; there are {', '.join(sorted(fields))}")
    return names


def _fixed(name: str) -> str | None:
    """Why a field may never differ; None if it may."""
    return _FIXED.get(_base(name))


def _plain(field: str, value: Any) -> Any:
    """A setting as it is read back from a state: tuples are lists, sets are sorted."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, order="deterministic")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"the setting {field} = {value!r} cannot be kept in a state ({error}): settings() gives numbers, strings, "
            "bytes, and lists or dicts of these"
        ) from error


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    number = 2
    while name in taken:
        name, number = f"{name.rsplit('#')[0]}#{number}", number + 1
    return name


def _difference(name: str, saved: Any, here: Any) -> str:
    cause = f" ({_fixed(name)})" if _fixed(name) else ""
    if _base(name) == "TarShardReader.shards":
        return _shards(saved, here) + cause
    return f"saved {saved!r}, here {here!r}{cause}"


def _shards(saved: Any, here: Any) -> str:
    before = {name: rest for name, *rest in saved or []}
    now = {name: rest for name, *rest in here or []}
    groups = {
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
        "rewritten": sorted(name for name in now.keys() & before.keys() if now[name] != before[name]),
    }
    return "; ".join(
        f"{what}: {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for what, names in groups.items()
        if names
    )


def _environment() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3])), "machine": platform.machine()}
    for name in _PIXEL_LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


class _Packed(msgspec.Struct):
    compressed: bytes
