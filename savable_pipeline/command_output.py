"""What the command shows: a bar or lines while it converts, then a report; tables about a dataset."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from savable_pipeline.check import CheckReport
from savable_pipeline.convert import Report
from savable_pipeline.info import Info
from savable_pipeline.shard_index import ShardEntry
from savable_pipeline.state_summary import StateSummary, shown

_LINE_EVERY_S = 10.0
_SHOWN = 10  # rejects told one by one; the file has all


@contextlib.contextmanager
def progress_of(console: Console, before: str, things: str, during: str = "") -> Iterator[Callable[[int, int], None]]:
    """What to tell of things done and in all: a bar on a terminal, a line now and then elsewhere.

    `before` is said at once, `during` (or the same) from when it is known how many there are.
    """
    during = during or before
    if not console.is_terminal:
        console.print(escape(before))
        yield _Lines(console, f"{during}: {{:,}} of {{:,}} {things}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(escape(before), total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, description=escape(during), completed=done, total=total)

        yield update


class _Lines:
    """Progress in plain lines: the first, the last, and one every ten seconds between."""

    def __init__(self, console: Console, line: str) -> None:
        self._console = console
        self._line = line
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._console.print(self._line.format(done, total))
            self._next = now + _LINE_EVERY_S


def print_report(console: Console, report: Report, path: Path) -> None:
    """How much was written, and what was rejected and why; `path` is the file with all rejects."""
    console.print(f"{_count(report.samples, 'sample')} in {_count(report.shards, 'shard')}, {human_bytes(report.size)}")
    if report.hidden:
        console.print(f"{_count(report.hidden, 'hidden file or folder', 'hidden files or folders')} passed over")
    if not report.rejected:
        console.print("nothing rejected")
        return
    console.print(f"{len(report.rejected):,} rejected and left out:")
    for reason, count in Counter(reject.reason for reject in report.rejected).most_common():
        console.print(f"  {count:>7,} × {escape(reason)}")
    for reject in report.rejected[:_SHOWN]:
        detail = f" ({reject.detail})" if reject.detail else ""
        console.print(escape(f"  {reject.file}: {reject.reason}{detail}"))
    if len(report.rejected) > _SHOWN:
        console.print(f"  … {len(report.rejected) - _SHOWN:,} more")
    console.print(escape(f"all of them: {path}"))


def print_index(console: Console, place: Path, entries: list[ShardEntry]) -> None:
    """Where the index lies, and the shards that could not be read to their end."""
    console.print(escape(f"index: {place}"))
    for entry in entries:
        console.print(escape(f"{entry.fault} ({_count(entry.samples, 'sample')} before it)"))


def print_check(console: Console, report: CheckReport, *, as_json: bool) -> None:
    """What was found, by reason and then one by one, or as one JSON object."""
    if as_json:
        console.print_json(msgspec.json.encode(report, enc_hook=str).decode(), indent=2, highlight=False)
        return
    console.print(
        f"{_count(report.shards, 'shard')}, {_count(report.samples, 'sample')}, {human_bytes(report.size)}: "
        + (_count(len(report.problems), "problem") if report.problems else "nothing wrong")
    )
    for reason, count in Counter(problem.reason for problem in report.problems).most_common():
        console.print(f"  {count:>7,} × {escape(reason)}")
    for problem in report.problems:
        where = [problem.shard, problem.key and f"{problem.key}.{problem.part}"]
        place = "" if problem.offset is None else f" at byte {problem.offset}"
        console.print(escape(f"{' '.join(filter(None, where))}{place}: {problem.reason}: {problem.detail}"))


def print_info(console: Console, info: Info, *, as_json: bool) -> None:
    """A dataset in tables, or as one JSON object."""
    if as_json:
        console.print(json.dumps(_info_object(info), indent=2), markup=False)
        return
    smallest, largest = _extremes(info)
    facts = Table("", "", show_header=False, box=None)
    facts.add_row("dataset", escape(info.root))
    facts.add_row("shards", f"{len(info.shards):,}")
    facts.add_row("samples", f"{info.samples:,}")
    facts.add_row("size", human_bytes(info.size))
    facts.add_row("smallest shard", _shard_text(smallest))
    facts.add_row("largest shard", _shard_text(largest))
    for split, count in info.splits.items():
        facts.add_row(f"split {escape(split)}", f"{_count(count, 'sample')}")
    first = ", ".join(f"{extension} {human_bytes(size)}" for extension, size in info.first_parts.items())
    facts.add_row("first sample", escape(f"{info.first_key}: {first}"))
    console.print(facts)
    parts = Table("part", "samples", "mean size")
    for extension, part in info.parts.items():
        parts.add_row(escape(extension), f"{part.samples:,}", human_bytes(part.mean))
    console.print(parts)


def _extremes(info: Info) -> tuple[ShardEntry, ShardEntry]:
    return min(info.shards, key=lambda e: (e.size, e.name)), max(info.shards, key=lambda e: (e.size, e.name))


def _shard_text(entry: ShardEntry) -> str:
    return escape(f"{entry.name}: {_count(entry.samples, 'sample')}, {human_bytes(entry.size)}")


def _info_object(info: Info) -> dict[str, object]:
    smallest, largest = _extremes(info)
    return {
        "root": info.root,
        "shards": len(info.shards),
        "samples": info.samples,
        "bytes": info.size,
        "smallest_shard": {"name": smallest.name, "samples": smallest.samples, "bytes": smallest.size},
        "largest_shard": {"name": largest.name, "samples": largest.samples, "bytes": largest.size},
        "parts": {e: {"samples": part.samples, "mean_bytes": part.mean} for e, part in info.parts.items()},
        "first_sample": {"key": info.first_key, "parts": info.first_parts},
        "splits": info.splits,
    }


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def human_bytes(size: float) -> str:
    """`1536` as `1.5 kB`: decimal units, as drives are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def print_state(console: Console, state: StateSummary, size: int) -> None:
    """Where a saved run stands: the run, then a row for each field of each stage, over the lanes that have begun."""
    begun = {lane: row for lane, row in state.lanes.items() if row}
    console.print(
        f"slot {state.numbers['slot']:,} of epoch {state.numbers['epoch']}; {len(state.lanes)} of "
        f"{state.numbers['lanes']} lanes, {len(begun)} have begun; {human_bytes(size)}"
    )
    settings = Table("setting", "value", title="the run", title_justify="left")
    for name, value in {**state.settings, **state.environment}.items():
        settings.add_row(escape(name), escape(_setting(name, value)))
    console.print(settings)
    if begun:
        console.print(_lanes_table(begun, state.lane_bytes))


