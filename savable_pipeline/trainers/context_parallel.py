"""Batches split along their tokens for context parallelism, with equal work.

A document of 8 tokens over 2 ranks is split into 4 pieces, and a rank gets one from each half (a zigzag). Its first
tokens attend to few earlier tokens, its last ones to many.

    tokens   0 1 │ 2 3 │ 4 5 │ 6 7
    rank       0     1     1     0       rank 0: 0 1 6 7       rank 1: 2 3 4 5

So the length of each document, and of the padding of each row, must be a multiple of 2 · ranks. Set `multiple=` of the
encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def context_index(batch: Mapping[str, Any], rank: int, size: int) -> torch.Tensor:
    """Return the indices of a rank's tokens among the B · T tokens of a batch.

    Args:
        batch: A batch with `tokens` of shape (B, T). `cu_seqlens` has the starts of documents. Without it, each row
            is one.
        rank: This rank among those that share the batch, from 0.
        size: The number of ranks that share it.

    Returns:
        int64 (B · T / size,), in increasing order within each document.

    Raises:
        ValueError: `rank` is not in 0 … size - 1, or the length of a document is no multiple of 2 · size.

    Example:
        >>> from savable_pipeline.trainers.context_parallel import context_index
        >>> context_index({"tokens": torch.zeros(1, 8)}, 0, 2).tolist()
        [0, 1, 6, 7]
    """
    import torch

    if not 0 <= rank < size:
        raise ValueError(f"rank must be 0 to {size - 1}, not {rank}")
    tokens = batch["tokens"]
    rows, length = tokens.shape
    borders: torch.Tensor = batch.get("cu_seqlens", torch.arange(rows + 1, device=tokens.device) * length).long()
    lengths = borders.diff()
    if len(wrong := lengths[lengths % (2 * size) != 0]):
        raise ValueError(
            f"a document or padding has {int(wrong[0])} tokens, not a multiple of 2 * {size}. Set "
            f"multiple={2 * size} in the encoder, and such a max_length."
        )
    own_lengths = lengths // size  # of this rank's part of each document
    # the document of each of this rank's tokens, and the position of the token in this rank's part of that document
    document = torch.arange(len(lengths), device=tokens.device).repeat_interleave(own_lengths)
    position = torch.arange(len(document), device=tokens.device) - (borders[:-1] // size)[document]
    piece_length = (lengths // (2 * size))[document]
    # The first half of a rank's tokens is piece `rank` of the document. The second half is piece 2 · size - 1 - `rank`,
    # so 2 · size - 2 - `rank` pieces further, because `position` already counts the first half.
    is_second_half = position >= piece_length
    return borders[document] + position + piece_length * torch.where(is_second_half, 2 * size - 2 - rank, rank)


def cut_context(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return a rank's part of a batch, with tokens of shape (B, T / size).

    Every field of shape (B, T, …) is split as `context_index` says. `position_ids` remain positions in the document.
    `cu_seqlens` has the starts of the parts of documents, and `max_seqlen` is the longest part, 1 / size of the whole.
    Other fields, such as images, stay whole.

    Args:
        batch: A batch with `tokens` of shape (B, T).
        rank: This rank among those that share the batch, from 0.
        size: The number of ranks that share it.

    Returns:
        The rank's part.

    Raises:
        ValueError: As for `context_index`.

    Example:
        >>> from savable_pipeline.trainers.context_parallel import cut_context
        >>> batch = {"tokens": torch.arange(12).view(1, 12), "cu_seqlens": torch.tensor([0, 8, 12]), "max_seqlen": 8}
        >>> part = cut_context(batch, 1, 2)
        >>> part["tokens"].tolist(), part["cu_seqlens"].tolist(), part["max_seqlen"]
        ([[2, 3, 4, 5, 9, 10]], [0, 4, 6], 4)
    """
    index = context_index(batch, rank, size)
    rows, length = batch["tokens"].shape

    def own_part(value: Any) -> Any:
        return value.flatten(0, 1)[index].unflatten(0, (rows, length // size)) if _is_per_token(value, batch) else value

    own_lengths = {name: batch[name] // size for name in ("cu_seqlens", "max_seqlen") if name in batch}
    return {name: own_part(value) for name, value in batch.items()} | own_lengths


def join_context(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the parts of all ranks to the whole batch, the inverse of `cut_context`.

    Args:
        parts: The parts of all ranks, in the order of the ranks.

    Returns:
        The whole batch.

    Raises:
        ValueError: There are no parts, or they are of different batches.

    Example:
        >>> from savable_pipeline.trainers.context_parallel import cut_context, join_context
        >>> batch = {"tokens": torch.arange(8).view(1, 8)}
        >>> join_context([cut_context(batch, rank, 2) for rank in (0, 1)])
        {'tokens': tensor([[0, 1, 2, 3, 4, 5, 6, 7]])}
    """
    import torch

    if not parts or any(part["tokens"].shape != parts[0]["tokens"].shape for part in parts):
        raise ValueError("join_context needs the parts of all ranks of one batch, in the order of the ranks")
    size, first = len(parts), parts[0]
    rows, length = first["tokens"].shape
    whole_lengths = {name: first[name] * size for name in ("cu_seqlens", "max_seqlen") if name in first}
    # `context_index` reads the shape of tokens, but not their values
    layout = {"tokens": first["tokens"].new_empty(rows, length * size), **whole_lengths}
    index = torch.cat([context_index(layout, rank, size) for rank in range(size)])

    def join_field(name: str) -> Any:
        """Join a field of all parts in the order of tokens.

        Fields that are not per token are equal in all parts.
        """
        value = first[name]
        if not _is_per_token(value, first):
            return value
        whole_field = value.new_empty(rows * length * size, *value.shape[2:])
        whole_field[index] = torch.cat([part[name].flatten(0, 1) for part in parts])
        return whole_field.unflatten(0, (rows, length * size))

    return {name: join_field(name) for name in first} | whole_lengths


def _is_per_token(value: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether a field has a value for each token."""
    return getattr(value, "ndim", 0) >= 2 and value.shape[:2] == batch["tokens"].shape
