"""`States`: the state of a position, and the position of a state.

    save    Position ──▶ flat dict: numbers, packed fingerprint, facts, and the states of this rank's lanes
    load    flat dict ──▶ checks of its form ──▶ its commits of the Hub are pinned ──▶ compare the fingerprints
            ──▶ new shards join ──▶ decisions that still apply ──▶ Position, which observers check before it counts

Saving copies the states that came with the batches, so it asks no worker. Loading changes the run only if nothing
raises. Otherwise `Run` undoes all changes.

`NewShards` lets shards that were added to a dataset join a run, at one epoch for all lanes:

    state of all lanes ──▶ the last epoch that the reader of any lane has started: 4
                       ──▶ (epoch 5, 12 shards), from then on one of the run's facts

Epochs that some lane has started keep their shards. No lane has started the epoch at which the new shards join, so all
lanes divide it in the same way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.run_facts import Growth, RunFacts
from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.data.dataset.shard_digests import Summary, count, starts_with
from savable_pipeline.data.shards.paths import addresses_of, commits_of
from savable_pipeline.data.shards.shard_list import ShardList
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.loader.decided import applicable_decisions
from savable_pipeline.run.loader.local_lanes import LocalLanes, chunk_sizes
from savable_pipeline.run.loader.position import LanePosition, Position
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state import state_dict
from savable_pipeline.run.state.fingerprint import (
    Fingerprint,
    PipelineFingerprint,
    check_shards,
    checked_allow,
    compare,
    fingerprint,
    pack_fingerprint,
    stage_field,
    unpack_fingerprint,
)
from savable_pipeline.run.state.flights import ACKNOWLEDGE, reject_flights
from savable_pipeline.run.state.lane_state import LaneState, damaged, pack_state, restoring, with_facts
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

NEW_SHARDS = "shards"  # in `allow`, it lets new shards join
_CHANGED = "settings changed within the epoch"  # key in the environment of a saved fingerprint, until the epoch ends


class States:
    """Saves and loads positions of a rank, whose pipeline `local` builds."""

    def __init__(self, settings: LoaderSettings, ranks: Ranks, local: LocalLanes) -> None:
        self._settings, self._ranks, self._local = settings, ranks, local

    @cached_property
    def fingerprint(self) -> PipelineFingerprint:
        """Return the settings and data that must equal those of a loaded state.

        The index of the shards stays open until `close`.
        """
        found = fingerprint(self._local.last_stage, seed=self._settings.seed, lanes=self._settings.lanes)
        return replace(found, addresses={**found.addresses, **addresses_of(self._local.pinned)})

    @cached_property
    def packed(self) -> bytes:
        """Return the fingerprint as bytes."""
        return pack_fingerprint(self.fingerprint)

    @cached_property
    def _packed_changed(self) -> bytes:
        """Return the fingerprint as bytes, in an epoch that was started with other settings."""
        found = self.fingerprint
        return pack_fingerprint(replace(found, environment={**found.environment, _CHANGED: "yes"}))

    def close(self) -> None:
        """Release the index of the shards."""
        self.__dict__.pop("fingerprint", None)

    def flat(self, position: Position) -> dict[str, Any]:
        """Return the state dict of a position."""
        return {
            "order": ORDER,
            "state": STATE,
            "lanes": position.lane_count,
            "epoch": position.epoch,
            "slot": position.slot,
            "fingerprint": self._packed_changed if position.changed else self.packed,
            state_dict.FACTS: pack_state(position.facts),
            ACKNOWLEDGE: 0,
            **{state_dict.lane_name(lane): position.lanes[lane].state for lane in sorted(position.lanes)},
        }

    def loaded(self, state: Mapping[str, Any], allow: Iterable[str]) -> Position:
        """Return the position that a state dict has saved.

        Raises the errors of `SavableLoader.load_state_dict`.
        """
        state_dict.check_flat(state)
        state_dict.reject_spans(state)
        if not self._settings.acknowledge:
            reject_flights(state)
        with restoring("the state"):
            saved = unpack_fingerprint(state["fingerprint"])
            commits = commits_of(saved.addresses)
        if not commits.items() <= self._local.pinned.items():
            self.pin(commits)
        return self._loaded(state, saved, allow)

    def pin(self, pinned: PinnedShards) -> None:
        """Let readers read these shards and commits."""
        self._local.pin(pinned)
        for name in ("fingerprint", "packed", "_packed_changed"):
            self.__dict__.pop(name, None)

    def _loaded(self, state: Mapping[str, Any], saved: Fingerprint, allow: Iterable[str]) -> Position:
        """Return the position in a state with the fingerprint `saved`, and use its facts from now on."""
        ours, allowed = self.fingerprint, {allow} if isinstance(allow, str) else set(allow)
        checked_allow(allowed - {NEW_SHARDS}, saved, ours)
        with restoring("the state"):
            loaded = self._read(state, saved, ours, allowed)
            if loaded.facts.growth and self._settings.restarts_on_iter:
                raise CheckpointMismatchError(
                    "shards joined this run at a later epoch, which on_iter='restart' cannot reach. Create a new "
                    "loader."
                )
            self._local.use_facts(loaded.facts)
        return loaded

    def _read(
        self, state: Mapping[str, Any], saved: Fingerprint, ours: PipelineFingerprint, allowed: set[str]
    ) -> Position:
        """Return the position in a state with the fingerprint `saved`, whose fields in `allowed` may differ."""
        was_changed = saved.environment.pop(_CHANGED, None) is not None and state["slot"] > 0
        new = NewShards(saved, ours, self._local) if NEW_SHARDS in allowed else None
        differing = compare(new.before if new else saved, ours, allowed - {NEW_SHARDS})
        if state["lanes"] != self._settings.lanes:
            raise damaged(f"the state has {state['lanes']} lanes, but its fingerprint {self._settings.lanes}")
        state = new.join(state) if new else state
        lanes = state_dict.read_lanes(state, self._ranks.lanes(self._settings.lanes))
        facts = state_dict.read_facts(state)
        decided, last = facts.decisions, self._local.last_stage
        if decided and (in_effect := applicable_decisions(decided, last, differing)) != decided:
            facts = replace(facts, decisions=in_effect)
            state = {**state, **{name: with_facts(state[name], facts) for name in map(state_dict.lane_name, lanes)}}
            lanes = {number: replace(lane, more=None) for number, lane in lanes.items()}
        has_other_shares = _may_have_other_shares(facts, self._local.last_stage_with(facts), state["epoch"])
        differs = bool(differing) or was_changed or has_other_shares
        slot, lane_count, pad = state["slot"], self._settings.lanes, self._settings.pad
        # Then it is unknown whether lanes have another batch. With larger batches, for example, some may have none.
        changed = differs and slot > 0
        positions = {
            n: LanePosition(state[state_dict.lane_name(n)], None if changed else lane.more) for n, lane in lanes.items()
        }
        resumed: Any = {"iterator": "loaded", "facts": facts, "changed": changed}
        return Position(self._ranks, lane_count, pad, state["epoch"], slot, positions, slot, **resumed)


def _may_have_other_shares(facts: RunFacts, last: Stage, epoch: int) -> bool:
    """Return whether the epoch may have been started with another `tail`, and so divided otherwise among the lanes.

    The fingerprint does not contain the tail. `last` is the last stage of a lane with these facts.
    """
    readers = (stage for stage in upstream(last) if isinstance(stage, RecordReader))
    by_tail = any(reader.shares_of(epoch).is_cut_by_tail for reader in readers)
    return by_tail and facts.chunk_sizes != chunk_sizes(last, epoch)


class NewShards:
    """Shards that the readers of a pipeline did not have when a fingerprint was saved.

    `before` is the saved fingerprint, with the current values of the fields that differ only because of new shards.
    Other differences, such as a missing shard, remain in it. Raises `CheckpointMismatchError` for shards that cannot
    join.
    """

    def __init__(self, saved: Fingerprint, ours: PipelineFingerprint, local: LocalLanes) -> None:
        self._local = local
        # by the reader's branch: the number of its old shards, and the names of its new ones
        self._shards: dict[str, tuple[int, list[str]]] = {}
        check_shards(saved, ours)
        fields = dict(saved.fields)
        for field, reader in _readers(local.last_stage).items():
            if field in fields and _has_grown(field, fields[field], ours.shards[field]):
                old = count(fields[field])
                self._shards[reader.info.branch] = old, ours.shards[field].names[old:]
                fields |= {field: ours.fields[field], **_same_selection(reader, saved, ours, old)}
                fields |= _same_media(reader, saved, ours, old)
        self.before = replace(saved, fields=fields)

    @property
    def growth_before(self) -> Growth:
        """Return the `RunFacts.growth` with which lanes read only the old shards."""
        return {branch: [(0, old)] for branch, (old, _) in self._shards.items()}  # from epoch 0 on, `old` shards

    def join(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `state` with facts that say at which epochs the new shards join.

        Raises `CheckpointMismatchError` if the state lacks lanes.
        """
        if not self._shards:
            return state
        lanes, facts = _all_lanes(state), state_dict.read_facts(state)
        growth = self.growth_before | facts.growth
        last_started = _last_started_epochs(lanes, RunFacts(growth), self._local)
        for branch, (old, names) in self._shards.items():
            epoch = last_started[branch] + 1
            growth[branch] = [pair for pair in growth[branch] if pair[0] < epoch] + [(epoch, old + len(names))]
            where = f"{branch}: " if branch else ""
            log.warning("%s%d new shards, from %s on, are read from epoch %d on", where, len(names), names[0], epoch)
        facts = replace(facts, growth={name: pairs for name, pairs in growth.items() if len(pairs) > 1})
        grown = {name: with_facts(state[name], facts) for name in map(state_dict.lane_name, lanes)}
        return {**state, **grown, state_dict.FACTS: pack_state(facts)}


