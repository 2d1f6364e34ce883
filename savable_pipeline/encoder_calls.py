"""`EncoderCalls`: an encoder's methods as a packer and a batcher call them: keyed, and with errors that say where."""

from __future__ import annotations

import weakref
from functools import cached_property
from operator import index
from typing import Any, Literal

from savable_pipeline.encoder import TaskEncoder
from savable_pipeline.errors import EncodeError
from savable_pipeline.global_rng import seeder
from savable_pipeline.rng import Rng
from savable_pipeline.stage import Stage


class EncoderCalls:
    """What one stage asks of an encoder to `combine` items into packs or batches. All raise `EncodeError`."""

    def __init__(self, stage: Stage, encoder: TaskEncoder, combine: Literal["pack", "batch"]) -> None:
        self.encoder = encoder
        self._stage = weakref.proxy(stage)  # so that a stage is freed when it is dropped, with what it holds
        self._name = type(stage).__name__
        self._what = combine
        self._combined = encoder.pack if combine == "pack" else encoder.batch
        self._seed_globals = seeder(encoder.global_rng)

    @cached_property
    def key(self) -> int:
        """What the stage's random numbers are keyed with."""
        key: int = self._stage.stage_key(self._what)
        return key

    def combined(self, items: list[Any], number: int) -> Any:
        """The pack or batch number `number` of the lane, of these items."""
        note = self._stage.lane.note
        if note is not None:
            note[0] = self._stage.depth
        rng = Rng(self.key, (number, 0, 0))
        if self._seed_globals is not None:
            self._seed_globals(rng.key)
        try:
            return self._combined(items, rng)
        except Exception as error:
            raise EncodeError(
                f"{type(self.encoder).__name__}.{self._what} raised {type(error).__name__}: {error}; stage "
                f"{self._name}, {self._what} {number} of {self._stage.lane}, {len(items)} items"
            ) from error

    def length(self, item: Any, *, least: int) -> int:
        """How many tokens an item takes, and must take at least."""
        try:
            length = index(self.encoder.length(item))  # NumPy's integers too, which a state could not hold
            if length < least:
                raise ValueError(f"a length of {length}; every item takes at least {least}")
        except Exception as error:
            raise self._failed("length", error) from error
        return length

    def images(self, item: Any) -> int:
        """How many images an item has."""
        try:
            images = index(self.encoder.images(item))
            if images < 0:
                raise ValueError(f"{images} images")
        except Exception as error:
            raise self._failed("images", error) from error
        return images

    def cut(self, item: Any, start: int, stop: int) -> Any:
        """The tokens `start` to `stop - 1` of an item."""
        try:
            part = self.encoder.cut(item, start, stop)
            found = self.encoder.length(part)
            if found != stop - start:
                raise ValueError(f"{found} tokens, not the {stop - start} from {start} on that were asked for")
        except Exception as error:
            raise self._failed("cut", error) from error
        return part

    def _failed(self, method: str, error: Exception) -> EncodeError:
        return EncodeError(
            f"{type(self.encoder).__name__}.{method} raised {type(error).__name__}: {error}; stage "
            f"{self._name} of {self._stage.lane}"
        )
