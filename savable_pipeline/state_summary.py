"""What a saved state holds, for people: where each lane stands, and in what two states differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.errors import StateError
from savable_pipeline.fingerprint import unpack_fingerprint
from savable_pipeline.sample import REF
from savable_pipeline.state import LaneState, check_flat, lane_name, lane_numbers, unpack_state

_MARKS = {"format", "lanes", "epoch", "slot", "fingerprint"}  # the keys by which a state is known inside a checkpoint


@dataclass(frozen=True, slots=True)
class StateSummary:
    """A state, decoded: its numbers, the run's settings, and per lane a row of what its stages saved."""

    numbers: dict[str, int]
    settings: dict[str, Any]
    environment: dict[str, str]
    lanes: dict[int, dict[str, Any]]  # of a lane that has not begun: {}
    lane_bytes: dict[int, int]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The loader's state in a file that `torch.save` wrote, wherever in it that lies. Raises `StateError`."""
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise StateError(
            f"{path}: torch.load(weights_only=True) cannot read it ({type(error).__name__}): it was not written by "
            "torch.save, is damaged, or holds more than plain values and tensors"
        ) from error
    found = list(_find(loaded))
    if len(found) != 1:
        what = "no state of a SavableLoader" if not found else f"{len(found)} states; save each in a file of its own"
        raise StateError(f"{path}: holds {what}")
    return found[0]


def _find(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, Mapping):
        if value.keys() >= _MARKS:
            yield dict(value)
            return
        for part in value.values():
            yield from _find(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find(part)


def summarize(state: Mapping[str, Any]) -> StateSummary:
    """Decode a state. Raises `StateError` where it is damaged."""
    check_flat(state)
    fingerprint = unpack_fingerprint(state["fingerprint"])
    stages = list(fingerprint.fields.get("stages", []))
    numbers = lane_numbers(state)
    decoded = {lane: unpack_state(state[lane_name(lane)], LaneState, lane_name(lane)) for lane in numbers}
    return StateSummary(
        numbers={name: state[name] for name in ("epoch", "slot", "lanes")},
        settings=fingerprint.fields,
        environment=fingerprint.environment,
        lanes={lane: _row(found, stages) for lane, found in decoded.items()},
        lane_bytes={lane: len(state[lane_name(lane)]) for lane in numbers},
    )


def _row(lane: LaneState, stages: list[str]) -> dict[str, Any]:
    """A lane as `stage.field: value`, in the order of the data path; {} if it has not begun."""
    if lane.stages is None:
        return {}
    path = list(_path(lane.stages))
    names = stages if len(stages) == len(path) else [f"stage {i}" for i in range(len(path))]
    row: dict[str, Any] = {"batches": lane.batches}
    for name, fields in zip(names, path, strict=True):
        row.update({f"{name}.{field}": value for field, value in fields.items()})
    return row


def _path(state: Any) -> Iterator[dict[str, Any]]:
    """What each stage saved, readers first: those of several sources in the order of their names."""
    upstream = state.get("sources") or {"": state["source"]} if state.keys() & {"source", "sources"} else {}
    for name in sorted(upstream):
        yield from _path(upstream[name])
    yield {name: value for name, value in state.items() if name not in ("source", "sources")}


def shown(field: str, value: Any) -> str:
    """A saved value in a few characters."""
    if isinstance(value, bytes):
        return str(len(value) // REF.itemsize) if field.endswith(".refs") else f"{len(value)} bytes"
    if field.endswith(".packs"):
        lengths = [sum(item[1] for item in pack) for pack in value]
        return f"{len(value)}, {sum(map(len, value))} items, {sum(lengths)} long"
    if isinstance(value, dict):
        return " ".join(f"{name}={number}" for name, number in value.items()) or "-"
    if isinstance(value, list):
        return f"{len(value)} items"
    return str(value)


def differences(left: StateSummary, right: StateSummary) -> list[tuple[str, str, str]]:
    """What differs: where, and the value in each. An empty list means that they go on alike."""
    found = _differing(left.numbers, right.numbers, "")
    found += _differing(left.settings, right.settings, "")
    found += _differing(left.environment, right.environment, "")
    for lane in sorted(left.lanes.keys() | right.lanes.keys()):
        found += _differing(left.lanes.get(lane), right.lanes.get(lane), f"lane {lane} ")
    return found


def _differing(
    left: Mapping[str, Any] | None, right: Mapping[str, Any] | None, where: str
) -> list[tuple[str, str, str]]:
    if left is None or right is None or (not left) != (not right):
        shown_sides = ["missing" if side is None else "begun" if side else "not begun" for side in (left, right)]
        return [(where.strip(), *shown_sides)]  # type: ignore[list-item]
    names = list(dict.fromkeys([*left, *right]))
    return [
        (where + name, *_pair(name, left.get(name), right.get(name)))
        for name in names
        if left.get(name) != right.get(name)
    ]


def _pair(name: str, left: Any, right: Any) -> tuple[str, str]:
    """Two values that differ; of refs, the first that does."""
    if name.endswith(".refs") and isinstance(left, bytes) and isinstance(right, bytes):
        mine, theirs = np.frombuffer(left, REF), np.frombuffer(right, REF)
        for i, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            if one != other:
                return tuple(f"{len(s)} refs, [{i}] = index {r['index']} epoch {r['epoch']}" for s, r in
                             ((mine, one), (theirs, other)))  # type: ignore[return-value]  # fmt: skip
    sides = shown(name, left), shown(name, right)
    if sides[0] == sides[1]:
        return _short(left), _short(right)
    return sides


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:97]}..."
