"""What a program gives as a sample, as the key and the bytes that a tar can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from savable_pipeline.data.shards.part_types import part_type
from savable_pipeline.data.stores.record_files import npy
from savable_pipeline.data.stores.sample_names import name_fault


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
