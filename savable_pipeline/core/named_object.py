"""`named_object`: import an object that a user names on a command line.

The name has the form `package.module:name` or `train.py:name`. The import runs the user's own code, as the user asked.
Never pass a name that comes from data.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from savable_pipeline.errors import SavableError

_NAME = re.compile(r"(?P<module>.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)")

_importing: list[str] = []  # modules that a command is importing


def imported(name: str) -> Any:
    """Return the module of this name if it was imported, else None.

    A module that another thread is still importing counts as not imported. It lacks most of its names, and no other
    thread can have any of its objects.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def reject_while_importing() -> None:
    """Raise `SavableError` while a command imports a user's file.

    An import must not start to train.
    """
    if _importing:
        guard = 'if __name__ == "__main__":'
        raise SavableError(
            f"{_importing[-1]} iterates over its loader on import, which would train. Move that below {guard}\n"
            "No batch was taken"
        )


def names_object(text: str) -> bool:
    """Return whether `text` has the form `module:name` and is not an existing path."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def named_object(text: str) -> Any:
    """Import and return the object named by `text`.

    Modules in the working folder, or in the folder of the named file, are found too. Raises ValueError if there is no
    such module or name, and any error that the module raises.
    """
    if (match := _NAME.fullmatch(text)) is None:
        raise ValueError(f"expected module:name or file.py:name, such as train:make_loader, not {text!r}")
    _importing.append(match["module"])
    try:
        module = _import_module(match["module"])
    finally:
        _importing.pop()
    try:
        return attrgetter(match["name"])(module)
    except AttributeError:
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        names = ", ".join(public) or "nothing"
        raise ValueError(f"{text}: the module has no {match['name']!r}; it has {names}") from None


def _import_module(name: str) -> ModuleType:
    """Import a module by its dotted name or its file.

    The folder of a file is put first on the path, as `python FILE` does.
    """
    path = Path(name).resolve()
    if not name.endswith(".py"):
        _prepend_to_path(Path.cwd())
        if importlib.util.find_spec(name.split(".")[0]) is None:
            raise ValueError(f"no module {name!r} on the path or in {Path.cwd()}. Pass a file with its suffix .py")
        return importlib.import_module(name)
    if not path.is_file():
        raise ValueError(f"{name}: no such file (current folder: {Path.cwd()}). Check the path")
    _prepend_to_path(path.parent)
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ValueError(f"{name}: {module.__file__} is imported already as {path.stem!r}. Rename the file")
    return module


def _prepend_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
