"""A loader's state for checkpoints that hold JSON alone.

state       "slot" 40    "lane_00000" bytes
to_json     "slot" 40    "lane_00000" "base64:U0FWTAEA…"
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from savable_pipeline.errors import StateError
from savable_pipeline.run.state.state_dict import check_flat

JSON_FILE = "savable_loader.json"
"""Its name in a checkpoint that is a folder."""
_BYTES = "base64:"


def to_json(state: Mapping[str, Any]) -> dict[str, int | str]:
    """Convert a state to a dict that `json.dumps` takes: bytes become text, a third longer.

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
    return {name: _text(value) if isinstance(value, bytes) else value for name, value in state.items()}


def _text(value: bytes) -> str:
    return _BYTES + base64.b64encode(value).decode("ascii")


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
    return {name: _bytes(value, name) if isinstance(value, str) else value for name, value in saved.items()}


def _bytes(text: str, name: str) -> bytes:
    kind, found, digits = text.partition(_BYTES)
    try:
        if kind or not found:
            raise binascii.Error(f"it does not start with {_BYTES}")
        return base64.b64decode(digits.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise StateError(f"{name}: no base64 bytes ({error}). Use another copy of the checkpoint.") from error
