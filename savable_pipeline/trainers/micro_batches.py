"""`split` and `micro_batches`: split a batch into batches of consecutive rows.

Packs and images are split correctly. Each of these fields is needed only if its kind of data occurs:

    of B rows             any tensor or list: `tokens`, `labels`, `position_ids`, `lengths`, `valid`, …
    of packs              `cu_seqlens`, the starts of segments among the B · T tokens; `max_seqlen`, the longest
    of several samples    `sample_rows`, the row of each sample, and `sample_ids`: the loader's `sample_ids=True`
    of images             `image_counts`, of B rows; `image`, and `image_index` into it
    of images in patches  `tile_counts` of the images; `grids` of the tiles; `patches`; `patch_cu_seqlens`,
                          `patch_max_seqlen`
    of videos             `video_counts`, of B rows; `video_grids`, `video_seconds`; `video_patches`
    of audio              `audio_counts`, of B rows; `audio_frames` of each; `audio_mels`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_PATCHES = ("patches", "patch_cu_seqlens", "patch_max_seqlen", "video_patches")
_SAMPLES = ("sample_ids", "sample_rows")
_BY_COUNTS = {  # a field, and the field whose values count its elements: images per row, tiles per image
    "image": "image_counts",
    "tile_counts": "image_counts",
    "grids": "tile_counts",
    "video_grids": "video_counts",
    "video_seconds": "video_counts",
    "audio_frames": "audio_counts",
    "audio_mels": "audio_frames",
}


def rows(batch: Any) -> int:
    """Return the number B of rows of a batch, including padding rows (`valid`).

    Args:
        batch: A dict of fields, or anything with a length.

    Returns:
        The length of `tokens` or, without it, the first dimension of all tensors.

    Raises:
        ValueError: The tensors differ in their first dimension.

    Example:
        >>> from savable_pipeline.trainers.micro_batches import rows
        >>> rows({"tokens": torch.zeros(2, 5), "cu_seqlens": torch.tensor([0, 3, 5, 10])})
        2
    """
    import torch

    if not isinstance(batch, Mapping):
        return len(batch)
    if "tokens" in batch:
        return len(batch["tokens"])
    not_by_row = {"max_seqlen", "cu_seqlens", *_PATCHES}  # fields that do not have one element per row
    not_by_row |= {name for name, counts in _BY_COUNTS.items() if counts in batch}
    not_by_row |= set(_SAMPLES if "sample_rows" in batch else ())
    sizes = {
        name: len(value)
        for name, value in batch.items()
        if name not in not_by_row and isinstance(value, torch.Tensor) and value.ndim
    }
    if len(set(sizes.values())) != 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "no field is a tensor with rows"
        raise ValueError(
            f"the number of rows of this batch is not known: {shown}. Give each tensor the same number of rows."
        )
    return next(iter(sizes.values()))


def split(batch: Mapping[str, Any], n: int, *, shared: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Split a batch into `n` batches of consecutive rows.

    Their numbers of rows differ by at most 1.

    Every part is the batch that the encoder would have built of its rows, but with the row length of the whole.
    `cu_seqlens` starts at 0, and `max_seqlen`, `image_index` and the images are those of its rows. The loss of the
    batch is the sum over the parts of summed losses, times the `loss_scale` of all parts. The mean of the parts' means
    differs.

    Args:
        batch: A batch of B rows.
        n: The number of parts, 1 to B.
        shared: Names of fields that every part gets whole.

    Returns:
        The parts, in order.

    Raises:
        ValueError: There are fewer rows than `n`, or a field is neither shared nor known nor of B rows.

    Example:
        >>> from savable_pipeline.trainers.micro_batches import split
        >>> batch = {"tokens": torch.arange(8).view(2, 4), "cu_seqlens": torch.tensor([0, 3, 4, 8]), "max_seqlen": 4}
        >>> [(part["cu_seqlens"].tolist(), part["max_seqlen"]) for part in split(batch, 2)]
        [([0, 3, 4], 3), ([0, 4], 4)]
    """
    all_rows = rows(batch)
    if not 1 <= n <= all_rows:
        raise ValueError(f"n must be 1 to {all_rows}, the rows of the batch, not {n}")
    size, remainder = divmod(all_rows, n)
    return _split_at(batch, [part * size + min(part, remainder) for part in range(n + 1)], shared)


