"""Rules for names of files: which are parts of samples, as in a tar."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from savable_pipeline.data.shards.part_types import MEDIA_PARTS, SUBTITLE_PARTS, TEXT_PARTS, part_type
from savable_pipeline.data.shards.tar import split_name

# the top folders (True), no classes (False), names, a file of names, or another folder with the same classes
Classes: TypeAlias = bool | Sequence[str] | str | os.PathLike[str]


_FOR_PEOPLE = ("readme", "license", "notice", "citation", "changelog")
_TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq", ".parq", ".arrow", ".feather", ".ipc")
_MEDIA = frozenset(f".{name}" for name in MEDIA_PARTS)


class Reject(msgspec.Struct, frozen=True):
    """Skipped file or line, the key of its sample if any, and the reason."""

    file: str
    key: str
    reason: str
    detail: str = ""

    @classmethod
    def of(cls, file: str, key: str, fault: str) -> Reject:
        """Build a reject for a fault, `reason: detail`."""
        reason, _, detail = fault.partition(": ")
        return cls(file, printable(key), reason, printable(detail))


def name_fault(key: str, extension: str) -> str:
    """Return why readers of a tar would not find this part under this key, or ""."""
    name = f"{key}.{extension}"
    if printable(name) != name:
        return "name that a tar cannot carry: it is not UTF-8 or has control characters"
    if any(part in ("", ".", "..") for part in key.split("/")) or split_name(name) != (key, extension):
        return f"name that a tar cannot carry: readers would not read {name!r} under the key {key!r}"
    if not extension or extension.startswith("_"):
        return f"name that a tar cannot carry: webdataset does not read the extension {extension!r}"
    return ""


def parts_fault(key: str, parts: list[tuple[str, str, int, str]]) -> tuple[str, str]:
    """Return the first fault of a sample's parts and its file, or ("", "").

    A part is (extension, file, size in bytes, fault found before or "").
    """
    files: dict[str, str] = {}
    for extension, path, size, fault in parts:
        if (other := files.get(extension.lower())) is not None:
            fault = fault or f"two parts with one extension: {other} and {path}"
        files[extension.lower()] = path
        is_empty = not size and extension.lower() not in TEXT_PARTS and part_type(extension) not in SUBTITLE_PARTS
        if fault := fault or name_fault(key, extension) or "empty file" * is_empty:
            return fault, path
    return "", ""


def printable(name: str) -> str:
    """Return the name with control characters and bytes that are not UTF-8 escaped."""
    if name.isascii() and name.isprintable():
        return name
    escaped = "".join(c if c.isprintable() or c > "\x9f" else f"\\x{ord(c):02x}" for c in name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def outside(root: str, path: str) -> bool:
    """Return whether `path` leads outside of the real path `root`, following links.

    Hugging Face's cache is CACHE/snapshots/COMMIT, with files that are links into CACHE/blobs.
    """
    real, (cache, snapshots, _) = os.path.realpath(path), root.partition("/snapshots/")
    inside = [root, f"{cache}/blobs"] if snapshots else [root]
    return all(os.path.commonpath([each, real]) != each for each in inside)


def suffix_of(name: str) -> str:
    """Return the lower-case suffix of a name, from its last dot."""
    base = name.rpartition("/")[2]
    return base[base.rfind(".") :].lower() if "." in base else ""


def is_media_file(name: str) -> bool:
    """Return whether a name is that of an image, audio or video."""
    return suffix_of(name) in _MEDIA


def is_table(name: str) -> bool:
    """Return whether a name is that of a table, or of lines of JSON."""
    return suffix_of(name) in _TABLE_SUFFIXES


def is_for_people(name: str) -> bool:
    """Return whether a top-level file is for people, such as a README or a license."""
    return "/" not in name and name.lower().startswith(_FOR_PEOPLE)


def stem_of(name: str) -> str:
    """Return the path of a file up to its first dot."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def no_samples(names: Iterable[str]) -> set[str]:
    """Return the names in a folder of raw files that are not parts of samples.

    These are files for people. With media, they are also tables that share their stem with no other kind of file, and
    img2dataset's statistics (00000_stats.json for 00000.parquet).
    """
    names = [*names]
    has_media = any(map(is_media_file, names))
    known = {*names} if has_media else set()
    return {
        name
        for name in lone(names, names)
        if is_for_people(name)
        or (has_media and (is_table(name) or f"{name.removesuffix('_stats.json')}.parquet" in known))
    }


def lone(some: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return those of `some` that share their stem with no other file except tables.

    An example is metadata.csv beside metadata.jsonl.
    """
    stems = Counter(stem_of(name) for name in names if not is_table(name))
    return [name for name in some if stems[stem_of(name)] == (not is_table(name))]
