"""The names of samples and their parts: which of them a tar cannot carry, and how a report shows them."""

from __future__ import annotations

import os

from savable_pipeline.data.shards.part_types import TEXT_PARTS
from savable_pipeline.data.shards.paths import TAR_FILES
from savable_pipeline.data.shards.tar import split_name
from savable_pipeline.tools.convert.model import Part

PACKED = TAR_FILES.refused  # how the names of compressed tars end, in small letters
TAR_ENDINGS = (*TAR_FILES.suffixes, *PACKED)


def is_tar(name: str) -> bool:
    """Whether a name is that of a tar, compressed or not, in letters of any case."""
    return name.lower().endswith(TAR_ENDINGS)


def name_fault(key: str, extension: str) -> str:
    """Why readers of the tar would not find this part under this key; empty if they do."""
    name = f"{key}.{extension}"
    if printable(name) != name:
        return "name that a tar cannot carry: it is not UTF-8 or has control characters"
    if is_tar(name) or name.lower().endswith(".tar.idx"):
        return "already a shard: a tar or its index is no part of a sample"
    if any(part in ("", ".", "..") for part in key.split("/")) or split_name(name) != (key, extension):
        return f"name that a tar cannot carry: readers would not take {key!r} for the key of {name!r}"
    if not extension or extension.startswith("_"):
        return f"name that a tar cannot carry: webdataset does not read the extension {extension!r}"
    return ""


def size_fault(part: Part) -> str:
    """Why a part of this size cannot be right; empty if it can."""
    return "" if part.size or part.extension.lower() in TEXT_PARTS else "empty file"


def printable(name: str) -> str:
    """The name, with bytes that are not UTF-8 and control characters as escapes."""
    escaped = "".join(c if c.isprintable() or c > "\x9f" else f"\\x{ord(c):02x}" for c in name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def outside(root: str, path: str) -> bool:
    """Whether `path`, with every link followed, lies outside `root`, itself a real path."""
    return os.path.commonpath([root, os.path.realpath(path)]) != root
