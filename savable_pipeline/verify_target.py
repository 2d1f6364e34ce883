"""What `savable verify-resume` is given on the command line: "module:name" or "file.py:name", and the loader it means.

Importing it runs the user's own code, which the user asked for by naming it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from savable_pipeline.loader import SavableLoader

LANES = 12  # of a pipeline function, unless the user says otherwise


def load_target(target: str, *, seed: int | None = None, lanes: int | None = None) -> SavableLoader:
    """The loader that `target` names: a `SavableLoader`, a function of no argument that gives one, or a pipeline.

    `seed` and `lanes` are for a pipeline, which is a function of a lane. Raises ValueError for anything else.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"expected module:name or file.py:name, such as train:make_loader, not {target!r}")
    found = _attribute(_module(place), name, target)
    if not isinstance(found, SavableLoader):
        if _takes_a_lane(found, target):
            return SavableLoader(found, seed=seed or 0, lanes=LANES if lanes is None else lanes)
        found = found()
    if not isinstance(found, SavableLoader):
        raise ValueError(f"{target} gave a {type(found).__name__}; it must give a SavableLoader")
    if seed is not None or lanes is not None:
        raise ValueError(f"{target} is a loader, which has its own seed and lanes; they are for a pipeline function")
    return found


def _module(place: str) -> Any:
    """A module by its dotted name, or by its file, whose folder is then searched first, as Python itself does."""
    if not place.endswith(".py"):
        if importlib.util.find_spec(place.split(".")[0]) is None:
            raise ValueError(f"there is no module {place!r} on the path or in {Path.cwd()}; a file is named with .py")
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"{place}: no such file")
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ValueError(f"{place}: a module {path.stem!r} of {module.__file__} is imported already; rename the file")
    return module


def _attribute(module: Any, name: str, target: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ValueError(f"{target}: the module has no {name!r}; it has {', '.join(public) or 'nothing'}") from None


def _takes_a_lane(found: Any, target: str) -> bool:
    """Whether it is a function with one argument that must be given, rather than none."""
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"{target} is a {type(found).__name__}: expected a SavableLoader, a function without arguments that gives "
            "one, or a pipeline function"
        )
    wanted = [
        argument
        for argument in inspect.signature(found).parameters.values()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    if len(wanted) > 1:
        raise ValueError(
            f"{target} takes {len(wanted)} arguments: a pipeline takes a lane, a maker of a loader nothing"
        )
    return len(wanted) == 1
