"""Spans of slots that a run will pass over, after batches that its trainer has fetched but not yet trained on.

    slot       2            3            4   5        6
               trained on   fetched      to skip
    state      "slot" 3, "to_skip" [[0, 4, 6]]

Only a trainer that fetches ahead has such a state, and only until it has trained on the fetched batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from savable_pipeline.core.saved_count import SavedCount
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.state.restoring import restoring

_NAME = "to_skip"  # in the flat dict


class Span(NamedTuple):
    """The slots from `first` to `stop - 1` of an epoch."""

    epoch: SavedCount
    first: SavedCount
    stop: SavedCount


def with_spans(state: Mapping[str, Any], spans: Iterable[Span]) -> dict[str, Any]:
    """A flat dict with these spans, if there are any."""
    listed = list(spans)
    return {**state, _NAME: msgspec.json.encode(listed)} if listed else dict(state)


def taken_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Span]]:
    """A flat dict without spans, and the spans. Raises `StateError` if they are damaged."""
    with restoring(_NAME):
        spans = msgspec.json.decode(state.get(_NAME, b"[]"), type=list[Span])
    return {name: value for name, value in state.items() if name != _NAME}, spans


def refuse_spans(state: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatchError` for a flat dict with spans, which a loader by itself would not pass over."""
    _, spans = taken_apart(state)
    if spans:
        span = spans[0]
        raise CheckpointMismatchError(
            f"the state was saved while the trainer had fetched a batch before a skip: {span.stop - span.first} slots "
            f"from slot {span.first} of epoch {span.epoch} are still to be passed over. Load it through what the "
            "trainer takes its batches from (savable_pipeline.trainers), as it was saved"
        )
