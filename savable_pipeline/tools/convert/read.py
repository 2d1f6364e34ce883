"""Reads a source of any kind: what its samples are, and how their parts are read when a shard is written.

What a store reads in place has no second reader here: `read_stored`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.core.file_heads import HEAD, text_fault
from savable_pipeline.data.remote.session import close_scratch
from savable_pipeline.data.stores.decompressed import MORE, DamagedError
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.compressed import is_compressed, opened
from savable_pipeline.tools.convert.model import Input, Options
from savable_pipeline.tools.convert.plan import RECORDS, WORK, place_of
from savable_pipeline.tools.convert.records import read_folder, read_records, read_table
from savable_pipeline.tools.convert.source_file import close_objects, name_of, place_behind, stamp_of
from savable_pipeline.tools.convert.sources import ROWS, TEXTS, ConversionSource
from savable_pipeline.tools.convert.stored import close_stores, read_stored


@dataclass(frozen=True, slots=True)
class Reading:
    """A source, and what it is read with; in `target` is room for its index, and its records if they are compressed."""

    source: ConversionSource
    options: Options
    files_from: Path | None
    target: Path

    @property
    def path(self) -> Path | str:
        """Where the source lies: a file, a folder, or a URL."""
        return self.source.path


def read_source(reading: Reading) -> Input:
    """The samples of a source. Raises ValueError for a source or a setting that does not fit, OSError."""
    _check_options(reading)
    try:
        found = _read(reading)
    except DamagedError as error:
        raise ValueError(f"{reading.path}: damaged: {error}") from error
    if not found.samples and not found.rejected:
        raise ValueError(f"{reading.path} holds no samples: {reading.source.words} was expected to")
    return found


def close_sources() -> None:
    """Close what this process has open of any source."""
    close_stores()
    close_objects()
    close_scratch()


def _check_options(reading: Reading) -> None:
    kind, options = reading.source.kind, reading.options
    records = kind in TEXTS
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


def _read(reading: Reading) -> Input:
    path, options, kind = reading.path, reading.options, reading.source.kind
    if kind == "folder":
        assert isinstance(path, Path)  # `recognize` refuses others
        return read_folder(path, options, reading.target / WORK)
    if kind in TEXTS:
        return _table(reading)
    if kind in ("mds", "litdata"):
        return read_records(path, options.key_field, options.unpacked_bytes)
    return read_stored(path, tuple(name.lower() for name in options.only), reading.files_from, options.unpacked_bytes)


def _table(reading: Reading) -> Input:
    """The samples of a table, decompressed aside where it is compressed."""
    path, kind, most = reading.path, reading.source.kind, reading.options.unpacked_bytes
    _check_text(reading)
    plain: Path | str = path
    files_from: Path | str | None = reading.files_from
    if is_compressed(path):
        plain = reading.target / RECORDS["tsv" if ".tsv" in name_of(path).lower() else kind]
        files_from = files_from or (path.parent if isinstance(path, Path) else "")
        with opened(path, most) as packed, plain.open("wb") as target:
            shutil.copyfileobj(packed, target, 1 << 20)
        if kind == "json" and (size := plain.stat().st_size) > most:  # it is read as a whole
            raise DamagedError(f"a list of {size} bytes when decompressed; at most {most} are read: {MORE}")
    try:
        found = read_table(plain, name_of(path), kind, reading.options, files_from, reading.target / WORK)
    except ShardError as error:
        raise ValueError(str(error)) from error
    if isinstance(path, str):  # which object the records were read from, and where the files are
        files = [] if reading.files_from is None else [place_of(reading.files_from)]
        found.place = place_behind(path, [stamp_of(path), *files])
    return found


def _check_text(reading: Reading) -> None:
    """Raises ValueError for what begins as no text of UTF-8 once it is decompressed."""
    with opened(reading.path) as file:
        fault = text_fault(file.read(HEAD), name_of(reading.path))
    if fault:
        raise ValueError(f"{reading.path}: {fault}")
