"""Where the samples of a tar lie: our own minimal parser of tar headers, for reading at an offset.

    header 512 │ payload, padded to 512 │ header 512 │ payload … │ two zero blocks
    └─ first member of a sample                                 └─ the end

A member may be preceded by GNU long-name ('L') or PAX ('x', 'g') blocks; its header then starts at the first of
them. Only regular files count. Members that are no part of a sample (no dot in the name, hidden, metadata) are
passed over. Formats: v7, ustar, GNU, PAX.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from savable_pipeline.errors import ShardError

BLOCK = 512
_ZEROS = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL, _SPARSE = b"L", b"K", b"x", b"g", b"S"
_EXTENDED_LIMIT = 1 << 20  # a longer extended header is damage, not a name

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_METADATA = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar: its name, and in bytes where its headers and its payload start and how long it is."""

    name: str
    header: int
    payload: int
    size: int

    @property
    def end(self) -> int:
        """The offset just after the padded payload."""
        return self.payload + padded(self.size)


@dataclass(slots=True)
class Extent:
    """The members of one sample, in their order in the tar: name, extensions and where they lie."""

    key: str
    members: list[Member] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)


def padded(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member's name, cut at the first dot of its last part; None if it is no sample."""
    name = name.removeprefix("./")
    if _METADATA.match(name):
        return None
    match = _NAME.match(name)
    return (match[1], match[2]) if match else None


def samples(path: str, fd: int) -> Iterator[Extent]:
    """The samples of an open tar: runs of adjacent members with one key. Raises `ShardError`."""
    sample: Extent | None = None
    for member in members(path, fd):
        parts = split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = Extent(key)
        if extension in sample.extensions:
            raise ShardError(
                f"{path}: sample {key!r} has the extension {extension!r} twice, the second time in the header at "
                f"byte {member.header}; rename one of the two members and write the shard again"
            )
        sample.members.append(member)
        sample.extensions.append(extension)
    if sample is not None:
        yield sample


def members(path: str, fd: int, offset: int = 0) -> Iterator[Member]:
    """The regular files of an open tar from a header's offset on. Raises `ShardError` with the byte where it broke."""
    end_of_file = os.fstat(fd).st_size
    long_name: str | None = None
    extended: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    start = offset
    while True:
        header = os.pread(fd, BLOCK, offset)
        if header == _ZEROS or not header:
            if start != offset:
                raise ShardError(f"{path}: the tar ends at byte {offset}, within the headers of a member")
            return
        _check(path, offset, header)
        kind = header[156:157]
        fields = {**everywhere, **extended}
        size = int(fields["size"]) if "size" in fields else _number(path, offset, header[124:136])
        payload = offset + BLOCK
        if payload + size > end_of_file:
            raise ShardError(
                f"{path}: truncated: the member whose header is at byte {offset} needs {size} bytes from {payload} "
                f"on, the file ends at {end_of_file}; copy or write the shard again"
            )
        offset = payload + padded(size)
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            block = _extended(path, fd, payload, size)
            if kind == _LONG_NAME:
                long_name = _text(block)
            elif kind == _PAX:
                extended = _pax_records(path, payload, block)
            elif kind == _PAX_GLOBAL:
                everywhere.update(_pax_records(path, payload, block))
            continue
        if kind in _REGULAR:
            name = fields.get("path") or long_name or _header_name(header)
            if not name.endswith("/"):
                yield Member(name, start, payload, size)
        elif kind == _SPARSE:
            raise ShardError(f"{path}: the member at byte {start} is a sparse file; write the shard without --sparse")
        long_name, extended, start = None, {}, offset


def _check(path: str, offset: int, header: bytes) -> None:
    if len(header) < BLOCK:
        raise ShardError(f"{path}: truncated: a header at byte {offset} is cut short after {len(header)} bytes")
    expected = _number(path, offset, header[148:156])
    unsigned = sum(header) - sum(header[148:156]) + 8 * 32
    if expected != unsigned:
        found = "a gzip file" if header[:2] == b"\x1f\x8b" else f"checksum {unsigned}"
        raise ShardError(
            f"{path}: no tar header at byte {offset}: expected checksum {expected}, found {found}; "
            "the shard is damaged, compressed or no tar at all"
        )


def _number(path: str, offset: int, raw: bytes) -> int:
    """An octal field, or a base-256 one (first bit set), of a header."""
    if raw[0] & 0x80:
        return int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
    digits = raw.strip(b" \0") or b"0"
    try:
        return int(digits, 8)
    except ValueError:
        hint = "; it is compressed: `savable convert` re-packs it" if _compressed(path) else ""
        raise ShardError(f"{path}: no tar header at byte {offset}: {raw!r} is no octal number{hint}") from None


def _compressed(path: str) -> bool:
    return path.endswith((".gz", ".tgz", ".bz2", ".xz", ".zst"))


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _header_name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _extended(path: str, fd: int, payload: int, size: int) -> bytes:
    if size > _EXTENDED_LIMIT:
        raise ShardError(f"{path}: the extended header at byte {payload} claims {size} bytes; the shard is damaged")
    return os.pread(fd, size, payload)


def _pax_records(path: str, offset: int, block: bytes) -> dict[str, str]:
    """The records `length key=value\\n` of a PAX header."""
    records = {}
    position = 0
    while position < len(block) and block[position] != 0:
        length, _, _ = block[position : position + 20].partition(b" ")
        if not length.isdigit() or int(length) <= len(length) + 1:
            raise ShardError(f"{path}: a PAX record at byte {offset + position} has no length")
        record = block[position + len(length) + 1 : position + int(length) - 1]
        name, _, value = record.partition(b"=")
        records[_text(name)] = _text(value)
        position += int(length)
    if "size" in records and not records["size"].isdigit():
        raise ShardError(f"{path}: the PAX header at byte {offset} gives the size {records['size']!r}")
    return records
