"""Cuts a source into ranges, each of which one job writes.

Ranges depend on the source and the settings alone, never on the number of workers. A range has consecutive rows for
about 1 to 8 shards, by the sizes in the index and those of some samples. A row group is never divided: if it is larger
than that, it is a range of its own, and its job writes several shards. Compressed files have no index. A range of them
has whole files, which its job decompresses one after another.

    shards of 100 bytes      rows of 30 bytes: │0 1 2│3 4 5│…      row groups: │0 … 999│1000 … 1999│…
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar import BLOCK
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.options import Options
from savable_pipeline.tools.convert.samples import SampleReader
from savable_pipeline.tools.convert.shard_series import room_in, sample_bytes
from savable_pipeline.tools.convert.source import RECORDS, RowSpan, SourceFiles

_MOST_SHARDS = 8  # most shards of a range
_LEAST_RANGES = 16  # of a source, unless they would be smaller than `LEAST_BYTES`
LEAST_BYTES = 32_000_000  # least bytes of a range; a smaller one is not worth a process
_FILLED = 0.97  # fraction of its shards' bytes that a range should have, because sizes are estimates
_AT_ONCE = 1 << 13  # rows whose sizes are in memory at a time
_MEASURED = 64  # number of samples to measure


def cut_ranges(source: SourceFiles, options: Options) -> tuple[list[tuple[RowSpan, ...]], int]:
    """Return the ranges of a source in order, and the estimated bytes of all."""
    if source.packed:
        sizes = [file.size for file in source.packed]
        steps, total = iter([_Steps(0, 0, np.arange(1, len(sizes) + 1), np.array(sizes))]), sum(sizes)
        rows = 1 << 62  # more than the unknown number in each file
    else:
        rows = source.dataset().count
        estimate = _estimate(source, options)
        steps, total = _steps(source, estimate), int(rows * estimate.mean)
    room, most = max(1, room_in(options.shard_bytes)), options.shard_samples or rows
    shard = max(1, min(room, most * total // rows))  # about the bytes of a full shard
    shards = max(min(_MOST_SHARDS, total // shard // _LEAST_RANGES), -(-LEAST_BYTES // shard), 1)  # of a range
    return _cut(steps, _FILLED * room * shards, most * shards), total


class _Steps(NamedTuple):
    """Rows of a file from `start`, in steps that are not divided: the end row and approximate bytes of each step."""

    file: int
    start: int
    ends: Rows
    sizes: Rows


def _cut(steps: Iterator[_Steps], limit: float, most: int) -> list[tuple[RowSpan, ...]]:
    """Return ranges of at most `limit` bytes and `most` rows, or of one larger step."""
    ranges: list[tuple[RowSpan, ...]] = []
    spans: list[RowSpan] = []
    used, rows, number = 0.0, 0, 0
    for step in steps:
        totals, done, start = np.cumsum(step.sizes), 0, step.start
        while done < len(step.ends):
            before = float(totals[done - 1]) if done else 0.0
            fit = int(np.searchsorted(totals, before + limit - used, "right"))
            fit = min(fit, int(np.searchsorted(step.ends, start + most - rows, "right")))
            if fit <= done and spans:
                ranges.append(tuple(spans))
                spans, used, rows = [], 0.0, 0
                continue
            done = max(fit, done + 1)  # a step that is larger than a range is a range of its own
            end = int(step.ends[done - 1])
            if spans and spans[-1].file == step.file and spans[-1].end == start:
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(RowSpan(step.file, start, end, number))
            used, rows, number = used + float(totals[done - 1]) - before, rows + end - start, number + end - start
            start = end
    return [*ranges, tuple(spans)] if spans else ranges


def _steps(source: SourceFiles, estimate: _Estimate) -> Iterator[_Steps]:
    """Yield the steps of all files: row groups, or else single rows."""
    entries, store = source.dataset().entries, cast("Any", source.dataset().store)
    for file in file_order(source):
        samples = int(entries.samples[file])
        if samples and store.row_groups(file) is not None:
            ends = np.array(store.group_ends(file), np.int64)
            yield _Steps(file, 0, ends, np.diff(ends, prepend=0) * estimate(_row_bytes(source, file, 0, 1)))
            continue
        for start in range(0, samples, _AT_ONCE):
            end = min(start + _AT_ONCE, samples)
            yield _Steps(file, start, np.arange(start + 1, end + 1), estimate(_row_bytes(source, file, start, end)))


def file_order(source: SourceFiles) -> list[int]:
    """Return the numbers of the files in the order of their samples.

    It is that of index.json, or else of their names.
    """
    store: Any = source.dataset().store
    return store.listed_order() if source.form in RECORDS else [*range(len(store.entries))]


def _row_bytes(source: SourceFiles, file: int, start: int, end: int) -> Rows:
    """Return the approximate bytes in the source of each row from `start` to `end - 1`: int64 (rows,)."""
    store, entries = cast("Any", source.dataset().store), source.dataset().entries
    size, samples = int(entries.sizes[file]), max(int(entries.samples[file]), 1)
    if source.form == FOLDER:
        firsts = np.frombuffer(store.table.firsts, "<i8")[start : end + 1]
        sizes = np.frombuffer(store.table.sizes, "<i8")[firsts[0] : firsts[-1]]
        return cast("Rows", np.add.reduceat((sizes + BLOCK - 1) // BLOCK * BLOCK, firsts[:-1] - firsts[0]))
    if (groups := store.row_groups(file)) is not None:
        size = groups[1]
    elif len((ends := store.byte_ranges(file, np.arange(start, end)))[0]) == end - start:
        return cast("Rows", ends[1] - ends[0])
    return np.full(end - start, size // samples, np.int64)


class _Estimate(NamedTuple):
    """Estimates the bytes of rows in tars from their bytes in the source."""

    factor: float
    more: float  # bytes to add to each row
    mean: float  # mean bytes of a row in tars

    def __call__(self, listed: Rows) -> Rows:
        return (self.factor * listed + self.more).astype(np.int64)


def _estimate(source: SourceFiles, options: Options) -> _Estimate:
    """Estimate the sizes of rows from some samples. Row groups are not decoded, so only their bytes count."""
    dataset, store = source.dataset(), cast("Any", source.dataset().store)
    rows, start, first = dataset.count, 0, next(n for n in file_order(source) if dataset.entries.samples[n])
    if store.row_groups(first) is not None:
        if not source.files_from:
            mean = sum(float(_row_bytes(source, file, 0, 1)[0]) * n for file, n in enumerate(dataset.entries.samples))
            return _Estimate(1.0, 2 * BLOCK, mean / rows + 2 * BLOCK)
        # decoding a whole group would take too long
        rows, start = store.group_ends(first)[0], int(dataset.firsts[first])
    count, found, listed = min(_MEASURED, rows), 0, 0.0
    reader = SampleReader(source, dataset, msgspec.structs.replace(options, check_images=False), None)
    with contextlib.suppress(SavableError, ValueError):  # jobs raise these errors
        for number in (start + np.arange(count) * rows // count).tolist():
            file = int(np.searchsorted(dataset.firsts, number, side="right")) - 1
            row = number - int(dataset.firsts[file])
            for sample in reader.samples(RowSpan(file, row, row + 1, number)):
                found += sample_bytes(sample.key, {part: len(data) for part, _, data in sample.parts})
            listed += float(_row_bytes(source, file, row, row + 1)[0])
    if not found or not listed:
        return _Estimate(1.0, BLOCK, listed / count + BLOCK)
    if found < listed:
        return _Estimate(found / listed, 0.0, found / count)
    return _Estimate(1.0, (found - listed) / count, found / count)
