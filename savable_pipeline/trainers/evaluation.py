"""Loaders for evaluation, of which each pass begins at the start."""

from __future__ import annotations

from typing import Any

from savable_pipeline.run.loader.savable_loader import SavableLoader, settings_of


def each(made: Any) -> list[Any]:
    """Return the loaders in a dict, list or tuple, or a single one, as a list.

    Args:
        made: A loader, or a container of loaders.
    """
    if isinstance(made, dict):
        return list(made.values())
    return list(made) if isinstance(made, list | tuple) else [made]


def check_restarts(made: Any) -> None:
    """Check that every `SavableLoader` starts each evaluation at the beginning.

    Args:
        made: A loader, or a container of loaders; other kinds pass.

    Raises:
        ValueError: A loader was made without `on_iter="restart"`: it would continue where an evaluation was broken off.
    """
    for loader in each(made):
        if isinstance(loader, SavableLoader) and settings_of(loader).on_iter != "restart":
            raise ValueError(
                'a loader for evaluation needs on_iter="restart": each evaluation begins at the start then, also after '
                "one that was broken off, by a sanity check or a limit on its batches"
            )
