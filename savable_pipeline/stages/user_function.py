"""What a fingerprint keeps of a function that a user gives to a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def function_settings(argument: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The name of a function, or the class and the `settings()` of a callable object, under the name of an argument.

    A fingerprint cannot hold code: a change inside the function is not seen.
    """
    settings = getattr(function, "settings", None)
    if settings is None:
        return {argument: function_name(function)}
    return {argument: function_name(function), **{f"{argument}.{name}": value for name, value in settings().items()}}


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_function(stage: str, argument: str, function: object) -> None:
    """Raise ValueError unless a fingerprint can tell this callable from another one."""
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{stage}: {argument} must be a function, not {function!r}")
    if not hasattr(function, "__qualname__") and not hasattr(function, "settings"):
        raise ValueError(
            f"{stage}: {argument}={function!r} has no name and no settings(), so a saved state could not say which one "
            "it was: give a function, or an object with __call__ and settings()"
        )
