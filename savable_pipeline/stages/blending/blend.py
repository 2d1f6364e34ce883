"""`Blend`: stage that merges several sources in exact proportions.

turns                 a b a a c a b …          turns.py: by weights, which may change during the run
sources  a ──▶ ahead  a0 a1 a2                 elements that were taken from a source before their turns
         b ──▶ ahead  b0
         c ──▶ ahead  c0 c1
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.weights import Weight, integer_weights
from savable_pipeline.data.dataset.ref import REF, TAG_SHIFT, Ref, RefArray, source_counter, tag_of
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.advice import check_choice, check_count, closest
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.blending.turns import TokenTurns, Turns, TurnsState, build_turns
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked, value_of
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_buffer import restored_elements, saved_elements
from savable_pipeline.stages.item_ref import Element, ItemRef, as_ref, sample_indices
from savable_pipeline.stages.pipeline import sample_names
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import ItemStage, SampleStage, Stage, State, parse_state, saved_refs
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import SettingRule
from savable_pipeline.stages.task_encoder import Skip, common_encoder

log = logging.getLogger(__name__)

By = Literal["samples", "tokens"]
Until = Literal["all", "first"]
_Elements: TypeAlias = NDArray[Any]  # refs of samples, REF (n,), or `Element`s, object (n,)


def check_blend(
    sources: Iterable[str], weights: Mapping[str, Weight] | Schedule | None, by: By, until: Until, stride: int
) -> None:
    """Raise ValueError or TypeError for a wrong setting of a `Blend`."""
    for name in sources:
        if not isinstance(name, str) or not name or set("/#") & set(name):
            raise ValueError(f"Blend: the name of a source must be a non-empty str without / and #, not {name!r}")
    if not isinstance(weights, Mapping | Schedule | None):
        raise TypeError(f"Blend: weights must be a dict by the names of the sources, not {weights!r}")
    check_choice("Blend", "by", by, get_args(By))
    check_choice("Blend", "until", until, get_args(Until))
    check_count("Blend", "stride", stride)
    if isinstance(weights, Schedule) and weights.unit != by:
        raise ValueError(f"Blend: a schedule by {weights.unit} needs by={weights.unit!r}, not by={by!r}")
    if weights is None and by == "tokens":
        raise ValueError('Blend: by="tokens" needs weights, because only the numbers of samples are known.')
    if weights is not None:
        weighted = weights.names if isinstance(weights, Schedule) else weights.keys()
        for name in sorted(weighted - set(sources)):
            hint = closest(name, sources)
            raise ValueError(f"Blend: weights has no source for {name!r}. The sources are {', '.join(sources)}.{hint}")
        if missing := sorted(set(sources) - weighted):
            raise ValueError(f"Blend: every source needs a weight, but {', '.join(missing)} has none. 0 turns it off.")
        if not isinstance(weights, Schedule):
            integer_weights(weights)


class _BlendState(msgspec.Struct):
    sources: dict[str, dict[str, Any]]
    ended: list[str]
    ahead: dict[str, Any]
    turns: TurnsState


class Blend(ChunkedStage, SampleStage, ItemStage):
    """Merge of sources by weight.

    An example is `Blend({"web": a, "books": b}, weights={"web": 7, "books": 3})`.

    Proportions are exact whenever each lane has yielded a multiple of `stride` samples: the samples of a source in all
    lanes then differ by at most 1.2 from its share, and those in one lane by at most 2.6 (the largest deviations that a
    search found). By tokens, a lane differs by at most about twice the longest item. In between, each lane shuffles its
    turns, so that the ranks of a step draw from different sources.

    Args:
        sources: Stages by name: all of samples, or all of items or packs, each branch with its own encoder. A source
            may be a Blend. The name is part of the keys of a source's order and random numbers, so the same shards
            under two names are different sources.
        weights: The weight of each source. None: its number of samples. 0 turns a source off; `allow={"weights"}` can
            turn it on again. With a `Schedule` weights change during the run, and the draws of a source follow the
            integral of its share.
        by: "samples" counts samples or items, "tokens" their lengths by `encoder.length` of the branch. A pack counts
            with the length of all its items.
        until: When a finite source (`epochs=`) ends: "all" continues with the other sources by their weights, "first"
            ends the Blend.
        stride: The number of samples after which shares are exact. Set it to the batch size if that is not a multiple
            of 8. A small stride takes more time.

    Raises:
        ValueError: A setting is wrong.
        CheckpointMismatchError: A ref is of a source that was removed or renamed.

    Example:
        >>> lane = sp.Lane(seed=7)
        >>> sources = {name: sp.TarShardReader(f"shards/{name}.tar", lane, shuffle=False) for name in "01"}
        >>> blend = sp.Blend(sources, weights={"0": 0.75, "1": 0.25})
        >>> [next(blend).shard for _ in range(8)].count("0.tar")
        6
    """

    setting_rules: ClassVar[Mapping[str, SettingRule]] = {
        "sources": SettingRule(field="sources"),
        "weights": SettingRule(field="weights"),
        "schedule": SettingRule(allowed_by="weights"),
    }

    def __init__(
        self,
        sources: Mapping[str, Stage],
        *,
        weights: Mapping[str, Weight] | Schedule | None = None,
        by: By = "samples",
        until: Until = "all",
        stride: int = 8,
    ) -> None:
        _check_sources(sources)
        check_blend(sources, weights, by, until, stride)
        self.yields = next(iter(sources.values())).yields
        # sorted, because the order of turns must not depend on the order of the dict
        self._stages = dict(sorted(sources.items()))
        self.weights: dict[str, int] = {}
        self.until = until
        self._before = 0  # samples or tokens that were yielded before the counts of the turns started
        self._current_turns: Turns | TokenTurns | None = None
        self._ended: set[str] = set()
        self.name_branch("")
        self.schedule = weights if isinstance(weights, Schedule) else None
        by_name = dict.fromkeys(weights.names, 1) if isinstance(weights, Schedule) else weights
        if by_name is None:
            by_name = {name: stage.info.population for name, stage in self._stages.items()}
        self.weights = integer_weights({name: by_name[name] for name in self._stages})
        self.by, self.stride = by, stride
        self._counters: dict[str, list[str]] = {}  # names of counters, by source
        self._calls: dict[str, EncoderCalls] = {}  # by source, to measure items
        self._end_sources(self._ended)
        # elements taken before their turns
        self._ahead: dict[str, _Elements] = {name: self._array([]) for name in self._stages}
        # a finite run does not know the counts of earlier epochs, so a schedule needs an endless run
        if self.schedule is not None and not self.describe().endless:
            raise ValueError("Blend: a schedule needs an endless source. Set epochs=None in one reader.")
        if by == "tokens" and self.yields == "samples":
            raise ValueError("Blend: by='tokens' needs items. Blend after Encode.")

    def describe(self) -> StageInfo:
        """Describe the merged elements of all sources.

        The stage is endless if one source with a weight is, or all of them with `until="first"`.
        """
        infos = [stage.info for stage in self.sources]
        are_endless = [self._stages[name].info.endless for name in self._positive_weights]
        return StageInfo(
            infos[0].lane,
            depth=1 + max(info.depth for info in infos),
            population=sum(info.population for info in infos),
            endless=(any if self.until == "all" else all)(are_endless),
            tags=frozenset(self._stage_of),
            origins=frozenset[int]().union(*(info.origins for info in infos)),
            branch=self._branch,
            encoder=common_encoder([info.encoder for info in infos]),
            excluded=reduce(or_, (info.excluded for info in infos)),
            yields_excluded=any(info.yields_excluded for info in infos),
            raises=all(info.raises for info in infos),
            declared=any(info.declared for info in infos),
        )

    @property
    def sources(self) -> tuple[Stage, ...]:
        """Return the sources, in the order of their names."""
        return tuple(self._stages.values())

    @property
    def names(self) -> list[str]:
        """Return the sorted names of the sources."""
        return list(self._stages)

    @property
    def off_tags(self) -> frozenset[int]:
        """Return the tags of the sources with weight 0."""
        return frozenset[int]().union(
            *(stage.info.tags for name, stage in self._stages.items() if name not in self._positive_weights)
        )

    def name_branch(self, name: str) -> None:
        """Set the name of each source as a branch.

        It is the source's own name OWN, or `name/OWN` if this Blend is a source of another one.

        Args:
            name: The name of this Blend as a source of another one, or "".
        """
        self._branch = name
        for own_name, stage in self._stages.items():
            _name_branch(stage, f"{name}/{own_name}" if name else own_name)
        self._stage_of = {tag: stage for stage in self._stages.values() for tag in stage.info.tags}
        if len(self._stage_of) < sum(len(stage.info.tags) for stage in self._stages.values()):
            raise ValueError(f"Blend: two of {', '.join(self._stages)} have the same tag. Rename one.")
        decided = next(iter(self.sources)).lane.facts.decisions.weights.get(name, {})
        # before the branch has its name, a decision may be for another Blend
        self._decided = decided if decided.keys() == self._stages.keys() else None
        self._end_sources(self._ended)
        vars(self).pop("info", None)

    def make(self, elements: Sequence[Element]) -> None:
        """Build the values of elements, each by its source.

        Raises `CheckpointMismatchError` if this Blend has no such source.
        """
        for stage, of_stage in groupby(elements, lambda element: self._source_of(element.ref)):
            chunked(stage).make(list(of_stage))

    def is_certain(self, ref: ItemRef) -> bool:
        """Return whether an element can be rebuilt for certain, according to its source."""
        return chunked(self._source_of(ref)).is_certain(ref)

    def _source_of(self, ref: ItemRef | Ref) -> Stage:
        """Return the source of an element. Raises `CheckpointMismatchError` if there is no such source."""
        if isinstance(ref, Ref):
            for stage in self.sources:
                if ref.source in stage.info.origins:
                    return stage
            raise CheckpointMismatchError(f"Blend: {ref} belongs to none of the sources {', '.join(self._stages)}")
        return self._source_with_tag(tag_of(next(sample_indices(as_ref(ref)))))

    def _source_with_tag(self, tag: int) -> Stage:
        """Return the source whose sample indices have this tag. Raises `CheckpointMismatchError` if there is none."""
        if tag not in self._stage_of:
            raise CheckpointMismatchError(
                f"Blend: the state has a source that is not in {', '.join(self._stages)}. Restore it."
            )
        return self._stage_of[tag]

    @property
    def _positive_weights(self) -> dict[str, int]:
        """Return the weights that are not 0. They are those that the run decided, otherwise the setting's."""
        weights = self.weights if self._decided is None else {name: self._decided[name] for name in self._stages}
        return {name: weight for name, weight in weights.items() if weight}

    def _end_sources(self, ended: set[str]) -> None:
        """Set which sources have ended, and `_active`: the others with a weight, or none if the Blend has ended."""
        is_over = bool(ended) and self.until == "first"
        self._ended = ended
        self._active = [] if is_over else [name for name in self._positive_weights if name not in ended]
        if self._current_turns is not None:
            self._before += self._current_turns.taken
        self._current_turns = None

    @property
    def _turns(self) -> Turns | TokenTurns:
        """Return the turns of the sources that have not ended."""
        if self._current_turns is None:
            schedule, weights = self.schedule, self._positive_weights
            if schedule is None or self._decided is not None:
                schedule = Schedule([(0, {name: weights[name] for name in self._active})], unit=self.by)
            self._current_turns = build_turns(self.info, schedule, self._active, self._before, stride=self.stride)
        return self._current_turns

    def take(self, n: int) -> Any:
        """Take the next 1 to `n` elements, or none at the end.

        By tokens, only one is taken, because its length decides the next turn.
        """
        taken = self._array([])
        while not len(taken) and self._active:
            taken = self._take_turns(n) if isinstance(self._turns, Turns) else self._take_token_turn(self._turns)
        return list(taken) if taken.dtype == object else taken

    def _take_token_turn(self, turns: TokenTurns) -> _Elements:
        """Return the element of the next turn in an array, empty if the element is lost or its source has ended."""
        name = self._active[turns.next()]
        if not self._fill_ahead(name, 1):
            self._end_sources({*self._ended, name})
            return self._array([])
        element: Element = self._ahead[name][0]
        if (length := self._length(name, element)) is not None and length < 1:
            raise EncodeError(
                f"Blend: an item of {name!r} has {length} tokens. Return at least 1 from `length`, or skip the "
                f"sample.\n  {sample_names(self, element.ref)}"
            )
        taken, self._ahead[name] = self._ahead[name][: length is not None], self._ahead[name][1:]
        if length is not None:
            turns.advance(self._active.index(name), length)
            self._count_drawn(name, 1, length)
        return taken

    def _take_turns(self, n: int) -> _Elements:
        """Return the elements of the next `n` turns, or only of those before the turn of a source that has ended."""
        active, turns = self._active, self._turns
        assert isinstance(turns, Turns)
        chosen = turns.plan(n)
        for source, name in enumerate(active):
            positions = np.flatnonzero(chosen == source)
            available = self._fill_ahead(name, len(positions))
            if available < len(positions):
                chosen = chosen[: positions[available]]
        drawn = np.empty(len(chosen), self._ahead[active[0]].dtype)
        for source, name in enumerate(active):
            positions = np.flatnonzero(chosen == source)
            drawn[positions] = self._ahead[name][: len(positions)]
            self._count_drawn(name, len(positions))
            self._ahead[name] = self._ahead[name][len(positions) :]
        turns.advance(chosen)
        if len(chosen) < n:
            self._end_sources({*self._ended, active[turns.plan(1)[0]]})
        return drawn

    def _fill_ahead(self, name: str, n: int) -> int:
        """Take elements of a source until its `_ahead` has `n`, or the source ends. Returns how many it has."""
        source = self._stages[name]
        while len(self._ahead[name]) < n:
            taken = chunked(source).take(n - len(self._ahead[name]))
            if not len(taken):
                break
            self._ahead[name] = np.concatenate([self._ahead[name], self._array(taken)])
        ready = len(self._ahead[name])
        if self._makes and n and ready and self.yields != "samples":
            value_of(source, self._ahead[name][0])
        return ready

    def _array(self, taken: Any) -> _Elements:
        """Return the result of a source's `take` as an array."""
        return np.asarray(taken, REF) if self.yields == "samples" else np.fromiter(taken, object, len(taken))

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """Return the samples with these refs. Parts are read on access."""
        found: list[Any] = [None] * len(refs)
        for stage, positions in self._by_source(refs):
            for position, sample in zip(positions.tolist(), stage.open_samples(refs[positions]), strict=True):
                found[position] = sample
        return found

    def prefetch(self, refs: RefArray) -> None:
        """Start to download the samples with these refs, each by its source.

        For local files this does nothing.
        """
        for stage, positions in self._by_source(refs):
            stage.prefetch(refs[positions])

    def _by_source(self, refs: RefArray) -> Iterator[tuple[SampleStage, NDArray[np.int64]]]:
        """Yield each source of these samples, and the positions of its refs: int64 (any,)."""
        tags = (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)
        for tag in np.unique(tags).tolist():
            yield cast(SampleStage, self._source_with_tag(tag)), np.flatnonzero(tags == tag)

    def _length(self, name: str, element: Element) -> int | None:
        """Return the length of an element, or None if it is lost. If its size is unknown, it is built."""
        # use the sizes even of a built pack: its own length may be larger, and is unknown after a resume
        if element.sizes is not None:
            return sum([length for length, _ in element.sizes])
        stage = self._stages[name]
        if type(value_of(stage, element)) is Skip:
            return None
        if name not in self._calls:
            self._calls[name] = EncoderCalls(f"Blend, source {name!r}", stage.info, None, "batch")
        return self._calls[name].length(element, least=-(1 << 62))  # the caller rejects lengths below 1

    def _count_drawn(self, name: str, elements: int, tokens: int = 0) -> None:
        """Count drawn elements of a source, unless it is a Blend, which counts those of its own sources."""
        if (counters := self._counters.get(name)) is None:
            tags = self._stages[name].info.tags
            names = [source_counter(min(tags) << TAG_SHIFT, counter) for counter in ("drawn", "drawn_tokens")]
            counters = self._counters[name] = names if len(tags) == 1 else []
        if counters:
            elements_counter, tokens_counter = counters
            self.counts[elements_counter] += elements
            if tokens:
                self.counts[tokens_counter] += tokens

    def save_state(self) -> State:
        """Return the position.

        `sources` has the state of each source by name, `ended` the names of ended sources, and `turns` the counts so
        far. `ahead` has what was taken from a source before its turn: refs of samples, 12 bytes each, or ref and sizes
        of each item.
        """
        turns = self._turns.save() if self._active else {"weights": 0, "counts": [], "taken": 0}
        return {
            "sources": {name: stage.save_state() for name, stage in self._stages.items()},
            "ended": sorted(self._ended),
            "ahead": {
                name: ahead.tobytes() if self.yields == "samples" else saved_elements(ahead)
                for name, ahead in self._ahead.items()
                if len(ahead)
            },
            "turns": {"names": list(self._active), **turns, **({"before": self._before} if self._before else {})},
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`.

        New sources start at their first sample. New weights restart the turns.
        """
        saved = parse_state(self, state, _BlendState)
        for name, stage in self._stages.items():
            if name in saved.sources:
                stage.restore_state(saved.sources[name])
        self._end_sources({name for name in saved.ended if name in self._stages})
        self._ahead = {name: self._restored_ahead(name, saved.ahead.get(name)) for name in self._stages}
        self._current_turns, self._before = None, saved.turns.before
        if self._active and saved.turns.names == self._active and saved.turns.weights == self._turns.weights:
            self._turns.restore(saved.turns)
        else:
            self._current_turns, self._before = None, saved.turns.before + saved.turns.taken
            log.info("Blend of %s: the proportions are counted from this batch on", self.lane)

    def _restored_ahead(self, name: str, saved: Any) -> _Elements:
        """Return the elements of a state that were taken from a source before their turns."""
        if self.yields != "samples":
            return self._array(restored_elements(self, saved or []))
        refs = saved_refs(self, saved or b"")
        if len(refs):
            cast(SampleStage, self._stages[name]).prefetch(refs)
        return refs

    def settings(self) -> dict[str, Any]:
        """Return the names of the sources, their weights, and every other argument."""
        return {
            "sources": list(self._stages),
            "weights": self.weights if self.schedule is None else {},
            "by": self.by,
            "until": self.until,
            "stride": self.stride,
            **({"schedule": self.schedule.settings()} if self.schedule is not None else {}),
        }


def _name_branch(stage: Stage, name: str) -> None:
    """Set the name of the source to which a stage and all stages upstream belong.

    Raises ValueError for a stage that must yield in step with other lanes.
    """
    if isinstance(stage, Blend | RecordReader):
        stage.name_branch(name)
        return
    # in different lanes, the turns of a source are at different steps
    if chunked(stage).in_step:
        raise ValueError(f"{chunked(stage).in_step} must be after the Blend, not in its source {name!r}")
    for source in stage.sources:
        _name_branch(source, name)
    vars(stage).pop("info", None)  # so that `describe` is called again, now with the name


def _check_sources(sources: Mapping[str, Stage]) -> None:
    """Raise ValueError unless sources are stages of one lane that all yield samples or all yield items."""
    if not sources:
        raise ValueError("Blend: sources is empty. Pass a dict with at least one source.")
    for name, stage in sources.items():
        if not isinstance(stage, Stage):
            raise ValueError(f"Blend: the source {name!r} must be a stage, not {type(stage).__name__}")
    if any(stage.lane is not next(iter(sources.values())).lane for stage in sources.values()):
        raise ValueError("Blend: all sources must be built for the same lane")
    if len({stage.yields == "samples" for stage in sources.values()}) > 1:
        raise ValueError(
            "Blend: all sources must have samples, or all items. Put Encode into each, or after the Blend."
        )
