"""`rescue`: continues from a checkpoint that holds the lanes of one rank only, because a trainer kept no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.run.state.state_dict import check_flat, common_decisions, common_growth, lane_name, lane_numbers
from savable_pipeline.trainers.checks import refuse_acknowledging


def rescue(loader: SavableLoader, state: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the whole state from one that lacks lanes, by passing over the epoch again.

    Run it in one process; put the result in the place of `state` in the checkpoint, and resume as usual, on any number
    of ranks. Every lane passes over its batches from the start of the epoch: samples are read and, where the pipeline
    packs or filters, encoded again; no batch is made. An endless run is one epoch from its first batch on, so that it
    takes about as long as loading took in the run; more `num_workers` share the work. Samples that lanes missing in
    `state` had skipped for a fault of the environment (`on_error`) are not known, and would come again.

    Args:
        loader: A fresh loader made with `ranks=(0, 1)` and the settings of the run.
        state: A state of the run with the lanes of one rank or more, which are compared with the result.

    Returns:
        The state with all lanes, where `state` was saved.

    Raises:
        CheckpointMismatchError: A lane of `state` differs from the result, or it is of a run with other settings.
        StateError: `state` is damaged.
        ValueError: The loader is one of several ranks.

    Example:
        >>> from savable_pipeline.trainers.rescue import rescue
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.TarShardReader("shards/", lane), size=4)
        >>> ranks = [sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 2)) for rank in (0, 1)]
        >>> _ = [next(rank) for rank in ranks]
        >>> kept = ranks[0].state_dict()  # of rank 0 only
        >>> rescue(sp.SavableLoader(pipeline, seed=7, lanes=4), kept) == sp.merge_states(r.state_dict() for r in ranks)
        True
    """
    check_flat(state)
    refuse_acknowledging(loader)
    fresh = loader.state_dict()
    missing = state["lanes"] - len(lane_numbers(fresh))
    if missing > 0:
        raise ValueError(
            f"rescue needs a loader with all lanes, and this one lacks {missing}: make it in one process, with "
            "ranks=(0, 1)"
        )
    loader.load_state_dict({**fresh, **_start(state)})
    loader.skip(state["slot"])
    found = loader.state_dict()
    _compare(found, state)
    return found


def _start(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that differ in a state at the start of the epoch of `state`, of the same run."""
    epoch = state["epoch"]
    kept = [unpack_state(state[lane_name(lane)], LaneState, lane_name(lane)) for lane in lane_numbers(state)]
    growth = common_growth(kept) or UNSET
    if decisions := common_decisions(kept):
        raise CheckpointMismatchError(f"the epoch cannot be passed over again: something was decided, {decisions}")
    lanes = {lane_name(lane): pack_state(LaneState(lane, epoch, growth=growth)) for lane in range(state["lanes"])}
    return {"lanes": state["lanes"], "epoch": epoch, "slot": 0, "fingerprint": state["fingerprint"], **lanes}


def _compare(found: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatchError` unless `found` is at the place of `state`, in all lanes that `state` holds."""
    if (found["epoch"], found["slot"]) != (state["epoch"], state["slot"]):
        raise CheckpointMismatchError(
            f"the state is at slot {state['slot']} of epoch {state['epoch']}, but the epoch ends before: it came to "
            f"slot {found['slot']} of epoch {found['epoch']}. Is the pipeline the one of the saved run?"
        )
    for lane in lane_numbers(state):
        name = lane_name(lane)
        mine, saved = (unpack_state(one[name], LaneState, name) for one in (found, state))
        if (mine.batches, mine.stages) != (saved.batches, saved.stages):
            raise CheckpointMismatchError(
                f"{name} is another after passing over {state['slot']} slots than the one saved: the pipeline is not "
                "the one of the saved run, is not pure, or that run went on from a state of another"
            )
