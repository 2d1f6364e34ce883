"""Opens a source for a conversion: its store with the settings of the options, and its ranges."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from savable_pipeline.core.file_heads import HEAD, text_error
from savable_pipeline.core.files import replacing
from savable_pipeline.data.remote.lookup import stamps_of
from savable_pipeline.data.remote.session import job_session
from savable_pipeline.data.stores.csv_table import file_columns
from savable_pipeline.data.stores.decompressed import MORE, DamagedError
from savable_pipeline.data.stores.sample_names import TAR_ENDINGS, Reject, is_hidden
from savable_pipeline.data.stores.table_store import FILE_FIELDS
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.compressed import close_objects, is_compressed, name_of, opened
from savable_pipeline.tools.convert.options import WORK, Options
from savable_pipeline.tools.convert.ranges import cut_ranges
from savable_pipeline.tools.convert.source import (
    COLUMN_KINDS,
    RECORD_KINDS,
    TABLE_KINDS,
    EmptySourceError,
    RowSpan,
    SourceFiles,
)
from savable_pipeline.tools.convert.sources import ConversionSource
from savable_pipeline.tools.convert.target import Target

_RECORDS_NAME = "records"  # of a decompressed table in the work folder


@dataclass(slots=True)
class Prepared:
    """A source to convert."""

    source: SourceFiles
    identity: str  # a hash of its files and their versions
    ranges: list[tuple[RowSpan, ...]]
    size: int  # bytes, estimated
    rejected: list[Reject] = field(default_factory=list)  # files and lines that no store reads as samples
    warnings: list[str] = field(default_factory=list)
    hidden: int = 0
    classes: list[str] = field(default_factory=list)


def prepare(
    source: ConversionSource, options: Options, files_from: Path | None, output: Target, by_machines: bool
) -> Prepared:
    """Open a source and cut its ranges; `by_machines`: other machines will read it.

    Raises ValueError for a source or a setting that does not fit, `ShardError`, OSError.
    """
    _check_options(source, options, files_from)
    try:
        found = _prepared(source, options, files_from, output, by_machines)
    except DamagedError as error:
        raise ValueError(f"{source.path}: damaged: {error}") from error
    except ShardError as error:
        if source.kind in (*TABLE_KINDS, *RECORD_KINDS):
            raise ValueError(str(error)) from error
        raise
    if not found.ranges and not found.rejected:
        raise ValueError(f"{source.path} has no samples, though it is {source.words}")
    return found


def _prepared(
    source: ConversionSource, options: Options, files_from: Path | None, output: Target, by_machines: bool
) -> Prepared:
    path, kind = source.path, source.kind
    address = str(path.resolve()) if isinstance(path, Path) else path
    if kind == "packed":
        return _packed(Path(address), options)
    settings: dict[str, Any] = {"unpacked_bytes": options.unpacked_bytes}
    identity, copied = "", False
    if kind == "folder":
        settings = {"key_end": options.key_end or "first", "classes": options.classes}
        settings["allow_outside"] = options.allow_outside
    elif kind in TABLE_KINDS:
        _check_text(path)
        settings = _table_settings(path, kind, options, files_from)
        if is_compressed(path):
            identity, copied = _identity(path), True
            address = str(_decompressed(path, kind, options, output.work))
    elif kind in RECORD_KINDS and options.key_field is not None:
        settings["key"] = options.key_field
    elif kind == "tars":
        settings = {}
    table = SourceFiles(address, kind, tuple(settings.items()), name_of(path) if kind in TABLE_KINDS else "")
    if kind == "folder" or kind in TABLE_KINDS:
        table = replace(table, index=str(output.work.absolute() / "index"))
        if kind == "folder":
            Path(table.index).unlink(missing_ok=True)
    if files_from is not None and kind in COLUMN_KINDS:
        table = replace(table, files_from=os.path.realpath(files_from), newest_ns=_started_ns(output.work))
    found = _opened(table, identity, options)
    if copied and by_machines and output.bucket is not None:  # which do not see this machine's files
        name = f"{WORK}/{name_of(Path(address))}"
        output.bucket.upload(name, Path(address))
        found.source = replace(found.source, path=f"{output.bucket.url}/{name}", digest="").planned()
    return found


def _opened(source: SourceFiles, identity: str, options: Options) -> Prepared:
    """The source as it is now, with what its store does not read."""
    is_empty = False
    try:
        source = source.planned()
        store: Any = source.dataset().store
    except EmptySourceError as error:
        store, is_empty = error.store, True
    found = Prepared(source, identity or source.digest, [], 0)
    if source.kind == "folder":
        if options.key_end is None and (fault := store.table.fault(source.path, "--key-end {}")):
            raise ValueError(fault)
        found.hidden, found.rejected, found.classes = store.table.hidden, [*store.table.rejected], store.classes
    elif source.kind in TABLE_KINDS:
        _read_faults(found, store)
        if source.kind == "csv" and options.file_fields is None and not is_empty:
            fields, found.warnings, urls = file_columns(store, source.name)
            if urls:
                raise ValueError(f"{source.name}: the column {urls!r} has URLs, not files. {NO_FILES}")
            settings = {**dict(source.settings), "file_fields": tuple(fields)}
            found.source = source = replace(source, settings=tuple(settings.items()))
    elif text := store.left_out():
        raise ValueError(text)
    if not is_empty:
        found.ranges, found.size = cut_ranges(source, options)
    return found


NO_FILES = "Download them first, for example with img2dataset, or pass --no-files to keep them as text"


def _read_faults(found: Prepared, store: Any) -> None:
    """Reject the lines after the last row of a JSONL file. Raises ValueError for other damaged tables."""
    fault, name = store.entries[0].fault, found.source.name
    if not fault:
        return
    if found.source.kind != "jsonl":
        raise ValueError(fault.replace(store.entries[0].name, name, 1))
    end = int(store.blob(0)[-1])
    line, at = 1, 0
    while at < end:
        block = store.files.read(0, at, min(end - at, 1 << 22))
        line, at = line + block.count(b"\n"), at + len(block)
    found.rejected.append(Reject.of(f"{name}:{line}", "", f"malformed JSON: {fault.partition(': ')[2]}"))


def _table_settings(path: Path | str, kind: str, options: Options, files_from: Path | None) -> dict[str, Any]:
    fields = options.file_fields
    if fields is None:
        fields = () if kind == "csv" else FILE_FIELDS
    folder = None if files_from is None else str(files_from.absolute())
    if folder is None and is_compressed(path):
        folder = str(path.absolute().parent) if isinstance(path, Path) else ""
    return {"files_from": folder, "allow_outside": options.allow_outside, "file_fields": fields}


def _check_text(path: Path | str) -> None:
    """Raise ValueError for a file that does not start as text in UTF-8."""
    with opened(path) as file:
        fault = text_error(file.read(HEAD), name_of(path))
    close_objects()
    if fault:
        raise ValueError(f"{path}: {fault}")


def _started_ns(work: Path) -> int:
    """When the conversion was started first, by the clock of its file system."""
    path = work / "started"
    if not path.exists():
        path.touch()
    return path.stat().st_mtime_ns


def _decompressed(path: Path | str, kind: str, options: Options, work: Path) -> Path:
    """The decompressed copy of a table in the work folder."""
    plain, most = work / f"{_RECORDS_NAME}.{'tsv' if '.tsv' in name_of(path).lower() else kind}", options.unpacked_bytes
    if not plain.exists():  # else by a run that was stopped, of the same file
        with opened(path, most) as packed, replacing(plain) as file:
            shutil.copyfileobj(packed, file, 1 << 20)
            if kind == "json" and (size := file.tell()) > most:  # it is read as a whole
                raise DamagedError(f"a list of {size} bytes when decompressed, more than {most}. {MORE}")
        close_objects()
    return plain.absolute()


def _identity(path: Path | str) -> str:
    if isinstance(path, Path):
        stat = path.stat()
        version = f"{stat.st_size} {stat.st_mtime_ns}"
    else:
        root, _, name = path.rpartition("/")
        version = stamps_of(root, [name], job_session())[name][1]
    return hashlib.sha256(version.encode()).hexdigest()


def _packed(path: Path, options: Options) -> Prepared:
    root = path if path.is_dir() else path.parent
    files = sorted(each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file())
    names = [each.relative_to(root).as_posix() for each in files if each.name.lower().endswith(TAR_ENDINGS)]
    stats = ((name, Path(root, name).stat()) for name in names if not any(map(is_hidden, name.split("/"))))
    packed = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    source = SourceFiles(str(root), "packed", packed=packed).planned()
    ranges, size = cut_ranges(source, options)
    return Prepared(source, source.digest, ranges, size)


def _check_options(source: ConversionSource, options: Options, files_from: Path | None) -> None:
    """Raise ValueError for settings that files of this kind do not have."""
    kind, text = source.kind, f"{source.path} is {source.words}"
    records, rows = kind in TABLE_KINDS, kind in (*TABLE_KINDS, *COLUMN_KINDS)
    wrong = {
        "file fields are for JSONL, JSON and CSV": not records and options.file_fields is not None,
        "a folder of files is for records and rows": not rows and files_from is not None,
        "a key field is for records": bool(options.key_field) and not records and kind not in RECORD_KINDS,
        "allow_outside is for links and named files": options.allow_outside and not records and kind != "folder",
        "classes are the names of folders in a folder of files": bool(options.classes) and kind != "folder",
        "key_end is for the names of files in a folder": options.key_end == "last" and kind != "folder",
    }
    for fault, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{text}: {fault}")
    if files_from is not None and not files_from.is_dir():
        raise ValueError(f"{files_from}: no such folder. Pass the one with the files of {source.path}")
