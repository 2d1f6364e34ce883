"""A small transformer with variable-length attention, to compare a batch with its separate documents."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from savable_pipeline.core.rng import Rng
from task_encoders.parts.token_packing import IGNORED


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute float64 (T, width) from the same; i attends to j where `mask`, bool (T, T), is true at (i, j)."""
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(0, 1).flatten(1))
        made: torch.Tensor = x + self.mlp(self.norms[1](x))
        return made


class Transformer(nn.Module):
    """Two blocks on rows of tokens, which know documents by `cu_seqlens` and images by `patch_cu_seqlens`.

    Patches attend to those of their own tile, and each `merge` of them replace an image token.
    """

    def __init__(
        self, *, vocabulary: int = 700, patch: int = 1, merge: int = 1, image_token: int | None = None
    ) -> None:
        super().__init__()
        width = 16
        self.merge, self.image_token = merge, image_token
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(4096, width)
        self.look, self.see = nn.Linear(3 * patch**2, width), Block(width)
        self.blocks, self.head = nn.ModuleList([Block(width), Block(width)]), nn.Linear(width, vocabulary)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Compute logits, float64 (T, vocabulary), for the T tokens of all rows."""
        tokens = batch["tokens"].flatten()
        x = self.tokens(tokens)
        if self.image_token is not None:
            seen = self.see(self.look(batch["patches"].double().flatten(1)), among(batch["patch_cu_seqlens"]))
            x = x.index_put(
                ((tokens == self.image_token).nonzero().flatten(),), seen.unflatten(0, (-1, self.merge)).mean(1)
            )
        x = x + self.positions(batch["position_ids"].flatten())
        rows, length = batch["tokens"].shape
        borders = batch.get("cu_seqlens", torch.arange(rows + 1, dtype=torch.int32) * length)  # a row is a document
        mask = among(borders).tril()
        for block in self.blocks:
            x = block(x, mask)
        logits: torch.Tensor = self.head(x)
        return logits


def among(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return which pairs are in one segment, bool (T, T)."""
    everything = torch.arange(int(cu_seqlens[-1]), dtype=torch.int32)
    segment = torch.searchsorted(cu_seqlens[1:], everything, right=True)
    return segment[:, None] == segment[None, :]


def _starts(lengths: list[int]) -> list[int]:
    """Return the starts of items of these lengths."""
    return [0, *accumulate(lengths)][:-1]


@torch.no_grad()
def assert_packs_equal_documents(encoder: Any, rows: list[list[dict[str, Any]]], **model: Any) -> None:
    """Check that a model computes the same for a batch of packs as for each item alone, up to float error."""
    torch.manual_seed(0)
    transformer = Transformer(**model).double()
    packs = [encoder.pack(row, Rng(7)) for row in rows]
    batch = encoder.batch(packs, Rng(7))
    length = batch["tokens"].shape[1]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"][-1] == batch["tokens"].numel()
    assert batch["max_seqlen"] == batch["cu_seqlens"].diff().max()
    together = transformer(batch)
    alone = [encoder.batch([item], Rng(7)) for row in rows for item in row]
    sizes = [len(item["tokens"]) for row in rows for item in row]
    starts = [length * i + start for i, row in enumerate(rows) for start in _starts([encoder.length(it) for it in row])]
    real = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])

    apart = torch.cat([transformer(each)[:size] for each, size in zip(alone, sizes, strict=True)])
    torch.testing.assert_close(together[real], apart, rtol=0, atol=1e-12)

    labels = torch.cat([item["labels"] for row in rows for item in row])
    assert bool((labels != IGNORED).any())
    torch.testing.assert_close(
        functional.cross_entropy(together, batch["labels"].flatten()), functional.cross_entropy(apart, labels)
    )
