"""Formats sizes, lists of names, text of unknown origin and errors for messages."""

from __future__ import annotations

from collections.abc import Iterable

from savable_pipeline.core.addresses import clean_address

NAMES_SHOWN = 5


def human_bytes(size: float) -> str:
    """A size in decimal units, as drives are sold: 1536 is "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 shard`, `1,204 shards`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(names: Iterable[str], count: int | None = None) -> str:
    """The first five names, sorted, and the number of the others, of `count` in all: `a, b, c, d, e and 3 more`."""
    ordered = sorted(names)
    count = len(ordered) if count is None else count
    more = f" and {count - NAMES_SHOWN} more" if count > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more


def encodable(text: str) -> str:
    """Text that may come from a damaged file, with escapes for the characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def short_error(error: BaseException) -> str:
    """Type and first line of an error, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return clean_address(f"{type(error).__name__}: {lines[0] if lines else ''}")[:300]
