"""`Flatbuffer`: reads the fields of a flatbuffer that nothing vouches for."""

from __future__ import annotations

import struct
from typing import Any


class Flatbuffer:
    """A table in a flatbuffer. Reading outside of the bytes raises struct.error."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data, self._place = data, place
        self._fields = place - self._at("<i", place)
        if not 0 <= self._fields < len(data):
            raise struct.error("a table outside of the buffer")
        self._length = self._at("<H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> Flatbuffer:
        """The table that the buffer begins with."""
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def has(self, field: int) -> bool:
        """Whether a field is there."""
        return bool(self._offset(field))

    def number(self, field: int, kind: str) -> int:
        """A field that is an integer; 0 where it is left out."""
        offset = self._offset(field)
        return self._at(kind, self._place + offset) if offset else 0

    def table(self, field: int) -> Flatbuffer:
        """A field that is a table."""
        place = self._place + self._offset(field)
        return Flatbuffer(self._data, place + self._at("<I", place))

    def structs(self, field: int, layout: str) -> list[tuple[Any, ...]]:
        """A field that is a vector of structs of this layout; none where it is left out."""
        if not self.has(field):
            return []
        place = self._place + self._offset(field)
        place += self._at("<I", place)
        end = place + 4 + struct.calcsize(layout) * self._at("<I", place)
        if end > len(self._data):
            raise struct.error("a vector outside of the buffer")
        return list(struct.iter_unpack(layout, self._data[place + 4 : end]))

    def _offset(self, field: int) -> int:
        at = 4 + 2 * field
        return self._at("<H", self._fields + at) if at + 2 <= self._length else 0

    def _at(self, kind: str, place: int) -> int:
        if place < 0:
            raise struct.error("before the buffer")
        found: int = struct.unpack_from(kind, self._data, place)[0]
        return found
