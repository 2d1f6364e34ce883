"""The two small models of the quick start, in plain PyTorch. Each returns the loss of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 259  # the bytes, then the ids of padding, start and end
_DROPOUT = 0.1  # draws from torch's global generator, so a checkpoint must have its state


class Captioner(nn.Module):
    """Model that predicts each letter of a caption from the image (by a CNN), the previous letter and the position."""

    def __init__(self, *, image_size: int, longest_caption: int, width: int = 96) -> None:
        super().__init__()
        self.image_layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, width),
        )
        self.letter = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(longest_caption, width)
        self.predict = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(_DROPOUT), nn.Linear(2 * width, VOCABULARY)
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss per letter, float32 ()."""
        visual = self.image_layers(batch["image"])  # float32 (images, width)
        # Only packs have it, because a row has several captions. -1 is padding, which has no label.
        packed = batch.get("image_index")
        visual = visual[:, None] if packed is None else visual[packed.clamp(min=0)]  # (rows, 1 or tokens, width)
        logits = self.predict(visual + self.letter(batch["tokens"]) + self.position(batch["position_ids"]))
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Transformer(nn.Module):
    """Language model over packs, in which a token attends only to earlier tokens of its own document."""

    def __init__(
        self, *, max_length: int, vocabulary: int = VOCABULARY, width: int = 96, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(max_length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, _DROPOUT, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.predict = nn.Linear(width, vocabulary)

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """Return the input embeddings of the tokens, float32 (rows, tokens, width)."""
        embedded: Tensor = self.token(batch["tokens"]) + self.position(batch["position_ids"])
        return embedded

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss per token, float32 ()."""
        hidden = self.layers(
            self.embed(batch), mask=_attention_mask(batch["position_ids"]).repeat_interleave(self.heads, dim=0)
        )
        return functional.cross_entropy(self.predict(hidden).flatten(0, 1), batch["labels"].flatten())


def _attention_mask(position_ids: Tensor) -> Tensor:
    """Return where a token must not attend: to later tokens and to other documents, bool (rows, tokens, tokens).

    Positions 0 1 2 0 1 are two documents, numbered 1 1 1 2 2.
    """
    document = (position_ids == 0).cumsum(1)
    is_other = document[:, :, None] != document[:, None, :]
    is_later = torch.ones_like(is_other[0]).triu(1)
    return is_other | is_later
