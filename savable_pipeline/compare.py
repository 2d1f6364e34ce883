"""Compares batches byte for byte and says where the first difference lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from savable_pipeline.sample import Sample


def leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """The parts of a batch that are no containers, each with its path, in a fixed order."""
    if isinstance(value, Sample):
        yield f"{path}.ref", tuple(value.ref)
        yield from leaves(dict(value.items()), path)
    elif isinstance(value, Mapping):
        yield f"{path}.keys", [str(name) for name in value]
        for name, part in value.items():
            yield from leaves(part, f"{path}[{name!r}]")
    elif isinstance(value, list | tuple):
        yield f"{path}.length", (type(value).__name__, len(value))
        for i, part in enumerate(value):
            yield from leaves(part, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for attribute in dataclasses.fields(value):
            yield from leaves(getattr(value, attribute.name), f"{path}.{attribute.name}")
    else:
        yield path, value


def digest(batch: Any) -> str:
    """A hash of every byte of a batch, its shapes, types and structure."""
    hashed = xxh3_128()
    for path, leaf in leaves(batch):
        kind, raw = _bytes(leaf)
        hashed.update(f"{path}\0{kind}\0{len(raw)}\0".encode())
        hashed.update(raw)
    return hashed.hexdigest()


def first_difference(expected: Any, found: Any) -> str | None:
    """The first field, and sample in it, in which two batches differ, with both values; None if they are equal."""
    mine, theirs = list(leaves(expected)), list(leaves(found))
    for (path, left), (other, right) in zip(mine, theirs, strict=False):
        if path != other:
            return f"structure: {path} expected, {other} found"
        if _bytes(left) != _bytes(right):
            return f"{path}{_where(left, right)}"
    if len(mine) != len(theirs):
        return f"structure: {len(mine)} parts expected, {len(theirs)} found"
    return None


def _bytes(leaf: Any) -> tuple[str, bytes]:
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"{leaf.dtype} {tuple(leaf.shape)}", raw
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        raw = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return f"numpy {array.dtype} {array.shape}", raw
    if isinstance(leaf, bytes | bytearray):
        return "bytes", bytes(leaf)
    return type(leaf).__name__, repr(leaf).encode()


def _where(left: Any, right: Any) -> str:
    """Which sample differs, where the first dimension counts samples, and the two values."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return f": {left.dtype} {tuple(left.shape)} expected, {right.dtype} {tuple(right.shape)} found"
        if left.dim():
            rows = [i for i in range(len(left)) if _bytes(left[i]) != _bytes(right[i])]
            return f", sample {rows[0]} ({len(rows)} of {len(left)} differ): {_short(left[rows[0]], right[rows[0]])}"
    return f": {_short(left, right)}"


def _short(left: Any, right: Any) -> str:
    shown = [" ".join(repr(value).split()) for value in (left, right)]
    return " expected, ".join(text if len(text) <= 80 else text[:77] + "..." for text in shown) + " found"
