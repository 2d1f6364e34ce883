"""The hashes of files that Mosaic Streaming writes into index.json: hashlib's and xxhash's, by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash


def known_hash(hashes: Iterable[str]) -> str | None:
    """The first of these algorithms that can be computed here."""
    known = {*hashlib.algorithms_available, *xxhash.algorithms_available}
    return next((name for name in hashes if name in known and not name.startswith("shake")), None)


def wrong_hash(hashes: Mapping[str, str], algorithm: str, pieces: Iterable[bytes]) -> str:
    """What is wrong with the bytes of a file whose hashes are these; "" if nothing is."""
    if algorithm not in hashes:
        return f"index.json has no {algorithm} of it, but {', '.join(hashes) or 'no hash'}"
    hasher: Any = getattr(xxhash, algorithm)() if algorithm in xxhash.algorithms_available else hashlib.new(algorithm)
    for piece in pieces:
        hasher.update(piece)
    found = hasher.hexdigest()
    return (
        "" if found == hashes[algorithm].lower() else f"its {algorithm} is {found}, index.json says {hashes[algorithm]}"
    )
