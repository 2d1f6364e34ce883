"""`TaskEncoder`: what a sample becomes, how items are packed, and what a batch is; written by the user."""

from __future__ import annotations

from typing import Any

from savable_pipeline.batch_memory import collate
from savable_pipeline.rng import Rng
from savable_pipeline.sample import Sample


class Skip:
    """Returned by `TaskEncoder.encode` in place of an item: leave this sample out, and count it under `reason`."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"Skip({self.reason!r})"


class TaskEncoder:
    """Turns samples into items, items into packs, and items or packs into batches.

    Each method must be pure: its result may depend on its arguments, the encoder's settings and random numbers
    drawn during the call, and on nothing else. Random numbers come from `rng`, which is keyed by the seed of the run
    and by what the call is for. Python's `random`, `numpy.random` and `torch` are seeded for the call as well, so
    that transforms that draw from them are exact unchanged; that costs about 7 µs a call, and `global_rng` turns
    it off.
    """

    global_rng: bool | tuple[str, ...] = True
    """The global generators to seed for each call: True (all), False (none), or some of "python", "numpy", "torch"."""

    one_to_one: bool = False
    """Whether `encode` gives one item of every sample, never `Skip` or several: a finite loader then has a length."""

    def encode(self, sample: Sample, rng: Rng) -> Any:
        """One item; or `Skip(reason)`; or an iterator of items (an object with `__next__`; a list is one item)."""
        raise NotImplementedError(f"{type(self).__name__} has no encode(sample, rng)")

    def length(self, item: Any) -> int:
        """How much of a pack's `max_length` the item takes, in tokens. Needed by `OnlinePacker` only."""
        return len(item)

    def images(self, item: Any) -> int:
        """How much of the `max_images` of an `OnlinePacker` the item takes: none, unless a subclass says otherwise."""
        return 0

    def cut(self, item: Any, start: int, stop: int) -> Any:
        """The tokens `start` to `stop - 1` of an item, as an item of that `length`.

        Needed by `OnlinePacker` where it truncates or splits items.
        """
        return item[start:stop]

    def pack(self, items: list[Any], rng: Rng) -> Any:
        """One item made of several. Needed by `OnlinePacker` only."""
        raise NotImplementedError(f"{type(self).__name__} has no pack(items, rng); OnlinePacker needs one")

    def batch(self, items: list[Any], rng: Rng) -> Any:
        """A batch made of items or packs; by default what torch's `default_collate` makes: equal shapes are stacked."""
        return collate(items)

    def settings(self) -> dict[str, Any]:
        """What a saved state must agree on: every setting that changes what a sample becomes, as plain values."""
        return {}


def encoder_settings(encoder: TaskEncoder) -> dict[str, Any]:
    """An encoder's class and settings, as part of a stage's settings, whose names they may share."""
    own = {f"encoder.{name}": value for name, value in encoder.settings().items()}
    return {"encoder": type(encoder).__qualname__, **own}
