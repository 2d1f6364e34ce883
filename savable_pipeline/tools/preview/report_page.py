"""Page of a run's ledger: waits and advice, batches, and skipped samples.

Its pictures are plain values for a template that writes SVG: lines over the run, and bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import Any

from savable_pipeline.core.wording import counted
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.tools.preview.ledger_numbers import (
    PIECES,
    BatchCounts,
    CostStep,
    ExpectedShares,
    NotedCounters,
    summed,
    waiting,
)
from savable_pipeline.tools.preview.page import render

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
_COLOURS = 6
_STEPS = (1, 2, 2.5, 5, 10)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Tick:
    """Mark at an axis: its position in the picture, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """Line: its name, the class of its colour, and its points in SVG.

    `dashed` is the expected line.
    """

    name: str
    colour: str
    points: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines in a frame of `WIDTH` by `HEIGHT`."""

    lines: Sequence[Line]
    rows: Sequence[Tick]
    columns: Sequence[Tick]
    x_name: str
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of a fraction of the whole, 0 to 1, with its number in words."""

    name: str
    share: float
    text: str


def picture(
    lines: Mapping[str, Points],
    x_name: str,
    *,
    expected: Mapping[str, Points] | None = None,
    most: float = 0.0,
    y_text: Callable[[float], str] = "{:.0%}".format,
) -> Picture | None:
    """Return lines by name, with the expected ones; None without two points.

    Both axes start at 0. The y axis goes up to `most`, or as far as a point does.
    """
    if not any(len(points) > 1 for points in lines.values()):
        return None
    expected = expected or {}
    everything = [point for points in [*lines.values(), *expected.values()] for point in points]
    xs = [x for x, _ in everything]
    low, high = 0.0, max(*xs, 1e-9)
    rows = _ticks(0.0, max(most, *(y for _, y in everything), 1e-9))
    top = rows[-1]

    def placed(points: Points) -> str:
        return " ".join(f"{_across(x, low, high):.1f},{_up(y, top):.1f}" for x, y in points)

    drawn = []
    for number, (name, points) in enumerate(lines.items()):
        colour = f"c{number % _COLOURS}"
        if name in expected:
            drawn.append(Line(name, colour, placed(expected[name]), dashed=True))
        drawn.append(Line(name, colour, placed(points)))
    columns = [Tick(_across(x, low, high), f"{x:,.6g}") for x in _ticks(low, high) if low <= x <= high]
    return Picture(drawn, [Tick(_up(y, top), y_text(y)) for y in rows], columns, x_name)


def _across(x: float, low: float, high: float) -> float:
    return _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)


