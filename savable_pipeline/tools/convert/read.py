"""Reads a source of any kind: what its samples are, what is rejected, and how their parts are read for a shard.

a folder         its samples, as they are       key: the path                 `read_folder`
tables           rows, and files they name      key: a number, or a field     `read_table`
MDS, LitData     records of their index.json    key: a number, or a field     `read_records`
what a store reads in place                     key: its own                  `read_stored`
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.core.file_heads import HEAD, text_error
from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.data.remote.session import close_scratch
from savable_pipeline.data.shards.byte_source import RecordError
from savable_pipeline.data.stores.csv_table import CsvStore, file_columns
from savable_pipeline.data.stores.decompressed import MORE, DamagedError
from savable_pipeline.data.stores.folder_store import FolderStore, tar_key
from savable_pipeline.data.stores.record_files import Blob, Value, parts_of
from savable_pipeline.data.stores.sample_names import Reject, parts_fault, printable
from savable_pipeline.data.stores.table_store import A_URL, FILE_FIELDS, TableStore, without_mark
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.model import Files, Input, Options, Part
from savable_pipeline.tools.convert.plan import RECORDS, WORK, source_id
from savable_pipeline.tools.convert.source_file import (
    close_objects,
    is_compressed,
    name_of,
    opened,
    remote_source_id,
    stamp_of,
)
from savable_pipeline.tools.convert.sources import ROWS, TEXTS, ConversionSource
from savable_pipeline.tools.convert.stored import close_stores, raw_input, read_stored, stored_input, with_settings


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
        raise ValueError(f"{reading.path} has no samples, though it is {reading.source.words}")
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
        raise ValueError(f"{reading.files_from}: no such folder. Pass the one with the files of {reading.path}")
    if options.key_field and not records and kind not in ("mds", "litdata"):
        raise ValueError(f"{reading.path} is {reading.source.words}: a key field is for records")
    if options.allow_outside and not records and kind != "folder":
        raise ValueError(f"{reading.path} is {reading.source.words}: allow_outside is for links and named files")
    if kind != "folder" and options.classes:
        raise ValueError(f"{reading.path} is not a folder of files: classes are the names of folders in one")
    if kind != "folder" and options.key_end == "last":
        raise ValueError(f"{reading.path} is not a folder of files: key_end is for the names of files in one")


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
            raise DamagedError(f"a list of {size} bytes when decompressed, more than {most}. {MORE}")
    try:
        found = read_table(plain, name_of(path), kind, reading.options, files_from, reading.target / WORK)
    except ShardError as error:
        raise ValueError(str(error)) from error
    if isinstance(path, str):  # which object the records were read from, and where the files are
        files = [] if reading.files_from is None else [source_id(reading.files_from)]
        found.source_id = remote_source_id(path, [stamp_of(path), *files])
    return found


def _check_text(reading: Reading) -> None:
    """Raises ValueError for what begins as no text of UTF-8 once it is decompressed."""
    with opened(reading.path) as file:
        fault = text_error(file.read(HEAD), name_of(reading.path))
    if fault:
        raise ValueError(f"{reading.path}: {fault}")


TEXT_FIELDS = ("caption", "text")
_SHARED = 1.1  # times the bytes of the files
_NO_FILES = "Download them first, for example with img2dataset, or pass --no-files to keep them as text"


def read_folder(root: Path, options: Options, work: Path) -> Input:
    """The samples of a folder and those below it, sorted by key."""
    settings = {
        "key_end": options.key_end or "first",
        "classes": options.classes,
        "allow_outside": options.allow_outside,
    }
    store, found = raw_input(root, "folder", settings, work)
    assert isinstance(store, FolderStore)
    if options.key_end is None and (fault := store.table.fault(str(root), "--key-end {}")):
        raise ValueError(fault)
    found.hidden, found.rejected, found.digest = store.table.hidden, [*store.table.rejected], ""
    found.classes = store.classes
    own = [store.key(0, row) for row in range(store.entries[0].samples)]
    keys = [tar_key(key) for key in own]  # of keys that end at the first dot, the same
    counts = Counter(keys)
    if renamed := [row for row, key in enumerate(own) if key != keys[row]]:
        first = renamed[0]
        found.warnings.append(
            f"{counted(len(renamed), 'key')} had dots, which become _ in tars: {own[first]} is {keys[first]} there"
        )
    for row, key in enumerate(keys):
        files = store.files(row)
        if counts[key] > 1:
            detail = f"of {own[row]} and another name: both would be {key}"
            found.rejected.append(Reject(store.path(min(files.values())), key, "two names with one key", detail))
            continue
        parts = tuple(Part(extension, store.path(number), store.size(number)) for extension, number in files.items())
        found.samples.append(Files(key, parts, row, of_files=True))
    return found


@dataclass
class _Table:
    """A table on its way into samples: its name, how its rows are called, and what they have in common."""

    store: TableStore
    name: str  # of the source: of what was decompressed, that of the compressed file
    key_field: str | None
    keys: dict[str, int] = field(default_factory=dict)  # seen so far, with their lines
    texts: set[str] = field(default_factory=lambda: set(TEXT_FIELDS))
    digest: Any = field(default_factory=hashlib.sha256)  # of all bytes
    narrow: list[Reject] = field(default_factory=list)  # rows of another width than the header

    @cached_property
    def address(self) -> str:
        """The file that holds the rows, as parts name it."""
        return self.store.where(0)

    def key(self, fields: dict[str, Any]) -> str:
        """The key in the fields of a row. Raises `RecordError`, also for that of a sample before it."""
        assert self.key_field is not None
        key = _key(fields.get(self.key_field), self.key_field)
        if key in self.keys:
            raise RecordError(f"duplicate key: {key!r} is the key of line {self.keys[key]} already")
        return key


def read_table(
    path: Path | str, name: str, kind: str, options: Options, files_from: Path | str | None, work: Path
) -> Input:
    """The samples of a table, in its order: a row, and the files that it names. Raises ValueError for one that is none.

    `name` is what rejects call it. Files are relative to `files_from`, None: the table's folder; "": there are none.
    """
    folder = str(files_from.absolute()) if isinstance(files_from, Path) else files_from
    settings: dict[str, Any] = {"files_from": folder, "allow_outside": options.allow_outside, "pinned": False}
    named = () if kind == "csv" else FILE_FIELDS
    settings["file_fields"] = named if options.file_fields is None else tuple(options.file_fields)
    store, found = raw_input(path, kind, settings, work)
    assert isinstance(store, TableStore)
    if kind != "jsonl" and (fault := store.entries[0].fault):  # of lines, one that cannot be read is a reject
        raise ValueError(fault.replace(store.entries[0].name, name, 1))
    if isinstance(store, CsvStore) and options.file_fields is None:
        _name_columns(found, store, name)
    found.root = store.root_of(0)
    table = _Table(store, name, options.key_field)
    for row in _rows(table, kind):
        _add_row(found, table, row)
    found.rejected[:0] = table.narrow
    found.digest = table.digest.hexdigest()
    found.texts = frozenset(table.texts) if found.samples else frozenset()
    found.warnings[:0] = _shared(found)
    _refuse_urls(name, found)
    return found


def _name_columns(found: Input, store: CsvStore, name: str) -> None:
    """Take the columns that name files. Raises ValueError if there is none, and a column holds URLs."""
    fields, found.warnings, urls = file_columns(store, name)
    if urls:
        raise ValueError(f"{name}: the column {urls!r} has URLs, not files. {_NO_FILES}")
    store.name_files(fields)
    found.reader = with_settings(found.reader, file_fields=tuple(fields))


class _Row(NamedTuple):
    """A row: its number in the store, that which is its key, its line, its bytes, and where they begin."""

    row: int
    number: int
    line: int
    raw: bytes
    begin: int


def _rows(table: _Table, kind: str) -> Iterator[_Row]:
    """The rows that are not blank; of lines also those behind a fault, which are none of the store's."""
    store, lines = table.store, _LINES[kind]
    blob = store.blob(0).tolist()
    head = store.files.read(0, 0, blob[0])
    table.digest.update(head)
    number, line = 0, 1 + lines(head)
    for row, (begin, raw) in enumerate(zip(blob, store.rows_in_order(0), strict=True)):
        table.digest.update(raw)
        for part in [raw] if begin < blob[-1] else io.BytesIO(raw) if kind == "jsonl" else ():
            if without_mark(part, begin).strip():
                number += 1
                yield _Row(row, line if kind == "jsonl" else number, line if kind != "json" else number, part, begin)
            line += lines(part)


