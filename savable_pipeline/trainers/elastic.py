"""`complete_state`: the state of all lanes when some ranks have died.

It is for the ranks that continue. Each survivor has its own lanes at the slot that all of them have reached. The lanes
of dead ranks are in the last state that all ranks gathered. They advance to the same slot, which is integer work for
most stages:

    slot      last = 24               30 = slot of the survivors
    rank 0    lanes 0 3 6 9  ────────▶ state of rank 0
    rank 1    lanes 1 4 7 10 ────────▶ state of rank 1
    rank 2    lanes 2 5 8 11 ─ ─ ─ ─ ─ skipped: the batches that the dead rank trained on are not built
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.lane import LANE_COUNT
from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of, settings_of
from savable_pipeline.run.state.fingerprint import are_of_one_run
from savable_pipeline.run.state.flights import reject_flights, without_flights
from savable_pipeline.run.state.lane_state import fresh_lane
from savable_pipeline.run.state.state_dict import (
    batches_before,
    check_flat,
    lane_name,
    merge_states,
    read_facts,
    read_lanes,
)
from savable_pipeline.trainers.trainer_loader import reject_acknowledging


def complete_state(
    loader: SavableLoader,
    survivors: Iterable[Mapping[str, Any]],
    last: Mapping[str, Any],
    *,
    lanes: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Add the lanes that no survivor has to the survivors' state.

    Missing lanes are taken from `last` and advanced to the survivors' slot in this process. That takes as long as
    `skip` over the batches since `last`. Stages before `Encode` only count the samples that they skip. A packer needs
    the lengths of its items, so these are encoded again.

    Args:
        loader: A loader of the run. Its pipeline does the work, and its position does not change.
        survivors: The survivors' states, all at one slot. Each is `state_dict()`, or `state_dict(lag=1)` of a rank that
            took one batch that no rank has trained on.
        last: An earlier state of the same run with all lanes, from `global_state_dict()` or a checkpoint.
        lanes: The lanes that are needed, such as `range(rank, lanes of the loader, world_size)` for the rank that loads
            the state. None (default): all.

    Returns:
        The state at the survivors' slot.

    Raises:
        CheckpointMismatchError: The survivors are at different slots, a state is of another run, or `last` is later
            than the survivors or lacks lanes.
        StateError: A state is damaged.
        ValueError: There is no survivor.

    Example:
        >>> from savable_pipeline.trainers.elastic import complete_state
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.TarShardReader("shards/", lane), size=4)
        >>> ranks = [sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 2)) for rank in (0, 1)]
        >>> last = sp.merge_states(rank.state_dict() for rank in ranks)
        >>> batches = [next(rank) for rank in ranks]
        >>> state = complete_state(ranks[0], [ranks[0].state_dict()], last)  # rank 1 has died
        >>> alone = sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(0, 1))
        >>> alone.load_state_dict(state)
        >>> state["slot"], bool(next(alone)[0].key == next(ranks[0])[0].key)
        (2, True)
    """
    reject_acknowledging(loader)
    state = merge_states(survivors)
    check_flat(last)  # `merge_states` has checked the others
    if last["lanes"] != state["lanes"] or not are_of_one_run(last["fingerprint"], state["fingerprint"]):
        name = "number of lanes" if last["lanes"] != state["lanes"] else "fingerprint"
        raise CheckpointMismatchError(f"the last state is of another run, with another {name}. Pass one of this run.")
    if (last["epoch"], last["slot"]) > (state["epoch"], state["slot"]):
        raise CheckpointMismatchError(
            f"the last state is later (slot {last['slot']} of epoch {last['epoch']}) than the survivors (slot "
            f"{state['slot']} of epoch {state['epoch']}). Pass an earlier one."
        )
    for each in (state, last):
        reject_flights(each)
    needed = range(state["lanes"]) if lanes is None else lanes
    missing = [lane for lane in needed if lane_name(lane) not in state]
    facts = read_facts(state)
    reconfigured = facts.decisions  # settings that `reconfigure` has changed
    if missing and reconfigured and (last["epoch"] != state["epoch"] or read_facts(last).decisions != reconfigured):
        raise CheckpointMismatchError(
            f"the last state is older than a reconfigure, or of an earlier epoch: {reconfigured}. Pass a later one."
        )
    # raises if a lane that must advance is missing or damaged
    read_lanes(last, missing if last["epoch"] == state["epoch"] else ())
    # `state` may have entries for batches in flight, but they are empty
    return {**without_flights(state), **_advance_lanes(loader, missing, last, state, facts)}


def _advance_lanes(
    loader: SavableLoader, missing: list[int], last: Mapping[str, Any], state: Mapping[str, Any], facts: RunFacts
) -> dict[str, bytes]:
    """Return the packed states of the `missing` lanes at the slot of `state`, by name.

    Each lane advances from its state in `last`, the earlier state of all lanes.
    """
    if not missing:
        return {}
    pinned = {**run_of(loader).local.pinned, LANE_COUNT: str(last["lanes"]).encode()}
    local = LocalLanes(settings_of(loader).job, missing[0], pinned)
    try:
        with as_in_a_worker(set(KINDS)):
            local.runner.facts = facts
            return {lane_name(lane): _advance(local, lane, last, state["epoch"], state["slot"]) for lane in missing}
    finally:
        local.close()


def _advance(local: LocalLanes, lane: int, last: Mapping[str, Any], epoch: int, slot: int) -> bytes:
    """Return the packed state of a lane at a slot of an epoch.

    The lane advances from its state in `last`, or from the start of the epoch if `last` is of an earlier epoch.
    """
    lanes = last["lanes"]
    batches_done = 0
    packed = fresh_lane(lane, epoch, local.runner.facts)
    if last["epoch"] == epoch:
        batches_done = batches_before(last["slot"], lane, lanes)
        packed = last[lane_name(lane)]
    for _ in range(batches_done, batches_before(slot, lane, lanes)):
        packed = local.runner.deliver(lane, packed, "skip").state
    local.runner.forget(lane)
    return packed