def _up(y: float, top: float) -> float:
    return HEIGHT - _BOTTOM - y / top * (HEIGHT - _TOP - _BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five, from `low` or below it to `high` or above it."""
    about = (high - low) / 4
    unit = 1.0
    while unit > about:
        unit /= 10
    while unit * 10 <= about:
        unit *= 10
    step = next(unit * factor for factor in _STEPS if unit * factor >= about)
    first = int(low // step)
    last = -int(-high // step)
    return [number * step for number in range(first, last + 1)]


_MOST_LINES = 6  # sources in a picture; all are in the table
_MOST_STARTS = 200
_PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """Source: its fraction of the samples, the expected one, and its counters."""

    name: str
    samples: int
    share: float
    expected: float | None
    drawn: float
    skipped: float


@dataclass(frozen=True, slots=True)
class StartRow:
    """A start of all ranks."""

    at: str
    ranks: int
    epoch: int
    slot: int
    yielded: int
    lost: int


def report_page(ledger: LedgerFiles) -> bytes:
    """Return one file of HTML without scripts, UTF-8.

    Raises `SavableError` for a ledger that cannot be read.
    """
    recorded, counters = BatchCounts(ledger), NotedCounters(ledger)
    expected = ExpectedShares(ledger.starts[-1])
    slowest_wait = waiting(recorded.steps)
    mean, worst = counters.waits()
    return render(
        "report.html.jinja",
        title=str(ledger.folder),
        width=WIDTH,
        height=HEIGHT,
        recorded=recorded,
        samples=sum(recorded.samples),
        starts=_starts(ledger, recorded),
        started=len(ledger.together),
        waited=waited(counters),
        advice=list(run_advice(counters, slowest_wait=slowest_wait)),
        seconds=counters.seconds,
        waits=picture(
            {"all ranks": mean} | ({"the rank that waited most": worst} if worst != mean else {}),
            counters.unit,
            most=0.1,
        ),
        stages=_shares(counters.of_stages("seconds/")),
        times=_times(counters),
        names=counters.names,
        last=counters.last,
        sources=_sources(recorded, counters, expected),
        by=expected.by,
        scheduled=expected.schedule is not None,
        courses=_courses(recorded),
        fill=fill_of(counters),
        fills=picture({"tokens in packs": counters.fills()}, counters.unit, most=1.0),
        steps=recorded.steps,
        slowest_wait=slowest_wait,
        step_waits=_step_waits(recorded.steps),
        skipped=_skipped(counters),
        totals=counters.totals,
    )


def _starts(ledger: LedgerFiles, recorded: BatchCounts) -> list[StartRow]:
    """The last starts in the order of time."""
    rows = []
    for group in ledger.together[-_MOST_STARTS:]:
        at = datetime.fromtimestamp(group[0].number / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        counts = [recorded.by_start[number] for number in {start.number for start in group}]
        yielded, lost = (sum(column) for column in zip(*counts, strict=True))
        rows.append(StartRow(at, group[0].world_size, group[0].epoch, group[0].slot, yielded, lost))
    return rows


def _shares(numbers: dict[str, float]) -> list[Bar]:
    whole = sum(numbers.values())
    return [Bar(name, number / whole, f"{number / whole:.0%}") for name, number in numbers.items() if whole]


def _times(counters: NotedCounters) -> list[tuple[str, list[float]]]:
    """The percentiles of the trainer's wait, of making a batch, and of each stage, in s."""
    shown = {"wait_s": "the trainer waits", "making_s": "a batch is built"}
    shown |= {name[:-4]: name.split("/")[1] for name in counters.last if name.startswith("stage_s/")}
    return [
        (text, [counters.last[f"{name}/{percent}"] for percent in _PERCENTILES])
        for name, text in shown.items()
        if f"{name}/p99" in counters.last
    ]


def _sources(recorded: BatchCounts, counters: NotedCounters, expected: ExpectedShares) -> list[SourceRow]:
    if len(recorded.sources) < 2:
        return []
    whole = max(1, sum(recorded.samples))
    shares = dict(zip(expected.names, expected.of(0, whole), strict=True)) if expected.by == "samples" else {}
    return [
        SourceRow(
            source.name,
            samples,
            samples / whole,
            shares.get(source.name),
            counters.totals[f"source/{source.name}/drawn"],
            counters.totals[f"source/{source.name}/skipped"],
        )
        for source, samples in zip(recorded.sources, recorded.samples, strict=True)
    ]


def _courses(recorded: BatchCounts) -> Picture | None:
    """The shares of the largest sources in the course of the run, beside those of the weights at that place."""
    names = [source.name for source in recorded.sources]
    if len(names) < 2:
        return None
    pieces = [piece for piece in recorded.pieces() if sum(piece.samples)]
    setting_of = {id(piece.start): ExpectedShares(piece.start) for piece in pieces}
    top = setting_of[id(pieces[-1].start)].names if pieces else []
    shown = sorted(top or names, key=lambda name: -sum(summed([name], names, recorded.samples)))[:_MOST_LINES]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in shown}
    dashed: dict[str, list[tuple[float, float]]] = {}
    for piece in pieces:
        samples = sum(piece.samples)
        middle = piece.before + samples / 2
        for name, number in zip(shown, summed(shown, names, piece.samples), strict=True):
            lines[name].append((middle, number / samples))
        wanted = setting_of[id(piece.start)]
        if wanted.by == "samples":
            for name, share in zip(wanted.names, wanted.of(piece.before, piece.before + samples), strict=True):
                if name in lines:
                    dashed.setdefault(name, []).append((middle, share))
    return picture(lines, "samples yielded", expected=dashed)


