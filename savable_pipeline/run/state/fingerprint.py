"""`Fingerprint` of a run: its settings, which those of a loaded state must equal.

    pipeline ── settings() of each stage ──▶ fields, such as "web/TarShardReader.shuffle"
    state ── its fingerprint ──▶ compare, field by field ──▶ equal, allowed to differ, or an error with both values

A stage's `SettingRule` may permit that a field differs, alone or together with another field, or is added or removed.
Versions of libraries and the processor are in the environment. A difference there is only a warning. The fingerprint
is compressed in a state. One that decompresses to over 64 MiB or a million objects is rejected before it is decoded.
"""

from __future__ import annotations

import logging
import platform
import sys
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from savable_pipeline.core.weights import reduced
from savable_pipeline.core.wording import clean_address, human_bytes
from savable_pipeline.data.dataset.shard_digests import difference, starts_with, summary_type
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.state.lane_state import damaged, decoded, has_too_many, pack_state, unpack_state
from savable_pipeline.stages.chunked_stage import chunked
from savable_pipeline.stages.pipeline import datasets_of, upstream
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.stage_settings import SettingRule

log = logging.getLogger(__name__)

_PACKAGE = __name__.split(".")[0] + "."
_RUN_FIELDS = {"lanes", "seed", "stages"}
LIBRARIES = (  # libraries whose releases decide pixels, sound, tokens or the text of rows; recorded if installed
    "numpy", "scipy", "torch", "torchvision", "torchaudio", "torchcodec", "pillow", "pillow-simd", "simplejpeg", "av",
    "decord", "opencv-python", "opencv-python-headless", "imageio", "albumentations", "kornia", "soundfile", "librosa",
    "pyarrow", "pandas", "tokenizers", "transformers", "jinja2", "tiktoken", "sentencepiece",
)  # fmt: skip
_FIXED = {  # rules of fields that may never differ, with the reason
    "lanes": SettingRule(fixed="the number of lanes is a setting of the run: pass the saved one"),
    "stages": SettingRule(fixed="a stage was added, removed or exchanged"),
}
_NO_RULE = SettingRule()
_DATA_SETTINGS = {"shards", "joins"}  # settings whose difference names the address of the data
_JOINING_HINT = 'new shards may join at the next epoch: allow={"shards"}'
_OPTIONAL_FIELDS = ("joins", "exclude")  # `allow` may name these fields even if neither fingerprint has them
_FIELD_TYPES: dict[str, Any] = {  # types of the fields that `compare` compares part by part
    "stages": list[str],
    "sources": list[str],
    "weights": dict[str, int],
}
_MAX_BYTES = 1 << 26  # most bytes of a fingerprint before it is compressed


class Fingerprint(msgspec.Struct):
    """Settings that change the data, by field, and versions of libraries.

    `addresses` has the locations of the data, by field. They are never compared, but shown in the message about a field
    that differs.
    """

    fields: dict[str, Any]
    environment: dict[str, str]
    addresses: dict[str, str] = {}


class PipelineFingerprint(Fingerprint):
    """Fingerprint of a pipeline that this process has built.

    `shards` has all shards of the fields for which a state has only a summary. `required` has the fields of the
    library's own stages, which every state of such a run has. `rules` has the rules of fields, also of fields that only
    a state may have. Field names in `rules` have no number, unlike "Encode.check#2".
    """

    shards: dict[str, ShardList] = {}
    required: frozenset[str] = frozenset()
    rules: dict[str, SettingRule] = {}