def _setting(name: str, value: object) -> str:
    if name.endswith(".shards") and isinstance(value, list):
        return f"{len(value):,} shards, {sum(shard[1] for shard in value):,} samples"
    return " → ".join(map(str, value)) if isinstance(value, list) else str(value)


def _lanes_table(lanes: dict[int, dict[str, Any]], sizes: dict[int, int]) -> Table:
    """A row a lane and a column a stage, with what the stage saved below each other; what is empty is left out."""
    stages = list(dict.fromkeys(field.split(".")[0] for row in lanes.values() for field in row))
    table = Table("lane", *map(escape, stages), "bytes", title="the lanes", title_justify="left")
    for lane, row in lanes.items():
        cells = []
        for stage in stages:
            fields = {field.rpartition(".")[2]: (field, value) for field, value in row.items() if _of(stage, field)}
            lines = [
                f"{name} {shown(field, value)}".strip()
                for name, (field, value) in fields.items()
                if value or value == 0
            ]
            cells.append(escape("\n".join(lines)))
        table.add_row(str(lane), *cells, f"{sizes[lane]:,}")
    return table


def _of(stage: str, field: str) -> bool:
    return field == stage or field.startswith(f"{stage}.")


def print_differences(console: Console, found: list[tuple[str, str, str]], left: str, right: str) -> None:
    """Where two states differ, and the value in each."""
    if not found:
        console.print("the two states are equal: they go on alike")
        return
    table = Table("where", escape(left), escape(right), title=f"{len(found)} differences", title_justify="left")
    for row in found:
        table.add_row(*map(escape, row))
    console.print(table)
