"""The format of Lhotse Shar: a sample is a cut with its fields.

    cuts.000000.jsonl.gz     {"id": "a", …}                   →   key a; json: the cut
    recording.000000.tar     a.flac, a.json                       flac, recording.json
    features.000000.tar      a.llc, a.json                        features.llc, features.json
    target.000000.jsonl.gz   {"cut_id": "a", "target": …}         target.json

A tar has two members per cut, in the order of the cuts: data and manifest, or `.nodata` and `.nometa` for a cut
without this field. All files are entries of the index, but only those of cuts have samples. Blob of a tar in the
index: the length of its members as MessagePack, then these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.index import BlobIndex, Format, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.tar import members
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES, DamagedError, decompressed
from savable_pipeline.data.stores.grouped_store import DecodedBlocks
from savable_pipeline.data.stores.record_store import FileStore, hash_some
from savable_pipeline.errors import ShardError

_NAME = re.compile(r"((?:.*/)?)([^/.]+)\.(\d+)\.(?:tar|jsonl|jsonl\.gz)")  # folder, field and number
_SAMPLED = 1 << 12, 8  # bytes of each compared piece of a tar, and number of pieces after the first
_CUTS, _AUDIO, _NOTHING = "cuts", "recording", ("nodata", "nometa")
_Content: TypeAlias = bytes | tuple[int, int, int]  # a line; or shard, offset and size of a tar member


class _Line(msgspec.Struct):
    id: str = ""
    cut_id: str = ""


class SharStore(FileStore):
    """Cuts of Lhotse Shar, with their audio and other fields.

    Lines are decompressed a file at a time.
    """

    def __init__(self, found: IndexedFiles, *, unpacked_bytes: int = UNPACKED_BYTES) -> None:
        super().__init__(found)
        self.unpacked_bytes = unpacked_bytes
        self._blocks: DecodedBlocks[Any] = DecodedBlocks()
        self._fields: dict[tuple[str, ...], dict[str, int]] = {}  # by folder and number: for each field, its shard
        for shard, name in enumerate(self.entries.names):
            folder, field, number = _split_name(name)
            self._fields.setdefault((folder, number), {})[field] = shard

    def key(self, shard: int, row: int) -> str:
        """Return the id of the cut."""
        ((name, _),) = self._rows(shard)[row]  # a file of cuts has one line for each
        return name.removesuffix(".json")

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return `json`, then the parts of each field."""
        return list(self._parts(shard, row))

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """See `RecordStore.sizes`."""
        parts = self._parts(shard, row)
        return {name: len(part) if isinstance(part, bytes) else part[2] for name, part in parts.items()}

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """See `RecordStore.read`."""
        parts = self._parts(shard, row)
        part = parts[find_part(extension, parts)]
        return part if isinstance(part, bytes) else self.files.read(*part)

    def _parts(self, shard: int, row: int) -> dict[str, _Content]:
        """Return the content of each part of a cut, by the part's name.

        Raises `ShardError` for data of another cut.
        """
        key, found = self.key(shard, row), dict[str, _Content]()
        folder, _, number = _split_name(self.entries.names[shard])
        for field, other in sorted(self._fields[folder, number].items()):
            for name, content in next(iter(self._rows(other)[row : row + 1]), [("", b"")]):
                if not name.startswith(f"{key}."):
                    raise self.damaged(other, f"cut {row}", f"not of the cut {key!r}")
                extension = name[len(key) + 1 :]
                is_plain = field == _CUTS or (field == _AUDIO and extension != "json")
                found |= {} if extension in _NOTHING else {extension if is_plain else f"{field}.{extension}": content}
        return found

    def _rows(self, shard: int) -> list[list[tuple[str, _Content]]]:
        """Return for each cut of a file its contents with their names: one line, or two members.

        Raises `ShardError`.
        """

        def read() -> tuple[list[list[tuple[str, _Content]]], int]:
            name, blob = self.entries.names[shard], self.blob(shard)
            if name.endswith(".tar"):
                found = msgspec.msgpack.decode(blob[1:].data.cast("B")[: int(blob[0])], type=list[tuple[str, int, int]])
                pairs: list[tuple[str, _Content]] = [(name, (shard, begin, size)) for name, begin, size in found]
                return [pairs[i : i + 2] for i in range(0, len(pairs), 2)], 4 * blob.nbytes
            raw = self.files.read(shard, 0, int(self.entries.sizes[shard]))
            try:
                lines = _lines_in(raw, name, self.unpacked_bytes)
            except (DamagedError, msgspec.DecodeError) as error:
                raise self.damaged(shard, "its lines", str(error)) from error
            return [[line] for line in lines], 2 * sum(len(line) for _, line in lines)

        found: list[list[tuple[str, _Content]]] = self._blocks.get(shard, read)
        return found


