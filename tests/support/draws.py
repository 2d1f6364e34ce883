"""How often a search of a test draws."""

from __future__ import annotations

from hypothesis import settings


def draws(count: int) -> range:
    """So many, to guard a change; twenty times as many under `--hypothesis-profile long`, to search."""
    return range(count * settings().max_examples // 100)
