"""The page of a run's ledger: what it waited for, what it was given, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.tools.preview.advice import advice, fill_of, waited
from savable_pipeline.tools.preview.expected_shares import ExpectedShares, summed
from savable_pipeline.tools.preview.given_counts import PIECES, GivenCounts, Step, waiting
from savable_pipeline.tools.preview.noted_counters import NotedCounters
from savable_pipeline.tools.preview.page import render
from savable_pipeline.tools.preview.pictures import HEIGHT, WIDTH, Bar, Picture, picture

_MOST_LINES = 6  # sources in a picture; all are in the table
_MOST_STARTS = 200
_PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source: its share of the samples given, what that should be, and its counters."""

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
    given: int
    lost: int


def report_page(ledger: LedgerFiles) -> bytes:
    """One file of HTML without scripts, UTF-8. Raises `SavableError` for a ledger that cannot be read."""
    given, counters = GivenCounts(ledger), NotedCounters(ledger)
    expected = ExpectedShares(ledger.starts[-1])
    slowest_wait = waiting(given.steps)
    mean, worst = counters.waits()
    return render(
        "report.html.jinja",
        title=str(ledger.folder),
        width=WIDTH,
        height=HEIGHT,
        given=given,
        samples=sum(given.samples),
        starts=_starts(ledger, given),
        started=len(ledger.together),
        waited=waited(counters),
        advice=list(advice(counters, slowest_wait=slowest_wait)),
        seconds=counters.seconds,
        waits=picture({"all ranks": mean, "the rank that waited most": worst}, counters.unit, most=0.1),
        stages=_shares(counters.of_stages("seconds/")),
        times=_times(counters),
        names=counters.names,
        last=counters.last,
        sources=_sources(given, counters, expected),
        by=expected.by,
        scheduled=expected.schedule is not None,
        courses=_courses(given),
        fill=fill_of(counters),
        fills=picture({"fill": counters.fills()}, counters.unit, most=1.0),
        steps=given.steps,
        slowest_wait=slowest_wait,
        step_waits=_step_waits(given.steps),
        skipped=_skipped(counters),
        totals=counters.totals,
    )


def _starts(ledger: LedgerFiles, given: GivenCounts) -> list[StartRow]:
    """The last starts in the order of time."""
    rows = []
    for group in ledger.together[-_MOST_STARTS:]:
        at = datetime.fromtimestamp(group[0].number / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        counts = [given.by_start[number] for number in {start.number for start in group}]
        kept, lost = (sum(column) for column in zip(*counts, strict=True))
        rows.append(StartRow(at, group[0].world_size, group[0].epoch, group[0].slot, kept, lost))
    return rows


def _shares(numbers: dict[str, float]) -> list[Bar]:
    whole = sum(numbers.values())
    return [Bar(name, number / whole, f"{number / whole:.0%}") for name, number in numbers.items() if whole]


def _times(counters: NotedCounters) -> list[tuple[str, list[float]]]:
    """The percentiles of the trainer's wait, of making a batch, and of each stage, in s."""
    shown = {"wait_s": "the trainer waits", "making_s": "a batch is made"}
    shown |= {name[:-4]: name.split("/")[1] for name in counters.last if name.startswith("stage_s/")}
    return [
        (text, [counters.last[f"{name}/{percent}"] for percent in _PERCENTILES])
        for name, text in shown.items()
        if f"{name}/p99" in counters.last
    ]


def _sources(given: GivenCounts, counters: NotedCounters, expected: ExpectedShares) -> list[SourceRow]:
    if len(given.sources) < 2:
        return []
    whole = max(1, sum(given.samples))
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
        for source, samples in zip(given.sources, given.samples, strict=True)
    ]


def _courses(given: GivenCounts) -> Picture | None:
    """The shares of the largest sources in the course of the run, beside those of the weights at that place."""
    names = [source.name for source in given.sources]
    if len(names) < 2:
        return None
    pieces = [piece for piece in given.pieces() if sum(piece.samples)]
    told = {id(piece.start): ExpectedShares(piece.start) for piece in pieces}
    top = told[id(pieces[-1].start)].names if pieces else []
    shown = sorted(top or names, key=lambda name: -sum(summed([name], names, given.samples)))[:_MOST_LINES]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in shown}
    dashed: dict[str, list[tuple[float, float]]] = {}
    for piece in pieces:
        samples = sum(piece.samples)
        middle = piece.before + samples / 2
        for name, number in zip(shown, summed(shown, names, piece.samples), strict=True):
            lines[name].append((middle, number / samples))
        wanted = told[id(piece.start)]
        if wanted.by == "samples":
            for name, share in zip(wanted.names, wanted.of(piece.before, piece.before + samples), strict=True):
                if name in lines:
                    dashed.setdefault(name, []).append((middle, share))
    return picture(lines, "samples given", expected=dashed)


def _step_waits(steps: Sequence[Step]) -> Picture | None:
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
        if reason and number:
            found.append((stage, reason, number))
    return sorted(found, key=lambda row: -row[2])