def _step_waits(steps: Sequence[CostStep]) -> Picture | None:
    """The share of waiting for the slowest rank, in the course of the run."""
    size = max(1, -(-len(steps) // PIECES))
    pieces = [list(steps[begin : begin + size]) for begin in range(0, len(steps), size)]
    return picture(
        {"waiting": [(piece[len(piece) // 2].number, waiting(piece)) for piece in pieces]}, "steps", most=0.1
    )


def _skipped(counters: NotedCounters) -> list[tuple[str, str, float]]:
    """Stage, reason and number of all that was left out, the most frequent first."""
    found: list[tuple[str, str, Any]] = []
    for name, number in counters.totals.items():
        stage, _, reason = name.partition("/skipped/")
        if reason and number and not stage.startswith("source/"):
            found.append((stage, reason, number))
    return sorted(found, key=lambda row: -row[2])


_NO_WAIT, _MUCH_WAIT = 0.02, 0.10  # shares of the time
_BUSY = 0.75  # of the workers' time: more workers help
_SLOW_TAIL = 5  # times the median: then single batches are what is waited for
_FULL, _EVEN = 0.95, 0.05
_SPARE = 1.2
_TRAINED = 0.01  # of the time at least: else nothing is known of the trainer's pace
_HELP = {
    "Encode": "decode or augment less, or store encoded samples",
    "TarShardReader": "a nearer disk, a larger cache, or larger shards",
    "ShuffleBuffer": "reading is what it waits for: a nearer disk or a larger cache",
    "OnlinePacker": "fewer open packs, or an encoder that declares lengths (length_of)",
    "Batcher": "a batch() that copies less: sp.stack writes where the trainer reads",
}


@dataclass(frozen=True, slots=True)
class WaitVerdict:
    """Counters that show whether the trainer waited for data.

    `share` is the fraction of its time.
    """

    share: float
    verdict: str


def waited(counters: NotedCounters) -> WaitVerdict | None:
    """Return the verdict, or None if the ledger has no counters."""
    if not counters.seconds:
        return None
    share = min(1.0, counters.totals["wait_s"] / counters.seconds)
    if share < _NO_WAIT:
        return WaitVerdict(share, "not data-bound")
    return WaitVerdict(share, "data-bound" if share >= _MUCH_WAIT else "hardly data-bound")


def run_advice(counters: NotedCounters, *, slowest_wait: float) -> Iterator[str]:
    """Yield sentences of advice, the most useful one first.

    `slowest_wait` is the fraction of time that ranks wait for the slowest one.
    """
    found = waited(counters)
    if found is not None and found.share >= _NO_WAIT:
        yield _workers(counters)
        yield from _stage(counters)
        yield from _tail(counters)
    fill = fill_of(counters)
    if fill is not None and fill < _FULL:
        yield f"Packing efficiency is {fill:.0%}: more open_packs= improve it, at the price of memory."
    if slowest_wait >= _EVEN:
        yield (
            f"Ranks wait {slowest_wait:.0%} of their time for the slowest one, by cost: sp.Balance(candidates=32) "
            "before the Batcher evens their packs out."
        )
    if counters.totals["restarts"]:
        yield f"{counters.totals['restarts']:.0f} workers were replaced: the log says what they were at."


def _workers(counters: NotedCounters) -> str:
    training_s = counters.seconds - counters.totals["wait_s"]
    if training_s < _TRAINED * counters.seconds:
        return "The trainer did hardly anything but wait: no number of workers keeps up with that."
    wanted = ceil(_SPARE * counters.totals["work_s"] / training_s)
    if not counters.worker_seconds:
        return f"Batches are built in the process of the trainer, which waits for them: {_enough(wanted, counters)}."
    busy = min(1.0, counters.worker_work_s / counters.worker_seconds)
    wanted = max(wanted, int(counters.last["num_workers"]) + 1)
    if busy >= _BUSY:
        return f"The workers were {busy:.0%} busy: {_enough(wanted, counters)}."
    return (
        f"The workers were only {busy:.0%} busy, so the trainer waited for single slow batches or for data that "
        "arrive late: a larger sp.Workers(prefetch=) evens that out."
    )


def _enough(wanted: int, counters: NotedCounters) -> str:
    """How many workers keep up, beside the cores that there are."""
    if not counters.cores:
        return f"num_workers={wanted} would keep up, where there are as many cores"
    text = f"num_workers={wanted} would keep up, and the machine has {counted(counters.cores, 'core')}"
    if wanted <= counters.cores:
        return text
    return f"{text}, so build batches on other machines (sp.SocketWorkers) or make them cheaper"


def _stage(counters: NotedCounters) -> Iterator[str]:
    stages = counters.of_stages("seconds/")
    if whole := sum(stages.values()):
        name, spent = next(iter(stages.items()))
        help_ = f": {_HELP[name]}" if name in _HELP else ""
        yield f"{spent / whole:.0%} of build time is {name}{help_}."


def _tail(counters: NotedCounters) -> Iterator[str]:
    median, most = (counters.last.get(f"making_s/{percent}", 0.0) for percent in ("p50", "p99"))
    if median and most > _SLOW_TAIL * median:
        ms = f"{1000 * most:,.2f} ms to build, the median {1000 * median:,.2f} ms"
        yield f"1 batch in 100 takes {ms}: see the slowest sample."


def fill_of(counters: NotedCounters) -> float | None:
    """Return the packing efficiency, or None without packs."""
    tokens, room = counters.totals["OnlinePacker/tokens"], counters.totals["OnlinePacker/room"]
    return tokens / (tokens + room) if tokens + room else None