def fingerprint(stage: Stage, *, seed: int, lanes: int) -> PipelineFingerprint:
    """Return the fingerprint of a pipeline in a run with this seed and these lanes.

    A stage that may be added to a run, such as `Join`, is a field, not one of the stages.
    """
    path = [(step.info.branch, step) for step in upstream(stage)]
    names = [
        _in_branch(branch, type(step).__qualname__)
        for branch, step in path
        if not any(rule.whole_stage for rule in chunked(step).setting_rules.values())
    ]
    fields: dict[str, Any] = {"lanes": lanes, "seed": seed, "stages": names}
    addresses: dict[str, str] = {}
    shards: dict[str, ShardList] = {}
    required, rules = set(fields), dict(_FIXED)
    for _, step in path:
        own_rules = chunked(step).setting_rules
        for setting, rule in own_rules.items():
            rules[stage_field(step, setting)] = rule
        for setting, value in step.settings().items():
            field = _unique(stage_field(step, setting), fields)
            fields[field] = _plain_value(field, value)
            if type(step).__module__.startswith(_PACKAGE) and "." not in setting:  # "." is of a user's encoder
                required.add(field)
            if setting in _DATA_SETTINGS and datasets_of([step]):
                addresses[field] = clean_address(", ".join(each.address for each in datasets_of([step])))
            if setting in own_rules and (shards_of := own_rules[setting].shards):
                shards[field] = shards_of(step)
    return PipelineFingerprint(fields, dict(_environment()), addresses, shards, frozenset(required), rules)


def are_of_one_run(left: bytes, right: bytes) -> bool:
    """Return whether two packed fingerprints are equal, except for addresses of data.

    Raises `StateError` if one is damaged.
    """
    if left == right:
        return True
    one, other = unpack_fingerprint(left), unpack_fingerprint(right)
    return (one.fields, one.environment) == (other.fields, other.environment)


def pack_fingerprint(unpacked: Fingerprint) -> bytes:
    """Return a fingerprint as compressed, checksummed bytes.

    Raises ValueError for settings that are too large to be read again.
    """
    plain = msgspec.msgpack.encode(Fingerprint(unpacked.fields, unpacked.environment, unpacked.addresses))
    if len(plain) > _MAX_BYTES:
        largest = max(unpacked.fields, key=lambda name: len(msgspec.msgpack.encode(unpacked.fields[name])))
        raise ValueError(
            f"the settings of the pipeline have {human_bytes(len(plain))}, more than {human_bytes(_MAX_BYTES)}, most "
            f"of it {largest}. Replace the value by a hash or a name."
        )
    compressed = zlib.compress(plain, 6)
    if has_too_many(plain, len(compressed)):
        fix = "Replace the longest by a hash or a name."
        raise ValueError(f"the settings of the pipeline have over a million values. {fix}")
    return pack_state(_Packed(compressed))


def unpack_fingerprint(raw: bytes) -> Fingerprint:
    """Return the fingerprint in these bytes. Raises `StateError` if they are damaged."""
    packed = unpack_state(raw, _Packed, "fingerprint")
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(packed.compressed, _MAX_BYTES)
    except zlib.error as error:
        raise damaged(f"fingerprint: {error}") from error
    if not inflate.eof:
        problem = f"more than {human_bytes(_MAX_BYTES)} inflated" if inflate.unconsumed_tail else "cut short"
        raise damaged(f"fingerprint: {problem}")
    if has_too_many(plain, len(packed.compressed)):
        raise damaged("fingerprint: over a million values")
    found = decoded(plain, Fingerprint, "fingerprint")
    for name in [name for name in found.fields if _base(name) in _FIELD_TYPES]:
        _check_type(name, found.fields[name], _FIELD_TYPES[_base(name)])
    return found


def _check_type(name: str, value: Any, expected: Any) -> None:
    """Raise `StateError` unless the value of a field has the expected type."""
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise damaged(f"fingerprint: {name}: {error}") from error


def check_shards(saved: Fingerprint, current: PipelineFingerprint) -> None:
    """Raise `StateError` if the saved shards of a reader of this pipeline are damaged."""
    for name in current.shards.keys() & saved.fields.keys():
        _check_type(name, saved.fields[name], summary_type(saved.fields[name]))


