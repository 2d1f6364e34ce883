"""What a report says in words: whether the run waited for data, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from savable_pipeline.tools.preview.noted_counters import NotedCounters

_NO_WAIT, _MUCH_WAIT = 0.02, 0.10  # shares of the time
_BUSY = 0.75  # of the workers' time: more workers help
_SLOW_TAIL = 5  # times the median: then single batches are what is waited for
_FULL, _EVEN = 0.95, 0.05
_SPARE = 1.2
_HELP = {
    "Encode": "decode or augment less, or store what the encoder makes",
    "TarShardReader": "a nearer disk, a larger cache, or larger shards",
    "ShuffleBuffer": "reading is what it waits for: a nearer disk or a larger cache",
    "OnlinePacker": "fewer open packs, or an encoder that tells lengths (length_of)",
    "Batcher": "a batch() that copies less: sp.stack writes where the trainer reads",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """The counters that tell whether the trainer waited for data. `share` is that of its time."""

    share: float
    verdict: str


def waited(counters: NotedCounters) -> Waiting | None:
    """None where the ledger has no counters."""
    if not counters.seconds:
        return None
    share = min(1.0, counters.totals["wait_s"] / counters.seconds)
    if share < _NO_WAIT:
        return Waiting(share, "not data-bound")
    return Waiting(share, "data-bound" if share >= _MUCH_WAIT else "hardly data-bound")


def advice(counters: NotedCounters, *, slowest_wait: float) -> Iterator[str]:
    """Sentences, the most useful one first. `slowest_wait`: the share of waiting for the slowest rank."""
    found = waited(counters)
    if found is not None and found.share >= _NO_WAIT:
        yield _workers(counters)
        yield from _stage(counters)
        yield from _tail(counters)
    fill = fill_of(counters)
    if fill is not None and fill < _FULL:
        yield f"Packs are {fill:.0%} full: more open_packs= fill them better, at the price of memory."
    if slowest_wait >= _EVEN:
        yield (
            f"Ranks wait {slowest_wait:.0%} of their time for the slowest one, by cost: sp.Balance(hold=32) before the "
            "Batcher evens their packs out."
        )
    if counters.totals["restarts"]:
        yield f"{counters.totals['restarts']:.0f} workers were replaced: the log says what they were at."


def _workers(counters: NotedCounters) -> str:
    training_s = max(counters.seconds - counters.totals["wait_s"], 1e-9)
    wanted = ceil(_SPARE * counters.totals["work_s"] / training_s)
    if not counters.worker_seconds:
        return (
            f"Batches are made in the trainer's own process, which waits as long as that takes: num_workers={wanted} "
            "would keep up, where there are as many cores."
        )
    busy = min(1.0, counters.worker_work_s / counters.worker_seconds)
    wanted = max(wanted, int(counters.last["num_workers"]) + 1)
    if busy >= _BUSY:
        return f"The workers were busy {busy:.0%} of the time: num_workers={wanted} would keep up."
    return (
        f"The workers were busy only {busy:.0%} of the time: what is waited for are single slow batches, or "
        "data that come late; a larger prefetch= evens that out."
    )


def _stage(counters: NotedCounters) -> Iterator[str]:
    stages = counters.of_stages("seconds/")
    if whole := sum(stages.values()):
        name, spent = next(iter(stages.items()))
        help_ = f": {_HELP[name]}" if name in _HELP else ""
        yield f"Of the time that batches take to make, {spent / whole:.0%} is {name}{help_}."


def _tail(counters: NotedCounters) -> Iterator[str]:
    median, most = (counters.last.get(f"making_s/{percent}", 0.0) for percent in ("p50", "p99"))
    if median and most > _SLOW_TAIL * median:
        yield f"One batch in 100 takes {most:.3g} s to make where {median:.3g} s are usual: see the slowest sample."


def fill_of(counters: NotedCounters) -> float | None:
    """The share of the packs that holds tokens; None without packs."""
    tokens, room = counters.totals["OnlinePacker/tokens"], counters.totals["OnlinePacker/room"]
    return tokens / (tokens + room) if tokens + room else None
