"""`ToldSize`: the length and images that an encoder tells of a sample, and the check that its item has them."""

from __future__ import annotations

from operator import index
from typing import Any

from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder


class ToldSize:
    """Asks `length_of` and `images_of` of one encoder."""

    def __init__(self, encoder: TaskEncoder) -> None:
        self._encoder = encoder
        self.tells = _has(encoder, "length_of") and (_has(encoder, "images_of") or not _has(encoder, "images"))

    def of(self, sample: Sample) -> Size | None:
        """(length, images) of the item of a sample; None if only encoding can tell. Raises what the encoder raises."""
        if not self.tells:
            return None
        length = self._encoder.length_of(sample)
        return None if length is None else (index(length), index(self._encoder.images_of(sample)))

    def check(self, sample: Sample, item: Any) -> None:
        """Raise `EncodeError` if the item of a sample has another size than the encoder told."""
        told = self.of(sample)
        if told is None:
            return
        name = type(self._encoder).__name__
        where = f"stage Encode, shard {sample.shard}, key {sample.key!r}"
        if type(item) is Skip:
            raise EncodeError(
                f"{name}.length_of told {told[0]}, but encode skipped the sample, {item.reason!r}; {where}: length_of "
                "must be None for a sample that encode skips"
            )
        if hasattr(item, "__next__"):
            raise EncodeError(
                f"{name}.length_of told {told[0]}, but encode makes several items of the sample; {where}: length_of "
                "must be None for it"
            )
        found = self._encoder.length(item), self._encoder.images(item)
        for method, before, after in zip(("length", "images"), told, found, strict=True):
            if before != after:
                raise EncodeError(
                    f"{name}.{method}_of told {before}, but {method} of the item is {after}; {where}: the two must "
                    "agree for every sample"
                )


def _has(encoder: TaskEncoder, method: str) -> bool:
    """Whether an encoder has a method of its own in place of the default."""
    return getattr(getattr(encoder, method), "__func__", None) is not getattr(TaskEncoder, method)
