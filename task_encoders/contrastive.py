"""`ContrastiveEncoder`: pairs of an image and a text, for a loss like that of CLIP."""

from __future__ import annotations

from typing import Any

import torch

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.field import Field
from task_encoders.packing import pad_rows
from task_encoders.square_crop import SquareCrop
from task_encoders.tokenizer import Tokenize, Tokenizer, as_tokenizer


class ContrastiveEncoder(TaskEncoder):
    """Tells which text of a batch belongs to which image (Radford et al.: CLIP, 2021).

    `text` is the part or field that holds the text, or a list of texts in JSON of which one is drawn anew for each
    sample and epoch: "txt", "json[caption]", "json[captions]". A text of more than `max_tokens` is cut, and keeps its
    last token, which models read as the end. `tokenizer` is as for `CaptioningEncoder`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        text: str = "txt",
        crop: SquareCrop | None = None,
        max_tokens: int = 77,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is at least 1, not {max_tokens}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.text = Field(text)
        self.crop = crop or SquareCrop()
        self.max_tokens = max_tokens
        self.global_rng = self.crop.global_rng

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """One item: `image`, uint8 (3, size, size); `tokens`, int64 (n,).

        Skips a sample without an image as "no image", one with no text or an empty one as "no text". Raises
        ValueError that names the field where it is neither text nor a list of texts.
        """
        image = self.crop.image(sample)
        if image is None:
            return Skip("no image")
        tokens = self.tokenizer(self._text(sample, rng))
        if len(tokens) == 0:
            return Skip("no text")
        if len(tokens) > self.max_tokens:
            tokens = torch.cat([tokens[: self.max_tokens - 1], tokens[-1:]])
        return {"image": image, "tokens": tokens}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """B pairs. `image`, float32 (B, 3, size, size), normalized; `tokens`, int64 (B, T), padded.

        `lengths`, int64 (B,): the tokens of each text; the last of them is at `lengths - 1`.
        """
        texts = [item["tokens"] for item in items]
        return {
            "image": self.crop.normalize(torch.stack([item["image"] for item in items])),
            "tokens": pad_rows(texts, self.tokenizer.pad, max(map(len, texts))),
            "lengths": torch.tensor([len(text) for text in texts]),
        }

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer by its identity and special ids."""
        own = {"text": self.text.name, "max_tokens": self.max_tokens}
        return {**self.tokenizer.settings(), **self.crop.settings(), **own}

    def _text(self, sample: Sample, rng: Rng) -> str:
        value = self.text.read(sample)
        texts = value if isinstance(value, list) else [value or ""]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.text.name}: expected text or a list of texts, found {value!r:.80}")
        return rng.choice(texts) if texts else ""
