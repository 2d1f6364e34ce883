"""What an editor, `help()` and the API page show of each public name: all its arguments, with their types."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom

NAMES = {name: getattr(module, name) for module in (sp, custom) for name in module.__all__}
CALLED = [
    name
    for name, found in NAMES.items()
    if isinstance(found, type | FunctionType) and not getattr(found, "_is_protocol", False)
]


def hidden(found: Any, *, first: int = 0) -> list[str]:
    """The parameters of a signature, from the `first` on, that have no type, or stand for any others."""
    parameters = list(inspect.signature(found).parameters.values())[first:]
    return [str(each) for each in parameters if each.kind is each.VAR_KEYWORD or not _has_type(each)]


def _has_type(parameter: inspect.Parameter) -> bool:
    anything = ("Any", Any) if parameter.kind is parameter.VAR_POSITIONAL else ()
    return parameter.annotation not in (parameter.empty, *anything)


@pytest.mark.parametrize("name", CALLED)
def test_every_argument_is_shown_with_its_type(name: str) -> None:
    assert not hidden(NAMES[name])


@pytest.mark.parametrize("name", [name for name, found in NAMES.items() if isinstance(found, type)])
def test_every_argument_of_a_public_method_is_shown_with_its_type(name: str) -> None:
    methods = dict(inspect.getmembers(NAMES[name], inspect.isfunction))
    methods.pop("then", None)  # it passes on what a user's own stage takes
    assert not {
        each: hidden(method, first=1) for each, method in methods.items() if each[0] != "_" and hidden(method, first=1)
    }


def test_stage_with_two_signatures_shows_all_arguments_with_defaults() -> None:
    blend = inspect.signature(sp.Blend).parameters
    assert {name: each.default for name, each in blend.items()} == {
        "sources": inspect.Parameter.empty,
        "weights": None,
        "by": "samples",
        "until": "all",
        "stride": 8,
    }
    buffer = inspect.signature(sp.ShuffleBuffer).parameters
    assert list(buffer) == ["source", "size", "max_buffer_bytes"] and buffer["max_buffer_bytes"].default is None
