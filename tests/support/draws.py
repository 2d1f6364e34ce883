"""How much a search of a test draws: little in the suite, the same each time; far more in a long search.

`--hypothesis-profile long` makes a search long: twenty times as much, of other examples each time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

IS_LONG = settings().max_examples > 100


def draws(count: int) -> range:
    """So many, times as many as the profile says, of a hundred."""
    return range(count * settings().max_examples // 100)


def few(count: int, **more: Any) -> settings:
    """Settings for `count` examples, or, in a long search, as many as its profile says."""
    return settings(max_examples=settings().max_examples if IS_LONG else count, deadline=None, **more)


def examples(count: int, *, suite: int | None = None, shrink: bool = True) -> settings:
    """Settings for `count` examples, times as many as the profile says, of a hundred; long searches do not shrink.

    Those that start many processes report the one found, without a smaller one. The suite may draw fewer.
    """
    phases = (Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else []))
    most = len(draws(count)) if IS_LONG or suite is None else suite
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