# How many lines there are in the bytes of rows.
_LINES: dict[str, Callable[[bytes], int]] = {
    "jsonl": lambda raw: raw.count(b"\n"),
    "csv": lambda raw: len(raw.splitlines()),
    "json": lambda raw: 0,
}


def _add_row(found: Input, table: _Table, row: _Row) -> None:
    """Add the sample of a row, or its reject."""
    store, key = table.store, ""
    try:
        fields, body = store.parsed(0, row.raw, row.begin)
        key = f"{row.number:09d}" if table.key_field is None else table.key(fields)
        files = store.files_of(0, fields)
    except RecordError as error:
        reject = Reject.of(f"{table.name}:{row.line}", key, str(error))
        (table.narrow if reject.reason == "not as wide as the header" else found.rejected).append(reject)
        return
    parts = [Part("json", table.address, len(body), 0), *(Part(each.part, each.path, each.size) for each in files)]
    if files or table.key_field is not None:
        parts.sort(key=lambda part: part.extension)
        fault, path = parts_fault(key, [(part.extension, part.path, part.size, "") for part in parts])
        if fault:
            reason, _, detail = fault.partition(": ")
            detail = detail if path == table.address else f"{printable(path)}: {detail}".removesuffix(": ")
            found.rejected.append(Reject(f"{table.name}:{row.line}", printable(key), reason, detail))
            return
        table.keys[key] = row.line
    if table.texts:
        table.texts.intersection_update(name for name in TEXT_FIELDS if isinstance(fields.get(name), str))
    found.samples.append(Files(key, tuple(parts), row.row, of_files=True))


