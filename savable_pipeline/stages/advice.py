"""Checks of settings when a stage or step is built, with advice in errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from operator import index
from typing import ParamSpec, SupportsIndex, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def closest(name: object, names: Iterable[object], prefix: str = "") -> str:
    """Return a question with the closest of `names`, or "" if none is close.

    Example:
        >>> from savable_pipeline.stages.advice import closest
        >>> closest("shuffel", ["batch", "shuffle"], ".")
        ' Did you mean .shuffle?'
    """
    found = get_close_matches(str(name), list(map(str, names)), 1)
    return f" Did you mean {prefix}{found[0]}?" if found else ""


def check_count(stage: str, setting: str, value: object) -> None:
    """Raise TypeError or ValueError unless a setting is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{stage}: {setting} must be an int, not {value!r}")
    if index(value) < 1:
        raise ValueError(f"{stage}: {setting} must be at least 1, not {value}")


def check_choice(stage: str, setting: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless a setting is one of `choices`."""
    if value not in choices:
        hint = closest(value, choices)
        raise ValueError(f"{stage}: {setting} must be one of {', '.join(choices)}, not {value!r}.{hint}")


def check_name(stage: str, setting: str, value: object) -> None:
    """Raise TypeError unless a setting is a str or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{stage}: {setting} must be a str, not {value!r}")


def advise(advice: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown option raises a TypeError with advice.

    Args:
        advice: Sentences by the name of an option that other libraries have; `{}` stands for its value.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            for option, value in options.items():
                if option not in parameters:
                    known = advice.get(option, "").format(repr(value)) or closest(option, parameters).strip()
                    raise TypeError(f"{name} has no option {option!r}. {known}".strip())
            return function(*arguments, **options)

        return checked

    return decorate
