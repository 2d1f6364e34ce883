"""`split`: cuts a batch into micro-batches of whole rows, which together are the batch; packs and images are cut
correctly.

Fields that a batch may have to be cut; each is required only where its kind of data occurs:

    of B rows             any tensor or list: `tokens`, `labels`, `position_ids`, `lengths`, `valid`, …
    of packs              `cu_seqlens`, where segments begin among the B · T tokens; `max_seqlen`, the longest
    of several samples    `sample_rows`, the row of each sample, and `sample_ids`: the loader's `ids=True`
    of images             `image_counts`, of B rows; `image`, and `image_index` into it
    of images in patches  `tile_counts` of the images; `grids` of the tiles; `patches`; `patch_cu_seqlens`,
                          `patch_max_seqlen`
    of videos             `video_counts`, of B rows; `video_grids`, `video_seconds`; `video_patches`
    of sounds             `audio_counts`, of B rows; `audio_frames` of each; `audio_mels`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_PATCHES = ("patches", "patch_cu_seqlens", "patch_max_seqlen", "video_patches")
_SAMPLES = ("sample_ids", "sample_rows")
_BY_COUNTS = {  # fields of which each element of another, which counts them, has several
    "image": "image_counts",
    "tile_counts": "image_counts",
    "grids": "tile_counts",
    "video_grids": "video_counts",
    "video_seconds": "video_counts",
    "audio_frames": "audio_counts",
    "audio_mels": "audio_frames",
}


def rows(batch: Any) -> int:
    """Return the number B of rows of a batch, counting rows that only fill it up (`valid`).

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
    special = {"max_seqlen", "cu_seqlens", *_PATCHES, *(name for name, by in _BY_COUNTS.items() if by in batch)}
    special |= set(_SAMPLES if _SAMPLES[1] in batch else ())
    sizes = {
        name: len(value)
        for name, value in batch.items()
        if name not in special and isinstance(value, torch.Tensor) and value.ndim
    }
    if len(set(sizes.values())) != 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "no field is a tensor with rows"
        raise ValueError(f"the number of rows of this batch is not known: {shown}")
    return next(iter(sizes.values()))


