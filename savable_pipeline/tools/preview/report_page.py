"""Page of a run's ledger: waits and advice, batches, and skipped samples.

Diagrams are plain values for a template that writes SVG: lines over the time of the run, and bars.
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
    CounterTotals,
    ExpectedShares,
    sum_by_name,
    waiting_fraction,
)
from savable_pipeline.tools.preview.page import render

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26  # margins
_COLOURS = 6  # classes c0 to c5 of the template
_TICK_FACTORS = (1, 2, 2.5, 5, 10)  # distances of ticks, times a power of 10

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Tick:
    """Tick of an axis: its position in the diagram, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a diagram: its name, the class of its colour, and its points in SVG.

    A `dashed` line is the expected one.
    """

    name: str
    colour: str
    points: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Diagram:
    """Diagram of lines in a frame of `WIDTH` by `HEIGHT`."""

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
    """Bar of a fraction, 0 to 1, with a text."""

    name: str
    share: float
    text: str


def diagram(
    lines: Mapping[str, Points],
    x_name: str,
    *,
    expected: Mapping[str, Points] | None = None,
    least_top: float = 0.0,
    y_text: Callable[[float], str] = "{:.0%}".format,
) -> Diagram | None:
    """Return a diagram of lines by name, or None if no line has two points.

    `expected` has dashed lines by name. Both axes start at 0. The y axis ends at the highest point, but not below
    `least_top`.
    """
    if not any(len(points) > 1 for points in lines.values()):
        return None
    expected = expected or {}
    all_points = [point for points in [*lines.values(), *expected.values()] for point in points]
    xs = [x for x, _ in all_points]
    low, high = 0.0, max(*xs, 1e-9)
    rows = _ticks(0.0, max(least_top, *(y for _, y in all_points), 1e-9))
    top = rows[-1]

    def to_svg(points: Points) -> str:
        return " ".join(f"{_svg_x(x, low, high):.1f},{_svg_y(y, top):.1f}" for x, y in points)

    drawn = []
    for number, (name, points) in enumerate(lines.items()):
        colour = f"c{number % _COLOURS}"
        if name in expected:
            drawn.append(Line(name, colour, to_svg(expected[name]), dashed=True))
        drawn.append(Line(name, colour, to_svg(points)))
    columns = [Tick(_svg_x(x, low, high), f"{x:,.6g}") for x in _ticks(low, high) if low <= x <= high]
    return Diagram(drawn, [Tick(_svg_y(y, top), y_text(y)) for y in rows], columns, x_name)


def _svg_x(x: float, low: float, high: float) -> float:
    return _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)


def _svg_y(y: float, top: float) -> float:
    return HEIGHT - _BOTTOM - y / top * (HEIGHT - _TOP - _BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that cover `low` to `high`."""
    distance = (high - low) / 4
    unit = 1.0
    while unit > distance:
        unit /= 10
    while unit * 10 <= distance:
        unit *= 10
    step = next(unit * factor for factor in _TICK_FACTORS if unit * factor >= distance)
    first = int(low // step)
    last = -int(-high // step)
    return [number * step for number in range(first, last + 1)]


_MOST_LINES = 6  # sources in a diagram; the table has all sources
_MOST_STARTS = 200  # most starts in the table
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
    """Start of all ranks of a run."""

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
    recorded, counters = BatchCounts(ledger), CounterTotals(ledger)
    expected = ExpectedShares(ledger.starts[-1])
    slowest_wait = waiting_fraction(recorded.steps)
    mean, worst = counters.waits()
    return render(
        "report.html.jinja",
        title=str(ledger.folder),
        width=WIDTH,
        height=HEIGHT,
        recorded=recorded,
        samples=sum(recorded.samples),
        starts=_starts(ledger, recorded),
        started=len(ledger.starts_together),
        waited=wait_verdict(counters),
        advice=list(run_advice(counters, slowest_wait=slowest_wait)),
        seconds=counters.seconds,
        waits=diagram(
            {"all ranks": mean} | ({"the rank that wait_verdict most": worst} if worst != mean else {}),
            counters.unit,
            least_top=0.1,
        ),
        stages=_bars(counters.of_stages("seconds/")),
        times=_percentiles(counters),
        names=counters.names,
        last=counters.last,
        sources=_sources(recorded, counters, expected),
        by=expected.by,
        scheduled=expected.schedule is not None,
        courses=_source_fractions(recorded),
        fill=packing_efficiency(counters),
        fills=diagram({"tokens in packs": counters.packing_efficiencies()}, counters.unit, least_top=1.0),
        steps=recorded.steps,
        slowest_wait=slowest_wait,
        step_waits=_step_waits(recorded.steps),
        skipped=_skipped(counters),
        totals=counters.totals,
    )


def _starts(ledger: LedgerFiles, recorded: BatchCounts) -> list[StartRow]:
    """Return rows of the last starts, in the order of time."""
    rows = []
    for group in ledger.starts_together[-_MOST_STARTS:]:
        at = datetime.fromtimestamp(group[0].number / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        counts = [recorded.yielded_and_lost[number] for number in {start.number for start in group}]
        yielded, lost = map(sum, zip(*counts, strict=True))
        rows.append(StartRow(at, group[0].world_size, group[0].epoch, group[0].slot, yielded, lost))
    return rows


def _bars(numbers: dict[str, float]) -> list[Bar]:
    """Return a bar for each number, of its fraction of their sum."""
    total = sum(numbers.values())
    return [Bar(name, number / total, f"{number / total:.0%}") for name, number in numbers.items() if total]


def _percentiles(counters: CounterTotals) -> list[tuple[str, list[float]]]:
    """Return percentiles in seconds: of the trainer's waits, of building a batch, and of each stage."""
    shown = {"wait_s": "the trainer waits", "making_s": "a batch is built"}
    shown |= {name.rpartition("/")[0]: name.split("/")[1] for name in counters.last if name.startswith("stage_s/")}
    return [
        (text, [counters.last[f"{name}/{percent}"] for percent in _PERCENTILES])
        for name, text in shown.items()
        if f"{name}/p99" in counters.last
    ]


def _sources(recorded: BatchCounts, counters: CounterTotals, expected: ExpectedShares) -> list[SourceRow]:
    """Return a row for each source: its samples, and its actual and expected fraction."""
    if len(recorded.sources) < 2:
        return []
    total = max(1, sum(recorded.samples))
    shares = dict(zip(expected.names, expected.of(0, total), strict=True)) if expected.by == "samples" else {}
    return [
        SourceRow(
            source.name,
            samples,
            samples / total,
            shares.get(source.name),
            counters.totals[f"source/{source.name}/drawn"],
            counters.totals[f"source/{source.name}/skipped"],
        )
        for source, samples in zip(recorded.sources, recorded.samples, strict=True)
    ]


def _source_fractions(recorded: BatchCounts) -> Diagram | None:
    """Return a diagram of the fractions of the largest sources over the run, with the expected fractions."""
    names = [source.name for source in recorded.sources]
    if len(names) < 2:
        return None
    pieces = [piece for piece in recorded.pieces() if sum(piece.samples)]
    expected_of = {id(piece.start): ExpectedShares(piece.start) for piece in pieces}
    blended = expected_of[id(pieces[-1].start)].names if pieces else []  # a name may stand for several sources
    shown = sorted(blended or names, key=lambda name: -sum(sum_by_name([name], names, recorded.samples)))[:_MOST_LINES]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in shown}
    dashed: dict[str, list[tuple[float, float]]] = {}
    for piece in pieces:
        samples = sum(piece.samples)
        middle = piece.before + samples / 2
        for name, number in zip(shown, sum_by_name(shown, names, piece.samples), strict=True):
            lines[name].append((middle, number / samples))
        expected = expected_of[id(piece.start)]
        if expected.by == "samples":
            for name, share in zip(expected.names, expected.of(piece.before, piece.before + samples), strict=True):
                if name in lines:
                    dashed.setdefault(name, []).append((middle, share))
    return diagram(lines, "samples yielded", expected=dashed)


def _step_waits(steps: Sequence[CostStep]) -> Diagram | None:
    """Return a diagram of the fraction of time that ranks wait for the slowest one, over the run."""
    size = max(1, -(-len(steps) // PIECES))
    pieces = [list(steps[begin : begin + size]) for begin in range(0, len(steps), size)]
    return diagram(
        {"waiting": [(piece[len(piece) // 2].number, waiting_fraction(piece)) for piece in pieces]},
        "steps",
        least_top=0.1,
    )


def _skipped(counters: CounterTotals) -> list[tuple[str, str, float]]:
    """Return stage, reason and number of skipped samples, the most frequent first."""
    rows: list[tuple[str, str, Any]] = []
    for name, number in counters.totals.most_common():
        stage, _, reason = name.partition("/skipped/")
        if reason and number and not stage.startswith("source/"):
            rows.append((stage, reason, number))
    return rows


_NO_WAIT, _MUCH_WAIT = 0.02, 0.10  # fractions of the trainer's time
_BUSY = 0.75  # fraction of the workers' time, from which more workers help
_SLOW_TAIL = 5  # times the median, from which single slow batches are the cause of waits
_FULL = 0.95  # packing efficiency that is good enough
_EVEN_WAIT = 0.05  # fraction of time for which waiting_fraction for the slowest rank is tolerable
_SPARE = 1.2  # advised workers, as a multiple of those just needed
_TRAINED = 0.01  # fraction of the time; if the trainer trains less, its pace is unknown
_STAGE_ADVICE = {
    "Encode": "decode or augment less, or store encoded samples",
    "TarShardReader": "a nearer disk, a larger cache, or larger shards",
    "ShuffleBuffer": "reading is what it waits for: a nearer disk or a larger cache",
    "OnlinePacker": "fewer open packs, or an encoder that declares lengths (length_of)",
    "Batcher": "a batch() that copies less: sp.stack writes where the trainer reads",
}


@dataclass(frozen=True, slots=True)
class WaitVerdict:
    """Verdict whether the trainer wait_verdict for data, for `share` of its time."""

    share: float
    verdict: str


def wait_verdict(counters: CounterTotals) -> WaitVerdict | None:
    """Return the verdict, or None if the ledger has no counters."""
    if not counters.seconds:
        return None
    share = min(1.0, counters.totals["wait_s"] / counters.seconds)
    if share < _NO_WAIT:
        return WaitVerdict(share, "not data-bound")
    return WaitVerdict(share, "data-bound" if share >= _MUCH_WAIT else "hardly data-bound")


def run_advice(counters: CounterTotals, *, slowest_wait: float) -> Iterator[str]:
    """Yield sentences of advice, the most useful one first.

    `slowest_wait` is the fraction of time that ranks wait for the slowest one.
    """
    verdict = wait_verdict(counters)
    if verdict is not None and verdict.share >= _NO_WAIT:
        yield _advise_workers(counters)
        yield from _advise_stage(counters)
        yield from _advise_tail(counters)
    efficiency = packing_efficiency(counters)
    if efficiency is not None and efficiency < _FULL:
        yield f"Packing efficiency is {efficiency:.0%}: more open_packs= improve it, at the price of memory."
    if slowest_wait >= _EVEN_WAIT:
        yield (
            f"Ranks wait {slowest_wait:.0%} of their time for the slowest one, by cost: sp.Balance(candidates=32) "
            "before the Batcher evens their packs out."
        )
    if counters.totals["restarts"]:
        yield f"{counters.totals['restarts']:.0f} workers were replaced. The log names the sample of each."


def _advise_workers(counters: CounterTotals) -> str:
    """Return a sentence that says whether more workers would help, and how many."""
    training_s = counters.seconds - counters.totals["wait_s"]
    if training_s < _TRAINED * counters.seconds:
        return "The trainer did hardly anything but wait: no number of workers keeps up with that."
    wanted = ceil(_SPARE * counters.totals["work_s"] / training_s)
    if not counters.worker_seconds:
        return f"Batches are built in the trainer's process, which waits for them: {_workers_needed(wanted, counters)}."
    busy = min(1.0, counters.worker_work_s / counters.worker_seconds)
    wanted = max(wanted, int(counters.last["num_workers"]) + 1)
    if busy >= _BUSY:
        return f"The workers were {busy:.0%} busy: {_workers_needed(wanted, counters)}."
    return (
        f"The workers were only {busy:.0%} busy, so the trainer wait_verdict for single slow batches or for data that "
        "arrive late: a larger sp.Workers(prefetch=) evens that out."
    )


def _workers_needed(wanted: int, counters: CounterTotals) -> str:
    """Return how many workers keep up, and how many cores there are, as a part of a sentence."""
    if not counters.cores:
        return f"num_workers={wanted} would keep up, where there are as many cores"
    text = f"num_workers={wanted} would keep up, and the machine has {counted(counters.cores, 'core')}"
    if wanted <= counters.cores:
        return text
    return f"{text}, so build batches on other machines (sp.SocketWorkers) or make them cheaper"


def _advise_stage(counters: CounterTotals) -> Iterator[str]:
    """Yield a sentence that says which stage takes most of the build time, if that is known."""
    stages = counters.of_stages("seconds/")
    if total_s := sum(stages.values()):
        name, stage_s = next(iter(stages.items()))  # the largest
        hint = f": {_STAGE_ADVICE[name]}" if name in _STAGE_ADVICE else ""
        yield f"{stage_s / total_s:.0%} of build time is {name}{hint}."


def _advise_tail(counters: CounterTotals) -> Iterator[str]:
    """Yield a sentence if single batches are much slower than the median."""
    median_s, p99_s = (counters.last.get(f"making_s/{percent}", 0.0) for percent in ("p50", "p99"))
    if median_s and p99_s > _SLOW_TAIL * median_s:
        times = f"{1000 * p99_s:,.2f} ms to build, the median {1000 * median_s:,.2f} ms"
        yield f"1 batch in 100 takes {times}: see the slowest sample."


def packing_efficiency(counters: CounterTotals) -> float | None:
    """Return the packing efficiency of the run, or None without packs."""
    tokens, unused = counters.totals["OnlinePacker/tokens"], counters.totals["OnlinePacker/room"]
    return tokens / (tokens + unused) if tokens + unused else None
