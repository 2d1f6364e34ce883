"""Comparison of two batches byte for byte, with their first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128

from savable_pipeline.core.containers import listed_parts, named_parts
from savable_pipeline.core.named_object import imported
from savable_pipeline.data.dataset.sample import Sample


class Difference(NamedTuple):
    """First difference of two batches.

    It has the path in the batch, and both values as short text.

    `row` is the first differing index along the first dimension of a tensor or array, and `rows` is text such as "2 of
    8 differ". If the row is long, `element` is text with the position of its first differing element. `parts` are the
    two tensors, arrays or values that differ.
    """

    path: str
    expected: str
    found: str
    row: int | None = None
    rows: str = ""
    element: str = ""
    parts: tuple[Any, Any] | None = None

    def __str__(self) -> str:
        row = "" if self.row is None else f", sample {self.row} ({self.rows})"
        return f"{self.path}{row}: {self.expected} expected, {self.found} found{self.element}"


def leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each part of a batch that is not a container.

    A path is where the part is, such as `batch.tokens[0]`. Paths like `batch.keys` and `batch.length` have the keys or
    the type and length of a container. The order of parts depends only on the batch.
    """
    if isinstance(value, Sample):
        yield f"{path}.ref", tuple(value.ref)
        yield from leaves(dict(value.items()), path)
    elif (parts := listed_parts(value)) is not None:
        yield f"{path}.length", (type(value).__name__, len(parts))
        for i, part in enumerate(parts):
            yield from leaves(part, f"{path}[{i}]")
    elif (fields := named_parts(value)) is not None:
        is_mapping = isinstance(value, Mapping)
        yield f"{path}.keys", [str(name) for name in fields]
        for name, part in fields.items():
            yield from leaves(part, f"{path}[{name!r}]" if is_mapping else f"{path}.{name}")
    else:
        yield path, value


def digest(batch: Any) -> str:
    """Hash every byte of a batch, its shapes, types and structure.

    The hash is xxh3_128 in hexadecimal.
    """
    hasher = xxh3_128()
    for path, leaf in leaves(batch):
        kind, raw = _type_and_bytes(leaf)
        hasher.update(f"{path}\0{kind}\0{len(raw)}\0".encode())
        hasher.update(raw)
    return hasher.hexdigest()


def first_difference(expected: Any, found: Any) -> str | None:
    """Describe the first field and row in which two batches differ.

    The result also has both values. It is None if the batches are equal.
    """
    difference = find_difference(expected, found)
    return None if difference is None else str(difference)


def find_difference(expected: Any, found: Any) -> Difference | None:
    """Return the first difference of two batches, or None if they are equal."""
    return difference_of_leaves(list(leaves(expected)), list(leaves(found)))


def difference_of_leaves(
    expected: list[tuple[str, Any]], found: list[tuple[str, Any]], compares: Callable[[Any], bool] = lambda leaf: True
) -> Difference | None:
    """Return the first difference of two lists of leaves.

    Leaves are only compared if `compares` returns True for both.
    """
    for (path, expected_leaf), (other_path, found_leaf) in zip(expected, found, strict=False):
        if path != other_path:
            return Difference("structure", path, other_path)
        is_equal = _type_and_bytes(expected_leaf) == _type_and_bytes(found_leaf)
        if not is_equal and compares(expected_leaf) and compares(found_leaf):
            return _difference(path, expected_leaf, found_leaf)
    if len(expected) != len(found):
        return Difference("structure", f"{len(expected)} parts", f"{len(found)} parts")
    return None


def has_a_value(leaf: Any) -> bool:
    """Return whether a leaf is compared by value, not by its address in memory."""
    images = imported("PIL.Image")
    if isinstance(leaf, str) or (images is not None and isinstance(leaf, images.Image)):
        return True
    return " at 0x" not in repr(leaf)


def copied_leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return the leaves of a value, with copies of those that can be changed in place."""
    return [(name, _copied(leaf)) for name, leaf in leaves(value, path)]


def _copied(leaf: Any) -> Any:
    """Copy a leaf if it can be changed in place."""
    torch, images = imported("torch"), imported("PIL.Image")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, np.ndarray | bytearray | set) or (images is not None and isinstance(leaf, images.Image)):
        return leaf.copy()
    return leaf


def _type_and_bytes(leaf: Any) -> tuple[str, bytes]:
    """Return (type, bytes) of a leaf, which are equal for equal leaves."""
    torch = imported("torch")  # if nothing has imported torch, no leaf is a tensor
    if torch is not None and isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"{leaf.dtype} {tuple(leaf.shape)}", raw
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        raw = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return f"numpy {array.dtype} {array.shape}", raw
    if isinstance(leaf, bytes | bytearray):
        return "bytes", bytes(leaf)
    if (images := imported("PIL.Image")) is not None and isinstance(leaf, images.Image):
        return f"{leaf.mode} {leaf.size}", leaf.tobytes()
    if isinstance(leaf, set | frozenset):  # equal sets may have different orders
        return type(leaf).__name__, repr(sorted(map(repr, leaf))).encode()
    return type(leaf).__name__, repr(leaf).encode()


def _difference(path: str, expected: Any, found: Any) -> Difference:
    """Describe the difference of two leaves that differ; for arrays of one shape and type, with row and element."""
    (expected_type, _), (found_type, _) = _type_and_bytes(expected), _type_and_bytes(found)
    if not all(hasattr(part, "shape") for part in (expected, found)):
        return Difference(path, _short(expected), _short(found), parts=(expected, found))
    if expected_type != found_type:
        return Difference(path, expected_type, found_type, parts=(expected, found))
    if not expected.shape:
        return Difference(path, _short(expected), _short(found), parts=(expected, found))
    differing = [i for i in range(len(expected)) if _type_and_bytes(expected[i]) != _type_and_bytes(found[i])]
    row = differing[0]
    index, differing_values = _first_element(expected[row], found[row])
    rows = f"{len(differing)} of {len(expected)} differ"
    element = f" at {list(index)}, {differing_values}" if index else ""
    shown = _short(expected[row][index]), _short(found[row][index])
    return Difference(path, *shown, row, rows, element, (expected, found))


_FEW = 8  # a row of at most 8 values is shown whole, a longer one by its first differing value


def _first_element(expected: Any, found: Any) -> tuple[tuple[int, ...], str]:
    """Return the index of the first differing element, and how many elements differ as text.

    Small arrays are shown whole: for them the index is (), and the text empty.
    """
    size = int(np.prod(expected.shape))
    if size <= _FEW or getattr(expected.dtype, "hasobject", False):
        return (), ""
    (_, expected_bytes), (_, found_bytes) = _type_and_bytes(expected), _type_and_bytes(found)
    differs = np.frombuffer(expected_bytes, np.uint8) != np.frombuffer(found_bytes, np.uint8)
    differing = np.flatnonzero(differs.reshape(size, -1).any(axis=1))
    index = np.unravel_index(differing[0], tuple(expected.shape))
    return tuple(int(i) for i in index), f"{len(differing):,} of {size:,} values differ"


def _short(value: Any) -> str:
    """Return the repr of a value in one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
