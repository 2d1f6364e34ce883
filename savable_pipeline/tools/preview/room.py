"""`Room`: how many bytes of media a page may hold."""

from __future__ import annotations

import base64
from dataclasses import dataclass

PAGE_BYTES = 64_000_000  # of all excerpts and pictures of media in a page, as base64
EXCERPT_BYTES = 2_000_000  # of one part


@dataclass(slots=True)
class Room:
    """The bytes that media may still take in a page, or in a card of it."""

    left: int

    @property
    def excerpt(self) -> int:
        """The most bytes of an excerpt, which takes a third more as base64."""
        return min(EXCERPT_BYTES, self.left * 3 // 4 - 3)

    def take(self, kind: str, data: bytes) -> str:
        """The data as a URI, or "" where there is no room for it."""
        uri = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return uri if self.fits(uri) else ""

    def fits(self, uri: str) -> bool:
        """Whether there is room for this URI, which then takes it."""
        if len(uri) > self.left:
            return False
        self.left -= len(uri)
        return True
