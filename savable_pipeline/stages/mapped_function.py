"""Encoders of chains.

`MappedFunction` has a plain function, for `.map(f)`, and `ClipEncoder` clips, for `.clips`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.media.clips import Clip, ClipIterator, Clips
from savable_pipeline.stages.stage_settings import function_settings
from savable_pipeline.stages.task_encoder import TaskEncoder

_PLAIN = (bool, int, float, str, bytes, type(None))
LAMBDA = "<lambda>"


class MappedFunction(TaskEncoder):
    """Encoder that calls `function(sample)` or `function(sample, rng)`.

    Args:
        stage: What it is for, in messages: ".map".
        function: Makes an item, a `Skip` or an iterator of items of a sample.
        global_rng: As `TaskEncoder.global_rng`.
        one_to_one: As `TaskEncoder.one_to_one`.

    Raises:
        ValueError: It is no function of one or two arguments.
    """

    def __init__(
        self,
        stage: str,
        function: Callable[..., Any],
        *,
        global_rng: bool | tuple[str, ...] | None = None,
        one_to_one: bool = False,
    ) -> None:
        self.function, self.global_rng, self.one_to_one = function, global_rng, one_to_one
        self.stage = stage
        self.with_rng = check_mapped(stage, function, most=2) == 2

    def encode(self, sample: Sample, rng: Rng) -> Any:
        """Return what the function makes of the sample."""
        return self.function(sample, rng) if self.with_rng else self.function(sample)

    def settings(self) -> dict[str, Any]:
        """Return the function's name, and the arguments that a `partial` binds."""
        return mapped_settings("function", self.function)


def encoder_call(encoder: TaskEncoder) -> str:
    """What encodes, as messages name it: "Captions.encode", or "f" of `.map(f)`."""
    if isinstance(encoder, MappedFunction):
        return mapped_name(encoder.function)
    return f"{type(encoder).__name__}.encode"


def check_mapped(stage: str, function: object, *, most: int) -> int:
    """Count the arguments, 1 to `most`, of a function.

    Raises ValueError for any other number.
    """
    if not callable(function) or isinstance(function, type | TaskEncoder):
        cure = ". Pass an encoder to .encode" if isinstance(function, TaskEncoder) else ""
        raise ValueError(f"{stage} takes a function, not {function!r}{cure}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a builtin, such as `dict`'s methods
        return 1
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in positional)
    takes_more = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    asked = [each for each in parameters if each.kind == each.KEYWORD_ONLY and each.default is each.empty]
    if not needed <= most or asked or not (positional or takes_more):
        names = "f(sample) or f(sample, rng)" if most == 2 else "f(item)"
        raise ValueError(f"{stage} takes a function {names}, not {mapped_name(function)}{inspect.signature(function)}")
    return min(most, max(needed, 1))


def mapped_settings(argument: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a fingerprint has of a function.

    It is its name, or class and `settings()`, and the arguments of a `partial`.

    Arguments that are no plain values are there by their class.
    """
    if not isinstance(function, partial):
        found = function_settings(argument, function)
        return {**found, argument: mapped_name(function)}
    bound = {**{str(number): value for number, value in enumerate(function.args)}, **function.keywords}
    plain = {f"{argument}.{name}": _plain(value) for name, value in bound.items()}
    return {**mapped_settings(argument, function.func), **plain}


def mapped_name(function: object) -> str:
    """The name of a function in messages and settings; "<lambda>" for each lambda."""
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    return LAMBDA if name.endswith(LAMBDA) else name


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if isinstance(value, _PLAIN) else mapped_name(value)


class ClipEncoder(TaskEncoder):
    """Encoder of each clip of a video, of audio or of both as a dict.

    It has "frames", "times_s", "audio" and "start_s".

    Args:
        clips: Which clips to take.
        video: The name of the part; True: the first video; False: none.
        audio: The name of the part; True: the first sound; False: none.
        rate: Samples of the sound in a second, in Hz. None: its own.

    Raises:
        ValueError: Neither is taken.
    """

    global_rng = False

    def __init__(self, clips: Clips, *, video: str | bool, audio: str | bool, rate: int | None) -> None:
        if not (video or audio):
            raise ValueError(".clips needs video= or audio=")
        self.clips, self.video, self.audio, self.rate = clips, video, audio, rate

    def encode(self, sample: Sample, rng: Rng) -> ClipIterator:
        """Return an iterator over the clips of the sample."""
        video = sample.video(_name(self.video)) if self.video else None
        audio = sample.audio(_name(self.audio)) if self.audio else None
        return self.clips.of(video, rng, audio=audio, rate=self.rate, make=_fields)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the clips, and what they are taken of."""
        return {**self.clips.settings(), "video": self.video, "audio": self.audio, "rate": self.rate}


def _name(part: str | bool) -> str | None:
    return part if isinstance(part, str) else None


def _fields(clip: Clip) -> dict[str, Any]:
    fields = {"start_s": clip.start_s, "times_s": clip.times_s, "frames": clip.frames, "audio": clip.audio}
    return {name: value for name, value in fields.items() if value is not None}
