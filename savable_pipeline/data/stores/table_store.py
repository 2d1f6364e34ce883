"""Tables of text with rows that are samples, and JSON lists.

    {"image": "img/cat.jpg", "text": "a cat"}      →      jpg, json       of a `TableStore`
    {"image": ["a.jpg", "b.jpg"]}                  →      0.jpg, 1.jpg, json

The files that fields name are relative to the folder of the table, or to another folder that the user names. Nothing
outside of it is read, even if a path or a link points there.

Blob of a file in the index: the offset of each row, then the end of the last. A format may repeat the end. A JSON list,
such as LLaVA's, is read whole to index it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
from xxhash import xxh3_64

from savable_pipeline.core.file_heads import HEAD, text_error
from savable_pipeline.core.files import regular_file, with_handles, with_retries
from savable_pipeline.core.wording import encodable, human_bytes
from savable_pipeline.data.shards.byte_source import ByteSource, RangeFile, RecordError
from savable_pipeline.data.shards.index import BlobIndex, FileBlob, Format, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.number_spool import NumberSpool
from savable_pipeline.data.shards.part_types import as_part, find_part
from savable_pipeline.data.shards.paths import is_hidden
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry
from savable_pipeline.data.stores.record_store import FileStore
from savable_pipeline.data.stores.sample_names import outside, parts_fault
from savable_pipeline.errors import ShardError

_COMPARED = 1 << 16  # bytes of a line to compare
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
LINE = "json"  # the part that is the whole row
# Returns the fault of a file or "", and the offsets of its rows and of their end: uint64 (rows + 1,).
Find: TypeAlias = Callable[[ByteSource], tuple[str, FileBlob]]
NAMING_SETTINGS = ("file_fields", "files_from", "allow_outside", "pinned")
TABLE_SETTINGS = ("key", *NAMING_SETTINGS)
FILE_FIELDS = ("image", "audio", "video", "file", "file_name")
A_URL = "a URL, not a file"  # the reason that counters and reports show for such rows
_COMMA = re.compile(rb"\}\s*(,)\s*\{")  # between two objects
_OBJECTS = re.compile(rb'\s*\{.*?"([^"\\]*)"\s*:\s*\[\s*\{', re.DOTALL)  # an object with a field of objects
_TAIL = 1 << 16  # last bytes of a piece, in which a comma is searched to cut it there
FIRST_ROWS = 16  # first rows of a table, which show the folder of the files that it names
_BLOCK = 4 << 20  # bytes of a list to read at a time


def read_rows(find: Find, file: ByteSource, name: str) -> ShardTable:
    """Return entry and rows of a file.

    Damage is noted in the entry, and the rows before it are samples.
    """
    fault, offsets = text_error(file.read_at(0, HEAD), file.name), np.zeros(1, "<u8")
    if not fault:
        file.expect([(0, file.size)])
        fault, offsets = find(file)
    if fault:
        fault = encodable(f"{name}{fault}" if fault.startswith(":") else f"{name}: {fault}")
    entry = ShardEntry(name, file.size, _row_count(offsets), _digest(file, offsets), fault)
    return ShardTable(entry, cast("bytes", offsets.view(np.uint8).data))


def is_same_text(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether the first, a middle and the last row are as indexed.

    Their offsets must be equal too.
    """
    assert isinstance(index, BlobIndex), index
    try:
        return _digest(file, index.blob(number)) == int(index.shards.digests[number])
    except OSError:
        return False


