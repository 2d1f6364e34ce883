"""Check a dataset: read every byte in several processes, and list problems."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.dataset.decoding import ALPHA, DEEP, TURNED
from savable_pipeline.data.remote.cache_space import cache_folder
from savable_pipeline.data.remote.lookup import describe_url
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.index_making import Answer, each_shard
from savable_pipeline.data.shards.indexing import files_of, known_files
from savable_pipeline.data.shards.metadata import read_counts, read_field_map, read_split, split_names, unfinished
from savable_pipeline.data.shards.part_types import dotted_parts, lacking_parts
from savable_pipeline.data.shards.paths import ALL, ListedFiles, Shards, is_remote, list_files
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.data.stores.opening import Source, find_source, remote_files, with_settings
from savable_pipeline.data.stores.tar_store import links_warning
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.check import file_check
from savable_pipeline.tools.check.file_check import NOT_DECODED, ONE_KEYFRAME, CheckSettings, Problem, ShardReport


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check: the size of a dataset, and its problems, sorted by shard."""

    root: str  # a folder or a URL
    shards: int
    samples: int
    size: int
    problems: list[Problem]
    warnings: list[str] = field(default_factory=list)  # about unusual samples
    with_alpha: int = 0  # the number of images with alpha
    empty: dict[str, int] = field(default_factory=dict)  # by part, the number of samples whose part has no bytes
    nulls: dict[str, int] = field(default_factory=dict)  # by column, the number of samples with null


@dataclass(frozen=True, slots=True)
class _Dataset:
    """Dataset to check: the names of its shards, its metadata and its index."""

    root: str
    names: list[str]
    is_whole: bool  # whether the user named the whole dataset, so that all shards of the metadata must exist
    metadata: Path  # a folder, which may contain Energon's metadata
    indexed: dict[str, ShardEntry]  # by name
    problems: list[Problem] = field(default_factory=list)  # found so far


