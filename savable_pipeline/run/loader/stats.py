"""`Stats`: a loader's counters, as flat names and numbers; and a warning when the trainer waits too much for data.

They are sums, percentiles of the last times (`Recent`), and the slowest sample and shard of the timed batches
(`Slowest`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from savable_pipeline.data.dataset.ref import TAG_SHIFT, untagged
from savable_pipeline.run.engine.messages import Delivery
from savable_pipeline.run.engine.stage_timing import WatchedSamples
from savable_pipeline.run.loader.observer import BatchStep, Observer
from savable_pipeline.stages.item_ref import batch_rows

log = logging.getLogger(__name__)

_WINDOW_S = 60.0
_NOT_SHOWN = {"items", "first", "tokens", "skipped_tokens"}  # of a source: for `SourceLosses`
_STARVING = 0.25  # the share of a window above which waiting for data is a warning


class Stats(Observer):
    """Counters of one loader, since it was made.

    `find_sources` returns the name of each source ("" without a `Blend`) by its tag; it is called once a batch has been
    given.
    """

    def __init__(self, num_workers: int, find_sources: Callable[[], dict[int, str]]) -> None:
        self._num_workers = num_workers
        self._sources = cache(find_sources)
        self._samples: Counter[int] = Counter()  # by the tag of their source
        self._waits, self._makings = Recent(), Recent()
        self._stage_times: dict[str, Recent] = {}
        self._slowest = Slowest()
        self._seen = (0, 0)  # of the batches that were watched: bytes read, items
        self._counts: Counter[str] = Counter()
        self._batches = 0
        self._wait_s = 0.0
        self._work_s = 0.0  # of all workers together
        now = time.perf_counter()
        self._read = (now, 0, 0)  # when `numbers` was called last, and the batches and items by then
        self._window = (now, 0.0)  # when it began, and the seconds waited by then

    def on_batch(self, step: BatchStep) -> None:
        """Count a batch, and the seconds that the trainer waited for it."""
        delivery, waited_s = step.delivery, time.perf_counter() - step.started
        self._batches += 1
        self._wait_s += waited_s
        made_s, counts = delivery.seconds, delivery.counts
        self._work_s += made_s
        self._waits.add(waited_s)
        self._makings.add(made_s)
        if step.repeated is None:
            self._count_samples(step)
        own = self._counts
        for name, number in counts.items():
            own[name] += number  # type: ignore[assignment]
        if delivery.timed:
            self._time(delivery)
        begun, before = self._window
        now = time.perf_counter()
        if now - begun > _WINDOW_S:
            self._warn_starving(now - begun, self._wait_s - before)
            self._window = now, self._wait_s

    def _count_samples(self, step: BatchStep) -> None:
        """Count the samples of a batch; of a single source without a look at the refs."""
        samples = step.delivery.samples
        if len(self._sources()) != 1:
            tags, counts = np.unique(step.samples.refs[:, 0] >> TAG_SHIFT, return_counts=True)
            self._samples.update(dict(zip(tags.tolist(), counts.tolist(), strict=True)))
            return
        last = samples[-1] if type(samples) is tuple and samples else None
        if type(last) is tuple and len(last) == 3 and type(last[0]) is type(last[1]) is int:  # whole items
            count = len(batch_rows(samples)[1])  # type: ignore[arg-type]
        else:
            count = len(step.samples.refs)
        self._samples[next(iter(self._sources()))] += count

    def _time(self, delivery: Delivery) -> None:
        """Count the measurements of a timed batch."""
        watched = delivery.watched
        if watched is not None:
            self._slowest.add(watched)
            bytes_read, items = self._seen
            items_here = int(delivery.counts.get("Encode/items", 0))
            self._seen = bytes_read + watched.bytes_read, items + items_here
        for name, number in delivery.counts.items():
            if name.endswith("/ns"):
                self._stage_times.setdefault(name[:-3], Recent(256)).add(number / 1e9)

    def on_counts(self, counts: Mapping[str, int | float]) -> None:
        """Add counters of stages."""
        self._counts.update(counts)

    def _warn_starving(self, seconds: float, waited: float) -> None:
        if waited < _STARVING * seconds:
            return
        shares = sorted(self._stage_shares().items(), key=lambda entry: -entry[1])
        where = ", ".join(f"{name} {share:.0%}" for name, share in shares[:3]) or "not measured yet"
        log.warning(
            "training waited for data %.0f of the last %.0f s. Time per stage: %s. num_workers=%d.",
            waited,
            seconds,
            where,
            self._num_workers,
        )

    def _stage_shares(self) -> dict[str, float]:
        """The share of each stage in the time that batches take to make, measured on some of them."""
        spent = {name[:-3]: number for name, number in self._counts.items() if name.endswith("/ns")}
        total = sum(spent.values())
        return {name: number / total for name, number in spent.items()} if total else {}

    def numbers(self) -> dict[str, int | float]:
        """All counters of `totals`, and rates since the last call."""
        now = time.perf_counter()
        items = self._counts["Encode/items"]
        then, batches, items_then = self._read
        self._read = now, self._batches, items
        seconds = max(now - then, 1e-9)
        return {
            **self.totals(),
            "batches_per_s": (self._batches - batches) / seconds,
            "items_per_s": (items - items_then) / seconds,
        }

    def totals(self) -> dict[str, int | float]:
        """All counters by name, and percentiles."""
        counts = {name: number for name, number in self._counts.items() if not name.endswith("/ns")}
        plain = {name: number for name, number in counts.items() if "/source/" not in name}
        tokens = counts.get("OnlinePacker/tokens")
        return {
            "batches": self._batches,
            "samples": self._samples.total(),
            **({} if tokens is None else {"tokens": tokens}),
            **({"bytes": self._bytes_read()} if self._seen[1] else {}),
            "wait_s": self._wait_s,
            "work_s": self._work_s,
            "num_workers": self._num_workers,
            **{f"seconds/{name}": share * self._work_s for name, share in self._stage_shares().items()},
            **plain,
            **_fills(counts),
            **self._of_sources(),
            **self._percentiles(),
            **{name: seconds for name, (seconds, _) in self._slow().items()},
        }

    def _bytes_read(self) -> int:
        """The bytes that were read, as those of the batches that were watched are of their items."""
        seen, items = self._seen
        return int(seen * (self._counts["Encode/items"] / items))

    def _of_sources(self) -> dict[str, int | float]:
        """Counts by source of a `Blend`: samples in batches.

        Drawn and skipped ones, from the stages' counters.
        """
        if not any(self._sources().values() if self._batches else ()):
            return {}
        found: Counter[str] = Counter()
        for tag, name in self._sources().items():
            found[f"source/{name}/samples"] += self._samples[tag]
        for counter, number in self._counts.items():
            _, _, of_source = counter.partition("/source/")
            numeral, _, what = of_source.partition("/")
            if of_source and what not in _NOT_SHOWN:
                found[f"source/{self._sources().get(int(numeral), numeral)}/{what}"] += int(number)
        return dict(found)

    def _percentiles(self) -> dict[str, float]:
        series = {"wait_s": self._waits, "making_s": self._makings}
        series |= {f"stage_s/{name}": recent for name, recent in self._stage_times.items()}
        return {name: value for key, recent in series.items() for name, value in recent.percentiles(key)}

    def names(self) -> dict[str, str]:
        """The shard and the sample behind `slowest_shard_s` and `slowest_sample_s`."""
        return {name: which for name, (_, which) in self._slow().items()}

    def _slow(self) -> dict[str, tuple[float, str]]:
        """The seconds of the slowest sample and shard, as far as they are known, and which they are."""
        found, sample, shard = {}, self._slowest.sample, self._slowest.shard
        if sample is not None:
            found["slowest_sample_s"] = sample.nanoseconds / 1e9, f"{sample.shard}, sample {untagged(sample.number)}"
        if shard is not None:
            found["slowest_shard_s"] = shard[1], shard[0]
        return found


def _fills(counts: Mapping[str, int | float]) -> dict[str, float]:
    """The share of each packer's packs that holds tokens."""
    fills = {}
    for name, tokens in counts.items():
        stage = name.removesuffix("/tokens")
        room = counts.get(f"{stage}/room")
        if stage != name and room is not None and tokens + room:
            fills[f"{stage}/fill"] = tokens / (tokens + room)
    return fills


