"""Public names of a module, which are imported at their first use.

    from savable_pipeline.core.lane import Lane as Lane      one line of the module's stub, such as `__init__.pyi`

Type checkers and editors read the same stub, so one new line adds a public name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def public_names(module: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return the `__all__` and the `__getattr__` of a module with a stub.

    Args:
        module: Its `__name__`. Its stub is in the same folder.
    """
    file = sys.modules[module].__file__
    assert file is not None
    lines = map(str.split, Path(file).with_suffix(".pyi").read_text().splitlines())
    # the words of a line are "from", the module, "import", the name, "as", the name
    module_of = {words[-1]: words[1] for words in lines if words[:1] == ["from"]}

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return sorted(module_of), import_name
