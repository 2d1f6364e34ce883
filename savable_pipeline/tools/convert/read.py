"""Reads a source of any kind: what its samples are, and how their parts are read when a shard is written.

What a store reads in place has no second reader here: `read_stored`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from savable_pipeline.core.file_heads import HEAD, text_fault
from savable_pipeline.data.remote.scratch import close_scratch
from savable_pipeline.data.stores.decompressed import MORE, DamagedError
from savable_pipeline.tools.convert.compressed import is_compressed, opened
from savable_pipeline.tools.convert.csv_table import file_columns, write_as_jsonl
from savable_pipeline.tools.convert.folder import read_folder
from savable_pipeline.tools.convert.json_array import read_json_array
from savable_pipeline.tools.convert.jsonl import Lines, lines_of, read_jsonl
from savable_pipeline.tools.convert.model import Input, Options
from savable_pipeline.tools.convert.plan import place_of
from savable_pipeline.tools.convert.records import read_records
from savable_pipeline.tools.convert.source_file import close_objects, name_of, place_behind, stamp_of
from savable_pipeline.tools.convert.sources import ROWS, STORED, Source
from savable_pipeline.tools.convert.stored import close_stores, read_stored
from savable_pipeline.tools.convert.stretches import close_files


@dataclass(frozen=True, slots=True)
class Reading:
    """A source, and what it is read with; `aside` is a file for its records as JSONL, where they are not at hand so."""

    source: Source
    options: Options
    files_from: Path | None
    aside: Path

    @property
    def path(self) -> Path | str:
        """Where the source lies: a file, a folder, or a URL."""
        return self.source.path

    @property
    def folder(self) -> Path:
        """Where a source lies of a kind that is not read behind a URL."""
        assert isinstance(self.source.path, Path)
        return self.source.path

    @property
    def root(self) -> Path | None:
        """The folder of the files that records name; None if they lie behind a URL."""
        return self.files_from or (self.path.parent if isinstance(self.path, Path) else None)

    def lines(self, path: Path | str, fields: list[str] | None = None, begins: Sequence[int] | None = None) -> Lines:
        """Records in `path`, of which rejects speak by the name of the source."""
        return lines_of(path, name_of(self.path), self.root, self.options, fields, begins)


def read_source(reading: Reading) -> Input:
    """The samples of a source. Raises ValueError for a source or a setting that does not fit, OSError."""
    _check_options(reading)
    try:
        found = _READERS[reading.source.kind](reading)
    except DamagedError as error:
        raise ValueError(f"{reading.path}: damaged: {error}") from error
    if not found.samples and not found.rejected:
        raise ValueError(f"{reading.path} holds no samples: {reading.source.words} was expected to")
    return found


def close_sources() -> None:
    """Close what this process has open of any source."""
    close_stores()
    close_files()
    close_objects()
    close_scratch()


def _check_options(reading: Reading) -> None:
    kind, options = reading.source.kind, reading.options
    records = kind in ("jsonl", "json", "csv")
    if not records and options.file_fields is not None:
        raise ValueError(f"{reading.path} is {reading.source.words}: file fields are for JSONL, JSON and CSV")
    if not records and kind not in ROWS and reading.files_from:
        raise ValueError(f"{reading.path} is {reading.source.words}: a folder of files is for records and rows")
    if reading.files_from and not reading.files_from.is_dir():
        raise ValueError(f"{reading.files_from}: no such folder, in which the files are that {reading.path} names")
    if options.key_field and not records and kind not in ("mds", "litdata"):
        raise ValueError(f"{reading.path} is {reading.source.words}: a key field is for records")
    if options.allow_outside and not records and kind != "folder":
        raise ValueError(
            f"{reading.path} is {reading.source.words}: allow_outside is for files that links or records name"
        )
    if kind != "folder" and options.classes:
        raise ValueError(f"{reading.path} is no folder of files: classes are the names of folders in one")
    if kind != "folder" and options.key_end == "last":
        raise ValueError(f"{reading.path} is no folder of files: key_end is for the names of files in one")


def _folder(reading: Reading) -> Input:
    return read_folder(reading.folder, reading.options)


def _records(reading: Reading) -> Input:
    return read_records(reading.path, reading.options.key_field, reading.options.unpacked_bytes)


def _jsonl(reading: Reading) -> Input:
    return _placed(reading, read_jsonl(reading.lines(_plain(reading))))


def _json(reading: Reading) -> Input:
    path, most = _plain(reading), reading.options.unpacked_bytes
    if path == reading.aside and (size := reading.aside.stat().st_size) > most:  # it is read as a whole
        raise DamagedError(f"a list of {size} bytes when decompressed; at most {most} are read: {MORE}")
    return _placed(reading, read_json_array(reading.lines(path)))


def _placed(reading: Reading, found: Input) -> Input:
    """Note which object the records of a source behind a URL were read from, and where the files are."""
    if isinstance(reading.path, str):
        files = [] if reading.files_from is None else [place_of(reading.files_from)]
        found.place = place_behind(reading.path, [stamp_of(reading.path), *files])
    return found


def _csv(reading: Reading) -> Input:
    name = name_of(reading.path)
    _check_text(reading)
    with opened(reading.path, reading.options.unpacked_bytes) as file, reading.aside.open("wb") as target:
        table = write_as_jsonl(file, name, target)
    fields: list[str] | None = None
    warnings: list[str] = []
    if reading.options.file_fields is None and reading.root is not None:
        fields, warnings = file_columns(table.head, reading.root, name)
    found = read_jsonl(reading.lines(reading.aside, fields, table.begins))
    found.rejected[:0] = table.rejected
    found.warnings += warnings
    return _placed(reading, found)


def _stored(reading: Reading) -> Input:
    only = tuple(name.lower() for name in reading.options.only)
    return read_stored(reading.path, only, reading.files_from, reading.options.unpacked_bytes)


def _plain(reading: Reading) -> Path | str:
    """The file itself, or its content, decompressed, aside."""
    _check_text(reading)
    if not is_compressed(reading.path):
        return reading.path
    with opened(reading.path, reading.options.unpacked_bytes) as packed, reading.aside.open("wb") as target:
        shutil.copyfileobj(packed, target, 1 << 20)
    return reading.aside


def _check_text(reading: Reading) -> None:
    """Raises ValueError for what begins as no text of UTF-8 once it is decompressed."""
    with opened(reading.path) as file:
        fault = text_fault(file.read(HEAD), name_of(reading.path))
    if fault:
        raise ValueError(f"{reading.path}: {fault}")


_Reader: TypeAlias = Callable[[Reading], Input]
_READERS: dict[str, _Reader] = {
    "folder": _folder,
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "mds": _records,
    "litdata": _records,
    **dict.fromkeys(STORED, _stored),
    "tars": _stored,
}
