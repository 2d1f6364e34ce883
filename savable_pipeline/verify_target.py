"""The loader that `savable verify-resume` is to look at, of what it is given on the command line."""

from __future__ import annotations

import inspect
from typing import Any

from savable_pipeline.loader import SavableLoader
from savable_pipeline.named_object import named_object

LANES = 12  # of a pipeline function, unless the user says otherwise


def load_target(target: str, *, seed: int | None = None, lanes: int | None = None) -> SavableLoader:
    """The loader that `target` names: a `SavableLoader`, a function of no argument that gives one, or a pipeline.

    `seed` and `lanes` are for a pipeline, which is a function of a lane. Raises ValueError for anything else.
    """
    found = named_object(target)
    if not isinstance(found, SavableLoader):
        if _takes_a_lane(found, target):
            return SavableLoader(found, seed=seed or 0, lanes=LANES if lanes is None else lanes)
        found = found()
    if not isinstance(found, SavableLoader):
        raise ValueError(f"{target} gave a {type(found).__name__}; it must give a SavableLoader")
    if seed is not None or lanes is not None:
        raise ValueError(f"{target} is a loader, which has its own seed and lanes; they are for a pipeline function")
    return found


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
