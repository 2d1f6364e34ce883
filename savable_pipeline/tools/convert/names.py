"""Samples as a tar can carry them: the names of keys and parts, and what a program gives as a part, as bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from savable_pipeline.data.shards.part_types import SUBTITLE_PARTS, TEXT_PARTS, part_type
from savable_pipeline.data.shards.paths import TAR_FILES
from savable_pipeline.data.shards.tar import split_name
from savable_pipeline.data.stores.record_fields import npy
from savable_pipeline.tools.convert.model import Part

PACKED = TAR_FILES.refused  # how the names of compressed tars end, in small letters
TAR_ENDINGS = (*TAR_FILES.suffixes, *PACKED)
_OF_DESKTOPS = ("Thumbs.db", "desktop.ini")


def is_tar(name: str) -> bool:
    """Whether a name is that of a tar, compressed or not, in letters of any case."""
    return name.lower().endswith(TAR_ENDINGS)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is the desktop's or a tool's, and no data."""
    return name.startswith(".") or name in _OF_DESKTOPS


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
    is_text = part.extension.lower() in TEXT_PARTS or part_type(part.extension) in SUBTITLE_PARTS
    return "" if part.size or is_text else "empty file"


def printable(name: str) -> str:
    """The name, with bytes that are not UTF-8 and control characters as escapes."""
    escaped = "".join(c if c.isprintable() or c > "\x9f" else f"\\x{ord(c):02x}" for c in name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def outside(root: str, path: str) -> bool:
    """Whether `path`, with every link followed, lies outside `root`, itself a real path."""
    return os.path.commonpath([root, os.path.realpath(path)]) != root


def sample_parts(sample: Mapping[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Key and parts of a sample in the form of webdataset, `{"__key__": …, "jpg": …}`; other `__names__` are no parts.

    Raises ValueError and TypeError, which name the key, for what cannot be written.
    """
    key = sample.get("__key__")
    if not isinstance(key, str) or not key:
        raise ValueError(f"a sample needs a key: {{'__key__': 'cat/0001', …}}, but its '__key__' is {key!r}")
    parts: dict[str, bytes] = {}
    for extension, value in sample.items():
        if not (extension.startswith("__") and extension.endswith("__")):
            fault = name_fault(key, extension)
            if fault:
                raise ValueError(f"sample {key!r}: {fault}")
            parts[extension] = part_bytes(key, extension, value)
    if len({extension.lower() for extension in parts}) < len(parts) or not parts:
        raise ValueError(f"sample {key!r} needs a part, and no two that differ in case alone: {list(parts)}")
    return key, parts


def part_bytes(key: str, extension: str, value: Any) -> bytes:
    """The bytes of a part: bytes as they are, text as UTF-8, numbers as digits, JSON and arrays by the extension."""
    kind = part_type(extension)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and kind != "json":
        return value.encode()
    if kind == "npy" and isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return npy(value)
    if kind == "json":
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"sample {key!r}: the part {extension!r} cannot be JSON: {error}") from error
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value).encode()
    raise TypeError(
        f"sample {key!r}: the part {extension!r} is of the type {type(value).__name__}: give bytes, a str, an int, a "
        "numpy array for npy, or for json what JSON holds; encode images and tensors yourself, so that equal samples "
        "are equal bytes"
    )
