"""Random changes of nested values and of bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec

_VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "x", "\ud800",
    b"", b"\xff" * 11, b"\xff" * 12, b"\x01" * 12, [], {}, [[]], [None], [0, 0, 0], [[0, 0], 0, 1], [2**63, 2**40, 7],
    {"source": {}}, {"sources": {}}, {"a": 1}, [1] * 9,
]  # fmt: skip


def encoded(value: Any) -> bytes:
    """Encode a value as MessagePack, or return invalid MessagePack if it cannot be encoded."""
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
        return b"\x91" * 5000 + b"\xc0"


def changed_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Return a copy with one to three bytes changed, sometimes truncated."""
    copy = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        copy[rng.randrange(len(copy))] = rng.randrange(256)
    end = rng.randrange(len(copy)) if rng.random() < 0.1 else len(copy)
    return bytes(copy[:end])


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy of a nested value with one part changed, removed or nested deeply."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {key: inner for key, inner in value.items() if key != name}
        return {**value, name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:index] + value[index + 1 :]
        return [*value[:index], changed(value[index], rng), *value[index + 1 :]]
    if isinstance(value, int) and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 1000, 1 << 40])
    if rng.random() < 0.05:
        return _deep(rng.choice([30, 400, 3000]), rng.random() < 0.5)
    return rng.choice(_VALUES)


def _deep(depth: int, lists: bool) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if lists else {"source": value}
    return value
