"""Minimal parser of tar headers that finds the samples, for reads at an offset.

    header 512 │ payload, padded to 512 │ header 512 │ payload … │ two zero blocks
    └─ first member of a sample                                 └─ the end

A member may be preceded by GNU long-name ('L') or PAX ('x', 'g') blocks; its header then starts at the first of them.
Only regular files count. Links, directories and devices have no payload, even if their headers have a size (for
warnings about links see tar_format.py). Members that are not part of a sample (no dot in the name, hidden, metadata)
are skipped. Formats: v7, ustar, GNU, PAX.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import adler32

from savable_pipeline.core.file_heads import compression_of
from savable_pipeline.errors import ShardError

BLOCK = 512
_ZEROS = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_HARD, _SYMBOLIC = b"1", b"2"
_NO_PAYLOAD = (_HARD, _SYMBOLIC, b"3", b"4", b"5", b"6")  # hard link, symbolic link, devices, directory, pipe
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL, _SPARSE = b"L", b"K", b"x", b"g", b"S"
_EXTENDING = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)
_LOCATING = (b"path", b"linkpath", b"size")  # names of PAX records that are used
_SHORTEST_END = 2 * BLOCK
_LONGEST_END = 1 << 16  # most zero bytes at the end; GNU tar pads to 10 kB, or to the record size that the user sets
_EXTENDED_LIMIT = 1 << 20  # bytes; a longer extended header is damaged

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_METADATA = re.compile(r"__[^/]*__($|/)|(.*/)?\._", re.DOTALL)  # `._a` is metadata of macOS


class Member(NamedTuple):
    """Member of a tar."""

    name: str
    header: int  # offset of its first header
    payload: int  # offset of its content
    size: int  # bytes of its content
    is_regular: bool  # whether it is a file, and no folder or link
    link_target: str = ""  # "" if it is no link

    @property
    def end(self) -> int:
        """Return the offset just after the padded payload."""
        return self.payload + padded(self.size)


@dataclass(slots=True)
class SampleInTar:
    """The members of one sample, in their order in the tar, with their extensions."""

    key: str
    members: list[Member] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)


def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks, in bytes."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def is_metadata(name: str) -> bool:
    """Return whether a member's name is that of metadata."""
    return bool(_METADATA.match(name))


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's path into key and extension, at the first dot of its name.

    The result is None if the member is not part of a sample.
    """
    if is_metadata(name):
        return None
    match = _NAME.match(name)
    return (match[1], match[2]) if match else None


def tar_compression(head: bytes) -> str | None:
    """Return how a tar is compressed, by its first block.

    The result is ".gz", ".bz2", ".xz" or ".zst", "" for a plain tar, and None for other data. The header is checked
    first, because a plain tar starts with a name, which may start like compressed data.
    """
    with contextlib.suppress(ShardError):
        _check_header("", 0, head[:BLOCK])
        return ""
    return compression_of(head) or None


def samples(path: str, fd: int, links: list[Member] | None = None) -> Iterator[SampleInTar]:
    """Yield the samples of an open tar: runs of adjacent members with one key.

    Links that would be parts of a sample if they were files are added to `links`. Raises `ShardError`.
    """
    sample: SampleInTar | None = None
    for member, key, extension in sample_members(members(path, fd), links):
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = SampleInTar(key)
        if extension in sample.extensions:
            raise ShardError(
                f"{path}: sample {key!r} has the extension {extension!r} twice, again at byte {member.header}. Rename "
                "one of the two and write the shard again"
            )
        sample.members.append(member)
        sample.extensions.append(extension)
    if sample is not None:
        yield sample


def sample_members(found: Iterable[Member], links: list[Member] | None = None) -> Iterator[tuple[Member, str, str]]:
    """Yield (member, key, extension) of the members that are part of a sample.

    See `samples` for `links`.
    """
    for member in found:
        key_and_extension = split_name(member.name) if member.is_regular else None
        if key_and_extension is not None:
            yield member, *key_and_extension
        elif links is not None and member.link_target and split_name(member.name) is not None:
            links.append(member)


def members(path: str, fd: int, offset: int = 0) -> Iterator[Member]:
    """Yield the members of an open tar from the header at `offset`.

    Raises `ShardError` that names the damaged byte.
    """
    end_of_file = os.fstat(fd).st_size
    long_name: str | None = None
    long_link: str | None = None
    member_fields: dict[str, str] = {}
    global_fields: dict[str, str] = {}
    start = offset
    while True:
        header = os.pread(fd, BLOCK, offset)
        if header == _ZEROS or not header:
            if start != offset:
                raise ShardError(f"{path}: the tar ends at byte {offset}, within the headers of a member")
            _check_end(path, fd, offset, end_of_file)
            return
        _check_header(path, offset, header)
        kind = header[156:157]
        fields = {} if kind in _EXTENDING else {**global_fields, **member_fields}
        name = fields.get("path") or long_name or _header_name(header)
        is_regular = kind in _REGULAR and not name.endswith("/")
        size = int(fields["size"]) if "size" in fields else _parse_number(path, offset, header, slice(124, 136))
        # In v7, a name that ends with a slash is a folder.
        if kind in _NO_PAYLOAD or (kind == b"\0" and not is_regular):
            size = 0
        payload = offset + BLOCK
        if payload + size > end_of_file:
            raise ShardError(
                f"{path}: truncated: the member at byte {offset} ends at byte {payload + size}, the file at "
                f"{end_of_file}. Copy or write the shard again"
            )
        offset = payload + padded(size)
        if kind in _EXTENDING:
            block = _read_extended(path, fd, payload, size)
            if kind == _LONG_NAME:
                long_name = _decoded(block)
            elif kind == _LONG_LINK:
                long_link = _decoded(block)
            elif kind == _PAX:
                member_fields = _pax_records(path, payload, block)
            elif kind == _PAX_GLOBAL:
                global_fields.update(_pax_records(path, payload, block))
            continue
        if kind == _SPARSE or "GNU.sparse" in fields:
            raise ShardError(f"{path}: the member at byte {start} is a sparse file. Write the shard without --sparse")
        target = ""
        if kind in (_HARD, _SYMBOLIC):
            target = fields.get("linkpath") or long_link or _decoded(header[157:257])
            target = posixpath.join(posixpath.dirname(name), target) if kind == _SYMBOLIC else target
        yield Member(name, start, payload, size, is_regular, target)
        long_name, long_link, member_fields, start = None, None, {}, offset


def _check_end(path: str, fd: int, offset: int, end_of_file: int) -> None:
    """Raise `ShardError` unless only zeros follow: two blocks, padded to a whole record of at most 64 KiB.

    More zeros may be a shard whose content was lost from some offset on.
    """
    if end_of_file - offset < _SHORTEST_END:
        raise ShardError(
            f"{path}: truncated: it ends at byte {end_of_file} without a tar's final zeros. Copy or write it again"
        )
    rest = end_of_file - offset
    if rest > _LONGEST_END or os.pread(fd, rest, offset).strip(b"\0"):
        raise ShardError(
            f"{path}: zeros at byte {offset}, but {rest} bytes follow: zero-filled, or two tars in one. Copy it again"
        )


def _check_header(path: str, offset: int, header: bytes) -> None:
    if len(header) < BLOCK:
        raise _header_error(path, offset, header, f"truncated: it is cut short after {len(header)} bytes")
    expected = _parse_number(path, offset, header, slice(148, 156))
    unsigned = _sum(header[:148]) + 8 * 32 + _sum(header[156:356]) + _sum(header[356:])
    if expected != unsigned:
        raise _header_error(path, offset, header, f"expected checksum {expected}, found {unsigned}")


def _sum(raw: bytes) -> int:
    """Return the sum of at most 256 bytes. The lower half of Adler-32 is the sum plus 1, ten times as fast as `sum`."""
    return (adler32(raw) & 0xFFFF) - 1


def _header_error(path: str, offset: int, header: bytes, found: str) -> ShardError:
    if offset == 0 and compression_of(header):
        return ShardError(f"{path}: a compressed tar cannot be read at an offset. Re-pack it by `savable convert`")
    return ShardError(f"{path}: no tar header at byte {offset}: {found}. The shard is damaged or not a tar")


def _parse_number(path: str, offset: int, header: bytes, where: slice) -> int:
    """Return the number in a field of a header: octal digits, or base 256 if its first bit is set."""
    raw = header[where]
    if raw[0] & 0x80:
        return int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
    digits = raw.lstrip(b" ").split(b"\0", 1)[0].rstrip(b" ") or b"0"
    if digits.strip(b"01234567"):  # int() would accept a sign or an underscore too
        raise _header_error(path, offset, header, f"{raw!r} is not an octal number")
    return int(digits, 8)


def _decoded(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _header_name(header: bytes) -> str:
    name = _decoded(header[:100])
    prefix = _decoded(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _read_extended(path: str, fd: int, payload: int, size: int) -> bytes:
    if size > _EXTENDED_LIMIT:
        raise ShardError(f"{path}: the extended header at byte {payload} claims {size} bytes. The shard is damaged")
    return os.pread(fd, size, payload)


def _pax_records(path: str, offset: int, block: bytes) -> dict[str, str]:
    """Return the records of a PAX header that name a member or give its size, by key.

    A record is its length, a blank, `key=value` and a newline. Other records are dropped, because a tar may have
    millions of them.
    """
    records = {}
    position = 0
    while position < len(block) and block[position] != 0:
        length, _, _ = block[position : position + 20].partition(b" ")
        if not length.isdigit() or not len(length) + 1 < int(length) <= len(block) - position:
            raise ShardError(f"{path}: the PAX record at byte {offset + position} has a wrong length")
        record = block[position + len(length) + 1 : position + int(length) - 1]
        key, _, value = record.partition(b"=")
        if key in _LOCATING or key.startswith(b"GNU.sparse."):
            records["GNU.sparse" if key not in _LOCATING else _decoded(key)] = _decoded(value)
        position += int(length)
    if "size" in records and not re.fullmatch("[0-9]{1,19}", records["size"]):
        raise ShardError(f"{path}: the PAX header at byte {offset} gives the size {records['size']!r}")
    return records
