"""`Stats`, the counters of a loader, and `SourceLosses`, about skipped samples.

`Stats` has sums, percentiles of the last times (`Recent`), and the slowest sample and shard of the timed batches
(`Slowest`). It warns when the trainer waits too much for data.

`SourceLosses` warns once about a source of which much is skipped, by the counters that come with each batch. It raises
an error if all samples of a source are skipped. The error depends only on the lanes' states (`LaneState.dropped`), so a
resumed run raises it at the same step as an uninterrupted one. A source that has yielded a sample before the checkpoint
never causes it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.data.dataset.ref import TAG_SHIFT, untagged
from savable_pipeline.errors import EncodeError, SavableError
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.stage_timing import WatchedSamples
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import BatchStep, Observer, Position
from savable_pipeline.run.state.lane_state import FIRST, LaneState, SourceCounter, reasons_of, unpack_state
from savable_pipeline.run.state.state_dict import lane_numbers, read_lanes
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.item_ref import batch_rows
from savable_pipeline.stages.pipeline import upstream

log = logging.getLogger(__name__)

_WINDOW_S = 60.0  # length of the windows in which the waiting time is measured
_NOT_SHOWN = {"items", "first", "tokens", "skipped_tokens"}  # counters of a source that only `SourceLosses` uses
_STARVING = 0.25  # fraction of `_WINDOW_S` above which waiting for data causes a warning


class Stats(Observer):
    """Counters of one loader since it was created.

    `find_sources` returns the name of each source ("" without a `Blend`) by its tag. It is called after the first
    batch. Each function in `others` returns the counters of another part of the run, which `totals` includes.
    """

    def __init__(
        self, find_sources: Callable[[], dict[int, str]], others: Sequence[Callable[[], Mapping[str, int]]] = ()
    ) -> None:
        self._sources = cache(find_sources)
        self._other_counters = others
        self._samples: Counter[int] = Counter()  # by tag of their source
        self._wait_times, self._build_times = Recent(), Recent()
        self._stage_times: dict[str, Recent] = {}
        self._slowest = Slowest()
        # bytes read and number of items, summed over the batches that `stage_timing` selects for measurements
        self._timed_bytes = self._timed_items = 0
        self._counts: Counter[str] = Counter()
        self._batches = 0
        self._wait_s = 0.0
        self._work_s = 0.0  # sum over all workers
        now = time.perf_counter()
        self._last_call = (now, 0, 0)  # time of the last call of `numbers`, and batches and items at that time
        self._window = (now, 0.0)  # start of the window, and the seconds waited before it

    def on_batch(self, step: BatchStep) -> None:
        """Count a batch, and the seconds that the trainer waited for it."""
        delivery, now = step.delivery, time.perf_counter()
        waited_s = now - step.started
        self._batches += 1
        self._wait_s += waited_s
        self._work_s += delivery.seconds
        self._wait_times.add(waited_s)
        self._build_times.add(delivery.seconds)
        if step.repeated is None:
            self._count_samples(step)
        self._counts.update(delivery.counts)  # adds each
        if delivery.timed:
            self._add_times(delivery)
        window_start, waited_before = self._window
        if now - window_start > _WINDOW_S:
            self._warn_starving(now - window_start, self._wait_s - waited_before)
            self._window = now, self._wait_s

    def _count_samples(self, step: BatchStep) -> None:
        """Count the samples of a batch per source. With a single source, their refs are not read."""
        ref, sources = step.samples.ref, self._sources()
        if len(sources) == 1:
            last_row = ref[-1] if ref else None
            is_item = type(last_row) is tuple and len(last_row) == 3 and type(last_row[0]) is type(last_row[1]) is int
            self._samples[next(iter(sources))] += len(batch_rows(ref)[1] if is_item else step.samples.refs)
            return
        tags, counts = np.unique(step.samples.refs[:, 0] >> TAG_SHIFT, return_counts=True)
        self._samples.update(dict(zip(tags.tolist(), counts.tolist(), strict=True)))

    def _add_times(self, delivery: Delivery) -> None:
        """Add the measurements of a timed batch."""
        if (watched := delivery.watched) is not None:
            self._slowest.add(watched)
            self._timed_bytes += watched.bytes_read
            self._timed_items += int(delivery.counts.get("Encode/items", 0))
        for name, number in delivery.counts.items():
            if name.endswith("/ns"):
                self._stage_times.setdefault(name[:-3], Recent(256)).add(number / 1e9)

    def _warn_starving(self, seconds: float, waited: float) -> None:
        """Warn if the trainer has waited for data for more than a quarter of the last `seconds`."""
        if waited < _STARVING * seconds:
            return
        shares = sorted(self._stage_shares().items(), key=lambda entry: -entry[1])
        where = ", ".join(f"{name} {share:.0%}" for name, share in shares[:3]) or "not measured yet"
        log.warning(
            "training waited for data %.0f of the last %.0f s. Time per stage: %s. num_workers=%d.",
            *(waited, seconds, where, self.totals().get("num_workers", 0)),
        )

    def _stage_shares(self) -> dict[str, float]:
        """Return the fraction of the build time that each stage takes, measured on some batches."""
        spent = {name[:-3]: number for name, number in self._counts.items() if name.endswith("/ns")}
        total = sum(spent.values())
        return {name: number / total for name, number in spent.items()} if total else {}

    def numbers(self) -> dict[str, int | float]:
        """Return all counters of `totals`, and rates since the last call."""
        now, items = time.perf_counter(), self._counts["Encode/items"]
        then, batches, items_then = self._last_call
        self._last_call = now, self._batches, items
        seconds = max(now - then, 1e-9)
        return {
            **self.totals(),
            "batches_per_s": (self._batches - batches) / seconds,
            # lost items are subtracted from the counter, and may be more than the new ones
            "items_per_s": max(0, items - items_then) / seconds,
        }

    def totals(self) -> dict[str, int | float]:
        """Return all counters by name, and percentiles."""
        counts = {name: number for name, number in self._counts.items() if not name.endswith("/ns")}
        plain = {name: number for name, number in counts.items() if "/source/" not in name}
        tokens = counts.get("OnlinePacker/tokens")
        return {
            "batches": self._batches,
            "samples": self._samples.total(),
            **({} if tokens is None else {"tokens": tokens}),
            **({"bytes": self._bytes_read()} if self._timed_items > 0 else {}),
            "wait_s": self._wait_s,
            "work_s": self._work_s,
            **{f"seconds/{name}": share * self._work_s for name, share in self._stage_shares().items()},
            **plain,
            **_packing_efficiencies(counts),
            **self._source_counts(),
            **self._percentiles(),
            **{name: seconds for name, (seconds, _) in self._slowest_named().items()},
            **{name: number for find in self._other_counters for name, number in find().items()},
        }

    def _bytes_read(self) -> int:
        """Return the bytes that were read, estimated from the timed batches."""
        return int(self._timed_bytes * (self._counts["Encode/items"] / self._timed_items))

    def _source_counts(self) -> dict[str, int | float]:
        """Return the samples in batches, and counters of stages, of each source of a `Blend`."""
        if not any(self._sources().values() if self._batches else ()):
            return {}
        found: Counter[str] = Counter()
        for tag, name in self._sources().items():
            found[f"source/{name}/samples"] += self._samples[tag]
        for counter, number in self._counts.items():
            _, _, of_source = counter.partition("/source/")
            tag_text, _, counter = of_source.partition("/")
            if of_source and counter not in _NOT_SHOWN:
                found[f"source/{self._sources().get(int(tag_text), tag_text)}/{counter}"] += int(number)
        return dict(found)

    def _percentiles(self) -> dict[str, float]:
        """Return percentiles of the waiting, build and stage times, by name."""
        series = {"wait_s": self._wait_times, "making_s": self._build_times}
        series |= {f"stage_s/{name}": recent for name, recent in self._stage_times.items()}
        return {name: value for key, recent in series.items() for name, value in recent.percentiles(key)}

    def names(self) -> dict[str, str]:
        """Return the names of the slowest shard and sample, by counter."""
        return {counter: name for counter, (_, name) in self._slowest_named().items()}

    def _slowest_named(self) -> dict[str, tuple[float, str]]:
        """Return the seconds and the name of the slowest sample and of the slowest shard, by counter, if known."""
        sample, slowest_shard, found = self._slowest.sample, self._slowest.shard, dict[str, tuple[float, str]]()
        if sample is not None:
            found["slowest_sample_s"] = sample.nanoseconds / 1e9, f"{sample.shard}, sample {untagged(sample.number)}"
        if slowest_shard is not None:
            shard, mean_s = slowest_shard
            found["slowest_shard_s"] = mean_s, shard
        return found


def _packing_efficiencies(counts: Mapping[str, int | float]) -> dict[str, float]:
    """Return the packing efficiency of each packer, the fraction of its packs that is not padding."""
    efficiencies = {}
    for name, tokens in counts.items():
        stage = name.removesuffix("/tokens")
        padding = counts.get(f"{stage}/room")
        if stage != name and padding is not None and tokens + padding:
            efficiencies[f"{stage}/fill"] = tokens / (tokens + padding)
    return efficiencies


_PERCENTS = (50, 90, 99)


class Recent:
    """The last `count` numbers that were added."""

    def __init__(self, count: int = 1024) -> None:
        self._numbers: deque[float] = deque(maxlen=count)
        self.add = self._numbers.append

    def percentiles(self, name: str) -> Iterator[tuple[str, float]]:
        """Yield `NAME/p50`, `/p90` and `/p99`, the percentiles of the numbers."""
        ordered = sorted(self._numbers)
        if ordered:
            for percent in _PERCENTS:
                yield f"{name}/p{percent}", ordered[-(-len(ordered) * percent // 100) - 1]


_LEAST_SHARD_SAMPLES = 8  # least number of samples of a shard for its mean to count
_MOST_SHARDS = 4096  # most shards whose times are in memory


class SlowSample(NamedTuple):
    """Shard of a sample, its index with its source's tag, and its encoding time."""

    shard: str
    number: int
    nanoseconds: int


