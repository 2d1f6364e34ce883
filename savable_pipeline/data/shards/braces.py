"""The names that `a-{00..02}.tar`, `{x,y{1,2}}` and `{a..e..2}` stand for, as the package braceexpand spells them."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from savable_pipeline.errors import ShardError

_INTEGERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d{1,18}))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
_MOST_NAMES = 1_000_000  # that one pattern may stand for
_MOST_CHARACTERS = 1 << 28  # of all of these
_DEEPEST = 16  # braces inside braces


def expand_braces(pattern: str) -> list[str]:
    """The names that a pattern stands for, the last braces counting fastest; a brace without its other one is text.

    Raises `ShardError` if there are too many of them.
    """
    try:
        return _spelled(pattern, _DEEPEST)
    except _TooManyError as error:
        raise ShardError(f"{pattern[:200]}: the braces {error}") from None


def _spelled(text: str, deepest: int) -> list[str]:
    if not deepest:
        raise _TooManyError(f"lie more than {_DEEPEST} deep in each other")
    closing = _closing(text)
    names, place = [""], 0
    for begin, end in closing:
        if begin >= place:
            names = _product(names, [text[place:begin]])
            names = _product(names, _choices(text[begin + 1 : end], deepest))
            place = end + 1
    return _product(names, [text[place:]])


def _closing(text: str) -> list[tuple[int, int]]:
    """Where pairs of braces open and close, in the order of their opening."""
    pairs, opened = [], []
    for place, character in enumerate(text):
        if character == "{":
            opened.append(place)
        elif character == "}" and opened:
            pairs.append((opened.pop(), place))
    return sorted(pairs)


def _product(names: list[str], choices: Sequence[str]) -> list[str]:
    _check_size(len(names) * len(choices), len(max(names, key=len)) + len(max(choices, key=len)))
    return [name + choice for name in names for choice in choices]


def _check_size(count: int, longest: int) -> None:
    if count > _MOST_NAMES or count * longest > _MOST_CHARACTERS:
        raise _TooManyError(f"mean more than {_MOST_NAMES:,} names, or too long ones")


def _choices(inner: str, deepest: int) -> Sequence[str]:
    """What braces around `inner` stand for."""
    if match := _INTEGERS.fullmatch(inner):
        padded = any(re.match("-?0", end) for end in match.group(1, 2) if end not in ("0", "-0"))
        width = max(map(len, match.group(1, 2))) if padded else 0
        return [f"{number:0{width}d}" for number in _range(int(match[1]), int(match[2]), match[3])]
    if match := _LETTERS.fullmatch(inner):
        first, last = map(_ALPHABET.index, match.group(1, 2))
        return [_ALPHABET[number] for number in _range(first, last, match[3])]
    parts = _parted(inner)
    if len(parts) == 1:
        return [f"{{{name}}}" for name in _spelled(inner, deepest - 1)]
    return _joined(_spelled(part, deepest - 1) for part in parts)


def _joined(lists: Iterable[list[str]]) -> list[str]:
    names: list[str] = []
    for more in lists:
        names += more
        _check_size(len(names), 1)
    return names


def _range(first: int, last: int, step: str | None) -> range:
    by = int(step or 1) or 1
    numbers = range(first, last + 1, by) if first < last else range(first, last - 1, -by)
    _check_size(len(numbers), 1)
    return numbers


def _parted(inner: str) -> list[str]:
    """At its commas, but for those inside further braces."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(inner):
        if character == "," and not depth:
            parts.append(inner[begin:place])
            begin = place + 1
        depth += (character == "{") - (character == "}")
    return [*parts, inner[begin:]]


class _TooManyError(Exception):
    """What the braces of a pattern are too many for."""