def check_dataset(
    shards: Shards,
    *,
    processes: int | None = None,
    decode: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> CheckReport:
    """Read every byte of a dataset and list its problems, without changing it.

    Args:
        shards: The dataset.
        processes: The number of processes. None (default): one per core.
        decode: The fraction of audio and video parts to decode (default 1.0: all).
        progress: Called with the number of checked shards and the number of all shards.
        settings: Settings of the store.

    Raises:
        ShardError: There is no dataset.
        RemoteError: Its server cannot be reached.
        ValueError: `decode` is not a fraction, or files of this format do not have a setting.
    """
    if not 0 <= decode <= 1:
        raise ValueError(f"decode must be a fraction of the audio and video, 0.0 to 1.0, not {decode}")
    chosen = {name: value for name, value in settings.items() if value is not None}
    source = find_source(shards, settings=chosen)
    form = with_settings(source, chosen)
    dataset = _find_dataset(source, form)
    options = CheckSettings(form, decode, {**source.settings, **chosen})
    problems, counts = _metadata_problems(dataset.metadata, dataset.names)
    problems += dataset.problems
    names = sorted({*dataset.names, *counts, *dataset.indexed}) if dataset.is_whole else dataset.names
    reports = []
    progress(0, len(names))
    for done, (name, answer) in enumerate(_check_shards(dataset, names, processes or os.cpu_count() or 1, options), 1):
        if answer is None:
            fault = "the process that read it was killed, perhaps because memory ran out"
            problems.append(Problem("cannot be checked", fault, name))
        else:
            reports.append(msgspec.msgpack.decode(answer, type=ShardReport))
        progress(done, len(names))
    for report in reports:
        problems += report.problems
        problems += _index_problems(report, dataset.indexed.get(report.name), counts.get(report.name))
    if not problems and not any(report.samples for report in reports):
        problems.append(Problem("no samples", "readers raise an error for a dataset without samples"))
    problems.sort(key=lambda problem: (problem.shard, problem.index if problem.index is not None else -1, problem.part))
    return _join_reports(dataset.root, len(names), reports, problems)


def _join_reports(root: str, shards: int, reports: list[ShardReport], problems: list[Problem]) -> CheckReport:
    """Join the reports of all shards into one."""
    samples, size = sum(report.samples for report in reports), sum(report.size for report in reports)
    parts, empty, nulls, counts = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for report in reports:
        parts.update(report.parts)
        empty.update(report.empty)
        nulls.update(report.nulls)
        counts.update(report.counts)
    most_parts = max((report.most_parts for report in reports), default=0)
    dotted = itertools.chain.from_iterable(report.dotted for report in reports)
    warnings = [*lacking_parts(samples, parts), *dotted_parts(samples, parts, most_parts, dotted)]
    links = [(report.name, report.links) for report in reports if report.links.count]
    if links:
        shard, links_of_shard = min(links, key=lambda name_and_links: name_and_links[0])
        count = sum(shard_links.count for _, shard_links in links)
        warnings.append(links_warning(root, count, f"{links_of_shard.first} in {shard}"))
    warnings += _media_warnings(counts)
    return CheckReport(root, shards, samples, size, problems, warnings, counts[ALPHA], dict(empty), dict(nulls))


def _find_dataset(source: Source, form: Format) -> _Dataset:
    """List the shards of a dataset, with its metadata and its index."""
    if source.session is not None:
        found, metadata, indexed = describe_url(remote_files(source, form), form, source.session)
        return _Dataset(found.root, list(found.names), found.whole, metadata, indexed)
    listed = source.listed or list_files(source.files)
    problems = [Problem(error.reason, str(error)) for error in listed.unlistable]
    is_folder = form.name == FOLDER.name
    found_files = ListedFiles(listed.root, [ALL]) if is_folder else files_of(listed, form, missing_too=True)
    root = found_files.root
    if text := unfinished(root):
        problems.append(Problem("unfinished", text))
    return _Dataset(str(root), found_files.names, listed.whole, root, known_files(root, form), problems)


def _media_warnings(counts: Counter[str]) -> Iterator[str]:
    """Yield warnings about images, videos and audio that were counted."""
    if count := counts[DEEP]:
        yield (
            f"{counted(count, 'image has', 'images have')} more than 8 bits a channel: sample.image() returns gray "
            "ones unchanged, and encoders reject them; image(bits=8) converts those of 16 bits to RGB by v >> 8, and "
            "those of 32 bits or floats are yours to scale"
        )
    if count := counts[TURNED]:
        yield (
            f"{counted(count, 'image is', 'images are')} to be turned, as EXIF says: sample.image() does; boxes and "
            "masks that were made without turning fit sample.image(exif=False)"
        )
    if count := counts[ONE_KEYFRAME]:
        yield (
            f"{counted(count, 'video has', 'videos have')} one keyframe only, at the begin: a clip is decoded "
            "from there; encode them again with a keyframe every few seconds"
        )
    if count := counts[NOT_DECODED]:
        parts = counted(count, "audio or video part was", "audio and video parts were")
        yield f"{parts} not decoded: pip install 'savable_pipeline[media]'"


def _check_shards(dataset: _Dataset, names: list[str], processes: int, options: CheckSettings) -> Iterator[Answer]:
    """Check shards in several processes, and yield each report as MessagePack, or None if its process was killed.

    Remote shards are downloaded one by one.
    """
    if not is_remote(dataset.root):
        yield from each_shard(partial(file_check.check_file, options=options), Path(dataset.root), names, processes)
        return
    cache = cache_folder(None)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="check-") as folder:
        task = partial(file_check.check_remote_file, url=dataset.root, options=options)
        yield from each_shard(task, Path(folder), names, processes)


def _index_problems(report: ShardReport, entry: ShardEntry | None, count: int | None) -> Iterator[Problem]:
    """Yield differences of a shard from its index entry, and from its `count` of samples in the metadata."""
    if any(problem.reason in ("missing shard", "damaged shard", "cannot be checked") for problem in report.problems):
        return
    if entry is not None and (entry.size, entry.samples, entry.digest) != (report.size, report.samples, report.digest):
        yield Problem(
            "changed since it was indexed",
            f"{entry.samples} samples and {entry.size} bytes then, {report.samples} and {report.size} now, or others "
            "of the same size: `savable index` indexes it again, and runs that read it before cannot be resumed",
            report.name,
        )
    if count is not None and count != report.samples:
        yield Problem("wrong count", f".info has {count} samples, the shard {report.samples}", report.name)


def _metadata_problems(root: Path, names: list[str]) -> tuple[list[Problem], dict[str, int]]:
    """Return the problems of Energon's metadata, and the number of samples that it states for each shard."""
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
                problems.append(
                    Problem("wrong metadata", f"`exclude` names shards or samples that do not exist: {listed(unknown)}")
                )
                break
    except ShardError as error:
        problems.append(Problem("wrong metadata", str(error)))
    try:
        read_field_map(root)
    except ShardError as error:
        problems.append(Problem("wrong metadata", str(error)))
    return problems, counts
