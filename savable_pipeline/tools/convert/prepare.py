"""Preparation of a source: its store with its settings, and its ranges."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from savable_pipeline.core.wording import listed
from savable_pipeline.data.stores.csv_table import CSV, file_columns
from savable_pipeline.data.stores.folder_store import FOLDER, tar_key
from savable_pipeline.data.stores.opening import with_settings
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.data.stores.table_store import FILE_FIELDS
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.options import Options
from savable_pipeline.tools.convert.ranges import cut_ranges
from savable_pipeline.tools.convert.samples import line_fault, plain_part
from savable_pipeline.tools.convert.source import TABLES, EmptySourceError, RowSpan, SourceFiles
from savable_pipeline.tools.convert.target import Target

NO_FILES = "Download them first, for example with img2dataset, or pass --no-files to keep them as text"


@dataclass(slots=True)
class Prepared:
    """A source to convert."""

    source: SourceFiles
    ranges: list[tuple[RowSpan, ...]] = field(default_factory=list)
    size: int = 0  # estimated bytes
    rejected: list[Reject] = field(default_factory=list)  # files and lines that its store does not read as samples
    warnings: list[str] = field(default_factory=list)
    hidden: int = 0  # number of hidden files and folders
    classes: list[str] = field(default_factory=list)  # names of the classes by number


def prepare_source(
    source: SourceFiles, options: Options, files_from: Path | None, output: Target, keys: Collection[str] | None
) -> Prepared:
    """Open a source and cut its ranges.

    Raises ValueError for a source or a setting that does not fit, OSError, `RemoteError`.
    """
    if files_from is not None and not files_from.is_dir():
        raise ValueError(f"{files_from}: no such folder. Pass the one with the files of {source.path}")
    try:
        found = _opened(_with_settings(source, options, files_from, output), options, keys)
    except ShardError as error:
        raise ValueError(str(error)) from error
    if not found.ranges and not found.rejected:
        raise ValueError(f"{source.path} has no samples, though it has the format {source.form.name}. Check its files")
    return found


def _with_settings(source: SourceFiles, options: Options, files_from: Path | None, output: Target) -> SourceFiles:
    """Return the source with the settings of its store. Raises ValueError for one that its format lacks."""
    form, is_table = source.form, source.form in TABLES
    # None: the store of CSV finds the columns that name files
    usual = None if form == CSV else tuple(dict.fromkeys((*FILE_FIELDS, *source.found.settings.get("file_fields", ()))))
    named = form.name in ("parquet", "arrow")  # rows of these may name files that their store does not open
    chosen = {
        "key": options.key_field,
        "key_end": options.key_end,
        "classes": options.classes or None,
        "allow_outside": options.allow_outside or None,
        "file_fields": options.file_fields if options.file_fields is not None or not is_table else usual,
        "files_from": None if files_from is None or named else str(files_from.absolute()),
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    with_settings(replace(source.found, files=source.path, format=form), dict(chosen))
    (output.work / "started").open("a").close()  # its time is that of the first start, by the file system's clock
    started_ns = (output.work / "started").stat().st_mtime_ns
    automatic = {"unpacked_bytes": options.unpacked_bytes, "pinned": started_ns}
    settings = {**chosen, **{name: each for name, each in automatic.items() if name in form.settings or source.packed}}
    index = str(output.work.absolute() / "index") if form == FOLDER else ""
    source = replace(source, found=_without_names(source), settings=settings, index=index)
    if files_from is not None and named:
        source = replace(source, files_from=os.path.realpath(files_from), newest_ns=started_ns)
    return source


def _without_names(source: SourceFiles) -> Any:
    """Return the files without their names, if listing them again gives the same.

    The list of names would otherwise be sent with each job.
    """
    found, names = source.found, source.found.listed
    form = found.format
    # Names alone do not give the same files if the format was recognized by a marker file, such as "index.json", or if
    # its files were chosen by their first bytes.
    if names is None or form.markers or (names.chosen is not None and names.chosen != form.files(names.names, {})):
        return found
    return replace(found, listed=None)


def _opened(source: SourceFiles, options: Options, keys: Collection[str] | None) -> Prepared:
    """Open the source, and return it with its ranges, and the files and lines that its store does not read."""
    if source.packed:
        source = source.at_start()
        return Prepared(source, *cut_ranges(source, options))
    is_empty = False
    try:
        source = source.at_start()
        store: Any = source.dataset().store
    except EmptySourceError as error:
        store, is_empty = error.args[0], True
    found = Prepared(source)
    if source.form == FOLDER:
        found.hidden, found.rejected, found.classes = store.table.hidden, [*store.table.rejected], store.classes
    elif source.form in TABLES:
        for number in sorted(store.entries.faults):
            found.rejected.append(line_fault(source, store, number))
        if source.form == CSV and options.file_fields is None and not is_empty:
            name = store.entries.names[0]
            _, found.warnings, urls = file_columns(store, name)
            if urls:
                raise ValueError(f"{name}: the column {urls!r} has URLs, not files. {NO_FILES}")
    elif text := store.rejects_warning():
        raise ValueError(text)
    if not is_empty:
        _check_chosen(source, store, options, keys)
        found.ranges, found.size = cut_ranges(source, options)
    return found


def _check_chosen(source: SourceFiles, store: Any, options: Options, keys: Collection[str] | None) -> None:
    """Raise ValueError for chosen parts and keys that no sample has, as far as the index has these.

    `finish` checks the others, once all samples were read.
    """
    known: set[str] = set()
    if options.only and source.form in (FOLDER, TARS):
        known = set(store.part_sizes() or ())
    elif options.only and source.form.name in ("parquet", "arrow"):
        wanted = frozenset(name.lower() for name in options.only)
        known = (
            set()
            if store.media_named(wanted)
            else set(store.schema(int(np.flatnonzero(store.entries.samples)[0])).names)
        )
    check_parts(options, known, known)
    if keys is not None and source.form == FOLDER:
        found = (tar_key(key) for key in source.dataset().all_keys())
        check_keys(set(keys).difference(found))


def check_parts(options: Options, parts: Collection[str], usable: Collection[str]) -> None:
    """Raise ValueError for chosen parts that are not in `parts`.

    If `parts` is empty, none is known, and none is an error. The message lists the `usable` ones.
    """
    known = {name.lower() for name in parts}
    unknown = {name.lower() for name in options.only} - known - {plain_part(name) for name in known}
    if known and unknown:
        raise ValueError(f"no sample has a part {listed(sorted(unknown))}. Use some of {listed(sorted(usable))}")


def check_keys(missing: Collection[str]) -> None:
    """Raise ValueError for keys that no sample has."""
    if missing:
        raise ValueError(
            f"no sample has {len(missing)} of the keys, such as {listed(sorted(missing))}. Correct the list"
        )
