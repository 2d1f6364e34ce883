"""Settings of stages: comparison with a saved state, and printing.

A setting must be equal, unless `allow` names it, or a `SettingRule` says how else it is compared: `Stage.setting_rules`
has them. Of a function a state keeps its name and its own settings. `tree` prints the stages of a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from savable_pipeline.data.shards.shard_list import ShardList


@dataclass(frozen=True, slots=True)
class SettingRule:
    """What is special about one setting where a state is loaded."""

    fixed: str = ""
    """Why it may never differ; empty: it may where `allow` names it."""
    allowed_by: str = ""
    """The name of another field: where `allow` has that, this one may differ too."""
    follows: tuple[str, ...] = ()
    """Settings of the same stage: where one of these differs and may, this one may as well."""
    absent: str = ""
    """What its absence from a state, or here, stands for: how to ask for it."""
    field: str = ""
    """Its name in states and in `allow`, which is else STAGE.SETTING."""
    comes: str = ""
    """Not empty: where only a run here has it, that is a warning. It says why it matters where both differ."""
    goes: bool = False
    """Where only a state has it, that is a warning too."""
    shards: Callable[[Any], ShardList] | None = None
    """The setting is a summary of shards, which this finds in the stage."""
    whole_stage: bool = False
    """The stage has neither state nor random numbers, only this setting: one may be added to a run, or taken away."""


_OTHER_LENGTHS = "the table of media says other values since, so that packs would be others: put back the one that was"
_HEADERS = "no table of media, so that headers are read"
MEDIA_RULES = {  # of what `KnownMedia.settings` has: the table says what the headers do
    "media": SettingRule(field="media", comes=_OTHER_LENGTHS, goes=True, absent=_HEADERS),
}


def function_settings(argument: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a function under the name of an argument.

    They are its name, or the class and the `settings()` of a callable object.

    A fingerprint cannot hold code: a change inside the function is not seen.
    """
    settings = getattr(function, "settings", None)
    if settings is None:
        return {argument: function_name(function)}
    return {argument: function_name(function), **{f"{argument}.{name}": value for name, value in settings().items()}}


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_function(stage: str, argument: str, function: object) -> None:
    """Raise ValueError unless a fingerprint can tell this callable from another one."""
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{stage}: {argument} must be a function, not {function!r}")
    if not hasattr(function, "__qualname__") and not hasattr(function, "settings"):
        raise ValueError(
            f"{stage}: {argument}={function!r} has no name. Pass a function, or an object with __call__ and settings()."
        )


_SHOWN = 60  # characters of a setting that are printed


def tree(stage: str, sources: Iterable[str] = ()) -> str:
    """A stage above the trees of its sources.

    Example:
        >>> from savable_pipeline.stages.stage_settings import tree
        >>> print(tree("Batcher(size=4)", [tree("Encode()")]))
        └─ Batcher(size=4)
           └─ Encode()
    """
    return "\n".join([f"└─ {stage}", *(f"   {line}" for source in sources for line in source.splitlines())])


def called(name: str, settings: Mapping[str, Any]) -> str:
    """A stage with its settings but for those that are None: "Batcher(size=4)".

    Example:
        >>> from savable_pipeline.stages.stage_settings import called
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
