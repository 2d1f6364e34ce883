"""What a conversion reads: the samples of a folder whose files share basenames, found without opening a file.

    a/cat.jpg  a/cat.txt  a/dog.seg.png      →      a/cat: jpg, txt      a/dog: seg.png

A sample with a fault that can be seen from names and sizes is rejected here; what only its bytes can tell is
found when its shard is written (`convert.shard`). For JSONL see `convert.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from savable_pipeline.tar import is_metadata, split_name

_TEXTS = ("txt", "text", "caption", "md")  # what may be empty: a sample may have nothing to say
_SHARDS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.idx")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a conversion that decide its bytes. Raises `ValueError`."""

    shard_bytes: int = 256_000_000  # a shard is full before it grows longer than this
    shard_samples: int | None = None  # or before it holds more samples than this
    check_images: bool = True
    allow_outside: bool = False  # take files outside the source that links or JSONL fields lead to
    key_field: str | None = None  # of a JSONL object; None: the line's number is the key
    file_fields: tuple[str, ...] | None = None  # "field" or "field=part"; None: the usual names

    def __post_init__(self) -> None:
        if self.shard_bytes < 1 or (self.shard_samples is not None and self.shard_samples < 1):
            raise ValueError(
                f"a shard must hold something: shard_bytes is {self.shard_bytes}, shard_samples {self.shard_samples}"
            )


class Reject(msgspec.Struct, frozen=True):
    """What was left out: the file or line, the key of its sample if it has one, and why."""

    file: str
    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a sample: a whole file, or `size` bytes of one from `offset` on."""

    extension: str
    path: str  # relative to the input's root
    size: int
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """A sample before it is written: its key and its parts by extension."""

    key: str
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Input:
    """All that a source holds: its samples in the order to write, and what was rejected already."""

    root: str
    samples: list[Files] = field(default_factory=list)
    rejected: list[Reject] = field(default_factory=list)
    hidden: int = 0  # hidden files and folders, passed over
    digest: str = ""  # of what the parts' names and sizes do not tell
    texts: frozenset[str] = frozenset()  # JSON fields that are a text in every sample


def read_folder(root: Path, allow_outside: bool) -> Input:
    """The samples of a folder and those below it, sorted by key."""
    found = Input(str(root))
    samples: dict[str, list[tuple[Part, str]]] = {}
    for name, size, fault in _walk(found, os.path.realpath(root), allow_outside):
        parts = split_name(name)
        if parts is None:
            unread = "readers take it for metadata" if is_metadata(name) else "no extension"
            found.rejected.append(Reject(printable(name), "", fault or unread))
        else:
            key, extension = parts
            samples.setdefault(key, []).append((Part(extension, name, size), fault))
    for key in sorted(samples):
        add_sample(found, key, sorted(samples[key], key=lambda pair: pair[0].extension))
    found.rejected.sort(key=lambda reject: (reject.file, reject.key))
    return found


def add_sample(found: Input, key: str, parts: list[tuple[Part, str]]) -> bool:
    """Put a sample where it belongs: among the samples, or with its first fault among the rejected."""
    extensions: dict[str, str] = {}
    for part, fault in parts:
        twin = extensions.get(part.extension.lower())
        if twin is not None:
            fault = fault or f"two parts with one extension: {twin} and {part.path}"
        extensions[part.extension.lower()] = part.path
        fault = fault or name_fault(key, part.extension) or size_fault(part)
        if fault:
            reason, _, detail = fault.partition(": ")
            found.rejected.append(Reject(printable(part.path), printable(key), reason, printable(detail)))
            return False
    found.samples.append(Files(key, tuple(part for part, _ in parts)))
    return True


def name_fault(key: str, extension: str) -> str:
    """Why readers of the tar would not find this part under this key; empty if they do."""
    name = f"{key}.{extension}"
    if printable(name) != name:
        return "name that a tar cannot carry: it is not UTF-8 or has control characters"
    if name.lower().endswith(_SHARDS):
        return "already a shard: a tar or its index is no part of a sample"
    if any(part in ("", ".", "..") for part in key.split("/")) or split_name(name) != (key, extension):
        return f"name that a tar cannot carry: readers would not take {key!r} for the key of {name!r}"
    if not extension or extension.startswith("_"):
        return f"name that a tar cannot carry: webdataset does not read the extension {extension!r}"
    return ""


def size_fault(part: Part) -> str:
    """Why a part of this size cannot be right; empty if it can."""
    return "" if part.size or part.extension.lower() in _TEXTS else "empty file"


def printable(name: str) -> str:
    """The name with what is not UTF-8 or controls a terminal written as escapes."""
    escaped = "".join(c if c.isprintable() or c > "\x9f" else f"\\x{ord(c):02x}" for c in name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def outside(root: str, path: str) -> bool:
    """Whether `path`, with every link followed, lies outside `root`, itself a real path."""
    return os.path.commonpath([root, os.path.realpath(path)]) != root


def _walk(found: Input, root: str, allow_outside: bool) -> Iterator[tuple[str, int, str]]:
    """Name, size in bytes and fault of every file below the root, in no particular order."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                fault = _link_fault(root, entry, allow_outside) if entry.is_symlink() else ""
                if entry.name.startswith("."):
                    found.hidden += 1
                elif entry.is_dir() and not fault:
                    folders.append(f"{name}/")
                elif entry.is_file() and not fault:
                    yield name, entry.stat().st_size, ""
                else:
                    yield name, 0, fault or "not a regular file"


def _link_fault(root: str, entry: os.DirEntry[str], allow_outside: bool) -> str:
    target = Path(entry.path).resolve()
    if not target.exists():
        return "missing file: the link leads nowhere"
    if not allow_outside and outside(root, str(target)):
        return "outside the source: a link leads there; --allow-outside takes it"
    if target in (here := Path(entry.path).parent.resolve(), *here.parents):
        return "link to a folder above it"
    return ""
