"""The number of random examples in a test: few and fixed in the suite, many in a long search.

The option `--hypothesis-profile long` selects a long search, with twenty times as many examples, which differ each
time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

IS_LONG = settings().max_examples > 100


def scaled_range(count: int) -> range:
    """Return `range(count)`, scaled by the profile's number of examples, per hundred."""
    return range(count * settings().max_examples // 100)


def few_examples(count: int, **more: Any) -> settings:
    """Return settings for `count` examples, or in a long search for the number of the profile."""
    return settings(max_examples=settings().max_examples if IS_LONG else count, deadline=None, **more)


def scaled_examples(count: int, *, suite: int | None = None, shrink: bool = True) -> settings:
    """Return settings for `count` examples, scaled by the profile's number, per hundred.

    Without `shrink`, a failure is reported as found, because shrinking would start many processes. `suite` is the
    number
    of examples in the suite.
    """
    phases = (Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else []))
    most = len(scaled_range(count)) if IS_LONG or suite is None else suite
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