def compare(saved: Fingerprint, current: PipelineFingerprint, allow: Iterable[str] = ()) -> list[str]:
    """Return the names of the fields that differ, all of which must be in `allow`.

    "TarShardReader.shuffle" in `allow` also covers that field inside a source of a `Blend`, such as
    "web/TarShardReader.shuffle". For a source that only one side has, only the name is compared. Other libraries or
    another processor, which may change batches, cause a warning.

    Raises `CheckpointMismatchError`, which lists the differing fields that are not in `allow`, and ValueError for a
    name in `allow` that is unknown or may never differ.
    """
    allowed = checked_allow(allow, saved, current)
    check_shards(saved, current)
    before, after = _shared_fields(saved.fields, current.fields), _shared_fields(current.fields, saved.fields)
    unequal = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    differing = sorted(unequal | (current.required & after.keys() - before.keys()))
    if "stages" in differing:  # skip the settings of stages that only one side has
        shared = set(before) & set(after) | _RUN_FIELDS
        differing = [name for name in differing if name in shared]
    differing = [name for name in differing if not _may_differ_with_another(name, differing, current)]
    for name in [name for name in differing if _only_warns(name, before, after, current)]:
        log.warning("%s: %s", name, _both_values(name, before, after, current))
        differing.remove(name)
    rejected = [name for name in differing if not {name, _base(name), _rule(name, current).allowed_by} & allowed]
    if rejected:
        lines = [
            f"  {name}: {_both_values(name, before, after, current)}{_locations(name, saved, current)}"
            for name in rejected
        ]
        may_differ = not any(_rule(name, current).fixed for name in rejected)
        hint = f"\nTo resume anyway, without exactness, pass allow={rejected}." if may_differ else ""
        raise CheckpointMismatchError(
            "the state is of a run with other settings or data. Use the saved ones.\n" + "\n".join(lines) + hint
        )
    for name in differing:
        log.warning("restored although %s differs: %s", name, _both_values(name, before, after, current))
    old, new = saved.environment, current.environment
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if changed:
        log.warning(
            "the state was saved with %s, so batches may differ. Install the saved versions to be exact.",
            ", ".join(f"{name} {old.get(name, 'none')} (here {new.get(name, 'none')})" for name in changed),
        )
    return differing


def _only_warns(name: str, before: Mapping[str, Any], after: Mapping[str, Any], current: PipelineFingerprint) -> bool:
    """Return whether a field was only added or removed, and its rule asks for a warning then."""
    rule = _rule(name, current)
    return bool(rule.warns_if_added) and (name not in before or (name not in after and rule.warns_if_removed))


def _rule(name: str, current: PipelineFingerprint) -> SettingRule:
    """Return the rule of a field, or one that permits nothing."""
    return current.rules.get(name.partition("#")[0], _NO_RULE)


def _may_differ_with_another(name: str, differing: list[str], current: PipelineFingerprint) -> bool:
    """Return whether a field may differ because another one that its rule names differs."""
    prefix, rule = name.rpartition(".")[0], current.rules.get(name, _NO_RULE)
    return any(f"{prefix}.{cause}" in differing for cause in rule.may_differ_with)


def stage_field(stage: Stage, setting: str) -> str:
    """Return the name of this stage's setting in fingerprints, messages and `allow`.

    If a branch has two stages of one class, `_unique` adds a number to the second name.
    """
    rule = chunked(stage).setting_rules.get(setting, _NO_RULE)
    return _in_branch(stage.info.branch, rule.field or f"{type(stage).__qualname__}.{setting}")


def _in_branch(branch: str, name: str) -> str:
    """Return a name with the branch of a `Blend`, if there is one, before it."""
    return f"{branch}/{name}" if branch else name


def _base(field: str) -> str:
    """Return a field's name without branch and number: "Encode.check" for "web/Encode.check#2"."""
    return field.rsplit("/")[-1].split("#")[0]