def micro_batches(batch: Mapping[str, Any], size: float, *, shared: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Split a batch into batches of `size` rows, the last one with the rest.

    This is Composer's `split_batch=`.

    Args:
        batch: A batch of B rows.
        size: Rows of a part: a whole number, at least 1.
        shared: Names of fields that every part gets whole.

    Returns:
        The parts, in order.

    Raises:
        ValueError: As for `split`.

    Example:
        >>> from savable_pipeline.trainers.micro_batches import micro_batches
        >>> [len(part["id"]) for part in micro_batches({"id": torch.arange(5)}, 2)]
        [2, 2, 1]
    """
    all_rows = rows(batch)
    if size < 1 or int(size) != size:
        raise ValueError(f"size must be an int of at least 1, not {size}")
    return _split_at(batch, [*range(0, all_rows, int(size)), all_rows], shared)


def _split_at(batch: Mapping[str, Any], borders: Sequence[int], shared: Iterable[str]) -> list[dict[str, Any]]:
    """Split a batch at these row indices, the first of which is 0 and the last the number of rows."""
    shared_fields = set(shared)
    parts = [_Rows(batch, start, stop, borders[-1]) for start, stop in pairwise(borders)]
    return [
        {name: value if name in shared_fields else part.field(name) for name, value in batch.items()} for part in parts
    ]


class _Rows(NamedTuple):
    """Rows `start` to `stop - 1` of the `all_rows` rows of a batch."""

    batch: Mapping[str, Any]
    start: int
    stop: int
    all_rows: int

    def field(self, name: str) -> Any:
        """Return the elements of a field of the batch that belong to these rows."""
        batch, value = self.batch, self.batch[name]
        if name == "cu_seqlens":
            return _boundaries(value, self._tokens, name)
        if name == "max_seqlen" and "cu_seqlens" in batch:
            return _longest(_boundaries(batch["cu_seqlens"], self._tokens, "cu_seqlens"), value)
        if name in _SAMPLES and "sample_rows" in batch:
            is_own = (batch["sample_rows"] >= self.start) & (batch["sample_rows"] < self.stop)
            return value[is_own] - self.start if name == "sample_rows" else value[is_own]
        if name == "video_patches" and "video_grids" in batch:
            return value[self._patches("video_grids")]
        if name == "patches" and "grids" in batch:
            return value[self._patches("grids")]
        if name in _PATCHES and "grids" in batch:
            boundaries = _boundaries(batch["patch_cu_seqlens"], self._patches("grids"), "patch_cu_seqlens")
            return boundaries if name == "patch_cu_seqlens" else _longest(boundaries, value)
        if name == "image_index":
            index = value[self.start : self.stop]
            return index.where(index < 0, index - self._elements("image_counts").start)
        if name in _BY_COUNTS and _BY_COUNTS[name] in batch:
            return value[self._elements(_BY_COUNTS[name])]
        return self._slice_rows(name, value)

    @property
    def _tokens(self) -> slice:
        """The range of these rows' tokens among all B · T."""
        length = self.batch["tokens"].shape[1]
        return slice(self.start * length, self.stop * length)

    def _elements(self, counts: str) -> slice:
        """Return the range of these rows' elements, such as images, which the field `counts` counts."""
        counted = self._elements(_BY_COUNTS[counts]) if counts in _BY_COUNTS else slice(self.start, self.stop)
        return _range_of(self.batch[counts], counted)

    def _patches(self, grids: str) -> slice:
        """Return the range of these rows' patches, for the field `grids` of tiles or videos."""
        return _range_of(self.batch[grids].prod(1), self._elements(_BY_COUNTS[grids]))

    def _slice_rows(self, name: str, value: Any) -> Any:
        """Return these rows of a field. Raises ValueError if it does not have one element per row."""
        import torch

        sized = value.ndim > 0 if isinstance(value, torch.Tensor) else isinstance(value, list | tuple)
        if not sized or len(value) != self.all_rows:
            raise ValueError(
                f"field {name!r} does not have {self.all_rows} rows. Add it to shared= to copy it to each part, or "
                "remove it."
            )
        return value[self.start : self.stop]


def _range_of(counts: torch.Tensor, counted: slice) -> slice:
    """Return the range of the elements that `counts[counted]` counts, among all elements."""
    start = int(counts[: counted.start].sum())
    return slice(start, start + int(counts[counted].sum()))


def _boundaries(boundaries: torch.Tensor, span: slice, name: str) -> torch.Tensor:
    """Return the boundaries of the segments in a span, relative to its start.

    Raises ValueError if a segment of the field `name` crosses the start or the stop of the span.
    """
    found: torch.Tensor = boundaries[(boundaries >= span.start) & (boundaries <= span.stop)]
    if not len(found) or int(found[0]) != span.start or int(found[-1]) != span.stop:
        where = f"at {span.start} or at {span.stop}"
        raise ValueError(f"{name} has no boundary {where}. Let each row start a segment.")
    return found - int(span.start)


def _longest(boundaries: torch.Tensor, like: Any) -> Any:
    """Return the length of the longest segment.

    It is a tensor of the dtype and device of `like` if this is a tensor, and an int otherwise.
    """
    longest = int(boundaries.diff().max()) if len(boundaries) > 1 else 0
    return like.new_tensor(longest) if hasattr(like, "new_tensor") else longest
