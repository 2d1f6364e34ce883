"""What the command `savable` prints: reports, and tables about datasets and states."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.cli.console import print_counts, print_warnings, printable

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.data.dataset.info import Info
    from savable_pipeline.data.dataset.media_indexing import MediaFaults
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.run.state.summary import StateSummary
    from savable_pipeline.tools.check.dataset_check import CheckReport


def print_index(console: Console, place: Path, entries: list[ShardEntry]) -> None:
    """Where the index is, and the shards that could not be read to the end."""
    console.print(printable(f"index: {place}"))
    for entry in entries:
        console.print(printable(f"{entry.fault} ({counted(entry.samples, 'sample')} before it)"))


def print_media_table(console: Console, place: Path, faults: MediaFaults) -> None:
    """Where the table of media is, and the parts whose headers cannot be read."""
    console.print(printable(f"media table: {place}"))
    for message in faults.messages:
        console.print(printable(message))
    if faults.count > len(faults.messages):
        console.print(f"and {faults.count - len(faults.messages):,} more that cannot be read")


def print_check(console: Console, report: CheckReport, *, as_json: bool) -> None:
    """The problems by reason, then one by one; or all as one JSON object."""
    if as_json:
        import msgspec

        console.print_json(msgspec.json.encode(report, enc_hook=str).decode(), highlight=False, ensure_ascii=True)
        return
    console.print(
        f"{counted(report.shards, 'shard')}, {counted(report.samples, 'sample')}, {human_bytes(report.size)}: "
        + (counted(len(report.problems), "problem") if report.problems else "nothing wrong")
    )
    print_counts(console, "null", report.nulls)
    print_counts(console, "empty", report.empty)
    if report.with_alpha:
        console.print(
            f"warning: {counted(report.with_alpha, 'image has', 'images have')} alpha: sample.image() lays them over "
            "white, or over its background="
        )
    print_warnings(console, report.warnings)
    for reason, count in Counter(problem.reason for problem in report.problems).most_common():
        console.print(f"  {count:>7,} × {printable(reason)}")
    for problem in report.problems:
        where = [problem.shard, problem.key and f"{problem.key}.{problem.part}"]
        place = "" if problem.offset is None else f" at byte {problem.offset}"
        about = f"{' '.join(filter(None, where))}{place}: " if problem.shard else ""  # else of the dataset
        console.print(printable(f"{about}{problem.reason}: {problem.detail}"))


def print_info(console: Console, info: Info, *, as_json: bool) -> None:
    """A dataset in tables, or as one JSON object."""
    if as_json:
        console.print(json.dumps(_info_object(info), indent=2), markup=False)
        return
    smallest, largest = _extremes(info)
    facts = Table("", "", show_header=False, box=None)
    facts.add_row("dataset", printable(info.root))
    facts.add_row("shards", f"{len(info.shards):,}")
    facts.add_row("samples", f"{info.samples:,}")
    facts.add_row("size", human_bytes(info.size))
    facts.add_row("smallest shard", _shard_text(smallest))
    facts.add_row("largest shard", _shard_text(largest))
    for split, count in info.splits.items():
        facts.add_row(f"split {printable(split)}", f"{counted(count, 'sample')}")
    first = ", ".join(f"{extension} {human_bytes(size)}" for extension, size in info.first_parts.items())
    facts.add_row("first sample", printable(f"{info.first_key}: {first}"))
    console.print(facts)
    some = "" if info.looked_at == info.samples else f" (of {info.looked_at:,} looked at)"
    parts = Table("part", f"samples{some}", "mean size")
    for extension, part in info.parts.items():
        parts.add_row(printable(extension), f"{part.samples:,}", human_bytes(part.mean))
    console.print(parts)
    if info.media:
        media = Table("media", "parts", "hours", "size", "fps", "rate", "cannot be read")
        for extension, found in info.media.items():
            hours, broken = f"{found.hours:,.2f}" if found.hours else "", f"{found.broken:,}" if found.broken else ""
            media.add_row(printable(extension), f"{found.parts:,}", hours, found.size, found.fps, found.rate, broken)
        console.print(media)
    print_counts(console, "null", info.nulls, some)
    print_counts(console, "empty", {extension: part.empty for extension, part in info.parts.items()}, some)
    print_warnings(console, info.warnings)


def _extremes(info: Info) -> tuple[ShardEntry, ShardEntry]:
    return min(info.shards, key=lambda e: (e.size, e.name)), max(info.shards, key=lambda e: (e.size, e.name))


def _shard_text(entry: ShardEntry) -> str:
    return printable(f"{entry.name}: {counted(entry.samples, 'sample')}, {human_bytes(entry.size)}")


def _info_object(info: Info) -> dict[str, object]:
    smallest, largest = _extremes(info)
    return {
        "root": info.root,
        "shards": len(info.shards),
        "samples": info.samples,
        "bytes": info.size,
        "samples_looked_at": info.looked_at,
        "smallest_shard": {"name": smallest.name, "samples": smallest.samples, "bytes": smallest.size},
        "largest_shard": {"name": largest.name, "samples": largest.samples, "bytes": largest.size},
        "warnings": info.warnings,
        "parts": {e: {"samples": part.samples, "mean_bytes": part.mean} for e, part in info.parts.items()},
        "empty": {e: part.empty for e, part in info.parts.items() if part.empty},
        "nulls": info.nulls,
        "media": {extension: asdict(found) for extension, found in info.media.items()},
        "first_sample": {"key": info.first_key, "parts": info.first_parts},
        "splits": info.splits,
    }


def print_state(console: Console, state: StateSummary, size: int) -> None:
    """Where a saved run stands: its settings, then a table of the lanes that have begun."""
    begun = {lane: row for lane, row in state.lanes.items() if row}
    epochs = {value for row in begun.values() for field, value in row.items() if field.endswith("Reader.epoch")}
    epoch = "" if epochs - {state.numbers["epoch"]} else f" of epoch {state.numbers['epoch']}"  # one that has no end
    console.print(
        f"slot {state.numbers['slot']:,}{epoch}; {len(state.lanes)} of "
        f"{state.numbers['lanes']} lanes, {len(begun)} have begun; {human_bytes(size)}"
    )
    settings = Table("setting", "value", title="the run", title_justify="left")
    for name, value in {**state.settings, **state.environment}.items():
        settings.add_row(printable(name), printable(_setting(name, value)))
    console.print(settings)
    if begun:
        console.print(_lanes_table(begun, state.lane_bytes))


def _setting(name: str, value: object) -> str:
    if name.endswith("Reader.shards") and isinstance(value, list | dict):
        from savable_pipeline.data.dataset.shard_digests import count, sample_count

        return f"{count(value):,} shards, {sample_count(value):,} samples"
    return " → ".join(map(str, value)) if isinstance(value, list) else str(value)


def _lanes_table(lanes: dict[int, dict[str, Any]], sizes: dict[int, int]) -> Table:
    """A row for each lane, a column for each stage; a cell lists the saved fields that are not empty."""
    from savable_pipeline.run.state.summary import shown

    stages = list(dict.fromkeys(field.split(".")[0] for row in lanes.values() for field in row))
    table = Table("lane", *map(printable, stages), "bytes", title="the lanes", title_justify="left")
    for lane, row in lanes.items():
        cells = []
        for stage in stages:
            fields = {field.rpartition(".")[2]: (field, value) for field, value in row.items() if _of(stage, field)}
            lines = [
                f"{name} {shown(field, value)}".strip()
                for name, (field, value) in fields.items()
                if value or value == 0
            ]
            cells.append("\n".join(map(printable, lines)))
        table.add_row(str(lane), *cells, f"{sizes[lane]:,}")
    return table


def _of(stage: str, field: str) -> bool:
    return field == stage or field.startswith(f"{stage}.")


def print_differences(console: Console, found: list[tuple[str, str, str]], left: str, right: str) -> None:
    """Each field in which two states differ, with both values."""
    if not found:
        console.print("the two states are equal: both continue alike")
        return
    table = Table("where", printable(left), printable(right), title=f"{len(found)} differences", title_justify="left")
    for row in found:
        table.add_row(*map(printable, row))
    console.print(table)