def _digest(file: ByteSource, offsets: FileBlob) -> int:
    """Return a hash of the offsets of rows and of the first, a middle and the last row."""
    digest = xxh3_64(offsets.data)
    lines = _row_count(offsets)
    digest.update(file.read_at(0, min(int(offsets[0]), _COMPARED)) if lines else b"")
    for line in sorted({0, lines // 2, lines - 1}) if lines else []:
        begin, end = int(offsets[line]), int(offsets[line + 1])
        digest.update(file.read_at(begin, min(end - begin, _COMPARED)))
        digest.update(file.read_at(begin - 1, 1) if begin else b"\n")
    return digest.intdigest()


def _row_count(offsets: FileBlob) -> int:
    """Return the number of rows. A format may repeat the last offset, to store a setting of the file."""
    return int(np.searchsorted(offsets, offsets[-1]))


def without_byte_order_mark(line: bytes, begin: int) -> bytes:
    """Return a line without the byte order mark at the start of some files."""
    return line if begin else line.removeprefix(BYTE_ORDER_MARK)


class TextStore(FileStore):
    """Rows of text files.

    `key` names the field that is the key of a row. By default it is `FILE:ROW`.
    """

    unit = "byte offset"

    def __init__(self, found: IndexedFiles, *, key: str | None = None) -> None:
        super().__init__(found)
        self.key_column = key
        self._starts: dict[int, memoryview] = {}  # offsets of rows, by shard

    def offset(self, shard: int, row: int) -> int:
        """Return the offset of the row in its file, in bytes."""
        return int(self.blob(shard)[row])

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """Return the byte ranges of the rows."""
        offsets = self.blob(shard).view(np.int64)
        return offsets[rows], offsets[rows + 1]

    def raw(self, shard: int, row: int, max_bytes: int = 1 << 62) -> tuple[bytes, int]:
        """Return the bytes from a row to the next one, and their offset in the file.

        Raises `ShardError`, also for more than `max_bytes` bytes.
        """
        if (starts := self._starts.get(shard)) is None:
            self.files[shard]  # checks the file and its index rows
            starts = self._starts[shard] = self.blob(shard).data
        begin, end = starts[row], starts[row + 1]
        if end - begin > max_bytes:
            raise self.damaged(shard, f"byte {begin}", f"a line of {human_bytes(end - begin)}")
        return self.files.read(shard, begin, end - begin), begin


def text_format(
    name: str, suffixes: tuple[str, ...], find: Find, store: Callable[..., Any], packed: Iterable[str] = (), **more: Any
) -> Format:
    """Return the format of text files in which `find` finds the rows.

    `packed` are suffixes of compressed files.
    """
    packings = tuple(f"{end}.{kind}" for end in packed for kind in ("gz", "zst", "xz", "bz2"))
    settings = {"settings": TABLE_SETTINGS, "packed": packings, "no_rows": bytes(8), **more}
    return Format(name, suffixes, partial(read_rows, find), store, is_same=is_same_text, **settings)


class NamedPart(NamedTuple):
    """File that a row names: its part, its path in the row, and its size in bytes.

    If the part is a range of the file, `range` is its description as JSON, and `seconds` its start and end.
    """

    part: str
    path: str
    size: int
    range: bytes = b""
    seconds: tuple[float, float | None] = (0.0, None)


class TableRow(NamedTuple):
    """Row: its fields, its JSON, and the files that it names, by part."""

    fields: dict[str, Any]
    body: bytes
    files: dict[str, NamedPart]


class NamingStore(FileStore):
    """Rows that name files, with the row as JSON and the files as parts.

    `file_fields` name files, as "field" or "field=part". None means the usual fields. Paths are relative to
    `files_from`, or to the folder of the table. The files must be as old as the index, or as `pinned` (in ns since
    1970), unless that is False. A subclass defines `row_of`, and its next base is the store of the rows.
    """

    def __init__(
        self,
        found: IndexedFiles,
        *,
        file_fields: Iterable[str] | None = None,
        files_from: str | os.PathLike[str] | None = None,
        allow_outside: bool = False,
        pinned: bool | int = True,
        **settings: Any,
    ) -> None:
        super().__init__(found, **settings)
        self._allow_outside = allow_outside
        self._files_from = None if files_from is None else os.path.realpath(files_from) if files_from else ""
        index_ns = found.index_path.stat().st_mtime_ns if pinned is True and found.remote is None else None
        self._newest_ns = index_ns if isinstance(pinned, bool) else pinned
        self._roots: dict[int, str] = {}  # by shard: see `root_of`
        self._last_row: tuple[int, int, TableRow] | None = None  # shard and row of the last request, and the row
        self.name_files(self.usual_fields() if file_fields is None else file_fields)

    def name_files(self, fields: Iterable[str]) -> None:
        """Set the fields that name files, as "field" or "field=part"."""
        self.fields = tuple(fields)
        self._named_fields = [(field, part) for field, _, part in (each.partition("=") for each in self.fields)]
        self._last_row = None
        self._roots.clear()

    def usual_fields(self) -> Iterable[str]:
        """Return the fields that name files by default."""
        return FILE_FIELDS

    @abstractmethod
    def row_of(self, shard: int, row: int) -> tuple[dict[str, Any], bytes]:
        """Return the fields of a row, and its JSON. Raises `RecordError`, `ShardError`."""

    def value(self, shard: int, row: int, name: str) -> bytes | None:
        """See `FileStore.value`."""
        return as_part(self._row(shard, row).fields[name])

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return `json` and the files' parts, sorted."""
        return sorted([LINE, *self._row(shard, row).files])

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """See `RecordStore.sizes`."""
        found = self._row(shard, row)
        sizes = {LINE: len(found.body), **{part: each.size for part, each in found.files.items()}}
        return dict(sorted(sizes.items()))

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """Return the JSON, or the bytes of a file."""
        return self.head(shard, row, extension, -1)[0]

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`. For a range, the result is the whole file."""
        part = self._part(shard, row, extension)
        if isinstance(part, bytes):
            return io.BytesIO(part)
        file = self._open_named(shard, part)
        if not part.range:
            return file
        source = ByteSource(lambda offset, size: os.pread(file.fileno(), size, offset), os.fstat(file.fileno()).st_size)
        return RangeFile(source, *part.seconds)

    def _part(self, shard: int, row: int, extension: str) -> NamedPart | bytes:
        """Return the file that is a part of a row, or the JSON of the row."""
        found = self._row(shard, row)
        name = find_part(extension, [LINE, *found.files])
        return found.body if name == LINE else found.files[name]

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        """See `RecordStore.head`. The bytes of a range are its description as JSON.

        With the `limit` -1, all bytes are returned, and 0 for the size.
        """
        part = self._part(shard, row, extension)
        if isinstance(part, NamedPart) and part.range:
            part = part.range

        def read() -> tuple[bytes, int]:
            with io.BytesIO(part) if isinstance(part, bytes) else self._open_named(shard, part) as file:
                return file.read(limit), file.seek(0, os.SEEK_END) if limit >= 0 else 0

        return with_retries(Path(self.root_of(shard)), read)

    def files_of(self, shard: int, fields: dict[str, Any]) -> list[NamedPart]:
        """Return the files that a row with these fields names, in order.

        Raises `RecordError`, `ShardError`.
        """
        return [self._named_part(shard, *each) for each in self._file_names(fields)]

    def root_of(self, shard: int) -> str:
        """Return the real path of the folder for the files of a table, or "".

        It is the folder of the table, or the one folder below it that has the first file that a row names.
        """
        if shard not in self._roots:
            folder = "" if self.found.remote else os.path.realpath(self.found.root / self.entries.names[shard] / "..")
            path = self._first_path(shard) if folder and self._files_from is None else None
            if path is not None and not os.path.lexists(os.path.join(folder, path)):  # noqa: PTH118
                below = [each for each in folders_in(folder) if is_file(each, path)]
                below = [each for each in below if self._allow_outside or not outside(folder, f"{each}/{path}")]
                folder = below[0] if len(below) == 1 else folder
            self._roots[shard] = folder if self._files_from is None else self._files_from
        return self._roots[shard]

    def _first_path(self, shard: int) -> str | None:
        """Return the first path of a file in the first rows of a table, or None."""
        for row in range(min(int(self.entries.samples[shard]), FIRST_ROWS)):
            with contextlib.suppress(RecordError, ShardError):
                for _, path, _ in self._file_names(self.row_of(shard, row)[0]):
                    if not is_url(path):
                        return path
        return None

    def _row(self, shard: int, row: int) -> TableRow:
        if (last := self._last_row) is not None and last[:2] == (shard, row):
            return last[2]  # the `TableRow`
        try:
            fields, body = self.row_of(shard, row)
            files = self.files_of(shard, fields)
            parts = [(LINE, self.where(shard), 1, ""), *((each.part, each.path, each.size, "") for each in files)]
            if fault := parts_fault("key", parts)[0]:
                raise RecordError(fault)
        except RecordError as error:
            raise self.row_error(shard, row, error) from error
        found = TableRow(fields, body, {each.part: each for each in files})
        self._last_row = shard, row, found
        return found

    def row_error(self, shard: int, row: int, error: RecordError) -> ShardError:
        """Return the error for an invalid row."""
        where = f", at byte {self.offset(shard, row)}" if self.unit == "byte offset" else ""
        return ShardError(
            f"{self.where(shard)}: row {row}{where}: {error}. Fix the row or the files that it names, or pass "
            'on_error="skip"',
            reason=str(error).partition(": ")[0],
        )

    def _file_names(self, fields: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Yield (field, path, prefix of its part) for each file that a row names.

        Raises `RecordError`.
        """
        for name, prefix in self._named_fields:
            paths = fields.get(name)
            if isinstance(paths, str):
                yield name, paths, prefix
            elif isinstance(paths, list) and all(isinstance(path, str) for path in paths):
                for i, path in enumerate(paths):
                    yield name, path, f"{prefix}.{i}" if prefix else str(i)
            elif paths is not None:
                raise RecordError(f"not a file's name: the field {name!r} holds {paths!r}"[:200])

    def _named_part(self, shard: int, field: str, name: str, prefix: str) -> NamedPart:
        """Return the file that a field of a row names.

        Raises `RecordError`, and `ShardError` if the whole table cannot name files.
        """
        where, root = f"the field {field!r} names {name[:200]!r}", self.root_of(shard)
        if is_url(name):
            raise RecordError(f"{A_URL}: {where}")
        if not root:
            raise ShardError(
                f"{self.entries.names[shard]}: {where}, but files of remote tables are not read. Copy them and pass "
                "files_from= (--files-from), or file_fields=() (--no-files) to keep the fields as text"
            )
        path = PurePosixPath(name)
        if len(path.suffix) < 2:
            raise RecordError(f"no extension: {where}")
        try:
            is_outside = ".." in path.parts or outside(root, os.path.join(root, name))  # noqa: PTH118  # both as texts
            if is_outside and not self._allow_outside:
                raise RecordError(f"outside the source: {where}. Pass --allow-outside to include it")
            status = with_retries(Path(root, name), Path(root, name).stat)
        except RecordError:
            raise
        except (ValueError, OSError) as error:  # the file is missing, or the name is too long or has a NUL
            raise RecordError(f"missing file: {where}, not in the folder of files_from= or the table") from error
        if not stat.S_ISREG(status.st_mode):
            raise RecordError(f"not a regular file: {where}")
        suffix = path.suffix.removeprefix(".")
        return NamedPart(f"{prefix}.{suffix}" if prefix else suffix, name, status.st_size)

    def _open_named(self, shard: int, file: NamedPart) -> BinaryIO:
        path = Path(self.root_of(shard), file.path)
        try:
            descriptor = with_handles(lambda: with_retries(path, lambda: regular_file(path, os.O_RDONLY)))
        except OSError as error:
            raise ShardError(
                f"{path}: {error.strerror}, but {self.where(shard)} names it", reason="missing file"
            ) from error
        found = os.fdopen(descriptor, "rb")
        status = os.fstat(found.fileno())  # a file's own time may be in the future, but not that of its inode
        if self._newest_ns is not None and min(status.st_mtime_ns, status.st_ctime_ns) > self._newest_ns:
            found.close()
            if not self.found.tolerant:
                self.found.index_path.unlink(missing_ok=True)
            raise ShardError(
                f"{path}: written since {self.where(shard)}, which names it, was indexed. Restore it, or start again",
                reason="changed shard",
            )
        return found


class TableStore(NamingStore, TextStore):
    """Rows of tables.

    The tables are named by a folder with its subfolders, a glob, a brace pattern, one file, or a list of these. `key`
    names the field that is the key of a row. By default it is `FILE:ROW`. The other settings are those of
    `NamingStore`. Raises `ShardError`.
    """

    @abstractmethod
    def body(self, shard: int, raw: bytes, begin: int) -> bytes:
        """Return the JSON of a row whose bytes are `raw`.

        They start at byte `begin` of the shard. Raises `RecordError`.
        """

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """Return the JSON, or the bytes of a file."""
        if extension != LINE:
            return super().read(shard, row, extension)
        try:  # in most cases, the files of the row are not needed
            return self.body(shard, *self.raw(shard, row)).strip()
        except RecordError as error:
            raise self.row_error(shard, row, error) from error

    def parsed(self, shard: int, raw: bytes, begin: int) -> tuple[dict[str, Any], bytes]:
        """Return the fields and the JSON of a row whose bytes are `raw`.

        They start at byte `begin` of the shard. Raises `RecordError`, `ShardError`.
        """
        body = self.body(shard, raw, begin)
        try:
            fields = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise RecordError(f"malformed JSON: {json_fault(error)}") from error
        if not isinstance(fields, dict):
            raise RecordError(f"not a JSON object: the line holds {type(fields).__name__}")
        return fields, body.strip()

    def row_of(self, shard: int, row: int) -> tuple[dict[str, Any], bytes]:
        """See `NamingStore.row_of`."""
        return self.parsed(shard, *self.raw(shard, row))


def json_fault(error: Exception) -> str:
    """Return why a line is not one JSON value, by the error of its decoding."""
    return f"more than one JSON value in a line: {error}" if getattr(error, "msg", "") == "Extra data" else str(error)


def is_file(folder: str, path: str) -> bool:
    """Return whether a path in a folder is that of a file, with a suffix."""
    with contextlib.suppress(ValueError, OSError):
        return len(PurePosixPath(path).suffix) > 1 and Path(folder, path).is_file()
    return False


def folders_in(folder: str) -> list[str]:
    """Return the real paths of the visible folders in `folder`, sorted."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(os.path.realpath(each.path) for each in entries if each.is_dir() and not is_hidden(each.name))
    return []


def is_url(text: str) -> bool:
    """Return whether a field is a web address."""
    return text.startswith(("http://", "https://", "s3://", "gs://", "ftp://"))


def _elements(file: ByteSource) -> tuple[str, FileBlob]:
    """Return the fault of a JSON list, or "", and the offsets of its elements and of their end.

    The file is read in pieces. A piece that is cut at a comma is a list only if this comma is between two elements:

        [{"a": [{}, {}]}, {"a": [{}│, {}]}, …      no JSON with a bracket after it
        [{"a": [{}, {}]}│, {"a": [{}, {}]}, …      one element
    """
    begins, size = NumberSpool(), _BLOCK
    end = 3 if file.head(3) == BYTE_ORDER_MARK else 0  # the end of the last element so far
    before = b""  # "[0" once an element was found, so that the text with the next piece is a list too
    ending, is_last = b"", False  # the last two bytes of the last element, and whether the piece is the last one
    while not is_last:
        piece = file.read_at(end, size)
        is_last = end + len(piece) == file.size
        cuts = [match.start(1) for match in _COMMA.finditer(piece, max(0, len(piece) - _TAIL))][::-1]
        cuts.sort(key=lambda cut: piece[cut - 2 : cut] != ending)  # first those after the ending of the last element
        lists = filter(None, (_elements_after(before + piece[:cut] + b"]", before) for cut in cuts))
        if (elements := _elements_after(before + piece, before) if is_last else next(lists, None)) is None:
            if is_last:
                return _list_fault(file.read()), np.zeros(1, "<u8")
            size *= 2  # an element that is longer, or no list of objects
            continue
        position, before, size = 0, b"[0", _BLOCK
        for element in map(bytes, elements):
            position = piece.index(element, position)  # only commas and blanks are between two elements
            begins.append(end + position)
            position += len(element)
        end, ending = end + position, piece[position - 2 : position]
    begins.append(end)
    return "", begins.numbers()


def _elements_after(text: bytes, before: bytes) -> list[msgspec.Raw] | None:
    """Return the elements of a JSON list without those in its start `before`, or None if the text is no list."""
    try:
        return msgspec.json.decode(text, type=list[msgspec.Raw])[len(before) > 0 :]
    except (msgspec.DecodeError, RecursionError):
        return None


def _list_fault(data: bytes) -> str:
    try:
        msgspec.json.decode(data.removeprefix(BYTE_ORDER_MARK), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        advice = "Write null for NaN, or one object a line (JSONL)" if re.search(rb"\b(NaN|Infinity)\b", data) else ""
        if field := _OBJECTS.match(data.removeprefix(BYTE_ORDER_MARK)[:_BLOCK]):
            advice = f"Write the list in its field {field[1].decode(errors='replace')!r} alone"
        return f"not a whole list of objects: {error}{advice and f'. {advice}'}"
    return "the file changed while it was read. Start again"


class JsonArrayStore(TableStore):
    """Elements of lists in JSON files."""

    def body(self, shard: int, raw: bytes, begin: int) -> bytes:
        """See `TableStore.body`."""
        return raw.rstrip().removesuffix(b",").rstrip()


JSON = text_format("json", (".json",), _elements, JsonArrayStore)
