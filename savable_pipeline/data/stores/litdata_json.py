"""The binary form in which LitData keeps nested lists and dicts: a tag of one byte, then what it says.

Numbers are little-endian; a text is its length, uint32, and UTF-8. What begins with a printable character is JSON.
"""

from __future__ import annotations

import json
import struct
from typing import Any

_JSON, _TEXTS, _INTS, _FLOATS, _BOOLS, _DICT, _ROWS, _TEXT, _INT, _FLOAT, _BOOL, _NONE = range(12)
_IN_ROW = {0x10: _NONE, 0x11: _TEXT, 0x12: _INT, 0x13: _FLOAT, 0x14: _BOOL}  # tags of the cells of rows


def loads(data: bytes) -> Any:
    """The value. Raises ValueError or IndexError for damaged bytes."""
    if not data or data[0] > 0x20:
        return json.loads(data)
    return _Nested(data).value()


class _Nested:
    """Reads values one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self) -> Any:
        """The next value with its tag."""
        return self._tagged(self._byte())

    def _tagged(self, tag: int) -> Any:
        if tag == _NONE:
            return None
        if tag == _BOOL:
            return bool(self._byte())
        if tag in (_TEXT, _JSON):
            text = self._text()
            return json.loads(text) if tag == _JSON else text
        if tag in (_INT, _FLOAT):
            return self._numbers("q" if tag == _INT else "d", 1)[0]
        return self._several(tag, self._count())

    def _several(self, tag: int, count: int) -> Any:
        if count > len(self._data):  # rows without a column take no bytes
            raise ValueError(f"{count} values in {len(self._data)} bytes")
        if tag == _TEXTS:
            return [self._text() for _ in range(count)]
        if tag in (_INTS, _FLOATS):
            return self._numbers("q" if tag == _INTS else "d", count)
        if tag == _BOOLS:
            return [bool(flag) for flag in self._take(count)]
        if tag == _DICT:
            return {self._text(): self.value() for _ in range(count)}
        if tag == _ROWS:
            names = [self._text() for _ in range(self._count())]
            return [{name: self._tagged(_IN_ROW[self._byte()]) for name in names} for _ in range(count)]
        raise ValueError(f"an unknown tag {tag}")

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes at {self._at}, of {len(self._data)}")
        self._at += size
        return self._data[self._at - size : self._at]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _count(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _text(self) -> str:
        return self._take(self._count()).decode()

    def _numbers(self, kind: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{kind}", self._take(8 * count)))
