"""Checking one file that is no tar: its scan, then every part of every sample."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from savable_pipeline.check.part_check import part_fault
from savable_pipeline.check.shard_check import Problem, ShardReport, check_downloaded
from savable_pipeline.core.wording import encodable
from savable_pipeline.dataset.kinds import format_of, open_store
from savable_pipeline.errors import SavableError
from savable_pipeline.shards.processes import do
from savable_pipeline.stores.columnar_store import ColumnarStore
from savable_pipeline.stores.file_indexing import IndexedFiles
from savable_pipeline.stores.file_store import FileStore
from savable_pipeline.stores.place_index import FileTable, ScannedFiles


def check_file(root: Path, name: str) -> ShardReport:
    """Read all of a file. Its content is decoded and dropped; faults become problems, never errors."""
    form = format_of(root / name)
    assert form is not None, name
    table = do(form.scan, root, name)
    assert isinstance(table, FileTable)
    entry, problems, parts, counts = table.entry, [], Counter[str](), Counter[str]()
    if entry.fault:
        gone = not (root / name).exists()
        fault = entry.fault.removeprefix(f"{name}: ")
        problems.append(Problem("missing shard" if gone else "damaged shard", fault, name))
    most = 0
    try:
        store = open_store(IndexedFiles(root, [name], ScannedFiles([table]), root / form.index_name), form)
        row = 0
        while row < store.entries[0].samples:
            try:
                problems += _problems_of(store, name, row, parts, counts)
                row += 1
            except SavableError as error:
                detail = encodable(str(error).removeprefix(f"{store.place(0)}: "))
                problems.append(Problem("damaged shard", detail, name, index=row))
                row = _after_damage(store, row)
            most = max(most, counts.pop("parts", 0))
    except (SavableError, ValueError) as error:
        problems.append(Problem("cannot be checked", encodable(str(error)), name))
    with_alpha = counts["with alpha"]
    return ShardReport(name, entry.size, entry.samples, entry.digest, problems, dict(parts), most, with_alpha)


def check_remote_file(url: str, folder: Path, name: str) -> ShardReport:
    """The same for a file behind a URL, which is downloaded to an empty folder and removed again."""
    form = format_of(folder / name)
    assert form is not None, name
    suffix, beside = form.beside
    companions = [name.removesuffix(suffix) + beside] if suffix and name.endswith(suffix) else []
    return check_downloaded(url, folder, [name, *companions], check_file)


def _problems_of(store: FileStore, name: str, row: int, parts: Counter[str], counts: Counter[str]) -> Iterator[Problem]:
    extensions = store.extensions(0, row)
    counts["parts"] = len(extensions)
    parts.update(extensions)
    for extension in extensions:
        fault = part_fault(extension, store.read(0, row, extension), counts)
        if fault:
            yield _problem(store, name, row, extension, fault)


def _after_damage(store: FileStore, row: int) -> int:
    """The next row to read: where rows are decoded in groups, the first of the next group."""
    if not isinstance(store, ColumnarStore):
        return row + 1
    ends = store.group_ends(0)
    return ends[bisect_right(ends, row)]


def _problem(store: FileStore, name: str, row: int, extension: str, fault: str) -> Problem:
    reason, _, detail = fault.partition(": ")
    offset: Any = store.offset(0, row) if store.unit == "byte offset" else None
    return Problem(reason, encodable(detail), name, encodable(store.key(0, row)), extension, offset, row)