def _shared_fields(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without those of sources that the same `Blend` in `others` lacks.

    The weights are those of the remaining sources.
    """
    found = dict(fields)
    for field, names in fields.items():
        if _base(field) != "sources" or field not in others:
            continue
        prefix = field[: -len("sources")]
        unshared = [f"{prefix}{name}/" for name in names if name not in others[field]]
        found = {name: value for name, value in found.items() if not name.startswith(tuple(unshared))}
        found["stages"] = [name for name in found.get("stages", []) if not name.startswith(tuple(unshared))]
        weights = fields.get(f"{prefix}weights", {})
        shared = [name for name in names if name in others[field] and name in weights]
        found[f"{prefix}weights"] = reduced({name: weights[name] for name in shared})
    return found


def checked_allow(allow: Iterable[str], saved: Fingerprint, current: PipelineFingerprint) -> set[str]:
    """Return the names of fields that may differ.

    Raises ValueError for one that is unknown, or that may never differ.
    """
    fields = saved.fields.keys() | current.fields.keys()
    names = {allow} if isinstance(allow, str) else set(allow)
    known = {*fields, *map(_base, fields), *_OPTIONAL_FIELDS}
    for name in names:
        if cause := _rule(name, current).fixed if name in fields else _reason_fixed(name, current):
            raise ValueError(f"allow={name!r} is not possible: {cause}")
        if name not in known:
            raise ValueError(f"allow={name!r} is no field. The fields are {', '.join(sorted(fields))}.")
    return names


def _reason_fixed(name: str, current: PipelineFingerprint) -> str:
    """Return why the field that `allow` names may never differ, or "". It may be named without its stage."""
    fixed = {field: rule.fixed for field, rule in current.rules.items() if rule.fixed}
    return next((fixed[field] for field in fixed if _base(name) in (_base(field), _base(field).rpartition(".")[2])), "")


def _plain_value(field: str, value: Any) -> Any:
    """Convert a setting to plain values, as in a state: tuples and sets become lists.

    Raises ValueError if that is impossible.
    """
    try:
        plain = msgspec.to_builtins(value, str_keys=True, order="deterministic")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"the setting {field} = {value!r} cannot be saved ({error}). Return numbers, strings, bytes, lists or "
            "dicts from settings()."
        ) from error


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name, with the first number from 2 on that makes it unique if it is taken: "Encode.check#2"."""
    number = 2
    while name in taken:
        name, number = f"{name.rsplit('#')[0]}#{number}", number + 1
    return name


def _both_values(name: str, before: Mapping[str, Any], after: Mapping[str, Any], current: PipelineFingerprint) -> str:
    """Format the saved and the current value of a field, with the reason if the field may not differ."""
    saved, value = before.get(name), after.get(name)
    if name in current.required and name not in before and value is None:
        return "not in the state, here None"
    why = _rule(name, current).fixed or _rule(name, current).warns_if_added
    cause = f" ({why})" if why else ""
    if name in current.shards:
        shards = current.shards[name]
        cause = f" ({_JOINING_HINT})" if starts_with(shards, saved or []) else cause
        return difference(saved or [], shards) + cause
    shown = [repr(side[name]) if name in side else _rule(name, current).absent or "None" for side in (before, after)]
    return f"saved {shown[0]}, here {shown[1]}{cause}"


def _locations(name: str, saved: Fingerprint, current: Fingerprint) -> str:
    """Return the end of a message: the address of a field's data when the state was saved, if known, and now."""
    before, now = saved.addresses.get(name), current.addresses.get(name)
    if now is None:
        return ""
    return f"; here {now}" if before is None else f"; saved on {before}, here {now}"


@cache
def _environment() -> dict[str, str]:
    """Return the processor and the versions of libraries, by name. Reading packages' metadata takes milliseconds."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "machine": platform.machine()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class _Packed(msgspec.Struct):
    compressed: bytes
