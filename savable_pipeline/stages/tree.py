"""How stages are printed: as indented lines, the last one first, each above the stages before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 60  # characters of a setting that are printed


def tree(stage: str, sources: Iterable[str] = ()) -> str:
    """A stage above the trees of its sources.

    Example:
        >>> from savable_pipeline.stages.tree import tree
        >>> print(tree("Batcher(size=4)", [tree("Encode()")]))
        └─ Batcher(size=4)
           └─ Encode()
    """
    return "\n".join([f"└─ {stage}", *(f"   {line}" for source in sources for line in source.splitlines())])


def called(name: str, settings: Mapping[str, Any]) -> str:
    """A stage with its settings but for those that are None: "Batcher(size=4)".

    Example:
        >>> from savable_pipeline.stages.tree import called
        >>> called("Batcher", {"size": 4, "drop_last": None})
        'Batcher(size=4)'
    """
    return f"{name}({', '.join(f'{key}={short(value)}' for key, value in settings.items() if value is not None)})"


def short(value: Any) -> str:
    """A value as it is printed: of a long one the begin, of a long list its length."""
    if isinstance(value, list | tuple) and (len(value) > 4 or any(isinstance(part, list | tuple) for part in value)):
        return f"{len(value)} of them"
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
