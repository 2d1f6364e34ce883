"""Weights as integers, so that proportions are exact for 0.7 and 0.3, too."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from math import gcd, lcm
from typing import TypeAlias

Weight: TypeAlias = int | float | str | Fraction | Decimal


def integer_weights(weights: Mapping[str, Weight]) -> dict[str, int]:
    """Return weights as integers without a common factor: 0.7 and 0.3 become 7 and 3.

    Raises ValueError for a weight that is not a number of at least 0, and if none is above 0.
    """
    exact = {name: exact_weight(name, weight) for name, weight in weights.items()}
    if not any(exact.values()):
        raise ValueError(f"all weights are 0: {', '.join(map(repr, exact))}. Set at least one above 0")
    whole = lcm(*(value.denominator for value in exact.values()))
    return reduced({name: int(value * whole) for name, value in exact.items()})


def exact_weight(name: str, weight: Weight) -> Fraction:
    """Return the weight of the source `name` as a fraction.

    A float counts as the decimal number that `str` prints. Raises ValueError unless it is a number of at least 0.
    """
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"the weight of {name!r} must be a number, not {weight!r}") from None
    if exact < 0:
        raise ValueError(f"the weight of {name!r} must be at least 0, not {weight!r}. Pass 0 to turn the source off")
    return exact


def reduced(weights: Mapping[str, int]) -> dict[str, int]:
    """Divide weights by their greatest common factor."""
    common = gcd(*weights.values()) or 1
    return {name: weight // common for name, weight in weights.items()}
