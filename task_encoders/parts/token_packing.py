"""Packs of tokenized documents, and padded batches of packs or of documents.

The documents `ab.` and `c.` in a pack, and that pack in a batch of length 7 (`-` is ignored by the loss, `_` is
padding):

    tokens        a b . c .      a b . c . _ _
    labels        b . - . -      b . - . - - -
    position_ids  0 1 2 0 1      0 1 2 0 1 0 1
    cu_seqlens    0     3   5    0     3   5   7

The padding of a row is a segment of its own. So `cu_seqlens` of a batch covers all its tokens, flattened, and
`flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)` looks across
neither documents nor rows. Positions are 0 where a segment starts, and only there.

Documents that are not packed are rows of a batch. All fields of such a batch have B rows, with `lengths` instead of
`cu_seqlens` and `max_seqlen`.

For context parallelism, each document can be padded to a multiple of 2 · cp tokens. Such padding is at the end of the
document, so the document's tokens never attend to it. It counts in the document's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from savable_pipeline import Skip

IGNORED = -100  # torch's cross entropy ignores this label by default


def document(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an item with `tokens` and `labels`, int64 (n,).

    A label is the next token, and the last label is ignored.
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
    """Round a number of tokens up to a multiple of `multiple`."""
    return -(-tokens // multiple) * multiple


def check_multiple(multiple: int, max_length: int | None) -> None:
    """Raise ValueError unless `max_length` is divisible by `multiple`."""
    if multiple < 1 or (max_length or multiple) % multiple:
        raise ValueError(f"multiple={multiple} must be at least 1 and divide max_length={max_length}")


def multiple_setting(multiple: int) -> dict[str, int]:
    """Return the entry of `settings()`, which is empty if documents are not padded."""
    return {} if multiple == 1 else {"multiple": multiple}


def is_packed(items: Sequence[dict[str, Any]]) -> bool:
    """Return whether one of the items is a pack of documents."""
    return any("cu_seqlens" in item for item in items)


def pack_tokens(documents: Sequence[dict[str, Any]], *, pad: int = 0, multiple: int = 1) -> dict[str, Any]:
    """Build one pack of documents with separate attention and positions.

    The pack has T tokens. Each document is padded to a multiple of `multiple`.
    """
    lengths = [padded_length(len(each["tokens"]), multiple) for each in documents]
    return {
        "tokens": _concatenate([each["tokens"] for each in documents], lengths, pad),  # int64 (T,)
        "labels": _concatenate([each["labels"] for each in documents], lengths, IGNORED),  # int64 (T,)
        "position_ids": _positions(lengths),  # int64 (T,)
        "cu_seqlens": _boundaries(lengths),  # int32 (documents + 1,)
        "max_seqlen": max(lengths),
    }


def batch_tokens(packs: Sequence[dict[str, Any]], *, pad: int, length: int | None = None) -> dict[str, Any]:
    """Build a batch of B packs, each a row of T tokens.

    T is `length`, or if that is None, the length of the longest pack. Raises ValueError if a pack is longer than
    `length`.
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

    T is `length`, or the length of the longest document, rounded up to a multiple of `multiple`. Raises ValueError if a
    document is longer than `length`.
    """
    lengths = [len(each["tokens"]) for each in documents]
    length = length or padded_length(max(lengths), multiple)
    tokens = pad_rows([each["tokens"] for each in documents], pad, length)
    segments = [segment for text in lengths for segment in (text, length - text)]  # of each row: text, padding
    return {
        "tokens": tokens,  # int64 (B, T)
        "labels": pad_rows([each["labels"] for each in documents], IGNORED, length),  # int64 (B, T)
        "position_ids": _positions(segments).view(tokens.shape),  # int64 (B, T), again from 0 where padding starts
        "lengths": torch.tensor(lengths),  # int64 (B,), the tokens before the padding
    }


def pad_rows(rows: Sequence[torch.Tensor], fill: int, length: int) -> torch.Tensor:
    """Pad `rows`, each int64 (n,), to int64 (rows, length) with `fill`."""
    padded = torch.full((len(rows), length), fill)
    for padded_row, row in zip(padded, rows, strict=True):
        if len(row) > length:
            raise ValueError(
                f"a pack of {len(row)} tokens exceeds the encoder's max_length={length}. Pass the same to OnlinePacker"
            )
        padded_row[: len(row)] = row
    return padded


def _concatenate(parts: Sequence[torch.Tensor], lengths: Sequence[int], fill: int) -> torch.Tensor:
    """Concatenate parts, each padded with `fill` to its length."""
    if all(len(part) == length for part, length in zip(parts, lengths, strict=True)):
        return torch.cat(list(parts))
    return torch.cat([pad_rows([part], fill, length)[0] for part, length in zip(parts, lengths, strict=True)])


def _positions(lengths: list[int]) -> torch.Tensor:
    """Return the positions of tokens in segments of these lengths: 2 and 3 give 0 1 0 1 2."""
    return torch.cat([torch.arange(length) for length in lengths])


def _boundaries(lengths: list[int]) -> torch.Tensor:
    """Return the starts of segments of these lengths, and the end: 2 and 3 give 0 2 5."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