def _split_name(name: str) -> tuple[str, str, str]:
    """Return the folder, the field and the number in a file's name, or three empty strings."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def _lines_in(raw: bytes, name: str, max_bytes: int) -> list[tuple[str, bytes]]:
    """Return (id + ".json", line) for each line.

    Raises `DamagedError`, msgspec's errors.
    """
    text = decompressed(raw, "gz", max_bytes) if name.endswith(".gz") else raw
    lines = [line for line in text.split(b"\n") if line.strip()]
    ids = map(partial(msgspec.json.decode, type=_Line), lines)
    return [(f"{each.cut_id or each.id}.json", line) for each, line in zip(ids, lines, strict=True)]


def _files(names: Sequence[str]) -> list[str]:
    """Return the files of cuts and of their fields, if some cuts have a tar."""
    numbers: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        folder, field, number = _split_name(name) if name.endswith((".tar", ".jsonl", ".gz")) else ("", "", "")
        numbers.setdefault((folder, number), {})[field] = name
    found = sorted(name for fields in numbers.values() if _CUTS in fields for name in fields.values())
    return found if any(name.endswith(".tar") for name in found) else []


def _read(file: ByteSource, name: str) -> ShardTable:
    try:
        if not name.endswith(".tar"):
            raw = file.read()
            lines = _lines_in(raw, name, UNPACKED_BYTES)
            samples = len(lines) if _split_name(name)[1] == _CUTS else 0
            return ShardTable(ShardEntry(name, file.size, samples, xxh3_64_intdigest(raw)), b"")
        found = [(each.name, each.payload, each.size) for each in members(name, file.fileno())]
        if len(found) % 2:
            raise ShardError(f"{name}: {len(found)} members, expected two for each cut")
    except (DamagedError, msgspec.DecodeError, ShardError) as error:
        fault = encodable(f"{name}: {str(error).removeprefix(f'{name}: ')}")
        return ShardTable(ShardEntry(name, file.size, 0, 0, fault), b"")
    encoded = msgspec.msgpack.encode(found)
    blob = len(encoded).to_bytes(8, "little") + encoded + bytes(-len(encoded) % 8)
    return ShardTable(ShardEntry(name, file.size, 0, hash_some(xxh3_64(blob), file, *_SAMPLED)), blob)


def _is_same(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether a file has the content that was indexed.

    A file of lines is compared as a whole, and a tar by some of its bytes.
    """
    assert isinstance(index, BlobIndex), index
    if not index.shards.names[number].endswith(".tar"):
        return xxh3_64_intdigest(file.read()) == int(index.shards.digests[number])
    # The blob has the names, offsets and sizes of the tar's members. Its hash is the start of the digest, see `_read`.
    return hash_some(xxh3_64(index.blob(number).tobytes()), file, *_SAMPLED) == int(index.shards.digests[number])


SHAR = Format(
    *("shar", (".tar", ".jsonl", ".gz"), _read, SharStore, ("unpacked_bytes",)),
    is_same=_is_same,
    choose=(f"{_CUTS}.", _files),
    whole=True,
)
