"""Documents of tokens end to end in packs, and packs in padded batches.

Two documents `ab.` and `c.` in a pack, and that pack in a batch of length 7 (`-` is masked, `_` is padding):

    tokens        a b . c .      a b . c . _ _
    labels        b . - . -      b . - . - - -
    position_ids  0 1 2 0 1      0 1 2 0 1 0 1
    cu_seqlens    0     3   5    0     3   5   7

The padding of a row is a segment of its own. So `cu_seqlens` of a batch covers all its tokens, flattened, and
`flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)` looks across
neither documents nor rows. Positions are 0 where a segment starts, and only there.

Documents that are not packed are rows of their own. Their batch has nothing but fields of B rows: `lengths` in the
place of `cu_seqlens` and `max_seqlen`.

For context parallelism each document can be padded to a multiple of 2 · cp tokens. Such padding is the document's tail,
which causal attention never looks at, and is counted in its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from savable_pipeline import Skip

IGNORED = -100  # the label that torch's cross entropy leaves out by default


def document(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `tokens` with `labels`, the next tokens; both int64 (n,).

    The last label is ignored.
    """
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    return {"tokens": tokens, "labels": labels}


def with_target(item: dict[str, Any]) -> dict[str, Any] | Skip:
    """Return the item, or `Skip("no target")` if all its labels are ignored.

    The mean loss over no targets is not a number.
    """
    return item if (item["labels"] != IGNORED).any() else Skip("no target")


def padded_length(tokens: int, multiple: int) -> int:
    """The number of tokens, rounded up to a multiple of `multiple`."""
    return -(-tokens // multiple) * multiple


def check_multiple(multiple: int, max_length: int | None) -> None:
    """Raise ValueError unless `max_length` is divisible by `multiple`."""
    if multiple < 1 or (max_length or multiple) % multiple:
        raise ValueError(f"multiple={multiple} must be at least 1 and divide max_length={max_length}")


def multiple_setting(multiple: int) -> dict[str, int]:
    """The entry of `settings()`; empty where documents are not padded."""
    return {} if multiple == 1 else {"multiple": multiple}


def is_packed(items: Sequence[dict[str, Any]]) -> bool:
    """Whether one of these is a pack of documents, and not a document by itself."""
    return any("cu_seqlens" in item for item in items)


def pack_tokens(documents: Sequence[dict[str, Any]], *, pad: int = 0, multiple: int = 1) -> dict[str, Any]:
    """Build one pack of documents with separate attention and positions.

    Each is padded to a `multiple`. The pack has T tokens.
    """
    lengths = [padded_length(len(each["tokens"]), multiple) for each in documents]
    return {
        "tokens": _joined([each["tokens"] for each in documents], lengths, pad),  # int64 (T,)
        "labels": _joined([each["labels"] for each in documents], lengths, IGNORED),  # int64 (T,)
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


def batch_documents(
    documents: Sequence[dict[str, Any]], *, pad: int, length: int | None = None, multiple: int = 1
) -> dict[str, Any]:
    """Build a batch of B documents, each a row of T tokens.

    T is `length`, or the longest document, padded to a multiple.

    Every field has B rows. Raises ValueError where a document is longer than `length`.
    """
    lengths = [len(each["tokens"]) for each in documents]
    length = length or padded_length(max(lengths), multiple)
    tokens = pad_rows([each["tokens"] for each in documents], pad, length)
    segments = [segment for used in lengths for segment in (used, length - used)]
    return {
        "tokens": tokens,  # int64 (B, T)
        "labels": pad_rows([each["labels"] for each in documents], IGNORED, length),  # int64 (B, T)
        "position_ids": _positions(segments).view(tokens.shape),  # int64 (B, T), 0 again where the padding begins
        "lengths": torch.tensor(lengths),  # int64 (B,), the tokens before the padding
    }


def pad_rows(rows: Sequence[torch.Tensor], fill: int, length: int) -> torch.Tensor:
    """Pad `rows`, each int64 (n,), to int64 (rows, length) with `fill`."""
    padded = torch.full((len(rows), length), fill)
    for target, row in zip(padded, rows, strict=True):
        if len(row) > length:
            raise ValueError(
                f"a pack of {len(row)} tokens exceeds the encoder's max_length={length}. Pass the same to OnlinePacker"
            )
        target[: len(row)] = row
    return padded


def _joined(parts: Sequence[torch.Tensor], lengths: Sequence[int], fill: int) -> torch.Tensor:
    """The parts end to end, `fill` behind each up to its length."""
    if all(len(part) == length for part, length in zip(parts, lengths, strict=True)):
        return torch.cat(list(parts))
    return torch.cat([pad_rows([part], fill, length)[0] for part, length in zip(parts, lengths, strict=True)])


def _positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
