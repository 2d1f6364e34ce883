"""The names that `a-{00..02}.tar`, `{x,y{1,2}}` and `{a..e..2}` stand for: as braceexpand says, and bounded."""

from __future__ import annotations

import re

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

from savable_pipeline.errors import ShardError

_NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}")
_MOST_NAMES = 1_000_000  # that one pattern may stand for
_MOST_CHARACTERS = 1 << 28  # of all of these
_MOST_BRACES = 1000


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern stands for, the last braces counting fastest; braces that do not pair are text.

    Raises `ShardError` if there are too many of them.
    """
    if "{" not in pattern:
        return [pattern]
    numbers = sum(abs(int(last[:20]) - int(first[:20])) + 1 for first, last in _NUMBERS.findall(pattern))
    names, characters = [], 0
    if numbers <= _MOST_NAMES and pattern.count("{") <= _MOST_BRACES:  # all numbers of a range are made at once
        try:
            for name in braceexpand(pattern, escape=False):
                names.append(name)
                characters += len(name)
                if len(names) > _MOST_NAMES or characters > _MOST_CHARACTERS:
                    break
            else:
                return names
        except UnbalancedBracesError:
            return [pattern]
        except RecursionError:
            pass
    raise ShardError(f"{pattern[:200]}: the braces mean more than {_MOST_NAMES:,} names, or too long ones")
