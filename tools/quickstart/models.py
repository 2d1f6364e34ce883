"""The two small models of the quick start: plain PyTorch, each from a batch to its loss. Nothing here loads data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 259  # bytes, then padding, beginning and end
_DROPOUT = 0.1  # draws from torch's own generator, which a checkpoint must therefore hold


class Captioner(nn.Module):
    """A CNN looks at the image; each next letter is told from that, the letter before and its place."""

    def __init__(self, *, image_size: int, longest_caption: int, width: int = 96) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, width),
        )
        self.letter = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(longest_caption, width)
        self.tell = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(_DROPOUT), nn.Linear(2 * width, VOCABULARY)
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The mean loss of a letter, float32 ()."""
        visual = self.look(batch["image"])  # float32 (images, width)
        packed = batch.get("image_index")  # of packs, with several captions a row; -1 is padding, which has no label
        visual = visual[:, None] if packed is None else visual[packed.clamp(min=0)]  # (rows, 1 or tokens, width)
        logits = self.tell(visual + self.letter(batch["tokens"]) + self.position(batch["position_ids"]))
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Transformer(nn.Module):
    """A language model over packs: a token attends to those before it in its own document, never in another's."""

    def __init__(
        self, *, max_length: int, vocabulary: int = VOCABULARY, width: int = 96, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(max_length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, _DROPOUT, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.tell = nn.Linear(width, vocabulary)

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """What the tokens are before they look at each other, float32 (rows, tokens, width)."""
        embedded: Tensor = self.token(batch["tokens"]) + self.position(batch["position_ids"])
        return embedded

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The mean loss of a token, float32 ()."""
        hidden = self.layers(
            self.embed(batch), mask=_forbidden(batch["position_ids"]).repeat_interleave(self.heads, dim=0)
        )
        return functional.cross_entropy(self.tell(hidden).flatten(0, 1), batch["labels"].flatten())


def _forbidden(position_ids: Tensor) -> Tensor:
    """Where a token must not look, bool (rows, tokens, tokens): ahead, and before the start of its document.

    Positions 0 1 2 0 1 are two documents, numbered 1 1 1 2 2.
    """
    document = (position_ids == 0).cumsum(1)
    other = document[:, :, None] != document[:, None, :]
    ahead = torch.ones_like(other[0]).triu(1)
    return other | ahead
