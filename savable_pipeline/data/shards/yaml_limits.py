"""YAML from untrusted sources as plain values, bounded in size and time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml  # type: ignore[import-untyped]

_DEEPEST = 20  # most levels of lists and mappings
_MOST_VALUES = 4_000_000  # values of a file, aliases included; a million shards need a fourth of it
_LONGEST_NUMBER = 100  # characters; parsing a longer number takes a time that grows with the square of its length
_LONG_NUMBER = re.compile(r"[-+]?(?:0[xb][0-9a-fA-F_]*|[0-9_:.]+)")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# errors of PyYAML's constructors for scalars that contradict their tag
_CONSTRUCTOR_ERRORS = (ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError)


def load_yaml(raw: bytes) -> Any:
    """Return the values of a file, which may have no aliases.

    Raises ValueError that says where it cannot be read.
    """
    try:
        check_yaml(raw, aliases=False)
        return construct_yaml_value(lambda: yaml.load(raw, _LOADER))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def construct_yaml_value(construct: Callable[[], Any]) -> Any:
    """Return the value that `construct`, a function without arguments, makes of YAML.

    Raises ValueError for a value that contradicts its tag, such as `!!int a`.
    """
    try:
        return construct()
    except _CONSTRUCTOR_ERRORS as error:
        raise ValueError(f"a value does not match its type: {error}. Quote it if it is a string") from error


def check_yaml(raw: bytes, *, aliases: bool, most: int = _MOST_VALUES, loader: Any = _LOADER) -> None:
    """Raise ValueError or yaml.YAMLError for YAML that is too deep or too large.

    The limits are `most` values and 100 characters for a number. With `aliases=False`, aliases are errors too.

    The parser's events are checked before values are constructed, because deep YAML overflows the stack of the fast
    loader.
    """
    counts = [0]  # values so far in each open list or mapping, the outermost first
    anchors: list[str | None] = []  # anchors of the open lists and mappings
    sizes: dict[str, int] = {}  # number of values below each anchor
    for event in yaml.parse(raw, Loader=loader):
        anchor: str | None = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            anchors.append(anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, own_anchor = counts.pop(), anchors.pop()
            counts[-1] += size
            sizes.update({} if own_anchor is None else {own_anchor: size})
        elif isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError(f"{_position(event)}: an alias. Write the value itself")
            if anchor in anchors:
                raise ValueError(f"{_position(event)}: the alias *{anchor} contains itself")
            counts[-1] += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            sizes.update({} if anchor is None else {anchor: 1})
            if len(event.value) > _LONGEST_NUMBER and _LONG_NUMBER.fullmatch(event.value):
                raise ValueError(f"{_position(event)}: a number of {len(event.value)} characters")
        if len(counts) > _DEEPEST + 1:
            raise ValueError(f"{_position(event)}: values deeper than {_DEEPEST}")
        if sum(counts) > most:
            raise ValueError(f"{_position(event)}: more than {most:,} values")


def _position(event: Any) -> str:
    return f"line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"
