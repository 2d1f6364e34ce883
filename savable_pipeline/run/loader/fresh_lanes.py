"""Fresh lanes: those without a batch yet in an epoch that others have begun.

    slot 5 of 8 lanes     0 1 2 3 4            5 6 7
                          begun: their own     fresh: the run's facts have the chunk sizes, the units in which the
                          states say `cut`     shares of all lanes are cut in this epoch

When a run continues in mid-epoch with other settings, such as another batch size or `tail`, the shares of all lanes
must stay cut as they were, or a fresh lane would read samples of another lane.
"""

from __future__ import annotations

from msgspec.structs import replace

from savable_pipeline.core.run_facts import ChunkSizes, RunFacts
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage


def chunk_sizes(last: Stage, epoch: int) -> ChunkSizes:
    """Those of an epoch by the readers' branches; without those of a branch whose readers cut in several ways."""
    found: ChunkSizes = {}
    differing = set()
    for stage in upstream(last):
        if isinstance(stage, RecordReader):
            branch, cut = stage.info.branch, stage.shares_of(epoch).cut
            if found.setdefault(branch, cut) != cut:
                differing.add(branch)
    return {branch: cut for branch, cut in found.items() if branch not in differing}


def fresh_lane(lane: int, epoch: int, facts: RunFacts) -> bytes:
    """The packed state of a lane before its first batch of an epoch."""
    return pack_state(LaneState(lane, epoch, facts=facts.digest))


def with_facts(raw: bytes, facts: RunFacts) -> bytes:
    """A lane's packed state with other facts: whether it has another batch must be determined again."""
    return pack_state(replace(unpack_state(raw, LaneState, "lane"), facts=facts.digest, more=None))


def may_be_cut_otherwise(facts: RunFacts, last: Stage, epoch: int) -> bool:
    """Whether an epoch, in its middle, may have been begun with another `tail`, which is in no setting, and so with
    shares cut differently."""
    readers = (stage for stage in upstream(last) if isinstance(stage, RecordReader))
    by_tail = any(reader.shares_of(epoch).is_cut_by_tail for reader in readers)
    return by_tail and facts.chunk_sizes != chunk_sizes(last, epoch)
