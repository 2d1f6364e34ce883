"""`NewShards`: lets shards that were added to a dataset join a run, at one epoch for all lanes.

    state of all lanes ──▶ the last epoch that the reader of any lane has begun: 4
                       ──▶ (epoch 5, 12 shards) among the run's facts, to stay there

Epochs already begun stay as they are; no lane has begun the epoch at which the shards join, so all lanes deal it alike.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from savable_pipeline.core.run_facts import Growth, RunFacts
from savable_pipeline.data.dataset.shard_digests import Summary, begin_with, count
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.loader.fresh_lanes import with_facts
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.state.fingerprint import Fingerprint, FingerprintHere, check_shards, stage_field
from savable_pipeline.run.state.lane_state import LaneState, pack_state
from savable_pipeline.run.state.state_dict import FACTS, lane_name, lane_numbers, read_facts, read_lanes
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

NEW_SHARDS = "shards"  # the word in `allow`


class NewShards:
    """The shards that a pipeline's readers have here, but did not have when the fingerprint `saved` was made.

    `before` is that fingerprint as if it had been made here: differences other than growth, such as a shard that is
    gone, remain. Raises `CheckpointMismatchError` for shards that cannot join.
    """

    def __init__(self, saved: Fingerprint, here: FingerprintHere, local: LocalLanes) -> None:
        self._local = local
        self._shards: dict[str, tuple[int, list[str]]] = {}  # by the reader's branch: how many there were; the new ones
        check_shards(saved, here)
        fields = dict(saved.fields)
        for field, reader in _readers(local.last_stage).items():
            if field in fields and _has_grown(field, fields[field], here.shards[field]):
                old = count(fields[field])
                self._shards[reader.info.branch] = old, here.shards[field].names[old:]
                fields |= {field: here.fields[field], **_same_selection(reader, saved, here, old)}
                fields |= _same_media(reader, saved, here, old)
        self.before = replace(saved, fields=fields)

    @property
    def growth_before(self) -> Growth:
        """The growth with which lanes read the old shards, in each epoch."""
        return {branch: [(0, old)] for branch, (old, _) in self._shards.items()}

    def join(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """`state` with the epochs at which they join. Raises `CheckpointMismatchError` if it lacks lanes."""
        if not self._shards:
            return state
        lanes, facts = _all_lanes(state), read_facts(state)
        growth = self.growth_before | facts.growth
        begun = _begun(lanes, RunFacts(growth), self._local)
        for branch, (old, names) in self._shards.items():
            epoch = begun[branch] + 1
            growth[branch] = [pair for pair in growth[branch] if pair[0] < epoch] + [(epoch, old + len(names))]
            where = f"{branch}: " if branch else ""
            log.warning("%s%d new shards, from %s on: read from epoch %d on", where, len(names), names[0], epoch)
        facts = replace(facts, growth={name: pairs for name, pairs in growth.items() if len(pairs) > 1})
        grown = {name: with_facts(state[name], facts) for name in map(lane_name, lanes)}
        return {**state, **grown, FACTS: pack_state(facts)}


def _readers(last: Stage) -> dict[str, RecordReader]:
    """The readers of a pipeline, by the name of the field that lists their shards."""
    found: dict[str, RecordReader] = {}
    for stage in upstream(last):
        if isinstance(stage, RecordReader):
            field = stage_field(stage, "shards")
            if field in found:
                raise CheckpointMismatchError(f"two readers are called {field}, so no shards can join: use sp.Blend")
            found[field] = stage
    return found


def _has_grown(field: str, saved: Summary, here: ShardList) -> bool:
    """Whether shards were added and all others are the same. Raises `CheckpointMismatchError` for one between them."""
    if begin_with(here, saved):
        return len(here) > count(saved)
    if not isinstance(saved, list):  # hashes do not tell a shard between the old ones from one that is gone
        return False
    before, now = {tuple(shard) for shard in saved}, {tuple(shard) for shard in here.rows()}
    if not before <= now:
        return False
    last, names = saved[-1][0], {name for name, *_ in saved}
    wrong = next(name for name in here.names if name not in names and name < last)
    raise CheckpointMismatchError(
        f"{field}: the new shard {wrong} comes before {last} in the order of names, but samples are counted through "
        f"in this order: give it a name that comes after, such as {_name_after(last)}"
    )


def _name_after(last: str) -> str:
    """A name for a new shard: the next number, if that sorts after the last."""
    numbered = re.fullmatch(r"(.*?)(\d+)(\D*)", last, re.DOTALL)
    if numbered:
        begin, number, end = numbered.groups()
        following = f"{begin}{int(number) + 1:0{len(number)}}{end}"
        if following > last:
            return following
    stem, dot, extension = last.rpartition(".")
    return f"{stem}_1{dot}{extension}" if dot else f"{last}_1"


def _same_selection(reader: RecordReader, saved: Fingerprint, here: Fingerprint, old: int) -> dict[str, Any]:
    """The field of the reader's split and subset, as it is here, if they select the same of the old shards as before.

    Raises `CheckpointMismatchError` for a subset that takes other samples of them now.
    """
    field = stage_field(reader, "selection")
    part = reader.samples.first(old).selection
    if part is None or part.manifest() == saved.fields.get(field):
        return {field: here.fields[field]}
    if type(reader.subset) is int and saved.fields.get(stage_field(reader, "subset")) == reader.subset:
        raise CheckpointMismatchError(
            f"{field}: subset={reader.subset} is a count, and each shard's share of it changes when shards "
            "are added: no shards can join such a run. A share of the samples, such as subset=0.1, does not move"
        )
    return {}


def _same_media(reader: RecordReader, saved: Fingerprint, here: Fingerprint, old: int) -> dict[str, Any]:
    """The fields of what is known of the media, as they are here, if it is the same of the old shards as before."""
    known = reader.dataset.first_shards(old).known_media.settings()
    fields = {stage_field(reader, name): value for name, value in known.items()}
    return {field: here.fields[field] for field, value in fields.items() if saved.fields.get(field) == value}


def _all_lanes(state: Mapping[str, Any]) -> dict[int, LaneState]:
    """The states of all lanes. Raises `CheckpointMismatchError` if some are missing."""
    numbers = lane_numbers(state)
    if len(numbers) < state["lanes"]:
        raise CheckpointMismatchError(
            "new shards join at one epoch for all lanes, which takes the state of all lanes, but this is a "
            f"rank's own part, {len(numbers)} of {state['lanes']} lanes: load what global_state_dict() returns, or the "
            "states of all ranks after merge_states"
        )
    return read_lanes(state, range(state["lanes"]))


def _begun(lanes: Mapping[int, LaneState], facts: RunFacts, local: LocalLanes) -> dict[str, int]:
    """The last epoch that any lane has begun of each reader, by its branch."""
    begun: dict[str, int] = {}
    for lane in lanes.values():
        for reader in _readers(local.looked_at(lane, facts)).values():
            branch = reader.info.branch
            begun[branch] = max(begun.get(branch, -1), reader.begun)
    return begun
