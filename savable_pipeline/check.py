"""Checking a dataset ahead of a run: all that a run could stumble over, found in parallel."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from savable_pipeline.cache_room import cache_folder
from savable_pipeline.check_shard import Problem, ShardReport
from savable_pipeline.errors import ShardError
from savable_pipeline.indexing import find_index
from savable_pipeline.nv_meta import listed, read_counts, read_field_map, read_split, split_names
from savable_pipeline.remote import is_remote
from savable_pipeline.remote_lookup import look_up
from savable_pipeline.shard_index import ShardEntry
from savable_pipeline.shard_jobs import Answer, each_shard
from savable_pipeline.shard_paths import Shards, find_shards


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found in a dataset: how much there is, in bytes and samples, and what is wrong, by shard."""

    root: str  # a folder or a URL
    shards: int
    samples: int
    size: int
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class _Dataset:
    """What is to be checked: the shards' names below a folder or a URL, and what is said of them."""

    root: str
    names: list[str]
    whole: bool  # whether that is all there should be
    metadata: Path  # a folder with what Energon has written
    indexed: dict[str, ShardEntry]


def check(
    shards: Shards,
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Read every byte of a dataset, in `processes` processes (None: one a processor); `progress` hears of shards.

    Changes nothing. Raises `ShardError` if there is no dataset to check, `RemoteError` if its server cannot be reached.
    """
    there = _look(shards)
    problems, counts = _metadata_problems(there.metadata, there.names)
    names = sorted({*there.names, *counts}) if there.whole else there.names
    reports = []
    progress(0, len(names))
    for done, (name, answer) in enumerate(_answers(there, names, processes or os.cpu_count() or 1), 1):
        if answer is None:
            problems.append(Problem("cannot be checked", "the process that read it ended; too little memory?", name))
        else:
            reports.append(msgspec.msgpack.decode(answer, type=ShardReport))
        progress(done, len(names))
    for report in reports:
        problems += report.problems
        problems += _other_than_indexed(report, there.indexed.get(report.name), counts.get(report.name))
    problems.sort(key=lambda problem: (problem.shard, problem.index if problem.index is not None else -1, problem.part))
    samples, size = sum(report.samples for report in reports), sum(report.size for report in reports)
    return CheckReport(there.root, len(names), samples, size, problems)


def _look(shards: Shards) -> _Dataset:
    if is_remote(shards):
        found, metadata, indexed = look_up(shards)
        folder = isinstance(shards, str) and shards.rstrip("/") == found.root
        return _Dataset(found.root, found.names, folder, metadata, indexed)
    root, names = find_shards(shards, missing_too=True)
    folder = isinstance(shards, str | os.PathLike) and Path(shards).is_dir()
    return _Dataset(str(root), names, folder, root, find_index(root))


def _answers(there: _Dataset, names: list[str], processes: int) -> Iterator[Answer]:
    if not is_remote(there.root):
        yield from each_shard("check", Path(there.root), names, processes)
        return
    cache = cache_folder(None)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="check-") as folder:
        yield from each_shard("check", Path(folder), names, processes, url=there.root)


def _other_than_indexed(report: ShardReport, entry: ShardEntry | None, count: int | None) -> Iterator[Problem]:
    if any(problem.reason in ("missing shard", "damaged shard", "cannot be checked") for problem in report.problems):
        return
    if entry is not None and (entry.size, entry.samples, entry.digest) != (report.size, report.samples, report.digest):
        yield Problem(
            "changed since it was indexed",
            f"{entry.samples} samples and {entry.size} bytes then, {report.samples} and {report.size} now, or others "
            "of the same size: `savable index` indexes it anew, and runs that read it before cannot be resumed",
            report.name,
        )
    if count is not None and count != report.samples:
        yield Problem("wrong count", f".info has {count} samples, the shard {report.samples}", report.name)


def _metadata_problems(root: Path, names: list[str]) -> tuple[list[Problem], dict[str, int]]:
    """What is wrong below `.nv-meta`, and the samples of each shard as it has them."""
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    try:
        counts = read_counts(root) or {}
    except ShardError as error:
        problems.append(Problem("wrong metadata", str(error)))
    try:
        for split in split_names(root):
            unknown = read_split(root, split, {*names, *counts}).unknown
            if unknown:
                problems.append(Problem("wrong metadata", f"`exclude` names what is not there: {listed(unknown)}"))
                break
    except ShardError as error:
        problems.append(Problem("wrong metadata", str(error)))
    try:
        read_field_map(root)
    except ShardError as error:
        problems.append(Problem("wrong metadata", str(error)))
    return problems, counts
