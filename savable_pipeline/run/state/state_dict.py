"""Flat dicts, as which loaders save their state: check, read and merge them.

A flat dict has a few numbers and the states of lanes. `lane_state.py` lists its entries.

A flat dict may also have spans of slots that a resumed run will skip. They come after batches that the trainer had
fetched but not trained on when the state was saved:

    slot       2            3            4   5        6
               trained on   fetched      to skip
    state      "slot" 3, "to_skip" [[0, 4, 6]]

Only a trainer that fetches ahead has such a state, and only until it has trained on the fetched batches.
"""

from __future__ import annotations

import base64
import binascii
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.core.state_numbers import SavedCount, check_numbers
from savable_pipeline.errors import CheckpointMismatchError, StateError
from savable_pipeline.run.state.fingerprint import are_of_one_run
from savable_pipeline.run.state.flights import ACKNOWLEDGE, with_acks_applied
from savable_pipeline.run.state.lane_state import LaneState, damaged, restoring, unpack_state

_LANE = re.compile(r"lane_([0-9]{5,18})")
_NUMBERS = ("lanes", "epoch", "slot")
_LIMIT = 1 << 62  # these numbers of a state are smaller
FACTS = "facts"
_DECIDE_ALIKE = "Call reconfigure with the same arguments on each rank, at the same step."
_PAGE = "https://github.com/savable-pipeline/savable_pipeline/blob/main/docs/trainers/index.md"


def lane_name(lane: int) -> str:
    """Return the key of a lane's state in the flat dict."""
    return f"lane_{lane:05d}"


