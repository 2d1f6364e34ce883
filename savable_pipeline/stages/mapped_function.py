"""Encoders of chains: `MappedFunction` for `.map`, and `ClipEncoder` for `.clips`."""

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

# types of the arguments of a `partial` that settings have unchanged
_PLAIN = (bool, int, float, str, bytes, type(None))
LAMBDA = "<lambda>"


class MappedFunction(TaskEncoder):
    """Encoder that calls `function(sample)` or `function(sample, rng)`.

    Args:
        stage: The name of the step in messages, such as ".map".
        function: Returns an item, a `Skip` or an iterator of items.
        global_rng: See `TaskEncoder.global_rng`.
        one_to_one: See `TaskEncoder.one_to_one`.

    Raises:
        ValueError: `function` is not a function of one or two arguments.
    """

    def __init__(
        self,
        stage: str,
        function: Callable[..., Any],
        *,
        global_rng: bool | tuple[str, ...] | None = None,
        one_to_one: bool = False,
    ) -> None:
        self.stage, self.function, self.global_rng, self.one_to_one = stage, function, global_rng, one_to_one
        self.with_rng = check_mapped(stage, function, most=2) == 2

    def encode(self, sample: Sample, rng: Rng) -> Any:
        """Return the result of the function for a sample."""
        return self.function(sample, rng) if self.with_rng else self.function(sample)

    def settings(self) -> dict[str, Any]:
        """Return the function's name, and the arguments that a `partial` binds."""
        return mapped_settings("function", self.function)


def encoder_call(encoder: TaskEncoder) -> str:
    """Return the name of the function that encodes, for messages.

    Examples are "Captions.encode", and "f" for `.map(f)`.
    """
    return mapped_name(encoder.function) if isinstance(encoder, MappedFunction) else f"{type(encoder).__name__}.encode"


def check_mapped(stage: str, function: object, *, most: int) -> int:
    """Return the number of arguments to call a function with: 1 to `most`.

    Raises ValueError, which names the `stage`, if the function takes none of these numbers of arguments.
    """
    if not callable(function) or isinstance(function, type | TaskEncoder):
        hint = ". Pass an encoder to .encode" if isinstance(function, TaskEncoder) else ""
        raise ValueError(f"{stage} takes a function, not {function!r}{hint}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin, such as a method of `dict`, has no signature
        return 1
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in positional)
    takes_any = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    keyword_only = [each for each in parameters if each.kind == each.KEYWORD_ONLY and each.default is each.empty]
    if needed > most or keyword_only or not (positional or takes_any):
        forms = "f(sample) or f(sample, rng)" if most == 2 else "f(item)"
        raise ValueError(f"{stage} takes a function {forms}, not {mapped_name(function)}{inspect.signature(function)}")
    return min(most, max(needed, 1))


def mapped_settings(argument: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a function, by names that start with `argument`.

    They are the function's name, or the class and `settings()` of a callable object, and the arguments of a `partial`.
    Arguments that are not plain values are represented by their name or class.
    """
    if not isinstance(function, partial):
        return {**function_settings(argument, function), argument: mapped_name(function)}
    bound = {**{str(position): value for position, value in enumerate(function.args)}, **function.keywords}
    bound_settings = {f"{argument}.{name}": _plain_value(value) for name, value in bound.items()}
    return {**mapped_settings(argument, function.func), **bound_settings}


def mapped_name(function: object) -> str:
    """Return the name of a function for messages and settings.

    The name of every lambda is "<lambda>".
    """
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    return LAMBDA if name.endswith(LAMBDA) else name


def _plain_value(value: Any) -> Any:
    """Return a value, in which all that is not plain, also within lists and dicts, is replaced by its name or class."""
    if isinstance(value, list | tuple):
        return [_plain_value(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain_value(each) for name, each in value.items()}
    return value if isinstance(value, _PLAIN) else mapped_name(value)


class ClipEncoder(TaskEncoder):
    """Encoder of each clip of a video, of audio or of both as a dict.

    The dict has "frames", "times_s", "audio" and "start_s".

    Args:
        clips: Which clips to take.
        video: The name of the part; True: the first video part; False: no video.
        audio: The name of the part; True: the first audio part; False: no audio.
        rate: The sampling rate to which audio is resampled, in Hz. None: unchanged.

    Raises:
        ValueError: Both `video` and `audio` are False.
    """

    global_rng = False

    def __init__(self, clips: Clips, *, video: str | bool, audio: str | bool, rate: int | None) -> None:
        if not (video or audio):
            raise ValueError(".clips needs video= or audio=")
        self.clips, self.video, self.audio, self.rate = clips, video, audio, rate

    def encode(self, sample: Sample, rng: Rng) -> ClipIterator:
        """Return an iterator over the clips of the sample."""
        video = sample.video(self.video if isinstance(self.video, str) else None) if self.video else None
        audio = sample.audio(self.audio if isinstance(self.audio, str) else None) if self.audio else None
        return self.clips.of(video, rng, audio=audio, rate=self.rate, make=_clip_item)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the clips, and the parts that the clips are taken from."""
        return {**self.clips.settings(), "video": self.video, "audio": self.audio, "rate": self.rate}


def _clip_item(clip: Clip) -> dict[str, Any]:
    """Return a clip as a dict, without fields that are None."""
    fields = {"start_s": clip.start_s, "times_s": clip.times_s, "frames": clip.frames, "audio": clip.audio}
    return {name: value for name, value in fields.items() if value is not None}
