"""`Blend`: several sources in one stream, each with its exact share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from savable_pipeline.blend_lanes import LaneCounts
from savable_pipeline.blend_order import LaneTurns, TokenTurns, Turns, TurnsState, Weight, integer_weights, lags_at
from savable_pipeline.blend_sources import Merged
from savable_pipeline.errors import EncodeError
from savable_pipeline.keys import key, permutation
from savable_pipeline.sample import REF, RefArray
from savable_pipeline.stage import ItemRef, Stage, State, as_ref, parse_state

log = logging.getLogger(__name__)

By = Literal["samples", "tokens"]
Until = Literal["all", "first"]
_PHASES = 1024  # steps of the sequence among which that of lane 0 is chosen
_NONE = np.empty(0, REF)


class _BlendState(msgspec.Struct):
    sources: dict[str, dict[str, Any]]
    ended: list[str]
    ahead: dict[str, bytes]
    taken: tuple[str, Any] | None
    turns: TurnsState


class Blend(Merged):
    """Gives what its sources give, by weight: `Blend({"web": a, "books": b}, weights={"web": 7, "books": 3})`.

    The sources are readers, with or without a `ShuffleBuffer`, or branches that end in items or packs, each with its
    own encoder; Blends too. `by="samples"` counts what comes, `by="tokens"` the encoder's `length` of it. In each lane
    the share of a source among the first n samples, for every n, is within 1.5 samples of its weight's; by tokens,
    within about two of the longest items. Where each lane has taken n samples, n a multiple of `stride`, the sum over
    all lanes is as near, but for rare sources in great number: give the batch's size where that is no multiple of 8.
    In a process with few lanes, sums over many cost some time, the more the smaller `stride` is.

    A source that repeats has `epochs=None`; one that ends leaves its turns to the others, or ends the Blend where
    `until` is "first". A source is known by its name, which keys the order of its shards and the random numbers of its
    samples: the same shards under two names are two sources. Raises ValueError for wrong settings.
    """

    def __init__(
        self,
        sources: Mapping[str, Stage],
        *,
        weights: Mapping[str, Weight],
        by: By = "samples",
        until: Until = "all",
        stride: int = 8,
    ) -> None:
        super().__init__(sources)
        if sources.keys() != weights.keys():
            missing, unknown = sorted(sources.keys() - weights.keys()), sorted(weights.keys() - sources.keys())
            raise ValueError(
                f"Blend: every source needs a weight: none is given for {missing}; no source for {unknown}"
            )
        for name, value, choices in [("by", by, get_args(By)), ("until", until, get_args(Until))]:
            if value not in choices:
                raise ValueError(f"Blend: {name} must be one of {', '.join(choices)}, not {value!r}")
        if stride < 1:
            raise ValueError(f"Blend: stride must be at least 1, not {stride}")
        self.weights = integer_weights({name: weights[name] for name in self._stages})
        self.by = by
        self.until = until
        self.stride = stride
        if by == "tokens" and self._encoder is None:
            raise ValueError('Blend: by="tokens" needs items, whose length an encoder knows: blend after Encode')
        self._ended: set[str] = set()
        self._ahead = dict.fromkeys(self._stages, _NONE)  # refs taken from a source whose turn has not come
        self._taken: tuple[str, Any, ItemRef] | None = None  # an item whose length is not known yet
        self._ref: ItemRef = ()

    # What the lane takes.

    def __next__(self) -> Any:
        if self._encoder is not None:
            items, refs = self.take(1)
            if not items:
                raise StopIteration
            self._ref = refs[0]
            return items[0]
        taken = self.take_refs(1)
        if not len(taken):
            raise StopIteration
        self._ref = (int(taken["index"][0]), int(taken["epoch"][0]), 0)
        return self.samples(taken)[0]

    def take(self, n: int) -> tuple[list[Any], list[ItemRef]]:
        """The next item and its ref; none only at the end. Of samples as of any stage that gives them."""
        if self._encoder is None:
            return super().take(n)
        while active := self._active:
            if self._taken is None:
                turns = self._turns
                source = turns.next() if isinstance(turns, TokenTurns) else turns.plan(1)[0]
                items, refs = self._stages[active[source]].take(1)
                if not items:
                    self._end(active[source])
                    continue
                self._taken = active[source], items[0], refs[0]
            name, item, ref = self._taken
            if item is _MISSING:
                item = self._stages[name].fetch(ref)
            self._note_turn(active.index(name), self._stages[name], item)
            self._taken = None
            return [item], [ref]
        return [], []

    def _note_turn(self, source: int, stage: Stage, item: Any) -> None:
        if isinstance(self._turns, Turns):
            self._turns.take([source])
            return
        assert stage.encoder is not None
        try:
            self._turns.took(source, int(stage.encoder.length(item)))
        except Exception as error:
            raise EncodeError(
                f"{type(stage.encoder).__name__}.length raised {type(error).__name__}: {error}; stage Blend, source "
                f"{self._active[source]!r} of {self.lane}"
            ) from error

    def take_refs(self, n: int) -> RefArray:
        """The refs of some samples, at most `n`: REF (any,); none only at the end."""
        while n and self._active:
            given = self._take_turns(n)
            if len(given):
                return given
        return _NONE

    def _take_turns(self, n: int) -> RefArray:
        """The refs of the next turns, up to the first of a source that has ended."""
        turns, active = self._turns, self._active
        assert isinstance(turns, Turns)
        chosen = np.array(turns.plan(n))
        for source, name in enumerate(active):
            mine = np.flatnonzero(chosen == source)
            have = self._load(name, len(mine))
            if have < len(mine):
                chosen = chosen[: mine[have]]
        given = np.empty(len(chosen), REF)
        for source, name in enumerate(active):
            mine = np.flatnonzero(chosen == source)
            given[mine] = self._ahead[name][: len(mine)]
            self._ahead[name] = self._ahead[name][len(mine) :]
        turns.take(chosen.tolist())
        if len(chosen) < n:
            self._end(active[turns.plan(1)[0]])
        return given

    def _load(self, name: str, n: int) -> int:
        """Have `n` refs of a source ahead, or as many as it still gives."""
        while len(self._ahead[name]) < n:
            fresh = self._stages[name].take_refs(n - len(self._ahead[name]))
            if not len(fresh):
                break
            self._ahead[name] = np.concatenate([self._ahead[name], fresh])
        return len(self._ahead[name])

    # Whose turn it is.

    @cached_property
    def _active(self) -> list[str]:
        """The sources that have more, by name; none when the Blend has ended."""
        if self._ended and self.until == "first":
            return []
        return [name for name in self._stages if name not in self._ended]

    @cached_property
    def _turns(self) -> Turns | TokenTurns:
        """The turns of the sources that have more, from the lane's own place on."""
        weights = [self.weights[name] for name in self._active]
        alone = self.lane.count == 1 or len(weights) < len(self._stages)  # a source ends at another step in each lane
        if self.by == "tokens":
            return TokenTurns(weights, [0] * len(weights) if alone else self._lags)
        if alone:
            return Turns(weights)
        lane, stride = self.lane, self.stride
        counts = lane.shared(
            ("blend counts", tuple(weights), lane.count, stride), lambda: LaneCounts(weights, lane.count, stride=stride)
        )
        return LaneTurns(weights, counts, int(permutation(self._lanes_key, lane.count)[lane.index]))

    @property
    def _lags(self) -> list[int]:
        """How far each source is behind where this lane begins: each does at another place of one sequence."""
        lane, weights, phase = self.lane, tuple(self.weights.values()), self._lanes_key % _PHASES
        found: list[list[int]] = lane.shared(
            ("blend lags", weights, lane.count, phase), lambda: lags_at(weights, range(phase, phase + lane.count))
        )
        return found[lane.index]

    @property
    def _lanes_key(self) -> int:
        """The key of what all lanes draw together."""
        return key(self.lane.seed, "blend", self.lane.epoch, self.depth, self.branch)

    def _end(self, name: str) -> None:
        self._ended.add(name)
        self._drop_turns()

    def _drop_turns(self) -> None:
        self.__dict__.pop("_active", None)
        self.__dict__.pop("_turns", None)

    # State.

    def save_state(self) -> State:
        """`sources`: the state of each, by name; `ended`: those that have; `turns`: the shares so far.

        `ahead`: refs taken from a source whose turn has not come, 12 bytes each; `taken`: name and ref of an item that
        was not given yet because an error came between, else None.
        """
        turns = self._turns
        return {
            "sources": {name: stage.save_state() for name, stage in self._stages.items()},
            "ended": sorted(self._ended),
            "ahead": {name: refs.tobytes() for name, refs in self._ahead.items() if len(refs)},
            "taken": None if self._taken is None else (self._taken[0], self._taken[2]),
            "turns": {
                "names": list(self._active),
                "weights": list(turns.weights),
                "counts": list(turns.counts),
                **({"lags": list(turns.lags), "unit": turns.unit} if isinstance(turns, TokenTurns) else {}),
            },
        }

    def restore_state(self, state: State) -> None:
        """Go on from where `state` was taken. A source that is new begins; the turns do where weights are others."""
        saved = parse_state(self, state, _BlendState)
        for name, stage in self._stages.items():
            if name in saved.sources:
                stage.restore_state(saved.sources[name])
        self._ended = {name for name in saved.ended if name in self._stages}
        self._ahead = {name: np.frombuffer(saved.ahead.get(name, b""), REF) for name in self._stages}
        for name, refs in self._ahead.items():
            if len(refs):
                self._stages[name].announce(refs)
        self._taken = None
        if saved.taken is not None and saved.taken[0] in self._stages:
            self._taken = saved.taken[0], _MISSING, as_ref(saved.taken[1])
        self._drop_turns()
        turns = self._turns
        if saved.turns.names == self._active and saved.turns.weights == turns.weights:
            turns.counts = saved.turns.counts
            if isinstance(turns, TokenTurns):
                turns.lags, turns.unit = saved.turns.lags, saved.turns.unit
        else:
            log.info("Blend of %s: the shares are counted anew from here", self.lane)

    def settings(self) -> dict[str, Any]:
        """The names of the sources, their weights, and every other argument."""
        return {
            "sources": list(self._stages),
            "weights": self.weights,
            "by": self.by,
            "until": self.until,
            "stride": self.stride,
        }

    # What it is.

    @property
    def ref(self) -> ItemRef:
        """The ref of what `next` gave last."""
        return self._ref

    @property
    def endless(self) -> bool:
        """Whether some source never ends; until the first, whether none does."""
        return (any if self.until == "all" else all)(stage.endless for stage in self.sources)


_MISSING: Any = object()  # stands for an item that is made again from its ref