def _readers(last: Stage) -> dict[str, RecordReader]:
    """Return the readers of a pipeline, by the name of the field that lists their shards."""
    found: dict[str, RecordReader] = {}
    for stage in upstream(last):
        if isinstance(stage, RecordReader):
            field = stage_field(stage, "shards")
            if field in found:
                raise CheckpointMismatchError(f"two readers are called {field}, so no shards can join. Use sp.Blend.")
            found[field] = stage
    return found


def _has_grown(field: str, saved: Summary, ours: ShardList) -> bool:
    """Return whether `ours` has new shards and all saved ones are unchanged.

    Raises `CheckpointMismatchError` for a new shard that sorts between old ones.
    """
    if starts_with(ours, saved):
        return len(ours) > count(saved)
    if not isinstance(saved, list):  # only hashes: a shard between the old ones looks like a missing one
        return False
    before, now = {tuple(shard) for shard in saved}, {tuple(shard) for shard in ours.rows()}
    if not before <= now:
        return False
    last, names = saved[-1][0], {name for name, *_ in saved}
    wrong = next(name for name in ours.names if name not in names and name < last)
    raise CheckpointMismatchError(
        f"{field}: the new shard {wrong} sorts before {last}. Give it a name that sorts after it, such as "
        f"{_name_after(last)}."
    )


