"""`PipelineStep`: one step of a pipeline value: what makes its stage, with which arguments, and the steps before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from savable_pipeline.core.lane import Lane
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.mapped_function import MappedFunction, mapped_name
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.stages.tree import short, tree

ALONE = ""  # the name of the only source of a step


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """Makes a stage by `make(source, *arguments, **options)`; of several `sources` it gets a dict by name.

    The first step makes its stage by `make(lane, one_pass, *arguments, **options)`: of a lane, and whether it gives a
    single pass where it would repeat for ever.
    """

    name: str
    make: Callable[..., Stage]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, PipelineStep] = field(default_factory=dict)

    @classmethod
    def of(
        cls, stage: Callable[..., Stage], sources: Mapping[str, PipelineStep], *arguments: Any, **options: Any
    ) -> Self:
        """A step that makes a stage of this class, without the options that are the class's defaults."""
        return cls(stage.__name__, stage, arguments, unlike_defaults(stage, options), sources)

    def build(self, lane: Lane, *, one_pass: bool) -> Stage:
        """The stage of a lane, and all before it. Raises what the stages raise."""
        if not self.sources:
            return self.make(lane, one_pass, *self.arguments, **self.options)
        if isinstance(self.options.get("weights"), Schedule):
            one_pass = False  # it counts from the run's start to no end
        built = {name: source.build(lane, one_pass=one_pass) for name, source in self.sources.items()}
        return self.make(built.get(ALONE, built), *self.arguments, **self.options)

    def tree(self, label: str = ALONE) -> str:
        """The stages as they are printed; `label` is the name of this one among several sources."""
        shown = [_shown(value) for value in self.arguments if value is not None]
        shown += [f"{name}={_shown(value)}" for name, value in self.options.items()]
        named = f"{label}: {self.name}" if label else self.name
        return tree(f"{named}({', '.join(shown)})", [source.tree(name) for name, source in self.sources.items()])


def unlike_defaults(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not what the function takes without them."""
    parameters = inspect.signature(function).parameters
    defaults = {name: parameters[name].default for name in options}
    return {
        name: value
        for name, value in options.items()
        if not (value is defaults[name] or (type(value) is type(defaults[name]) and value == defaults[name]))
    }


def _shown(value: Any) -> str:
    """An argument: functions and encoders by their names."""
    if isinstance(value, MappedFunction):
        value = value.function
    if isinstance(value, TaskEncoder):
        return type(value).__name__
    return mapped_name(value) if callable(value) else short(value)
