"""Checking one file that is no tar: its scan, then every part of every sample."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from savable_pipeline.core.on_error import reason_of
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.dataset.kinds import FORMATS, format_of_file, open_store
from savable_pipeline.data.shards.processes import do
from savable_pipeline.data.stores.columnar_store import NO_BYTES, ColumnarStore
from savable_pipeline.data.stores.file_indexing import IndexedFiles
from savable_pipeline.data.stores.file_store import FileStore
from savable_pipeline.data.stores.grouped_store import GroupedStore
from savable_pipeline.data.stores.place_index import FileTable, ScannedFiles
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.check.part_check import part_fault
from savable_pipeline.tools.check.shard_check import Problem, ShardReport, check_downloaded


def check_file(root: Path, name: str) -> ShardReport:
    """Read all of a file. Its content is decoded and dropped; faults become problems, never errors."""
    form = format_of_file(root, name)
    assert form is not None, name
    table = do(form.scan, root, name)
    assert isinstance(table, FileTable)
    entry, problems, found = table.entry, [], _Found()
    if entry.fault:
        gone = not (root / name).exists()
        fault = entry.fault.removeprefix(f"{name}: ")
        problems.append(Problem("missing shard" if gone else "damaged shard", fault, name))
    try:
        files = IndexedFiles(root, [name], ScannedFiles([table]), root / form.index_name)
        store = open_store(files, form, partial=True)
        row = 0
        while row < store.entries[0].samples:
            try:
                problems += _problems_of(store, name, row, found)
                row += 1
            except SavableError as error:
                detail = encodable(str(error).removeprefix(f"{store.place(0)}: "))
                problems.append(Problem(reason_of(error), detail, name, index=row))
                row = _after_damage(store, row, reason_of(error))
        if isinstance(store, ColumnarStore):
            problems += _without_bytes(store, name, found)
    except (SavableError, ValueError) as error:
        problems.append(Problem("cannot be checked", encodable(str(error)), name))
    return ShardReport(
        name,
        entry.size,
        entry.samples,
        entry.digest,
        problems,
        dict(found.parts),
        found.most,
        found.counts["with alpha"],
        dict(found.empty),
        dict(found.nulls),
    )


class _Found:
    """What is counted in a file, by part or column."""

    def __init__(self) -> None:
        self.parts, self.empty, self.nulls = Counter[str](), Counter[str](), Counter[str]()
        self.named = Counter[str]()  # rows that name a file without its bytes
        self.counts = Counter[str]()  # of `part_fault`
        self.most = 0  # parts of one sample


def _without_bytes(store: ColumnarStore, name: str, found: _Found) -> Iterator[Problem]:
    """A problem for each column whose rows name files without their bytes."""
    for column, count in sorted(found.named.items()):
        detail = f"the column {column!r}: {count:,} of {store.entries[0].samples:,} rows have a path and no bytes"
        yield Problem(NO_BYTES, encodable(f"{detail}; {store.cure}"), name)


def check_remote_file(url: str, folder: Path, name: str) -> ShardReport:
    """The same for a file behind a URL, which is downloaded to an empty folder and removed again."""
    beside = [form.beside for form in FORMATS.values() if form.beside[1] and name.endswith(form.beside[0])]
    companions = {name.removesuffix(suffix) + other if suffix else other for suffix, other in beside}
    with tempfile.TemporaryDirectory(dir=folder) as own:  # what lies beside it lies beside those of other processes too
        return check_downloaded(url, Path(own), [name, *companions], check_file)


def _problems_of(store: FileStore, name: str, row: int, found: _Found) -> Iterator[Problem]:
    extensions = store.extensions(0, row)
    found.most = max(found.most, len(extensions))
    found.parts.update(extensions)
    if isinstance(store, ColumnarStore):
        found.nulls.update(store.nulls(0, row))
        found.named.update({file.column for file in store.named_files(0, row)})
    for extension in extensions:
        data = store.read(0, row, extension)
        found.empty.update([] if data else [extension])
        fault = part_fault(extension, data, found.counts)
        if fault:
            yield _problem(store, name, row, extension, fault)


def _after_damage(store: FileStore, row: int, reason: str) -> int:
    """The next row to read: where rows are decoded in groups, the first of the next group."""
    whole = isinstance(store, ColumnarStore) or reason == "damaged shard"
    if not isinstance(store, GroupedStore) or not whole:
        return row + 1
    ends = store.group_ends(0)
    return ends[bisect_right(ends, row)]


def _problem(store: FileStore, name: str, row: int, extension: str, fault: str) -> Problem:
    reason, _, detail = fault.partition(": ")
    offset: Any = store.offset(0, row) if store.unit == "byte offset" else None
    return Problem(reason, encodable(detail), name, encodable(store.key(0, row)), extension, offset, row)
