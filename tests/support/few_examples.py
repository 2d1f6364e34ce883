"""How many examples a property test draws: a few in the suite, the same each time; in a long search far more."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

IS_LONG = settings().max_examples > 100
"""Whether this is a long search: `--hypothesis-profile long`."""


def few(count: int, **more: Any) -> settings:
    """Settings for `count` examples, or, in a long search, as many as its profile says."""
    return settings(max_examples=settings().max_examples if IS_LONG else count, deadline=None, **more)