def _name_after(last: str) -> str:
    """Return a name that sorts after `last`, if possible with the next number."""
    numbered = re.fullmatch(r"(.*?)(\d+)(\D*)", last, re.DOTALL)
    if numbered:
        begin, number, end = numbered.groups()
        following = f"{begin}{int(number) + 1:0{len(number)}}{end}"
        if following > last:
            return following
    stem, dot, extension = last.rpartition(".")
    return f"{stem}_1{dot}{extension}" if dot else f"{last}_1"


def _same_selection(reader: RecordReader, saved: Fingerprint, ours: Fingerprint, old: int) -> dict[str, Any]:
    """Return the field of the reader's selection if it still selects the same samples of the `old` shards, else {}.

    Raises `CheckpointMismatchError` for a subset that is a count, because it selects other samples of more shards.
    """
    field = stage_field(reader, "selection")
    old_selection = reader.samples.first(old).selection
    if old_selection is None or old_selection.manifest() == saved.fields.get(field):
        return {field: ours.fields[field]}
    if type(reader.subset) is int and saved.fields.get(stage_field(reader, "subset")) == reader.subset:
        raise CheckpointMismatchError(
            f"{field}: subset={reader.subset} is a count, so no shards can join. Use a fraction, such as subset=0.1."
        )
    return {}


def _same_media(reader: RecordReader, saved: Fingerprint, ours: Fingerprint, old: int) -> dict[str, Any]:
    """Return the fields of known media whose values for the first `old` shards equal the saved ones."""
    known = reader.dataset.first_shards(old).known_media.settings()
    fields = {stage_field(reader, name): value for name, value in known.items()}
    return {field: ours.fields[field] for field, value in fields.items() if saved.fields.get(field) == value}


def _all_lanes(state: Mapping[str, Any]) -> dict[int, LaneState]:
    """Return the states of all lanes. Raises `CheckpointMismatchError` if some are missing."""
    numbers = state_dict.lane_numbers(state)
    if len(numbers) < state["lanes"]:
        raise CheckpointMismatchError(
            f"new shards need the state of all lanes, not {len(numbers)} of {state['lanes']}. Load "
            "global_state_dict() or merge_states(...)."
        )
    return state_dict.read_lanes(state, range(state["lanes"]))


def _last_started_epochs(lanes: Mapping[int, LaneState], facts: RunFacts, local: LocalLanes) -> dict[str, int]:
    """Return the last epoch of each reader that any lane has started, by the reader's branch."""
    last_started: dict[str, int] = {}
    for lane in lanes.values():
        for reader in _readers(local.lane_at(lane, facts)).values():
            branch = reader.info.branch
            last_started[branch] = max(last_started.get(branch, -1), reader.last_epoch_read)
    return last_started
