"""Pins: small files that name the server's version (ETag) of what is in the cache, and by a checksum are whole or none.

VERSION/N.pin             the version of the rows of shard number N
scan/…, beside/…, …       NAME.pin beside NAME, a file that is here whole: its bytes are in the checksum too
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from xxhash import xxh3_64

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote.own_files import open_own
from savable_pipeline.data.remote.pace import PIECE

_DIGITS = 16  # of the checksum, before the version


def write_pin(path: Path, version: str) -> None:
    """Writes a pin."""
    replace_file(path, [xxh3_64(version.encode()).hexdigest().encode(), version.encode()])


def read_pin(path: Path) -> str:
    """The version that a pin names; "" if it is not there or damaged."""
    with contextlib.suppress(OSError, ValueError), open_own(path, "rb") as file:
        digest, version = file.read(_DIGITS), file.read()
        if xxh3_64(version).hexdigest().encode() == digest:
            return str(version, "utf-8")
    return ""


def pin_whole(path: Path, version: str) -> None:
    """Pins a file that is here whole, or one that was and is not kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_pin(_beside(path), f"{_hash(path) if path.exists() else ''} {version}")


def pinned_version(path: Path) -> str:
    """The version of a file, as it was pinned, whether it is here or not; "" if it is not known."""
    return read_pin(_beside(path)).partition(" ")[2]


def whole_version(path: Path) -> str | None:
    """The version of a file that is here whole, as it was pinned; None if it is not there, or another."""
    digest, _, version = read_pin(_beside(path)).partition(" ")
    with contextlib.suppress(OSError):
        if digest and _hash(path) == digest:
            return version
    return None


def drop_whole(path: Path) -> None:
    """Removes a file and its pin."""
    _beside(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.pin")


def _hash(path: Path) -> str:
    hashed = xxh3_64()
    with open_own(path, "rb") as file:
        while part := file.read(PIECE):
            hashed.update(part)
    return hashed.hexdigest()
