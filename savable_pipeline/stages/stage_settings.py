"""Settings of stages: comparison with a saved state, and printing.

A setting must be equal, unless `allow` names it or a `SettingRule` in `ChunkedStage.setting_rules` compares it in
another way. For a function, a state has its name and its settings. `tree` prints the stages of a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from savable_pipeline.data.shards.shard_list import ShardList


@dataclass(frozen=True, slots=True)
class SettingRule:
    """Rule for a setting whose comparison with a saved state is not plain equality."""

    fixed: str = ""
    """Why the setting may never differ. If empty, it may differ if `allow` names it."""
    allowed_by: str = ""
    """The name of another field. If `allow` names that field, this setting may differ too."""
    may_differ_with: tuple[str, ...] = ()
    """Settings of the same stage. If one of them differs, and may differ, this setting may differ too."""
    absent: str = ""
    """What it means if the setting is absent from a state or from the stage, for messages."""
    field: str = ""
    """The name of the setting in states and in `allow`; by default STAGE.SETTING."""
    warns_if_added: str = ""
    """If not empty, a setting that only the stage has is a warning. The text says why a difference matters."""
    warns_if_removed: bool = False
    """Whether a setting that only the state has is a warning, not an error."""
    shards: Callable[[Any], ShardList] | None = None
    """If the setting is a summary of shards, a function that returns the stage's shards."""
    whole_stage: bool = False
    """Whether this setting is all that a state has of the stage, so that the stage may be added or removed."""


_OTHER_LENGTHS = "the table of media has other values now, so packs would differ. Restore the earlier table"
_HEADERS = "no table of media, so headers are read"
MEDIA_RULES = {  # for `KnownMedia.settings`; a table of media has the same values as the headers of the files
    "media": SettingRule(field="media", warns_if_added=_OTHER_LENGTHS, warns_if_removed=True, absent=_HEADERS),
}


def function_settings(argument: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a function under the name of an argument.

    They are its name, or the class and the `settings()` of a callable object. A change inside the function is not
    detected, because a fingerprint has no code.
    """
    own = function.settings() if hasattr(function, "settings") else {}
    return {argument: function_name(function), **{f"{argument}.{name}": value for name, value in own.items()}}


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_function(stage: str, argument: str, function: object) -> None:
    """Raise ValueError unless a callable has a name or settings for a fingerprint."""
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{stage}: {argument} must be a function, not {function!r}")
    if not hasattr(function, "__qualname__") and not hasattr(function, "settings"):
        raise ValueError(
            f"{stage}: {argument}={function!r} has no name. Pass a function, or an object with __call__ and settings()."
        )


_SHOWN = 60  # most characters of a setting to print


def tree(stage: str, sources: Iterable[str] = ()) -> str:
    """Print a stage with the trees of its sources below it.

    Example:
        >>> from savable_pipeline.stages.stage_settings import tree
        >>> print(tree("Batcher(size=4)", [tree("Encode()")]))
        └─ Batcher(size=4)
           └─ Encode()
    """
    return "\n".join([f"└─ {stage}", *(f"   {line}" for source in sources for line in source.splitlines())])


def called(name: str, settings: Mapping[str, Any]) -> str:
    """Print a stage with its settings: "Batcher(size=4)".

    Settings that are None are left out.

    Example:
        >>> from savable_pipeline.stages.stage_settings import called
        >>> called("Batcher", {"size": 4, "drop_last": None})
        'Batcher(size=4)'
    """
    return f"{name}({', '.join(f'{key}={short(value)}' for key, value in settings.items() if value is not None)})"


def short(value: Any) -> str:
    """Print a value: the start of a long one, and only the length of a long list."""
    if isinstance(value, list | tuple) and (len(value) > 4 or any(isinstance(part, list | tuple) for part in value)):
        return f"{len(value)} of them"
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
