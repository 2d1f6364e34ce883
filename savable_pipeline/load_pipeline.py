"""The pipeline function that a command line names: `package.module:pipeline` or `train.py:pipeline`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from savable_pipeline.host import Pipeline, check_pipeline

_NAME = re.compile(r"(?P<module>.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<function>[^\W\d]\w*)")


def names_pipeline(text: str) -> bool:
    """Whether this has the form of a pipeline's name; a path of shards has not, unless it ends in `:word`."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def load_pipeline(name: str) -> Pipeline:
    """Import the module, with the working folder or the file's folder on the path, and give its function.

    Raises ValueError where there is no such module or function, and whatever the module raises.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r}: expected package.module:function or file.py:function")
    module = _module(match["module"])
    try:
        found: Any = getattr(module, match["function"])
    except AttributeError:
        raise ValueError(f"{name}: {match['module']} has no {match['function']!r}") from None
    check_pipeline(found)
    return found  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(Path(name).absolute())
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, but imports one that is not
        raise ValueError(f"no module {name!r} here or among the installed packages") from None


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    _search(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where pickle and dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
