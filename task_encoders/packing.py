"""Documents of tokens, end to end in packs, and packs in padded batches; shared by the encoders.

Two documents `ab.` and `c.` in a pack, and that pack in a batch of length 7 (`-` is masked, `_` is padding):

    tokens        a b . c .      a b . c . _ _
    labels        b . - . -      b . - . - - -
    position_ids  0 1 2 0 1      0 1 2 0 1 0 1
    cu_seqlens    0     3   5    0     3   5   7

The padding of a row is a segment of its own. So `cu_seqlens` of a batch covers all its tokens, flattened, and
`flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)` looks across
neither documents nor rows. Positions are 0 where a segment starts, and only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from savable_pipeline import Skip

IGNORED = -100  # the label that torch's cross entropy leaves out by default


def document(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """A document of `tokens`, int64 (n,), with `labels`, int64 (n,): the next token; none after the last."""
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    return {"tokens": tokens, "labels": labels}


def with_target(item: dict[str, Any]) -> dict[str, Any] | Skip:
    """The item; or `Skip("no target")` where all its labels are ignored: a loss over nothing is not a number."""
    return item if (item["labels"] != IGNORED).any() else Skip("no target")


def pack_tokens(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One pack of documents, T tokens in all, attention and positions of each on its own."""
    lengths = [len(each["tokens"]) for each in documents]
    return {
        "tokens": torch.cat([each["tokens"] for each in documents]),  # int64 (T,)
        "labels": torch.cat([each["labels"] for each in documents]),  # int64 (T,)
        "position_ids": _positions(lengths),  # int64 (T,)
        "cu_seqlens": _boundaries(lengths),  # int32 (documents + 1,)
        "max_seqlen": max(lengths),
    }


def batch_tokens(packs: Sequence[dict[str, Any]], *, pad: int, length: int | None = None) -> dict[str, Any]:
    """B packs as rows of T tokens: `length`, or as many as the longest pack has.

    Raises ValueError where a pack is longer than `length`.
    """
    rows = [pack["tokens"] for pack in packs]
    length = length or max(map(len, rows))
    tokens = pad_rows(rows, pad, length)
    segments: list[int] = []
    for pack, row in zip(packs, rows, strict=True):
        segments += pack["cu_seqlens"].diff().tolist()
        if len(row) < length:
            segments.append(length - len(row))
    return {
        "tokens": tokens,  # int64 (B, T)
        "labels": pad_rows([pack["labels"] for pack in packs], IGNORED, length),  # int64 (B, T)
        "position_ids": _positions(segments).view(tokens.shape),  # int64 (B, T)
        "cu_seqlens": _boundaries(segments),  # int32 (segments + 1,), from 0 to B * T
        "max_seqlen": max(segments),
    }


def pad_rows(rows: Sequence[torch.Tensor], fill: int, length: int) -> torch.Tensor:
    """`rows`, each int64 (n,) with n ≤ `length`, as int64 (rows, length) with `fill` after each."""
    padded = torch.full((len(rows), length), fill)
    for target, row in zip(padded, rows, strict=True):
        if len(row) > length:
            raise ValueError(
                f"a pack of {len(row)} tokens is longer than the encoder's max_length of {length}; "
                f"give OnlinePacker the same max_length"
            )
        target[: len(row)] = row
    return padded


def _positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
