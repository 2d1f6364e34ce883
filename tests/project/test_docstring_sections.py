"""Each public docstring has a line for every argument, and for none that is not there; its errors are errors.

The promised names and their methods are read by Griffe, as for the page of the API, and not imported: an adapter's
trainer may not be installed.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import griffe
import pytest

import savable_pipeline
import task_encoders
from savable_pipeline import custom, errors

Callable: TypeAlias = griffe.Class | griffe.Function
Promised: TypeAlias = dict[str, Callable]
ROOT = Path(__file__).resolve().parents[2]
_OTHER_ERRORS = {"JSONDecodeError", "TemplateError"}  # of json and jinja2


@pytest.fixture(scope="module")
def promised() -> Promised:
    """What is promised to users, by short names."""
    loader = griffe.GriffeLoader(
        extensions=griffe.load_extensions(ROOT / "tools/site/api_page.py"),
        search_paths=[ROOT],
        docstring_parser="google",
        docstring_options={"returns_named_value": False},
    )
    package, encoders = loader.load("savable_pipeline"), loader.load("task_encoders")
    loader.resolve_aliases()
    found = {f"sp.{name}": package[name].final_target for name in savable_pipeline.__all__}
    found |= {f"custom.{name}": package["custom"][name].final_target for name in custom.__all__}
    found |= {name: encoders[name].final_target for name in task_encoders.__all__}
    for module in (package["testing"], *package["trainers"].modules.values()):
        own = {name: each for name, each in module.members.items() if name[0] != "_" and not each.is_alias}
        found |= {f"{module.name}.{name}": each for name, each in own.items()}
    return {name: each for name, each in found.items() if isinstance(each, griffe.Class | griffe.Function)}


def callables(name: str, value: Callable) -> Iterator[tuple[str, griffe.Docstring | None, set[str]]]:
    """A function, or a class and its public methods that no base documents: docstring and arguments of each."""
    yield name, value.docstring, arguments(value)
    if isinstance(value, griffe.Class):
        for method in value.members.values():
            public = isinstance(method, griffe.Function) and method.name[0] != "_"
            if public and not _is_documented_by_base(method, value):
                yield f"{name}.{method.name}", method.docstring, arguments(method)


def arguments(value: Callable) -> set[str]:
    """The names of the arguments of a call; the fields of a named tuple or a struct."""
    if is_record(value):
        return {name for name, each in value.attributes.items() if "instance-attribute" in each.labels}
    return {each.name for each in value.parameters} - {"self", "cls"}


def is_record(value: Callable) -> bool:
    """Return whether this is a named tuple or a struct, whose fields are its arguments."""
    return isinstance(value, griffe.Class) and bool({"NamedTuple", "msgspec.Struct"} & set(map(str, value.bases)))


def _is_documented_by_base(method: griffe.Function, owner: griffe.Class) -> bool:
    """Return whether a base of a class says what a method is for."""
    return any(method.name in base.members and base[method.name].docstring for base in owner.mro())


def sections(docstring: griffe.Docstring | None, kind: str) -> list[Any]:
    """The entries of all sections of a kind."""
    parsed = [] if docstring is None else docstring.parse()
    return [each for section in parsed if section.kind.value == kind for each in section.value]


def test_args_sections_match_the_arguments(promised: Promised) -> None:
    lacking, unknown = [], []
    for value_name, value in promised.items():
        for name, docstring, expected in callables(value_name, value):
            kinds = ("parameters", "attributes") if is_record(value) else ("parameters",)
            listed = {each.name.lstrip("*") for kind in kinds for each in sections(docstring, kind)}
            lacking += [f"{name}: {each}" for each in sorted(expected - listed) if each[0] != "_"]
            unknown += [f"{name}: {each}" for each in sorted(listed - expected)]
    assert not lacking, "no line in Args:\n" + "\n".join(lacking)
    assert not unknown, "no such argument:\n" + "\n".join(unknown)


def test_raises_sections_name_errors(promised: Promised) -> None:
    known = {name for name in dir(builtins) if name.endswith("Error")} | set(vars(errors)) | _OTHER_ERRORS
    raised = {
        str(each.annotation): name
        for value_name, value in promised.items()
        for name, docstring, _ in callables(value_name, value)
        for each in sections(docstring, "raises")
    }
    assert raised and not {error: name for error, name in raised.items() if error not in known}
