"""Fresh lanes: those without a batch yet in an epoch that others have begun.

    slot 5 of 8 lanes     0 1 2 3 4            5 6 7
                          begun: their own     fresh: only `cuts`, the unit in which the shares
                          states say `cut`     of all lanes are cut in this epoch

When a run continues in mid-epoch with other settings, such as another batch size or `tail`, the shares of all lanes
must stay cut as they were, or a fresh lane would read samples of another lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from savable_pipeline.core.decisions import Decisions
from savable_pipeline.core.lane import Cuts, Growth
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.run.state.state_dict import lane_numbers, read_lanes
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage


def cuts_of(last: Stage, epoch: int) -> Cuts:
    """The cuts of an epoch by the readers' branches; without those of a branch whose readers cut in several ways."""
    found: Cuts = {}
    differing = set()
    for stage in upstream(last):
        if isinstance(stage, RecordReader):
            branch, cut = stage.info.branch, stage.shares_of(epoch).cut
            if found.setdefault(branch, cut) != cut:
                differing.add(branch)
    return {branch: cut for branch, cut in found.items() if branch not in differing}


def fresh_lane(lane: int, epoch: int, growth: Growth | None = None, decisions: Decisions | None = None) -> bytes:
    """The packed state of a lane before its first batch of an epoch."""
    return pack_state(LaneState(lane, epoch, growth=growth or UNSET, decisions=decisions or UNSET))


def with_decisions(raw: bytes, decisions: Decisions) -> bytes:
    """A lane's packed state after these were made: whether it has another batch must be determined again."""
    lane = unpack_state(raw, LaneState, "lane")
    return pack_state(replace(lane, decisions=decisions or UNSET, more=None))


def with_cuts(raw: bytes, cuts: Cuts) -> bytes:
    """A lane's packed state; that of a fresh lane with these cuts, unless it has its own."""
    lane = unpack_state(raw, LaneState, "lane")
    return pack_state(replace(lane, cuts=cuts)) if cuts and lane.stages is None and lane.cuts is UNSET else raw


def known_cuts(lane: LaneState, local: LocalLanes) -> Cuts:
    """The cuts of an epoch that has begun, by the state of one of its lanes, begun or fresh."""
    return (lane.cuts or {}) if lane.stages is None else cuts_of(local.looked_at(lane, lane.grown), lane.epoch)


def may_be_cut_otherwise(state: Mapping[str, Any], lanes: Mapping[int, LaneState], local: LocalLanes) -> bool:
    """Whether the epoch of a state, in its middle, may have been begun with another `tail`, which is in no setting,
    and so with shares cut differently."""
    if not state["slot"]:
        return False
    known = _begun(state) or next(iter(lanes.values()))
    epoch, grown = known.epoch, known.grown
    here = local.last_stage if grown == local.growth else local.looked_at(LaneState(known.lane, epoch), grown)
    if not any(isinstance(stage, RecordReader) and stage.shares_of(epoch).is_cut_by_tail for stage in upstream(here)):
        return False
    return known_cuts(known, local) != cuts_of(here, epoch)


def _begun(state: Mapping[str, Any]) -> LaneState | None:
    """A lane of the state that has begun the epoch; None if the state holds none."""
    for number in lane_numbers(state):
        lane = read_lanes(state, [number])[number]
        if lane.stages is not None:
            return lane
    return None