_PERCENTS = (50, 90, 99)


class Recent:
    """Keeps the last `kept` numbers that were added."""

    def __init__(self, kept: int = 1024) -> None:
        self._numbers: deque[float] = deque(maxlen=kept)
        self.add = self._numbers.append

    def percentiles(self, name: str) -> Iterator[tuple[str, float]]:
        """`NAME/p50`, `/p90` and `/p99`.

        The least number that 50, 90 or 99 % do not exceed. None without numbers.
        """
        ordered = sorted(self._numbers)
        if ordered:
            for percent in _PERCENTS:
                yield f"{name}/p{percent}", ordered[-(-len(ordered) * percent // 100) - 1]


_LEAST = 8  # samples of a shard before its mean counts
_MOST = 4096  # shards that are kept


class SlowSample(NamedTuple):
    """A sample.

    Its shard, its number with the tag of its source, and the nanoseconds that its encoder took.
    """

    shard: str
    number: int
    nanoseconds: int


class Slowest:
    """Sums up the times of samples by shard, reading included."""

    def __init__(self) -> None:
        self.sample: SlowSample | None = None
        self._shards: dict[str, tuple[int, int]] = {}  # samples and nanoseconds

    def add(self, watched: WatchedSamples) -> None:
        """Count the samples of a batch."""
        for shard, number, nanoseconds in watched.samples:
            count, total = self._shards.get(shard, (0, 0))
            self._shards[shard] = count + 1, total + nanoseconds
            if self.sample is None or nanoseconds > self.sample.nanoseconds:
                self.sample = SlowSample(shard, number, nanoseconds)
        if len(self._shards) > _MOST:
            kept = sorted(self._shards, key=self._mean, reverse=True)[: _MOST // 2]
            self._shards = {shard: self._shards[shard] for shard in kept}

    def _mean(self, shard: str) -> float:
        count, total = self._shards[shard]
        return total / count / 1e9

    @property
    def shard(self) -> tuple[str, float] | None:
        """The shard whose samples took longest on average, and that mean in s.

        None while few have been timed.
        """
        known = [shard for shard, (count, _) in self._shards.items() if count >= _LEAST]
        return max(((shard, self._mean(shard)) for shard in known), key=lambda entry: entry[1], default=None)
