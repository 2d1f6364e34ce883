"""Extension of Griffe that adapts our docstrings for mkdocstrings.

It renames `Example:` to `Examples:`, as Griffe expects, and shows doctests as code. A reader that takes `**settings` is
shown with the settings of `RecordReader`, in its signature and in its `Args:`. A class that chooses a subclass in
`__new__` is shown with the arguments of `__new__`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_READERS = "stages.readers"
_ITEM = re.compile(r"^ {4}\*\*settings: .*\n(?: {8}.*\n)*", re.MULTILINE)


class ApiPage(griffe.Extension):
    """Changes docstrings and signatures that Griffe has read, before they are shown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings and signatures of a package.

        Griffe calls this after reading it.
        """
        for each in _objects(pkg):
            if each.docstring is not None:
                text = re.sub(r"^( *)Example:$", r"\1Examples:", each.docstring.value, flags=re.MULTILINE)
                each.docstring.value = text
            if isinstance(each, griffe.Class):
                _show_arguments_of_new(each)
        if pkg.name == "savable_pipeline":
            _show_settings(pkg)


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all objects in it."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _show_arguments_of_new(kind: griffe.Class) -> None:
    """Show the arguments of `__new__` for a class that chooses its subclass there."""
    new = kind.members.get("__new__")
    if isinstance(new, griffe.Function) and "__init__" not in kind.members:
        kind.set_member("__init__", griffe.Function("__init__", parameters=new.parameters))


def _show_settings(package: griffe.Module) -> None:
    """Show the settings of `RecordReader` for each reader that takes `**settings`."""
    base = package[f"{_READERS}.reader.RecordReader"]
    names = set(package[f"{_READERS}.reader.ReaderSettings"].attributes)
    settings = [each for each in base.members["__init__"].parameters if each.name in names]
    lines = "".join(
        re.findall(rf"^ {{4}}(?:{'|'.join(names)}): .*\n(?: {{8}}.*\n)*", base.docstring.value, re.MULTILINE)
    )
    for each in _objects(package[_READERS]):
        if isinstance(each, griffe.Function) and "settings" in each.parameters and each.name == "__init__":
            del each.parameters["settings"]
            for parameter in settings:
                each.parameters.add(parameter)
        elif isinstance(each, griffe.Class) and each.docstring is not None:
            each.docstring.value = _ITEM.sub(lambda _: lines, each.docstring.value)
