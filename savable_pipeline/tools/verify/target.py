"""Settings of the loader that a command line names."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from savable_pipeline.core.named_object import named_object
from savable_pipeline.run.loader.savable_loader import SavableLoader, settings_of
from savable_pipeline.run.loader.settings import LoaderSettings

DEFAULT_LANES = 12  # default for a pipeline function


def load_target(
    target: str, *, seed: int | None = None, lanes: int | None = None, default_lanes: int | None = DEFAULT_LANES
) -> LoaderSettings:
    """Return the settings of the loader, function or pipeline that `target` names.

    A function without arguments must build a `SavableLoader`, which is then closed. `seed` and `lanes` apply only to a
    pipeline, which is a function of a lane. By default it has `default_lanes` lanes, or if that is None, as many as in
    a loader. Raises ValueError for any other target.
    """
    found = named_object(target)
    if not isinstance(found, SavableLoader):
        if _is_pipeline(found, target):
            lanes = default_lanes if lanes is None else lanes
            with SavableLoader(found, seed=seed or 0, lanes=lanes, ranks=(0, 1)) as loader:
                return replace(settings_of(loader), ranks=None)
        found = found()
    if not isinstance(found, SavableLoader):
        raise ValueError(f"{target} returned a {type(found).__name__}. It must return a SavableLoader")
    if seed is not None or lanes is not None:
        raise ValueError(f"{target} is a loader, which has its own seed and lanes; they are for a pipeline function")
    with found:
        return settings_of(found)


def _is_pipeline(found: Any, target: str) -> bool:
    """Return whether an object is a pipeline: a function of one argument, the lane.

    Raises ValueError unless the object is a function of one argument or none.
    """
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"{target} is a {type(found).__name__}: expected a SavableLoader, a function without arguments that gives "
            "one, or a pipeline function"
        )
    required = [
        argument
        for argument in inspect.signature(found).parameters.values()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise ValueError(
            f"{target} takes {len(required)} arguments: a pipeline takes a lane, a maker of a loader nothing"
        )
    return len(required) == 1
