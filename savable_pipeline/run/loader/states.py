"""`States`: makes the state of a position, and the position of a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.data.shards.paths import addresses_of, commits_of
from savable_pipeline.errors import CheckpointMismatchError, StateError
from savable_pipeline.run.loader.decided import applicable
from savable_pipeline.run.loader.fresh_lanes import may_be_cut_otherwise, with_facts
from savable_pipeline.run.loader.growth import NEW_SHARDS, NewShards
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.fingerprint import (
    Fingerprint,
    FingerprintHere,
    checked_allow,
    compare,
    fingerprint,
    pack_fingerprint,
    unpack_fingerprint,
)
from savable_pipeline.run.state.flights import refuse_flights
from savable_pipeline.run.state.restoring import restoring
from savable_pipeline.run.state.state_dict import (
    check_flat,
    lane_name,
    read_facts,
    read_lanes,
    refuse_spans,
)

_CHANGED = "settings changed within the epoch"  # an entry of a state's fingerprint, while that epoch lasts


class States:
    """Saves and loads positions of a run with these settings, on this rank, whose pipeline `local` builds."""

    def __init__(self, settings: LoaderSettings, ranks: Ranks, local: LocalLanes) -> None:
        self._settings, self._ranks, self._local = settings, ranks, local

    @cached_property
    def fingerprint(self) -> FingerprintHere:
        """What a state must agree on. It holds the index of the shards open."""
        found = fingerprint(self._local.last_stage, seed=self._settings.seed, lanes=self._settings.lanes)
        return replace(found, addresses={**found.addresses, **addresses_of(self._local.pinned)})

    @cached_property
    def packed(self) -> bytes:
        """The same as bytes."""
        return pack_fingerprint(self.fingerprint)

    @cached_property
    def _packed_changed(self) -> bytes:
        """The same in an epoch that was begun with other settings."""
        found = self.fingerprint
        return pack_fingerprint(replace(found, environment={**found.environment, _CHANGED: "yes"}))

    def close(self) -> None:
        """Let go of the index of the shards."""
        self.__dict__.pop("fingerprint", None)

    def flat(self, position: Position) -> dict[str, Any]:
        """The state dict of a position."""
        return position.flat(self._packed_changed if position.changed else self.packed)

    def loaded(self, state: Mapping[str, Any], allow: Iterable[str]) -> Position:
        """The position in a state. `SavableLoader.load_state_dict` says what is raised; then nothing has changed."""
        check_flat(state)
        refuse_spans(state)
        refuse_flights(state)
        with restoring("the state"):
            saved = unpack_fingerprint(state["fingerprint"])
            commits = commits_of(saved.addresses)
        pinned = dict(self._local.pinned)
        try:
            if not commits.items() <= pinned.items():
                self._pin(commits)
            return self._loaded(state, saved, allow)
        except BaseException:
            if self._local.pinned != pinned:
                self._pin(pinned)
            raise

    def _pin(self, pinned: PinnedShards) -> None:
        """Have readers read these shards and commits."""
        self._local.pin(pinned)
        for made in ("fingerprint", "packed", "_packed_changed"):
            self.__dict__.pop(made, None)

    def _loaded(self, state: Mapping[str, Any], saved: Fingerprint, allow: Iterable[str]) -> Position:
        """The position in a state of the fingerprint `saved`, in data that have grown as its own."""
        here, allowed = self.fingerprint, {allow} if isinstance(allow, str) else set(allow)
        checked_allow(allowed - {NEW_SHARDS}, saved, here)
        with restoring("the state"):
            loaded = self._read(state, saved, here, allowed)
            if loaded.facts.growth and self._settings.restarts:
                raise CheckpointMismatchError(
                    "shards joined this run at a later epoch, but with on_iter='restart' each pass is epoch 0, which "
                    "has none of them: begin a new loader"
                )
            self._local.learn(loaded.facts)
        return loaded

    def _read(self, state: Mapping[str, Any], saved: Fingerprint, here: FingerprintHere, allowed: set[str]) -> Position:
        """The position in a state of the fingerprint `saved`, whose fields may differ where they are `allowed`."""
        changed = saved.environment.pop(_CHANGED, None) is not None and state["slot"] > 0
        new = NewShards(saved, here, self._local) if NEW_SHARDS in allowed else None
        differing = compare(new.before if new else saved, here, allowed - {NEW_SHARDS})
        if state["lanes"] != self._settings.lanes:
            raise StateError(
                f"the state says that it has {state['lanes']} lanes, and its fingerprint {self._settings.lanes}; use "
                "another copy of the checkpoint"
            )
        state = new.join(state) if new else state
        lanes, facts = read_lanes(state, self._ranks.lanes(self._settings.lanes)), read_facts(state)
        decided, last = facts.decisions, self._local.last_stage
        if decided and (left := applicable(decided, last, differing)) != decided:
            facts = replace(facts, decisions=left)
            state = {**state, **{name: with_facts(state[name], facts) for name in map(lane_name, lanes)}}
            lanes = {number: replace(lane, more=None) for number, lane in lanes.items()}
        differs = bool(differing) or changed or may_be_cut_otherwise(facts, self._local.grown(facts), state["epoch"])
        loaded = Position.saved(state, lanes, facts, self._ranks, self._settings.lanes, pad=self._settings.pad)
        # with larger batches, say, a lane of which some was left may have no batch
        return loaded.with_changes() if differs and state["slot"] else loaded
