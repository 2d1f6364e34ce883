"""`EncoderCalls`: how packer and batcher call an encoder: with keyed random numbers, and errors that name the stage."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal, TypeGuard, TypeVar, cast

from savable_pipeline.core.global_rng import seeder
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import described, from_user_code
from savable_pipeline.core.rng import Rng
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import function_name
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder, encoder_settings

T = TypeVar("T")


def check_encoder(stage: str, encoder: object) -> None:
    """Raise ValueError unless this is an encoder; for a class or a function with what to write instead."""
    if isinstance(encoder, TaskEncoder):
        return
    hint = ""
    if isinstance(encoder, type):
        hint = f". Pass an instance, such as {encoder.__name__}()"
    elif callable(encoder):
        hint = ". Pass a function to .map, or write it as `encode` of a TaskEncoder"
    raise ValueError(f"{stage} takes a TaskEncoder, not {encoder!r}{hint}")


def made_encoder(stage: str, encoder: object, lane: Lane) -> TaskEncoder:
    """The encoder, or the one that a function makes, once a process. Raises ValueError if it is neither."""
    if is_maker(encoder):
        made = lane.shared(("encoder", encoder), lane.own(encoder))  # of a thread alone, as a copy is
        check_encoder(stage, made)
        return cast(TaskEncoder, made)
    check_encoder(stage, encoder)
    return lane.own(cast(TaskEncoder, encoder))


def is_maker(encoder: object) -> TypeGuard[Callable[[], Any]]:
    """Whether this is a function that may make an encoder: it needs no arguments."""
    if isinstance(encoder, type | TaskEncoder) or not callable(encoder):
        return False
    with contextlib.suppress(TypeError, ValueError):
        inspect.signature(encoder).bind()
        return True
    return False


class EncoderCalls:
    """Calls an encoder's methods for one stage, which combines items into packs or batches.

    `encoder=None` is the one upstream. Raises `EncodeError` where its method raises or returns a wrong result.
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
        if combine == "pack" and getattr(encoder.pack, "__func__", None) is TaskEncoder.pack:
            mapped = type(encoder).__name__ == "MappedFunction"
            fix = "Use .encode() with an encoder that has pack()" if mapped else "Write one, or remove the packer"
            raise ValueError(f"{stage}: {type(encoder).__name__} has no pack(items, rng). {fix}.")
        self.encoder = encoder
        self._is_upstream = encoder is upstream.encoder
        self.packs_all = encoder.one_to_one and combine == "pack"  # none is skipped
        self.encoder_name = type(encoder).__name__
        self._stage = stage
        self._lane = upstream.lane
        self._key: int | None = None
        self._combine = combine
        self._has_images = getattr(encoder.images, "__func__", None) is not TaskEncoder.images
        self._combined = encoder.pack if combine == "pack" else encoder.batch
        self._seed_globals = seeder(encoder.global_rng)

    def settings(self) -> dict[str, Any]:
        """What the stage's settings have of the encoder; nothing of the one upstream, whose stage lists them."""
        return {} if self._is_upstream else encoder_settings(self.encoder)

    def key(self, info: StageInfo) -> int:
        """The 64-bit key of the stage's random numbers."""
        if self._key is None:
            self._key = info.key(self._combine)
        return self._key

    def combined(self, items: list[Any], number: int, info: StageInfo) -> Any:
        """The lane's pack or batch `number`, made of these items."""
        rng = self._begun(self.key(info), number, info)
        try:
            made = self._combined(items, rng)
            if type(made) is Skip and self.packs_all:
                raise TypeError(f"one_to_one is set, but it returned {made!r}")
            return made
        except Exception as error:
            which = f", {self._combine} {number} ({len(items)} items)"
            raise self._failed(self._combine, error, which) from from_user_code(error)

    def selected(self, select: Callable[[list[Any], Rng], T], items: list[Any], number: int, info: StageInfo) -> T:
        """What a function of the user's says about these items, in round `number` of the lane."""
        rng = self._begun(info.key("select"), number, info)
        try:
            return select(items, rng)
        except Exception as error:
            which = f", round {number} ({len(items)} items)"
            raise self._error("select", error, which) from from_user_code(error)

    def _begun(self, key: int, number: int, info: StageInfo) -> Rng:
        """The random numbers of a call, for which the global generators are seeded and the stage is reported."""
        status = info.lane.worker.status
        if status is not None:
            status[0] = info.depth
        rng = Rng(key, (number, 0, 0))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        return rng

    def sizes(self, items: Sequence[Any]) -> tuple[Size, ...] | None:
        """Length and images of each item; None if the encoder does not say how to measure one."""
        if getattr(self.encoder.length, "__func__", None) is TaskEncoder.length:
            return None
        return tuple((self.length(item, least=0), self.images(item)) for item in items)

    def length(self, item: Any, *, least: int) -> int:
        """The length of an item in tokens, which must be at least `least`."""
        try:
            length = index(self.encoder.length(item))  # a state cannot hold NumPy's integers
            if length < least:
                raise ValueError(f"a length of {length}, but an item has at least {least}")
        except Exception as error:
            raise self._failed("length", error) from from_user_code(error)
        return length

    def checked_length(self, length: int, *, least: int) -> int:
        """A length that the encoder declared without encoding, at least `least`."""
        if length < least:
            error = ValueError(f"a length of {length}, but an item has at least {least}")
            raise self._failed("length_of", error) from error
        return length

    def images(self, item: Any) -> int:
        """The number of images of an item."""
        if not self._has_images:
            return 0
        try:
            images = index(self.encoder.images(item))
            if images < 0:
                raise ValueError(f"{images} images")
        except Exception as error:
            raise self._failed("images", error) from from_user_code(error)
        return images

    def cut(self, item: Any, start: int, stop: int) -> Any:
        """The tokens `start` to `stop - 1` of an item."""
        try:
            part = self.encoder.cut(item, start, stop)
            found = self.encoder.length(part)
            if found != stop - start:
                raise ValueError(f"{found} tokens instead of {stop - start}")
        except Exception as error:
            raise self._failed("cut", error) from from_user_code(error)
        return part

    def value(self, function: str | Callable[[Any], Any], item: Any, checked: Callable[[Any], Any]) -> Any:
        """The result of a function of an item, or of a method of the encoder, after `checked`."""
        try:
            return checked(getattr(self.encoder, function)(item) if isinstance(function, str) else function(item))
        except Exception as error:
            name = f"{self.encoder_name}.{function}" if isinstance(function, str) else function_name(function)
            raise self._error(name, error) from from_user_code(error)

    def _failed(self, method: str, error: Exception, which: str = "") -> EncodeError:
        return self._error(f"{self.encoder_name}.{method}", error, which)

    def _error(self, name: str, error: Exception, which: str = "") -> EncodeError:
        return EncodeError(
            f"{name} failed: {described(error)}. Fix it and resume.\n  stage {self._stage}{which} of {self._lane}"
        )
