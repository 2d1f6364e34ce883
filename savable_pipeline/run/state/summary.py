"""Summaries of saved states for people, and the differences of two states."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.errors import StateError
from savable_pipeline.run.state.fingerprint import unpack_fingerprint
from savable_pipeline.run.state.flights import EPOCH_SHIFT, read_flights
from savable_pipeline.run.state.lane_state import LaneState, damaged, restoring, unpack_state
from savable_pipeline.run.state.state_dict import JSON_FILE, check_flat, from_json, lane_name, lane_numbers, read_facts

_MISSING = "missing"  # stands for a field that one state lacks
_KEYS = {"lanes", "epoch", "slot", "fingerprint"}  # keys that identify a state inside a checkpoint


@dataclass(frozen=True, slots=True)
class StateSummary:
    """Decoded state: position, settings of the run, and saved fields of each lane."""

    numbers: dict[str, int]  # "epoch", "slot" and "lanes"
    settings: dict[str, Any]
    environment: dict[str, str]
    lanes: dict[int, dict[str, Any]]  # by lane, `stage.field: value`; {} for a lane that has not started
    lane_bytes: dict[int, int]  # size of each lane's packed state


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the loader's state in a checkpoint.

    `path` is a file of `torch.save`, where the state may be anywhere in nested dicts and lists, a file of `to_json`, or
    a trainer's folder with such a file. Raises `StateError` if the file cannot be read or does not have exactly one
    state.
    """
    if (path / JSON_FILE).is_file():
        path = path / JSON_FILE
    if not path.is_file():
        problem = "a folder" if path.is_dir() else "no such file"
        raise StateError(f"{path}: {problem}. Pass a file with the state of a loader, of torch.save or to_json.")
    loaded = _load_json(path) if path.suffix == ".json" else _load(path)
    found = list(_find_states(loaded))
    if len(found) != 1:
        content = "no state of a SavableLoader" if not found else f"{len(found)} states. Save each in its own file."
        raise StateError(f"{path}: it has {content}")
    return found[0]


def _load_json(path: Path) -> Any:
    try:
        loaded = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path}: no JSON ({error})") from error
    return from_json(loaded) if isinstance(loaded, dict) and loaded.keys() >= _KEYS else None


def _load(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"{path}: torch.load(weights_only=True) cannot read it ({type(error).__name__}). Use another copy, with "
            "plain values and tensors only."
        ) from error