def _shared(found: Input) -> list[str]:
    """A warning if files are named by several records, since each gets their bytes."""
    sizes: dict[str, int] = {}
    uses, total = 0, 0
    for sample in found.samples:
        for part in sample.parts:
            if part.offset is None:
                uses += 1
                total += part.size
                sizes[part.path] = part.size
    factor = total / max(1, sum(sizes.values()))
    if factor < _SHARED:
        return []
    return [
        f"{uses:,} uses of {len(sizes):,} files: those that several records name are stored with each, which takes "
        f"{factor:.1f} times their {human_bytes(sum(sizes.values()))}; put what belongs to one file into one record to "
        "store it once"
    ]


def _refuse_urls(name: str, found: Input) -> None:
    named = next((reject.detail for reject in found.rejected if reject.reason == A_URL), None)
    if found.samples or named is None:
        return
    raise ValueError(f"{name}: its records name URLs, not files, such as {named}. {_NO_FILES}")


def read_records(path: Path | str, key_field: str | None, unpacked_bytes: int) -> Input:
    """The samples of a folder with an index.json; the key of one is its number, or what the field of a record holds.

    Raises ValueError for a folder, or a file of it, that cannot be read at all.
    """
    from savable_pipeline.data.stores.record_folder_store import RecordFolderStore  # other sources do without

    try:
        dataset, found = stored_input(path, unpacked_bytes)
        store, seen, number = dataset.store, set[str](), 0
        assert isinstance(store, RecordFolderStore)
        order = store.listed_order()
        found.digest = hashlib.sha256(f"{found.digest} {order}".encode()).hexdigest()
        for shard, later in zip(order, [*order[1:], None], strict=True):
            for each in (shard, later) if number == 0 else (later,):
                if each is not None:
                    store.prefetch(np.arange(dataset.firsts[each], dataset.firsts[each + 1]))
            store.validate(shard)
            for row in range(store.entries[shard].samples):
                _add_record(found, store, shard, row, number, key_field, seen)
                number += 1
    except ShardError as error:
        raise ValueError(str(error)) from error
    return found


def _add_record(
    found: Input, store: Any, shard: int, row: int, number: int, key_field: str | None, seen: set[str]
) -> None:
    """Add the sample of a record, or its reject; `seen` are the keys before it."""
    name, key = store.entries[shard].name, f"{number:09d}"
    try:
        fields: list[Value | Blob] = store.record(shard, row)
        if key_field is not None:
            values = (each.value for each in fields if isinstance(each, Value) and each.name == key_field)
            key = _key(next(values, None), key_field)
            if key in seen:
                raise RecordError(f"duplicate key: {key!r} is the key of a record before it")
        parts = tuple(Part(extension, name, blob.size) for extension, blob in parts_of(fields).items())
        if not parts:
            raise RecordError("no field: the record is empty")
        if fault := parts_fault(key, [(part.extension, name, part.size, "") for part in parts])[0]:
            raise RecordError(fault)
    except RecordError as error:
        found.rejected.append(Reject.of(f"{name}, record {number}", key, str(error)))
        return
    found.samples.append(Files(key, parts, int(store.firsts[shard]) + row))
    seen.add(key)


def _key(value: Any, field: str) -> str:
    """What the field of a key holds, as a key. Raises `RecordError`."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RecordError(f"no key: the field {field!r} holds {value!r}")
    return str(value)