def lane_numbers(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the lanes in a flat dict, ascending."""
    # `lane_000001` is not the key of lane 1, because it has a digit too many
    numbers = {name: int(found[1]) for name in state if (found := _LANE.fullmatch(name))}
    return sorted(number for name, number in numbers.items() if lane_name(number) == name)


def batches_before(slot: int, lane: int, lanes: int) -> int:
    """Return the number of batches of a lane in the slots before `slot`."""
    return max(0, slot - lane + lanes - 1) // lanes


@restoring("the state")
def check_flat(state: Mapping[str, Any]) -> None:
    """Raise `StateError` unless `state` is a flat dict with this release's numbers."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be a dict, not {type(state).__name__}")
    missing = {"lanes", "epoch", "slot", "fingerprint"} - state.keys()
    if missing:
        inside = [name for name, value in state.items() if isinstance(value, Mapping) and "fingerprint" in value]
        hint = f" Load its value under {inside[0]!r}." if inside else ""
        raise StateError(
            f"this is no state of a SavableLoader: it lacks {', '.join(sorted(missing))}.{hint}\n  It has "
            f"{', '.join(map(repr, list(state)[:8])) or 'nothing'}."
        )
    wrong_keys = [name for name in state if not isinstance(name, str)]
    if wrong_keys:
        raise damaged(f"the state has the key {reprlib.repr(wrong_keys[0])}, which is no string")
    check_numbers("the state", state.get("order"), state.get("state"))
    wrong = [name for name in _NUMBERS if type(state[name]) is not int or not 0 <= state[name] < _LIMIT]
    if wrong:
        raise damaged(f"{wrong[0]} of the state is {reprlib.repr(state[wrong[0]])}, not a count")
    if (acknowledge := state.get(ACKNOWLEDGE, 0)) not in (0, 1) or type(acknowledge) is not int:
        raise damaged(f"acknowledge of the state is {reprlib.repr(acknowledge)}, not 0 or 1")
    if not state["lanes"]:
        raise damaged("the state has no lanes")


def read_lanes(state: Mapping[str, Any], wanted: Iterable[int]) -> dict[int, LaneState]:
    """Return the states of the lanes with these numbers, by lane.

    Raises `CheckpointMismatchError` for a lane that is missing, or was saved at another step or with other facts, and
    `StateError` for a damaged one.
    """
    lanes, slot, epoch = state["lanes"], state["slot"], state["epoch"]
    facts = read_facts(state)
    read = {}
    for lane in wanted:
        name = lane_name(lane)
        if name not in state:
            raise CheckpointMismatchError(
                f"the state has lanes {_ranges(lane_numbers(state))} of {lanes}, but this rank needs lane {lane}. "
                "Save on every rank and use merge_states, or save global_state_dict().\n  To recover without these "
                f"lanes: {_PAGE}"
            )
        found = unpack_state(state[name], LaneState, name)
        expected = batches_before(slot, lane, lanes)
        if found.lane != lane or found.epoch != epoch or found.batches != expected:
            raise CheckpointMismatchError(
                f"{name} is at batch {found.batches} of lane {found.lane}, epoch {found.epoch}, instead of batch "
                f"{expected} of lane {lane}, epoch {epoch}. Load states of one step.\n  the state is at slot {slot}"
            )
        if found.facts != facts.digest:
            raise CheckpointMismatchError(
                f"{name} does not fit the state. Load the same state on all ranks. {_DECIDE_ALIKE}\n  the state has "
                f"{facts.decisions or 'no reconfigure'}"
            )
        read[lane] = found
    return read


def read_facts(state: Mapping[str, Any]) -> RunFacts:
    """Return the facts of all lanes of a flat dict.

    Raises `StateError` if they are damaged.
    """
    return unpack_state(state.get(FACTS), RunFacts, FACTS)


def _check_same_facts(state: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatchError` unless two states to merge have the same facts."""
    facts, merged_facts = read_facts(state), read_facts(merged)
    if facts.growth != merged_facts.growth:
        problem = "the ranks have different epochs at which shards joined"
        raise CheckpointMismatchError(f"{problem}. Load the same state on all ranks.")
    if facts.decisions != merged_facts.decisions:
        pairs = [(min(lane_numbers(each), default=None), read_facts(each).decisions) for each in (merged, state)]
        differing = "; ".join(f"lane {lane}: {decisions or 'nothing'}" for lane, decisions in pairs)
        raise CheckpointMismatchError(f"the ranks differ in reconfigure ({differing}). {_DECIDE_ALIKE}")
    if facts != merged_facts:
        raise CheckpointMismatchError("the states to merge differ in facts. Save all at one step.")


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states that all ranks of a run saved after the same step.

    Args:
        states: The states, in any order.

    Returns:
        A flat dict, which `SavableLoader.load_state_dict` takes on any number of ranks.

    Raises:
        CheckpointMismatchError: The states are of different runs or steps.
        StateError: A state is damaged.
        ValueError: There is no state.

    Example:
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.TarShardReader("shards/", lane), size=4)
        >>> loaders = [sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 2)) for rank in (0, 1)]
        >>> states = [loader.state_dict() for loader in loaders]
        >>> [name for name in sp.merge_states(states) if name.startswith("lane_")]
        ['lane_00000', 'lane_00002', 'lane_00001', 'lane_00003']
    """
    merged: dict[str, Any] = {}
    for state in states:
        check_flat(state)
        with restoring("the state"):
            for name in _NUMBERS:
                if merged and state[name] != merged[name]:
                    raise CheckpointMismatchError(
                        f"the states to merge differ in {name}: {state[name]} and {merged[name]}; save all at one step"
                    )
            if merged and not are_of_one_run(state["fingerprint"], merged["fingerprint"]):
                raise CheckpointMismatchError("the states to merge differ in fingerprint; save all at one step")
            if merged:
                _check_same_facts(state, merged)
            read_lanes(state, lane_numbers(state))
        acknowledged = max(state.get(ACKNOWLEDGE, 0), merged.get(ACKNOWLEDGE, 0))
        merged.update(state, **{ACKNOWLEDGE: acknowledged})
    if not merged:
        raise ValueError("merge_states needs at least one state")
    return with_acks_applied(merged)


def _ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges: [0, 1, 2, 5] is "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in parts) or "none"


_TO_SKIP = "to_skip"  # key in the flat dict


class SlotSpan(NamedTuple):
    """Slots from `first` to `stop - 1` of an epoch."""

    epoch: SavedCount
    first: SavedCount
    stop: SavedCount


def with_spans(state: Mapping[str, Any], spans: Iterable[SlotSpan]) -> dict[str, Any]:
    """Return a flat dict with these spans of slots to skip, if there are any."""
    to_skip = list(spans)
    return {**state, _TO_SKIP: msgspec.json.encode(to_skip)} if to_skip else dict(state)


def split_spans(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[SlotSpan]]:
    """Return a flat dict without the spans of slots to skip, and these spans.

    Raises `StateError` if they are damaged.
    """
    with restoring(_TO_SKIP):
        spans = msgspec.json.decode(state.get(_TO_SKIP, b"[]"), type=list[SlotSpan])
    return {name: value for name, value in state.items() if name != _TO_SKIP}, spans


def reject_spans(state: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatchError` if a state has slots to skip.

    A loader ignores them.
    """
    _, spans = split_spans(state)
    if spans:
        span = spans[0]
        raise CheckpointMismatchError(
            f"the state has {span.stop - span.first} slots to skip, from slot {span.first} of epoch {span.epoch}. "
            "Load it through the same class of savable_pipeline.trainers that saved it."
        )


JSON_FILE = "savable_loader.json"
"""Name of the file with the result of `to_json`, in a checkpoint that is a folder."""
_BASE64_PREFIX = "base64:"


def to_json(state: Mapping[str, Any]) -> dict[str, int | str]:
    """Convert a state to a dict that `json.dumps` takes.

    Bytes become text, a third longer.

    Args:
        state: A state of a `SavableLoader`.

    Returns:
        The same names, with int and str values.

    Raises:
        StateError: `state` is not a state of a `SavableLoader`.

    Example:
        >>> import json
        >>> from savable_pipeline.trainers.forms import from_json, to_json
        >>> state = sp.SavableLoader(lambda lane: sp.TarShardReader("shards/", lane), seed=7).state_dict()
        >>> from_json(json.loads(json.dumps(to_json(state)))) == state
        True
    """
    check_flat(state)
    encoded = {name: base64.b64encode(value) for name, value in state.items() if isinstance(value, bytes)}
    return {**state, **{name: _BASE64_PREFIX + text.decode("ascii") for name, text in encoded.items()}}


def from_json(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert back what `to_json` returned.

    Args:
        saved: The dict, as `json.loads` returns it.

    Returns:
        The state.

    Raises:
        StateError: It is damaged.

    Example:
        >>> from savable_pipeline.trainers.forms import from_json
        >>> try:
        ...     from_json({"slot": 3})
        ... except errors.StateError as error:
        ...     print(str(error).split(":")[0])
        this is no state of a SavableLoader
    """
    check_flat(saved)
    return {name: _bytes_from_base64(value, name) if isinstance(value, str) else value for name, value in saved.items()}


def _bytes_from_base64(text: str, name: str) -> bytes:
    """Decode an entry of `to_json`. Raises `StateError` with its `name` if it is damaged."""
    before, prefix, digits = text.partition(_BASE64_PREFIX)
    try:
        if before or not prefix:
            raise binascii.Error(f"it does not start with {_BASE64_PREFIX}")
        return base64.b64decode(digits.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise damaged(f"{name}: no base64 bytes ({error})") from error