def _find_states(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the loaders' states in nested dicts and lists."""
    if isinstance(value, Mapping):
        if value.keys() >= _KEYS:
            yield dict(value)
            return
        for part in value.values():
            yield from _find_states(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_states(part)


@restoring("the state")
def summarize(state: Mapping[str, Any]) -> StateSummary:
    """Decode a state. Raises `StateError` if it is damaged."""
    check_flat(state)
    fingerprint = unpack_fingerprint(state["fingerprint"])
    stages = list(fingerprint.fields.get("stages", []))
    numbers = lane_numbers(state)
    decoded = {lane: unpack_state(state[lane_name(lane)], LaneState, lane_name(lane)) for lane in numbers}
    return StateSummary(
        numbers={name: state[name] for name in ("epoch", "slot", "lanes")},
        settings=fingerprint.fields | _facts_as_settings(read_facts(state)) | _flights_as_setting(state),
        environment=fingerprint.environment,
        lanes={lane: _lane_fields(found, stages) for lane, found in decoded.items()},
        lane_bytes={lane: len(state[lane_name(lane)]) for lane in numbers},
    )


def _facts_as_settings(facts: RunFacts) -> dict[str, str]:
    """Return the shards that joined, by reader, and what was decided, as settings."""
    found = {}
    for branch, pairs in facts.growth.items():
        joined = ", ".join(f"{shards} shards from epoch {epoch}" for epoch, shards in pairs)
        found[f"{branch}/growth" if branch else "growth"] = joined
    return found | ({"decided": str(facts.decisions)} if facts.decisions else {})


def _flights_as_setting(state: Mapping[str, Any]) -> dict[str, str]:
    """Return how many rows are in flight, the oldest, and how many of each lane, as a setting."""
    by_lane = {lane: flights for lane, flights in read_flights(state).items() if flights}
    rows = {lane: sum(flight.open_rows.bit_count() for flight in flights) for lane, flights in by_lane.items()}
    if not rows:
        return {}
    oldest = min((flight for flights in by_lane.values() for flight in flights), key=lambda flight: flight.batch)
    epoch, slot = divmod(oldest.batch, 1 << EPOCH_SHIFT)
    lanes = ", ".join(f"lane {lane}: {number:,}" for lane, number in sorted(rows.items()))
    row = (oldest.open_rows & -oldest.open_rows).bit_length() - 1  # the lowest bit that is set
    return {"in flight": f"{sum(rows.values()):,} rows, the oldest row {row} of slot {slot:,}, epoch {epoch}; {lanes}"}


def _lane_fields(lane: LaneState, stages: list[str]) -> dict[str, Any]:
    """Return a lane's fields as `stage.field: value`, in data path order; {} if it has not started."""
    if lane.stages is None:
        return {}
    by_stage = list(_stage_fields(lane.stages, lane_name(lane.lane)))
    names = stages if len(stages) == len(by_stage) else [f"stage {i}" for i in range(len(by_stage))]
    found: dict[str, Any] = {"batches": lane.batches}
    for name, fields in zip(names, by_stage, strict=True):
        found.update({f"{name}.{field}": value for field, value in fields.items()})
    return found


def _stage_fields(state: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the saved fields of each stage, readers first, and the sources of a `Blend` in the order of their names."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise damaged(f"{where}: {_truncated(state)} is no state of a stage")
    upstream = state.get("sources") or ({"": state["source"]} if "source" in state else {})
    if not isinstance(upstream, dict):
        raise damaged(f"{where}: {_truncated(upstream)} are no sources")
    for name in sorted(upstream, key=str):
        yield from _stage_fields(upstream[name], where)
    yield {name: value for name, value in state.items() if name not in ("source", "sources")}


def shown(field: str, value: Any) -> str:
    """Format a saved value as short text."""
    if isinstance(value, bytes):
        return str(len(value) // REF.itemsize) if field.endswith(".refs") else f"{len(value)} bytes"
    if field.endswith(".packs"):
        with contextlib.suppress(TypeError, IndexError, KeyError):  # fields of a user's own stage
            lengths = [sum(item[1] for item in pack) for pack in value]
            return f"{len(value)}, {sum(map(len, value))} items, {sum(lengths)} long"
    if isinstance(value, dict):
        return " ".join(f"{name}={number}" for name, number in value.items()) or "-"
    if isinstance(value, list):
        return f"{len(value)} items"
    return str(value)


FieldDifference: TypeAlias = tuple[str, str, str]  # name of a field, and its value in each of two states


def differences(left: StateSummary, right: StateSummary) -> list[FieldDifference]:
    """Return the fields in which two states differ.

    If there is none, both states resume with the same batches.
    """
    found = _differing(left.numbers, right.numbers, "")
    found += _differing(left.settings, right.settings, "")
    found += _differing(left.environment, right.environment, "")
    for lane in sorted(left.lanes.keys() | right.lanes.keys()):
        found += _differing(left.lanes.get(lane), right.lanes.get(lane), f"lane {lane} ")
    return found


def _differing(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None, where: str) -> list[FieldDifference]:
    """Return the fields that differ, with `where` before their names. None means that the state lacks a lane."""
    if left is None or right is None or (not left) != (not right):
        shown_sides = ["missing" if side is None else "begun" if side else "not begun" for side in (left, right)]
        return [(where.strip(), *shown_sides)]  # type: ignore[list-item]
    names = list(dict.fromkeys([*left, *right]))
    return [
        (where + name, *_format_pair(name, left.get(name, _MISSING), right.get(name, _MISSING)))
        for name in names
        if (name in left, left.get(name)) != (name in right, right.get(name))
    ]


def _format_pair(name: str, left: Any, right: Any) -> tuple[str, str]:
    """Format two differing values as short texts. For lists of refs, show the first refs that differ."""
    if name.endswith(".refs") and isinstance(left, bytes) and isinstance(right, bytes):
        mine, theirs = np.frombuffer(left, REF), np.frombuffer(right, REF)
        for i, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            if one != other:
                return tuple(f"{len(s)} refs, [{i}] = index {r['index']} epoch {r['epoch']}" for s, r in
                             ((mine, one), (theirs, other)))  # type: ignore[return-value]  # fmt: skip
    sides = shown(name, left), shown(name, right)
    if sides[0] == sides[1] or _MISSING in (left, right):
        return _truncated(left), _truncated(right)
    return sides


def _truncated(value: Any) -> str:
    text = value if value == _MISSING else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
