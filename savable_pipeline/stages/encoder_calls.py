"""`EncoderCalls`: calls of an encoder by packers and batchers.

Calls get keyed random numbers, and errors name the stage.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, Literal, TypeGuard, cast

from savable_pipeline.core.global_rng import Seeding
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import described, from_user_code
from savable_pipeline.core.rng import Rng
from savable_pipeline.errors import CheckpointMismatchError, EncodeError
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.item_ref import Element
from savable_pipeline.stages.mapped_function import MappedFunction, encoder_call
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import function_name
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings, overrides


def check_encoder(stage: str, encoder: object) -> None:
    """Raise ValueError unless `encoder` is a `TaskEncoder`.

    For a class or a function, the error says what to pass instead.
    """
    if isinstance(encoder, TaskEncoder):
        return
    hint = ""
    if isinstance(encoder, type):
        hint = f". Pass an instance, such as {encoder.__name__}()"
    elif callable(encoder):
        hint = ". Pass a function to .map, or write it as `encode` of a TaskEncoder"
    raise ValueError(f"{stage} takes a TaskEncoder, not {encoder!r}{hint}")


def lane_encoder(stage: str, encoder: object, lane: Lane) -> TaskEncoder:
    """Return the encoder for a lane. A function builds the encoder once per process.

    Raises ValueError if `encoder` is neither an encoder nor a function that builds one.
    """
    if is_maker(encoder):
        built = lane.shared(("encoder", encoder), lane.own(encoder))  # each worker thread builds its own encoder
        check_encoder(stage, built)
        return cast(TaskEncoder, built)
    check_encoder(stage, encoder)
    return lane.own(cast(TaskEncoder, encoder))


def is_maker(encoder: object) -> TypeGuard[Callable[[], Any]]:
    """Return whether `encoder` is a function that can be called without arguments.

    Such a function may build an encoder.
    """
    if isinstance(encoder, type | TaskEncoder) or not callable(encoder):
        return False
    with contextlib.suppress(TypeError, ValueError):
        inspect.signature(encoder).bind()
        return True
    return False


def seeding_of(encoder: TaskEncoder, lane: Lane, method: str = "encode") -> Seeding:
    """Return the seeding for calls of a method, or of the function of a `.map`.

    All lanes of a process share the seeding.
    """
    called = encoder.function if isinstance(encoder, MappedFunction) else encoder
    name = encoder_call(encoder) if method == "encode" else f"{type(encoder).__name__}.{method}"
    # torch's collation draws nothing
    global_rng = False if method == "batch" and not overrides(encoder, "batch") else encoder.global_rng
    key = ("seeding", id(called), method, global_rng)
    # the value has a reference to `called`, so that no other object gets its id
    return lane.shared(key, lambda: (Seeding(name, global_rng, in_thread=lane.in_thread), called))[0]


class EncoderCalls:
    """Calls of an encoder's methods, for a stage that combines items.

    `encoder=None` uses the encoder upstream. Raises `EncodeError` if a method raises or returns a wrong result.
    """

    def __init__(
        self, stage: str, upstream: StageInfo, encoder: TaskEncoder | None, combine: Literal["pack", "batch"]
    ) -> None:
        encoder = upstream.encoder if encoder is None else encoder
        if encoder is None:
            raise ValueError(f"{stage}: no Encode stage before it. Add one, or pass encoder=.")
        check_encoder(stage, encoder)
        if encoder is not upstream.encoder:
            encoder = upstream.lane.own(encoder)
        if combine == "pack" and not overrides(encoder, "pack"):
            mapped = isinstance(encoder, MappedFunction)
            fix = "Use .encode() with an encoder that has pack()" if mapped else "Write one, or remove the packer"
            raise ValueError(f"{stage}: {type(encoder).__name__} has no pack(items, rng). {fix}.")
        self.encoder = encoder
        self.is_upstream = encoder is upstream.encoder
        self.packs_all = encoder.one_to_one and combine == "pack"  # whether `pack` may not return a `Skip`
        self.encoder_name = type(encoder).__name__
        self._stage, self._lane, self._noun = stage, upstream.lane, combine
        self._key: int | None = None  # computed at the first use
        self.has_images = overrides(encoder, "images")
        self._combine = encoder.pack if combine == "pack" else encoder.batch
        self._seeding = seeding_of(encoder, self._lane, combine)

    def settings(self) -> dict[str, Any]:
        """Return the encoder's settings, to be added to the stage's settings.

        They are empty for the encoder upstream, because the stage upstream has them.
        """
        return {} if self.is_upstream else encoder_settings(self.encoder)

    def key(self, info: StageInfo) -> int:
        """Return the 64-bit key of the stage's random numbers."""
        if self._key is None:
            self._key = info.key(self._noun)
        return self._key

    def combined(self, items: list[Any], number: int, info: StageInfo) -> Any:
        """Return the pack or batch of these items.

        `number` is its number in the lane, by which its random numbers are keyed.
        """
        rng = Rng(self.key(info), (number, 0, 0))  # in place of a sample's (index, epoch, part)
        return self._seeding.call_alone(self._call, self._combine, self._noun, rng, items, info, self._seeding)

    def selected(self, select: Callable[[list[Any], Rng], Any], items: list[Any], number: int, info: StageInfo) -> Any:
        """Return the result of the user's function `select` for the items of a round.

        `number` is the number of the round in the lane.
        """
        rng, seeding = Rng(info.key("select"), (number, 0, 0)), seeding_of(self.encoder, self._lane, "select")
        return seeding.call_alone(self._call, select, "round", rng, items, info, seeding)

    def _call(self, call: Any, noun: str, rng: Rng, items: list[Any], info: StageInfo, seeding: Seeding) -> Any:
        """Return `call(items, rng)`. Errors name the result by `noun`: "pack", "batch" or "round"."""
        status = info.lane.worker.status
        if status is not None:
            status[0] = info.depth  # for the report if the worker dies in the call
        if seeding.seed is not None:
            seeding.seed(rng.key)
        try:
            result = call(items, rng.restarted())
            if type(result) is Skip and self.packs_all:
                raise TypeError(f"one_to_one is set, but it returned {result!r}")
            return result
        except Exception as error:
            name = "select" if noun == "round" else f"{self.encoder_name}.{noun}"
            if noun == "batch" and not overrides(self.encoder, "batch"):
                name = "stacking items"
            which = f", {noun} {rng.parts[0]} ({len(items)} items)"  # its random numbers are keyed by its number
            raise self._error(name, error, which) from from_user_code(error)

    def sizes(self, elements: Sequence[Element]) -> tuple[Size, ...] | None:
        """Return (length in tokens, number of images) of each built item.

        A length may be 0. Returns None if the encoder has no `length` of its own.
        """
        return tuple(map(self.size, elements)) if overrides(self.encoder, "length") else None

    def size(self, element: Element, *, least: int = 0) -> Size:
        """Return length in tokens, at least `least`, and number of images of a built item."""
        return self.length(element, least=least), self.images(element.value) if self.has_images else 0

    def length(self, element: Element, *, least: int) -> int:
        """Return the length of a built item in tokens, which must be at least `least`."""
        try:
            measured = element.measured
            if measured is None or measured[0] is not self.encoder:  # not yet by this encoder
                measured = element.measured = self.encoder, index(self.encoder.length(element.value))  # no NumPy int
            return measured[1] if measured[1] >= least else _at_least(least, measured[1])
        except Exception as error:
            raise self._error(f"{self.encoder_name}.length", error) from from_user_code(error)

    def check_size(self, element: Element, length: int, images: int | None) -> None:
        """Raise `CheckpointMismatchError` unless a rebuilt item has this size."""
        found = self.length(element, least=0), images if images is None else self.images(element.value)
        if found != (length, images):
            name, now, before = ("length", found[0], length) if found[0] != length else ("images", found[1], images)
            raise CheckpointMismatchError(
                f"{self._stage}: an item has {name} {now}, but had {before} when the state was "
                f"saved. Use the saved data and {self.encoder_name}, which must depend on the sample and `rng` alone."
                f"\n  item {element.ref} of {self._lane}"
            )

    def checked_length(self, length: int, *, least: int) -> int:
        """Return a length that the encoder declared, which must be at least `least`."""
        try:
            return _at_least(least, length)
        except ValueError as error:
            raise self._error(f"{self.encoder_name}.length_of", error) from error

    def images(self, item: Any) -> int:
        """Return the number of images of an item."""
        return int(self.value("images", item, partial(_at_least, 0))) if self.has_images else 0

    def cut(self, item: Any, start: int, stop: int) -> Any:
        """Return the tokens `start` to `stop - 1` of an item."""
        try:
            part = self.encoder.cut(item, start, stop)
            found = self.encoder.length(part)
            if found != stop - start:
                raise ValueError(f"{found} tokens instead of {stop - start}")
        except Exception as error:
            raise self._error(f"{self.encoder_name}.cut", error) from from_user_code(error)
        return part

    def value(self, function: str | Callable[[Any], Any], item: Any, checked: Callable[[Any], Any]) -> Any:
        """Return `checked(function(item))`.

        A `function` that is a str is the name of a method of the encoder.
        """
        try:
            return checked(getattr(self.encoder, function)(item) if isinstance(function, str) else function(item))
        except Exception as error:
            name = f"{self.encoder_name}.{function}" if isinstance(function, str) else function_name(function)
            raise self._error(name, error) from from_user_code(error)

    def _error(self, name: str, error: Exception, which: str = "") -> EncodeError:
        """Return an `EncodeError` that names the function, the stage and the lane.

        `which` names the failed call of the stage, such as ", pack 3 (2 items)", or is "".
        """
        return EncodeError(
            f"{name} failed: {described(error)}. Fix it and resume.\n  stage {self._stage}{which} of {self._lane}"
        )


def _at_least(least: int, found: Any) -> int:
    """Return the number `found` as int. Raises ValueError if it is below `least`."""
    number = index(found)
    if number < least:
        raise ValueError(f"it is {number}, but an item has at least {least}")
    return number
