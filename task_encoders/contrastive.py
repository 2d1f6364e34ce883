"""`ContrastiveEncoder`: pairs of an image and a text, for a loss like that of CLIP."""

from __future__ import annotations

from typing import Any

import torch

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.parts.sample_parts import Field
from task_encoders.parts.square_crop import EARLIER_CROPS, SquareCrop
from task_encoders.parts.token_packing import pad_rows
from task_encoders.parts.tokenizer import Tokenize, Tokenizer, as_tokenizer


class ContrastiveEncoder(TaskEncoder):
    """Learns which text of a batch belongs to which image (Radford et al.: CLIP, 2021).

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all.
        text: The part that holds the text, or the field of a JSON part: "txt", "json[caption]". Where the field is a
            list of texts, one is drawn for each sample and epoch.
        crop: The size and augmentation of the images; by default `SquareCrop()`.
        max_tokens: A longer text is cut to this many tokens, but keeps the text's last token, which models read as the
            end.

    An item has `image`, uint8 (3, size, size), and `tokens`, int64 (n,). A batch of B pairs has `image`, float32 (B, 3,
    size, size), normalized; `tokens`, int64 (B, T), padded; and `lengths`, int64 (B,), the tokens of each text.

    A sample is skipped as "no image" or, without a text or with an empty one, as "no text".

    Raises:
        ValueError: A setting is out of its range, or the field is neither a text nor a list of texts.
        JSONDecodeError: A part is no JSON.
        OSError: An image is damaged.

    Example:
        ```python
        from task_encoders import ContrastiveEncoder, SquareCrop
        samples = sp.TarShardReader("shards/", sp.Lane(), shuffle=False)
        batch = next(sp.Batcher(sp.Encode(samples, ContrastiveEncoder(crop=SquareCrop(32))), size=2))
        batch["image"].shape    # torch.Size([2, 3, 32, 32])
        batch["tokens"].shape   # torch.Size([2, 11])
        batch["lengths"]        # tensor([11, 11])
        ```
    """

    absent_settings = EARLIER_CROPS

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
        """Return one item, or `Skip`."""
        image = self.crop.image(sample, rng)
        if image is None:
            return Skip("no image")
        tokens = self.tokenizer(self._text(sample, rng))
        if len(tokens) == 0:
            return Skip("no text")
        if len(tokens) > self.max_tokens:
            tokens = torch.cat([tokens[: self.max_tokens - 1], tokens[-1:]])
        return {"image": image, "tokens": tokens}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """A batch of B pairs."""
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