class Slowest:
    """The slowest sample, and the sum of encoding times, with reads, by shard."""

    def __init__(self) -> None:
        self.sample: SlowSample | None = None
        self._shards: dict[str, tuple[int, int]] = {}  # number of samples and nanoseconds

    def add(self, watched: WatchedSamples) -> None:
        """Count the samples of a batch."""
        for shard, number, nanoseconds in watched.samples:
            count, total = self._shards.get(shard, (0, 0))
            self._shards[shard] = count + 1, total + nanoseconds
            if self.sample is None or nanoseconds > self.sample.nanoseconds:
                self.sample = SlowSample(shard, number, nanoseconds)
        if len(self._shards) > _MOST_SHARDS:
            slowest = sorted(self._shards, key=self._mean, reverse=True)[: _MOST_SHARDS // 2]
            self._shards = {shard: self._shards[shard] for shard in slowest}

    def _mean(self, shard: str) -> float:
        count, total = self._shards[shard]
        return total / count / 1e9

    @property
    def shard(self) -> tuple[str, float] | None:
        """Return the slowest shard and its mean seconds per sample, or None.

        Shards with few samples are not considered.
        """
        known = [shard for shard, (count, _) in self._shards.items() if count >= _LEAST_SHARD_SAMPLES]
        return max(((shard, self._mean(shard)) for shard in known), key=lambda entry: entry[1], default=None)


_LEAST_SOURCE_SAMPLES = 1000  # least number of samples of a source to check how many are skipped
_MAX_SKIPPED_SHARE = 0.1  # largest fraction of a source's samples or tokens to skip without a warning
# A run ends if this many samples of a source are skipped, or all samples of an epoch, and none is used.
_MOST_SKIPPED_SAMPLES = 10_000
# If this rank has only a part of the lanes, it sees random samples. After as many as 5 epochs have, the probability
# that it has missed a usable sample is e**-5.
_WAIT_EPOCHS = 5
_MOST_REASONS = 5  # most reasons in a message
_MISSING_PART_FIX = "Check the names of parts in the encoder with `savable info PATH`"  # most skip reasons are "no ..."
_FIXES = {
    "Encode": "Change the encoder or its settings, or the data",
    "OnlinePacker": "Pass too_long='split', 'truncate' or 'skip'",
    "BucketBatcher": "Raise the last bound",
}


class SourceLosses(Observer):
    """Observer of how many samples each stage skips of each source.

    Only the lanes of this rank count. Samples that `exclude=`, `reconfigure`, a filter or another setting drops do not
    count. A *key* is the name of a stage and the tag of a source, such as "Encode/7", as in `DroppedCounts`.
    """

    def __init__(self, local: LocalLanes) -> None:
        self._local = local
        self._counts: Counter[tuple[str, str]] = Counter()  # by key and name of the counter, such as "items"
        self._skipped: dict[str, Counter[str]] = {}  # number of samples, by key and then by reason
        self._warned: set[str] = set()  # keys
        self._next_check: Counter[str] = Counter()  # by key: at how many skipped samples to read the lanes' states

    @cached_property
    def _sources(self) -> dict[str, tuple[str, int]]:
        """Return the name and the number of samples of each source, by the text of its tag.

        The name is "" without a `Blend`, and the number 0 if the source has the weight 0.
        """
        stages = list(upstream(self._local.last_stage))
        readers = [stage.info for stage in stages if not stage.sources]
        off = frozenset[int]().union(*(stage.off_tags for stage in stages if isinstance(stage, Blend)))
        return {str(tag): (info.branch, info.population * (tag not in off)) for info in readers for tag in info.tags}

    def _source(self, key: str) -> tuple[str, int]:
        """Return the name and the number of samples of the source in a key, ("", 0) if it was removed."""
        return self._sources.get(key.rpartition("/")[2], ("", 0))

    def on_load(self, position: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Return a function that starts counting again from a loaded state.

        The state may have lanes that other ranks ran, and that have used samples of a source.
        """
        return None if state is None else partial(self._load, state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._counts, self._skipped, self._next_check = Counter(), {}, Counter()
        for number in lane_numbers(state):
            with suppress(SavableError):  # a lane that this rank does not need
                skipped = read_lanes(state, [number])[number].dropped or {}
                # {} for a key: the source has yielded a sample
                self._counts.update((key, "items") for key, of_lane in skipped.items() if not of_lane)

    def _add_counts(self, counts: Mapping[str, int | float]) -> set[str]:
        """Add the counters of a batch. Return the keys whose stage skipped samples of their source for it."""
        keys_with_skips = set()
        for name, number in counts.items():
            parsed = SourceCounter.parse(name)
            if parsed is not None and parsed.reason:
                self._skipped.setdefault(parsed.key, Counter())[parsed.reason] += int(number)
                keys_with_skips.add(parsed.key)
            elif parsed is not None:
                self._counts[parsed.key, parsed.counter] += int(number)
        return keys_with_skips

    def on_batch(self, step: BatchStep) -> None:
        """Count a batch. Raises `EncodeError` for a source without a usable sample."""
        if step.repeated is not None:
            return
        after = step.after
        for key in self._add_counts(step.delivery.counts):
            (_, population), skipped = self._source(key), self._skipped[key].total()
            own_population = population * len(after.lanes) // after.lane_count  # of the lanes of this rank
            if population and not self._counts[key, "items"] and skipped >= self._next_check[key]:
                by_lanes = self._skipped_by_lanes(key, after)
                # number of further skipped samples after which the run ends
                remaining = min(_MOST_SKIPPED_SAMPLES, _WAIT_EPOCHS * population) - reasons_of(by_lanes).total()
                if own_population == population:
                    remaining = min(remaining, population - by_lanes[FIRST])
                if by_lanes and remaining <= 0:
                    raise self._error(key, by_lanes, len(after.lanes))
                self._next_check[key] = skipped + max(1, remaining)
            self._warn_of_fraction(key, min(_LEAST_SOURCE_SAMPLES, own_population))

    def on_skip(self, position: Position) -> None:
        """Check all sources at the end of an epoch."""
        if not position.is_over:
            return
        states = [unpack_state(lane.state, LaneState, f"lane {number}") for number, lane in position.lanes.items()]
        for key in dict.fromkeys(key for state in states for key in state.dropped or {}):
            (_, population), skipped = self._source(key), self._skipped_by_lanes(key, position)
            limit = (population + 1) // 2 if len(position.lanes) == position.lane_count else _LEAST_SOURCE_SAMPLES
            if population and skipped and reasons_of(skipped).total() >= limit:
                raise self._error(key, skipped, len(position.lanes))
        for key in self._skipped:
            self._warn_of_fraction(key, 1)

    def _skipped_by_lanes(self, key: str, position: Position) -> Counter[str]:
        """Return the counts of samples that this rank's lanes skipped of a source, by reason and `FIRST`.

        The result is empty if a lane has used a sample of the source.
        """
        found: Counter[str] = Counter()
        for number, lane in position.lanes.items():
            saved = unpack_state(lane.state, LaneState, f"lane {number}")
            of_lane = (saved.dropped or {}).get(key)
            if of_lane == {} or (saved.batches and not saved.dropped):  # otherwise every source has yielded a sample
                self._counts[key, "items"] += 1
                return Counter()
            found.update(of_lane or {})
        return found

    def _error(self, key: str, skipped: Counter[str], lanes: int) -> EncodeError:
        stage, _, _ = key.rpartition("/")
        source, _ = self._source(key)
        reasons = reasons_of(skipped)
        data = f"the source {source!r}" if source else "the data"
        return EncodeError(
            f"{stage} skipped the first {reasons.total():,} samples of {data}: {_listed(reasons)}. "
            f"{_fix(stage, reasons)}.\n  on {lanes} lanes of this rank"
        )

    def _warn_of_fraction(self, key: str, least_count: int) -> None:
        """Warn once if more than a tenth of a source's samples or tokens is skipped.

        With fewer than `least_count` samples, used and skipped, there is no warning yet.
        """
        skipped, items = self._skipped[key].total(), self._counts[key, "items"]
        skipped_tokens, tokens = self._counts[key, "skipped_tokens"], self._counts[key, "tokens"]
        fraction = skipped / max(1, skipped + items)
        token_fraction = skipped_tokens / max(1, skipped_tokens + tokens)
        if key in self._warned or skipped + items < least_count or max(fraction, token_fraction) <= _MAX_SKIPPED_SHARE:
            return
        self._warned.add(key)
        stage, _, _ = key.rpartition("/")
        source, _ = self._source(key)
        log.warning(
            "%s skips %.0f %% of %s%s: %s. %s.",
            *(stage, 100 * fraction, f"the source {source!r}" if source else "the samples"),
            f", {token_fraction:.0%} of its tokens" if skipped_tokens else "",
            *(_listed(self._skipped[key]), _fix(stage, self._skipped[key])),
        )


def _fix(stage: str, reasons: Counter[str]) -> str:
    """Return what to do about a stage that skips samples, by the most frequent reason."""
    lacks_part = stage == "Encode" and reasons.most_common(1)[0][0].startswith("no ")
    return _MISSING_PART_FIX if lacks_part else _FIXES.get(stage, "See loader.stats()")


def _listed(reasons: Counter[str]) -> str:
    """Format reasons, such as `'no txt' 990, 'empty' 10`."""
    shown = ", ".join(f"{reason!r} {number:,}" for reason, number in reasons.most_common(_MOST_REASONS))
    return f"{shown} and {len(reasons) - _MOST_REASONS} more reasons" if len(reasons) > _MOST_REASONS else shown
