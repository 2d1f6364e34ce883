"""The format of Kaldi's data folders, where a line is an utterance.

    wav.scp     REC wav/a.wav                     →  key UTT; a part wav; json: {"id": UTT, "audio": "wav/a.wav",
    segments    UTT REC 1.5 3.0, if there is one       "text": …, "speaker": …, "start": 1.5, "end": 3.0}
    text, utt2spk, utt2lang    UTT …

With `segments`, the part is a range of the recording. Each file is an entry of the index, and pinned like a shard. Only
`segments` has samples, or `wav.scp` if there is none. Commands in wav.scp are not run.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.data.shards.byte_source import ByteSource, RecordError
from savable_pipeline.data.shards.index import FileBlob, Format, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.stores.jsonl import line_offsets
from savable_pipeline.data.stores.ranges import MediaRange
from savable_pipeline.data.stores.table_store import NAMING_SETTINGS, NamedPart, TableStore, is_same_text, read_rows

RECORDINGS, SEGMENTS = "wav.scp", "segments"
_FIELDS = {"text": "text", "speaker": "utt2spk", "language": "utt2lang"}  # field: the table that has it
_TABLES = (RECORDINGS, SEGMENTS, *_FIELDS.values())
_IN_ARCHIVE = re.compile(r".*\.ark:\d+")


class KaldiStore(TableStore):
    """The utterances of Kaldi's folders, with the settings of `TableStore`."""

    def __init__(self, found: IndexedFiles, **settings: Any) -> None:
        # For each table that was read, by path: the rest of a line by its first word.
        self._tables: dict[str, dict[str, str]] = {}
        super().__init__(found, **settings)

    def usual_fields(self) -> Iterable[str]:
        """Return the field that names the recording: see `body`."""
        return ("audio",)

    def key(self, shard: int, row: int) -> str:
        """Return the first word of the line."""
        return _pair(self.raw(shard, row)[0].decode())[0]

    def body(self, shard: int, raw: bytes, begin: int) -> bytes:
        """See `TableStore.body`."""
        folder, base = posixpath.split(self.entries.names[shard])
        key, rest = _pair(raw.decode())
        fields: dict[str, Any] = {"id": key, "audio": rest}
        if base == SEGMENTS:
            try:
                recording, start, end = rest.split()
                times = {"start": float(start), "end": float(end)}
            except ValueError as error:
                raise RecordError(f"malformed line: expected UTTERANCE RECORDING START END, found {raw!r}") from error
            if (path := self._table(folder, RECORDINGS).get(recording)) is None:
                raise RecordError(f"no recording: {recording!r} is not in {RECORDINGS}")
            fields = {"id": key, "audio": path, **times}
        if fields["audio"].endswith("|") or _IN_ARCHIVE.fullmatch(fields["audio"]):
            raise RecordError(f"no audio file: {RECORDINGS} has {fields['audio']!r}. Write each recording to a file")
        found = {field: self._table(folder, table).get(key) for field, table in _FIELDS.items()}
        fields |= {field: value for field, value in found.items() if value is not None}
        return json.dumps(fields, ensure_ascii=False).encode()

    def files_of(self, shard: int, fields: dict[str, Any]) -> list[NamedPart]:
        """See `NamingStore.files_of`. The part of a segment is a range of the file."""
        found = super().files_of(shard, fields)
        if "start" not in fields:
            return found
        seconds = fields["start"], fields["end"]
        encoded = msgspec.json.encode(MediaRange(fields["audio"], *seconds))
        return [each._replace(size=len(encoded), range=encoded, seconds=seconds) for each in found]

    def _table(self, folder: str, name: str) -> dict[str, str]:
        """Return the lines of a table of a folder, by their first word."""
        path = posixpath.join(folder, name)
        if path not in self._tables:
            names, raw = self.entries.names, b""
            if path in names:
                raw = self.files.read(number := names.index(path), 0, int(self.entries.sizes[number]))
            # a single file is checked alone, and its tables are sidecars
            elif (companion := self.files.sidecar(path)) is not None:
                raw = companion.read_bytes()
            self._tables[path] = dict(map(_pair, raw.decode().split("\n")))
        return self._tables[path]


def _pair(line: str) -> tuple[str, str]:
    """Return the key and the value of a line, "" for each that is missing.

    Kaldi splits only at ASCII spaces, because a text may contain U+2028 or a space of another script.
    """
    key, value = [*re.split(r"[ \t\r\f\v]+", line.strip(" \t\r\f\v\n"), maxsplit=1), ""][:2]
    return key, value


def _files(names: Sequence[str]) -> list[str]:
    """Return the tables in folders that have a `wav.scp`."""
    folders = {posixpath.dirname(name) for name in names if posixpath.basename(name) == RECORDINGS}
    return sorted(name for name in names if posixpath.dirname(name) in folders and posixpath.basename(name) in _TABLES)


def _has_samples(file: ByteSource, name: str) -> bool:
    """Return whether the lines of a table are utterances."""
    folder, base = posixpath.split(name)
    return base == SEGMENTS or (base == RECORDINGS and file.sidecar(posixpath.join(folder, SEGMENTS), name) is None)


def _lines(file: ByteSource) -> tuple[str, FileBlob]:
    """Return the error of a table that is not UTF-8, and the offsets of its lines."""
    try:
        file.read().decode()
    except UnicodeDecodeError as error:
        return f"no UTF-8 text: {error}. Convert it by iconv", np.zeros(1, "<u8")
    return "", line_offsets(file)


def _read(file: ByteSource, name: str) -> ShardTable:
    table = read_rows(_lines, file, name)
    if not _has_samples(file, name):
        table.entry = msgspec.structs.replace(table.entry, samples=0)
    return table


def _is_same(file: ByteSource, index: ShardIndex, number: int) -> bool:
    had_samples = index.shards.samples[number] > 0
    return is_same_text(file, index, number) and _has_samples(file, index.shards.names[number]) >= had_samples


KALDI = Format(
    "kaldi",
    *(_TABLES, _read, KaldiStore, NAMING_SETTINGS),
    is_same=_is_same,
    choose=(RECORDINGS, _files),
    sidecar=(RECORDINGS, SEGMENTS),
    no_rows=bytes(8),
)
