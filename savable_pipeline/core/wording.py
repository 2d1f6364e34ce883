"""Texts in messages: counts, lists, sizes, and URLs without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

NAMES_SHOWN = 5  # most names that `listed` shows
_USER = re.compile(r"(?<=://)[^/\s?#]*@")
_QUERY = re.compile(r"(?P<kept>https?://[^\s?#'\"]*|\w+://[^\s?#'\"]*(?=\?[^\s'\"]*=))\?[^\s'\"]*")


def human_bytes(size: float) -> str:
    """Format a size in decimal units, as drives are sold: 1536 is "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def counted(count: int, one: str, many: str = "") -> str:
    """Format a count and its noun: `1 shard`, `1,204 shards`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Iterable[str], count: int | None = None) -> str:
    """Format the first five names and the number of others: `a, b, c, d, e and 3 more`

    Args:
        names: The names, or at least the first five of them.
        count: The number of all names. None (default) counts `names`.
    """
    ordered = sorted(names)
    count = len(ordered) if count is None else count
    more = f" and {count - NAMES_SHOWN} more" if count > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more


def encodable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, as damaged files may have."""
    return text.encode("utf-8", "backslashreplace").decode()


def short_error(error: BaseException) -> str:
    """Return the type and first line of an error, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return clean_address(f"{type(error).__name__}: {lines[0] if lines else ''}")[:300]


def clean_address(text: str) -> str:
    """Return the text with the user, password and query removed from each URL.

    A `?` in a bucket's URL is a wildcard of a glob unless a `=` follows.

    >>> from savable_pipeline.core.wording import clean_address
    >>> clean_address("https://me:secret@host/a.tar?token=5: no such object")
    'https://host/a.tar?…'
    """
    return _QUERY.sub(r"\g<kept>?…", _USER.sub("", text))


def has_user(url: str) -> bool:
    """Return whether a URL has a user or a password in it."""
    return "@" in url and "@" in urlsplit(url).netloc