def split(batch: Mapping[str, Any], n: int, *, shared: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Split a batch into `n` batches of consecutive rows, whose numbers of rows differ by at most 1.

    Every part is what the encoder would have made of its rows, with rows as long as those of the whole: `cu_seqlens`
    begins at 0, and `max_seqlen`, `image_index` and the images are those of its rows. The loss of the batch is the sum
    over the parts of summed losses, divided by the targets of the whole batch; the mean of the parts' means is another
    number.

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
    whole = rows(batch)
    if not 1 <= n <= whole:
        raise ValueError(f"a batch of {whole} rows is split into 1 to {whole} parts, not {n}")
    size, more = divmod(whole, n)
    return _cut_at(batch, [part * size + min(part, more) for part in range(n + 1)], shared)


def micro_batches(batch: Mapping[str, Any], size: float, *, shared: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Split a batch into batches of `size` rows, the last one with the rest: Composer's `split_batch=`.

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
    whole = rows(batch)
    if size < 1 or int(size) != size:
        raise ValueError(f"a micro-batch has a whole number of rows, at least 1, not {size}")
    return _cut_at(batch, [*range(0, whole, int(size)), whole], shared)


def _cut_at(batch: Mapping[str, Any], borders: Sequence[int], shared: Iterable[str]) -> list[dict[str, Any]]:
    whole, kept, spans = rows(batch), set(shared), _Counted(batch)
    return [
        {
            name: value if name in kept else _part(batch, name, _RowSpan(start, stop, whole), spans)
            for name, value in batch.items()
        }
        for start, stop in pairwise(borders)
    ]


class _RowSpan(NamedTuple):
    """The rows `start` to `stop - 1` of `whole` ones."""

    start: int
    stop: int
    whole: int


class _Counted:
    """Where the images, tiles and patches of rows begin; and their videos and sounds."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch = batch

    def span(self, counts: str, rows: _RowSpan) -> tuple[int, int]:
        """The range, start and end, of these rows' elements among those that this field counts."""
        start, stop = self.span(_BY_COUNTS[counts], rows) if counts in _BY_COUNTS else (rows.start, rows.stop)
        return self._sums(self._batch[counts], start, stop)

    def patches(self, grids: str, rows: _RowSpan) -> tuple[int, int]:
        """The range, start and end, of these rows' patches in the tiles, or the videos, of these grids."""
        return self._sums(self._batch[grids].prod(1), *self.span(_BY_COUNTS[grids], rows))

    @staticmethod
    def _sums(counts: torch.Tensor, start: int, stop: int) -> tuple[int, int]:
        before, within = int(counts[:start].sum()), int(counts[start:stop].sum())
        return before, before + within


def _part(batch: Mapping[str, Any], name: str, rows: _RowSpan, counted: _Counted) -> Any:
    """A field of these rows."""
    value = batch[name]
    if name == "cu_seqlens":
        return _boundaries(value, *_tokens(batch, rows), name)
    if name == "max_seqlen" and "cu_seqlens" in batch:
        return _longest(_boundaries(batch["cu_seqlens"], *_tokens(batch, rows), "cu_seqlens"), value)
    if name in _SAMPLES and "sample_rows" in batch:
        own = (batch["sample_rows"] >= rows.start) & (batch["sample_rows"] < rows.stop)
        return value[own] - rows.start if name == "sample_rows" else value[own]
    if name == "video_patches" and "video_grids" in batch:
        return value[slice(*counted.patches("video_grids", rows))]
    if name in _PATCHES and "grids" in batch:
        return _patches(batch, name, counted.patches("grids", rows))
    if name == "image_index":
        first, _ = counted.span("image_counts", rows)
        own = value[rows.start : rows.stop]
        return own.where(own < 0, own - first)
    if name in _BY_COUNTS and _BY_COUNTS[name] in batch:
        start, stop = counted.span(_BY_COUNTS[name], rows)
        return value[start:stop]
    return _of_rows(name, value, rows)


def _tokens(batch: Mapping[str, Any], rows: _RowSpan) -> tuple[int, int]:
    """The range, start and end, of these rows' tokens among all B · T."""
    length = batch["tokens"].shape[1]
    return rows.start * length, rows.stop * length


def _patches(batch: Mapping[str, Any], name: str, span: tuple[int, int]) -> Any:
    if name == "patches":
        return batch[name][span[0] : span[1]]
    own = _boundaries(batch["patch_cu_seqlens"], *span, "patch_cu_seqlens")
    return own if name == "patch_cu_seqlens" else _longest(own, batch[name])


def _boundaries(whole: torch.Tensor, start: int, stop: int, name: str) -> torch.Tensor:
    """The boundaries of the segments from `start` to `stop`, counted from 0."""
    own = whole[(whole >= start) & (whole <= stop)]
    if not len(own) or int(own[0]) != start or int(own[-1]) != stop:
        raise ValueError(f"{name} has no boundary at {start} or at {stop}, where rows begin: a segment is in one row")
    return own - start


def _longest(boundaries: torch.Tensor, like: Any) -> Any:
    """The longest segment, as an int or, where the whole batch has a tensor, as one like it."""
    longest = int(boundaries.diff().max()) if len(boundaries) > 1 else 0
    return like.new_tensor(longest) if hasattr(like, "new_tensor") else longest


def _of_rows(name: str, value: Any, rows: _RowSpan) -> Any:
    import torch

    sized = value.ndim > 0 if isinstance(value, torch.Tensor) else isinstance(value, list | tuple)
    if not sized or len(value) != rows.whole:
        raise ValueError(
            f"the field {name!r} is not of {rows.whole} rows, so that it cannot be split with them: name it in shared= "
            "if each part is to have it as it is, or leave it out of the batch"
        )
    return value[rows.start : rows.stop]
